"""What a sharded model consists of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .. import build
from ..build import schedule_of, state_of
from ..checks import check_type
from ..group import ParamGroup
from ..mesh import MeshInfo
from ..unit import Unit


def units_of(model: nn.Module) -> list[Unit]:
    """Every unit of a sharded model, with names known.

    Raises:
        ValueError: If the model is not sharded.
    """
    check_type("model", model, nn.Module)
    units = list(build.units_of(model.modules()))
    if not units:
        raise ValueError(f"{type(model).__name__} is not sharded; call fully_shard first")
    for module in model.modules():
        if state_of(module) is not None:
            schedule_of(module)  # names of units and parameters are known from here on
    return units


def by_mesh(groups: Iterable[ParamGroup]) -> list[tuple[MeshInfo, list[ParamGroup]]]:
    """Groups by the process groups they communicate over."""
    found: dict[tuple[int, int], tuple[MeshInfo, list[ParamGroup]]] = {}
    for group in groups:
        info = group.mesh_info
        key = (id(info.shard_group), id(info.replicate_group))
        found.setdefault(key, (info, []))[1].append(group)
    return list(found.values())
