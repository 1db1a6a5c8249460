"""Sharded tensors whose pieces are contiguous and of unequal size."""

import torch
from torch.distributed.tensor import Replicate

# Importing the files of operators fills the table that RaggedShardDTensor looks them up in.
from ya_fsdp import ragged_ops, ragged_random, ragged_reduce  # noqa: F401
from ya_fsdp.ragged_boxes import Box, flat_range_to_boxes
from ya_fsdp.ragged_placement import (
    FlatRaggedShard,
    RaggedShard,
    RowRaggedShard,
    make_placement,
)
from ya_fsdp.ragged_tensor import (
    RaggedShardDTensor,
    distribute_ragged,
    new_ragged,
    rebuild_ragged,
)

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

# torch.load(weights_only=True) refuses what it has not been told of.
torch.serialization.add_safe_globals([FlatRaggedShard, RowRaggedShard, Replicate, rebuild_ragged])
