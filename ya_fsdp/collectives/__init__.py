"""The seam to communication libraries: one small protocol and its implementations."""

import weakref

import torch

from .base import (
    Collectives,
    DivideFactors,
    DividingCollectives,
    Purpose,
    allocator_of,
    check_collectives,
    check_use,
    divide_factors,
    dividing,
)
from .c10d import C10dCollectives, default_collectives
from .fp32_accumulating import Fp32AccumulatingCollectives
from .nccl_buffers import NcclBufferCollectives
from .recording import Call, RecordingCollectives
from .symmetric import SymmetricMemoryCollectives
from .yccl import YcclCollectives, YcclHandle, open_handle

__all__ = [
    "C10dCollectives",
    "Call",
    "Collectives",
    "DivideFactors",
    "DividingCollectives",
    "Fp32AccumulatingCollectives",
    "NcclBufferCollectives",
    "Purpose",
    "RecordingCollectives",
    "SymmetricMemoryCollectives",
    "YcclCollectives",
    "YcclHandle",
    "allocator_of",
    "check_collectives",
    "check_use",
    "default_collectives",
    "divide_factors",
    "dividing",
    "fp32_accumulating",
    "open_handle",
]

_WRAPPED: weakref.WeakValueDictionary[int, Fp32AccumulatingCollectives] = (
    weakref.WeakValueDictionary()
)


def fp32_accumulating(inner: Collectives) -> Collectives:
    """The one wrapper of a back end, so that all units share its receive buffers.

    A back end that sums 16 bits in fp32 already is returned as it is.
    """
    if inner.accumulation_dtype(torch.bfloat16) == torch.float32:
        return inner
    wrapper = _WRAPPED.get(id(inner))
    if wrapper is None:  # it keeps ``inner`` alive, hence the number is nobody else's
        wrapper = _WRAPPED[id(inner)] = Fp32AccumulatingCollectives(inner)
    return wrapper
