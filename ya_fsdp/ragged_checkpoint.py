"""How a ragged tensor takes part in ``torch.distributed.checkpoint``: as N-D boxes.

A checkpoint then looks as if an ordinary DTensor or a plain tensor had written it, and any of them
can read it at any world size.
"""

from __future__ import annotations

from operator import add
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from ya_fsdp.ragged_boxes import Box, flat_range_to_boxes
from ya_fsdp.ragged_mesh import Part


class _CutTensor(Protocol):
    """What this file needs to know of a ragged tensor."""

    _local_tensor: Tensor

    @property
    def shape(self) -> torch.Size: ...
    @property
    def device_mesh(self) -> DeviceMesh: ...
    @property
    def placements(self) -> tuple[Placement, ...]: ...
    @property
    def part(self) -> Part: ...
    @property
    def ragged_axis(self) -> int: ...
    @property
    def ragged_rank(self) -> int: ...
    @property
    def ragged_range(self) -> tuple[int, int]: ...


def piece_boxes(tensor: _CutTensor) -> list[Box]:
    """The boxes of the whole tensor that this rank's piece consists of, none if it is empty."""
    part = tensor.part
    boxes = flat_range_to_boxes(part.sizes, *tensor.ragged_range)
    if not any(part.offsets):
        return boxes
    return [box._replace(offsets=tuple(map(add, box.offsets, part.offsets))) for box in boxes]


def write_items(tensor: _CutTensor, fqn: str) -> list[Any]:
    """What this rank writes: its boxes, on the first replica only."""
    # Importing it costs a noticeable part of a second, and training does not need it.
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if not _is_first_replica(tensor):
        return []
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape),
        )
        for chunk in chunks(tensor)
    ]


def chunks(tensor: _CutTensor) -> list[Any]:
    """The boxes as the checkpoint's own records."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    boxes = piece_boxes(tensor)
    if tensor.shape.numel() == 0 and tensor.ragged_rank == 0:
        # Someone has to write the shape of a tensor without elements.
        boxes = [Box((0,) * len(tensor.shape), tuple(tensor.shape), 0)]
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


def chunk_view(tensor: _CutTensor, index: Any) -> Tensor:
    """The memory of one box, to be read or overwritten.

    Args:
        tensor: The ragged tensor.
        index: The record of a box that :func:`chunks` gave; without an offset, the only one.

    Raises:
        ValueError: If no box of this rank starts at the offset.
    """
    flat = tensor._local_tensor.view(-1)
    boxes = piece_boxes(tensor)
    for box in boxes:
        if index.offset is None or tuple(index.offset) == box.offsets:
            return flat[box.start : box.start + box.numel].view(box.sizes)
    if tensor.shape.numel() == 0:
        return tensor._local_tensor.view(tensor.shape)
    raise ValueError(
        f"{index.fqn}: this rank has no box at {index.offset}, "
        f"only at {[box.offsets for box in boxes]}"
    )


def _is_first_replica(tensor: _CutTensor) -> bool:
    coordinate: Any = tensor.device_mesh.get_coordinate() or []
    return all(
        position == 0 or not placement.is_replicate()
        for position, placement in zip(coordinate, tensor.placements, strict=True)
    )
