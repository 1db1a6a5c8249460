"""The protocol every communication back end fulfils, and the arithmetic of averaging.

Who brings a back end of their own writes a class with the members of :class:`Collectives` (there
is nothing to inherit from) and passes an instance to ``fully_shard(..., collectives=...)`` or to
``YaFSDPModule.set_collectives``. ``tests/distributed/test_collectives_contract.py`` runs for any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

Purpose = Literal["gather", "reduce"]


class Collectives(Protocol):
    """Collectives over flat tensors, enqueued on the current stream.

    Every method returns when the operation is ordered on the current stream (CPU: when it is
    done). ``input`` of :meth:`all_gather` may be this rank's slice of ``output``, and ``output``
    of :meth:`reduce_scatter` this rank's slice of ``input``. Tensors are contiguous and have the
    group's number of ranks times the same number of elements, or that number. All ranks call the
    same methods with the same shapes and dtypes in the same order.

    One that wraps another keeps it as ``inner``; memory then comes from the innermost one.

    Attributes:
        name: For messages and logs.
        keeps_memory: Whether the library holds on to what :meth:`allocate` returns (registered
            memory), so that a buffer must neither shrink nor be made anew between steps.
    """

    name: str
    keeps_memory: bool

    def allocate(self, num_bytes: int, device: torch.device, purpose: Purpose) -> Tensor:
        """A flat ``uint8`` buffer of a slot; what it holds at first does not matter.

        Tensors given to the other methods are views of such buffers in most calls, not in all:
        gradients of several microbatches are summed outside them.

        Args:
            num_bytes: Size, a multiple of 256.
            device: Where the parameters are.
            purpose: ``"gather"`` for outputs of :meth:`all_gather` (its input lies in them),
                ``"reduce"`` for inputs of :meth:`reduce_scatter` (its output may lie in them).
        """

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """Fills ``output`` (world size times ``input``) with every rank's ``input`` in order."""

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        """Sums (or averages) ``input`` over ranks and leaves this rank's slice in ``output``.

        ``output`` has the dtype of ``input`` or the one that :meth:`accumulation_dtype` names for
        it. ``input`` may be overwritten.
        """

    def all_reduce(self, tensor: Tensor, op: str, group: dist.ProcessGroup) -> None:
        """Reduces ``tensor`` in place; ``op`` is ``"sum"``, ``"avg"`` or ``"max"``.

        ``"avg"`` is asked for only where :meth:`supports_average` says so.
        """

    def supports_average(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Whether averages are offered for this group and (reduce-scatter's input) dtype."""

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which :meth:`reduce_scatter` sums inputs of ``dtype`` and may write the sum.

        ``dtype`` itself for a library that rounds every partial sum to it.
        """


def allocator_of(collectives: Collectives) -> Collectives:
    """Who makes the memory: the innermost back end of one that wraps another as ``inner``."""
    while (inner := getattr(collectives, "inner", None)) is not None:
        collectives = inner
    return collectives


_MEMBERS = (
    "name",
    "keeps_memory",
    "allocate",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "supports_average",
    "accumulation_dtype",
)


def check_collectives(collectives: Any) -> None:
    """Refuses what lacks a member of the protocol, before anything depends on it.

    Raises:
        TypeError: Names what is missing.
    """
    if collectives is None:
        return
    missing = [name for name in _MEMBERS if not hasattr(collectives, name)]
    if missing or isinstance(collectives, type):
        lacks = f"; it lacks {', '.join(missing)}" if missing else "; that is a class"
        raise TypeError(
            f"collectives must be an object with the members of ya_fsdp.collectives.Collectives, "
            f"got {collectives!r}{lacks}"
        )


def check_use(collectives: Any, device: torch.device, group: dist.ProcessGroup) -> None:
    """Lets a back end refuse a device or a group before anything depends on it.

    One that can not work everywhere has a method ``check_use(device, group)`` that raises what
    says so. All ranks of the group call it at the same time, when parameters are sharded or
    ``set_collectives`` is called.
    """
    while collectives is not None:
        if hasattr(collectives, "check_use"):
            collectives.check_use(device, group)
        collectives = getattr(collectives, "inner", None)


class DividingCollectives(Collectives, Protocol):
    """What a back end may offer beyond :class:`Collectives`: sums divided by any number.

    Where it does, gradients need no division of their own in fp16 and with
    ``set_gradient_divide_factor``.
    """

    def supports_divisor(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Whether :meth:`reduce_scatter_divided` takes (inputs of) this dtype in this group."""

    def reduce_scatter_divided(
        self, output: Tensor, input: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """Like ``reduce_scatter``, with every input or the sum in ``accumulation_dtype`` divided.

        A 16-bit sum must not overflow where the sum of divided inputs does not.
        """


def dividing(
    collectives: Collectives, group: dist.ProcessGroup, dtype: torch.dtype
) -> DividingCollectives | None:
    """The back end itself if it divides sums of this dtype in this group."""
    offers: Any = collectives
    if not hasattr(offers, "supports_divisor") or not offers.supports_divisor(group, dtype):
        return None
    return cast("DividingCollectives", offers)


@dataclass(frozen=True)
class DivideFactors:
    """How a mean over ranks is computed: divide by ``pre``, reduce, divide by ``post``.

    ``average`` says that the collective itself divides by the group's size, ``by_collective`` that
    it is the one that divides by ``pre``.
    """

    pre: float
    post: float
    average: bool
    by_collective: bool = False


def divide_factors(
    world_size: int,
    dtype: torch.dtype,
    *,
    factor: float | None = None,
    average_supported: bool = False,
    divisor_supported: bool = False,
    force_sum: bool = False,
) -> DivideFactors:
    """Chooses how gradients are divided so that every path gives the same mean.

    fp16 overflows when summed first and underflows when divided first, so half of the factor (in
    powers of two, about the square root) goes before the sum and the rest after it. A back end
    that divides (NCCL's premultiplied sum) saves the pass over all gradients before the sum, or
    the one over the shard after it.

    Args:
        world_size: Ranks whose gradients are summed.
        dtype: Dtype in which they are summed.
        factor: Divide by this instead of ``world_size``.
        average_supported: Whether the back end offers an exact average.
        divisor_supported: Whether the back end divides by any number.
        force_sum: Use a plain sum on the wire whatever the back end offers.

    Returns:
        The factors; ``pre * post`` (times ``world_size`` with ``average``) is the total divisor.
    """
    total = float(world_size if factor is None else factor)
    if dtype != torch.float16 and average_supported and not force_sum and total == world_size:
        return DivideFactors(1.0, 1.0, world_size > 1)
    by_collective = divisor_supported and not force_sum and total != 1.0
    if dtype == torch.float16 and total > 1.0:
        pre = 1.0
        while total / pre > pre:
            pre *= 2.0
        return DivideFactors(pre, total / pre, False, by_collective)
    if by_collective:
        return DivideFactors(total, 1.0, False, True)
    return DivideFactors(1.0, total, False)
