"""Sharded tensors whose pieces are contiguous and of unequal size."""

from ya_fsdp import ragged_ops as _ragged_ops  # noqa: F401  (fills the table of operators)
from ya_fsdp.ragged_boxes import Box, flat_range_to_boxes
from ya_fsdp.ragged_placement import (
    FlatRaggedShard,
    RaggedShard,
    RowRaggedShard,
    make_placement,
)
from ya_fsdp.ragged_tensor import RaggedShardDTensor, distribute_ragged, new_ragged

__all__ = [
    "Box",
    "FlatRaggedShard",
    "RaggedShard",
    "RaggedShardDTensor",
    "RowRaggedShard",
    "distribute_ragged",
    "flat_range_to_boxes",
    "make_placement",
    "new_ragged",
]
