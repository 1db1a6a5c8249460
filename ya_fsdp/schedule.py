"""Who is gathered when: slots, streams, prefetch, and the end of a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from . import _torch
from .buffers import Slot
from .checks import refuse_recording
from .collectives import Collectives
from .gathering import Gathering
from .reducer import Reducer, with_leftovers
from .streams import Streams
from .unit import Phase, Unit, refuse_left_behind, refuse_thread


class _EndOfBackward:
    """The callback autograd runs when a backward pass ends; dropped unrun when it raises."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self) -> None:
        self._schedule.end_backward_pass()


class Schedule(Gathering):
    """Conducts the units below one root.

    Args:
        units: All units, in registration order, parents before children.
        streams: The communication stream and its events.
        collectives: The back end used by units that have none of their own.
        is_orphanage: Whether the units have no common root, so that every call of one of them is
            an iteration of its own and nothing can be prefetched across calls.
    """

    def __init__(
        self, units: list[Unit], streams: Streams, collectives: Collectives, is_orphanage: bool
    ) -> None:
        super().__init__(streams, collectives)
        self.units = units
        self.is_orphanage = is_orphanage
        self.reducer = Reducer(streams, collectives, self.trail, self.reserve)
        self.stamp = 0
        self.open_calls = 0
        # Whether every rank runs every unit's collectives, whatever its units were used for.
        self.uniform = False
        self.order: list[Unit] = []
        self.recording: list[Unit] = []
        self.finished: list[Unit] = []  # the order in which forwards ended: backward's, reversed
        self.post_optim_event: Any = None
        self.before_iteration: Callable[[], None] | None = None
        self.after_backward: list[Callable[[], None]] = []
        self.weights_unchanged = False  # since the last forward, so that what is there is current
        self.is_last_backward = True
        self._thread = 0
        self._following = False
        self._backward_seen = False
        self._in_backward = False  # until all of its end has run
        self._active: list[Unit] = []
        self._callback: weakref.ref[_EndOfBackward] | None = None

    def units_changed(self) -> None:
        """Units came or went: slots are assigned anew before the next forward."""
        self.reducer.size_for(self.units)
        self.pool.dirty = True

    def remove_unit(self, unit: Unit) -> None:
        """Forgets a unit whose module is gone or has another root now."""
        if unit in self.units:
            self.units.remove(unit)
        self.order, self.recording, self.finished = [], [], []
        self.reducer.accumulating.discard(unit)
        if unit.slot is not None and unit.slot.content is unit:
            unit.slot.content = unit.slot.holder = None
        unit.slot = None
        if self.is_orphanage and not self.units:
            self.pool.slots.clear()
            self.reducer.drop_slots()
        self.units_changed()

    # ---- forward ------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """A new outermost forward: whatever an exception left behind is cleaned up first."""
        refuse_recording()
        if not self.backward_alive():
            self.recover()
        if self.before_iteration is not None:
            self.before_iteration()
        self.stamp += self.uniform or not self.weights_unchanged
        if self.recording and not self._keeps_recording():
            self.order, self.recording, self.finished = self.recording, [], []
        self._following = bool(self.order)
        self._backward_seen = False
        for unit in self.units:
            if not self.weights_unchanged:
                unit.gather_pending = False  # what was gathered ahead and not used is of no use now
            for group in unit.groups:
                group.grads.release_unused()
        refuse_left_behind(self.units)
        moved = self.pool.refresh(self.units, self.order)
        if moved or self.post_optim_event is None:
            self.streams.comm_waits_for_compute()
        if self.post_optim_event is not None:
            self.streams.comm_waits(self.post_optim_event)
            self.post_optim_event = None
        for slot in self.pool.slots:
            slot.free_event = None
        for unit in self.units:
            if unit.kept and not self.uniform:  # ranks used, so kept, different units
                self.renew(unit, self.stamp)
        if self.uniform:
            for unit in self.units:
                self.launch_gather(unit, self.stamp)

    def _keeps_recording(self) -> bool:
        """Units without a common root go on recording until their backward has run."""
        limit = 4 * len(self.units)
        return self.is_orphanage and not self._backward_seen and len(self.recording) < limit

    def recover(self) -> None:
        """Returns every unit to idle: an exception may have ended a forward or a backward."""
        if self._in_backward:
            for unit in self.units:
                unit.drop_gradients()
            self._active.clear()
            self.reducer.reset()
            self._callback, self._in_backward = None, False
        if self.abandon_interrupted(self.units):
            self.reducer.drop_slots()
        self.open_calls = 0
        for unit in self.units:
            unit.calls = 0
            if unit.phase is not Phase.IDLE:
                unit.drop_gradients()
                unit.phase = Phase.IDLE
                self.release(unit)
            elif unit.switched and not unit.held:
                self.release(unit)  # interrupted between the two

    def fail_forward(self, unit: Unit, open_calls: int) -> None:
        """Ends a forward that raised, wherever that was; ``open_calls``: before it began."""
        self.post_forward(unit, False)
        self.open_calls = open_calls
        if not open_calls and not self.backward_alive():
            self.trail.go_on_after_exception()
            self.recover()

    def pre_forward(self, unit: Unit) -> None:
        """Gathers a unit for its forward and starts the next one's gather."""
        if unit.phase in (Phase.BACKWARD, Phase.FORWARD_IN_BACKWARD):
            # Activation checkpointing recomputes inside this unit's own backward.
            self.finish_gather(unit)
            return
        recompute = _torch.current_graph_task() != -1
        if not recompute:
            if self.open_calls == 0:
                self._thread = get_ident()
                self.begin_iteration()
            elif get_ident() != self._thread:
                refuse_thread(unit)
        if self.carveout is not None:
            self.carveout.begin()
            self.carveout.off()
        self.open_calls += 1
        unit.calls += 1
        unit.change(Phase.FORWARD)
        self.launch_gather(unit, self.stamp)
        self.finish_gather(unit)
        if not recompute:
            unit.position = len(self.recording)
            self.recording.append(unit)
            self._prefetch_forward(unit)

    def post_forward(self, unit: Unit, needs_backward: bool) -> None:
        """Ends a unit's forward; reshards it unless it stays gathered for its backward."""
        if unit.phase is not Phase.FORWARD:
            return
        self.open_calls = max(0, self.open_calls - 1)
        if self.carveout is not None and not self.open_calls and not needs_backward:
            self.carveout.end()
        unit.calls = max(0, unit.calls - 1)
        if needs_backward:
            unit.pending_backward += 1
            unit.forward_stamp = self.stamp
            if not unit.guarded:
                unit.guarded = True
                self.watch_gradients(unit, all_of_them=False)
            if _torch.current_graph_task() == -1:
                unit.backward_position = len(self.finished)
                self.finished.append(unit)
        if unit.calls:
            return
        unit.change(Phase.IDLE)
        if unit.reshard_after_forward or not needs_backward:
            unit.held = False
            self.release(unit)
        else:
            unit.kept = not unit.reshard_after_backward  # for the next microbatch's forward
            if not unit.held:
                unit.to_sharded()  # the bytes stay; outside forward users see sharded parameters

    def _prefetch_forward(self, unit: Unit) -> None:
        position = unit.position
        if self.uniform:
            return
        if unit.forward_prefetch is not None:
            targets = unit.forward_prefetch
        elif self.is_orphanage or not self._following:
            return
        elif position >= len(self.order) or self.order[position] is not unit:
            self._following = False  # this iteration runs in another order than the last
            self.trail.leave_order(unit, self.order[position : position + 1])
            return
        else:
            targets = self.order[position + 1 : position + self.pool.num_buffers]
        for target in targets:
            if target is unit or not self.pool.is_free(target):
                return
            self.launch_gather(target, self.stamp)

    # ---- backward -----------------------------------------------------------------------------

    def backward_alive(self) -> bool:
        """Whether a backward pass that we joined is still running."""
        return self._callback is not None and self._callback() is not None

    def _join_backward_pass(self) -> None:
        if self.backward_alive():
            return
        if self._in_backward:
            self.recover()
        self._in_backward = True
        callback = _EndOfBackward(self)
        self._callback = weakref.ref(callback, self._backward_lost)
        _torch.queue_backward_callback(callback)
        self.streams.comm_waits_for_compute()
        if self.carveout is not None:
            self.carveout.begin()

    def _backward_lost(self, reference: weakref.ref[_EndOfBackward]) -> None:
        """Autograd dropped the callback unrun: what caught the exception finds a clean model."""
        if self._callback is reference:
            self.recover()

    def pre_backward(self, unit: Unit) -> None:
        """The gradient reached a unit's output: gather it, then the one before it."""
        if unit.phase in (Phase.BACKWARD, Phase.FORWARD_IN_BACKWARD):
            return
        self._join_backward_pass()
        if self.carveout is not None:
            self.carveout.off()
        unit.change(Phase.BACKWARD if unit.phase is Phase.IDLE else Phase.FORWARD_IN_BACKWARD)
        self._active.append(unit)
        if unit.unshard_in_backward or unit.switched:
            self.launch_gather(unit, self.stamp if self.uniform else unit.forward_stamp)
            self.finish_gather(unit)
            if torch.is_grad_enabled():  # create_graph: a second backward may pass outputs by
                self.watch_gradients(unit)
        if unit.fused and not self.uniform:
            self.reducer.open(unit)
        self._prefetch_backward(unit)

    def watch_gradients(self, unit: Unit, *, all_of_them: bool = True) -> None:
        """Joins a backward pass that reaches a unit's parameters and none of its outputs.

        Costs a call per parameter and backward (1 us), so all of them are watched only where such
        a pass is likely, one per group elsewhere.
        """
        reference = weakref.ref(self)

        def gradient_arrived(_: nn.Parameter) -> None:
            schedule = reference()
            if schedule is not None:
                schedule._join_backward_pass()

        for group in unit.groups:
            group.grads.watch_arrivals(gradient_arrived, all_of_them=all_of_them)

    def _prefetch_backward(self, unit: Unit) -> None:
        """Gathers what follows ``unit`` in backward, as far as there are free slots."""
        if self.uniform:
            return
        if unit.backward_prefetch is not None:
            targets = unit.backward_prefetch
        else:
            position = unit.backward_position
            if position >= len(self.finished) or self.finished[position] is not unit:
                return
            first = max(0, position - (self.pool.num_buffers - 1))
            targets = self.finished[first:position][::-1]
        for target in targets:
            if target is unit or not target.pending_backward or not target.unshard_in_backward:
                continue
            if not self.pool.is_free(target):
                return
            self.launch_gather(target, target.forward_stamp)

    def _prefetch_after(self, unit: Unit) -> None:
        """A slot got free at the end of ``unit``'s backward: gathers what the next unit would.

        Whether the next unit's backward has begun already depends on whether its output is this
        unit's input, which may differ between ranks; the order of collectives must not.
        """
        position = unit.backward_position - 1
        if self.uniform or position < 0 or self.finished[position + 1 : position + 2] != [unit]:
            return
        following = self.finished[position]
        if following.pending_backward and following.unshard_in_backward:
            if not self.pool.can_take(following):
                return
            self.launch_gather(following, following.forward_stamp)
        self._prefetch_backward(following)

    def try_end_backward(self, unit: Unit) -> None:
        """Ends a unit's backward if no more of its gradients are to come."""
        if unit.phase not in (Phase.BACKWARD, Phase.FORWARD_IN_BACKWARD):
            return
        if any(group.grads.expected() for group in unit.groups):
            return
        if any(active.depth > unit.depth for active in self._active):
            return  # the reductions of units inside come first, on every rank
        self.end_backward(unit)

    def end_backward(self, unit: Unit) -> None:
        """Frees the unit's slot, gathers the next one into it, and reduces the gradients."""
        self._active.remove(unit)
        unit.change(Phase.IDLE if unit.phase is Phase.BACKWARD else Phase.FORWARD)
        unit.pending_backward = max(0, unit.pending_backward - 1)
        if self.uniform:
            unit.to_sharded()
            return  # reduced with all others, in their order, at the end of the pass
        for group in unit.groups:
            group.grads.take()
        if unit.phase is Phase.IDLE:
            if unit.reshard_after_backward:
                unit.held = False
                self.release(unit, may_have_changed=False)
            else:
                unit.kept = True
                if not unit.held:
                    unit.to_sharded()  # the bytes stay; users and optimizers see sharded parameters
        self._prefetch_after(unit)
        self.reducer.reduce(unit)
        if self.carveout is not None:
            self.carveout.on()

    def end_backward_pass(self) -> None:
        """Everything autograd will do is done: reduce what is left and wait for the results."""
        self._backward_seen = True
        for unit in self._active[::-1]:
            self.end_backward(unit)
        leftovers = with_leftovers(self.units)
        for unit in self.units if self.uniform else leftovers:
            self.reducer.reduce(unit, unused_too=self.uniform)
        for unit in self.units:
            if self.is_last_backward:
                unit.pending_backward = 0
            self.drop_unused_prefetch(unit)
        # Units without a common root may belong to a model that only this rank still remembers.
        self.reducer.finish(None if self.is_orphanage else self.units)
        self._callback = None
        self._in_backward = False
        for listener in self.after_backward:
            listener()
        if self.carveout is not None:
            self.carveout.end()

    # ---- by hand ------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Starts a gather on the user's request."""
        if self.open_calls == 0 and not self.backward_alive() and not unit.in_use:
            self.stamp += 1
            if unit.slot is None or self.pool.dirty:
                self.pool.refresh(self.units, self.order)
            self.streams.comm_waits_for_compute()
        unit.held = True
        self.launch_gather(unit, self.stamp)

    def reshard(self, unit: Unit) -> None:
        """Frees a unit that nobody computes with."""
        unit.held = False
        try:
            unit.refuse_lost_writes()
        finally:
            if unit.phase is Phase.IDLE:
                self.release(unit)

    def buffers(self) -> list[Slot]:
        """Every persistent gather and gradient slot, for reports."""
        return self.pool.slots + self.reducer.slots
