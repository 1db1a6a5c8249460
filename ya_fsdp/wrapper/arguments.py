"""The wrapper's arguments: checked, and turned into a device, process groups and meshes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..precision import MixedPrecisionPolicy

NormClasses = type[nn.Module] | tuple[type[nn.Module], ...]
Colours = tuple[int, int] | Callable[[int], tuple[int, int]]


@dataclass(frozen=True)
class Arguments:
    """What the user passed to ``YaFSDP`` besides the module; checked when made."""

    zero_stage: int
    param_dtype: torch.dtype
    modules_to_wrap_with_names: Sequence[tuple[nn.Module, str]]
    layer_norm_module_cls: NormClasses
    gradient_accumulation_steps: int
    data_parallel_process_group: dist.ProcessGroup | None
    intra_node_data_parallel_process_group: dist.ProcessGroup | None
    model_parallel_process_group: dist.ProcessGroup | None
    all_reduce_grads_across_model_parallel_group: bool
    bit16_reduce_scatter: bool
    bit32_acc_for_bit16_reduce_scatter: bool
    hpz_first_layers_num: int
    rogue_layer_norm_modules_with_names: Mapping[nn.Module, str]
    sync_module_states: bool
    param_init_fn: Callable[[nn.Module], Any] | None
    device_id: int | torch.device | None
    is_trainable: bool
    use_yccl: bool
    yccl_intra_inter_expr: Colours | None
    yccl_all_gather_stages: int | None
    use_yccl_padding: bool
    profile: bool

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_modules(self)
        _check_hpz(self)
        _check_yccl(self)
        if self.all_reduce_grads_across_model_parallel_group and (
            self.model_parallel_process_group is None
        ):
            raise ValueError(
                "all_reduce_grads_across_model_parallel_group=True needs a "
                "model_parallel_process_group to sum over"
            )

    @property
    def reshard_after_forward(self) -> bool:
        """Whether units are freed between forward and backward."""
        return self.zero_stage == 3

    @property
    def wide_dtype(self) -> torch.dtype:
        """Dtype of master weights, and of gradients on the wire: fp32, or fp64 for fp64."""
        return torch.promote_types(self.param_dtype, torch.float32)

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype in which parameters are stored."""
        return self.wide_dtype if self.is_trainable else self.param_dtype

    def policy(self) -> MixedPrecisionPolicy:
        """The dtypes of every unit; inputs are not cast, as ever under this interface."""
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.param_dtype if self.bit16_reduce_scatter else self.wide_dtype,
            cast_forward_inputs=False,
            bit32_acc_for_bit16_reduce_scatter=(
                self.bit16_reduce_scatter and self.bit32_acc_for_bit16_reduce_scatter
            ),
        )


def _check_numbers(args: Arguments) -> None:
    if isinstance(args.zero_stage, bool) or args.zero_stage not in (1, 2, 3):
        raise ValueError(f"zero_stage must be 1, 2 or 3, got {args.zero_stage!r}")
    dtype = args.param_dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"param_dtype must be a floating-point torch.dtype, got {dtype!r}")
    steps = args.gradient_accumulation_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"gradient_accumulation_steps must be an int of at least 1, got {steps!r}")


def _check_modules(args: Arguments) -> None:
    for item in args.modules_to_wrap_with_names:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], nn.Module)):
            raise TypeError(
                f"modules_to_wrap_with_names takes pairs (module, name), got {type(item).__name__}"
            )
    names = [name for _, name in args.modules_to_wrap_with_names]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"modules_to_wrap_with_names has the name {twice!r} twice")
    classes = args.layer_norm_module_cls
    for cls in classes if isinstance(classes, tuple) else (classes,):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                "layer_norm_module_cls must be a module class or a tuple of them (an empty one "
                f"for a model without norms), got {cls!r}"
            )


def _check_hpz(args: Arguments) -> None:
    count, wrapped = args.hpz_first_layers_num, len(args.modules_to_wrap_with_names)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= wrapped:
        raise ValueError(
            f"hpz_first_layers_num must be an int from 0 to the {wrapped} modules that are "
            f"wrapped, got {count!r}"
        )
    if count and args.intra_node_data_parallel_process_group is None:
        raise ValueError(
            f"hpz_first_layers_num={count} needs an intra_node_data_parallel_process_group whose "
            "ranks keep a second shard of the first layers"
        )
    if count and args.zero_stage != 3:
        raise ValueError(
            f"hpz_first_layers_num={count} has no effect with zero_stage={args.zero_stage}, where "
            "layers are gathered once per step; pass zero_stage=3 or hpz_first_layers_num=0"
        )


def _check_yccl(args: Arguments) -> None:
    colours = args.yccl_intra_inter_expr
    if isinstance(colours, str):
        raise TypeError(
            "yccl_intra_inter_expr is never evaluated from a string; pass a function of the rank "
            "that returns (intra_color, inter_color), or the pair itself"
        )
    if not (colours is None or callable(colours) or _is_pair(colours)):
        raise TypeError(
            "yccl_intra_inter_expr must be a pair (intra_color, inter_color) or a function of the "
            f"rank that returns one, got {colours!r}"
        )
    if not args.use_yccl:
        for name in ("yccl_intra_inter_expr", "yccl_all_gather_stages"):
            if getattr(args, name) is not None:
                raise ValueError(f"{name} has no effect without use_yccl=True")
    elif importlib.util.find_spec("yccl") is None:
        raise ImportError(
            "use_yccl=True needs the package yccl, which is not installed and not published; "
            "use_yccl=False communicates through torch.distributed (NCCL or gloo)"
        )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, int) for v in value)


# ---- where the ranks are -------------------------------------------------------------------------


def device_of(device_id: int | torch.device | None, group: dist.ProcessGroup) -> torch.device:
    """The device that shards live on; an accelerator's is made the current one.

    Raises:
        ValueError: If ``device_id`` is a number and this machine has no accelerator.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device_id, (torch.device, str)):
        device = torch.device(device_id)
    elif device_id is not None:
        if accelerator is None:
            raise ValueError(
                f"device_id={device_id} is the number of an accelerator, and this machine has "
                'none; pass device_id=None or torch.device("cpu")'
            )
        device = torch.device(accelerator.type, device_id)
    elif accelerator is None or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    else:
        device = accelerator
    if device.type != "cpu":
        index = cast("int | None", device.index)
        if index is None:
            index = torch.accelerator.current_device_index()
        device = torch.device(device.type, index)
        torch.accelerator.set_device_index(index)
    return device


@dataclass(frozen=True)
class Ranks:
    """The process groups of a wrapped model and the meshes over them.

    Attributes:
        data: Ranks over which parameters are cut.
        node: Those of them that share this rank's node.
        model: Tensor-parallel ranks, ``None`` if there is only one.
        mesh: 1-D, over ``data``.
        norm_mesh: That, or (model, data) where gradients of norms are summed over ``model`` too.
    """

    data: dist.ProcessGroup
    node: dist.ProcessGroup
    model: dist.ProcessGroup | None
    mesh: DeviceMesh
    norm_mesh: DeviceMesh
    device: torch.device


def find_ranks(args: Arguments) -> Ranks:
    """Resolves process groups and meshes; a collective call.

    Raises:
        RuntimeError: If there is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "YaFSDP needs a process group: call torch.distributed.init_process_group() first"
        )
    world = dist.group.WORLD
    assert world is not None
    data = args.data_parallel_process_group or world
    device = device_of(args.device_id, data)
    model = args.model_parallel_process_group
    if model is not None and dist.get_world_size(model) == 1:
        model = None
    mesh = norm_mesh = DeviceMesh.from_group(data, device.type)
    if model is not None and args.all_reduce_grads_across_model_parallel_group:
        rows: list[Any] = [None] * dist.get_world_size(model)
        dist.all_gather_object(rows, dist.get_process_group_ranks(data), group=model)
        norm_mesh = DeviceMesh.from_group(
            [model, data], device.type, mesh=torch.tensor(rows), mesh_dim_names=("model", "data")
        )
    node = args.intra_node_data_parallel_process_group or _node_group(data)
    return Ranks(data, node, model, mesh, norm_mesh, device)


def _node_group(data: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks of ``data`` on this node, as torchrun numbers them."""
    ranks = dist.get_process_group_ranks(data)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()
    here = [r for r in ranks if r // per_node == dist.get_rank() // per_node]
    if here == ranks:
        return data
    group = dist.new_group(here, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
