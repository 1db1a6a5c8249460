"""Multiprocessors for communication: how many, by the user's word or by measurement."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from . import _torch
from .build import groups_of, require_sharded, schedule_of
from .carveout import CarveOut, carveout_available
from .group import ParamGroup
from .mesh import MeshInfo, agreed
from .schedule import Schedule
from .unit import versions_of_weights

logger = logging.getLogger("ya_fsdp")

CANDIDATES = (0, 4, 8, 16)
"""What ``"auto"`` tries; 0: communicators and products as they are without the setting."""

STEPS = 4
"""Optimizer steps per candidate, of which the first is not measured."""


def set_communication_sms(model: nn.Module, num_sms: int | Literal["auto"] | None) -> str:
    """Caps the multiprocessors of collectives and makes matrix products leave them alone.

    NCCL communicators of the model are made anew with at most ``num_sms`` thread blocks, and
    while collectives run, cuBLASLt is told to leave as many multiprocessors. Every rank of the
    model's mesh has to call it. Where device or back end offer neither, nothing changes.

    Args:
        model: A sharded model.
        num_sms: Multiprocessors for communication; ``"auto"`` tries 0, 4, 8 and 16 for four
            optimizer steps each, from the next step on, and keeps the one whose steps were the
            shortest on the slowest rank; ``None`` restores the default behaviour.

    Returns:
        What was done, in words.

    Raises:
        ValueError: If ``num_sms`` is not positive, or the model is not sharded.
    """
    require_sharded(model)
    schedule = schedule_of(model)
    is_count = isinstance(num_sms, int) and not isinstance(num_sms, bool) and num_sms > 0
    if not is_count and num_sms is not None and num_sms != "auto":
        raise ValueError(f"num_sms must be a positive int, 'auto' or None, got {num_sms!r}")
    _stop_trial(schedule)
    groups = list(groups_of(model))
    setting = _setting_of(schedule, groups)
    if num_sms is None:
        return setting.apply(0)
    if not groups or not (setting.has_nccl() or carveout_available(groups[0].device)):
        message = "nothing: this device and back end offer no such setting"
    elif num_sms == "auto":
        Trial(schedule, setting.apply, CANDIDATES, setting.keep_only)
        message = f"{CANDIDATES} multiprocessors are tried for {STEPS} steps each"
    else:
        message = setting.apply(num_sms)
    logger.info("set_communication_sms(%r): %s", num_sms, message)
    return message


class _Setting:
    """A model's communicators by their cap, and its schedule's carve-out."""

    def __init__(self, schedule: Schedule, groups: Sequence[ParamGroup]) -> None:
        self._schedule = weakref.ref(schedule)
        self._groups = groups
        self._own = [group.mesh_info for group in groups]  # as the user made them
        self._made: dict[int, dict[int, MeshInfo]] = {}

    def has_nccl(self) -> bool:
        return any(dist.get_backend(info.shard_group) == "nccl" for info in self._own)

    def apply(self, count: int) -> str:
        """Uses ``count`` multiprocessors for communication from now on; 0: no such limit."""
        schedule = self._schedule()
        if schedule is None:
            return "nothing: the model is gone"
        if count == 0:
            for group, info in zip(self._groups, self._own, strict=True):
                if group.mesh_info is not info:
                    group.use_mesh(info)
            schedule.set_carveout(None)
            return "communicators and products use any multiprocessor again"
        done = []
        if capped := self._cap(count):
            done.append(f"{capped} NCCL communicators capped at {count} thread blocks")
        if carveout_available(schedule.streams.device):
            schedule.set_carveout(CarveOut(count))
            done.append(f"matrix products leave {count} multiprocessors during communication")
        return "; ".join(done)

    def _cap(self, count: int) -> int:
        made = self._made.setdefault(count, {})
        for group, own in zip(self._groups, self._own, strict=True):
            if dist.get_backend(own.shard_group) != "nccl":
                continue
            if id(own) not in made:
                ranks = dist.get_process_group_ranks(own.shard_group)
                options = _torch.nccl_options(max_ctas=count)
                capped = dist.new_group(ranks, pg_options=options, use_local_synchronization=True)
                made[id(own)] = replace(own, shard_group=capped)
            group.use_mesh(made[id(own)])
        return len(made)

    def keep_only(self, count: int) -> None:
        """Gives the memory of all other communicators back."""
        for other in [c for c in self._made if c != count]:
            for info in self._made.pop(other).values():
                dist.destroy_process_group(info.shard_group)


_settings: weakref.WeakKeyDictionary[Schedule, _Setting] = weakref.WeakKeyDictionary()


def _setting_of(schedule: Schedule, groups: Sequence[ParamGroup]) -> _Setting:
    found = _settings.get(schedule)
    if found is None:
        found = _settings[schedule] = _Setting(schedule, groups)
    return found


def _stop_trial(schedule: Schedule) -> None:
    schedule.after_backward = [e for e in schedule.after_backward if not isinstance(e, Trial)]


class Trial:
    """Tries settings for some optimizer steps each and keeps the quickest.

    A step is what lies between the ends of two backward passes before which the weights changed,
    so that one with several microbatches counts as one.

    Args:
        schedule: Whose steps are measured.
        apply: Makes a candidate the setting.
        candidates: In the order in which they are tried.
        chosen: Called with the best one after it was applied.
        now: Marks this moment on the device; ``None``: its events, or the host's clock.
    """

    def __init__(
        self,
        schedule: Schedule,
        apply: Callable[[int], object],
        candidates: Sequence[int],
        chosen: Callable[[int], None],
        now: Callable[[], Any] | None = None,
    ) -> None:
        self._schedule = weakref.ref(schedule)
        self._apply = apply
        self._candidates = candidates
        self._chosen = chosen
        self._now = now or _clock(schedule.streams.device)
        self._versions = versions_of_weights(schedule.units)
        self._marks: list[list[Any]] = []
        schedule.after_backward = [*schedule.after_backward, self]

    def __call__(self) -> None:
        """A backward pass has ended."""
        schedule = self._schedule()
        if schedule is None or _torch.is_capturing(schedule.streams.device):
            return
        versions = versions_of_weights(schedule.units)
        if versions == self._versions:
            return
        self._versions = versions
        if self._marks:
            self._marks[-1].append(self._now())
            if len(self._marks[-1]) <= STEPS:
                return
        if len(self._marks) < len(self._candidates):
            self._apply(self._candidates[len(self._marks)])
            self._marks.append([self._now()])
        else:
            self._finish(schedule)

    def _finish(self, schedule: Schedule) -> None:
        _stop_trial(schedule)
        times = torch.tensor([_shortest(marks[1:]) for marks in self._marks])
        infos = [group.mesh_info for unit in schedule.units for group in unit.groups]
        slowest = agreed(infos, times.to(schedule.streams.device), dist.ReduceOp.MAX).tolist()
        best = self._candidates[min(range(len(slowest)), key=slowest.__getitem__)]
        message = self._apply(best)
        self._chosen(best)
        table = ", ".join(
            f"{count}: {seconds * 1e3:.2f} ms"
            for count, seconds in zip(self._candidates, slowest, strict=True)
        )
        logger.info(
            "set_communication_sms('auto'): %d is the quickest of (%s); %s", best, table, message
        )


def _shortest(marks: Sequence[Any]) -> float:
    """Seconds between the two neighbours that lie closest."""
    if isinstance(marks[0], float):
        return float(min(b - a for a, b in pairwise(marks)))
    marks[-1].synchronize()
    return float(min(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3)


def _clock(device: torch.device) -> Callable[[], Any]:
    if device.type == "cpu":
        return time.perf_counter

    def mark() -> Any:
        event = torch.get_device_module(device).Event(enable_timing=True)
        event.record()
        return event

    return mark
