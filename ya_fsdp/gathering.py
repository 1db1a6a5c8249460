"""Gathering one unit into its slot and giving the slot back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _torch, watchdog
from .agreement import Kind, Trail
from .buffers import Slot
from .carveout import CarveOut
from .collectives import Collectives
from .pool import GatherPool
from .reserve import Reserve
from .scratch import leave_scratch
from .streams import Streams
from .unit import Unit, optimizer_steps


class Gathering:
    """What a schedule does to a single unit.

    Args:
        streams: The communication stream and its events.
        collectives: The back end used by units that have none of their own.
    """

    def __init__(self, streams: Streams, collectives: Collectives) -> None:
        self.streams = streams
        self.collectives = collectives
        self.pool = GatherPool(collectives)
        self.carveout: CarveOut | None = None
        self.reserve = Reserve(streams)
        self.trail = Trail()
        watchdog.watch(self.trail)

    def set_carveout(self, carveout: CarveOut | None) -> None:
        """Makes matrix products leave multiprocessors to collectives, or no longer."""
        if self.carveout is not None:
            self.carveout.end()
        self.carveout = carveout

    def launch_gather(self, unit: Unit, stamp: int) -> None:
        """Starts gathering a unit unless its bytes are already there."""
        if not unit.groups:
            return
        slot = unit.slot
        if slot is not None and slot.holder is unit and slot.stamp == stamp:
            return
        if unit.held:
            unit.refuse_lost_writes()
        slot = self.pool.claim(unit, self.end_backward)
        if slot.content is unit and slot.stamp == stamp:
            return
        slot.content = None
        slot.stamp = -1  # an error below leaves the unit in the slot, but not its bytes
        if self.reserve.has(unit, stamp):
            self._bring_back(unit, slot)
            return
        collectives = unit.collectives or self.collectives
        if self.trail.debug:
            self.trail.announce(unit, Kind.GATHER, collectives, self.streams)
        if not unit.switched:
            unit.readopt_if_replaced()
        if slot.own:
            self.reserve.before(unit)
            self._take_memory(slot)
        self.streams.comm_waits(slot.free_event)
        slot.free_event = None
        self.trail.current = unit
        try:
            with self.streams.on_comm():
                if unit.unequal:
                    unit.sync_replicas()
                if unit.secondary is None:
                    fresh = True
                    for group in unit.groups:
                        group.gather(collectives)
                else:
                    keep = unit.reshard_after_forward
                    fresh = unit.secondary.gather(unit.groups, collectives, stamp, keep)
        except RuntimeError as error:
            self.trail.fail(error, unit, "gathering")
        self.trail.note(unit, Kind.GATHER, len(unit.groups))
        if unit.gather_event is None:
            unit.gather_event = self.streams.new_event()
        self.trail.completes_with(self.streams.record_comm(unit.gather_event))
        if self.carveout is not None:
            self.carveout.on()
        unit.gather_pending = True
        if fresh:
            unit.gathered_at = optimizer_steps()
        slot.content = unit
        slot.stamp = stamp

    def _bring_back(self, unit: Unit, slot: Slot) -> None:
        """Into its slot again from host memory, on the compute stream."""
        self._take_memory(slot)
        slot.stamp = self.reserve.bring_back(unit)
        slot.content = slot.holder = unit

    def renew(self, unit: Unit, stamp: int) -> None:
        """Takes a unit that stayed gathered for gathered anew, if its weights are the same."""
        slot = unit.slot
        if slot is not None and slot.holder is None and self.reserve.has(unit):
            self._bring_back(unit, slot)
        still_there = slot is not None and slot.holder is unit and slot.content is unit
        ours = unit.switched or not any(group.replaced() for group in unit.groups)
        if still_there and slot is not None and unit.is_current() and ours:
            slot.stamp = stamp
        else:
            unit.kept = False

    def finish_gather(self, unit: Unit) -> None:
        """Makes compute wait for the gather and modules hold the unsharded parameters."""
        if unit.gather_pending:
            self.streams.compute_waits(unit.gather_event)
            unit.gather_pending = False
        unit.to_unsharded()

    def release(self, unit: Unit, may_have_changed: bool = True) -> None:
        """Modules hold the sharded parameters again; the slot is free once compute has passed."""
        unit.to_sharded(may_have_changed)
        unit.kept = False
        unit.noted = None
        slot = unit.slot
        if slot is not None and slot.holder is unit:
            if self.trail.debug:
                self._poison(unit)
            if unit.free_event is None:
                unit.free_event = self.streams.new_event()
            slot.free_event = self.streams.record_compute(unit.free_event)
            slot.holder = None
            if slot.own and self.streams.asynchronous and not slot.fixed:
                unit.mark_stale()  # a backward that still needs the bytes must raise
                slot.free_storage()

    def _take_memory(self, slot: Slot) -> None:
        """Memory of a slot that gave it back; it comes from what compute has freed."""
        if slot.resident_bytes < slot.num_bytes:
            self.reserve.with_room(lambda: slot.alloc_storage(slot.num_bytes))
            self.streams.comm_waits_for_compute()
        elif _torch.is_capturing(self.streams.device):
            slot.fixed = True  # the graph writes to this address at every replay

    def drop_unused_prefetch(self, unit: Unit) -> None:
        """Releases a unit that was gathered ahead of a use that did not come."""
        slot = unit.slot
        used = unit.in_use or unit.switched or unit.kept
        if slot is not None and slot.holder is unit and not used:
            self.release(unit)

    def _poison(self, unit: Unit) -> None:
        """Whoever reads a released parameter without a check gets NaN, or an error of autograd."""
        unit.mark_stale()
        if unit.slot is not None:
            unit.slot.content = None
        with torch.no_grad(), _torch.without_torch_function():
            for group in unit.groups:
                output = group.gather_output
                if output is not None and output.is_floating_point():
                    output.fill_(float("nan"))

    def abandon_interrupted(self, units: Sequence[Unit]) -> bool:
        """Leaves all buffers to a collective that was interrupted and may still be running.

        Its handle is lost when an interrupt comes between the call that started it and the wait.

        Returns:
            Whether there was one.
        """
        if self.trail.current is None:
            return False
        self.trail.current = None
        self.pool.slots.clear()
        self.pool.dirty = True
        leave_scratch()
        for unit in units:
            unit.slot = None
            if unit.secondary is not None:
                unit.secondary.forget()
            for group in unit.groups:
                group.grads.shard.forget()
        return True

    def end_backward(self, unit: Unit) -> None:
        """Ends the backward of a unit whose slot another one needs; the schedule knows how."""
        raise NotImplementedError


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns; :meth:`wait` makes the parameters usable."""

    def __init__(self, schedule: Gathering | None, unit: Unit | None) -> None:
        self._schedule = schedule
        self._unit = unit

    def wait(self) -> None:
        """Makes the current stream wait for the gather; modules then hold whole parameters."""
        if self._schedule is not None and self._unit is not None:
            self._schedule.finish_gather(self._unit)
            self._unit.note_values(with_copy=self._schedule.trail.debug)
            self._schedule = None
