"""The gradients of one group: from the unsharded parameters to the sharded ``.grad``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import _torch
from .collectives import Collectives, DivideFactors, divide_factors
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
        unresolved: Parameters that got no gradient here in the last reduction; whether another
            rank had one is known after the usage exchange at the end of the backward.
        fused: Whether backward products write gradients into ``target`` themselves.
        target: Where they write during this backward, ``None`` outside one.
        adds: Whether ``target`` holds earlier microbatches, so that every write has to add.
        written: Parameters whose gradient lies in ``target`` already.
    """

    params: list[ShardedParam]
    layout: ShardLayout
    dtypes: ResolvedDtypes
    mesh_info: MeshInfo
    options: ReduceOptions = field(default_factory=ReduceOptions)
    unsharded: tuple[nn.Parameter, ...] = ()
    accumulator: Tensor | None = None
    unresolved: list[int] = field(default_factory=list)
    fused: bool = False
    target: ReduceInput | None = None
    adds: bool = False
    written: set[int] = field(default_factory=set)
    _done: set[int] = field(default_factory=set)
    _watched: dict[int, Any] = field(default_factory=dict)
    _used: set[int] = field(default_factory=set)
    _cached_factors: tuple[tuple[int, float | None, bool], DivideFactors] | None = None

    def __post_init__(self) -> None:
        self.shard = GradShard(self.params, self.layout, self.mesh_info)

    # ---- what autograd left ------------------------------------------------------------------

    def present(self) -> bool:
        """Whether any unsharded parameter has a gradient, now or in the accumulator."""
        return (
            self.accumulator is not None
            or bool(self.written)
            or any(p.grad is not None for p in self.unsharded)
        )

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

    def drop(self) -> None:
        """Forgets gradients that were never reduced (after an exception)."""
        for p in self.unsharded:
            p.grad = None
        self.accumulator = None
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
        self.target = None

    def watch(self, index: int) -> None:
        """Notes when autograd has come through with a parameter that leaves no ``.grad``."""
        node = self.params[index].accumulate_node()
        if self._watched.get(index) is not node:
            node.register_prehook(lambda _: self._done.add(index))
            self._watched[index] = node

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
        for p in self.unsharded:
            p.grad = None
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

    def collect(self, target: ReduceInput) -> None:
        """Moves this backward's gradients into a gradient slot; parameters without one give 0."""
        if target.padding:
            _torch.foreach_zero_(target.padding)
        targets, grads = self._pairs(target.views)
        if len(grads) < len(target.views):
            both = zip(target.views, self.unsharded, strict=True)
            missing = [
                view for i, (view, p) in enumerate(both) if p.grad is None and i not in self.written
            ]
            if missing:
                _torch.foreach_zero_(missing)
        if self.written:
            for i, p in enumerate(self.unsharded):  # a weight that is used elsewhere too
                if p.grad is not None and i in self.written:
                    p.grad = p.grad.to(target.views[i].dtype) + target.views[i]
            targets, grads = self._pairs(target.views)
        if targets:
            _torch.foreach_copy_(targets, grads)
        for p in self.unsharded:
            p.grad = None
        self.close()

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
        flat = self.shard.flat
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
        taken = self.shard.prepare(self.dtypes.master, self.unsharded[0].device)
        if taken is None:
            return True
        if not self.shard.pieces:
            self._used |= taken
        return False

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter that had a gradient here."""
        missing = self.shard.hand_out(self._used)
        self.unresolved = [i for i in missing if self.unsharded[i].requires_grad]
        self._used.clear()

    def resolve(self, index: int) -> None:
        """Sets ``.grad`` of a parameter that only other ranks used."""
        self.shard.resolve(index)

    def release_unused(self) -> None:
        """Gives the gradient shard's memory back once every ``.grad`` is ``None``."""
        self.shard.release_unused()
