"""Private torch names about device meshes and DTensors, each with its reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shape_and_offset(
    shape: torch.Size, mesh: Any, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and place of this rank's part of a DTensor; no public name exists."""
    return compute_local_shape_and_global_offset(shape, mesh, placements)


def join_meshes(first: Any, second: Any) -> Any:
    """One mesh of the axes of two slices of a mesh, in that order; no public name exists."""
    return DeviceMesh._concatenate([first, second])


def finished(tensor: Tensor) -> Tensor:
    """The result of a collective that functional collectives have left pending."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


def forget_groups(mesh: DeviceMesh) -> None:
    """Lets destroyed process groups go, which a mesh keeps by name."""
    getattr(mesh, "_pg_registry", {}).clear()
