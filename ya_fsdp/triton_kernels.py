"""Triton kernels of :mod:`ya_fsdp.kernels`, each of which reads and writes every byte once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SUM_BLOCK = 2048
DEQUANTISE_BLOCK = 4096
SCALED_TOGETHER = 256
_WARPS = 8  # 16 bytes of a 16-bit row per thread and load


@triton.jit
def _sum_rows(output, rows, numel, count, divisor, BLOCK: tl.constexpr):  # noqa: N803
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < numel
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    source = rows + columns
    for _ in range(count):
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        source += numel
    total = tl.div_rn(total, tl.zeros((BLOCK,), dtype=tl.float32) + divisor)
    tl.store(output + columns, total.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _dequantise_rows(
    output,
    values,
    scales,
    numel,
    value_stride,
    scale_stride,
    BLOCK: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr,  # noqa: N803
):
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < numel
    row = tl.program_id(1).to(tl.int64)
    value = tl.load(values + row * value_stride + columns, mask=inside).to(tl.float32)
    scale = tl.load(scales + row * scale_stride + columns // TOGETHER, mask=inside)
    result = value * scale
    tl.store(output + row * numel + columns, result.to(output.dtype.element_ty), mask=inside)


def sum_rows(output: Tensor, rows: Tensor, divisor: float) -> None:
    """See :func:`ya_fsdp.kernels.sum_rows`."""
    count, numel = rows.shape
    grid = (triton.cdiv(numel, SUM_BLOCK),)
    _sum_rows[grid](output, rows, numel, count, divisor, BLOCK=SUM_BLOCK, num_warps=_WARPS)


def dequantise_rows(output: Tensor, values: Tensor, scales: Tensor) -> None:
    """See :func:`ya_fsdp.kernels.dequantise_rows`."""
    count, numel = values.shape
    grid = (triton.cdiv(numel, DEQUANTISE_BLOCK), count)
    _dequantise_rows[grid](
        output,
        values,
        scales,
        numel,
        values.stride(0),
        scales.stride(0),
        BLOCK=DEQUANTISE_BLOCK,
        TOGETHER=SCALED_TOGETHER,
        num_warps=_WARPS,
    )
