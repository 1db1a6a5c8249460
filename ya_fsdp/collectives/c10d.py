"""Collectives of ``torch.distributed`` process groups (gloo, NCCL, anything registered)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .base import Purpose

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class C10dCollectives:
    """The default back end: whatever the mesh's process groups use."""

    name = "c10d"
    keeps_memory = False

    def allocate(self, num_bytes: int, device: torch.device, purpose: Purpose) -> Tensor:
        """A flat ``uint8`` buffer from torch's own allocator."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        _torch.all_gather_flat(output, input, group)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        """See :class:`Collectives`."""
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        _torch.reduce_scatter_flat(output, input, op, group)

    def supports_divisor(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """NCCL multiplies fp16 inputs by a number on their way into the sum; gloo does not.

        Not bf16: torch 2.11 hands NCCL the factor in fp32, of which NCCL reads 16 bits, and sums
        are wrong. Others are averaged, or divided after the sum, without loss.
        """
        return dtype == torch.float16 and "nccl" in group.name().lower()

    def reduce_scatter_divided(
        self, output: Tensor, input: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """See :class:`DividingCollectives`."""
        _torch.reduce_scatter_flat(output, input, 1.0 / divisor, group)

    def all_reduce(self, tensor: Tensor, op: str, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        dist.all_reduce(_torch.real_view(tensor), _OPS[op], group=group)

    def supports_average(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """NCCL averages exactly; gloo has no average. A group may say so in ``supports_avg``."""
        if not dtype.is_floating_point:
            return False
        return bool(getattr(group, "supports_avg", "nccl" in group.name().lower()))

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype itself: partial sums travel, rounded to it at every rank."""
        return dtype


_DEFAULT = C10dCollectives()


def default_collectives() -> C10dCollectives:
    """The back end used where the user chose none; one, so that all its users share memory."""
    return _DEFAULT
