"""Reading one checkpoint of a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from .dcp_state import EXTRA_FILE, alone
from .entries import ModelState, compare, model_state, set_extra_state, unwrapped
from .manifest import Manifest, verify_files
from .optimizer_state import by_name, compare_groups, set_named, template
from .peers import CheckpointError, Peers
from .trusted import TrustedPlanner, TrustedReader


class Loaded(NamedTuple):
    """What a checkpoint says beside the state of model and optimizer."""

    step: int
    extra: Any
    path: Path


@torch.no_grad()
def load_step(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    strict: bool,
    verify: bool,
    peers: Peers,
) -> Loaded:
    """Checks one checkpoint and reads it into model and optimizer; see ``load``."""
    what = f"load({path})"
    model = unwrapped(model)
    with peers.together(what):
        manifest = Manifest.read(path)
        names = list(manifest.files)[peers.rank :: peers.size]
        verify_files(path, manifest, names, read=verify)
    with peers.together(what):
        side = torch.load(path / EXTRA_FILE, weights_only=True, map_location="cpu")
        reader = TrustedReader(path)
        metadata = reader.read_metadata()
        own = model_state(model)
        targets: dict[str, Any] = {"model": _model_targets(model, own, metadata, strict)}
        if optimizer is not None:
            _compare_optimizers(model, optimizer, manifest, side["param_groups"], strict)
            # The keys are those of torch's get_optimizer_state_dict.
            targets["optimizer"] = {"state": _optimizer_targets(model, optimizer, metadata)}
    with (
        peers.together(f"{what} failed while reading, the model may be partly loaded"),
        alone(peers),
    ):
        dcp_load(
            targets,
            storage_reader=reader,
            planner=TrustedPlanner(),
            process_group=peers.group,
            no_dist=peers.size == 1,
        )
        set_extra_state(model, {n: v for n, v in targets["model"].items() if n in own.others})
        if optimizer is not None:
            named = {"state": targets["optimizer"]["state"], "param_groups": side["param_groups"]}
            set_named(model, optimizer, named)
    return Loaded(manifest.step, side["extra"], path)


def _paths(metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """Where each entry of a checkpoint lay in the nested state."""
    return metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}


def _empty(metadata: Metadata, name: str) -> Tensor | None:
    """Something to read an entry into: a tensor without values, or ``None`` for other objects."""
    entry = metadata.state_dict_metadata[name]
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def _nested(leaves: dict[tuple[Any, ...], Any]) -> Any:
    """Containers with the leaves at their paths; what is numbered becomes a list."""
    if set(leaves) == {()}:
        return leaves[()]
    parts: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, leaf in leaves.items():
        parts.setdefault(path[0], {})[path[1:]] = leaf
    if all(isinstance(key, int) for key in parts):
        return [_nested(parts[index]) for index in sorted(parts)]
    return {key: _nested(part) for key, part in parts.items()}


def _model_targets(
    model: nn.Module, own: ModelState, metadata: Metadata, strict: bool
) -> dict[str, Any]:
    """The model's own tensors, to be read into, under names that the checkpoint has."""
    leaves: dict[str, dict[tuple[Any, ...], str]] = {}
    for flat, path in _paths(metadata).items():
        if path[0] == "model":
            leaves.setdefault(path[1], {})[path[2:]] = flat
    saved: dict[str, tuple[int, ...] | None] = dict.fromkeys(leaves)
    for name, parts in leaves.items():
        record = metadata.state_dict_metadata[parts[()]] if () in parts else None
        if isinstance(record, TensorStorageMetadata):
            saved[name] = tuple(record.size)
    compare(model, own, saved, strict)
    targets: dict[str, Any] = {
        name: _nested({path: _empty(metadata, flat) for path, flat in leaves[name].items()})
        for name in own.others
        if name in saved
    }
    for entry in own.entries:
        source = next((name for name in entry.names if name in saved), None)
        if source is not None:
            targets[source] = entry.tensor
    return targets


def _compare_optimizers(
    model: nn.Module,
    optimizer: Optimizer,
    manifest: Manifest,
    groups: list[dict[str, Any]] | None,
    strict: bool,
) -> None:
    if groups is None:
        raise CheckpointError("the checkpoint was saved without an optimizer")
    kind = type(optimizer).__name__
    if strict and manifest.optimizer != kind:
        raise CheckpointError(
            f"the checkpoint has the state of {manifest.optimizer}, the optimizer is {kind}; "
            "strict=False lets classes of different names share state"
        )
    compare_groups(model, optimizer, groups, strict)


def _optimizer_targets(
    model: nn.Module, optimizer: Optimizer, metadata: Metadata
) -> dict[str, dict[str, Any]]:
    """Tensors to read the optimizer's state into, laid out as the parameters are here."""
    find = by_name(model)
    targets: dict[str, dict[str, Any]] = {}
    for flat, path in _paths(metadata).items():
        if path[:2] != ("optimizer", "state"):
            continue
        name, key, *deeper = path[2:]
        if deeper:
            raise CheckpointError(f"optimizer state '{flat}' is nested, which is not supported")
        try:
            parameter = find(name)
        except KeyError:
            continue  # Only a load that is not strict comes here with a name that is unknown.
        entry = metadata.state_dict_metadata[flat]
        value = None
        if isinstance(entry, TensorStorageMetadata):
            shape, dtype = tuple(entry.size), entry.properties.dtype
            value = template(optimizer, name, parameter, key, shape, dtype)
        targets.setdefault(name, {})[key] = value
    # The ranks' lists of names were merged; optimizers begin with their counters.
    return {n: dict(sorted(own.items(), key=_is_spread)) for n, own in targets.items()}


def _is_spread(item: tuple[str, Any]) -> bool:
    return isinstance(item[1], Tensor) and item[1].dim() > 0
