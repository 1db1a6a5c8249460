"""Buffers from NCCL's own allocator, registered with the communicators that use them."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch, _torch_memory
from .base import Purpose
from .c10d import C10dCollectives

logger = logging.getLogger("ya_fsdp")


class NcclBufferCollectives(C10dCollectives):
    """``torch.distributed`` with slots that NCCL reads and writes without a copy of its own.

    Slots come from a memory pool over NCCL's allocator (``ncclMemAlloc``). The pool is registered
    with a communicator after its first collective, which makes the communicator; ranks need not
    agree on when. NCCL then sends from and into the slots themselves where its algorithm can,
    which leaves more memory bandwidth (and with fewer thread blocks the same speed) to compute.

    Not the default: pool memory is never given back to torch's allocator, and with NVLink SHARP
    (``NCCL_NVLS_ENABLE``) registration makes multicast objects. Where there is no NCCL, memory is
    torch's own, which the log says once.
    """

    name = "c10d with NCCL buffers"
    keeps_memory = True

    def __init__(self) -> None:
        self._pool: torch.cuda.MemPool | None = None
        self._registered: set[dist.ProcessGroup] = set()
        self._said = False

    def allocate(self, num_bytes: int, device: torch.device, purpose: Purpose) -> Tensor:
        """See :class:`Collectives`."""
        pool = self._pool_on(device)
        if pool is None:
            return super().allocate(num_bytes, device, purpose)
        with torch.cuda.use_mem_pool(pool, device):
            return super().allocate(num_bytes, device, purpose)

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        super().all_gather(output, input, group)
        self._register(group, output.device)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        """See :class:`Collectives`."""
        super().reduce_scatter(output, input, average, group)
        self._register(group, input.device)

    def _pool_on(self, device: torch.device) -> torch.cuda.MemPool | None:
        if self._pool is None and not self._said:
            default = dist.group.WORLD if dist.is_initialized() else None
            backend = None
            if default is not None and device.type == "cuda":
                backend = _torch_memory.nccl_backend(default, device)
            if backend is None:
                self._do_without(f"no NCCL on {device.type}")
                return None
            try:
                self._pool = torch.cuda.MemPool(backend.mem_allocator)
            except RuntimeError as error:  # the NCCL or the driver that is installed has none
                self._do_without(str(error).splitlines()[0])
        return self._pool

    def _do_without(self, reason: str) -> None:
        self._said = True
        logger.warning("NcclBufferCollectives: %s, so buffers come from torch's allocator", reason)

    def _register(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Registers what the pool holds now and later; local to this rank."""
        if self._pool is None or group in self._registered or _torch.is_capturing(device):
            return
        self._registered.add(group)
        backend = _torch_memory.nccl_backend(group, device)
        if backend is not None:
            backend.register_mem_pool(self._pool)
