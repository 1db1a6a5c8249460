"""Own kernels where there is a GPU with Triton, torch operators elsewhere; same results.

Both forms of each function are here or in :mod:`ya_fsdp.triton_kernels`, which imports Triton and
is itself imported when a CUDA tensor first arrives.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from . import _torch

BLOCK = 256
"""Elements with one scale in a quantised row."""

_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
_FP8_CAPABILITY = (8, 9)


@functools.cache
def triton_kernels() -> Any:
    """The module of Triton kernels; ``None`` without Triton or with ``YA_FSDP_TRITON=0``."""
    if os.environ.get("YA_FSDP_TRITON") == "0" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("ya_fsdp.triton_kernels")


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def sum_rows(output: Tensor, rows: Tensor, divisor: float = 1.0) -> None:
    """Sums rows in fp32, divides, and rounds at most once; one kernel on a GPU.

    Args:
        output: Shape (n,), fp32 or the dtype of ``rows``.
        rows: Shape (ranks, n), contiguous, 16 bits or fp32.
        divisor: What the sum is divided by before it is rounded to ``output``.
    """
    kernels = triton_kernels() if rows.is_cuda and rows.dtype in _SUMMED else None
    if kernels is not None:
        kernels.sum_rows(output, rows, divisor)
    else:
        sum_rows_torch(output, rows, divisor)


def sum_rows_torch(output: Tensor, rows: Tensor, divisor: float = 1.0) -> None:
    """:func:`sum_rows` by torch operators; also for fp64."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    wide = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
    torch.sum(rows, 0, dtype=dtype, out=wide)
    if divisor != 1.0:
        wide.div_(divisor)
    if wide is not output:
        output.copy_(wide)


def dequantise_rows(output: Tensor, values: Tensor, scales: Tensor) -> None:
    """Multiplies 8-bit elements by their blocks' scales; one kernel on a GPU.

    Args:
        output: Shape (ranks * n,), floating point.
        values: Shape (ranks, n), ``float8_e4m3fn`` or ``int8``, n a multiple of :data:`BLOCK`;
            rows may be apart.
        scales: Shape (ranks, n / 256), fp32; rows may be apart.
    """
    kernels = triton_kernels() if output.is_cuda and output.dtype in _SUMMED else None
    if kernels is not None and values.dtype.is_floating_point:
        kernels = kernels if _capability(output.device) >= _FP8_CAPABILITY else None
    if kernels is not None:
        kernels.dequantise_rows(output, values, scales)
    else:
        dequantise_rows_torch(output, values, scales)


def dequantise_rows_torch(output: Tensor, values: Tensor, scales: Tensor) -> None:
    """:func:`dequantise_rows` by torch operators."""
    # 8-bit numbers are exact in 16 bits; the product is rounded once.
    output.view_as(values).copy_(values)
    output.view(values.shape[0], -1, BLOCK).mul_(scales.unsqueeze(-1))


def square_sums(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sums of squares of parts of all elements, whose sum is that of all; one kernel on a GPU.

    Args:
        tensors: Not empty ones; there may be none.
        device: Theirs.

    Returns:
        Shape (n,), fp32. How many is the same for any tensors, so that ranks can add theirs up.
    """
    tables = _tables(device)
    if tables is not None:
        return tables.square_sums(tensors, device)  # type: ignore[no-any-return]
    if not tensors:
        return torch.zeros(1, device=device)
    norms = torch.stack([n.float() for n in _torch.flat_norms(tensors, 2.0)])
    return norms.square().sum().reshape(1)


def scale_to_norm(tensors: list[Tensor], squares: Tensor, max_norm: float) -> Tensor:
    """Scales tensors in place so that the norm is at most ``max_norm``; one kernel on a GPU.

    Args:
        tensors: What :func:`square_sums` was given.
        squares: What it returned, added up over the ranks.
        max_norm: The bound.

    Returns:
        The norm, 0-dim, fp32.
    """
    tables = _tables(squares.device)
    if tables is not None:
        return tables.scale_to_norm(tensors, squares, max_norm)  # type: ignore[no-any-return]
    norm = squares.sum().sqrt()
    scale_from_norm(tensors, norm, max_norm)
    return norm


def scale_from_norm(tensors: list[Tensor], norm: Tensor, max_norm: float | Tensor) -> None:
    """Scales tensors in place by what takes ``norm``, 0-dim, to ``max_norm`` at most."""
    if tensors:
        _torch.foreach_mul_(tensors, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _tables(device: torch.device) -> Any:
    # Asked for by the environment as long as these kernels have only run in Triton's interpreter.
    if device.type != "cuda" or os.environ.get("YA_FSDP_TRITON_CLIP") != "1":
        return None
    # A graph can not hold the table of addresses, which comes from the host.
    return None if _torch.is_capturing(device) else triton_kernels()
