"""A back end that notes every call and passes it on: for tests, and to count bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Collectives, Purpose, dividing
from .c10d import default_collectives


@dataclass(frozen=True, slots=True)
class Call:
    """One collective.

    Attributes:
        kind: Name of the method, with the operation of an all-reduce: ``"all_reduce max"``.
        numel: Elements of the larger of its tensors.
        dtype: Their dtype on the wire.
        wire_bytes: Bytes that a ring would send and receive per rank.
    """

    kind: str
    numel: int
    dtype: torch.dtype
    wire_bytes: int


class RecordingCollectives:
    """Another back end whose calls are noted in :attr:`calls`.

    Args:
        inner: What does the work; ``None``: ``torch.distributed``.
    """

    def __init__(self, inner: Collectives | None = None) -> None:
        self.inner: Collectives = default_collectives() if inner is None else inner
        self.name = f"recording {self.inner.name}"
        self.keeps_memory = self.inner.keeps_memory
        self.calls: list[Call] = []

    def take(self) -> Counter[str]:
        """How often each kind ran since the last call of this."""
        counts = Counter(call.kind for call in self.calls)
        self.calls.clear()
        return counts

    def wire_bytes(self, kind: str) -> int:
        """Bytes on the wire per rank of all noted calls of a kind."""
        return sum(call.wire_bytes for call in self.calls if call.kind == kind)

    def allocate(self, num_bytes: int, device: torch.device, purpose: Purpose) -> Tensor:
        """See :class:`Collectives`; not noted."""
        return self.inner.allocate(num_bytes, device, purpose)

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        self._note("all_gather", output, 1, group)
        self.inner.all_gather(output, input, group)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        """See :class:`Collectives`."""
        self._note("reduce_scatter", input, 1, group)
        self.inner.reduce_scatter(output, input, average, group)

    def supports_divisor(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """What the inner one says."""
        return dividing(self.inner, group, dtype) is not None

    def reduce_scatter_divided(
        self, output: Tensor, input: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """See :class:`DividingCollectives`; noted as a reduce-scatter."""
        inner = dividing(self.inner, group, input.dtype)
        assert inner is not None
        self._note("reduce_scatter", input, 1, group)
        inner.reduce_scatter_divided(output, input, divisor, group)

    def all_reduce(self, tensor: Tensor, op: str, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        self._note(f"all_reduce {op}", tensor, 2, group)
        self.inner.all_reduce(tensor, op, group)

    def supports_average(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """What the inner one says."""
        return self.inner.supports_average(group, dtype)

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the inner one says."""
        return self.inner.accumulation_dtype(dtype)

    def _note(self, kind: str, tensor: Tensor, passes: int, group: dist.ProcessGroup) -> None:
        world = group.size()
        total = tensor.numel() * tensor.element_size()
        call = Call(kind, tensor.numel(), tensor.dtype, passes * total * (world - 1) // world)
        self.calls.append(call)
