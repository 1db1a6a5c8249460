"""What a model's state dict consists of, under the plain model's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..checks import check_type
from ..ragged import RaggedShardDTensor
from .peers import CheckpointError

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile put into names."""

EXTRA = "_extra_state"


def plain_name(name: str) -> str:
    """The name that the plain model has for ``name``."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class Entry:
    """One tensor of a model's state dict.

    Attributes:
        names: Every name it has, several for tied weights, in the order of the state dict.
        tensor: A view of the model's own memory; this rank's piece of it for a sharded one.
    """

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape)


class LoadResult(NamedTuple):
    """Names that a checkpoint and a model do not share; both are empty after a strict load."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ModelState(NamedTuple):
    """A model's state dict, tied tensors once.

    Attributes:
        entries: Its tensors in the order of the state dict.
        others: What is not a tensor, by name.
        order: All names.
    """

    entries: list[Entry]
    others: dict[str, Any]
    order: list[str]


def model_state(model: nn.Module) -> ModelState:
    """Reads ``model.state_dict()``; no communication."""
    check_type("model", model, nn.Module)
    found: dict[Any, tuple[list[str], Tensor]] = {}
    others: dict[str, Any] = {}
    order: list[str] = []
    for name, value in model.state_dict().items():
        name = plain_name(name)
        order.append(name)
        if not isinstance(value, Tensor):
            others[name] = value
            continue
        names, _ = found.setdefault(_identity(value), ([], value))
        names.append(name)
    entries = [Entry(tuple(names), tensor) for names, tensor in found.values()]
    return ModelState(entries, others, order)


def unwrapped(model: nn.Module) -> nn.Module:
    """The sharded model inside of a ``YaFSDP``, whose own state dict is whole and on few ranks."""
    inner = getattr(model, "module", None)
    is_wrapper = hasattr(model, "local_state_dict") and isinstance(inner, nn.Module)
    return cast(nn.Module, inner) if is_wrapper else model


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Every parameter's first name, in the order of ``named_parameters``."""
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}


def _identity(tensor: Tensor) -> Any:
    """Equal for two values of a state dict that are the same memory."""
    local = getattr(tensor, "_local_tensor", tensor)
    if isinstance(tensor, (RaggedShardDTensor, DTensor)) and local.numel() == 0:
        return id(local)
    if local.numel() == 0 or local.is_meta:
        return id(tensor)
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride()


def check_names(
    own: Iterable[Sequence[str]], others: Iterable[str], given: Iterable[str]
) -> LoadResult:
    """Compares the names of a model with those of a checkpoint.

    Args:
        own: Names of each tensor; a tied one needs one of its names only.
        others: Names of what is not a tensor.
        given: Names in the checkpoint.
    """
    own, given, there = list(own), list(given), set(given)
    missing = [n for names in own if not there.intersection(names) for n in names]
    missing += [name for name in others if name not in there]
    known = {name for names in own for name in names} | set(others)
    return LoadResult(missing, [name for name in given if name not in known])


def compare(
    model: nn.Module,
    state: ModelState,
    shapes: Mapping[str, Sequence[int] | None],
    strict: bool,
) -> LoadResult:
    """Checks that a checkpoint fits a model, before anything is written.

    Args:
        model: For the message.
        state: What the model has.
        shapes: What the checkpoint has: the shape of each tensor, ``None`` for other values.
        strict: Whether missing and unexpected names are errors.

    Raises:
        CheckpointError: If it does not fit, in the words of ``nn.Module.load_state_dict``.
    """
    check_materialised(state.entries)
    result = check_names([e.names for e in state.entries], state.others, shapes)
    wrong = _wrong_shapes(state.entries, shapes)
    if wrong or (strict and (result.missing_keys or result.unexpected_keys)):
        raise incompatible(model, *(result if strict else ([], [])), wrong)
    return result


def _wrong_shapes(
    entries: Iterable[Entry], shapes: Mapping[str, Sequence[int] | None]
) -> list[str]:
    lines = []
    for entry in entries:
        for name in entry.names:
            shape = shapes.get(name)
            if shape is not None and tuple(shape) != entry.shape:
                lines.append(
                    f"size mismatch for {name}: copying a param with shape {list(shape)} from "
                    f"checkpoint, the shape in current model is {list(entry.shape)}."
                )
    return lines


def set_extra_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Hands modules the extra state that a checkpoint has for them."""
    for name, module in model.named_modules():
        key = plain_name(f"{name}.{EXTRA}" if name else EXTRA)
        if key in values:
            module.set_extra_state(values[key])


def incompatible(
    model: nn.Module, missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]
) -> CheckpointError:
    """An error in the words of ``nn.Module.load_state_dict``."""
    lines = []
    for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            quoted = ", ".join(f'"{name}"' for name in names)
            lines.append(f"{kind} key(s) in state_dict: {quoted}.")
    name = type(model).__name__.removeprefix("FSDP")
    return CheckpointError(
        f"Error(s) in loading state_dict for {name}:\n\t" + "\n\t".join([*lines, *wrong])
    )


def check_materialised(entries: Iterable[Entry]) -> None:
    """Refuses to write into tensors without memory.

    Raises:
        CheckpointError: If an entry is on the meta device.
    """
    empty = [entry.name for entry in entries if entry.tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors are on the meta device ({', '.join(empty[:4])}, ...); "
            "call model.to_empty(device=...) before loading"
        )


@torch.no_grad()
def write_whole(target: Tensor, whole: Tensor) -> None:
    """Puts this rank's part of a whole tensor into ``target``, without communication.

    Args:
        target: A ragged tensor, a DTensor or a plain tensor.
        whole: A plain tensor of its shape, any dtype and device.
    """
    if isinstance(target, RaggedShardDTensor):
        target._local_tensor.copy_(target.piece_of(whole))
    elif isinstance(target, DTensor):
        value = whole.to(target.device, target.dtype)
        mesh, placements = target.device_mesh, target.placements
        own = distribute_tensor(value, mesh, placements, src_data_rank=None)
        target.to_local().copy_(own.to_local())
    else:
        target.copy_(whole)
