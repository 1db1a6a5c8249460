"""Lightning: a strategy for the ``Trainer``, a function for Fabric's ``ModelParallelStrategy``.

::

    trainer = Trainer(strategy="ya_fsdp", ...)                       # after importing this module
    fabric = Fabric(strategy=ModelParallelStrategy(parallelize_fn=parallelize(YaFSDPConfig())))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ya_fsdp import YaFSDPModule

from .config import YaFSDPConfig
from .sharding import shard_model


def parallelize(config: YaFSDPConfig | None = None) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """Makes a ``parallelize_fn`` for Fabric.

    Args:
        config: The options; ``YA_FSDP_*`` by default.

    Returns:
        A function that shards a model over the data-parallel axis of Lightning's mesh.
    """
    chosen = YaFSDPConfig.from_env() if config is None else config

    def parallelize_fn(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if any(isinstance(module, YaFSDPModule) for module in model.modules()):
            return model
        shard_model(model, chosen, mesh=_data_axis(device_mesh))
        return model

    return parallelize_fn


class YaFSDPStrategy(ModelParallelStrategy):
    """Shards the modules of a ``LightningModule`` that its ``configure_model`` left whole.

    Each child with parameters is sharded for itself, so that calls of ``self.model(...)`` in
    ``training_step`` gather what they need. Parameters of the ``LightningModule`` itself stay whole
    and unreduced, so it may have none.

    Args:
        config: The options; ``YA_FSDP_*`` by default.
        kwargs: Arguments of ``ModelParallelStrategy``.
    """

    _data_parallel_size: Any

    def __init__(self, config: YaFSDPConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**{"tensor_parallel_size": 1, **kwargs})
        self._ya_fsdp_config = YaFSDPConfig.from_env() if config is None else config

    def setup_environment(self) -> None:
        """Makes a mesh of all ranks, where Lightning's own default is one of nodes."""
        if self._data_parallel_size == "auto":
            ranks = self.num_nodes * self.num_processes
            self._data_parallel_size = ranks // int(self._tensor_parallel_size)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Shards before Lightning moves the module and makes its optimizers."""
        module = self.lightning_module
        if any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"{type(module).__name__} has parameters of its own; put them in a child module, "
                "whose forward gathers them"
            )
        shard = parallelize(self._ya_fsdp_config)
        for child in module.children():
            if any(True for _ in child.parameters()):
                shard(child, self.device_mesh)
        if type(module).configure_model is LightningModule.configure_model:
            # Lightning insists on this hook, which has nothing left to do.
            module.configure_model = _nothing_left_to_do
        super().setup(trainer)


def _nothing_left_to_do() -> None:
    pass


def _data_axis(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 or "data_parallel" not in names:
        return mesh
    return mesh["data_parallel"]


if "ya_fsdp" not in StrategyRegistry.available_strategies():
    StrategyRegistry.register(
        "ya_fsdp", YaFSDPStrategy, description="Fully sharded data parallelism of ya_fsdp"
    )

__all__ = ["YaFSDPStrategy", "parallelize"]
