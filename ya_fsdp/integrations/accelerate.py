"""Hugging Face accelerate: a plug-in that carries the options and an ``Accelerator`` that acts.

::

    from ya_fsdp.integrations.accelerate import YaFSDPAccelerator

    accelerator = YaFSDPAccelerator(mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Saving, loading, clipping, accumulation and merging are accelerate's own.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from ya_fsdp import MixedPrecisionPolicy, YaFSDPModule

from .config import YaFSDPConfig
from .sharding import ShardedModel, attach_optimizers, detach_optimizers, shard_model

logger = logging.getLogger("ya_fsdp.integrations")


@dataclass
class YaFSDPPlugin(FullyShardedDataParallelPlugin):
    """accelerate's FSDP plug-in, version 2, with our options beside its own.

    Attributes:
        ya_fsdp: The options. ``None``: from the YAML of ``accelerate launch`` and ``YA_FSDP_*``.
    """

    if TYPE_CHECKING:
        fsdp_version: Any = None
        mixed_precision_policy: Any = None

    ya_fsdp: YaFSDPConfig | None = None

    def __post_init__(self) -> None:
        if self.fsdp_version not in (None, 2):
            raise ValueError(f"YaFSDPPlugin is of fsdp_version 2, got {self.fsdp_version}")
        self.fsdp_version = 2
        if self.ya_fsdp is None:
            self.ya_fsdp = YaFSDPConfig.discover()
        super().__post_init__()

    @property
    def config(self) -> YaFSDPConfig:
        """The options, where they were left open filled from accelerate's own fields."""
        assert self.ya_fsdp is not None
        config = replace(self.ya_fsdp)
        if config.reshard_after_forward is None:
            config.reshard_after_forward = self.reshard_after_forward
        if config.cpu_ram_efficient_loading is None:
            config.cpu_ram_efficient_loading = bool(self.cpu_ram_efficient_loading)
        if self.activation_checkpointing and config.num_layers_to_checkpoint == 0:
            config.num_layers_to_checkpoint = -1
        if config.wrap is None and self.min_num_params:
            smallest = self.min_num_params
            config.wrap = lambda _, m: sum(p.numel() for p in m.parameters()) >= smallest
        return config

    def set_mixed_precision(
        self,
        mixed_precision: Any,
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        """Sets a policy that leaves outputs alone and reduces in float32, unless one was given.

        accelerate's own makes outputs 16-bit, which shows as losses in coarse steps.
        """
        given = self.mixed_precision_policy is not None and not override
        super().set_mixed_precision(mixed_precision, buffer_autocast, override)
        assert self.ya_fsdp is not None
        if not given and self.ya_fsdp.enabled and self.mixed_precision_policy is not None:
            param_dtype = self.mixed_precision_policy.param_dtype
            self.mixed_precision_policy = self.ya_fsdp.mp_policy(
                MixedPrecisionPolicy(param_dtype=param_dtype)
            )

    @classmethod
    def from_plugin(
        cls, plugin: FullyShardedDataParallelPlugin | None, config: YaFSDPConfig | None = None
    ) -> YaFSDPPlugin:
        """The same settings as accelerate's plug-in, with our options.

        Raises:
            ValueError: If the plug-in is of version 1.
        """
        if isinstance(plugin, cls):
            if config is not None:
                plugin.ya_fsdp = config
            return plugin
        if plugin is None:
            return cls(ya_fsdp=config)
        if plugin.fsdp_version != 2:
            raise ValueError(
                "ya_fsdp takes the place of FSDP2: set fsdp_version to 2 (it is "
                f"{plugin.fsdp_version})"
            )
        made = cls.__new__(cls)
        made.__dict__.update(plugin.__dict__)
        made.ya_fsdp = YaFSDPConfig.discover() if config is None else config
        return made


class YaFSDPAccelerator(Accelerator):
    """An ``Accelerator`` whose :meth:`prepare` shards models with ya_fsdp.

    A model may be prepared before, after or without its optimizer, and several models may be.
    Everything else is accelerate's. It also shards on CPU (gloo), where accelerate would choose
    DDP.

    Args:
        config: The options; those of the plug-in, if there is one, else discovered ones.
        fsdp_plugin: A :class:`YaFSDPPlugin`, or accelerate's plug-in of version 2.
        kwargs: Arguments of ``Accelerator``.
    """

    def __init__(
        self,
        *,
        config: YaFSDPConfig | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        **kwargs: Any,
    ) -> None:
        plugin = YaFSDPPlugin.from_plugin(fsdp_plugin, config)
        super().__init__(fsdp_plugin=plugin, **kwargs)
        # On CPU accelerate drops the plug-in.
        engage(self, plugin)

    @property
    def ya_fsdp_enabled(self) -> bool:
        """Whether :meth:`prepare` shards with ya_fsdp."""
        plugin = getattr(self.state, "fsdp_plugin", None)
        return bool(self.is_fsdp2 and isinstance(plugin, YaFSDPPlugin) and plugin.config.enabled)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shards models, points optimizers at the shards, and prepares the rest as accelerate does.

        Args:
            args: Models, optimizers, data loaders, schedulers, anything else.
            device_placement: Not used for models and optimizers, which stay on their device.

        Returns:
            The prepared objects in the same order; a single one alone.

        Raises:
            ValueError: If an optimizer has stepped already or has parameters of another model.
            NotImplementedError: If tensor or context parallelism, FP8 or offloading is asked for.
        """
        if not self.ya_fsdp_enabled:
            return super().prepare(*args, device_placement=device_placement)
        self._check_offered()
        models = [obj for obj in args if isinstance(obj, nn.Module)]
        optimizers = [obj for obj in args if isinstance(obj, torch.optim.Optimizer)]
        taken = detach_optimizers(getattr(obj, "optimizer", obj) for obj in optimizers)
        moved = self.__dict__.setdefault("_ya_fsdp_moved", WeakIdKeyDictionary())
        for model in models:
            moved.update(self._shard(model).moved)
        attach_optimizers(taken, moved, [*models, *self._models])
        # Optimizers before schedulers, which ask for the prepared optimizer that is theirs.
        done = [obj if _is_scheduler(obj) else self._prepare_other(obj) for obj in args]
        done = [self.prepare_scheduler(obj) if _is_scheduler(obj) else obj for obj in done]
        return tuple(done) if len(done) > 1 else done[0]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state dict on rank 0, in the dtypes that the model was loaded in."""
        state = super().get_state_dict(model, unwrap=unwrap)
        known = self._known(model)
        if known is None or not state:
            return state
        dtypes = known.loaded_dtypes
        return {n: t.to(dtypes[n]) if n in dtypes else t for n, t in state.items()}

    def loaded_dtype(self, model: nn.Module) -> torch.dtype | None:
        """The floating-point dtype that a prepared model was loaded in, ``None`` of others."""
        known = self._known(model)
        dtypes = known.loaded_dtypes.values() if known is not None else ()
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)

    def _known(self, model: nn.Module) -> ShardedModel | None:
        known = self.__dict__.get("_ya_fsdp_models", {}).get(model)
        assert known is None or isinstance(known, ShardedModel)
        return known

    def _shard(self, model: nn.Module) -> ShardedModel:
        known = self.__dict__.setdefault("_ya_fsdp_models", WeakKeyDictionary())
        if model in known:
            return known[model]  # type: ignore[no-any-return]
        if isinstance(model, YaFSDPModule):
            return ShardedModel([], {})
        plugin = self.state.fsdp_plugin
        config = _with_ignored(plugin.config, plugin.ignored_modules, model)
        done = shard_model(
            model,
            config,
            mesh=self._fsdp_mesh(),
            mixed_precision=plugin.mixed_precision_policy,
            layer_names=plugin.transformer_cls_names_to_wrap,
            from_rank0=bool(config.cpu_ram_efficient_loading),
        )
        self._compile(model, done)
        known[model] = done
        return done

    def _compile(self, model: nn.Module, done: ShardedModel) -> None:
        """Compiles layers one by one; their names stay, and gathers stay outside of graphs."""
        plugin = self.state.dynamo_plugin
        if plugin.backend.value == "NO":
            return
        options = plugin.to_kwargs()
        options.pop("use_regional_compilation", None)
        for name in done.layers:
            model.get_submodule(name).compile(**options)

    def _prepare_other(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):
            # prepare_model would autocast it, and refuses FSDP2 before accelerate 1.14.
            if not any(obj is known for known in self._models):
                self._models.append(obj)
            obj.__dict__["_is_accelerate_prepared"] = True
            return obj
        if isinstance(obj, torch.utils.data.DataLoader):
            prepared = self.prepare_data_loader(obj)
        elif isinstance(obj, torch.optim.Optimizer):
            prepared = self.prepare_optimizer(obj)
        else:
            return obj
        prepared._is_accelerate_prepared = True
        return prepared

    def _fsdp_mesh(self) -> Any:
        mesh, parallelism = self.torch_device_mesh, self.parallelism_config
        if mesh is None or parallelism is None:
            return None
        return mesh[tuple(parallelism.fsdp_dim_names)]

    def _check_offered(self) -> None:
        parallelism, plugin = self.parallelism_config, self.state.fsdp_plugin
        refused = {
            "tensor parallelism": parallelism is not None and parallelism.tp_enabled,
            "context parallelism": parallelism is not None and parallelism.cp_enabled,
            "FP8": self.state.mixed_precision == "fp8",
            "cpu_offload": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "activation_checkpointing_offload": getattr(
                plugin, "activation_checkpointing_offload", False
            ),
        }
        for name, asked in refused.items():
            if asked:
                raise NotImplementedError(
                    f"YaFSDPAccelerator does not offer {name}; switch it off, or use accelerate's "
                    "FSDP2 with YaFSDPConfig(enabled=False)"
                )


def engage(
    accelerator: Accelerator, options: YaFSDPConfig | FullyShardedDataParallelPlugin | None = None
) -> None:
    """Makes an existing ``Accelerator`` ours, in place: its class, its plug-in, its state.

    Args:
        accelerator: An accelerator that has prepared no model for training yet.
        options: The options, or a plug-in of version 2 with accelerate's settings too; by default
            the plug-in that the accelerator has, and discovered options.

    Raises:
        RuntimeError: If the accelerator has wrapped a model already, or has not joined the other
            processes that were started with this one.
        ValueError: If the plug-in is of version 1.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and not accelerator.use_distributed:
        raise RuntimeError(
            f"{started} processes were started, but accelerate has joined none of them to another: "
            "each would train a whole model alone. Without a GPU it wants to be told so: "
            "YaFSDPAccelerator(cpu=True), TrainingArguments(use_cpu=True), or ACCELERATE_USE_CPU=1"
        )
    if not isinstance(accelerator, YaFSDPAccelerator):
        # A model alone may be a reference model, prepared for evaluation.
        if accelerator._optimizers or any(isinstance(m, FSDPModule) for m in accelerator._models):
            raise RuntimeError(
                "the accelerator has wrapped a model already; make it ours before prepare()"
            )
        accelerator.__class__ = YaFSDPAccelerator
    if not accelerator.use_distributed:
        warnings.warn(
            "ya_fsdp has nothing to shard in a single process: start the program with "
            "`accelerate launch` or torchrun",
            stacklevel=3,
        )
        return
    state = accelerator.state
    given = getattr(state, "fsdp_plugin", None)
    if isinstance(options, FullyShardedDataParallelPlugin):
        plugin = YaFSDPPlugin.from_plugin(options)
    else:
        plugin = YaFSDPPlugin.from_plugin(given, options)
    if plugin.config.enabled and _is_accelerates_own(plugin.mixed_precision_policy):
        plugin.mixed_precision_policy = None
    state.fsdp_plugin = plugin
    if state.distributed_type != DistributedType.FSDP:
        # accelerate shards on accelerators only and calls the rest MULTI_CPU.
        state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP
    if plugin.mixed_precision_policy is None and state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)


def _is_accelerates_own(policy: Any) -> bool:
    """Whether accelerate made the policy: one dtype for everything, which a user hardly writes."""
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return False
    return len({policy.param_dtype, policy.reduce_dtype, policy.output_dtype}) == 1


def _is_scheduler(obj: Any) -> bool:
    return isinstance(obj, torch.optim.lr_scheduler.LRScheduler)


def _with_ignored(config: YaFSDPConfig, ignored: Any, model: nn.Module) -> YaFSDPConfig:
    """Modules that accelerate is to ignore, which may be a regular expression, as names."""
    if ignored is None:
        return config
    if isinstance(ignored, str):
        import re

        names = [n for n, _ in model.named_modules() if n and re.fullmatch(ignored, n)]
    else:
        wanted = {id(m) for m in ignored}
        names = [n for n, m in model.named_modules() if id(m) in wanted]
    return replace(config, ignored=[*config.ignored, *names])


__all__: Sequence[str] = ["YaFSDPAccelerator", "YaFSDPPlugin", "engage"]
