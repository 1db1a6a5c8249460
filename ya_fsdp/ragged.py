"""Sharded tensors whose pieces are contiguous and of unequal size."""

from itertools import pairwise
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
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
    PieceAddress,
    RaggedShardDTensor,
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
torch.serialization.add_safe_globals(
    [FlatRaggedShard, PieceAddress, Replicate, RowRaggedShard, rebuild_ragged]
)


def _even_bounds(numel: int, world_size: int, block: int) -> list[int]:
    blocks = -(-numel // block)
    return [min(blocks * rank // world_size * block, numel) for rank in range(world_size + 1)]
