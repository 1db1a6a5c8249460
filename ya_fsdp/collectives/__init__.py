"""The seam to communication libraries: one small protocol and its implementations."""

import weakref

from .base import (
    Collectives,
    DivideFactors,
    Purpose,
    allocator_of,
    check_collectives,
    divide_factors,
)
from .c10d import C10dCollectives, default_collectives
from .fp32_accumulating import Fp32AccumulatingCollectives
from .recording import Call, RecordingCollectives
from .yccl import YcclCollectives, YcclHandle, open_handle

__all__ = [
    "C10dCollectives",
    "Call",
    "Collectives",
    "DivideFactors",
    "Fp32AccumulatingCollectives",
    "Purpose",
    "RecordingCollectives",
    "YcclCollectives",
    "YcclHandle",
    "allocator_of",
    "check_collectives",
    "default_collectives",
    "divide_factors",
    "fp32_accumulating",
    "open_handle",
]

_WRAPPED: weakref.WeakValueDictionary[int, Fp32AccumulatingCollectives] = (
    weakref.WeakValueDictionary()
)


def fp32_accumulating(inner: Collectives) -> Fp32AccumulatingCollectives:
    """The one wrapper of a back end, so that all units share its receive buffers."""
    wrapper = _WRAPPED.get(id(inner))
    if wrapper is None:  # it keeps ``inner`` alive, hence the number is nobody else's
        wrapper = _WRAPPED[id(inner)] = Fp32AccumulatingCollectives(inner)
    return wrapper
