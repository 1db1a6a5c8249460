"""Parameters that are DTensors on mesh axes of their own before they are sharded (TP, SP)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import _torch_mesh


@dataclass(frozen=True)
class TensorParallel:
    """What a parameter is on its own mesh axes; sharding cuts this rank's part of it.

    Attributes:
        own_mesh: The axes that the parameter came with.
        placements: One for each of them.
        mesh: The axes that shard (and replicate), then its own.
        shape: Shape of the whole parameter.
        stride: Its strides.
    """

    own_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    mesh: DeviceMesh
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, fqn: str, param: nn.Parameter, mesh: DeviceMesh) -> TensorParallel | None:
        """Reads a parameter; ``None`` if it is a plain one.

        Args:
            fqn: Its name, for messages.
            param: The parameter.
            mesh: The mesh that it is going to be sharded over.

        Raises:
            ValueError: If the meshes have an axis in common or do not come from one mesh, or a
                placement is neither ``Shard`` nor ``Replicate``.
        """
        if not isinstance(param, DTensor):
            return None
        own = param.device_mesh
        if not all(type(placement) in (Shard, Replicate) for placement in param.placements):
            raise ValueError(
                f"parameter '{fqn}' has the placements {param.placements}; only Shard and "
                "Replicate can be sharded further. Redistribute it before fully_shard."
            )
        try:
            joined = _torch_mesh.join_meshes(mesh, own)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"parameter '{fqn}' is a DTensor on {own} already, which can not be combined with "
                f"{mesh}. Take both from one mesh with named axes: world = init_device_mesh(device,"
                ' (2, 2), mesh_dim_names=("dp", "tp")), then parallelize_module(..., world["tp"]) '
                'and fully_shard(..., mesh=world["dp"]); or pass it in ignored_params.'
            ) from error
        return cls(own, tuple(param.placements), joined, param.shape, param.stride())

    def wrap(self, part: Tensor) -> DTensor:
        """The parameter on its own axes over this rank's part; what modules compute with."""
        return DTensor.from_local(
            part,
            self.own_mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    @torch.no_grad()
    def part_of_gradient(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient; sums that are partial on its own axes are finished."""
        if not isinstance(gradient, DTensor):
            return gradient
        if gradient.placements != self.placements:
            gradient = gradient.redistribute(self.own_mesh, self.placements)
        return _torch_mesh.finished(gradient.to_local())
