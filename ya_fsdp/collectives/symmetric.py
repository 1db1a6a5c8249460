"""Collectives by copies between memories that ranks have mapped into each other.

A rank pulls the other ranks' parts with device-to-device copies, which copy engines carry out, so
that no multiprocessor is taken from compute while bytes travel. Ranks wait for each other before
the copies (parts must be there) and after them (parts may be overwritten), in one small kernel
each.
"""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_memory
from ..kernels import sum_rows
from ..scratch import Scratch, stream_id
from .base import Purpose
from .c10d import C10dCollectives


@dataclass(eq=False)
class _Buffer:
    """One buffer that has the same size on every rank, and how each group's ranks see it.

    Attributes:
        ref: The tensor; the slot that holds it decides how long it lives.
        num_bytes: Its size.
        handles: Torch's handle per group.
        views: Parts of other ranks' buffers by (group, rank, offset, bytes).
    """

    ref: weakref.ref[Tensor]
    num_bytes: int
    handles: dict[dist.ProcessGroup, Any] = field(default_factory=dict)
    views: dict[tuple[dist.ProcessGroup, int, int, int], Tensor] = field(default_factory=dict)

    def handle(self, group: dist.ProcessGroup) -> Any:
        handle = self.handles.get(group)
        if handle is None:
            buffer = self.ref()
            assert buffer is not None
            handle = self.handles[group] = _torch_memory.exchange_symmetric(buffer, group)
        return handle

    def part(self, group: dist.ProcessGroup, rank: int, offset: int, num_bytes: int) -> Tensor:
        """Bytes of another rank's buffer."""
        key = (group, rank, offset, num_bytes)
        view = self.views.get(key)
        if view is None:
            handle = self.handle(group)
            view = handle.get_buffer(rank, (num_bytes,), torch.uint8, offset)
            self.views[key] = view
        return view


class SymmetricMemoryCollectives:
    """Gathers and reductions by copy engines, for ranks that can map each other's GPU memory.

    Slots are symmetric memory, in which other ranks read. All-gather: every rank pulls the parts
    of the others into its own slot, no staging. Reduce-scatter: every rank pulls its part of the
    others' gradients into a receive buffer (as large as the largest unit's gradients) and adds
    them up in fp32 with one kernel. All-reduces go through ``torch.distributed``. Tensors outside
    slots are copied into a symmetric buffer first, which grows to the largest of them.

    Every rank of a group must be on one host. NVLink multicast is not used, and switched off in
    torch (``TORCH_SYMM_MEM_DISABLE_MULTICAST``) unless the variable is set.

    Raises:
        RuntimeError: From :meth:`check_use` for devices other than CUDA and groups that span hosts,
            and from the first collective of a group that can not map memory.
    """

    name = "symmetric memory"
    keeps_memory = True

    def __init__(self) -> None:
        self._fallback = C10dCollectives()
        self._buffers: dict[int, _Buffer] = {}
        self._staging: dict[int, tuple[Tensor, _Buffer]] = {}
        self._received = Scratch()
        self._checked: set[dist.ProcessGroup] = set()

    def allocate(self, num_bytes: int, device: torch.device, purpose: Purpose) -> Tensor:
        """See :class:`Collectives`; what ranks allocate must have the same sizes in order."""
        _refuse_other_devices(device)
        tensor = _torch_memory.symmetric_buffer(num_bytes, device)
        address = tensor.data_ptr()
        buffer = _Buffer(weakref.ref(tensor), num_bytes)
        self._buffers[address] = buffer
        weakref.finalize(tensor, _forget, self._buffers, address, buffer)
        return tensor

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        self._check(group)
        size = input.numel() * input.element_size()
        rank = group.rank()
        parts = output.view(torch.uint8).view(group.size(), size)
        own = parts[rank]
        source = self._slot_of(output)
        if source is None or own.data_ptr() != input.data_ptr():
            buffer, source = self._staged(input, group)
            if own.data_ptr() != input.data_ptr():
                own.copy_(buffer)
            start, step = 0, 0
        else:
            start, step = output.data_ptr() - self._address(output), size
        handle = source.handle(group)
        handle.barrier(channel=0)
        for peer in _others(group):
            parts[peer].copy_(source.part(group, peer, start + peer * step, size))
        handle.barrier(channel=0)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        """See :class:`Collectives`; sums are fp32 (fp64 of fp64)."""
        self.reduce_scatter_divided(output, input, group.size() if average else 1.0, group)

    def reduce_scatter_divided(
        self, output: Tensor, input: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """See :class:`DividingCollectives`; the sum is divided."""
        if not input.dtype.is_floating_point:
            self._fallback.reduce_scatter(output, input, False, group)
            return
        self._check(group)
        rank, size = group.rank(), output.numel() * input.element_size()
        source, start = self._slot_of(input), 0
        if source is None:
            _, source = self._staged(input, group)
        else:
            start = input.data_ptr() - self._address(input)
        rows = self._received.take(group.size() * size, input.device)
        parts = rows.view(group.size(), size)
        handle = source.handle(group)
        handle.barrier(channel=0)
        for peer in (rank, *_others(group)):
            parts[peer].copy_(source.part(group, peer, start + rank * size, size))
        handle.barrier(channel=0)
        sum_rows(output, parts.view(input.dtype), divisor)

    def all_reduce(self, tensor: Tensor, op: str, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`; through ``torch.distributed``."""
        if op == "avg" and not self._fallback.supports_average(group, tensor.dtype):
            self._fallback.all_reduce(tensor, "sum", group)
            tensor.div_(group.size())
        else:
            self._fallback.all_reduce(tensor, op, group)

    def supports_average(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Always for floating point: the kernel that sums divides too."""
        return dtype.is_floating_point

    def supports_divisor(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Always for floating point: the kernel that sums divides too."""
        return dtype.is_floating_point

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """At least fp32."""
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

    def _slot_of(self, tensor: Tensor) -> _Buffer | None:
        """The buffer of ours that a tensor lies in."""
        return self._buffers.get(self._address(tensor))

    @staticmethod
    def _address(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def _staged(self, input: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, _Buffer]:
        """A copy of a tensor in a symmetric buffer of our own, which all ranks let grow alike."""
        num_bytes = input.numel() * input.element_size()
        stream = stream_id(input.device)
        staging = self._staging.get(stream)
        if staging is None or staging[1].num_bytes < num_bytes:
            size = max(1 << 20, 1 << (num_bytes - 1).bit_length())
            fresh = self.allocate(size, input.device, "gather")
            staging = self._staging[stream] = (fresh, self._buffers[fresh.data_ptr()])
        tensor, buffer = staging
        copy = tensor[:num_bytes]
        copy.copy_(input.view(torch.uint8))
        return copy, buffer

    def check_use(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """See :func:`ya_fsdp.collectives.check_use`."""
        _refuse_other_devices(device)
        self._check(group)

    def _check(self, group: dist.ProcessGroup) -> None:
        """Refuses a group over several hosts, whose ranks would wait for each other in vain."""
        if group in self._checked:
            return
        hosts: list[str] = [""] * group.size()
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        if len(set(hosts)) > 1:
            raise RuntimeError(
                f"SymmetricMemoryCollectives works within one host, but the ranks of this group "
                f"are on {sorted(set(hosts))}; use a 2-D mesh whose shard axis stays on a host, or "
                "leave collectives=None (torch.distributed)"
            )
        self._checked.add(group)


def _refuse_other_devices(device: torch.device) -> None:
    if device.type != "cuda":
        raise RuntimeError(
            f"SymmetricMemoryCollectives needs CUDA devices, the parameters are on {device.type}; "
            "leave collectives=None (torch.distributed) there"
        )


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, each rank beginning with another, so that no link is asked by all."""
    rank, size = group.rank(), group.size()
    return [(rank + step) % size for step in range(1, size)]


def _forget(buffers: dict[int, _Buffer], address: int, buffer: _Buffer) -> None:
    # A new buffer may have been given the address before the old one's end was noticed.
    if buffers.get(address) is buffer:
        del buffers[address]
