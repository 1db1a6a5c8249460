"""Whole optimizer states, gathered and spread one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .entries import unwrapped
from .full import describe_tensors, spread, whole_of
from .optimizer_state import (
    Named,
    by_name,
    compare_groups,
    get_named,
    optimizer_names,
    set_named,
    template,
)
from .peers import CheckpointError, Peers


@torch.no_grad()
def get_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    cpu_offload: bool = True,
    rank0_only: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Named:
    """Gathers an optimizer's state under the plain model's names; every rank has to call it.

    The optimizer is left as it is: unlike torch's helper, no step is taken to make state that does
    not exist yet, and parameters that never had a gradient have no entry.

    Args:
        model: A model with sharded parameters, or a plain one.
        optimizer: Its optimizer.
        cpu_offload: Whether the tensors of the result are on CPU.
        rank0_only: Whether only rank 0 gets the result, and the others an empty dict.
        process_group: The ranks that share the model, ``None`` for all.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}`` with
        plain tensors, the format of torch's ``get_optimizer_state_dict``.

    Raises:
        CheckpointError: If some rank does not make the call, or state of a sharded parameter is
            neither sharded like it nor one number.
    """
    model = unwrapped(model)
    peers = Peers(process_group)
    peers.arrive("get_full_optimizer_state_dict")
    with peers.together("get_full_optimizer_state_dict"):
        named = get_named(model, optimizer)
    keep = peers.leads or not rank0_only
    for values in named["state"].values():
        for key, value in values.items():
            if isinstance(value, Tensor):
                whole = whole_of(value)
                where = torch.device("cpu") if cpu_offload else whole.device
                values[key] = whole.to(where, copy=True) if keep else None
    return named if keep else {}


@torch.no_grad()
def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict_on_rank0: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Spreads a whole optimizer state that rank 0 has; every rank has to call it.

    Args:
        model: A model with sharded parameters, or a plain one.
        optimizer: Its optimizer, new or used.
        state_dict_on_rank0: What :func:`get_full_optimizer_state_dict` gave, or torch's
            ``get_optimizer_state_dict(full_state_dict=True)``; ignored on other ranks.
        strict: Whether parameters, groups and options have to be the same.
        process_group: The ranks that share the model, ``None`` for all.

    Raises:
        CheckpointError: On every rank, if the state does not fit; the optimizer is then unchanged.
    """
    model = unwrapped(model)
    peers = Peers(process_group)
    peers.arrive("load_full_optimizer_state_dict")
    given: Mapping[str, Any] = {}
    with peers.together("load_full_optimizer_state_dict"):
        if peers.leads:
            given = _checked(state_dict_on_rank0)
    saved: list[dict[str, Any]] = list(given.get("param_groups", ()))
    plan = {name: describe_tensors(values) for name, values in given.get("state", {}).items()}
    groups, plan = peers.broadcast((saved, plan))
    with peers.together("load_full_optimizer_state_dict"):
        compare_groups(model, optimizer, groups, strict)
        targets = _targets(model, optimizer, plan)
    state: dict[str, dict[str, Any]] = {}
    for name, (tensors, objects) in plan.items():
        if name not in targets:
            continue
        state[name] = dict(objects)
        for key, (shape, dtype) in tensors.items():
            whole = given["state"][name][key] if peers.leads else None
            spread(peers, targets[name][key], whole, shape, dtype)
            state[name][key] = targets[name][key]
    set_named(model, optimizer, {"state": state, "param_groups": groups})


def _targets(
    model: nn.Module, optimizer: Optimizer, plan: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    find = by_name(model)
    known = {name for group in optimizer_names(model, optimizer) for name in group}
    targets = {}
    for name, (tensors, _) in plan.items():
        try:
            parameter = find(name)
        except KeyError:
            continue  # Only a load that is not strict comes here with a name that is unknown.
        if name in known:
            targets[name] = {
                key: template(optimizer, name, parameter, key, shape, dtype)
                for key, (shape, dtype) in tensors.items()
            }
    return targets


def _checked(state_dict: Any) -> Mapping[str, Any]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            "rank 0 has to pass a dict with 'state' and 'param_groups', got "
            f"{sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict)}"
        )
    if any(isinstance(name, int) for name in state_dict["state"]):
        raise CheckpointError(
            "the optimizer state is numbered, not named: make it with "
            "get_full_optimizer_state_dict instead of optimizer.state_dict()"
        )
    return state_dict
