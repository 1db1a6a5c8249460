"""The gradients of one group: from the unsharded parameters to the sharded ``.grad``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import _torch
from .buffers import same_memory
from .collectives import Collectives, DivideFactors, divide_factors, dividing
from .grad_shard import GradShard
from .layout import ShardLayout
from .mesh import MeshInfo
from .param import ShardedParam
from .precision import ResolvedDtypes


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
class GroupGradients:
    """Collects, reduces and hands out one group's gradients.

    Attributes:
        unsharded: The group's unsharded parameters, in order; autograd writes their ``.grad``.
        accumulator: Whole-group gradients in the reduce dtype while communication is off.
        partial: This rank's sums over the shard axis, in the dtype they were made in, while those
            over the replicate axis are off.
        unresolved: Parameters that got no gradient here in the last reduction; whether another
            rank had one is known after the usage exchange at the end of the backward.
        fused: Whether backward products write gradients into ``target`` themselves.
        target: Where they write during this backward, ``None`` outside one.
        adds: Whether ``target`` holds earlier microbatches, so that every write has to add.
        taken: Gradients moved off the unsharded parameters and not reduced yet.
        written: Parameters whose gradient lies in ``target`` already.
    """

    params: list[ShardedParam]
    layout: ShardLayout
    dtypes: ResolvedDtypes
    mesh_info: MeshInfo
    options: ReduceOptions = field(default_factory=ReduceOptions)
    unsharded: tuple[nn.Parameter, ...] = ()
    accumulator: Tensor | None = None
    partial: Tensor | None = None
    unresolved: list[int] = field(default_factory=list)
    fused: bool = False
    target: ReduceInput | None = None
    adds: bool = False
    taken: list[Tensor | None] | None = None
    written: set[int] = field(default_factory=set)
    _done: set[int] = field(default_factory=set)
    _watched: dict[int, Any] = field(default_factory=dict)
    _used: set[int] = field(default_factory=set)
    _cached_factors: tuple[tuple[Collectives, float | None, bool], DivideFactors] | None = None

    def __post_init__(self) -> None:
        self.shard = GradShard(self.params, self.layout, self.mesh_info)

    # ---- what autograd left ------------------------------------------------------------------

    def present(self) -> bool:
        """Whether there is any gradient to reduce; after :meth:`take`."""
        if self.accumulator is not None or self.written:
            return True
        if self.partial is not None and self.options.all_reduce:
            return True
        return self.taken is not None and any([g is not None for g in self.taken])

    def take(self) -> None:
        """Moves autograd's gradients off the unsharded parameters."""
        if self.taken is None:
            with _torch.without_torch_function():  # they may be released already
                self.taken = [p.grad for p in self.unsharded]
                for p in self.unsharded:
                    p.grad = None
            if self.params[0].tensor_parallel is not None:
                pairs = zip(self.params, self.taken, strict=True)
                self.taken = [param.part_of_gradient(grad) for param, grad in pairs]

    @property
    def holds_microbatches(self) -> bool:
        """Whether gradients of earlier backward passes wait for their communication."""
        return self.accumulator is not None or self.partial is not None

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
            and i not in self._done
            and _torch.will_execute(self.params[i].accumulate_node())
        ]

    def left_behind(self) -> bool:
        """Whether gradients lie here that no backward pass of ours has seen."""
        return any([p.grad is not None for p in self.unsharded])

    def watch_arrivals(self, arrived: Callable[[nn.Parameter], None], *, all_of_them: bool) -> None:
        """Calls ``arrived`` when autograd has added to one or every trainable parameter's grad."""
        for p in self.unsharded:
            if p.requires_grad:
                if not hasattr(p, "_ya_fsdp_watched"):
                    p.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
                    p._ya_fsdp_watched = True  # type: ignore[attr-defined]
                if not all_of_them:
                    return

    def drop(self) -> None:
        """Forgets gradients that were never reduced (after an exception)."""
        with _torch.without_torch_function():
            for p in self.unsharded:
                p.grad = None
        self.taken = None
        self.accumulator = None
        self.partial = None
        self.close()
        self._used.clear()

    def open(self, target: ReduceInput, adds: bool) -> None:
        """Lets backward products write into ``target`` from now on."""
        self.target = target
        self.adds = adds
        self._done.clear()

    def close(self) -> None:
        """Ends :meth:`open`; what was written counts as used."""
        self._used |= self.written
        self.written.clear()
        self._watched.clear()
        self.target = None

    def watch(self, index: int) -> None:
        """Notes when autograd has come through with a parameter that leaves no ``.grad``."""
        node = self.params[index].accumulate_node()
        if self._watched.get(index) is not node:
            node.register_prehook(lambda _: self._done.add(index))
            self._watched[index] = node

    def wanted(self, index: int) -> bool | None:
        """Whether the running backward adds to a parameter's gradient; ``None``: returns it."""
        node = self._watched.get(index) or self.params[index].accumulate_node()
        return _torch.wants_gradient(node)

    def reset(self, dtypes: ResolvedDtypes) -> None:
        """Starts anew after the parameters changed dtype or device."""
        self.dtypes = dtypes
        self.shard.forget()
        if self.accumulator is not None:
            self.accumulator = self.accumulator.to(dtypes.reduce)

    def accumulate(self, device: torch.device) -> None:
        """Adds this backward's gradients to the whole-group accumulator (no communication)."""
        accumulator = self.start_accumulator(device)
        targets, grads = self._pairs(self.cut(accumulator).views)
        if targets:
            wide = [g.to(self.dtypes.reduce) for g in grads]
            _torch.foreach_add_(targets, wide)
        self.taken = None
        self.close()

    def start_accumulator(self, device: torch.device) -> Tensor:
        """The whole-group accumulator, zero at first."""
        if self.accumulator is None:
            self.accumulator = torch.zeros(
                self.layout.total_numel, dtype=self.dtypes.reduce, device=device
            )
        return self.accumulator

    def cut(self, flat: Tensor) -> ReduceInput:
        """Views of every parameter and of the padding in a whole-group buffer."""
        views = [
            flat[s.offset : s.offset + s.numel].view(p.shape)
            for p, s in zip(self.params, self.layout.spans, strict=True)
        ]
        padding = [flat[a:b] for a, b in self.layout.padding_ranges()]
        return ReduceInput(flat, views, padding)

    def collect(self, target: ReduceInput, clear_padding: bool) -> None:
        """Moves this backward's gradients into a gradient slot; parameters without one give 0.

        Args:
            target: The slot's views.
            clear_padding: Whether the gaps between parameters hold anything but zeros.
        """
        if target.padding and clear_padding:
            _torch.foreach_zero_(target.padding)
        if self.written and self.taken is not None:
            for i in self.written:  # a weight that is used elsewhere too
                grad = self.taken[i]
                if grad is not None:
                    self.taken[i] = grad.to(target.views[i].dtype) + target.views[i]
        targets, grads = self._pairs(target.views)
        if len(grads) < len(target.views):
            missing = [
                view
                for i, (view, grad) in enumerate(zip(target.views, self.taken or [], strict=True))
                if grad is None and i not in self.written
            ]
            if missing:
                _torch.foreach_zero_(missing)
        if targets:
            _torch.foreach_copy_(targets, grads)
        self.taken = None
        self.close()

    def _pairs(self, views: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views and gradients of the parameters that have one; remembers which they were."""
        taken = self.taken or []
        present = [i for i, grad in enumerate(taken) if grad is not None]
        self._used.update(present)
        if len(present) == len(views):
            return views, taken  # type: ignore[return-value]
        return [views[i] for i in present], [taken[i] for i in present]  # type: ignore[misc]

    # ---- reduction, on the communication stream ------------------------------------------------

    def reduce(self, reduce_input: Tensor, fresh: bool, collectives: Collectives) -> Tensor | None:
        """Reduce-scatters ``reduce_input`` and adds the result to the flat gradient shard.

        Args:
            reduce_input: The whole group's gradients in the reduce dtype; overwritten.
            fresh: What :meth:`prepare` returned.
            collectives: The back end.

        Returns:
            Sums over the shard axis that :meth:`reduce_across` has to take further, or ``None``.
        """
        factors = self._factors(collectives)
        if factors.pre != 1.0 and not factors.by_collective:
            reduce_input.div_(factors.pre)
        out = self._sums(reduce_input, fresh, factors, collectives)
        if self.partial is not None:
            out.add_(self.partial)
            self.partial = None
        if self._stays_partial:
            self.partial = out.clone() if same_memory(out, reduce_input) else out
            return None
        if self.mesh_info.outer_size > 1:
            return out
        self._store(out, fresh, factors.post)
        return None

    def _sums(
        self, reduce_input: Tensor, fresh: bool, factors: DivideFactors, collectives: Collectives
    ) -> Tensor:
        """Sums over the shard axis, in the flat gradient shard if they may go there at once."""
        info = self.mesh_info
        if info.levels is not None:
            return info.levels.sum_inside(
                reduce_input, self._sum_dtype(collectives), factors.average, collectives
            )
        size = self.layout.shard_numel
        own = reduce_input[info.shard_rank * size : (info.shard_rank + 1) * size]
        out = self._target(own, fresh and not self._stays_partial, collectives)
        if info.shard_size > 1:
            self._reduce_scatter(out, reduce_input, factors, collectives)
        elif out is not own:
            out.copy_(own)
        return out

    def _target(self, own: Tensor, fresh: bool, collectives: Collectives) -> Tensor:
        """Where final sums go: the flat gradient shard, ``own``, or new memory."""
        wide = self._sum_dtype(collectives)
        if fresh and wide == self.dtypes.master:
            return self.shard.flat
        return own if own.dtype == wide else torch.empty_like(own, dtype=wide)

    def reduce_across(self, sums: Tensor, fresh: bool, collectives: Collectives) -> None:
        """Ends a reduction over the replicas.

        Args:
            sums: What :meth:`reduce` returned; overwritten.
            fresh: What :meth:`prepare` returned.
            collectives: The back end.
        """
        info, factors = self.mesh_info, self._factors(collectives)
        assert info.outer_group is not None
        if info.levels is None:
            op = "avg" if factors.average else "sum"
            collectives.all_reduce(sums, op, info.outer_group)
        else:
            own = info.levels.own(sums)
            out = self._target(own, fresh, collectives)
            collectives.reduce_scatter(out, sums, factors.average, info.outer_group)
            sums = out
        self._store(sums, fresh, factors.post)

    def _store(self, out: Tensor, fresh: bool, divisor: float) -> None:
        if divisor != 1.0:
            out.div_(divisor)
        if out is not self.shard.flat:
            if fresh:
                self.shard.flat.copy_(out)
            else:
                self.shard.flat.add_(out)

    def _reduce_scatter(
        self, out: Tensor, reduce_input: Tensor, factors: DivideFactors, collectives: Collectives
    ) -> None:
        group = self.mesh_info.shard_group
        if factors.by_collective:
            offers = dividing(collectives, group, self.dtypes.reduce)
            assert offers is not None
            offers.reduce_scatter_divided(out, reduce_input, factors.pre, group)
        else:
            collectives.reduce_scatter(out, reduce_input, factors.average, group)

    def _sum_dtype(self, collectives: Collectives) -> torch.dtype:
        """Dtype of the sums over ranks: the reduce dtype, or a wider one where it is offered."""
        if self.mesh_info.shard_size == 1:
            return self.dtypes.reduce
        return collectives.accumulation_dtype(self.dtypes.reduce)

    @property
    def _stays_partial(self) -> bool:
        """Whether sums over the shard axis wait for later ones before they meet the replicas'."""
        return not self.options.all_reduce and self.mesh_info.outer_group is not None

    def _factors(self, collectives: Collectives) -> DivideFactors:
        info, options = self.mesh_info, self.options
        key = (collectives, options.divide_factor, options.force_sum)
        if self._cached_factors is None or self._cached_factors[0] != key:
            supported = collectives.supports_average(info.shard_group, self.dtypes.reduce)
            divides = dividing(collectives, info.shard_group, self.dtypes.reduce) is not None
            factors = divide_factors(
                info.shard_size * info.replicate_size,
                self._sum_dtype(collectives),
                factor=options.divide_factor,
                average_supported=supported,
                divisor_supported=divides and info.shard_size > 1 and info.levels is None,
                force_sum=options.force_sum,
            )
            self._cached_factors = (key, factors)
        return self._cached_factors[1]

    def prepare(self, device: torch.device) -> bool:
        """Makes sure the flat gradient shard can be written; returns whether it starts empty.

        Called on the compute stream, to whose pool the memory belongs.
        """
        if self._stays_partial:
            return True
        taken = self.shard.prepare(self.dtypes.master, device)
        if taken is None:
            return True
        if not self.shard.pieces:
            self._used |= taken
        return False

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter that had a gradient here."""
        self.unresolved = []
        if self._stays_partial:
            return
        missing = self.shard.hand_out(self._used)
        self.unresolved = [i for i in missing if self.unsharded[i].requires_grad]
        self._used.clear()

    def resolve(self, index: int) -> None:
        """Sets ``.grad`` of a parameter that only other ranks used."""
        self.shard.resolve(index)

    def release_unused(self) -> None:
        """Gives the gradient shard's memory back once every ``.grad`` is ``None``."""
        self.shard.release_unused()
