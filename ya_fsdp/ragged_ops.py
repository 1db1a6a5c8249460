"""Operators of ragged tensors that need no communication."""

from __future__ import annotations

from typing import Any

import torch

from ya_fsdp.ragged_tensor import OPERATORS

aten = torch.ops.aten


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    return tensor.like(tensor._local_tensor)


OPERATORS.update(dict.fromkeys((aten.detach.default, aten.alias.default), _alias))
