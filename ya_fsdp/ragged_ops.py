"""Operators of ragged tensors that act on every element alone and need no communication."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ya_fsdp._torch import argument_names, op_overloads, writes_its_input
from ya_fsdp.ragged_placement import contiguous_stride
from ya_fsdp.ragged_tensor import OPERATORS, Handler, RaggedShardDTensor

POINTWISE = """
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not
    bitwise_or bitwise_xor ceil clamp clamp_max clamp_min conj copysign cos cosh deg2rad digamma div
    eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac ge gelu gt
    heaviside hypot isfinite isinf isnan isneginf isposinf ldexp le leaky_relu lerp lgamma log
    log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill
    maximum minimum mul nan_to_num ne neg nextafter pow rad2deg reciprocal relu remainder round
    rsqrt rsub sgn sigmoid sign signbit silu sin sinc sinh softplus special_ndtri sqrt square sub
    tan tanh threshold trunc xlogy zero
"""

FOREACH = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp
    expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round
    rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero
"""

FUSED = ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")

# Those that make a new tensor of the same shape from one tensor. Row-cut pieces are N-D, so a
# memory format means the same for a piece.
LIKE = """
    _conj_physical _pin_memory _to_copy clone contiguous empty_like full_like ones_like
    zeros_like
"""

PROPERTIES = ("is_pinned", "record_stream")


def register(names: Iterable[str], handler: Handler, only: str | None = None) -> None:
    """Lets ``handler`` deal with the named aten operators, all overloads or ``only`` one."""
    for name in names:
        for overload_name, overload in op_overloads(name).items():
            if only in (None, overload_name):
                OPERATORS[overload] = handler


def local_scalar(func: Any, tensor: Tensor) -> Tensor:
    """A tensor of one element in a form that broadcasts against any piece.

    Raises:
        TypeError: If the tensor has more elements, or is spread over ranks.
    """
    if isinstance(tensor, DTensor):
        if not all(placement.is_replicate() for placement in tensor.placements):
            raise TypeError(_foreign(func, tensor))
        tensor = tensor.to_local()
    if tensor.dim() == 0:
        return tensor
    if tensor.numel() != 1:
        raise TypeError(_foreign(func, tensor))
    return tensor.reshape(1)


def _foreign(func: Any, tensor: Tensor) -> str:
    kind = f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
    return (
        f"{func} mixes a RaggedShardDTensor with a {kind}, which is not cut like it. copy_ it into "
        "a tensor made by empty_like of the ragged one, or work on .to_local(). If it is an "
        "optimizer's state that was loaded, call match_optimizer_state(optimizer)."
    )


def check_same_placement(func: Any, first: RaggedShardDTensor, other: RaggedShardDTensor) -> None:
    """Makes sure that two tensors are cut alike, so that their pieces correspond.

    Raises:
        ValueError: If they are not.
    """
    a, b = first._spec, other._spec
    if a is b:
        return
    same_mesh = a.mesh is b.mesh or a.mesh == b.mesh
    if not same_mesh or a.placements != b.placements or a.tensor_meta[0] != b.tensor_meta[0]:
        raise ValueError(
            f"{func} needs tensors that are cut alike, got shape {tuple(first.shape)} with "
            f"{a.placements} and shape {tuple(other.shape)} with {b.placements}. Redistribute "
            "one of them, or copy_ it into a tensor made by empty_like of the other."
        )


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = (*args, *kwargs.values())
    template = next(value for value in values if isinstance(value, RaggedShardDTensor))

    def local(value: Any) -> Any:
        if isinstance(value, RaggedShardDTensor):
            check_same_placement(func, template, value)
            return value._local_tensor
        return local_scalar(func, value) if isinstance(value, Tensor) else value

    target = args[0] if writes_its_input(func) else kwargs.get("out")
    if target is not None and not isinstance(target, RaggedShardDTensor):
        raise TypeError(_foreign(func, target))
    result = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    return template.like(result) if target is None else target


def _local_lists(func: Any, values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Pieces in place of ragged tensors, and the first list of tensors as it was."""
    first: list[Any] = []
    local: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            first = first or list(value)
            pairs = zip(first, value, strict=True)
            local.append([_local_of(func, own, item) for own, item in pairs])
        else:
            local.append(value)
    return first, local


def _local_of(func: Any, own: Tensor, item: Tensor) -> Tensor:
    if isinstance(item, RaggedShardDTensor):
        if not isinstance(own, RaggedShardDTensor):
            raise TypeError(_foreign(func, own))
        check_same_placement(func, own, item)
        return item._local_tensor
    return local_scalar(func, item) if isinstance(own, RaggedShardDTensor) else item


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = list(kwargs)
    first, local = _local_lists(func, (*args, *kwargs.values()))
    positional, named = local[: len(args)], dict(zip(names, local[len(args) :], strict=True))
    result = func(*positional, **named)
    # An operator that changes lists in place has to return None from a dispatch.
    if result is None or writes_its_input(func):
        return None
    return [
        own.like(piece) if isinstance(own, RaggedShardDTensor) else piece
        for own, piece in zip(first, result, strict=True)
    ]


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].alias()


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(func(args[0]._local_tensor, *args[1:], **kwargs))


def _property(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``new_zeros`` and its kin: ragged for the tensor's own shape, else a plain tensor."""
    tensor, size, *rest = args
    local = tensor._local_tensor
    if tuple(size) != tuple(tensor.shape):
        return func(local, size, *rest, **kwargs)
    if "stride" in argument_names(func):
        rest = [contiguous_stride(local.shape), *rest[1:]]
    return tensor.like(func(local, local.shape, *rest, **kwargs))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, size = args
    return tensor.with_shape(size)


def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, indices, value = args[:3]
    mask = indices[0] if len(indices) == 1 else None
    if not isinstance(mask, RaggedShardDTensor) or mask.dtype != torch.bool or value.numel() != 1:
        raise NotImplementedError(
            f"{func} writes ragged tensors only where a mask that is cut alike says so, and one "
            "value only. Use .to_local() to work on this rank's piece."
        )
    check_same_placement(func, target, mask)
    target._local_tensor.masked_fill_(mask._local_tensor, value.reshape(()))
    return target


register(POINTWISE.split(), _pointwise)
register((f"{name}_" for name in POINTWISE.split()), _pointwise)
register(("where",), _pointwise, only="self")
register((f"_foreach_{name}" for name in FOREACH.split()), _foreach)
register((f"_foreach_{name}_" for name in FOREACH.split()), _foreach)
register(FUSED, _foreach)
register(("alias", "detach", "lift_fresh"), _alias)
register(LIKE.split(), _like)
register(PROPERTIES, _property)
register(("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"), _new)
register(("view", "_unsafe_view", "reshape"), _view, only="default")
register(("index_put_",), _index_put)
