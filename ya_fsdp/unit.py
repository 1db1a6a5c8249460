"""A unit: the modules of one ``fully_shard`` call and the groups that travel together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import _torch
from .buffers import Slot, aligned
from .collectives import Collectives, check_use, default_collectives, fp32_accumulating
from .flat_gradient import check_optimizer
from .group import ParamGroup
from .precision import MixedPrecisionPolicy
from .ragged import match_optimizer_state
from .secondary import PartShard, SecondaryShard, check_divides, check_reshard, resolve_reshard

STALE_VERSION = 1 << 20
"""Version counters of parameters whose slot was overwritten start here, so that autograd's message
("is at version 1048576") can be looked up in the troubleshooting page."""


_KINDS: dict[object, int] = {}


_RINGS: dict[tuple[int, ...], int] = {}


def ring_of(group: dist.ProcessGroup) -> int:
    """A number for a process group's ranks; units of different ones share no buffers."""
    return _RINGS.setdefault(tuple(dist.get_process_group_ranks(group)), len(_RINGS))


_steps: list[int] = []


def optimizer_steps() -> int:
    """Steps of any optimizer since :func:`watch_optimizers` was first called."""
    return _steps[0] if _steps else 0


def watch_optimizers() -> None:
    """Counts optimizer steps from here on."""

    def count(*_: Any) -> None:
        _steps[0] += 1

    if not _steps:
        _steps.append(0)
        register_optimizer_step_post_hook(count)


def versions_of_weights(units: Iterable[Unit]) -> int:
    """A number that grows whenever an optimizer changes any of the units' weights."""
    return sum(
        g.master_shard._version + g.params[0].sharded._version for u in units for g in u.groups
    )


@cache
def watch_loaded_state() -> None:
    """Lets optimizers cut state that was loaded like its parameters before their next step."""
    register_optimizer_step_pre_hook(_adopt_loaded_state)


def _adopt_loaded_state(optimizer: Any, *_: Any) -> None:
    # load_state_dict puts another dict there, of whole or evenly sharded tensors if that is what
    # it was given.
    seen = getattr(optimizer, "_ya_fsdp_adopted", None)
    if seen is not optimizer.state and not torch.compiler.is_compiling():
        check_optimizer(optimizer)
        match_optimizer_state(optimizer)
        optimizer._ya_fsdp_adopted = optimizer.state


class Phase(IntEnum):
    """What a unit is doing. Integers, whose hash needs no Python call on the hot path."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    FORWARD_IN_BACKWARD = 3


LEGAL_CHANGES = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.IDLE),
    (Phase.BACKWARD, Phase.FORWARD_IN_BACKWARD),  # activation checkpointing recomputes
    (Phase.FORWARD_IN_BACKWARD, Phase.BACKWARD),
    (Phase.FORWARD_IN_BACKWARD, Phase.FORWARD),  # a backward inside forward ends
    (Phase.FORWARD, Phase.FORWARD_IN_BACKWARD),  # torch.autograd.grad inside forward
}


class EarlyStep(Protocol):
    """An optimizer that steps as soon as a unit's gradients are reduced."""

    def refuse_again(self) -> None:
        """Raises if it has stepped in this iteration."""

    def step(self) -> None:
        """Uses the reduced gradients, if they are all there."""

    def reset(self) -> None:
        """Forgets the iteration."""


class Unit:
    """State of one managed module (or list of modules).

    Attributes:
        fqn: Name for messages.
        groups: Homogeneous groups; their collectives are issued together.
        kind: A number for the groups' layouts and dtypes; units of one kind have their padding in
            the same places.
        slot: The gather slot this unit's parameters are views of; fixed while a backward is due.
        phase: See :class:`Phase`.
        ring: See :func:`ring_of`.
        buffer: Name of the gather slot that the user chose, ``None`` for none.
        held: Whether the user asked for the parameters with ``unshard()``.
        switched: Whether modules hold the unsharded parameters now.
        kept: Whether the last backward left the unit gathered, on the user's request.
        early: What steps its parameters in the backward, if anything.
    """

    def __init__(
        self, fqn: str, groups: Sequence[ParamGroup], policy: MixedPrecisionPolicy
    ) -> None:
        self.fqn = fqn
        self.groups = tuple(groups)
        kind = tuple((g.layout, g.dtypes) for g in self.groups)
        self.kind = _KINDS.setdefault(kind, len(_KINDS))
        self.policy = policy
        self.ring = ring_of(groups[0].mesh_info.shard_group) if groups else 0
        self.buffer: Hashable = None
        self.slot: Slot | None = None
        self.phase = Phase.IDLE
        self.held = False
        self.switched = False
        self.kept = False
        self.gathered_at = 0  # optimizer steps by then; fused ones change weights unnoticed
        self.pending_backward = 0
        self.calls = 0
        self.position = 0
        self.backward_position = 0
        self.guarded = False
        self.depth = 0
        self.fused = False
        self.index = 0
        self.mark = 0  # see agreement.mark_of
        self.marked_as = ""
        self.forward_stamp = -1
        self.noted: list[tuple[tuple[int, ...], Any]] | None = None
        self.gather_event: Any = None
        self.gather_pending = False
        self.free_event: Any = None
        self.unequal: tuple[ParamGroup, ...] = ()  # on meta: replicas get equal before a gather
        self.collectives: Collectives | None = None
        self.on_forget: Callable[[Unit], None] | None = None
        self.early: EarlyStep | None = None
        # What a user may set.
        self.reshard_after_forward = True
        levels = groups[0].mesh_info.levels if groups else None
        self.secondary: SecondaryShard | None = PartShard(levels) if levels else None
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.sync_gradients = True
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None

    @property
    def in_use(self) -> bool:
        """Whether somebody computes with the gathered parameters."""
        return self.phase is not Phase.IDLE or self.held

    def change(self, phase: Phase) -> None:
        """Moves to another phase; an illegal change is a defect and names the unit."""
        if phase is not self.phase:
            if (self.phase, phase) not in LEGAL_CHANGES:
                raise RuntimeError(
                    f"unit '{self.fqn}' can not go from {self.phase.name} to {phase.name}"
                )
            self.phase = phase

    def measure(self) -> None:
        """Learns how large a gather slot has to be; every rank does so at the same time."""
        for group in self.groups:
            group.measure()

    @property
    def gather_bytes(self) -> int:
        """Bytes of a gather slot that holds all groups."""
        return sum(aligned(g.gather_bytes) for g in self.groups)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient slot that holds all groups."""
        return sum(aligned(g.reduce_bytes) for g in self.groups)

    def bind(self, slot: Slot) -> None:
        """Cuts every group's views out of ``slot``."""
        if self.slot is not None and self.slot.content is self:
            self.slot.content = None
        self.slot = slot
        self.guarded = False  # parameters may be other objects from here on
        self._forget_secondary()
        offset = 0
        for group in self.groups:
            group.bind_slot(slot, offset)
            offset += aligned(group.gather_bytes)

    def reshard_after(self, reshard: bool, ranks: dist.ProcessGroup | None) -> None:
        """Sets what happens after forward; see :func:`ya_fsdp.secondary.resolve_reshard`."""
        self.reshard_after_forward = reshard
        if self.secondary is not None and self.secondary.permanent:
            return
        if ranks is None:
            self.secondary = None
        elif self.secondary is None or self.secondary.group is not ranks:
            self.secondary = SecondaryShard(ranks)

    def _forget_secondary(self) -> None:
        if self.secondary is not None:
            self.secondary.stamp = -1

    def sync_replicas(self) -> None:
        """Makes values equal on all replicas, now or as soon as there are any."""
        self.unequal = tuple(group for group in self.groups if not group.sync_replicas())

    def to_unsharded(self) -> None:
        """Modules hold the unsharded parameters from here on."""
        if not self.switched:
            self.switched = True  # first, so that an interrupt in between is undone
            for group in self.groups:
                group.to_unsharded()

    def to_sharded(self, may_have_changed: bool = True) -> None:
        """Modules hold the sharded parameters from here on.

        Args:
            may_have_changed: Whether user code may have set ``requires_grad`` meanwhile.
        """
        if self.switched:
            for group in self.groups:
                group.to_sharded(may_have_changed)
            self.switched = False

    def note_values(self, *, with_copy: bool) -> None:
        """Remembers what the unsharded parameters hold, for :meth:`refuse_lost_writes`.

        Args:
            with_copy: Compare values too, which finds writes through ``.data``.
        """
        self.noted = [group.values_now(with_copy=with_copy) for group in self.groups]

    def refuse_lost_writes(self) -> None:
        """Raises if unsharded parameters were written since :meth:`note_values`.

        Raises:
            RuntimeError: Names the first parameter; the written values are lost.
        """
        noted, self.noted = self.noted, None
        if noted is None:
            return
        for group, (versions, copy) in zip(self.groups, noted, strict=True):
            fqn = group.written_since(versions, copy)
            if fqn is not None:
                raise RuntimeError(
                    f"parameter '{fqn}' was written while it was gathered; the new values are "
                    "lost, since they never reach its shards. Write to the sharded parameter "
                    "(after reshard(), with torch.no_grad()), or load them with load_state_dict."
                )

    def drop_gradients(self) -> None:
        """Forgets gradients that were never reduced (after an exception)."""
        for group in self.groups:
            group.grads.drop()

    def mark_stale(self) -> None:
        """The slot goes to another unit: a backward that still needs the old bytes must raise."""
        for group in self.groups:
            group.mark_stale(STALE_VERSION + self.index)

    def is_current(self) -> bool:
        """Whether no in-place operation and no optimizer changed weights since the gather."""
        return self.gathered_at == optimizer_steps() and all(g.is_current() for g in self.groups)

    def readopt_if_replaced(self) -> None:
        """Notices parameters that user code put into a module since the last gather."""
        replaced = [group for group in self.groups if group.replaced()]
        for group in replaced:
            group.check_sites()
        for group in replaced:
            group.adopt_assigned()
            self._forget_secondary()


def use_collectives(units: Sequence[Unit], collectives: Collectives | None) -> None:
    """Lets units communicate through ``collectives`` (``None``: the root's) as their policies ask.

    Raises:
        RuntimeError: If a unit is in use or owes a backward, which needs its buffer; nothing is
            changed then.
    """
    for unit in units:
        if unit.in_use or unit.pending_backward:
            raise RuntimeError(
                f"unit '{unit.fqn}' is in use; set collectives between steps, not between forward "
                "and backward or after unshard()"
            )
        for group in unit.groups:
            check_use(collectives, group.device, group.mesh_info.shard_group)
    for unit in units:
        unit.collectives = collectives
        if unit.policy.bit32_acc_for_bit16_reduce_scatter:
            unit.collectives = fp32_accumulating(collectives or default_collectives())


def reshard_units(units: Sequence[Unit], value: bool | int) -> None:
    """Sets ``reshard_after_forward`` of several units, or of none if it does not fit one.

    Raises:
        TypeError: If it is neither a bool nor an int.
        ValueError: If as an int it does not divide a unit's ranks.
    """
    if value is None:
        raise TypeError("reshard_after_forward must be a bool or an int, got None")
    check_reshard(value)
    units = [unit for unit in units if unit.groups]
    if not isinstance(value, bool):
        for unit in units:
            check_divides(value, unit.groups[0].mesh_info, f"unit '{unit.fqn}'")
    for unit in units:
        where = f"unit '{unit.fqn}'"
        unit.reshard_after(*resolve_reshard(value, unit.groups[0].mesh_info, where))


def refuse_thread(unit: Unit) -> NoReturn:
    """Raises because a second thread runs units while a first one is inside their root's forward.

    Raises:
        RuntimeError: Names the unit.
    """
    raise RuntimeError(
        f"unit '{unit.fqn}' was called in thread '{threading.current_thread().name}' while another "
        "thread is inside a forward under the same root. Collectives have to start in one order "
        "on every rank, so one thread at a time runs a sharded model: wait for the other one, or "
        "give each thread a model of its own."
    )


def refuse_left_behind(units: Sequence[Unit]) -> None:
    """Raises if gradients lie at parameters that no backward pass of ours has seen.

    Raises:
        RuntimeError: Names the unit; the gradients are gone, so that training can go on.
    """
    with _torch.without_torch_function():
        found = [u for u in units if any(g.grads.left_behind() for g in u.groups)]
    if not found:
        return
    for unit in found:
        unit.drop_gradients()
    raise RuntimeError(
        f"a backward pass reached parameters of unit '{found[0].fqn}' but no output of any unit, "
        "so their gradients were not reduced and the last step went without them. Return the "
        "tensors from which the loss is made from the module's forward."
    )
