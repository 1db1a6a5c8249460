"""Trainable parameters below a root that no unit manages: nobody would reduce their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

from .ragged import RaggedShardDTensor

_KNOWN = "_ya_fsdp_known"
"""Name of a module's list of parameter names that a ``fully_shard`` call has seen."""


def note_known(modules: Iterable[nn.Module]) -> None:
    """Remembers which parameters modules have when they are sharded, the ignored ones included."""
    for module in modules:
        module.__dict__[_KNOWN] = frozenset(module._parameters)


class Census:
    """What a root consists of, compared at the start of every iteration at C speed."""

    __slots__ = ("_children", "_modules", "_num_parameters", "_parameters")

    def __init__(self, root: nn.Module) -> None:
        """Counts the modules and parameters of ``root``.

        Raises:
            RuntimeError: If a trainable parameter was added after ``fully_shard``.
        """
        modules = list(root.modules())
        refuse_strays(root)
        self._modules: list[dict[str, Any]] = [m._modules for m in modules]
        self._parameters: list[dict[str, Any]] = [m._parameters for m in modules]
        self._children = self._now()
        self._num_parameters = sum(map(len, self._parameters))

    def changed(self) -> bool:
        """Whether modules were added or replaced, or parameters added, since this was made."""
        return (
            sum(map(len, self._parameters)) != self._num_parameters or self._now() != self._children
        )

    def _now(self) -> list[nn.Module]:
        return list(chain.from_iterable(map(dict.values, self._modules)))


def refuse_strays(root: nn.Module) -> None:
    """Raises if there are trainable parameters that nobody manages and nobody ignored.

    Raises:
        RuntimeError: Names them.
    """
    strays = []
    for prefix, module in root.named_modules():
        known = module.__dict__.get(_KNOWN, ())
        for name, param in module._parameters.items():
            if param is None or name in known or not param.requires_grad:
                continue
            if isinstance(param, RaggedShardDTensor) or hasattr(param, "_ya_fsdp_fqn"):
                continue  # moved here from a unit, which looks after it
            strays.append(f"{prefix}.{name}" if prefix else name)
    if strays:
        shown = ", ".join(f"'{name}'" for name in strays[:8]) + (", ..." if strays[8:] else "")
        raise RuntimeError(
            f"trainable parameters were added to {type(root).__name__} after fully_shard: {shown}. "
            "Nobody would average their gradients over ranks. Add them before fully_shard, call "
            "fully_shard on the new module, or freeze them (requires_grad_(False))."
        )
