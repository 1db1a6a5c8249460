"""What every rank was doing when a collective got stuck: a thread, a report and a file.

A collective that never ends is ended by the process group's timeout: gloo raises, torch's own
watchdog kills the process under NCCL. Before that, one thread per process tells the other ranks
(through the store in which they found each other) where this one stands, once nothing has been
communicated for half the timeout. Under NCCL it also writes the report itself, since the process
will not live to raise an error.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from . import _torch

TELL_AFTER = 0.5
"""Part of the timeout without a collective after which the others are told."""

REPORT_AFTER = 0.8
"""Part of the timeout after which a collective that the device has not finished is reported."""

MAX_RANKS = 64
"""Ranks that a report names at most."""

GRACE = 1.0
"""Seconds in which other ranks may tell where they stand when a collective has failed."""


class Progress(Protocol):
    """What is watched: the collectives of one schedule."""

    total: int

    def timeout(self) -> float:
        """Seconds after which a collective fails, the shortest of all groups."""
        ...

    def status(self) -> str:
        """Where this rank stands, in one line."""
        ...

    def history(self) -> list[str]:
        """The last collectives, oldest first."""
        ...

    def stuck(self) -> str | None:
        """The oldest collective that the device has not finished, in words."""
        ...


class _Watched:
    """One schedule under watch, with the time at which it last made progress."""

    def __init__(self, progress: Progress) -> None:
        self.reference = weakref.ref(progress)
        self.timeout = float("inf")
        self.total = -1
        self.since = 0.0
        self.told = False
        self.reported = False

    def look(self, now: float) -> bool:
        """Tells and reports what is due; returns whether there is anything left to watch."""
        progress = self.reference()
        if progress is None:
            return False
        if progress.total != self.total:
            if self.told:
                tell("")
            self.total, self.since, self.timeout = progress.total, now, progress.timeout()
            self.told = self.reported = False
        waited = now - self.since
        if not self.told and waited > TELL_AFTER * self.timeout:
            self.told = True
            tell(progress.status())
        if not self.reported and waited > REPORT_AFTER * self.timeout:
            self.reported = True
            stuck = progress.stuck()
            if stuck is not None:
                _report_stuck(progress, stuck, waited)
        return True


_watched: list[_Watched] = []
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(progress: Progress) -> None:
    """Watches a schedule for as long as it lives; needs a process group of several ranks."""
    global _thread
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with _lock:
        _watched.append(_Watched(progress))
        if _thread is None or not _thread.is_alive():  # not alive in a forked process
            _thread = threading.Thread(target=_run, name="ya_fsdp watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    while True:
        with _lock:
            watched = list(_watched)
        now = time.monotonic()
        gone = [w for w in watched if not w.look(now)]
        pause = min([1.0, *(w.timeout / 8 for w in watched)])
        with _lock:
            for each in gone:
                _watched.remove(each)
        del watched, gone
        time.sleep(pause)


# ---- between ranks -------------------------------------------------------------------------------


def tell(status: str) -> None:
    """Leaves this rank's status where others find it; silent if the store is gone."""
    try:
        if dist.is_initialized():
            _torch.default_store().set(f"ya_fsdp/status/{dist.get_rank()}", status)
    except RuntimeError:
        return


def _statuses(ranks: Sequence[int]) -> dict[int, str]:
    """What ranks have told, after waiting a moment for those that have not."""
    found: dict[int, str] = {}
    deadline = time.monotonic() + GRACE
    try:
        store = _torch.default_store()
        while True:
            for rank in ranks:
                key = f"ya_fsdp/status/{rank}"
                if rank not in found and store.check([key]):
                    text = store.get(key).decode()
                    if text:
                        found[rank] = text
            if len(found) == len(ranks) or time.monotonic() > deadline:
                return found
            time.sleep(0.05)
    except (RuntimeError, ValueError):  # the process that held the store is gone
        return found


def _others(ranks: Sequence[int]) -> str:
    me = dist.get_rank()
    others = [rank for rank in ranks if rank != me][:MAX_RANKS]
    found = _statuses(others)
    silent = [rank for rank in others if rank not in found]
    parts = [f"rank {rank}: {status}" for rank, status in sorted(found.items())]
    if silent:
        parts.append(f"ranks {silent} told nothing: they are busy elsewhere, or gone")
    return "; ".join(parts)


# ---- the report ----------------------------------------------------------------------------------


def describe_failure(progress: Progress, ranks: Sequence[int], what: str) -> str:
    """Where every rank stands and which file has more, after a collective has failed here.

    Args:
        progress: The schedule whose collective failed.
        ranks: The ranks of its process group.
        what: What failed, for the file.
    """
    tell(progress.status())
    others = _others(ranks)
    path = write_dump(progress, f"{what}\n{others}")
    where = f" More is in {path}." if path else ""
    return f"{others}.{where}" if others else where.strip()


def _report_stuck(progress: Progress, stuck: str, waited: float) -> None:
    what = f"{stuck} has not finished, and nothing was started for {waited:.0f} s"
    others = _others(range(dist.get_world_size()))
    path = write_dump(progress, f"{what}\n{others}")
    print(f"ya_fsdp: rank {dist.get_rank()}: {what}; {others}. See {path}", file=sys.stderr)


def write_dump(progress: Progress, what: str) -> str | None:
    """Writes what this rank was doing to a new file; returns its name, ``None`` on failure.

    The folder is that in ``YA_FSDP_DUMP_DIR``, else the system's for temporary files. The file is
    readable by its owner only and holds names of modules, numbers and stacks of calls: no values of
    variables, no arguments of the program, nothing of the environment.
    """
    lines = [
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}, "
        f"process {os.getpid()}, torch {torch.__version__}",
        time.strftime("%Y-%m-%d %H:%M:%S %z"),
        what,
        progress.status(),
        "",
        "last collectives, oldest first:",
        *(f"  {line}" for line in progress.history()),
    ]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines += ["", f"thread {names.get(ident, ident)}:"]
        lines += [line.rstrip() for line in traceback.format_stack(frame)]
    try:
        folder = os.environ.get("YA_FSDP_DUMP_DIR") or None
        prefix = f"ya_fsdp_rank{dist.get_rank()}_"
        number, path = tempfile.mkstemp(prefix=prefix, suffix=".txt", dir=folder)
        with os.fdopen(number, "w") as file:
            file.write("\n".join(lines) + "\n")
    except OSError:
        return None
    return path
