"""Copies and random numbers: operators that take a range of a whole tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ya_fsdp.ragged_ops import register
from ya_fsdp.ragged_tensor import RaggedShardDTensor

RANDOM_INPLACE = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)

RANDOM_LIKE = ("rand_like", "randint_like", "randn_like")


def _random_inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the whole tensor and keeps a range, so that a seed gives the same at any world size."""
    tensor = args[0]
    local = tensor._local_tensor
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    func(full, *args[1:], **kwargs)
    local.copy_(tensor.piece_of(full))
    return tensor


def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    local = tensor._local_tensor
    whole = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    return tensor.like(tensor.piece_of(func(whole, *args[1:], **kwargs)).clone())


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    copy_into(*args, **kwargs)
    return args[0]


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    """``target.copy_(source)``, where at least one of them is ragged.

    A source that is cut differently, and a ragged source of a plain target, are gathered, so every
    rank has to take part. A plain source counts as the whole tensor, or is broadcast to it.
    """
    if not isinstance(target, RaggedShardDTensor):
        _copy_out(target, source, non_blocking)
        return
    local = target._local_tensor
    if is_cut_alike(target, source):
        local.copy_(source.to_local(), non_blocking)  # type: ignore[attr-defined]
        return
    whole = source.full_tensor() if hasattr(source, "full_tensor") else source
    if whole.numel() == 1:
        local.copy_(whole.reshape(()), non_blocking)
    else:
        local.copy_(target.piece_of(whole.expand(target.shape)), non_blocking)


def _copy_out(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    whole = source.full_tensor()  # type: ignore[attr-defined]
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        whole = replicated.redistribute(mesh, target.placements)
    target.copy_(whole, non_blocking)


def is_cut_alike(first: RaggedShardDTensor, other: object) -> bool:
    """Whether ``other`` is a distributed tensor whose pieces correspond to those of ``first``."""
    return (
        isinstance(other, (RaggedShardDTensor, DTensor))
        and first.placements == other.placements
        and first.shape == other.shape
        and first.device_mesh == other.device_mesh
    )


def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    targets, sources, *rest = args
    pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if not isinstance(target, RaggedShardDTensor) and not hasattr(source, "full_tensor"):
            pieces[0].append(target)
            pieces[1].append(source)
        elif isinstance(target, RaggedShardDTensor) and is_cut_alike(target, source):
            pieces[0].append(target._local_tensor)
            pieces[1].append(source.to_local())
        else:
            copy_into(target, source)
    if pieces[0]:
        func(*pieces, *rest, **kwargs)


register(RANDOM_INPLACE, _random_inplace)
register(RANDOM_LIKE, _random_like)
register(("copy_",), _copy)
register(("_foreach_copy_",), _foreach_copy)
