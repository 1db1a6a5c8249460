"""Sends gradients on their way: gradient slots, reductions, and what waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _torch
from .agreement import NUM_MARKS, Kind, Trail, spread
from .buffers import Slot, aligned
from .collectives import Collectives, allocator_of
from .gradients import ReduceInput
from .group import ParamGroup
from .mesh import MeshInfo
from .pool import new_slot
from .reserve import Reserve
from .streams import Streams
from .unit import Unit


class Reducer:
    """Reduces units' gradients through a few gradient slots used in turn.

    Attributes:
        num_buffers: Gradient slots; with one, the next unit's gradients wait for the reduction
            before they move into it. One, unless backward products write into the slots.
        exchange_usage: Whether ranks tell each other at the end of a backward which parameters had
            a gradient, so that one used on some ranks only gets its average everywhere.
        keep_buffers: Whether the slots' memory stays between backward passes.
        accumulating: Units that hold unreduced gradients of microbatches without communication.
    """

    def __init__(
        self, streams: Streams, collectives: Collectives, trail: Trail, reserve: Reserve
    ) -> None:
        self.streams = streams
        self.trail = trail
        self.reserve = reserve
        self.collectives = collectives
        self.num_buffers = 1
        self.chosen_buffers: int | None = None
        self.exchange_usage = True
        self.keep_buffers = not streams.asynchronous
        self.accumulating: set[Unit] = set()
        self.slots: list[Slot] = []
        self._open: dict[Unit, Slot] = {}
        self._slot_bytes = 0
        self._touched: list[Unit] = []
        self._in_flight: list[Tensor] = []
        self._ready_event: Any = None
        self._flags: dict[tuple[int, int], Tensor] = {}

    def size_for(self, units: Sequence[Unit]) -> None:
        """Sets the slots' number, and their size to the largest unit's gradients."""
        self.num_buffers = self.chosen_buffers or (2 if any(u.fused for u in units) else 1)
        size = max((u.reduce_bytes for u in units), default=0)
        if size != self._slot_bytes:
            self._slot_bytes = size
            self.drop_slots()

    def drop_slots(self) -> None:
        """Forgets the slots; the next reduction makes new ones."""
        self.slots.clear()
        self._flags.clear()

    def reset(self) -> None:
        """After an exception: nothing is in flight that anybody waits for."""
        self.trail.go_on_after_exception()
        self.streams.comm_waits_for_across()
        self.streams.compute_waits_for_comm()
        for unit in self._touched:
            if unit.early is not None:
                unit.early.reset()
        self._touched.clear()
        self._in_flight.clear()
        for unit in list(self._open):
            self._close(unit)
        for slot in self.slots:
            slot.content = None  # half filled, perhaps
        for unit in self.accumulating:
            unit.drop_gradients()
        self.accumulating.clear()

    def reduce(self, unit: Unit, *, unused_too: bool = False) -> None:
        """Reduces (or, without communication, accumulates) whatever gradients a unit has.

        Args:
            unit: The unit.
            unused_too: Take part in the reduction with zeros where there are none.
        """
        for group in unit.groups:
            group.grads.take()
        present = [g for g in unit.groups if g.grads.present()]
        joins = unused_too and unit.sync_gradients and any(g.grads.trainable for g in unit.groups)
        if not present or not unit.sync_gradients:
            self._close(unit)
        if not present and not joins:
            for group in unit.groups:
                group.grads.taken = None
            return
        if not unit.sync_gradients:
            for group in present:
                group.grads.accumulate(group.device)
            self.accumulating.add(unit)
            return
        if unit.early is not None:
            unit.early.refuse_again()
        # Another rank may have gradients in a group that got none here, so all of them go out.
        groups = present
        if len(present) < len(unit.groups):
            groups = [g for g in unit.groups if g in present or g.grads.trainable]
        if self.trail.debug:
            collectives = unit.collectives or self.collectives
            self.trail.announce(unit, Kind.REDUCE, collectives, self.streams)
        slot = self._open.pop(unit, None) or self._take_slot(groups[0], unit)
        sent: list[tuple[ParamGroup, Tensor, bool]] = []
        in_slot = 0
        for group, offset in zip(unit.groups, offsets(unit), strict=True):
            if group in groups:
                in_slot += group.grads.accumulator is None
                fresh = self._prepare(unit, group)
                filled = self._fill(group, slot, offset, slot.content != unit.kind)
                sent.append((group, filled, fresh))
        # Padding stays zero while units of one kind follow each other in a slot.
        if in_slot:
            slot.content = unit.kind if in_slot == len(unit.groups) else None
        self._send(unit, slot, sent)
        for group in groups:
            group.grads.hand_out()
        if any(group.grads.partial is not None for group in groups):
            self.accumulating.add(unit)
        else:
            self.accumulating.discard(unit)
        self._touched.append(unit)
        if unit.early is not None:
            unit.early.step()

    def _prepare(self, unit: Unit, group: ParamGroup) -> bool:
        if unit.early is None:
            return self.reserve.with_room(lambda: group.grads.prepare(group.device))
        # It is freed where it is used, so the memory has to be that stream's.
        with self.streams.on_comm():
            return group.grads.prepare(group.device)

    def _send(
        self, unit: Unit, slot: Slot, sent: Sequence[tuple[ParamGroup, Tensor, bool]]
    ) -> None:
        """Reduces what was filled in, after all of it is there."""
        self._ready_event = self.streams.record_compute(
            self._ready_event or self.streams.new_event()
        )
        self.streams.comm_waits(self._ready_event)
        collectives = unit.collectives or self.collectives
        waiting: list[tuple[ParamGroup, Tensor, bool]] = []
        self.trail.current = unit
        try:
            with self.streams.on_comm(), torch.no_grad():
                for group, reduce_input, fresh in sent:
                    sums = group.grads.reduce(reduce_input, fresh, collectives)
                    if sums is not None:
                        waiting.append((group, sums, fresh))
            if waiting:
                self._reduce_across(waiting, slot, collectives)
        except RuntimeError as error:
            self.trail.fail(error, unit, "reducing the gradients of")
        self.trail.note(unit, Kind.REDUCE, len(sent))
        sums_stay = any(slot.holds(sums) for _, sums, _ in waiting)
        record = self.streams.record_across if sums_stay else self.streams.record_comm
        slot.free_event = record(slot.free_event or self.streams.new_event())
        self.trail.completes_with(slot.free_event)
        slot.holder = None

    def _reduce_across(
        self,
        waiting: Sequence[tuple[ParamGroup, Tensor, bool]],
        slot: Slot,
        collectives: Collectives,
    ) -> None:
        """Sums over replicas on a stream of their own, so that other units' gathers go on."""
        with self.streams.on_across(), torch.no_grad():
            for group, sums, fresh in waiting:
                group.grads.reduce_across(sums, fresh, collectives)
                if sums is not group.grads.shard.flat and not slot.holds(sums):
                    self.streams.used_across(sums)  # memory of the communication stream

    def open(self, unit: Unit) -> None:
        """Before a unit's backward: where its products may write weight gradients themselves.

        Holds a gradient slot from the start of the unit's backward, not only at its end.
        """
        if unit in self._open:
            return
        fused = [g for g in unit.groups if g.grads.fused and g.grads.trainable]
        if not fused:
            return
        slot: Slot | None = None
        for group, offset in zip(unit.groups, offsets(unit), strict=True):
            if group not in fused:
                continue
            grads = group.grads
            if grads.accumulator is not None or not unit.sync_gradients:
                grads.open(grads.cut(grads.start_accumulator(group.device)), adds=True)
                continue
            if slot is None:
                slot = self._take_slot(group, unit)
                slot.holder = unit
                self._open[unit] = slot
            grads.open(self._target(group, slot, offset), adds=False)

    def _close(self, unit: Unit) -> None:
        slot = self._open.pop(unit, None)
        if slot is not None:
            slot.holder = None

    def _target(self, group: ParamGroup, slot: Slot, offset: int) -> ReduceInput:
        target: ReduceInput | None = slot.views.get(group)
        if target is None:
            flat = slot.view(offset, group.layout.total_numel, group.dtypes.reduce)
            target = slot.views[group] = group.grads.cut(flat)
        return target

    def _fill(self, group: ParamGroup, slot: Slot, offset: int, clear_padding: bool) -> Tensor:
        """The group's gradients as one flat tensor, in the slot or in its own accumulator."""
        with torch.no_grad():
            if group.grads.accumulator is not None:
                group.grads.accumulate(group.device)
                reduce_input = group.grads.accumulator
                group.grads.accumulator = None
                self._in_flight.append(reduce_input)
                return reduce_input
            target = self._target(group, slot, offset)
            group.grads.collect(target, clear_padding)
            return target.flat

    def _take_slot(self, group: ParamGroup, unit: Unit) -> Slot:
        collectives = unit.collectives or self.collectives
        maker = allocator_of(collectives)
        mine = [s for s in self.slots if s.maker is maker and s.ring == unit.ring]
        free = [s for s in mine if s.holder is None]
        if len(mine) < self.num_buffers or not free:
            size, device = self._slot_bytes, group.device
            slot = self.reserve.with_room(lambda: new_slot(size, device, collectives, "reduce"))
            slot.ring = unit.ring
            if not self.keep_buffers:
                slot.free_storage()  # each unit takes what it needs
            self.slots.append(slot)
        else:
            slot = free[0]
            # The least recently used one comes first in the list.
            self.slots.remove(slot)
            self.slots.append(slot)
        # Ordered before a reallocation: the old bytes go back to the compute stream's pool.
        self.streams.compute_waits(slot.free_event)
        self.reserve.with_room(lambda: slot.alloc_storage(unit.reduce_bytes))
        return slot

    def finish(self, units: Sequence[Unit] | None) -> None:
        """Ends a backward pass: compute waits for every reduction, then hooks of users run.

        Args:
            units: Whose parameters ranks may have used differently; ``None``: those reduced.
        """
        if not self._touched:
            return
        self.streams.comm_waits_for_across()
        if self.exchange_usage:
            self._exchange(list(dict.fromkeys(self._touched)) if units is None else units)
        self.streams.compute_waits_for_comm()
        self._in_flight.clear()
        touched, self._touched = self._touched, []
        for slot in self.slots:
            slot.free_event = None
            if not self.keep_buffers:
                slot.free_storage()
        self._run_hooks(touched)

    def _run_hooks(self, units: Sequence[Unit]) -> None:
        for unit in units:
            for group in unit.groups:
                for param in group.params:
                    hooks = _torch.post_accumulate_hooks(param.sharded)
                    if hooks and param.sharded.grad is not None:
                        for hook in tuple(hooks.values()):
                            hook(param.sharded)

    # ---- parameters that only some ranks use -----------------------------------------------------

    def _exchange(self, units: Sequence[Unit]) -> None:
        """Tells every rank which parameters had a gradient anywhere.

        One small all-reduce per process group and backward. A rank on which everything was used
        sends ones that lie on the device already and reads nothing back.
        """
        # Every call with mesh=None makes a mesh of its own, all of them over the same group.
        by_ranks: dict[tuple[int, int], tuple[MeshInfo, list[ParamGroup]]] = {}
        for unit in units:
            for group in unit.groups:
                info = group.mesh_info
                key = (id(info.shard_group), id(info.replicate_group))
                by_ranks.setdefault(key, (info, []))[1].append(group)
        for key, (info, groups) in by_ranks.items():
            if info.shard_size * info.replicate_size == 1:
                continue
            marks = self._marks(groups, info, units)
            self._exchange_on(key, info, groups, marks)

    def _marks(self, groups: list[ParamGroup], info: MeshInfo, units: Sequence[Unit]) -> list[int]:
        if _torch.is_capturing(groups[0].device):
            return []
        return self.trail.due(info, units)

    def _exchange_on(
        self, key: tuple[int, int], info: MeshInfo, groups: list[ParamGroup], marks: list[int]
    ) -> None:
        count = sum(len(g.params) for g in groups) + NUM_MARKS
        complete = not any(g.grads.unresolved for g in groups)
        flags = self._flags.get(key)
        if flags is None or flags.numel() != count:
            flags = torch.ones(count, dtype=torch.int32, device=groups[0].device)
            self._flags[key] = flags
        if not complete or marks:
            values = [
                int(i not in g.grads.unresolved) for g in groups for i in range(len(g.params))
            ]
            flags = torch.tensor(values + (marks or [0] * NUM_MARKS), dtype=torch.int32).to(
                groups[0].device
            )
            self._in_flight.append(flags)
        self.streams.comm_waits_for_compute()
        try:
            self._all_reduce_flags(flags, info, bool(marks))
        except RuntimeError as error:
            self.trail.fail(error, None, "asking which parameters were used, after a backward pass")
        if complete and not marks:
            return
        if _torch.is_capturing(groups[0].device):
            names = [g.params[i].fqn for g in groups for i in g.grads.unresolved]
            raise RuntimeError(
                f"parameters without a gradient in a step that is being captured: {names[:5]}; "
                "whether another rank used them can not be asked in a graph. Freeze them, or use "
                "them in every step."
            )
        self.streams.compute_waits_for_comm()
        used = flags.tolist()
        if marks:
            self.trail.compare(used[-4:], info, self.collectives, self.streams)
        position = 0
        for group in groups:
            for index in group.grads.unresolved:
                if used[position + index]:
                    group.grads.resolve(index)
            group.grads.unresolved = []
            position += len(group.params)

    def _all_reduce_flags(self, flags: Tensor, info: MeshInfo, has_marks: bool) -> None:
        with self.streams.on_comm():
            if info.shard_size > 1:
                self.collectives.all_reduce(flags, "max", info.shard_group)
            if has_marks:
                spread(flags)
            if info.replicate_group is not None and info.replicate_size > 1:
                self.collectives.all_reduce(flags, "max", info.replicate_group)


def with_leftovers(units: Sequence[Unit]) -> list[Unit]:
    """Units with gradients that came without one at the unit's outputs, or accumulated."""
    found = []
    with _torch.without_torch_function():
        for unit in units:
            for group in unit.groups:
                if group.grads.left_behind() or group.grads.accumulator is not None:
                    group.grads.take()
                    found.append(unit)
    return list(dict.fromkeys(found))


def offsets(unit: Unit) -> list[int]:
    """Bytes at which each of a unit's groups starts in a gradient slot."""
    starts = [0]
    for group in unit.groups:
        starts.append(starts[-1] + aligned(group.reduce_bytes))
    return starts[:-1]
