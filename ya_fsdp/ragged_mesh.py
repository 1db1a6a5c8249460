"""Mesh axes beside the ragged one: replicas, and axes over which dims are sharded (TP).

On those axes a rank first has its *part* of the whole tensor, a rectangle. The ragged axis cuts
that part into pieces: its bounds are element offsets into the flattened part, and ranks with
different parts may have different bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ya_fsdp._torch_mesh import local_shape_and_offset
from ya_fsdp.ragged_placement import RaggedShard, contiguous_stride, mesh_rank, ragged_axis


class Part(NamedTuple):
    """The rectangle of the whole tensor that the ragged axis cuts.

    Attributes:
        offsets: First index in each dim.
        sizes: Extent in each dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def without_ragged(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements once the pieces are gathered."""
    return tuple(Replicate() if isinstance(p, RaggedShard) else p for p in placements)


def sharded_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Axes over which ranks have different parts."""
    return tuple(
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and not isinstance(placement, RaggedShard)
    )


def part_of(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Part:
    """This rank's part of a tensor of ``shape``."""
    if not sharded_axes(placements):
        return Part((0,) * len(shape), tuple(shape))
    sizes, offsets = local_shape_and_offset(torch.Size(shape), mesh, without_ragged(placements))
    return Part(tuple(offsets), tuple(sizes))


def piece_of(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's piece of a whole tensor, without communication; a view where strides allow."""
    part = part_of(full.shape, mesh, placements)
    if sharded_axes(placements):
        box = (slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
        full = full[tuple(box)]
    axis = ragged_axis(placements)
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    return placement.local_slice(full, mesh_rank(mesh, axis))


def check_piece(
    local: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> None:
    """Refuses a piece that is not this rank's.

    Args:
        local: Shape of the piece.
        mesh: The device mesh.
        placements: One for each mesh axis.
        shape: Shape of the whole tensor.

    Raises:
        ValueError: If the piece or the placements do not fit the shape and mesh.
    """
    axis = ragged_axis(placements)
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    if len(placements) != mesh.ndim or placement.world_size != mesh.size(axis):
        raise ValueError(f"placements {placements} do not fit the mesh {mesh}")
    part = part_of(shape, mesh, placements).sizes
    if placement.numel != prod(part):
        raise ValueError(f"{placement} does not place the {prod(part)} elements of {part}")
    expected = placement.local_shape(part, mesh_rank(mesh, axis))
    if tuple(local) != expected:
        raise ValueError(f"a piece of shape {expected} is needed, got {tuple(local)}")


def part_as_dtensor(
    part: Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """A stock DTensor over this rank's gathered part."""
    return DTensor.from_local(
        part,
        mesh,
        without_ragged(placements),
        run_check=False,
        shape=torch.Size(shape),
        stride=contiguous_stride(shape),
    )


def redistributed(gathered: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """A DTensor with other placements; this rank's piece of it if one of them is ragged.

    Raises:
        NotImplementedError: If a placement is neither ``Replicate``, ``Shard`` nor ragged.
    """
    mesh, plain = gathered.device_mesh, without_ragged(placements)
    if not all(type(placement) in (Replicate, Shard) for placement in plain):
        raise NotImplementedError(f"redistribute from {gathered.placements} to {placements}")
    result = gathered.redistribute(mesh, plain)
    if plain == placements:
        return result
    axis = ragged_axis(placements)
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    return placement.local_slice(result.to_local(), mesh_rank(mesh, axis)).clone()


def groups_with_other_pieces(
    mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[dist.ProcessGroup, ...]:
    """Process groups over which a reduction has to go to see every element once."""
    axes = (ragged_axis(placements), *sharded_axes(placements))
    return tuple(mesh.get_group(axis) for axis in axes)
