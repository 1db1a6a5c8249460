"""torchtitan: a ``parallelize_fn`` for a model's ``TrainSpec``.

torchtitan calls it with keywords, whose set has changed from one version to the next; what it needs
is looked up by name and the rest is passed over. It shards and, if asked, compiles and recomputes
layers. Tensor, context, pipeline and expert parallelism are refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .config import YaFSDPConfig
from .sharding import shard_model


def parallelize_fn(
    model: nn.Module, parallel_dims: Any = None, job_config: Any = None, **kwargs: Any
) -> nn.Module:
    """Shards a model of torchtitan.

    Args:
        model: The model, on meta.
        parallel_dims: torchtitan's ``ParallelDims``, from which the mesh is taken.
        job_config: torchtitan's ``JobConfig``; dtypes, compilation and recomputation are read.
        kwargs: Further keywords of other versions; ``world_mesh`` and ``training`` are read.

    Returns:
        The same model.

    Raises:
        NotImplementedError: If another kind of parallelism is asked for.
    """
    for kind in ("tp", "cp", "pp", "ep"):
        if getattr(parallel_dims, f"{kind}_enabled", False):
            raise NotImplementedError(f"parallelize_fn of ya_fsdp does not offer {kind}")
    training = kwargs.get("training") or getattr(job_config, "training", None)
    config = YaFSDPConfig.from_env(**_dtypes(training))
    recompute = getattr(job_config, "activation_checkpoint", None)
    if getattr(recompute, "mode", "none") == "full":
        config.num_layers_to_checkpoint = -1
    config.wrap = config.wrap or _is_layer
    done = shard_model(model, config, mesh=_mesh(parallel_dims, kwargs.get("world_mesh")))
    if getattr(getattr(job_config, "compile", None), "enable", False):
        for name in done.layers:
            model.get_submodule(name).compile()
    return model


def _is_layer(name: str, module: nn.Module) -> bool:
    """Whether a module is an entry of ``layers``, the dictionary in which models keep blocks."""
    parts = name.split(".")
    return len(parts) > 1 and parts[-2] == "layers" and parts[-1].isdigit()


def _dtypes(training: Any) -> dict[str, Any]:
    found = {
        "param_dtype": getattr(training, "mixed_precision_param", None),
        "reduce_dtype": getattr(training, "mixed_precision_reduce", None),
    }
    return {name: value for name, value in found.items() if value is not None}


def _mesh(parallel_dims: Any, world_mesh: Any) -> Any:
    """The (replicate, shard) or (shard) mesh, from either generation of ``ParallelDims``."""
    replicated = bool(getattr(parallel_dims, "dp_replicate_enabled", False))
    if world_mesh is not None:
        shard = "dp_shard_cp" if "dp_shard_cp" in (world_mesh.mesh_dim_names or ()) else "dp_shard"
        return world_mesh[("dp_replicate", shard) if replicated else (shard,)]
    get_mesh = getattr(parallel_dims, "get_mesh", None)
    if get_mesh is None:
        return None
    return get_mesh(["dp_replicate", "fsdp"] if replicated else "fsdp")


__all__ = ["parallelize_fn"]
