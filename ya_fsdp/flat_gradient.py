"""The ``.grad`` of a flat parameter: local values whose meaning is global.

Elementwise optimizers need nothing but the local elements. Functions whose answer depends on other
ranks' elements either ask them (a gradient scaler's search for overflows) or refuse, since ranks
that clip or skip a step by different numbers drift apart in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _torch

_NORMS = frozenset(
    (_torch.flat_norms, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm)
)


class FlatGradient(Tensor):
    """This rank's elements of the gradients under one flat parameter."""

    groups: tuple[dist.ProcessGroup, ...]

    @staticmethod
    def mark(gradient: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        """Makes a plain tensor one of these, in place.

        Args:
            gradient: 1-D, this rank's elements.
            groups: Process groups whose ranks hold the other elements.
        """
        marked: Any = gradient
        marked.__class__ = FlatGradient
        marked.groups = groups
        return gradient

    @property
    def _local_tensor(self) -> Tensor:
        with _torch.without_torch_function():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs a function on the plain tensors, and shares or refuses what is not elementwise.

        Raises:
            RuntimeError: If the function is a norm.
        """
        if func in _NORMS:
            raise RuntimeError(
                "this would be the norm of one rank's part of a flat gradient, another number on "
                "every rank. Clip with ya_fsdp.clip_grad_norm_(model, max_norm), which returns the "
                "norm of all gradients (max_norm=inf only measures)."
            )
        with _torch.without_torch_function():
            result = func(*args, **(kwargs or {}))
            if func is _torch.unscale_and_find_overflow:
                _share_overflow(args[0], args[1])
        return result


def _share_overflow(gradients: list[Tensor], found: Tensor) -> None:
    """Every rank has to skip the step when one of them found an overflow in its elements."""
    for group in dict.fromkeys(_groups_of(gradients)):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)


def _groups_of(gradients: list[Tensor]) -> Iterator[dist.ProcessGroup]:
    for gradient in gradients:
        if isinstance(gradient, FlatGradient):
            yield from gradient.groups
