"""What every integration does to a model: choose units, recompute, shard, fill from rank 0."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from ya_fsdp import (
    YaFSDPModule,
    fully_shard,
    set_communication_sms,
    set_resident_budget,
)

from .config import YaFSDPConfig

logger = logging.getLogger("ya_fsdp.integrations")


@dataclass
class ShardedModel:
    """What is worth knowing of a model after it was sharded.

    Attributes:
        layers: Names of the modules that became units of their own, in the model's order.
        loaded_dtypes: For each parameter name, the dtype before it was given its master dtype.
        moved: From each parameter that the model had to the one that it has.
    """

    layers: list[str]
    loaded_dtypes: dict[str, torch.dtype]
    moved: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)


def shard_model(
    model: nn.Module,
    config: YaFSDPConfig,
    *,
    mesh: DeviceMesh | None = None,
    mixed_precision: Any = None,
    layer_names: Sequence[str] | None = None,
    from_rank0: bool = False,
) -> ShardedModel:
    """Shards a model in place: every layer a unit, the input embedding a unit, the rest the root.

    Args:
        model: A model whose weights are on CPU, on the mesh's device or on meta.
        config: The options.
        mesh: See :func:`ya_fsdp.fully_shard`.
        mixed_precision: The library's torch ``MixedPrecisionPolicy``, or ``None``.
        layer_names: Class names of layers, where ``config.wrap`` is ``None``.
        from_rank0: Whether rank 0's weights and buffers replace those of the other ranks.

    Returns:
        What was done.

    Raises:
        ValueError: If no module has one of the class names asked for.
        RuntimeError: If ranks have different models and ``from_rank0`` is set.
    """
    policy = config.mp_policy(mixed_precision)
    layers = find_layers(model, config, layer_names)
    loaded = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    if policy.param_dtype is not None and isinstance(config.master_dtype, torch.dtype):
        _upcast(model, config.master_dtype)
    recompute_layers([m for _, m in layers], config.num_layers_to_checkpoint)
    before = dict(model.named_parameters(remove_duplicate=False))
    keywords = {
        "mesh": mesh,
        "mp_policy": policy,
        "ignored_params": ignored_params(model, config),
        **config.keywords(),
    }
    weights = _weights(model) if from_rank0 else {}
    for module in [*(m for _, m in layers), *_lone_embedding(model, layers)]:
        if not isinstance(module, YaFSDPModule):
            fully_shard(module, reshard_after_forward=config.reshard_after_forward, **keywords)
    if not isinstance(model, YaFSDPModule):
        fully_shard(model, **keywords)
    if from_rank0:
        broadcast_weights(model, weights)
    _apply_settings(model, config)
    after = dict(model.named_parameters(remove_duplicate=False))
    done = ShardedModel([name for name, _ in layers], loaded)
    for name, parameter in before.items():
        done.moved[parameter] = after[name]
    return done


# ---- units ---------------------------------------------------------------------------------------


def find_layers(
    model: nn.Module, config: YaFSDPConfig, layer_names: Sequence[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """The modules that become units of their own, inner ones first.

    Raises:
        ValueError: If no module has one of the class names asked for.
    """
    wrap = config.wrap
    asked = wrap if wrap is not None and not callable(wrap) else layer_names
    if callable(wrap):
        found = [(n, m) for n, m in model.named_modules() if m is not model and wrap(n, m)]
    elif asked:
        found = _of_classes(model, asked)
        missing = sorted(set(asked) - {_class_name(m) for _, m in found})
        if missing:
            raise ValueError(f"the model has no module of class {', '.join(missing)} to wrap")
    elif getattr(model, "_no_split_modules", None):
        found = _of_classes(model, list(model._no_split_modules))  # type: ignore[arg-type]
    else:
        found = _entries_of_lists(model)
        if not found:
            logger.warning(
                "%s has no _no_split_modules and no nn.ModuleList: it is one unit, gathered as a "
                "whole; name the classes of its layers in YaFSDPConfig(wrap=...)",
                type(model).__name__,
            )
    depth_first = sorted(found, key=lambda item: -item[0].count("."))
    inner_first = [item for item in depth_first if _can_be_unit(model, *item)]
    order = {name: i for i, (name, _) in enumerate(found)}
    nested = {n for n, _ in inner_first for other, _ in inner_first if n.startswith(f"{other}.")}
    return sorted(inner_first, key=lambda item: (item[0] not in nested, order[item[0]]))


def ignored_params(model: nn.Module, config: YaFSDPConfig) -> set[nn.Parameter]:
    """Parameters named by ``config.ignored``, and quantized ones that lose their state if cut."""

    def is_ignored(name: str) -> bool:
        return any(name == prefix or name.startswith(f"{prefix}.") for prefix in config.ignored)

    return {
        parameter
        for name, parameter in model.named_parameters()
        if is_ignored(name) or type(parameter).__name__ in ("Params4bit", "Int8Params")
    }


def _class_name(module: nn.Module) -> str:
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, YaFSDPModule) else name


def _of_classes(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    wanted = set(names)
    return [(n, m) for n, m in model.named_modules() if n and _class_name(m) in wanted]


def _entries_of_lists(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Entries of the outermost module lists."""
    found: list[tuple[str, nn.Module]] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(inside)):
            inside.append(f"{name}.")
            found += [(f"{name}.{key}", child) for key, child in module.named_children()]
    return found


def _can_be_unit(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a module has a forward and parameters that nothing outside it shares."""
    own = {id(p) for p in module.parameters()}
    if not own or type(module).forward is nn.Module.forward:
        return False
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not other.startswith(f"{name}."):
            logger.info("%s shares %s and is left to the root unit", name, other)
            return False
    return True


def _lone_embedding(model: nn.Module, layers: list[tuple[str, nn.Module]]) -> list[nn.Module]:
    """The input embedding, where it is tied to nothing and in no unit yet."""
    get = getattr(model, "get_input_embeddings", None)
    if not callable(get):
        return []
    try:
        embedding = get()
    except NotImplementedError:
        return []
    if type(embedding) is not nn.Embedding:
        return []
    name = next((n for n, m in model.named_modules() if m is embedding), "")
    if not name or any(name.startswith(f"{layer}.") or name == layer for layer, _ in layers):
        return []
    return [embedding] if _can_be_unit(model, name, embedding) else []


def _upcast(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _apply_settings(model: nn.Module, config: YaFSDPConfig) -> None:
    assert isinstance(model, YaFSDPModule)
    if config.num_gather_buffers is not None:
        model.set_num_gather_buffers(config.num_gather_buffers)
    if config.num_gradient_buffers is not None:
        model.set_num_gradient_buffers(config.num_gradient_buffers)
    if config.resident_budget is not None:
        set_resident_budget(model, config.resident_budget)
    if config.communication_sms is not None:
        set_communication_sms(model, config.communication_sms)


# ---- recomputation -------------------------------------------------------------------------------


def recompute_layers(layers: Sequence[nn.Module], count: int) -> None:
    """Makes the first ``count`` layers recompute their activations in backward; -1 is all.

    The layer's ``forward`` is replaced, so names in state dicts stay, and the recomputation runs
    inside the unit's backward, where its parameters are gathered anyway.
    """
    for layer in layers if count < 0 else layers[:count]:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A key-value cache would be appended to a second time by the recomputation.
        for name in ("past_key_values", "past_key_value", "layer_past"):
            if kwargs.get(name) is not None:
                kwargs[name] = None
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)

    return wrapped


# ---- weights of rank 0 ---------------------------------------------------------------------------


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Rank 0's whole tensors by name, without copies; empty elsewhere."""
    if dist.get_rank() != 0:
        return {}
    tensors: dict[str, torch.Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    tensors.update(model.named_buffers())
    meta = sorted(name for name, tensor in tensors.items() if tensor.is_meta)
    if meta:
        raise RuntimeError(f"rank 0 has no weights to send: {meta[0]} is on meta")
    return tensors


@torch.no_grad()
def broadcast_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Fills a sharded model from rank 0, one broadcast of a unit's tensors per dtype.

    No rank but 0 holds more than a unit's whole tensors at a time.

    Args:
        model: The model, sharded, on any device; on meta it is allocated first.
        weights: Whole tensors by name, on rank 0; they are dropped as they are sent.

    Raises:
        RuntimeError: If ranks have different names, shapes or dtypes.
    """
    _check_same_model(model)
    device = _compute_device(model)
    if any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        model.to_empty(device=device)
    for unit in _tensors_by_unit(model):
        for dtype in sorted({t.dtype for t in unit.values()}, key=str):
            part = {n: t for n, t in unit.items() if t.dtype == dtype}
            _broadcast_part(part, weights, device)


def _broadcast_part(
    part: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], device: torch.device
) -> None:
    dtype = next(iter(part.values())).dtype
    flat = torch.empty(sum(t.numel() for t in part.values()), dtype=dtype, device=device)
    pieces = torch.split(flat, [t.numel() for t in part.values()])
    if dist.get_rank() == 0:
        for name, piece in zip(part, pieces, strict=True):
            piece.copy_(weights.pop(name).reshape(-1))
    dist.broadcast(flat, src=0)
    for tensor, piece in zip(part.values(), pieces, strict=True):
        tensor.detach().copy_(piece.view(tensor.shape))


def _tensors_by_unit(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Parameters and buffers of every unit, each tensor once."""
    seen: set[int] = set()
    tops = [item for item in model.named_modules() if isinstance(item[1], YaFSDPModule)]
    for prefix, module in sorted(tops, key=lambda item: -item[0].count(".") - bool(item[0])):
        unit: dict[str, torch.Tensor] = {}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                unit[f"{prefix}.{name}" if prefix else name] = tensor
        if unit:
            yield unit


def _compute_device(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.device_type != "cpu":
            module = torch.get_device_module(mesh.device_type)
            return torch.device(mesh.device_type, module.current_device())
    return torch.device("cpu")


def _check_same_model(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            differ = sorted(set(other) ^ set(everyone[0]))
            raise RuntimeError(
                f"ranks 0 and {rank} have different models, so rank 0 can not fill the other; "
                f"first difference: {differ[0] if differ else 'their order'}"
            )


# ---- optimizers ----------------------------------------------------------------------------------


def detach_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """Takes the parameters out of optimizers, so that they hold no whole weights meanwhile.

    Returns:
        What :func:`attach_optimizers` needs to put the sharded ones back.

    Raises:
        ValueError: If an optimizer has state already.
    """
    taken = []
    for optimizer in optimizers:
        if any(optimizer.state.values()):
            raise ValueError(
                "the optimizer has stepped before its model was sharded, and its state would be "
                "lost; prepare model and optimizer before the first step, or load the state after"
            )
        taken.append((optimizer, [list(group["params"]) for group in optimizer.param_groups]))
        for group in optimizer.param_groups:
            group["params"] = []
    return taken


def attach_optimizers(
    taken: list[Any], moved: WeakIdKeyDictionary, models: Iterable[nn.Module]
) -> None:
    """Points optimizers at sharded parameters; groups, order and hyper-parameters stay.

    Raises:
        ValueError: If an optimizer has a parameter that the model does not have.
    """
    current = {id(p) for model in models for p in model.parameters()}
    for optimizer, groups in taken:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [_moved_to(p, moved, current) for p in params]


def _moved_to(parameter: Any, moved: WeakIdKeyDictionary, current: set[int]) -> Any:
    if id(parameter) in current:
        return parameter
    if parameter in moved:
        return moved[parameter]
    raise ValueError(
        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the sharded model "
        "does not have; build the optimizer from model.parameters() of the model that is prepared"
    )
