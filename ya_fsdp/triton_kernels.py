"""Triton kernels of :mod:`ya_fsdp.kernels`, each of which reads and writes every byte once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

SUM_BLOCK = 2048
DEQUANTISE_BLOCK = 4096
SCALED_TOGETHER = 256
PARTS = 1024  # programs of a pass over many tensors, about eight per multiprocessor
PASS_BLOCK = 4096
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


@triton.jit
def _square_sums(squares, table, count, BLOCK: tl.constexpr):  # noqa: N803
    part = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(count):
        source = tl.load(table + 2 * i).to(tl.pointer_type(tl.float32))
        numel = tl.load(table + 2 * i + 1)
        for start in range(part * BLOCK, numel, step):
            columns = start + tl.arange(0, BLOCK)
            value = tl.load(source + columns, mask=columns < numel, other=0.0)
            total += value * value
    tl.store(squares + part, tl.sum(total))


@triton.jit
def _scale_to_norm(
    norm,
    squares,
    table,
    count,
    max_norm,
    PARTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    part = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.sqrt(tl.sum(tl.load(squares + tl.arange(0, PARTS))))
    if part == 0:
        tl.store(norm, total)
    scale = max_norm / (total + 1e-6)
    if not scale >= 1.0:  # also where it is no number
        for i in range(count):
            target = tl.load(table + 2 * i).to(tl.pointer_type(tl.float32))
            numel = tl.load(table + 2 * i + 1)
            for start in range(part * BLOCK, numel, step):
                columns = start + tl.arange(0, BLOCK)
                inside = columns < numel
                value = tl.load(target + columns, mask=inside)
                tl.store(target + columns, value * scale, mask=inside)


@functools.lru_cache(maxsize=4)
def _table(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses and sizes on the device; gradients are at the same places in most steps."""
    host = torch.tensor(rows, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _table_of(tensors: list[Tensor], device: torch.device) -> Tensor:
    return _table(tuple(n for t in tensors for n in (t.data_ptr(), t.numel())), device)


def _plain(tensors: list[Tensor]) -> list[Tensor]:
    return [t if t.is_contiguous() else t.contiguous() for t in (t.float() for t in tensors)]


def square_sums(tensors: list[Tensor], device: torch.device) -> Tensor:
    """See :func:`ya_fsdp.kernels.square_sums`."""
    squares = torch.empty(PARTS, device=device)
    plain = _plain(tensors)
    table = _table_of(plain, device)
    _square_sums[(PARTS,)](squares, table, len(plain), BLOCK=PASS_BLOCK, num_warps=_WARPS)
    return squares


def scale_to_norm(tensors: list[Tensor], squares: Tensor, max_norm: float) -> Tensor:
    """See :func:`ya_fsdp.kernels.scale_to_norm`."""
    norm = torch.empty((), device=squares.device)
    plain = _plain(tensors)
    _scale_to_norm[(PARTS,)](
        norm,
        squares,
        _table_of(plain, squares.device),
        len(plain),
        max_norm,
        PARTS=PARTS,
        BLOCK=PASS_BLOCK,
        num_warps=_WARPS,
    )
    for tensor, scaled in zip(tensors, plain, strict=True):
        if scaled is not tensor:  # given by the user in another dtype or order
            tensor.copy_(scaled)
    return norm
