"""Gathers and sums over all ranks of a 2-D mesh in two steps: over one axis, then the other.

Shards are numbered as ranks are, replicas first: rank ``s`` of replica ``r`` has shard
``r * inner_size + s``. What all replicas' rank ``s`` hold together (a *part*) is therefore one
shard out of every run of ``inner_size``, and what a replica holds is one whole run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Collectives


@dataclass(frozen=True)
class Levels:
    """The two axes of a mesh over all of whose ranks shards are cut.

    Attributes:
        inner: The shard axis, over which units are gathered for every forward and backward.
        outer: The replicate axis.
    """

    inner: dist.ProcessGroup
    inner_size: int
    outer: dist.ProcessGroup
    outer_rank: int
    outer_size: int

    def gather_part(self, part: Tensor, shard: Tensor, collectives: Collectives) -> None:
        """Collects the shards of all replicas' ranks of this number.

        Args:
            part: Shape (outer_size * n,).
            shard: This rank's, shape (n,), cast to the dtype of ``part``.
            collectives: The back end.
        """
        size = shard.numel()
        mine = part[self.outer_rank * size : (self.outer_rank + 1) * size]
        mine.copy_(shard)
        if self.outer_size > 1:
            collectives.all_gather(part, mine, self.outer)

    def gather_whole(self, output: Tensor, part: Tensor, collectives: Collectives) -> None:
        """Collects the parts of all ranks of this replica.

        Args:
            output: Shape (outer_size * inner_size * n,).
            part: What :meth:`gather_part` filled, shape (outer_size * n,).
            collectives: The back end.
        """
        if self.inner_size == 1:
            output.copy_(part)
            return
        runs, shards = output.chunk(self.outer_size), part.chunk(self.outer_size)
        for run, shard in zip(runs, shards, strict=True):
            collectives.all_gather(run, shard, self.inner)

    def sum_inside(
        self, whole: Tensor, dtype: torch.dtype, average: bool, collectives: Collectives
    ) -> Tensor:
        """Sums (or averages) within this replica, for all replicas' ranks of this number.

        Args:
            whole: Shape (outer_size * inner_size * n,).
            dtype: Dtype of the sums.
            average: Whether to divide by ``inner_size``.
            collectives: The back end.

        Returns:
            Shape (outer_size * n,); ``whole`` itself where there is nothing to sum.
        """
        if self.inner_size == 1:
            return whole
        sums = whole.new_empty(whole.numel() // self.inner_size, dtype=dtype)
        runs, shards = whole.chunk(self.outer_size), sums.chunk(self.outer_size)
        for run, shard in zip(runs, shards, strict=True):
            collectives.reduce_scatter(shard, run, average, self.inner)
        return sums

    def own(self, part: Tensor) -> Tensor:
        """This rank's shard of a part."""
        return part.chunk(self.outer_size)[self.outer_rank]
