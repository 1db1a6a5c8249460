"""Flat views of a sharded model for optimizers and clipping: few tensors instead of hundreds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .build import groups_of
from .checks import check_callable, check_type
from .grad_shard import FlatPiece
from .group import ParamGroup

logger = logging.getLogger("ya_fsdp")

Key = Callable[[str, nn.Parameter], Hashable]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def flat_parameters(
    model: nn.Module,
    groups: Mapping[Hashable, dict[str, Any]] | None = None,
    key: Key | None = None,
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Plain 1-D parameters over this rank's shards, for elementwise ``torch.optim`` optimizers.

    The optimizer then updates a few large tensors in one launch instead of hundreds of small
    ones. From this call on gradients are set on the flat parameters, and the sharded parameters'
    ``.grad`` is a view of them; a parameter that a step does not use counts as one with gradient
    zero. Parameters that are not sharded are returned as they are. A second call makes new flat
    parameters; an optimizer over the old ones raises. So does one that needs norms or shapes of
    whole parameters (Adafactor, LBFGS, LAMB, Muon), in its first step.

    Args:
        model: A model given to :func:`ya_fsdp.fully_shard`.
        groups: Options by key, such as ``{"decay": {"weight_decay": 0.1}, "rest": {}}``.
        key: Maps (FQN, parameter) to a key of ``groups``. Neighbours with one key become one
            tensor.

    Returns:
        Parameters, or with ``groups`` a list of optimizer parameter groups.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If only one of ``groups`` and ``key`` is given, or a key is not in ``groups``.
    """
    check_type("model", model, nn.Module)
    if (groups is None) != (key is None):
        raise ValueError("groups and key go together: the options, and which parameter gets which")
    if groups is not None:
        check_type("groups", groups, Mapping)
        check_callable("key", key)
    names = _names(model)
    found: dict[Hashable, list[nn.Parameter]] = {n: [] for n in (groups or (None,))}
    managed: set[int] = set()
    keys_of: dict[ParamGroup, list[Hashable]] = {}  # all of them before anything is changed
    for group in groups_of(model):
        keys = [
            key(names.get(id(p.sharded), p.fqn), p.sharded) if key else None for p in group.params
        ]
        for each in keys:
            if each not in found:
                raise ValueError(f"key {each!r} is not in groups, which has {list(found)}")
        keys_of[group] = keys
    for group, keys in keys_of.items():
        managed.update(id(p.sharded) for p in group.params)
        if not any(p.sharded.requires_grad for p in group.params):
            continue
        pieces = _cut(group, keys)
        group.grads.shard.set_pieces([piece for piece, _ in pieces])
        for piece, piece_key in pieces:
            found[piece_key].append(piece.param)
    for name, param in model.named_parameters():
        if id(param) not in managed and param.requires_grad:
            found[key(name, param) if key else None].append(param)
    if groups is None:
        return found[None]
    return [{"params": found[name], **options} for name, options in groups.items()]


def _cut(group: ParamGroup, keys: Sequence[Hashable]) -> list[tuple[FlatPiece, Hashable]]:
    """Ranges of the shard whose parameters have one key; padding goes to the range before it.

    A parameter of which this rank owns nothing is a member all the same, so that every rank knows
    the state of every parameter.
    """
    rank = group.mesh_info.shard_rank
    order = sorted(range(len(keys)), key=lambda i: group.layout.spans[i].offset)
    runs: list[tuple[Hashable, list[int]]] = []
    starts: list[int] = []
    absent: list[int] = []
    for index in order:
        start, end = group.layout.local_range(rank, index)
        if start == end:
            absent.append(index)
        elif runs and runs[-1][0] == keys[index]:
            runs[-1][1].append(index)
        else:
            runs.append((keys[index], [index]))
            starts.append(start)
    ends = [*starts[1:], group.layout.shard_numel]
    if starts:
        starts[0] = 0
    else:
        ends = []
    for index in absent:
        members = next((m for k, m in runs if k == keys[index]), None)
        if members is None:
            runs.append((keys[index], [index]))
            starts.append(0)
            ends.append(0)
        else:
            members.append(index)
    pieces = []
    for (run_key, members), start, end in zip(runs, starts, ends, strict=True):
        with torch.inference_mode(False), torch.no_grad():
            param = nn.Parameter(group.master_shard[start:end])
        pieces.append((FlatPiece(start, end, param, tuple(members)), run_key))
    return pieces


# ---- state dicts ---------------------------------------------------------------------------------


def flat_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer over flat parameters, by parameter name.

    The form is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``:
    ``{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn], ...}]}`` with sharded
    tensors, so a checkpoint does not tell whether flat parameters were used.
    """
    check_type("model", model, nn.Module)
    check_type("optimizer", optimizer, torch.optim.Optimizer)
    pieces = _pieces(model)
    names = _names(model)
    state: dict[str, Any] = {}
    param_groups = []
    for options in optimizer.param_groups:
        members: list[str] = []
        for param in options["params"]:
            if id(param) not in pieces:
                name = names[id(param)]
                members.append(name)
                state[name] = dict(optimizer.state.get(param, {}))
                continue
            group, piece = pieces[id(param)]
            for index in piece.members:
                name = names.get(id(group.params[index].sharded), group.params[index].fqn)
                members.append(name)
                state[name] = {
                    k: _slice(group, piece, index, v)
                    for k, v in optimizer.state.get(param, {}).items()
                }
        rest = {k: v for k, v in options.items() if k != "params"}
        param_groups.append({"params": members, **rest})
    return {"state": state, "param_groups": param_groups}


def load_flat_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Loads what :func:`flat_optimizer_state_dict` (or the per-parameter form) gave.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If it is not the state of an optimizer.
        KeyError: If the state lacks a parameter that this rank holds.
    """
    check_type("model", model, nn.Module)
    check_type("optimizer", optimizer, torch.optim.Optimizer)
    check_type("state_dict", state_dict, Mapping)
    if absent := [key for key in ("state", "param_groups") if key not in state_dict]:
        raise ValueError(f"this is no optimizer state: it lacks {absent}, has {list(state_dict)}")
    pieces = _pieces(model)
    names = _names(model)
    saved = state_dict["state"]
    if not any(saved.values()):
        logger.warning(
            "the optimizer state that is loaded is empty, so the optimizer begins anew; "
            "torch.distributed.checkpoint.load fills only state that is there: use "
            "ya_fsdp.checkpoint.load, or read into the state of an optimizer that has stepped"
        )
    for options, old in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        options.update({k: v for k, v in old.items() if k != "params"})
        for param in options["params"]:
            if id(param) not in pieces:
                optimizer.state[param] = dict(saved[names[id(param)]])
                continue
            group, piece = pieces[id(param)]
            entries = {}
            for index in piece.members:
                name = names.get(id(group.params[index].sharded), group.params[index].fqn)
                if name not in saved:
                    raise KeyError(f"the optimizer state has no entry for parameter '{name}'")
                entries[index] = saved[name]
            optimizer.state[param] = _join(group, piece, entries)


def _pieces(model: nn.Module) -> dict[int, tuple[ParamGroup, FlatPiece]]:
    return {
        id(piece.param): (group, piece)
        for group in groups_of(model)
        for piece in group.grads.shard.pieces
    }


def _slice(group: ParamGroup, piece: FlatPiece, index: int, value: Any) -> Any:
    """One parameter's part of a flat state tensor; scalars are shared by all."""
    is_flat = isinstance(value, Tensor) and value.dim() == 1
    if not is_flat or value.numel() != piece.end - piece.start:
        return value.clone() if isinstance(value, Tensor) else value
    info, param = group.mesh_info, group.params[index]
    start, end = group.layout.local_range(info.shard_rank, index)
    local = value[start - piece.start : end - piece.start]
    shape = cast(Tensor, getattr(param.sharded, "_local_tensor")).shape  # noqa: B009
    return param.place(local.view(shape), group.layout.bounds(index), info)


def _join(group: ParamGroup, piece: FlatPiece, entries: dict[int, dict[str, Any]]) -> Any:
    """The flat state tensor of a piece from its parameters' parts."""
    first = max(entries.values(), key=len)
    joined: dict[str, Any] = {}
    for name, value in first.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            joined[name] = value.clone() if isinstance(value, Tensor) else value
            continue
        flat = torch.zeros(piece.end - piece.start, dtype=value.dtype, device=piece.param.device)
        for index, entry in entries.items():
            if name not in entry:
                continue  # a parameter that had no gradient yet: zeros
            start, end = group.layout.local_range(group.mesh_info.shard_rank, index)
            part = entry[name]
            local = getattr(part, "_local_tensor", part)
            if local.numel() != end - start:
                low, high = group.layout.owned(group.mesh_info.shard_rank, index)
                local = local.reshape(-1)[low:high]
            flat[start - piece.start : end - piece.start].copy_(local.reshape(-1))
        joined[name] = flat
    return joined
