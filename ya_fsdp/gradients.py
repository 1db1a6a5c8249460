"""The gradients of one group: from the unsharded parameters to the sharded ``.grad``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import _torch
from .collectives import Collectives, DivideFactors, divide_factors
from .layout import ShardLayout
from .mesh import MeshInfo
from .param import ShardedParam
from .precision import ResolvedDtypes
from .ragged import RaggedShardDTensor, new_ragged

_OWN_REFERENCES = 3  # the list, the loop variable and getrefcount's argument


@dataclass
class ReduceOptions:
    """What a user may set about a group's reduction.

    Attributes:
        divide_factor: Divide the sum by this instead of the number of ranks.
        force_sum: Send plain sums even where the back end averages.
        all_reduce: Reduce over the replicate axis too (HSDP); off in some microbatches.
    """

    divide_factor: float | None = None
    force_sum: bool = False
    all_reduce: bool = True


@dataclass
class ReduceInput:
    """A whole-group gradient buffer and its views per parameter and per gap."""

    flat: Tensor
    views: list[Tensor]
    padding: list[Tensor]


@dataclass
class _Storage:
    """One flat gradient shard and the ``.grad`` objects over it."""

    flat: Tensor
    local: list[Tensor]
    objects: list[RaggedShardDTensor]
    uses: int = 0

    def exclusive(self) -> bool:
        """Whether nobody but us refers to the objects or to their memory."""
        if any(sys.getrefcount(o) > _OWN_REFERENCES for o in self.objects):
            return False
        if any(sys.getrefcount(t) > _OWN_REFERENCES + 1 for t in self.local):
            return False
        return _torch.storage_use_count(self.flat) == self.uses


@dataclass
class GroupGradients:
    """Collects, reduces and hands out one group's gradients.

    Attributes:
        unsharded: The group's unsharded parameters, in order; autograd writes their ``.grad``.
        accumulator: Whole-group gradients in the reduce dtype while communication is off.
        unresolved: Parameters that got no gradient here in the last reduction; whether another
            rank had one is known after the usage exchange at the end of the backward.
    """

    params: list[ShardedParam]
    layout: ShardLayout
    dtypes: ResolvedDtypes
    mesh_info: MeshInfo
    options: ReduceOptions = field(default_factory=ReduceOptions)
    unsharded: tuple[nn.Parameter, ...] = ()
    accumulator: Tensor | None = None
    unresolved: list[int] = field(default_factory=list)
    _used: set[int] = field(default_factory=set)
    _storage: _Storage | None = None
    _cached_factors: tuple[tuple[int, float | None, bool], DivideFactors] | None = None

    # ---- what autograd left ------------------------------------------------------------------

    def present(self) -> bool:
        """Whether any unsharded parameter has a gradient, now or in the accumulator."""
        return self.accumulator is not None or any(p.grad is not None for p in self.unsharded)

    @property
    def trainable(self) -> bool:
        """Whether any unsharded parameter wants a gradient now."""
        return any(p.requires_grad for p in self.unsharded)

    def expected(self) -> list[int]:
        """Trainable parameters without a gradient that the running backward will still reach."""
        return [
            i
            for i, p in enumerate(self.unsharded)
            if p.grad is None
            and p.requires_grad
            and _torch.will_execute(self.params[i].accumulate_node())
        ]

    def drop(self) -> None:
        """Forgets gradients that were never reduced (after an exception)."""
        for p in self.unsharded:
            p.grad = None
        self.accumulator = None
        self._used.clear()

    def reset(self, dtypes: ResolvedDtypes) -> None:
        """Starts anew after the parameters changed dtype or device."""
        self.dtypes = dtypes
        self._storage = None

    def accumulate(self, device: torch.device) -> None:
        """Adds this backward's gradients to the whole-group accumulator (no communication)."""
        if self.accumulator is None:
            self.accumulator = torch.zeros(
                self.layout.total_numel, dtype=self.dtypes.reduce, device=device
            )
        targets, grads = self._pairs(self.cut(self.accumulator).views)
        if targets:
            wide = [g.to(self.dtypes.reduce) for g in grads]
            _torch.foreach_add_(targets, wide)
        for p in self.unsharded:
            p.grad = None

    def cut(self, flat: Tensor) -> ReduceInput:
        """Views of every parameter and of the padding in a whole-group buffer."""
        views = [
            flat[s.offset : s.offset + s.numel].view(p.shape)
            for p, s in zip(self.params, self.layout.spans, strict=True)
        ]
        padding = [flat[a:b] for a, b in self.layout.padding_ranges()]
        return ReduceInput(flat, views, padding)

    def collect(self, target: ReduceInput) -> None:
        """Moves this backward's gradients into a gradient slot; parameters without one give 0."""
        if target.padding:
            _torch.foreach_zero_(target.padding)
        targets, grads = self._pairs(target.views)
        if len(grads) < len(target.views):
            missing = zip(target.views, self.unsharded, strict=True)
            _torch.foreach_zero_([view for view, p in missing if p.grad is None])
        if targets:
            _torch.foreach_copy_(targets, grads)
        for p in self.unsharded:
            p.grad = None

    def _pairs(self, views: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views and gradients of the parameters that have one; remembers which they were."""
        targets: list[Tensor] = []
        grads: list[Tensor] = []
        for index, p in enumerate(self.unsharded):
            grad = p.grad
            if grad is not None:
                targets.append(views[index])
                grads.append(grad)
                self._used.add(index)
        return targets, grads

    # ---- reduction, on the communication stream ------------------------------------------------

    def reduce(self, reduce_input: Tensor, fresh: bool, collectives: Collectives) -> None:
        """Reduce-scatters ``reduce_input`` and adds the result to the flat gradient shard.

        Args:
            reduce_input: The whole group's gradients in the reduce dtype; overwritten.
            fresh: What :meth:`prepare` returned.
            collectives: The back end.
        """
        info = self.mesh_info
        assert self._storage is not None, "prepare() comes first"
        flat = self._storage.flat
        factors = self._factors(collectives)
        size = self.layout.shard_numel
        own = reduce_input[info.shard_rank * size : (info.shard_rank + 1) * size]
        direct = fresh and self.dtypes.reduce == self.dtypes.master
        out = flat if direct else own
        if factors.pre != 1.0:
            reduce_input.div_(factors.pre)
        if info.shard_size > 1:
            collectives.reduce_scatter(out, reduce_input, factors.average, info.shard_group)
        elif direct:
            out.copy_(own)
        if info.replicate_group is not None and self.options.all_reduce:
            op = "avg" if factors.average else "sum"
            collectives.all_reduce(out, op, info.replicate_group)
        if factors.post != 1.0:
            out.div_(factors.post)
        if not direct:
            if fresh:
                flat.copy_(own)
            else:
                flat.add_(own)

    def _factors(self, collectives: Collectives) -> DivideFactors:
        info, options = self.mesh_info, self.options
        key = (id(collectives), options.divide_factor, options.force_sum)
        if self._cached_factors is None or self._cached_factors[0] != key:
            supported = collectives.supports_average(info.shard_group, self.dtypes.reduce)
            factors = divide_factors(
                info.shard_size * info.replicate_size,
                self.dtypes.reduce,
                factor=options.divide_factor,
                average_supported=supported,
                force_sum=options.force_sum,
            )
            self._cached_factors = (key, factors)
        return self._cached_factors[1]

    def prepare(self) -> bool:
        """Makes sure the flat gradient shard can be written; returns whether it starts empty.

        Called on the compute stream, to whose pool the memory belongs.
        """
        storage = self._storage
        grads = [p.sharded.grad for p in self.params]
        if all(g is None for g in grads):
            if storage is None or not storage.exclusive():
                self._storage = self._new_storage()
            else:
                _resize(storage.flat, storage.flat.numel())
            return True
        if storage is None:
            storage = self._storage = self._new_storage()
            storage.flat.zero_()
        for i, grad in enumerate(grads):
            ours = storage.objects[i]
            if grad is None:
                storage.local[i].zero_()
            elif grad is not ours:
                storage.local[i].copy_(getattr(grad, "_local_tensor", grad))
                self.params[i].sharded.grad = None
                self._used.add(i)
        return False

    def _new_storage(self) -> _Storage:
        with torch.inference_mode(False), torch.no_grad():
            info = self.mesh_info
            flat = torch.empty(
                self.layout.shard_numel,
                dtype=self.dtypes.master,
                device=self.unsharded[0].device,
            )
            local, objects = [], []
            for i, param in enumerate(self.params):
                start, end = self.layout.local_range(info.shard_rank, i)
                view = flat[start:end].view(param.sharded._local_tensor.shape)  # type: ignore[attr-defined]
                placements = info.placements(self.layout.bounds(i), param.shape)
                local.append(view)
                objects.append(new_ragged(view, info.mesh, placements, param.shape))
            storage = _Storage(flat, local, objects)
            storage.uses = _torch.storage_use_count(flat)
            return storage

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter that had a gradient here."""
        assert self._storage is not None
        self.unresolved = []
        for index, param in enumerate(self.params):
            if param.sharded.grad is None:
                if index in self._used:
                    param.sharded.grad = self._storage.objects[index]
                elif self.unsharded[index].requires_grad:
                    self.unresolved.append(index)
        self._used.clear()

    def resolve(self, index: int) -> None:
        """Sets ``.grad`` of a parameter that only other ranks used."""
        assert self._storage is not None
        self.params[index].sharded.grad = self._storage.objects[index]

    def release_unused(self) -> None:
        """Gives the gradient shard's memory back once every ``.grad`` is ``None``."""
        storage = self._storage
        if storage is None or any(p.sharded.grad is not None for p in self.params):
            return
        if storage.exclusive():
            _resize(storage.flat, 0)
        else:
            self._storage = None


def _resize(flat: Tensor, numel: int) -> None:
    """Frees (0) or takes again the memory behind a tensor and all its views."""
    storage = flat.untyped_storage()
    num_bytes = numel * flat.dtype.itemsize
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)
