"""Collective calls that fail alike on every rank, and say who is missing."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from .. import _torch

T = TypeVar("T")

ARRIVAL_TIMEOUT = datetime.timedelta(minutes=10)
"""How long a rank waits at the beginning of a collective call for the others to make it too."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on every rank of the call."""


class Peers:
    """The ranks that make a call together; one process alone if there is no process group.

    Args:
        group: Their process group, ``None`` for the default one.
    """

    _calls: dict[tuple[int, ...], int] = {}  # noqa: RUF012 (shared by all on purpose)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1
        if self.rank < 0:
            raise ValueError("this rank is not part of the process group it was given")

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides and writes for all."""
        return self.rank == 0

    def arrive(self, what: str) -> None:
        """Waits until every rank is here, before any of them starts a collective.

        A collective that some ranks never join ends in a time-out that says nothing of the cause.

        Args:
            what: The user's call, for the message.

        Raises:
            CheckpointError: If a rank does not come within ``ARRIVAL_TIMEOUT``.
        """
        if self.size == 1:
            return
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        key = tuple(members)
        count = self._calls[key] = self._calls.get(key, 0) + 1
        place = f"ya_fsdp/{hash(key)}"
        names = [f"{place}/{count}/{member}" for member in members]
        store = _torch.default_store()
        store.set(names[self.rank], what)
        try:
            store.wait(names, ARRIVAL_TIMEOUT)
        except RuntimeError:  # of a class of its own, or not, depending on the store
            absent = [m for m, name in zip(members, names, strict=True) if not store.check([name])]
            if not absent:
                raise
            # As if it had not been made, so that the same call by all ranks can follow.
            self._calls[key] -= 1
            store.delete_key(names[self.rank])
            raise CheckpointError(
                f"{what} is a collective call: every rank has to make it, but ranks {absent} did "
                f"not within {ARRIVAL_TIMEOUT.total_seconds():g} s. Call it outside of "
                "`if rank == 0:`."
            ) from None
        others = {store.get(name).decode() for name in names}
        if others != {what}:
            raise CheckpointError(f"ranks made different calls at once: {sorted(others)}")
        if count > 1:
            # Whoever is here has read the keys of the call before.
            store.delete_key(f"{place}/{count - 1}/{members[self.rank]}")

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """The leading rank's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Fills a tensor on every rank with the leading rank's values."""
        if self.size > 1 and tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=0)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raises on every rank what the body raised on any rank.

        Args:
            what: What is being done, for the message.

        Raises:
            CheckpointError: If the body raised on some rank; every rank's message says the same.
        """
        problem: Exception | None = None
        try:
            yield
        except CheckpointException as error:
            problem = CheckpointError(_reasons(error))
        except Exception as error:
            problem = error
        mine = None if problem is None else _describe(problem)
        found = self.gather(mine)
        texts: dict[str, list[int]] = {}
        for rank, text in enumerate(found):
            if text is not None:
                texts.setdefault(text, []).append(rank)
        if not texts:
            return
        lines = [
            text if len(ranks) == self.size else f"{text} (on rank {', '.join(map(str, ranks))})"
            for text, ranks in texts.items()
        ]
        raise CheckpointError(f"{what}: " + "\n".join(lines)) from problem


def _reasons(error: CheckpointException) -> str:
    """What went wrong on which rank, without the tracebacks that torch puts into the message."""
    return "; ".join(
        f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}"
        for rank, failure in sorted(error.failures.items())
    )


def _describe(error: Exception) -> str:
    if isinstance(error, (CheckpointError, ValueError, TypeError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
