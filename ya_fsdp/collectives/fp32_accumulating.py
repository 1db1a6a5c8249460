"""16-bit gradients on the wire, summed in 32 bits by the rank that keeps the sum.

A ring adds rank after rank and rounds to 16 bits each time, so that its error grows with the
number of ranks. Here every rank sends each other rank its slice unsummed (all-to-all: the same
bytes as a ring sends) and the receiver adds them up in fp32, with one rounding or none at the end.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from ..kernels import sum_rows
from ..scratch import Scratch
from .base import Collectives, Purpose, dividing

_NARROW = (torch.bfloat16, torch.float16)


class Fp32AccumulatingCollectives:
    """Another back end whose 16-bit reduce-scatter sums in fp32; all else passes through.

    Needs all-to-all of the process group (gloo on CPU and NCCL have it). Holds one receive buffer
    per device and stream, as large as the largest 16-bit reduce-scatter.

    Args:
        inner: What gathers, allocates, and reduces tensors of other dtypes.
    """

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.name = f"{inner.name}+fp32"
        self.keeps_memory = inner.keeps_memory
        self._received = Scratch()

    def allocate(self, num_bytes: int, device: torch.device, purpose: Purpose) -> Tensor:
        """See :class:`Collectives`."""
        return self.inner.allocate(num_bytes, device, purpose)

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        self.inner.all_gather(output, input, group)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        """See :class:`Collectives`; ``output`` may be fp32 where ``input`` has 16 bits."""
        if input.dtype not in _NARROW:
            self.inner.reduce_scatter(output, input, average, group)
            return
        self._exchange(output, input, group.size() if average else 1.0, group)

    def supports_divisor(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Always for 16 bits: the kernel that sums divides too."""
        return dtype in _NARROW or dividing(self.inner, group, dtype) is not None

    def reduce_scatter_divided(
        self, output: Tensor, input: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """See :class:`DividingCollectives`; the fp32 sum is divided."""
        if input.dtype in _NARROW:
            self._exchange(output, input, divisor, group)
            return
        inner = dividing(self.inner, group, input.dtype)
        assert inner is not None
        inner.reduce_scatter_divided(output, input, divisor, group)

    def _exchange(
        self, output: Tensor, input: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        num_bytes = input.numel() * input.element_size()
        received = self._received.take(num_bytes, input.device).view(input.dtype)
        _torch.all_to_all_flat(received, input, group)
        sum_rows(output, received.view(group.size(), -1), divisor)

    def all_reduce(self, tensor: Tensor, op: str, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        if op == "avg" and not self.inner.supports_average(group, tensor.dtype):
            self.inner.all_reduce(tensor, "sum", group)
            tensor.div_(group.size())
        else:
            self.inner.all_reduce(tensor, op, group)

    def supports_average(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Always for 16 bits: the receiver divides the fp32 sum before any rounding."""
        return dtype in _NARROW or self.inner.supports_average(group, dtype)

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """fp32 for 16-bit floating-point dtypes."""
        return torch.float32 if dtype in _NARROW else self.inner.accumulation_dtype(dtype)
