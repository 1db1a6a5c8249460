"""Finding and casting tensors in whatever a module takes and returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 8


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings, dataclasses and plain objects.

    Objects that are none of these are searched through their attributes, so that a model output
    of any class needs no registration.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _PLAIN) or depth > _MAX_DEPTH:
        return
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        for item in list(getattr(value, "__dict__", {}).values()):
            yield from tensors_in(item, depth + 1)
        for name in getattr(type(value), "__slots__", ()):
            yield from tensors_in(getattr(value, name, None), depth + 1)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies ``function`` to tensors in tuples, lists, dicts and dataclasses.

    A container in which nothing changes is returned itself, so that an object which modules pass
    along to write into stays the same object.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        return _map_dict(value, function)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for item in dataclasses.fields(value):
            old = getattr(value, item.name, None)
            new = map_tensors(old, function)
            if new is not old:
                changes[item.name] = new
        return dataclasses.replace(value, **changes) if changes else value
    return value


def _map_dict(value: dict[Any, Any], function: Callable[[Tensor], Tensor]) -> Any:
    changes = {}
    for key, old in value.items():
        new = map_tensors(old, function)
        if new is not old:
            changes[key] = new
    if not changes:
        return value
    if type(value) is dict:
        return {**value, **changes}
    other: Any = value
    if dataclasses.is_dataclass(other):  # a model output that is a dict and a dataclass
        return dataclasses.replace(other, **changes)  # type: ignore[type-var]
    fresh = value.copy()
    fresh.update(changes)
    return fresh


@functools.cache
def cast_floats(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that casts floating-point tensors to ``dtype`` and leaves others alone."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return cast
