"""The process groups behind a device mesh, looked up once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from .levels import Levels
from .ragged import make_placement


@dataclass
class MeshInfo:
    """The process groups behind a mesh.

    Attributes:
        mesh: 1-D (shard) or 2-D (replicate, shard) device mesh.
        shard_group: Ranks over which parameters are cut.
        replicate_group: Ranks that hold equal shards, or ``None`` on a 1-D mesh.
        levels: The axes of a 2-D mesh over all of whose ranks parameters are cut.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_rank: int
    shard_size: int
    replicate_group: dist.ProcessGroup | None = None
    replicate_size: int = 1
    levels: Levels | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshInfo:
        """Reads the groups of a 1-D or 2-D mesh; the last axis is the one that shards."""
        axis = mesh.ndim - 1
        info = cls(mesh, mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis))
        if mesh.ndim == 2:
            info.replicate_group = mesh.get_group(0)
            info.replicate_size = mesh.size(0)
        return info

    @classmethod
    def over_replicas(cls, mesh: DeviceMesh) -> MeshInfo:
        """Cuts over both axes of a 2-D mesh. Made by all of its ranks.

        Raises:
            ValueError: If ranks do not ascend along the mesh.
        """
        flat = _flattened(mesh)
        info = cls.of(flat)
        info.levels = Levels(
            inner=mesh.get_group(1),
            inner_size=mesh.size(1),
            outer=mesh.get_group(0),
            outer_rank=mesh.get_local_rank(0),
            outer_size=mesh.size(0),
        )
        return info

    @property
    def outer_group(self) -> dist.ProcessGroup | None:
        """The replicate axis, over which reductions may wait; ``None`` on a 1-D mesh."""
        return self.replicate_group if self.levels is None else self.levels.outer

    @property
    def outer_size(self) -> int:
        """Ranks of the replicate axis."""
        return self.replicate_size if self.levels is None else self.levels.outer_size

    def placements(self, bounds: Sequence[int], shape: torch.Size) -> tuple[Placement, ...]:
        """The placements of a parameter with these bounds."""
        ragged = cast(Placement, make_placement(tuple(bounds), shape))
        return (ragged,) if self.mesh.ndim == 1 else (Replicate(), ragged)


_flat_meshes: dict[tuple[str, tuple[int, ...]], DeviceMesh] = {}


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    """A 1-D mesh of all ranks of ``mesh``, the same one for all units."""
    ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    if ranks != sorted(ranks):
        raise ValueError(f"shards are cut over replicas only where ranks ascend along {mesh}")
    key = (mesh.device_type, tuple(ranks))
    found = _flat_meshes.get(key)
    if found is None or not _is_alive(found.get_group()):
        group = dist.group.WORLD
        assert group is not None
        if ranks != dist.get_process_group_ranks(group):
            backend = str(dist.get_backend_config(mesh.get_group(1)))
            made = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            group = made
        found = _flat_meshes[key] = DeviceMesh.from_group(group, mesh.device_type)
    return found


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


def agreed(
    infos: Iterable[MeshInfo], values: torch.Tensor, op: dist.ReduceOp.RedOpType
) -> torch.Tensor:
    """The extreme of all ranks that share a mesh with this one, directly or over others.

    Args:
        infos: Meshes of this rank's groups, equal on every rank of each.
        values: Reduced in place, of one shape on every rank.
        op: ``MIN`` or ``MAX``.
    """
    groups: dict[dist.ProcessGroup, None] = {}
    for info in infos:
        groups.setdefault(info.shard_group)
        if info.replicate_group is not None:
            groups.setdefault(info.replicate_group)
    # An extreme crosses one mesh in one round; units on other meshes may need it passed back.
    for _ in range(1 if len(groups) == 1 else 2):
        for group in groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(values, op, group=group)
    return values
