"""The protocol every communication back end fulfils, and the arithmetic of averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Collectives(Protocol):
    """Collectives over flat tensors, enqueued on the current stream.

    Every method returns when the operation is ordered on the current stream (CPU: when it is
    done). ``input`` of :meth:`all_gather` may be this rank's slice of ``output``, and ``output``
    of :meth:`reduce_scatter` this rank's slice of ``input``.
    """

    name: str

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """A flat ``uint8`` buffer from which gather and reduce slots are cut."""

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """Fills ``output`` (world size times ``input``) with every rank's ``input`` in order."""

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        """Sums (or averages) ``input`` over ranks and leaves this rank's slice in ``output``."""

    def all_reduce(self, tensor: Tensor, op: str, group: dist.ProcessGroup) -> None:
        """Reduces ``tensor`` in place; ``op`` is ``"sum"``, ``"avg"`` or ``"max"``."""

    def supports_average(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Whether ``average=True`` is offered for this group and dtype."""


@dataclass(frozen=True)
class DivideFactors:
    """How a mean over ranks is computed: divide by ``pre``, reduce, divide by ``post``.

    ``average`` says that the collective itself divides by the group's size.
    """

    pre: float
    post: float
    average: bool


def divide_factors(
    world_size: int,
    dtype: torch.dtype,
    *,
    factor: float | None = None,
    average_supported: bool = False,
    force_sum: bool = False,
) -> DivideFactors:
    """Chooses how gradients are divided so that every path gives the same mean.

    fp16 overflows when summed first and underflows when divided first, so half of the factor (in
    powers of two, about the square root) goes before the sum and the rest after it.

    Args:
        world_size: Ranks whose gradients are summed.
        dtype: Dtype on the wire.
        factor: Divide by this instead of ``world_size``.
        average_supported: Whether the back end offers an exact average.
        force_sum: Use a plain sum on the wire whatever the back end offers.

    Returns:
        The factors; ``pre * post`` (times ``world_size`` with ``average``) is the total divisor.
    """
    total = float(world_size if factor is None else factor)
    if dtype != torch.float16 and average_supported and not force_sum and total == world_size:
        return DivideFactors(1.0, 1.0, world_size > 1)
    if dtype == torch.float16 and total > 1.0:
        pre = 1.0
        while total / pre > pre:
            pre *= 2.0
        return DivideFactors(pre, total / pre, False)
    return DivideFactors(1.0, total, False)
