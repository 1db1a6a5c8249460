"""The state of a run as torch.distributed.checkpoint writes it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..ragged import RaggedShardDTensor
from .entries import model_state, unwrapped
from .optimizer_state import get_named
from .peers import CheckpointError, Peers

EXTRA_FILE = "extra.pt"


@dataclass
class State:
    """What one save writes.

    Attributes:
        tensors: ``{"model": {name: value}, "optimizer": {...}}``, values being the model's own.
        side: ``extra`` and the optimizer's parameter groups, serialised.
        model_class: Class of the model, without our prefix.
        optimizer: Class of the optimizer, or ``None``.
    """

    tensors: dict[str, Any]
    side: bytes
    model_class: str
    optimizer: str | None


def collect(model: nn.Module, optimizer: Optimizer | None, extra: Any) -> State:
    """Refers to all that is to be saved; only ``extra`` is copied.

    Raises:
        CheckpointError: If something is on the meta device or can not be saved.
    """
    model = unwrapped(model)
    state = model_state(model)
    values: dict[str, Any] = dict(state.others)
    for entry in state.entries:
        if entry.tensor.is_meta:
            raise CheckpointError(f"'{entry.name}' is on the meta device and has no values")
        values.update(dict.fromkeys(entry.names, entry.tensor))
    tensors: dict[str, Any] = {"model": {name: values[name] for name in state.order}}
    groups = None
    if optimizer is not None:
        tensors["optimizer"] = get_named(model, optimizer)
        groups = tensors["optimizer"]["param_groups"]
    return State(
        tensors,
        _serialise({"extra": extra, "param_groups": groups}),
        type(model).__name__.removeprefix("FSDP"),
        type(optimizer).__name__ if optimizer is not None else None,
    )


def _serialise(side: dict[str, Any]) -> bytes:
    """Bytes that are known to be readable: a save that can not be loaded is no save."""
    buffer = io.BytesIO()
    try:
        torch.save(side, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "extra and the optimizer's options have to be numbers, strings, tensors and "
            f"containers of them: {str(error).splitlines()[0]}"
        ) from error
    return buffer.getvalue()


def copy_to_host(state: State) -> State:
    """Copies every tensor, so that training may change the originals."""
    return State(_copied(state.tensors), state.side, state.model_class, state.optimizer)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, RaggedShardDTensor):
        return value.like(value._local_tensor.to("cpu", copy=True))
    if isinstance(value, DTensor):
        copy = value.detach().to("cpu")
        return copy.clone() if value.device.type == "cpu" else copy
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value


def write(partial: Path, state: State, peers: Peers) -> None:
    """Writes every rank's pieces, and on rank 0 what all ranks share."""
    tensors = state.tensors
    if peers.leads:
        (partial / EXTRA_FILE).write_bytes(state.side)
    else:
        tensors = _spread_only(tensors)
    writer = FileSystemWriter(partial, sync_files=True)
    with alone(peers):
        dcp_save(
            tensors,
            storage_writer=writer,
            process_group=peers.group,
            no_dist=peers.size == 1,
        )


def _spread_only(value: Any) -> Any:
    """The state without numbers and options, which every rank has and the first one writes.

    Step counters are as many as parameters: the plan of all ranks is made from a third less.
    """
    if isinstance(value, dict):
        parts = {key: _spread_only(item) for key, item in value.items()}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(value, (RaggedShardDTensor, DTensor)):
        return value
    return value if isinstance(value, Tensor) and value.numel() > 1 else None


@contextmanager
def alone(peers: Peers) -> Iterator[None]:
    """Silences torch's warning that a single process saves or loads by itself."""
    with warnings.catch_warnings():
        if peers.size == 1:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
