"""Gradients that are not finite, by name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .units import by_mesh, units_of


def non_finite_gradients(model: nn.Module) -> list[str]:
    """FQNs of all parameters whose gradient holds an infinity or NaN on any rank.

    Args:
        model: A sharded model whose backward has run.

    Returns:
        The names in registration order, the same on every rank; empty if all is well.

    Raises:
        ValueError: If the model is not sharded.
    """
    names: list[str] = []
    groups = [group for unit in units_of(model) for group in unit.groups]
    for info, members in by_mesh(groups):
        params = [param for group in members for param in group.params]
        bad = torch.stack([_is_bad(param.sharded.grad, members[0].device) for param in params])
        for axis in (info.shard_group, info.replicate_group):
            if axis is not None:
                dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=axis)
        names += [p.fqn for p, is_bad in zip(params, bad.tolist(), strict=True) if is_bad]
    order = {name: position for position, (name, _) in enumerate(model.named_parameters())}
    return sorted(names, key=lambda name: order.get(name, len(order)))


def _is_bad(gradient: Tensor | None, device: torch.device) -> Tensor:
    if gradient is None:
        return torch.zeros((), dtype=torch.int32, device=device)
    local = getattr(gradient, "_local_tensor", gradient)
    return (~local.isfinite()).any().to(torch.int32)
