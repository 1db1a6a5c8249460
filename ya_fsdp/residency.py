"""Which units stay gathered from forward to backward: as many as a budget of bytes allows."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from . import _torch
from .build import require_sharded, schedule_of
from .mesh import agreed
from .reserve import SHORT, MemoryState
from .schedule import Schedule
from .unit import Unit, versions_of_weights

logger = logging.getLogger("ya_fsdp")

MARGIN = 0.05
"""Part of the device's memory that ``"auto"`` leaves alone: fragments, other libraries, peaks that
no step has shown yet."""

MAX_CHOICES = 2048
"""Sums that the search for the best selection keeps; more only if all units differ in size."""

_UNLIMITED = 1 << 62

_kept: weakref.WeakSet[Unit] = weakref.WeakSet()


def set_resident_budget(model: nn.Module, num_bytes: int | Literal["auto"] | None) -> list[str]:
    """Keeps as many units gathered from forward to backward as fit a number of bytes.

    A unit that stays gathered has a buffer of its own and is gathered once per step instead of
    twice, as with ``set_reshard_after_forward(False)`` on its module. The selection saves the
    most traffic that the budget allows; among equals it takes units that run late, which wait
    least for their backward. Units that need no second gather anyway are passed over: those alone
    in their buffer, those whose shards are whole, and those told to stay gathered.

    When memory gets short on a rank (an allocation for a gather or a reduction fails, or taking a
    unit's memory would leave less than 2 % of the device), units that wait for their backward move
    to that rank's host memory until then; the step goes on, with the same numbers. After the next
    backward ranks agree on a budget that fits all of them, and a warning says so.

    Every rank has to call it with the same value, between steps; it counts from the next forward
    on. A later call replaces an earlier one. While a budget is set every backward ends with an
    all-reduce of one number.

    Args:
        model: A sharded model, the root of its units.
        num_bytes: Bytes of gathered parameters that may stay. ``"auto"``: what the device has free
            beside the largest peak so far, less 5 % of its memory; chosen at the end of the first
            backward after weights have changed (when the optimizer's state exists), the same on
            all ranks, and measured again after every backward. A peak counts since the program
            began or ``torch.cuda.reset_peak_memory_stats()``.
            ``None``: every unit reshards again.

    Returns:
        The names of the units that stay gathered, in the order in which units run (empty for
        ``"auto"``, whose choice comes later and is logged).

    Raises:
        TypeError: If ``num_bytes`` is none of these.
        ValueError: If it is negative, the model is not sharded, or ``"auto"`` is asked for on a
            device whose free memory can not be asked.
    """
    require_sharded(model)
    _check(num_bytes)
    schedule = schedule_of(model)
    device = schedule.streams.device
    memory = partial(MemoryState.of, device) if device.type == "cuda" else None
    if num_bytes == "auto" and memory is None:
        raise ValueError(
            f"set_resident_budget('auto') needs a device that tells its free memory, and the "
            f"model is on {device.type}; pass a number of bytes"
        )
    _forget(schedule)
    if num_bytes is None:
        return []
    _Budget(schedule, None if num_bytes == "auto" else num_bytes, memory)
    return [] if num_bytes == "auto" else keep(schedule, num_bytes)


def _check(num_bytes: object) -> None:
    if num_bytes is None or num_bytes == "auto":
        return
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool):
        raise TypeError(f"num_bytes must be an int, 'auto' or None, got {num_bytes!r}")
    if num_bytes < 0:
        raise ValueError(f"num_bytes must not be negative, got {num_bytes}")


def _forget(schedule: Schedule) -> None:
    _release(schedule)
    schedule.after_backward = [e for e in schedule.after_backward if not isinstance(e, _Budget)]


def _release(schedule: Schedule) -> None:
    for unit in schedule.units:
        if unit in _kept:
            _kept.discard(unit)
            unit.reshard_after_forward = True
            schedule.pool.dirty = True
    schedule.reserve.hold(())


# ---- the choice ----------------------------------------------------------------------------------


def keep(schedule: Schedule, num_bytes: int) -> list[str]:
    """Chooses the units of a schedule that stay gathered within a budget, and tells them."""
    candidates = _candidates(schedule)
    costs = [unit.gather_bytes for unit in candidates]
    values = [traffic(unit) for unit in candidates]
    chosen = [candidates[i] for i in best_choice(costs, values, num_bytes)]
    for unit in chosen:
        unit.reshard_after_forward = False
        _kept.add(unit)
    schedule.reserve.hold(chosen)
    left = [unit.gather_bytes for unit in candidates if unit not in chosen]
    schedule.reserve.next_bytes = min(left, default=_UNLIMITED)
    schedule.pool.dirty = True
    total, saved = sum(u.gather_bytes for u in chosen), sum(traffic(u) for u in chosen)
    logger.info("%d units stay gathered: %d bytes kept, %d not sent", len(chosen), total, saved)
    return [unit.fqn for unit in chosen]


def traffic(unit: Unit) -> int:
    """Bytes that a rank receives when the unit is gathered for backward."""
    total = 0
    for group in unit.groups:
        size = group.mesh_info.shard_size
        if unit.secondary is not None:
            size = unit.secondary.group.size()
        total += group.gather_bytes * (size - 1) // size
    return total


def _candidates(schedule: Schedule) -> list[Unit]:
    """Units that would be gathered again in backward, in the order in which they run."""
    order = dict.fromkeys((*schedule.order, *schedule.units))
    units = [u for u in order if u.groups and u.reshard_after_forward]
    crowded = schedule.pool.crowded(units)
    return [u for u in units if u in crowded and traffic(u)]


def best_choice(costs: Sequence[int], values: Sequence[int], budget: int) -> list[int]:
    """The selection of highest value within a budget, late items before early ones among equals.

    Exact as long as no more than ``MAX_CHOICES`` different sums of costs occur (of ``n`` equal
    items there are ``n``); with more, the best ``MAX_CHOICES`` are followed.

    Returns:
        Indices in ascending order.
    """
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # cost: (value, chosen items as bits)
    for index in reversed(range(len(costs))):
        for cost, (value, bits) in list(best.items()):
            taken = cost + costs[index]
            if taken > budget:
                continue
            # Only a higher value displaces a choice made earlier, of items that run later.
            if taken not in best or value + values[index] > best[taken][0]:
                best[taken] = (value + values[index], bits | 1 << index)
        if len(best) > MAX_CHOICES:
            by_value = sorted(best, key=lambda cost: (-best[cost][0], cost))
            best = {cost: best[cost] for cost in by_value[:MAX_CHOICES]}
    _, _, bits = max((value, -cost, bits) for cost, (value, bits) in best.items())
    return [index for index in range(len(costs)) if bits >> index & 1]


# ---- over steps ----------------------------------------------------------------------------------


class _Budget:
    """Follows a budget at the end of every backward pass: ranks agree on what fits all of them.

    What a rank can keep is sent after one backward and read after the next, so that the host does
    not wait for the device. ``"auto"`` makes its first choice at once.

    Args:
        schedule: Whose units stay gathered.
        num_bytes: The user's number, ``None`` for ``"auto"``.
        memory: Tells the state of the device's memory, ``None`` where nobody knows.
    """

    def __init__(
        self,
        schedule: Schedule,
        num_bytes: int | None,
        memory: Callable[[], MemoryState] | None,
    ) -> None:
        self._schedule = weakref.ref(schedule)
        self._memory = memory
        self._auto = num_bytes is None
        self._limit = _UNLIMITED if num_bytes is None else num_bytes
        self._versions = versions_of_weights(schedule.units)
        self._chosen = not self._auto
        self._failures = 0 if memory is None else memory().failures
        self._sent: tuple[torch.Tensor, Any] | None = None
        schedule.reserve.memory = memory
        schedule.after_backward = [*schedule.after_backward, self]

    def __call__(self) -> None:
        schedule = self._schedule()
        if schedule is None or _torch.is_capturing(schedule.streams.device):
            return
        if not self._chosen and versions_of_weights(schedule.units) == self._versions:
            return
        fitting = self._fitting(schedule)
        sent, self._sent = self._sent, None
        if sent is not None:
            self._follow(schedule, sent)
        sent = _send(schedule, fitting)
        if self._chosen and schedule.streams.asynchronous:
            self._sent = sent
        else:
            self._follow(schedule, sent)

    def _fitting(self, schedule: Schedule) -> int:
        """Bytes that could stay gathered on this rank."""
        reserve, state = schedule.reserve, None if self._memory is None else self._memory()
        kept, short = reserve.num_bytes, reserve.moved
        reserve.moved = 0
        if state is not None and state.failures > self._failures:
            self._failures = state.failures
            short = short or (kept + 1) // 2  # user code found no memory
        if short:
            self._limit = max(0, min(self._limit, kept - short))
        if not self._auto or state is None:
            return self._limit
        spare = spare_bytes(state)
        if (SHORT - MARGIN) * state.total < spare < 0 and self._chosen:
            spare = 0  # not worth another choice
        return max(0, min(self._limit, kept + spare))

    def _follow(self, schedule: Schedule, sent: tuple[torch.Tensor, Any]) -> None:
        """Chooses anew if a rank can not keep as much as now, or all ranks can keep more."""
        values, event = sent
        if event is not None:
            event.synchronize()
        fitting, kept = int(values), schedule.reserve.num_bytes
        if self._chosen and fitting < kept:
            logger.warning(
                "memory got short on a rank: units that stay gathered from forward to backward "
                "(set_resident_budget) shrink from %d to %d bytes. No step was lost; units waited "
                "in host memory where there was no room",
                kept,
                fitting,
            )
        elif self._chosen and not (self._auto and fitting - kept >= schedule.reserve.next_bytes):
            return
        self._chosen = True
        _release(schedule)
        keep(schedule, fitting)


def spare_bytes(state: MemoryState) -> int:
    """Bytes that no moment of training has needed so far, less the margin; may be negative."""
    return int(state.reachable - state.peak - MARGIN * state.total)


def _send(schedule: Schedule, value: int) -> tuple[torch.Tensor, Any]:
    """The least value of all ranks, and the event after which it can be read."""
    streams = schedule.streams
    # Ranks that chose differently would gather in different orders and wait forever.
    infos = [group.mesh_info for unit in schedule.units for group in unit.groups]
    streams.comm_waits_for_compute()
    with streams.on_comm():
        values = torch.full(
            (), value, dtype=torch.int64, device=streams.device
        )  # no copy to wait for
        agreed(infos, values, dist.ReduceOp.MIN)
        if not streams.asynchronous:
            return values, None
        host = torch.empty((), dtype=torch.int64, pin_memory=True)
        host.copy_(values, non_blocking=True)
    return host, streams.record_comm(streams.new_event())
