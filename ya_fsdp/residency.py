"""Which units stay gathered from forward to backward: as many as a budget of bytes allows."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from . import _torch
from .build import require_sharded, schedule_of
from .mesh import agreed
from .schedule import Schedule
from .unit import Unit, versions_of_weights

logger = logging.getLogger("ya_fsdp")

MARGIN = 0.05
"""Part of the device's memory that ``"auto"`` leaves alone: fragments, other libraries, peaks that
the first step did not show."""

MAX_CHOICES = 2048
"""Sums that the search for the best selection keeps; more only if all units differ in size."""

_kept: weakref.WeakSet[Unit] = weakref.WeakSet()


def set_resident_budget(model: nn.Module, num_bytes: int | Literal["auto"] | None) -> list[str]:
    """Keeps as many units gathered from forward to backward as fit a number of bytes.

    A unit that stays gathered has a buffer of its own and is gathered once per step instead of
    twice, as with ``set_reshard_after_forward(False)`` on its module. The selection saves the
    most traffic that the budget allows; among equals it takes units that run late, which wait
    least for their backward. Units that need no second gather anyway are passed over: those alone
    in their buffer, those whose shards are whole, and those told to stay gathered.

    Every rank has to call it with the same value, between steps; it counts from the next forward
    on. A later call replaces an earlier one.

    Args:
        model: A sharded model, the root of its units.
        num_bytes: Bytes of gathered parameters that may stay. ``"auto"``: what the device has free
            after the first step, less 5 % of its memory; chosen at the end of the first backward
            after weights have changed (when the optimizer's state exists), from the peak since
            the program began or ``torch.cuda.reset_peak_memory_stats()``, the same on all ranks.
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
    if num_bytes == "auto":
        if device.type != "cuda":
            raise ValueError(
                f"set_resident_budget('auto') needs a device that tells its free memory, and the "
                f"model is on {device.type}; pass a number of bytes"
            )
        _forget(schedule)
        _Watch(schedule, lambda: spare_bytes(device))
        return []
    _forget(schedule)
    return [] if num_bytes is None else keep(schedule, num_bytes)


def _check(num_bytes: object) -> None:
    if num_bytes is None or num_bytes == "auto":
        return
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool):
        raise TypeError(f"num_bytes must be an int, 'auto' or None, got {num_bytes!r}")
    if num_bytes < 0:
        raise ValueError(f"num_bytes must not be negative, got {num_bytes}")


def _forget(schedule: Schedule) -> None:
    for unit in schedule.units:
        if unit in _kept:
            _kept.discard(unit)
            unit.reshard_after_forward = True
            schedule.pool.dirty = True
    schedule.after_backward = [e for e in schedule.after_backward if not isinstance(e, _Watch)]


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


# ---- "auto" --------------------------------------------------------------------------------------


def spare_bytes(device: torch.device) -> int:
    """Bytes of device memory that no moment of training has needed so far, less the margin."""
    free, total = torch.cuda.mem_get_info(device)
    reachable = free + torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return max(0, int(reachable - peak - MARGIN * total))


class _Watch:
    """Waits for the end of a backward after the first change of weights, then chooses once."""

    def __init__(self, schedule: Schedule, measure: Callable[[], int]) -> None:
        self._schedule = weakref.ref(schedule)
        self._measure = measure
        self._versions = versions_of_weights(schedule.units)
        schedule.after_backward = [*schedule.after_backward, self]

    def __call__(self) -> None:
        schedule = self._schedule()
        if schedule is None or versions_of_weights(schedule.units) == self._versions:
            return
        device = schedule.streams.device
        if _torch.is_capturing(device):
            return
        _forget(schedule)
        # Ranks that chose differently would gather in different orders and wait forever.
        spare = torch.tensor(self._measure(), dtype=torch.int64, device=device)
        infos = [group.mesh_info for unit in schedule.units for group in unit.groups]
        keep(schedule, int(agreed(infos, spare, dist.ReduceOp.MIN)))
