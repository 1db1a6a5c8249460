"""Which gather slot each unit uses: assignment, claims, and units that collide."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from .buffers import Slot, SlotRequest, assign_slots, slot_sizes
from .collectives import Collectives, Purpose, allocator_of
from .unit import Phase, Unit


def new_slot(size: int, device: torch.device, collectives: Collectives, purpose: Purpose) -> Slot:
    """A slot in memory of a back end."""
    maker = allocator_of(collectives)
    return Slot(size, lambda n: maker.allocate(n, device, purpose), maker, maker.keeps_memory)


class GatherPool:
    """The gather slots of one schedule.

    Attributes:
        num_buffers: Slots that units of one depth share.
        dirty: Whether slots have to be assigned anew before the next forward.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.num_buffers = 2
        self.dirty = True
        self.slots: list[Slot] = []
        self._placed_by_execution = False

    def refresh(self, units: Sequence[Unit], order: Sequence[Unit]) -> bool:
        """Assigns slots if a setting changed, and once more by the order units really ran in.

        Nothing moves while a unit is in use or owes a backward: autograd saved views of its slot.

        Returns:
            Whether slots were assigned, perhaps in memory that compute has just freed.
        """
        by_execution = bool(order) and not self._placed_by_execution
        unplaced = any(u.slot is None and u.groups for u in units)
        if not (self.dirty or by_execution or unplaced):
            return False
        if any(u.in_use or u.pending_backward for u in units):
            return False
        position: dict[Unit, int] = {}
        for unit in (*order, *units):
            position.setdefault(unit, len(position))
        self._placed_by_execution = bool(order)
        self._place(sorted((u for u in units if u.groups), key=position.__getitem__))
        return True

    def _place(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.slot is not None and unit.slot.holder is unit:
                unit.slot.holder = None
            unit.gather_pending = False
            unit.measure()
        makers = [self._maker(unit) for unit in units]
        requests = [self._request(unit) for unit in units]
        assignment = assign_slots(requests, self.num_buffers)
        kept = list(self.slots)
        slots: list[Slot] = []
        for index, size in enumerate(slot_sizes(requests, assignment)):
            first = assignment.index(index)
            maker = makers[first]
            fitting = next((s for s in kept if s.num_bytes == size and s.maker is maker), None)
            if fitting is None:
                fitting = self._new_slot(size, units[first])
            else:
                kept.remove(fitting)
                fitting.holder = fitting.content = fitting.free_event = None
            fitting.own = requests[first].exclusive
            if not fitting.own:
                fitting.alloc_storage(size)
            slots.append(fitting)
        self.slots = slots
        for unit, index in zip(units, assignment, strict=True):
            if unit.slot is not slots[index]:
                unit.bind(slots[index])
        self.dirty = False

    def _maker(self, unit: Unit) -> Collectives:
        return allocator_of(unit.collectives or self.collectives)

    def _request(self, unit: Unit) -> SlotRequest:
        return SlotRequest(
            unit.gather_bytes,
            unit.depth,
            not unit.reshard_after_forward,
            id(self._maker(unit)),
            unit.ring,
            unit.buffer,
        )

    def crowded(self, units: Iterable[Unit]) -> set[Unit]:
        """Those of some units for which there are fewer slots than units of their kind."""
        kinds: dict[tuple[Hashable, ...], list[Unit]] = {}
        for unit in units:
            kinds.setdefault(self._request(unit).kind, []).append(unit)
        crowds = [k for k in kinds.values() if len(k) > self._request(k[0]).slots(self.num_buffers)]
        return {unit for crowd in crowds for unit in crowd}

    def _new_slot(self, size: int, unit: Unit) -> Slot:
        return new_slot(size, unit.groups[0].device, unit.collectives or self.collectives, "gather")

    def claim(self, unit: Unit, end_backward: Callable[[Unit], None]) -> Slot:
        """Takes the unit's slot from whoever holds it without computing in it.

        Args:
            unit: The unit that is about to be gathered.
            end_backward: Ends the backward of a unit that is only waiting for its end.
        """
        slot = unit.slot
        if slot is None:
            slot = self._give_own_slot(unit)
        other = slot.holder
        if other is not None and other is not unit:
            if other.phase is Phase.BACKWARD and not other.held:
                end_backward(other)
            if other.in_use:
                slot = self._give_own_slot(unit)
            else:
                slot.holder = None
        if slot.content is not unit and slot.content is not None:
            slot.content.mark_stale()
        slot.holder = unit
        return slot

    def _give_own_slot(self, unit: Unit) -> Slot:
        if unit.pending_backward and unit.slot is not None:
            other = unit.slot.holder
            raise RuntimeError(
                f"unit '{unit.fqn}' needs its gather buffer for backward while unit "
                f"'{other.fqn if other else '?'}' computes in it. These units are alive at the "
                "same time: call set_num_gather_buffers(3) (or more) on the root module, or "
                "set_reshard_after_forward(False) on one of them."
            )
        unit.measure()
        slot = self._new_slot(unit.gather_bytes, unit)
        slot.own = True
        self.slots.append(slot)
        unit.bind(slot)
        return slot

    def is_free(self, unit: Unit) -> bool:
        """Whether the unit could be gathered now without taking its slot from anybody."""
        return unit.slot is not None and unit.slot.holder in (None, unit)

    def can_take(self, unit: Unit) -> bool:
        """Whether the unit could be gathered now without giving anybody else another slot."""
        holder = None if unit.slot is None else unit.slot.holder
        return unit.slot is not None and (holder in (None, unit) or not holder.in_use)
