"""Reductions of ragged tensors to one value, communicated at once.

The result is a plain tensor, the same on every rank of the mesh. Replicas on other mesh axes hold
the same pieces and are not counted again. Values travel as 64-bit numbers (32-bit where
the device has none), because a sum of squares leaves the range of smaller types.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ya_fsdp._torch import argument_names, foreach_norm
from ya_fsdp.checks import asking_optimizer
from ya_fsdp.ragged_ops import check_same_placement, register
from ya_fsdp.ragged_random import is_cut_alike
from ya_fsdp.ragged_tensor import RaggedShardDTensor

SMALL = (torch.float16, torch.bfloat16)

Arguments = dict[str, Any]
Groups = tuple[dist.ProcessGroup, ...]


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Arguments by their names in the operator's schema.

    Raises:
        NotImplementedError: If only some dims are to be reduced, or a dim is to be kept.
    """
    bound = dict(zip(argument_names(func), args, strict=False)) | kwargs
    tensor, dim = bound.get("self"), bound.get("dim")
    dims = {dim} if isinstance(dim, int) else set(dim or ())
    if dims and len({d % max(tensor.dim(), 1) for d in dims}) < tensor.dim():  # type: ignore[union-attr]
        raise NotImplementedError(
            f"{func} over dims {sorted(dims)} of a RaggedShardDTensor: only reductions to one "
            f"value are defined. Use .full_tensor() (on every rank) first.{asking_optimizer()}"
        )
    if bound.get("keepdim"):
        raise NotImplementedError(f"{func} with keepdim=True of a RaggedShardDTensor")
    if bound.get("out") is not None:
        raise NotImplementedError(f"{func} of a RaggedShardDTensor into out=")
    return bound


def wide(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which partial values of ``dtype`` are combined."""
    if dtype.is_complex:
        return torch.complex128
    if dtype.is_floating_point:
        return torch.float32 if device.type == "mps" else torch.float64
    return torch.int64


def combine(values: Tensor, op: Any, groups: Groups) -> Tensor:
    """All-reduces values in place; a NaN on any rank stays one under ``MAX`` and ``MIN``.

    Args:
        values: One value per entry, 64-bit.
        op: ``SUM``, ``MAX`` or ``MIN``.
        groups: Process groups of the axes over which pieces differ.
    """
    if op is dist.ReduceOp.SUM or not values.is_floating_point():
        _all_reduce(values, op, groups)
        return values
    # Backends differ in what they make of max(NaN, 1), so NaN travels as a value of its own.
    missing = values.isnan()
    sign = 1.0 if op is dist.ReduceOp.MAX else -1.0
    both = torch.stack([values.masked_fill(missing, -sign * torch.inf), sign * missing])
    _all_reduce(both, op, groups)
    return torch.where(both[1] != 0, torch.nan, both[0])


def _all_reduce(values: Tensor, op: Any, groups: Groups) -> None:
    for group in groups:
        dist.all_reduce(values, op=op, group=group)


def _combined(tensor: RaggedShardDTensor, value: Tensor, op: Any) -> Tensor:
    groups = tensor.groups
    if value.is_complex():
        return torch.view_as_complex(combine(torch.view_as_real(value).contiguous(), op, groups))
    return combine(value.reshape(1), op, groups).reshape(())


def total(tensor: RaggedShardDTensor, piece: Tensor) -> Tensor:
    """Sum over all pieces, 64-bit; ``piece`` stands in for the tensor's own."""
    accumulator = wide(piece.dtype, piece.device)
    # Accumulating every element in 64 bits would be slow; the ends of the sum are enough.
    if piece.dtype in SMALL:
        piece = piece.float()
    return _combined(tensor, piece.sum().to(accumulator), dist.ReduceOp.SUM)


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bind(func, args, kwargs)
    tensor, dtype = bound["self"], bound.get("dtype")
    local = tensor._local_tensor
    if dtype is None:
        dtype = local.dtype if local.is_floating_point() or local.is_complex() else torch.int64
    return total(tensor, local if bound.get("dtype") is None else local.to(dtype)).to(dtype)


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bind(func, args, kwargs)
    tensor = bound["self"]
    dtype = bound.get("dtype") or tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean needs a floating point dtype, got {dtype}")
    return (total(tensor, tensor._local_tensor.to(dtype)) / tensor.numel()).to(dtype)


def _deviation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bind(func, args, kwargs)
    tensor = bound["self"]
    local, numel = tensor._local_tensor, tensor.numel()
    correction = bound.get("correction")
    if correction is None:
        correction = 1 if bound.get("unbiased", True) else 0
    mean = total(tensor, local) / numel
    squares = total(tensor, (local.to(mean.dtype) - mean).square())
    variance = squares / max(numel - correction, 0)
    result = variance.sqrt() if "std" in str(func) else variance
    return result.to(tensor.dtype)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bind(func, args, kwargs)
    tensor = bound["self"]
    local = tensor._local_tensor
    if tensor.numel() == 0:
        raise RuntimeError(f"{func} of an empty tensor has no value")
    largest = "max" in str(func)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
    return _combined(tensor, _local_extreme(local, largest), op).to(local.dtype)


def _local_extreme(local: Tensor, largest: bool) -> Tensor:
    dtype = wide(local.dtype, local.device)
    if local.numel():
        return (local.amax() if largest else local.amin()).to(dtype)
    if dtype.is_floating_point:
        return torch.full(
            (), -torch.inf if largest else torch.inf, dtype=dtype, device=local.device
        )
    info = torch.iinfo(dtype)
    return torch.full((), info.min if largest else info.max, dtype=dtype, device=local.device)


def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _bind(func, args, kwargs)["self"]
    wants_all = "all" in str(func)
    local = tensor._local_tensor
    value = (local.all() if wants_all else local.any()).to(torch.int64)
    op = dist.ReduceOp.MIN if wants_all else dist.ReduceOp.MAX
    return _combined(tensor, value, op).bool()


def _count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _bind(func, args, kwargs)["self"]
    return total(tensor, tensor._local_tensor != 0)


def _norm_rule(p: float) -> tuple[Any, float]:
    """How local p-norms combine: the operation and the power under which they are summed."""
    if p == float("inf"):
        return dist.ReduceOp.MAX, 1.0
    if p == float("-inf"):
        return dist.ReduceOp.MIN, 1.0
    return dist.ReduceOp.SUM, 1.0 if p == 0 else p


def combine_norms(norms: Tensor, p: float, groups: Groups) -> Tensor:
    """Global p-norms from every rank's own, one per entry, 64-bit."""
    op, power = _norm_rule(p)
    return combine(norms.pow(power), op, groups).pow(1.0 / power)


def local_norms(pieces: list[Tensor], p: float) -> Tensor:
    """The pieces' p-norms, stacked and 64-bit; an empty piece has the norm that changes nothing."""
    device = pieces[0].device
    filled = [piece for piece in pieces if piece.numel()]
    small = bool(filled) and all(piece.dtype in SMALL for piece in filled)
    # A 16-bit result would lose digits that the sum over ranks needs.
    norms = foreach_norm(filled, p, torch.float32 if small else None) if filled else ()
    dtype = norms[0].dtype if norms else torch.float32
    # The sum of negative powers, and a minimum, are unchanged by an infinite value.
    neutral = torch.full((), torch.inf if p < 0 else 0.0, dtype=dtype, device=device)
    values = iter(norms)
    stacked = torch.stack([next(values) if piece.numel() else neutral for piece in pieces])
    return stacked.to(wide(torch.float32, device))


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bind(func, args, kwargs)
    tensor = bound["self"]
    p = bound.get("ord", bound.get("p"))
    p = 2.0 if p is None else float(p)
    dtype = bound.get("dtype")
    local = tensor._local_tensor if dtype is None else tensor._local_tensor.to(dtype)
    norm = combine_norms(local_norms([local], p), p, tensor.groups)
    return norm.reshape(()).to(local.dtype.to_real())


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One all-reduce per process group for the whole list; plain tensors may stand among them."""
    bound = dict(zip(argument_names(func), args, strict=False)) | kwargs
    tensors, p, dtype = bound["self"], float(bound.get("ord", 2)), bound.get("dtype")
    results: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    plain: list[int] = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, RaggedShardDTensor):
            alike.setdefault((tensor.groups, tensor.device), []).append(index)
        else:
            plain.append(index)
    if plain:
        for index, norm in zip(plain, func([tensors[i] for i in plain], p, dtype), strict=True):
            results[index] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    for (groups, _), indices in alike.items():
        pieces = [tensors[i]._local_tensor for i in indices]
        pieces = pieces if dtype is None else [piece.to(dtype) for piece in pieces]
        norms = combine_norms(local_norms(pieces, p), p, groups)
        # One conversion for each dtype, not for each tensor.
        kinds = {piece.dtype.to_real() for piece in pieces}
        converted = {kind: norms.to(kind).unbind() for kind in kinds}
        for position, (index, piece) in enumerate(zip(indices, pieces, strict=True)):
            results[index] = converted[piece.dtype.to_real()][position]
    return results


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``equal`` and ``allclose``, also with a plain tensor or one that is cut differently."""
    first, other, *tolerances = args
    if first.shape != other.shape:
        return False
    ragged = first if isinstance(first, RaggedShardDTensor) else other
    pieces = [_matching_piece(ragged, tensor) for tensor in (first, other)]
    same = torch.tensor(int(func(*pieces, *tolerances, **kwargs)), device=ragged.device)
    return bool(_combined(ragged, same, dist.ReduceOp.MIN))


def _matching_piece(ragged: RaggedShardDTensor, tensor: Any) -> Tensor:
    if is_cut_alike(ragged, tensor):
        return cast(Tensor, tensor.to_local())
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return ragged.piece_of(whole)


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    first, other = args
    check_same_placement(func, first, other)
    return total(first, first._local_tensor * other._local_tensor).to(first.dtype)


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].full_tensor().reshape(()))


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Every rank has to skip the step when one of them found an overflow in its pieces."""
    gradients, found_inf, inverse_scale = args
    pieces = [g._local_tensor if isinstance(g, RaggedShardDTensor) else g for g in gradients]
    func(pieces, found_inf, inverse_scale)
    ragged = [g for g in gradients if isinstance(g, RaggedShardDTensor)]
    groups = dict.fromkeys(group for gradient in ragged for group in gradient.groups)
    _all_reduce(found_inf, dist.ReduceOp.MAX, tuple(groups))


register(("sum",), _sum)
register(("mean",), _mean)
register(("std", "var"), _deviation)
register(("amax", "amin"), _extreme)
# Their other overloads combine two tensors, or return indices.
register(("max", "min"), _extreme, only="default")
register(("all", "any"), _truth)
register(("count_nonzero",), _count_nonzero)
register(("linalg_vector_norm", "norm"), _norm)
register(("_foreach_norm",), _foreach_norm)
register(("allclose", "equal"), _equal)
register(("dot", "vdot"), _dot)
register(("_local_scalar_dense",), _item)
register(("_amp_foreach_non_finite_check_and_unscale_",), _unscale)
