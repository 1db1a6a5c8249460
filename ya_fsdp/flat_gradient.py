"""Flat parameters and their gradients: local values whose meaning is global.

Elementwise optimizers need nothing but the local elements. Functions whose answer depends on other
ranks' elements either ask them (a gradient scaler's search for overflows) or refuse, since ranks
that clip, skip or scale a step by different numbers drift apart in silence.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from . import _torch

logger = logging.getLogger("ya_fsdp")

FLAT = "_ya_fsdp_is_flat"
"""Attribute of flat parameters."""

_NORMS = frozenset(
    (_torch.flat_norms, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm)
)


_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,  # and AdamW
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP")

_warned: set[type[Any]] = set()


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Refuses an optimizer that would need more of flat parameters than this rank's elements.

    Raises:
        ValueError: If it uses norms or shapes of whole parameters.
    """
    kind = type(optimizer)
    if issubclass(kind, _ELEMENTWISE) or kind in _warned:
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    if not any(hasattr(param, FLAT) for param in params):
        return
    if any(each.__name__ in _NOT_ELEMENTWISE for each in kind.__mro__):
        raise ValueError(
            f"{kind.__name__} uses norms or shapes of whole parameters, and of a flat parameter "
            "every rank has other elements of several of them. Make it from model.parameters() "
            "instead of flat_parameters(model)"
        )
    _warned.add(kind)
    logger.warning(
        "%s updates flat parameters, which is right only if it treats every element by itself "
        "(as Adam does); if it uses norms or shapes, make it from model.parameters()",
        kind.__name__,
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: a copy is nobody's gradient."""
        return copy.deepcopy(self._local_tensor, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor."""
        return self._local_tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

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
