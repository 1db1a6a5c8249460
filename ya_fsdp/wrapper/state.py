"""The wrapper's state dicts: whole ones under the user's names, and one file per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..build import groups_of, state_of
from ..checkpoint.entries import model_state
from ..checkpoint.full import collect, load_full_state_dict
from ..checkpoint.peers import Peers
from ..group import ParamGroup
from .arguments import Ranks

FORMAT = "ya_fsdp.local"
NORMS = "layernorm_parameter"
MAIN = "main_parameter"


@torch.no_grad()
def full_state_dict(
    root: nn.Module, ranks: Ranks, public_name: Callable[[str], str]
) -> dict[str, Any]:
    """Whole tensors on CPU on every node's first rank, nothing on the others; collective."""
    Peers(ranks.data).arrive("state_dict")
    whole = collect(root, keep=dist.get_rank(ranks.node) == 0, cpu_offload=True)
    return {public_name(name): value for name, value in whole.items()}


def load_full(
    root: nn.Module,
    ranks: Ranks,
    public_name: Callable[[str], str],
    state_dict: Mapping[str, Any],
    strict: bool,
) -> Any:
    """Spreads a whole state dict that the first data-parallel rank has; collective."""
    own = {public_name(name): name for name in model_state(root).order}
    renamed = {own.get(name, name): value for name, value in state_dict.items()}
    return load_full_state_dict(root, renamed, strict=strict, process_group=ranks.data)


# ---- one file per rank ---------------------------------------------------------------------------


def sections(root: nn.Module) -> dict[str, list[ParamGroup]]:
    """Groups by the name of the flat tensor that they are saved in."""
    root_state = state_of(root)
    assert root_state is not None
    norms = set(root_state.unit.groups)
    found: dict[str, list[ParamGroup]] = {}
    wide = next((g.dtypes.master for g in groups_of(root)), torch.float32)
    for group in groups_of(root):
        name = NORMS if group in norms else MAIN
        if group.dtypes.master != wide:
            name = f"{name}.{str(group.dtypes.master).removeprefix('torch.')}"
        found.setdefault(name, []).append(group)
    return found


def describe(root: nn.Module, ranks: Ranks, public_name: Callable[[str], str]) -> dict[str, Any]:
    """What a rank's flat tensors consist of: plain numbers and names, alike on every rank."""
    names = {id(param): name for name, param in root.named_parameters()}
    return {
        "format": FORMAT,
        "version": 1,
        "world_size": dist.get_world_size(ranks.data),
        "sections": {
            name: [
                {
                    "fqns": [public_name(names[id(p.sharded)]) for p in group.params],
                    "shapes": [list(p.shape) for p in group.params],
                    "offsets": [span.offset for span in group.layout.spans],
                    "shard_numel": group.layout.shard_numel,
                }
                for group in groups
            ]
            for name, groups in sections(root).items()
        },
    }


def local_state_dict(
    root: nn.Module, ranks: Ranks, public_name: Callable[[str], str]
) -> dict[str, Any]:
    """This rank's shards as a few flat tensors, buffers, and what they mean; no communication."""
    result: dict[str, Any] = {
        name: torch.cat([group.master_shard.detach() for group in groups])
        for name, groups in sections(root).items()
    }
    result.update({f"module.{n}": b.detach().clone() for n, b in _persistent_buffers(root)})
    result["meta"] = {
        **describe(root, ranks, public_name),
        "rank": dist.get_rank(ranks.data),
    }
    return result


@torch.no_grad()
def load_local_state_dict(
    root: nn.Module,
    ranks: Ranks,
    public_name: Callable[[str], str],
    state_dict: Mapping[str, Any],
) -> None:
    """Copies back what :func:`local_state_dict` gave on the same rank of the same set-up.

    Raises:
        ValueError: If it comes from another rank, number of ranks, model or layout.
    """
    _check_meta(state_dict.get("meta"), describe(root, ranks, public_name), ranks)
    for name, groups in sections(root).items():
        flat: Tensor = state_dict[name]
        parts = torch.split(flat, [group.layout.shard_numel for group in groups])
        for group, part in zip(groups, parts, strict=True):
            group.master_shard.copy_(part)
    for name, buffer in _persistent_buffers(root):
        buffer.copy_(state_dict[f"module.{name}"])


def is_local(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict has the form of :func:`local_state_dict`."""
    return MAIN in state_dict or NORMS in state_dict or "meta" in state_dict


def _persistent_buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for fqn, module in root.named_modules():
        for name, buffer in module.named_buffers(fqn, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _check_meta(meta: Any, own: dict[str, Any], ranks: Ranks) -> None:
    if not isinstance(meta, Mapping) or meta.get("format") != FORMAT:
        raise ValueError(
            "this local state dict was not written by ya_fsdp.YaFSDP.local_state_dict(); one of "
            "the original YaFSDP is converted by `ya-fsdp convert FOLDER model.pt`"
        )
    rank = dist.get_rank(ranks.data)
    if meta["rank"] != rank:
        raise ValueError(f"this is the state dict of rank {meta['rank']}, loaded on rank {rank}")
    for key in ("version", "world_size", "sections"):
        if meta[key] != own[key]:
            shown = "" if key == "sections" else f" ({meta[key]} saved, {own[key]} now)"
            raise ValueError(
                f"the local state dict does not fit: '{key}' differs{shown}. Local state dicts fit "
                "one model on one number of ranks; state_dict() and ya_fsdp.checkpoint fit any."
            )
