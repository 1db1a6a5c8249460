"""Gathering parameters as 8-bit numbers with one scale per block.

A rank sends its part of a group as one row of bytes: the elements in 8 bits, then an fp32 scale for
every 256 of them. Rows are gathered in one collective and widened into the gather slot.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Collectives
from .kernels import BLOCK, dequantise_rows
from .scratch import Scratch

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SCALE = torch.float32.itemsize
_rows = Scratch()


def row_bytes(numel: int) -> int:
    """Bytes that a rank sends for ``numel`` elements, rounded so that every row is aligned."""
    return (numel + numel // BLOCK * _SCALE + 15) // 16 * 16


def gather_quantised(
    output: Tensor,
    shard: Tensor,
    dtype: torch.dtype,
    rank: int,
    group: dist.ProcessGroup,
    collectives: Collectives,
) -> None:
    """Gathers every rank's shard through 8 bits, this rank's own included.

    Args:
        output: Shape (ranks * n,), floating point.
        shard: Shape (n,), n a multiple of :data:`BLOCK`.
        dtype: ``torch.float8_e4m3fn`` or ``torch.int8``.
        rank: This rank in ``group``.
        group: The ranks.
        collectives: The back end.
    """
    numel, size = shard.numel(), row_bytes(shard.numel())
    world = output.numel() // numel
    rows = _rows.take(world * size, output.device)
    row = rows[rank * size : (rank + 1) * size]
    quantise(row, shard, dtype)
    collectives.all_gather(rows, row, group)
    dequantise(output, rows.view(world, size), dtype)


def quantise(row: Tensor, shard: Tensor, dtype: torch.dtype) -> None:
    """Writes a shard's elements and scales into a row of bytes.

    Args:
        row: Shape (row_bytes(n),), ``uint8``.
        shard: Shape (n,).
        dtype: ``torch.float8_e4m3fn`` or ``torch.int8``.
    """
    values, scales = parts(row.unsqueeze(0), shard.numel(), dtype)
    blocks = shard.view(-1, BLOCK)
    largest = torch.linalg.vector_norm(blocks, float("inf"), dim=1, keepdim=True)
    scale = largest.to(torch.float32).div_(_LARGEST[dtype])
    scales.copy_(scale.view_as(scales))
    # A block of zeros has scale 0: its elements are written as zeros, not as 0 / 0.
    quotients = blocks / scale.masked_fill_(scale == 0, 1.0)
    if not dtype.is_floating_point:
        quotients.round_()
    values.copy_(quotients.view_as(values))


def dequantise(output: Tensor, rows: Tensor, dtype: torch.dtype) -> None:
    """Widens gathered rows.

    Args:
        output: Shape (ranks * n,), floating point.
        rows: Shape (ranks, row_bytes(n)), ``uint8``.
        dtype: That of :func:`quantise`.
    """
    world = rows.shape[0]
    values, scales = parts(rows, output.numel() // world, dtype)
    dequantise_rows(output, values, scales)


def parts(rows: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views of the elements, shape (ranks, n), and of the scales, shape (ranks, n / 256)."""
    scales = rows[:, numel : numel + numel // BLOCK * _SCALE]
    return rows[:, :numel].view(dtype), scales.view(torch.float32)
