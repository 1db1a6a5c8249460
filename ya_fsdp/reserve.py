"""What a rank does when memory gets short: units that stay gathered wait in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from . import _torch
from .streams import Streams
from .unit import Phase, Unit

SHORT = 0.02
"""Part of a device's memory that has to be free beside a unit that takes memory to stay in."""

T = TypeVar("T")


@dataclass(frozen=True)
class MemoryState:
    """A device's memory at one moment, in bytes.

    Attributes:
        total: All of it.
        reachable: What torch's allocator has or could get, used or not.
        allocated: What tensors use now.
        peak: The most that tensors have used.
        failures: How often the allocator had nothing left, so far.
    """

    total: int
    reachable: int
    allocated: int
    peak: int
    failures: int = 0

    @classmethod
    def of(cls, device: torch.device) -> MemoryState:
        """That of a CUDA device."""
        free, total = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        allocated = stats["allocated_bytes"]["all"]
        reachable = free + stats["reserved_bytes"]["all"]["current"]
        failures = stats["num_ooms"]
        return cls(total, reachable, allocated["current"], allocated["peak"], failures)


class Reserve:
    """Units that stay gathered by choice, whose memory can be had for a while.

    Between a unit's forward and its backward its bytes may lie in host memory, which costs two
    copies and no communication: other ranks, which may have memory enough, notice nothing. They
    agree on keeping fewer units later (:mod:`ya_fsdp.residency`).

    Attributes:
        units: The units.
        memory: Tells the state of the device's memory, ``None`` where nobody knows.
        next_bytes: Bytes of the smallest unit that could be one of them and is not.
        moved: Bytes that went to host memory since somebody set this to 0.
    """

    def __init__(self, streams: Streams) -> None:
        self.units: Sequence[Unit] = ()
        self.memory: Callable[[], MemoryState] | None = None
        self.next_bytes = 0
        self.moved = 0
        self._streams = streams
        self._aside: dict[Unit, tuple[int, Tensor]] = {}

    def hold(self, units: Sequence[Unit]) -> None:
        """Replaces the units; what is in host memory already stays until its backward."""
        self.units = tuple(units)

    @property
    def num_bytes(self) -> int:
        """Bytes of all units while they are gathered."""
        return sum(unit.gather_bytes for unit in self.units)

    def before(self, unit: Unit) -> None:
        """Makes room for a unit of the reserve that is about to take memory for its forward."""
        if self.memory is None or unit.pending_backward or unit not in self.units:
            return
        if _torch.is_capturing(self._streams.device):
            return
        assert unit.slot is not None
        state = self.memory()
        wanted = unit.slot.num_bytes - unit.slot.resident_bytes + int(SHORT * state.total)
        missing = wanted - (state.reachable - state.allocated)
        if missing > 0:
            self.make_room(missing)

    def make_room(self, num_bytes: int | None = None) -> int:
        """Moves units to host memory, those first whose backward comes last.

        Args:
            num_bytes: At least so many bytes if there are as many; ``None``: all.

        Returns:
            Bytes that became free.
        """
        freed = 0
        for unit in sorted(filter(_waits, self.units), key=lambda u: u.backward_position):
            if num_bytes is None or freed < num_bytes:
                freed += self._set_aside(unit)
        self.moved += freed
        return freed

    def with_room(self, allocate: Callable[[], T]) -> T:
        """What ``allocate`` returns, called again after all units have moved if memory is out.

        Raises:
            torch.OutOfMemoryError: If it is out all the same.
        """
        try:
            return allocate()
        except torch.OutOfMemoryError:
            if not self.make_room():
                raise
        return allocate()

    def _set_aside(self, unit: Unit) -> int:
        slot = unit.slot
        assert slot is not None
        pinned = self._streams.asynchronous
        with torch.inference_mode(False), torch.no_grad():
            host = torch.empty(slot.num_bytes, dtype=torch.uint8, pin_memory=pinned)
            host.copy_(slot.buffer[: slot.num_bytes], non_blocking=True)
        self._aside[unit] = (slot.stamp, host)
        unit.mark_stale()  # a backward that reaches the bytes in another way must raise
        slot.holder, slot.stamp = None, -1
        slot.free_storage()
        return slot.num_bytes

    def has(self, unit: Unit, stamp: int | None = None) -> bool:
        """Whether a unit's bytes of an iteration (of any) are in host memory."""
        found = self._aside.get(unit)
        return found is not None and stamp in (None, found[0])

    def bring_back(self, unit: Unit) -> int:
        """Copies a unit's bytes into its slot, which has memory again; returns their iteration."""
        stamp, host = self._aside.pop(unit)
        slot = unit.slot
        assert slot is not None
        with torch.inference_mode(False), torch.no_grad():
            slot.buffer[: slot.num_bytes].copy_(host, non_blocking=True)
        return stamp


def _waits(unit: Unit) -> bool:
    """Whether a unit lies gathered in memory of its own until its backward gathers it."""
    slot = unit.slot
    if slot is None or slot.fixed or not slot.own or slot.holder is not unit:
        return False
    idle = unit.phase is Phase.IDLE and not unit.held and not unit.gather_pending
    return idle and slot.content is unit and unit.unshard_in_backward and unit.pending_backward > 0
