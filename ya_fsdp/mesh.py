"""The process groups behind a device mesh, looked up once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from .ragged import make_placement


@dataclass
class MeshInfo:
    """The process groups behind a mesh.

    Attributes:
        mesh: 1-D (shard) or 2-D (replicate, shard) device mesh.
        shard_group: Ranks over which parameters are cut.
        replicate_group: Ranks that hold equal shards, or ``None`` on a 1-D mesh.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_rank: int
    shard_size: int
    replicate_group: dist.ProcessGroup | None = None
    replicate_size: int = 1

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshInfo:
        """Reads the groups of a 1-D or 2-D mesh; the last axis is the one that shards."""
        axis = mesh.ndim - 1
        info = cls(mesh, mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis))
        if mesh.ndim == 2:
            info.replicate_group = mesh.get_group(0)
            info.replicate_size = mesh.size(0)
        return info

    def placements(self, bounds: Sequence[int], shape: torch.Size) -> tuple[Placement, ...]:
        """The placements of a parameter with these bounds."""
        ragged = cast(Placement, make_placement(tuple(bounds), shape))
        return (ragged,) if self.mesh.ndim == 1 else (Replicate(), ragged)


_subgroups: dict[tuple[dist.ProcessGroup, int], dist.ProcessGroup] = {}


def subgroup_of(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """The ``size`` neighbouring ranks of ``group`` that this rank is among.

    Made once per group and size, by the ranks of ``group`` alone.
    """
    found = _subgroups.get((group, size))
    if found is None or not _is_alive(found):
        ranks = dist.get_process_group_ranks(group)
        first = group.rank() // size * size
        made = dist.new_group(
            ranks[first : first + size],
            backend=str(dist.get_backend_config(group)),
            use_local_synchronization=True,
        )
        assert isinstance(made, dist.ProcessGroup)
        found = _subgroups[group, size] = made
    return found


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_backend(group)
    except ValueError:  # destroy_process_group() has ended it
        return False
    return True
