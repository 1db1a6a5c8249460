"""What tensors are alive, for tests of growth."""

from __future__ import annotations

import gc
import time

import torch
from torch import Tensor


def tensors() -> tuple[int, int]:
    """Number of tensors the garbage collector knows, and the bytes behind them."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():  # released parameters refuse to be read
        for tensor in found:
            local = vars(tensor).get("_local_tensor", tensor)
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return len(found), sum(storages.values())


def tensors_once_released(allowed: tuple[int, int]) -> tuple[int, int]:
    """What ``tensors()`` finds, once gloo's threads have let go of finished work.

    A thread of the backend may hold a collective's tensors for a moment after ``wait``
    returned; what is leaked stays.
    """
    for _ in range(100):
        found = tensors()
        if found[0] <= allowed[0] and found[1] <= allowed[1]:
            break
        time.sleep(0.05)
    return found
