"""Clipping by the norm of all gradients, over shards that lie in a few flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _torch, kernels
from .build import units_of
from .checks import check_not_negative, check_type
from .group import ParamGroup
from .ragged import RaggedShardDTensor
from .unit import Unit

Groups = tuple[dist.ProcessGroup, ...]


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    *,
    norm_groups: Mapping[nn.Module, dist.ProcessGroup] | None = None,
) -> Tensor:
    """Scales all gradients so that their global norm is at most ``max_norm``.

    Without waiting for the device on the host, and with one all-reduce. On a GPU with Triton and
    ``YA_FSDP_TRITON_CLIP=1``, fp32 gradients are read by one kernel and scaled by another.

    Args:
        model: A sharded model whose backward has run.
        max_norm: Upper bound of the norm.
        norm_type: Order of the norm, positive or ``inf``.
        norm_groups: Process groups over whose ranks a module's parameters are others: experts and
            their expert-parallel group, a pipeline stage (the model itself) and the pipeline's.
            Their norm counts over that group as well.

    Returns:
        The norm before clipping, 0-dim, fp32, the same on every rank.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``max_norm`` is negative or NaN, or ``norm_type`` not positive.
        RuntimeError: If :func:`ya_fsdp.optimizer_in_backward` updates the model.
    """
    check_type("model", model, nn.Module, "; pass the model, not its parameters")
    if not isinstance(max_norm, Tensor):
        check_not_negative("max_norm", max_norm)
    check_not_negative("norm_type", norm_type)
    check_type("norm_groups", norm_groups or {}, Mapping)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    beyond = {id(p): pg for m, pg in (norm_groups or {}).items() for p in m.parameters()}
    units = _clippable_units(model)
    plain = norm_type == 2.0 and not norm_groups and not isinstance(max_norm, Tensor)
    if plain and _alike(model, units):
        return _clip_at_once(units, float(max_norm))
    # Gradients by the groups over whose ranks they are cut, and others.
    parts: dict[tuple[Groups, dist.ProcessGroup | None], list[Tensor]] = {}
    managed: set[int] = set()
    device: torch.device | None = None
    for group in (group for unit in units for group in unit.groups):
        managed.update(id(p.sharded) for p in group.params)
        device = group.device
        outside = beyond.get(id(group.params[0].sharded))
        for over, grads in _grads_by_groups(group):
            parts.setdefault((over, outside), []).extend(grads)
    if device is None and not beyond:
        return nn.utils.clip_grad_norm_(model.parameters(), float(max_norm), norm_type)
    for param in model.parameters():
        if id(param) not in managed and param.grad is not None:
            parts.setdefault(((), beyond.get(id(param))), []).append(param.grad)
            device = device or param.device
    for pg in (norm_groups or {}).values():
        parts.setdefault(((), pg), [])  # ranks without gradients take part
    with torch.no_grad():
        total = _norm_of(parts, norm_type, device or torch.device("cpu"))
        kernels.scale_from_norm([grad for part in parts.values() for grad in part], total, max_norm)
    return total


def _clippable_units(model: nn.Module) -> list[Unit]:
    units = list(units_of(model.modules()))
    for unit in units:
        if unit.early is not None:
            raise RuntimeError(
                f"unit '{unit.fqn}' is updated during the backward, so there is no norm of all "
                "gradients to clip by; remove() what optimizer_in_backward returned, or do not clip"
            )
    return units


def _alike(model: nn.Module, units: list[Unit]) -> bool:
    """Whether all gradients are fp32, cut over the same ranks; the same answer on every rank."""
    groups = [group for unit in units for group in unit.groups]
    managed = {id(param.sharded) for group in groups for param in group.params}
    return (
        len({unit.ring for unit in units if unit.groups}) == 1
        and all(g.params[0].tensor_parallel is None for g in groups)
        and all(g.dtypes.master == torch.float32 for g in groups)
        and not any(p.requires_grad and id(p) not in managed for p in model.parameters())
    )


def _clip_at_once(units: list[Unit], max_norm: float) -> Tensor:
    """Two passes over the gradients, and one sum over the ranks in between."""
    groups = [group for unit in units for group in unit.groups]
    grads = [grad for group in groups for grad in grads_of(group) if grad.numel()]
    with torch.no_grad():
        squares = kernels.square_sums(grads, groups[0].device)
        return kernels.scale_to_norm(
            grads, reduced(squares, 2.0, groups[0].mesh_info.shard_group), max_norm
        )


def _norm_of(
    parts: Mapping[tuple[Groups, dist.ProcessGroup | None], list[Tensor]],
    norm_type: float,
    device: torch.device,
) -> Tensor:
    is_inf = norm_type == float("inf")
    powers: dict[dist.ProcessGroup | None, list[Tensor]] = {}
    for (over, beyond), grads in parts.items():
        power = local_power(grads, norm_type, device)
        for process_group in over:
            power = reduced(power, norm_type, process_group)
        powers.setdefault(beyond, []).append(power)
    totals = []
    for beyond, values in powers.items():
        stacked = torch.stack(values)
        value = stacked.max() if is_inf else stacked.sum()
        totals.append(value if beyond is None else reduced(value, norm_type, beyond))
    stacked = torch.stack(totals)
    return stacked.max() if is_inf else stacked.sum().pow(1.0 / norm_type)


def grads_of(group: ParamGroup) -> list[Tensor]:
    """This rank's reduced gradients of a group, in as few tensors as possible."""
    shard = group.grads.shard
    if shard.complete():
        return [shard.flat]
    grads = [holder.grad for holder in shard.holders()]
    return [getattr(g, "_local_tensor", g) for g in grads if g is not None]


def _grads_by_groups(group: ParamGroup) -> Iterator[tuple[Groups, list[Tensor]]]:
    """Gradients with the process groups over whose ranks they are others."""
    if group.params[0].tensor_parallel is None:
        yield (group.mesh_info.shard_group,), grads_of(group)
        return
    # Some may be the same on all ranks of their own axes, and some are not.
    for param in group.params:
        sharded = param.sharded
        assert isinstance(sharded, RaggedShardDTensor)
        grad: Any = sharded.grad  # of a member of a flat parameter: a view of its part
        yield sharded.groups, [] if grad is None else [grad.to_local()]


def local_power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of the p-th powers (or the maximum) of this rank's elements, fp32."""
    grads = [g for g in grads if g.numel()]
    if not grads:
        return torch.zeros((), device=device)
    norms = torch.stack([n.float() for n in _torch.flat_norms(grads, norm_type)])
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()


def reduced(value: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """Adds (or takes the maximum of) what :func:`local_power` gave over a process group."""
    if dist.get_world_size(group) > 1:
        op = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
        dist.all_reduce(value, op, group=group)
    return value
