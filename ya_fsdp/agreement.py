"""Whether all ranks run the same collectives in the same order, and what to say when they do not.

Every gather and every reduction leaves one integer in the trail of its process group. Trails are
compared where ranks talk to each other anyway: at the end of a backward pass.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from . import _torch, watchdog
from ._torch_watch import timeout_of
from .collectives import Collectives
from .mesh import MeshInfo
from .streams import Streams
from .unit import Phase, Unit

REMEMBERED = 1024
"""Collectives a trail can name; its fingerprint covers all since the last comparison."""

REMEMBERED_EVENTS = 64
"""Collectives whose completion on the device the watchdog can ask about."""

HISTORY = 50
"""Collectives that a report of the watchdog lists."""

FIRST_PASSES = 2
EVERY = 64
"""Backward passes whose trails are compared: the first ones, then one in this many."""

NUM_MARKS = 4
"""Integers that every usage exchange has room for, so that its size never changes."""

_PRIME = (1 << 31) - 1
_NAMES: dict[int, str] = {}
_EMPTY = -1


class Kind:
    """What an entry of a trail says. Plain integers, since those of an enum are slow to combine."""

    GATHER = 0
    REDUCE = 1
    SETTINGS = 2


_WORDS = {
    Kind.GATHER: "gathers '{}'",
    Kind.REDUCE: "reduces the gradients of '{}'",
    Kind.SETTINGS: "has other shapes, dtypes or requires_grad in '{}'",
}


def debug_mode() -> bool:
    """Whether ``YA_FSDP_DEBUG=1`` asks for checks that cost time; read when a root first runs."""
    return os.environ.get("YA_FSDP_DEBUG", "") not in ("", "0")


class Path:
    """The trail over one process group.

    Attributes:
        value: A fingerprint of all entries since the last comparison.
        count: How many these are.
        entries: The last of them.
        passes: Backward passes that ended with a usage exchange over this group.
    """

    __slots__ = ("count", "entries", "passes", "value")

    def __init__(self) -> None:
        self.passes = 0
        self.value = 1
        self.count = 0
        self.entries: deque[int] = deque(maxlen=REMEMBERED)

    def add(self, entry: int) -> None:
        """Appends an entry."""
        self.value = hash((self.value, entry))  # of integers: the same in every process
        self.count += 1
        self.entries.append(entry)

    def clear(self) -> None:
        """Starts anew after a comparison."""
        self.value = 1
        self.count = 0
        self.entries.clear()


class Trail:
    """What one schedule has communicated on this rank, by process group.

    Attributes:
        debug: Whether every collective is announced before it starts (``YA_FSDP_DEBUG=1``).
        total: Collectives completed (or enqueued, on a GPU) so far.
        last: The last of them.
        current: The unit whose collective the host is waiting for.
        left: What may have taken this rank out of step with others, in words.
    """

    def __init__(self) -> None:
        self.debug = debug_mode()
        self.total = 0
        self.last = _EMPTY
        self.current: Unit | None = None
        self.left = ""
        self._recent: deque[int] = deque(maxlen=HISTORY)
        self._events: deque[tuple[int, Any]] = deque(maxlen=REMEMBERED_EVENTS)
        self._paths: dict[int, Path] = {}
        # With their timeouts; kept, so that no other group gets the id of one.
        self._groups: list[tuple[dist.ProcessGroup, float]] = []

    def note(self, unit: Unit, kind: int, groups: int) -> None:
        """Remembers a collective of ``unit`` over its ``groups`` groups."""
        mark = unit.mark if unit.marked_as is unit.fqn else mark_of(unit)
        entry = mark << 36 | groups << 4 | kind
        self.total += 1
        self.last = entry
        self._recent.append(entry)
        self.current = None
        info = unit.groups[0].mesh_info
        device = unit.groups[0].device
        path = self._paths.get(id(info.shard_group)) or self.path(info.shard_group, device)
        path.add(entry)
        if kind == Kind.REDUCE and info.replicate_group is not None:
            # Replicas may run forwards on their own; their reductions have to agree.
            self.path(info.replicate_group, device).add(entry)

    def path(self, group: dist.ProcessGroup, device: torch.device | None = None) -> Path:
        """The trail over one process group."""
        path = self._paths.get(id(group))
        if path is None:
            path = self._paths[id(group)] = Path()
            timeout = timeout_of(group, device or torch.device("cpu"))
            self._groups.append((group, timeout))
        return path

    def forget_groups(self) -> None:
        """The process groups are destroyed."""
        self._groups.clear()
        self._paths.clear()

    def leave_order(self, unit: Unit, before: Sequence[Unit]) -> None:
        """Remembers that this rank runs ``unit`` where the last iteration ran ``before``."""
        there = f"ran '{before[0].fqn}'" if before else "had ended"
        self.left = f"it ran '{unit.fqn}' where the step before {there}"

    def go_on_after_exception(self) -> None:
        """Remembers that an exception cut a forward or backward short, here at least."""
        self.left = f"an exception ended a pass of it after {self.total} collectives"

    def completes_with(self, event: Any) -> None:
        """The collective noted last has completed on the device when ``event`` has."""
        if event is not None:
            self._events.append((self.last, event))

    # ---- for the watchdog ------------------------------------------------------------------------

    def timeout(self) -> float:
        """Seconds after which a collective fails, the shortest of all process groups."""
        return min((seconds for _, seconds in self._groups), default=float("inf"))

    def status(self) -> str:
        """Where this rank stands, in one line."""
        last = "none" if self.last == _EMPTY else describe(self.last)
        text = f"{self.total} collectives started, the last one: {last}"
        if self.current is not None:
            text += f"; waiting in one of unit '{self.current.fqn}' now"
        return text + (f"; {self.left}" if self.left else "")

    def history(self) -> list[str]:
        """The last collectives, oldest first."""
        return [describe(entry) for entry in self._recent.copy()]

    def stuck(self) -> str | None:
        """The oldest collective that the device has not finished; ``None`` if that is unknown.

        Events are recorded again and again, so only the newest entry of each says anything.
        """
        seen: set[int] = set()
        oldest = None
        try:
            for entry, event in reversed(self._events.copy()):
                if id(event) in seen:
                    continue
                seen.add(id(event))
                if event.query():
                    break
                oldest = describe(entry)
        except RuntimeError:  # recorded while a graph was captured
            return None
        return oldest

    # ---- errors of a collective itself ---------------------------------------------------------

    def fail(self, error: RuntimeError, unit: Unit | None, doing: str) -> NoReturn:
        """Raises what says which unit this rank was busy with; out of memory stays what it is."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        where = doing
        if unit is not None:
            where = f"{doing} unit '{unit.fqn}'"
            if unit.phase is not Phase.IDLE:
                where += f" ({unit.phase.name.lower()})"
            elif doing == "gathering":
                where += " (ahead of its use)"
        last = "none" if self.last == _EMPTY else f"this rank {describe(self.last)}"
        what = (
            f"rank {dist.get_rank()}: a collective failed while {where}; {self.total} were "
            f"completed before it, the last one: {last}."
        )
        group = unit.groups[0].mesh_info.shard_group if unit is not None else None
        ranks = dist.get_process_group_ranks(group)
        others = watchdog.describe_failure(self, ranks, f"{what} {error}")
        raise RuntimeError(
            f"{what} {others} Every rank has to call the same units in the same order and equally "
            "often; YA_FSDP_DEBUG=1 names the rank and the unit that differ first. The error was: "
            f"{error}"
        ) from error

    # ---- before a collective, in debug mode ------------------------------------------------------

    def announce(self, unit: Unit, kind: int, collectives: Collectives, streams: Streams) -> None:
        """Raises on every rank unless all are about to run the same collective."""
        group = unit.groups[0]
        if _torch.is_capturing(group.device):
            return
        entry = (mark_of(unit) << 36) | kind
        info = group.mesh_info
        axes = [info.shard_group]
        if kind == Kind.REDUCE and info.replicate_group is not None:
            axes.append(info.replicate_group)
        for axis in axes:
            try:
                rows = _exchanged([entry], axis, group.device, collectives, streams)
            except RuntimeError as error:
                self.fail(error, unit, "agreeing with the other ranks about")
            seen = [row[0] for row in rows]
            if any(other != entry for other in seen):
                raise RuntimeError(
                    f"ranks are about to run different collectives, after {self.total} equal "
                    f"ones: {_by_rank(seen, axis)}. {_REMEDY}"
                )

    # ---- at the end of a backward pass -----------------------------------------------------------

    def due(self, info: MeshInfo, units: Sequence[Unit]) -> list[int]:
        """Four integers for the usage exchange, or none when trails are not compared now."""
        path = self.path(info.shard_group)
        path.passes += 1
        if path.passes > FIRST_PASSES and path.passes % EVERY and not self.debug:
            return []
        across = [info.replicate_group] if info.replicate_group is not None else []
        for unit in units:
            if unit.groups and unit.groups[0].mesh_info.shard_group is info.shard_group:
                settings = (mark_of(unit) << 36) | (_settings(unit) << 4) | Kind.SETTINGS
                for group in (info.shard_group, *across):
                    self.path(group).add(settings)
        value = path.value % _PRIME
        replicas = self.path(across[0]).value % _PRIME if across else 0
        return [value, -value, replicas, -replicas]

    def compare(
        self, reduced: Sequence[int], info: MeshInfo, collectives: Collectives, streams: Streams
    ) -> None:
        """Raises on every rank if the exchanged integers say that trails differ.

        Args:
            reduced: The last four integers of the exchange: the spread over the shard axis, an
                unused one, and maximum and negated minimum over both axes.
            info: The process groups.
            collectives: The back end.
            streams: The streams of the schedule.
        """
        path = self.path(info.shard_group)
        apart = [(info.shard_group, path)] if reduced[0] else []
        if info.replicate_group is not None and reduced[2] + reduced[3]:
            apart.append((info.replicate_group, self.path(info.replicate_group)))
        found = ""
        device = torch.device(streams.device)
        for group, trail in apart:
            rows = _exchanged(_packed(trail), group, device, collectives, streams)
            found = found or _first_difference(rows, group)
        self.path(info.shard_group).clear()
        if info.replicate_group is not None:
            self.path(info.replicate_group).clear()
        if apart:
            found = found or "ranks of another shard or replicate group differ"
            raise RuntimeError(
                f"ranks did not run the same collectives up to the end of backward pass "
                f"{path.passes}: {found}. Gradients of this pass are wrong. {_REMEDY}"
            )


_REMEDY = (
    "Every rank has to call the same units in the same order and equally often: give a rank that "
    "has nothing to compute an empty batch, or call set_reduce_unused (docs/troubleshooting.md)."
)


def spread(flags: Tensor) -> None:
    """After the shard axis: turns maximum and negated minimum into one number that adds up.

    The maximum over the replicate axis is then positive everywhere if any shard group disagreed.
    """
    flags[-4:-3].add_(flags[-3:-2])


def mark_of(unit: Unit) -> int:
    """24 bits that stand for a unit on every rank, whatever else a process has built."""
    if unit.marked_as is not unit.fqn:
        numel = sum(group.layout.total_numel for group in unit.groups)
        unit.mark = zlib.crc32(f"{unit.fqn}:{numel}".encode()) & 0xFFFFFF
        unit.marked_as = unit.fqn
        _NAMES[unit.mark] = unit.fqn
    return unit.mark


def describe(entry: int) -> str:
    """An entry of a trail in words."""
    name = _NAMES.get(entry >> 36, "a unit that this rank does not have")
    return _WORDS[entry & 15].format(name)


def _settings(unit: Unit) -> int:
    params = [p for group in unit.groups for p in group.grads.unsharded]
    text = ",".join(f"{p.requires_grad}{tuple(p.shape)}{p.dtype}" for p in params)
    return zlib.crc32(text.encode())


def _packed(path: Path) -> list[int]:
    """The trail with its start, in a fixed length."""
    entries = list(path.entries)
    empty = [_EMPTY] * (REMEMBERED - len(entries))
    return [path.count - len(entries), *entries, *empty]


def _exchanged(
    values: list[int],
    group: dist.ProcessGroup,
    device: torch.device,
    collectives: Collectives,
    streams: Streams,
) -> list[list[int]]:
    """Every rank's integers; waits for them."""
    with streams.on_comm(), torch.no_grad():
        mine = torch.tensor(values, dtype=torch.int64).to(device)
        everyone = mine.new_empty(dist.get_world_size(group) * len(values))
        collectives.all_gather(everyone, mine, group)
        rows: list[list[int]] = everyone.view(-1, len(values)).tolist()
    return rows


def _first_difference(rows: list[list[int]], group: dist.ProcessGroup) -> str:
    start = max(row[0] for row in rows)
    aligned = [row[1 + start - row[0] :] for row in rows]
    for index, entries in enumerate(zip(*aligned, strict=False)):
        if any(entry != entries[0] for entry in entries):
            return f"number {start + index + 1} was the first that differed: " + _by_rank(
                entries, group
            )
    return ""


def _by_rank(entries: Sequence[int], group: dist.ProcessGroup) -> str:
    """Who does what, such as "rank 0 gathers 'a', ranks [1, 2] ..."."""
    who: dict[int, list[int]] = {}
    for rank, entry in zip(dist.get_process_group_ranks(group), entries, strict=True):
        who.setdefault(entry, []).append(rank)
    settings = all(entry == _EMPTY or entry & 15 == Kind.SETTINGS for entry in who)
    if settings and len({entry >> 36 for entry in who}) == 1:
        name = _NAMES.get(next(iter(who)) >> 36, "?")
        return f"shapes, dtypes or requires_grad in '{name}', alike on ranks " + " and on ".join(
            str(ranks) for ranks in who.values()
        )
    return ", ".join(
        f"{f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {ranks}'} "
        f"{'does nothing more' if entry == _EMPTY else describe(entry)}"
        for entry, ranks in who.items()
    )
