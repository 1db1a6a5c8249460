"""An optimizer's state under the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..build import groups_of
from ..flat import flat_optimizer_state_dict, load_flat_optimizer_state_dict
from ..ragged import RaggedShardDTensor
from .entries import parameter_names, plain_name
from .peers import CheckpointError

Named = dict[str, Any]
"""``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}``, as torch's
``get_optimizer_state_dict`` makes it."""


def optimizer_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters of every parameter group.

    Raises:
        CheckpointError: If the optimizer has a parameter that the model does not have.
    """
    if _is_flat(model, optimizer):
        return [group["params"] for group in _flat_named(model, optimizer)["param_groups"]]
    names = parameter_names(model)
    result = []
    for number, group in enumerate(optimizer.param_groups):
        strangers = sum(parameter not in names for parameter in group["params"])
        if strangers:
            raise CheckpointError(
                f"{strangers} parameters of the optimizer's group {number} are not parameters of "
                "the model; build the optimizer after fully_shard, from model.parameters()"
            )
        result.append([names[parameter] for parameter in group["params"]])
    return result


def _is_flat(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether the optimizer is over flat parameters, and the model's are others."""
    flat = {piece.param for group in groups_of(model) for piece in group.grads.shard.pieces}
    flat -= set(parameter_names(model))
    return any(p in flat for group in optimizer.param_groups for p in group["params"])


def _flat_named(model: nn.Module, optimizer: Optimizer) -> Named:
    """State of flat parameters, cut into that of the model's parameters, alike on all ranks.

    In which order flat parameters hold the others depends on what this rank owns.
    """
    named = flat_optimizer_state_dict(model, optimizer)
    state = {plain_name(name): values for name, values in named["state"].items()}
    order = {name: index for index, name in enumerate(parameter_names(model).values())}
    return {
        "state": {name: state[name] for name in sorted(state, key=order.__getitem__)},
        "param_groups": [
            {**group, "params": sorted(map(plain_name, group["params"]), key=order.__getitem__)}
            for group in named["param_groups"]
        ],
    }


def _set_flat_named(model: nn.Module, optimizer: Optimizer, named: Named) -> None:
    """The opposite; parameters without state of their own count as ones with zeros."""
    own = flat_optimizer_state_dict(model, optimizer)
    state = {name: named["state"].get(plain_name(name), {}) for name in own["state"]}
    kept = {name: group for group in named["param_groups"] for name in group["params"]}
    groups = [
        next((kept[name] for n in group["params"] if (name := plain_name(n)) in kept), group)
        for group in own["param_groups"]
    ]
    load_flat_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups})
    optimizer.load_state_dict(optimizer.state_dict())  # which sets dtypes and devices


def get_named(model: nn.Module, optimizer: Optimizer) -> Named:
    """The optimizer's state as it is: no step is taken to make state that does not exist yet.

    Tensors are the optimizer's own.

    Raises:
        CheckpointError: If state of a sharded parameter is neither sharded like it nor one number.
    """
    if _is_flat(model, optimizer):
        named = _flat_named(model, optimizer)
        return {**named, "state": {n: values for n, values in named["state"].items() if values}}
    names = optimizer_names(model, optimizer)
    packed = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    flat = [name for group in names for name in group]
    state = {}
    for number, (name, parameter) in enumerate(zip(flat, parameters, strict=True)):
        if number in packed["state"]:
            state[name] = dict(packed["state"][number])
            for key, value in state[name].items():
                _check_value(name, key, parameter, value)
    groups = [
        {**group, "params": own} for group, own in zip(packed["param_groups"], names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _check_value(name: str, key: str, parameter: Tensor, value: Any) -> None:
    plain = isinstance(value, Tensor) and not isinstance(value, (RaggedShardDTensor, DTensor))
    if isinstance(parameter, RaggedShardDTensor) and plain and value.numel() > 1:
        raise CheckpointError(
            f"state '{key}' of parameter '{name}' is a plain tensor of shape {tuple(value.shape)}, "
            "of which every rank may have another. Only state that is sharded like its parameter "
            "(made by zeros_like, say) or has one element can be saved."
        )


def set_named(model: nn.Module, optimizer: Optimizer, named: Named) -> None:
    """Hands the optimizer the named state; its own ``load_state_dict`` sets dtypes and devices."""
    if _is_flat(model, optimizer):
        _set_flat_named(model, optimizer, named)
        return
    names = optimizer_names(model, optimizer)
    numbers = {name: i for i, name in enumerate(n for group in names for n in group)}
    by_name = {name: group for group in named["param_groups"] for name in group["params"]}
    groups = []
    for own, current in zip(names, optimizer.param_groups, strict=True):
        options = {k: v for k, v in current.items() if k != "params"}
        if own and own[0] in by_name:
            options |= by_name[own[0]]
        groups.append({**options, "params": [numbers[name] for name in own]})
    state = {numbers[name]: value for name, value in named["state"].items() if name in numbers}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def compare_groups(
    model: nn.Module, optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], strict: bool
) -> None:
    """Checks that saved parameter groups fit an optimizer.

    Raises:
        CheckpointError: If parameters or options differ.
    """
    names = optimizer_names(model, optimizer)
    own = {name for group in names for name in group}
    there = {name for group in saved for name in group["params"]}
    lines = []
    if own - there:
        lines.append(f"the checkpoint has no optimizer state for {_some(own - there)}")
    if there - own:
        lines.append(f"the optimizer does not have the checkpoint's {_some(there - own)}")
    if not lines and sorted(map(sorted, names)) != sorted(sorted(g["params"]) for g in saved):
        lines.append("parameters are sorted into other parameter groups than in the checkpoint")
    options = {key for group in optimizer.param_groups for key in group}
    kept = {key for group in saved for key in group}
    if options - kept and kept - options:
        # A new release may add options, but only another optimizer also lacks some.
        lines.append(
            f"the checkpoint is of another optimizer than {type(optimizer).__name__}: it has the "
            f"options {_some(kept - options)} and lacks {_some(options - kept)}"
        )
    if lines and strict:
        raise CheckpointError("; ".join(lines))


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


def template(
    optimizer: Optimizer,
    name: str,
    parameter: Tensor,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """A tensor to load one piece of state into: the optimizer's own where it fits.

    Raises:
        CheckpointError: If state of a sharded parameter has a shape that says nothing about how
            it is sharded.
    """
    current = optimizer.state.get(parameter, {}).get(key)
    if isinstance(current, Tensor):
        if tuple(current.shape) != shape:
            raise CheckpointError(
                f"state '{key}' of parameter '{name}' has shape {list(shape)} in the checkpoint "
                f"and {list(current.shape)} in the optimizer"
            )
        if current.dtype == dtype:
            return current
        return torch.empty_like(current, dtype=dtype)
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if isinstance(parameter, RaggedShardDTensor) and torch.Size(shape).numel() > 1:
        raise CheckpointError(
            f"state '{key}' of parameter '{name}' has shape {list(shape)}, the parameter "
            f"{list(parameter.shape)}: this can be loaded only into an optimizer that has it "
            "already (take a step first)"
        )
    return torch.empty(shape, dtype=dtype, device="cpu" if not shape else parameter.device)


def by_name(model: nn.Module) -> Callable[[str], nn.Parameter]:
    """Looks parameters up by the names that checkpoints use."""
    table = {name: parameter for parameter, name in parameter_names(model).items()}
    return table.__getitem__
