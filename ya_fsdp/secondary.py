"""A second shard of gathered parameters over fewer ranks, from which backward gathers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Collectives
from .group import ParamGroup
from .levels import Levels
from .mesh import MeshInfo, subgroup_of

Reshard = tuple[bool, dist.ProcessGroup | None]
"""Whether a unit is freed after forward, and the ranks that keep a second shard meanwhile."""


def check_reshard(value: Any) -> None:
    """Refuses what can be no ``reshard_after_forward``.

    Raises:
        TypeError: If it is neither a bool nor an int nor ``None``.
    """
    if value is not None and not isinstance(value, int):
        raise TypeError(f"reshard_after_forward must be a bool, an int or None, got {value!r}")


def resolve_reshard(value: bool | int | None, info: MeshInfo, where: str) -> Reshard:
    """What ``reshard_after_forward`` means on a mesh; makes the smaller process group.

    An int is a number of neighbouring ranks of the shard axis. All of them mean ``True``, one
    means ``False``.

    Args:
        value: See :func:`ya_fsdp.fully_shard`.
        info: The mesh. Every rank of its shard axis makes the call.
        where: Whose parameters, for messages.

    Raises:
        ValueError: If it does not divide the number of ranks that share parameters.
    """
    if value is None or isinstance(value, bool):
        return value is not False, None
    check_divides(value, info, where)
    if value == 1:
        return False, None
    if value == info.shard_size:
        return True, None
    return True, subgroup_of(info.shard_group, value)


def check_divides(value: int, info: MeshInfo, where: str) -> None:
    """Refuses a number of ranks that is no divisor of the shard axis's.

    Raises:
        ValueError: Names the divisors.
    """
    size = info.shard_size
    if info.levels is not None:
        raise ValueError(
            f"reshard_after_forward={value} of {where}: shards are cut over replicas, so every "
            "gather for backward stays within a replica already; pass True or False"
        )
    if value < 1 or size % value:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"reshard_after_forward={value} of {where}: as an int it is the number of ranks that "
            f"keep a second shard, and has to divide the {size} ranks that share parameters; pass "
            f"one of {divisors}, or True or False"
        )


class SecondaryShard:
    """This rank's slice of a unit, as it was gathered for forward, over a smaller group.

    Slices lie in the gather dtype in memory of their own from the first forward on. They are
    written and read on the communication stream, whose memory they are.

    Attributes:
        permanent: Whether it can not be done without.
        group: The ranks that hold the whole unit together.
        stamp: Iteration whose weights the slices have, -1 for none.
    """

    permanent = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.stamp = -1
        self._slices: dict[ParamGroup, Tensor] = {}

    def gather(
        self, groups: Iterable[ParamGroup], collectives: Collectives, stamp: int, keep: bool
    ) -> bool:
        """Gathers from the slices if they are new enough, else from all ranks.

        Args:
            groups: The unit's groups.
            collectives: The back end.
            stamp: Iteration whose weights are wanted. Later ones do: autograd notices by itself
                when weights have changed since a forward.
            keep: Whether to keep slices of what was gathered from all ranks.

        Returns:
            Whether it was gathered from all ranks.
        """
        if stamp <= self.stamp:
            for group in groups:
                if group.gather_output is None:  # its tensor subclass sends what it likes
                    group.gather(collectives)
                else:
                    collectives.all_gather(group.gather_output, self._slices[group], self.group)
            return False
        for group in groups:
            group.gather(collectives)
            if keep:
                self._keep(group)
        if keep:
            self.stamp = stamp
        return True

    def _keep(self, group: ParamGroup) -> None:
        if group.gather_output is None:
            return
        current = group.gather_output.chunk(self.group.size())[self.group.rank()]
        self._slice(group, current).copy_(current)

    def _slice(self, group: ParamGroup, like: Tensor) -> Tensor:
        """The group's slice; made anew where it is unlike the gather slot."""
        mine = self._slices.get(group)
        if mine is None or mine.dtype != like.dtype or mine.device != like.device:
            with torch.inference_mode(False):
                mine = self._slices[group] = torch.empty_like(like)
        return mine

    def forget(self) -> None:
        """Leaves the slices to whoever writes into them."""
        self.stamp = -1
        self._slices.clear()

    def buffers(self) -> Sequence[Tensor]:
        """The slices that exist."""
        return list(self._slices.values())


class PartShard(SecondaryShard):
    """Of a unit cut over all ranks of a 2-D mesh: the shards of all replicas' ranks of one number.

    Every forward of the root fills it over the replicate axis, and units are gathered from it over
    the shard axis in forward and backward.
    """

    permanent = True

    def __init__(self, levels: Levels) -> None:
        super().__init__(levels.inner)
        self._levels = levels

    def gather(
        self, groups: Iterable[ParamGroup], collectives: Collectives, stamp: int, keep: bool
    ) -> bool:
        """See :class:`SecondaryShard`; slices are kept in any case."""
        levels, fresh = self._levels, stamp > self.stamp
        for group in groups:
            assert group.gather_output is not None
            if fresh:
                group.note_version()
                part = self._slice(group, group.gather_output.chunk(levels.inner_size)[0])
                levels.gather_part(part, group.master_shard, collectives)
            levels.gather_whole(group.gather_output, self._slices[group], collectives)
        if fresh:
            self.stamp = stamp
        return fresh
