"""The public function: checks its arguments, shards a module in place and returns it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy

from . import _torch
from .build import (
    GranularityOption,
    ModuleState,
    collect_params,
    make_groups,
    managed_modules,
    move_buffers,
    state_of,
)
from .checks import check_flag
from .collectives import Collectives, check_collectives, check_use
from .fused_linear import fuse_linears
from .leaving import leave_at_exit
from .mesh import MeshInfo
from .module import YaFSDPModule, sharded_class
from .pipeline import offer_to_pipelines
from .precision import MixedPrecisionPolicy
from .secondary import check_reshard, resolve_reshard
from .strays import note_known
from .unit import Unit, use_collectives, watch_loaded_state

M = TypeVar("M", bound=nn.Module)
DEFAULT_POLICY = MixedPrecisionPolicy()


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    mp_policy: TorchMixedPrecisionPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    shard_alignment: int | None = ...,
    granularity: GranularityOption = ...,
    fused_weight_gradients: bool = ...,
    collectives: Collectives | None = ...,
    sync_replicas: bool = ...,
    shard_optimizer_over_replicas: bool = ...,
) -> M: ...
@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    mp_policy: TorchMixedPrecisionPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    shard_alignment: int | None = ...,
    granularity: GranularityOption = ...,
    fused_weight_gradients: bool = ...,
    collectives: Collectives | None = ...,
    sync_replicas: bool = ...,
    shard_optimizer_over_replicas: bool = ...,
) -> list[nn.Module]: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: TorchMixedPrecisionPolicy = DEFAULT_POLICY,
    ignored_params: Iterable[nn.Parameter] | None = None,
    shard_alignment: int | None = None,
    granularity: GranularityOption = "auto",
    fused_weight_gradients: bool = False,
    collectives: Collectives | None = None,
    sync_replicas: bool = True,
    shard_optimizer_over_replicas: bool = False,
) -> Any:
    """Shards a module's parameters, gradients and optimizer state over ranks, in place.

    Parameters of the module (except those of submodules sharded by earlier calls) form one unit:
    they are cut into one flat shard per rank, gathered together before the module's forward and
    backward, and their gradients are averaged together. Call it on every block, then on the whole
    model::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    Names in ``named_parameters()`` and ``state_dict()`` stay those of the plain model; parameters
    become :class:`RaggedShardDTensor`. Build the optimizer afterwards.

    Args:
        module: A module, or a list of modules that form one unit together.
        mesh: 1-D mesh over whose ranks to shard, or a 2-D mesh (replicate, shard). ``None``: all
            ranks, on the machine's accelerator or on CPU where there is none; the default process
            group is then made from torchrun's environment if nobody has made one.
        reshard_after_forward: Whether gathered parameters are freed between forward and backward:
            ``True`` (ZeRO-3), ``False`` (ZeRO-2), ``None`` (``True``; what is still in its buffer
            when backward needs it is not gathered again). An int (hpZ): freed, but groups of so
            many neighbouring ranks of the shard axis (a node's) keep a second shard in the gather
            dtype, from which backward gathers. It divides the axis; 1 is ``False``, all ``True``.
        mp_policy: Dtypes of compute, gather, reduction and outputs; torch's class or ours.
        ignored_params: Parameters to leave alone: not sharded, not moved, not reduced.
        shard_alignment: Every rank's shard is a multiple of this many elements, at least of 16
            bytes in every dtype that is sent.
        granularity: What no shard boundary may cut: ``"row"`` (a dim-0 row), ``"element"``
            (nothing), a number of elements, ``"auto"`` (rows where that pads at most 1 %), or a
            function of (FQN, parameter) that returns one of these.
        fused_weight_gradients: Let the backward of every plain ``nn.Linear`` write its weight's
            gradient into the gradient buffer in the reduce dtype: no gradient tensor, no copy, no
            16-bit rounding before a 32-bit sum. Costs host time per layer (a Python autograd
            function) and holds a gradient buffer during a unit's whole backward.
        collectives: What this call's parameters are gathered and reduced with; ``None``: the
            process groups of the mesh. See :class:`ya_fsdp.collectives.Collectives`.
        sync_replicas: On a 2-D mesh, give every replica the values of the first one, here (of
            parameters on meta: before they are first gathered). One broadcast of the shard;
            replicas that begin with different values would train apart in silence.
        shard_optimizer_over_replicas: On a 2-D mesh, cut weights, gradients and optimizer state
            over both axes (HFSDP). Every forward of the root collects a shard of the last axis from
            the replicas, which stays in memory in the gather dtype; units are gathered from it
            over the last axis alone, in forward and backward. There are no replicas then.

    Returns:
        The same module (or list), now also a :class:`YaFSDPModule`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a module or parameter can not be sharded; the message names it.
        RuntimeError: If there is no process group and no torchrun environment to make one from, or
            ``collectives`` can not work on the mesh.
    """
    modules = _check_modules(module)
    check_reshard(reshard_after_forward)
    policy = _check_policy(mp_policy)
    _check_alignment(shard_alignment)
    check_collectives(collectives)
    check_flag("sync_replicas", sync_replicas)
    check_flag("shard_optimizer_over_replicas", shard_optimizer_over_replicas)
    mesh = _check_mesh(mesh)
    ignored = _check_ignored(ignored_params)
    device = _device_of(mesh)
    managed = managed_modules(modules)
    _check_managed(managed, ignored)
    params = collect_params(modules, managed, ignored, mesh)
    _check_devices(params, device)
    mesh_info = _mesh_info(mesh, shard_optimizer_over_replicas, policy, params)
    reshard = resolve_reshard(reshard_after_forward, mesh_info, type(modules[0]).__name__)
    check_use(collectives, device, mesh_info.shard_group)
    groups = make_groups(params, policy, mesh_info, device, shard_alignment, granularity)
    move_buffers(managed, device)
    watch_loaded_state()
    unit = Unit("", groups, policy)
    unit.fqn = type(modules[0]).__name__
    use_collectives([unit], collectives)
    unit.reshard_after(*reshard)
    if sync_replicas:
        unit.sync_replicas()
    if fused_weight_gradients:
        unit.fused = fuse_linears(managed, groups) > 0
    note_known(managed)
    for each in modules:
        _install(each, unit, is_list=len(modules) > 1)
    _note_above(modules)
    return module


def _install(module: nn.Module, unit: Unit, *, is_list: bool) -> None:
    """Gives a module its state, its class and the hooks that keep state dicts sharded."""
    module.__dict__["_ya_fsdp_state"] = ModuleState(unit, is_list)
    module.__class__ = sharded_class(type(module))
    offer_to_pipelines(module)
    _torch.on_state_dict(module, _reshard_first, _readopt_after)
    weakref.finalize(module, _forget, unit)


def _reshard_first(module: nn.Module, *_: Any) -> None:
    state = state_of(module)
    if state is not None and state.schedule is not None:
        state.schedule.reshard(state.unit)
        state.unit.to_sharded()


def _readopt_after(module: nn.Module, *_: Any) -> None:
    state = state_of(module)
    if state is not None:
        for group in state.unit.groups:
            group.readopt()


def _forget(unit: Unit) -> None:
    if unit.on_forget is not None:
        unit.on_forget(unit)


def _note_above(modules: list[nn.Module]) -> None:
    """Tells managed submodules that a managed module contains them."""
    for top in modules:
        for child in top.modules():
            state = state_of(child)
            if child is not top and state is not None:
                above = state.above() if state.above is not None else None
                if above is None or any(m is above for m in top.modules()):
                    state.above = weakref.ref(top)
                if state.schedule is not None and child not in modules:
                    _rehome(child)


def _rehome(child: nn.Module) -> None:
    state = state_of(child)
    assert state is not None
    if state.schedule is not None:
        state.schedule.remove_unit(state.unit)
        state.schedule = None


# ---- argument checks ---------------------------------------------------------------------------


def _check_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard takes an nn.Module or a list of them, got {type(each)}")
        _refuse_scripted(each)
        if isinstance(each, YaFSDPModule):
            raise ValueError(
                f"{type(each).__name__} is sharded already; fully_shard manages a module once"
            )
        if type(each).forward is nn.Module.forward:
            raise ValueError(
                f"{type(each).__name__} has no forward, so nothing would gather its parameters; "
                "call fully_shard on the modules inside it, or on the module that calls them"
            )
    if len({id(m) for m in modules}) < len(modules):
        raise ValueError("fully_shard got the same module twice in one list")
    return cast("list[nn.Module]", modules)


def _refuse_scripted(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{type(module).__name__} is scripted, so nothing can be put into it; shard the plain "
            "module and use torch.compile"
        )


def _check_managed(modules: list[nn.Module], ignored: set[nn.Parameter]) -> None:
    for each in modules:
        name = type(each).__name__
        if isinstance(each, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{name} reduces the gradients of parameters that would no longer be there; shard "
                "the module inside it, with a 2-D mesh for replicas"
            )
        _refuse_scripted(each)
        if not isinstance(each, (nn.Embedding, nn.EmbeddingBag)):
            continue
        trained = each.weight.requires_grad and each.weight not in ignored
        if each.max_norm is not None and trained:
            raise ValueError(
                f"{name}({each.num_embeddings}, {each.embedding_dim}, max_norm={each.max_norm}) "
                "rewrites its weight in forward, which never reaches the shards; make it without "
                "max_norm and scale rows after optimizer.step(), or pass its weight in "
                "ignored_params"
            )
        if each.sparse and trained:
            raise ValueError(
                f"{name}({each.num_embeddings}, {each.embedding_dim}, sparse=True) has sparse "
                "gradients, which can not be reduced; make it with sparse=False or pass its weight "
                "in ignored_params"
            )


def _check_policy(policy: Any) -> MixedPrecisionPolicy:
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, TorchMixedPrecisionPolicy):
        return MixedPrecisionPolicy.from_torch(policy)
    raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {policy!r}")


def _check_alignment(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"shard_alignment must be a positive number of elements, got {value!r}")


def _check_ignored(params: Any) -> set[nn.Parameter]:
    if params is None:
        return set()
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"ignored_params takes several parameters, got {type(params).__name__}")
    ignored = set(params)
    for each in ignored:
        if not isinstance(each, nn.Parameter):
            raise TypeError(f"ignored_params takes parameters themselves, got {each!r}")
    return ignored


def _check_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        return _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh)}")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh must be 1-D (shard) or 2-D (replicate, shard), got {mesh.ndim}-D; pass one or "
            'two of its axes, such as mesh["dp_replicate", "dp_shard"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of {mesh}; call fully_shard only on ranks of the "
            "mesh, or pass one that holds this rank"
        )
    return mesh


def _mesh_info(
    mesh: DeviceMesh, over_replicas: bool, policy: MixedPrecisionPolicy, params: list[Any]
) -> MeshInfo:
    if not over_replicas:
        return MeshInfo.of(mesh)
    if mesh.ndim != 2:
        raise ValueError(
            "shard_optimizer_over_replicas=True needs a 2-D mesh (replicate, shard), got "
            f"{mesh.ndim}-D; on a 1-D mesh optimizer state is cut over all ranks in any case"
        )
    if policy.gather_dtype is not None:
        raise ValueError(
            f"gather_dtype={policy.gather_dtype} rounds once per gather, and with "
            "shard_optimizer_over_replicas=True there are two in a row; leave one of them out"
        )
    for param in params:
        if param.tensor_parallel is not None:
            raise ValueError(
                f"parameter '{param.fqn}' is a DTensor on other mesh axes, and with "
                "shard_optimizer_over_replicas=True shards lie on a 1-D mesh of their own; leave "
                "that out (HSDP), or pass a 1-D mesh"
            )
    return MeshInfo.over_replicas(mesh)


def _default_mesh() -> DeviceMesh:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise RuntimeError(
                "fully_shard needs a process group: start the program with torchrun "
                "(torchrun --nproc_per_node 2 script.py), or call "
                "torch.distributed.init_process_group() first, or pass mesh="
            )
        if device_type != "cpu":
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
        if device_type == "cpu":
            leave_at_exit()
    elif device_type != "cpu" and dist.get_backend() == "gloo":
        device_type = "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def _check_devices(params: list[Any], device: torch.device) -> None:
    for param in params:
        where = param.sharded.device
        if where.type not in (device.type, "cpu", "meta"):
            raise ValueError(
                f"parameter '{param.fqn}' is on {where}, but the mesh is on {device.type}; move "
                "the module to that device, to CPU or to meta, or pass a mesh of its device"
            )
