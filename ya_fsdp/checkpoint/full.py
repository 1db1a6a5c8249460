"""Whole state dicts of a sharded model, gathered and spread one group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..build import groups_of
from ..group import ParamGroup
from ..ragged import RaggedShardDTensor
from .entries import (
    Entry,
    LoadResult,
    compare,
    model_state,
    plain_name,
    set_extra_state,
    unwrapped,
    write_whole,
)
from .peers import Peers


@torch.no_grad()
def get_full_state_dict(
    model: nn.Module,
    *,
    cpu_offload: bool = True,
    rank0_only: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Gathers the plain model's state dict; every rank has to call it.

    One group of parameters is gathered at a time: with ``cpu_offload``, the extra memory on the
    device is that of the largest group.

    Args:
        model: A model with sharded parameters, or a plain one.
        cpu_offload: Whether the tensors of the result are on CPU.
        rank0_only: Whether only rank 0 gets the result, and the others an empty dict.
        process_group: The ranks that share the model, ``None`` for all.

    Returns:
        Plain tensors of whole shapes and master dtypes, under the plain model's names. They share
        no memory with the model; tied weights are one tensor under several names.

    Raises:
        CheckpointError: If some rank does not make the call.
    """
    model = unwrapped(model)
    peers = Peers(process_group)
    peers.arrive("get_full_state_dict")
    return collect(model, keep=peers.leads or not rank0_only, cpu_offload=cpu_offload)


def collect(model: nn.Module, *, keep: bool, cpu_offload: bool) -> dict[str, Any]:
    """Gathers a group at a time and copies what comes, where it is kept; collective."""
    state = model_state(model)
    whole: dict[str, Any] = dict(state.others)
    for entry, tensor in gather_entries(plan_gathers(model, state.entries)):
        if keep:
            where = torch.device("cpu") if cpu_offload else tensor.device
            copy = tensor.to(where, copy=True).contiguous()
            whole.update(dict.fromkeys(entry.names, copy))
        del tensor  # or the group that it lies in would be alive beside the next one
    return {name: whole[name] for name in state.order} if keep else {}


@dataclass
class Gather:
    """What one collective brings together: a group's parameters, or a single tensor."""

    group: ParamGroup | None
    entries: list[tuple[Entry, int]] = field(default_factory=list)


def plan_gathers(model: nn.Module, entries: list[Entry]) -> list[Gather]:
    """Sorts entries by the group that they are gathered with; no communication."""
    homes = {
        id(getattr(param.sharded, "_local_tensor", None)): (group, index)
        for group in groups_of(model)
        for index, param in enumerate(group.params)
    }
    gathers: list[Gather] = []
    by_group: dict[int, Gather] = {}
    for entry in entries:
        # A state-dict hook may have put a converted tensor in place of the parameter.
        home = homes.get(id(getattr(entry.tensor, "_local_tensor", entry.tensor)))
        if home is None:
            gathers.append(Gather(None, [(entry, 0)]))
            continue
        group, index = home
        if id(group) not in by_group:
            by_group[id(group)] = Gather(group)
            gathers.append(by_group[id(group)])
        by_group[id(group)].entries.append((entry, index))
    return gathers


def gather_entries(gathers: list[Gather]) -> Iterator[tuple[Entry, Tensor]]:
    """Yields every entry with its whole tensor, on every rank; collective.

    Tensors may lie in the model's own memory or in one shared buffer: copy what is kept.
    """
    for gather in gathers:
        group = gather.group
        if group is None:
            for entry, _ in gather.entries:
                yield entry, whole_of(entry.tensor)
            continue
        buffer = _gather_group(group)
        for entry, index in gather.entries:
            span = group.layout.spans[index]
            param = group.params[index]
            yield (
                entry,
                param.whole(buffer[span.offset : span.offset + span.numel].view(param.shape)),
            )
        del buffer


def _gather_group(group: ParamGroup) -> Tensor:
    shard, info = group.master_shard, group.mesh_info
    buffer = shard.new_empty(group.layout.total_numel)
    if info.shard_size == 1:
        return shard
    if not shard.is_meta:
        _torch.all_gather_flat(buffer, shard, info.shard_group)
    return buffer


def whole_of(tensor: Tensor) -> Tensor:
    """The whole tensor behind a ragged tensor, a DTensor or a plain one; collective."""
    if isinstance(tensor, (RaggedShardDTensor, DTensor)):
        return tensor.full_tensor()
    return tensor.detach()


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module,
    state_dict_on_rank0: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> LoadResult:
    """Spreads a plain state dict that rank 0 has over all ranks; every rank has to call it.

    One tensor is broadcast at a time and each rank copies out of it what it owns, in the dtype of
    its parameter. Names and shapes are compared before anything is written.

    Args:
        model: A model with sharded parameters, or a plain one.
        state_dict_on_rank0: Whole tensors under the plain model's names. What other ranks pass
            (``None`` or ``{}``) is not looked at. A tied weight needs one of its names.
        strict: Whether missing and unexpected names are errors.
        process_group: The ranks that share the model, ``None`` for all.

    Returns:
        Missing and unexpected names.

    Raises:
        CheckpointError: On every rank, if names (with ``strict``) or shapes do not fit; the model
            is then unchanged.
    """
    model = unwrapped(model)
    peers = Peers(process_group)
    peers.arrive("load_full_state_dict")
    given: dict[str, Any] = {}
    with peers.together("load_full_state_dict"):
        if peers.leads:
            given = _checked(state_dict_on_rank0)
    tensors, objects = peers.broadcast(describe_tensors(given))
    state = model_state(model)
    with peers.together("load_full_state_dict"):
        shapes = {name: shape for name, (shape, _) in tensors.items()} | dict.fromkeys(objects)
        result = compare(model, state, shapes, strict)
    for entry in state.entries:
        name = next((name for name in entry.names if name in tensors), None)
        if name is not None:
            spread(peers, entry.tensor, given.get(name), *tensors[name])
    set_extra_state(model, objects)
    return result


def spread(
    peers: Peers, target: Tensor, whole: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Broadcasts one whole tensor from rank 0 and writes this rank's part of it."""
    device = target.device
    if peers.leads:
        assert whole is not None
        whole = whole.detach().to(device).contiguous()
    else:
        whole = torch.empty(shape, dtype=dtype, device=device)
    peers.broadcast_tensor(whole)
    write_whole(target, whole)


def describe_tensors(
    given: Mapping[str, Any],
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, Any]]:
    """Shape and dtype of what is a tensor, and everything else as it is."""
    tensors = {n: (tuple(v.shape), v.dtype) for n, v in given.items() if isinstance(v, Tensor)}
    return tensors, {n: v for n, v in given.items() if not isinstance(v, Tensor)}


def _checked(state_dict: Any) -> dict[str, Any]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"rank 0 has to pass a state dict, got {type(state_dict).__name__}")
    sharded = [n for n, v in state_dict.items() if isinstance(v, (RaggedShardDTensor, DTensor))]
    if sharded:
        raise TypeError(
            f"a full state dict holds plain tensors, but '{sharded[0]}' is sharded; "
            "model.load_state_dict takes a sharded state dict"
        )
    return {plain_name(name): value for name, value in state_dict.items()}
