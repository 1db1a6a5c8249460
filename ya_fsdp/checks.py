"""Arguments of public functions: what each must be, said with the value that was given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import isnan
from typing import Any, NoReturn

from torch.optim import Optimizer

from . import _torch


def check_type(name: str, value: Any, kind: type[Any], hint: str = "") -> None:
    """Refuses a value of another type.

    Raises:
        TypeError: Names the argument, the type and the value.
    """
    if not isinstance(value, kind):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, got {shown}{hint}")


def check_flag(name: str, value: Any) -> None:
    """Refuses what is no bool.

    Raises:
        TypeError: Names the argument and the value.
    """
    check_type(name, value, bool)


def check_callable(name: str, value: Any) -> None:
    """Refuses what can not be called.

    Raises:
        TypeError: Names the argument and the value.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")


def check_not_negative(name: str, value: Any) -> None:
    """Refuses what is no number of at least 0.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is negative or not a number.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isnan(value) or value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")


_INSTEAD = {
    "set_custom_all_gather": "set_collectives",
    "set_custom_reduce_scatter": "set_collectives",
    "set_allocate_memory_from_process_group_for_comm": "set_collectives(NcclBufferCollectives())",
    "set_symm_mem_for_comm": "set_collectives(SymmetricMemoryCollectives())",
    "set_reduce_scatter_unused_params": "ya_fsdp.set_reduce_unused(model)",
    "set_reduce_scatter_max_input_buffers": "set_num_gradient_buffers",
}


def not_offered(name: str) -> Callable[..., NoReturn]:
    """A method of torch's ``FSDPModule`` that says it has no counterpart, and what to call."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        hint = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise NotImplementedError(f"{name} is not offered by ya_fsdp{hint}")

    method.__name__ = name
    return method


def asking_optimizer() -> str:
    """Of the optimizer whose step runs now, what an error has to say; empty outside of a step."""
    frame: Any = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Optimizer):
            return (
                f" ({type(owner).__name__} asks for it; optimizers that look at more than single "
                "elements, such as Adafactor, LBFGS and Muon, can not train sharded parameters.)"
            )
        frame = frame.f_back
    return ""


def refuse_recording() -> None:
    """Raises inside ``torch.jit.trace`` and ``torch.export``, which would record collectives.

    Raises:
        RuntimeError: Says what to export instead.
    """
    if _torch.is_recording():
        raise RuntimeError(
            "a sharded model can not be exported or traced: its forward communicates. Collect the "
            "weights with ya_fsdp.checkpoint.get_full_state_dict(model) on every rank, load them "
            "into the plain model, and export that one."
        )
