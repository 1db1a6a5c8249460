"""The sharded parameter: a DTensor whose pieces are contiguous and of unequal size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import count
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ya_fsdp._torch import (
    DTENSOR_BASE,
    allow_foreach,
    decompose,
    disabled_torch_function,
    make_spec,
    new_sharded_tensor,
    respec,
)
from ya_fsdp.ragged_checkpoint import chunk_view, chunks, write_items
from ya_fsdp.ragged_placement import (
    RaggedShard,
    contiguous_stride,
    make_placement,
    mesh_rank,
    ragged_axis,
)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

OPERATORS: dict[Any, Handler] = {}
"""What each aten overload does with ragged tensors, filled by the files of operators."""


class RaggedShardDTensor(DTENSOR_BASE):  # type: ignore[misc]
    """A tensor of which every rank of one mesh axis owns a contiguous range of elements.

    It has the whole tensor's shape and holds this rank's piece: N-D for a ``RowRaggedShard``, flat
    for a ``FlatRaggedShard``. Operators that are the same for every element, the update rules of
    ``torch.optim``, norms and full reductions are defined; any other raises
    ``NotImplementedError``. Reductions communicate at once and return a plain tensor that is the
    same on every rank, so every rank has to call them.

    Autograd does not pass through the operators and ``to_local``: use it as a leaf parameter whose
    ``grad`` is assigned.

    From torch 2.13 on it is a ``DTensor``; before, torch does not let a ``DTensor`` subclass
    define its operators, and it is a plain ``torch.Tensor`` subclass with the same methods.

    Build one with :func:`new_ragged`, :func:`distribute_ragged` or :meth:`from_full`.
    """

    _local_tensor: Tensor
    _spec: Any

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = OPERATORS.get(func)
        if handler is None:
            # Inference mode hands over operators whole that are otherwise made of others.
            result = decompose(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
            raise NotImplementedError(
                f"{func} is not defined for a RaggedShardDTensor. Use .to_local() to work on this "
                "rank's piece, or .full_tensor() (on every rank) to work on the whole tensor."
            )
        return handler(func, args, kwargs or {})

    @classmethod
    def from_full(
        cls,
        full: Tensor,
        mesh: DeviceMesh,
        placement: RaggedShard | Sequence[Placement],
        *,
        requires_grad: bool = False,
    ) -> RaggedShardDTensor:
        """Takes this rank's piece of a whole tensor, without communication.

        Args:
            full: The whole tensor, the same on every rank.
            mesh: The device mesh.
            placement: The ragged placement of a 1-D mesh, or one placement for each mesh axis.
            requires_grad: Whether the result is a leaf that requires gradients.

        Returns:
            A tensor of ``full``'s shape and dtype, whose piece shares no memory with ``full``.
        """
        placements = (placement,) if isinstance(placement, RaggedShard) else tuple(placement)
        axis = ragged_axis(placements)  # type: ignore[arg-type]
        piece = placements[axis].local_slice(full.detach(), mesh_rank(mesh, axis))  # type: ignore[union-attr]
        local = piece.clone(memory_format=torch.contiguous_format)
        return new_ragged(local, mesh, placements, full.shape, requires_grad=requires_grad)  # type: ignore[arg-type]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is spread over."""
        return cast(DeviceMesh, self._spec.mesh)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return cast("tuple[Placement, ...]", self._spec.placements)

    @property
    def _wrap(local: Tensor, spec: Any, requires_grad: bool) -> RaggedShardDTensor:
    if local.numel() == 0 and "data_ptr" not in local.__dict__:
        # Helpers that match parameters by address would take all empty pieces for one.
        local.data_ptr = PieceAddress()  # type: ignore[method-assign]
    return cast(
        RaggedShardDTensor, new_sharded_tensor(RaggedShardDTensor, local, spec, requires_grad)
    )


class PieceAddress:
    """Stands in for ``data_ptr`` of an empty piece; each has a number of its own."""

    __slots__ = ("number",)

    # Far below any address of real memory.
    _numbers = count(1)

    def __init__(self) -> None:
        self.number = next(self._numbers)

    def __call__(self) -> int:
        """The number."""
        return self.number

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceAddress, ()
