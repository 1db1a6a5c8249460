"""Private torch names about memory that ranks or NCCL share, each with its reason."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def symmetric_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Memory that other processes can map; all of symmetric memory's names are private.

    Without the variable torch makes a multicast object for every buffer that ranks exchange.
    Nothing here uses one, and not every machine lets go of them cleanly.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    buffer: Tensor = memory.empty(num_bytes, dtype=torch.uint8, device=device)
    return buffer


def exchange_symmetric(buffer: Tensor, group: dist.ProcessGroup) -> Any:
    """Maps every rank's buffer here; all ranks call it, with buffers of one size."""
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    return memory.rendezvous(buffer, group)


def nccl_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The NCCL part of a process group, ``None`` where it has none; no public name exists."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return backend if hasattr(backend, "register_mem_pool") else None
