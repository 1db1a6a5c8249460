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
from ya_fsdp.checks import check_type
from ya_fsdp.ragged_boxes import Box, flat_range_to_boxes
from ya_fsdp.ragged_checkpoint import piece_boxes
from ya_fsdp.ragged_placement import (
    FlatRaggedShard,
    PieceAddress,
    RaggedShard,
    RowRaggedShard,
    make_placement,
)
from ya_fsdp.ragged_tensor import (
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
    "match_optimizer_state",
    "new_ragged",
    "piece_boxes",
]

# torch.load(weights_only=True) refuses what it has not been told of.
torch.serialization.add_safe_globals(
    [FlatRaggedShard, PieceAddress, Replicate, RowRaggedShard, rebuild_ragged]
)


def distribute_ragged(
    full: Tensor, mesh: DeviceMesh, granularity: Literal["auto", "row", "element"] | int = "auto"
) -> RaggedShardDTensor:
    """Cuts a whole tensor as evenly as the granularity allows over the last mesh axis.

    Args:
        full: The whole tensor, the same on every rank; no data is sent.
        mesh: The device mesh; over axes other than the last one the tensor is replicated.
        granularity: What no cut may divide: a dim-0 ``"row"``, an ``"element"``, or a block of
            that many elements. ``"auto"`` takes rows where the largest piece grows by at most 1 %.

    Returns:
        A tensor whose piece shares no memory with ``full``.

    Raises:
        TypeError: If ``full`` is no tensor or ``mesh`` no mesh.
        ValueError: If the granularity is none of these.
    """
    check_type("full", full, Tensor)
    check_type("mesh", mesh, DeviceMesh)
    world_size, numel = mesh.size(mesh.ndim - 1), full.numel()
    row_size = max(prod(full.shape[1:]), 1)
    if granularity == "auto":
        by_row, by_element = _even_bounds(numel, world_size, row_size), -(-numel // world_size)
        largest = max(b - a for a, b in pairwise(by_row))
        granularity = "row" if largest <= 1.01 * by_element else "element"
    blocks: dict[Any, int] = {"row": row_size, "element": 1}
    block = granularity if isinstance(granularity, int) else blocks.get(granularity, 0)
    if block < 1:
        raise ValueError(f"granularity is 'auto', 'row', 'element' or a size, got {granularity!r}")
    placement = make_placement(_even_bounds(numel, world_size, block), full.shape)
    placements = (*(Replicate() for _ in range(mesh.ndim - 1)), placement)
    return RaggedShardDTensor.from_full(full, mesh, placements)  # type: ignore[arg-type]


def match_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Cuts an optimizer's state like the parameters it belongs to, where it is not.

    Needed after ``optimizer.load_state_dict`` has been given whole tensors, or DTensors with
    another placement, as torch's ``set_optimizer_state_dict`` does for a full state dict without
    ``broadcast_from_rank0``. Every rank has to call it.

    Args:
        optimizer: An optimizer of which some parameters are ragged.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, RaggedShardDTensor):
                continue
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    continue
                if value.dim() > 0 and not isinstance(value, RaggedShardDTensor):
                    empty = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                    state[key] = empty.copy_(value)


def _even_bounds(numel: int, world_size: int, block: int) -> list[int]:
    blocks = -(-numel // block)
    return [min(blocks * rank // world_size * block, numel) for rank in range(world_size + 1)]
