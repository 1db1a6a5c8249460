"""The sharded parameter: a DTensor whose pieces are contiguous and of unequal size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ya_fsdp import ragged_mesh
from ya_fsdp._torch import (
    DTENSOR_BASE,
    allow_foreach,
    decompose,
    disabled_torch_function,
    make_spec,
    new_sharded_tensor,
    respec,
)
from ya_fsdp.checks import asking_optimizer
from ya_fsdp.ragged_checkpoint import chunk_view, chunks, write_items
from ya_fsdp.ragged_placement import (
    RaggedShard,
    contiguous_stride,
    give_address,
    make_placement,
    mesh_rank,
    ragged_axis,
)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

OPERATORS: dict[Any, Handler] = {}
"""What each aten overload does with ragged tensors, filled by the files of operators."""


def _refusal(func: Any, args: tuple[Any, ...]) -> str:
    """Why an operator can not run, with the name of the parameter if a unit manages it."""
    text = (
        f"{func} is not defined for a RaggedShardDTensor. Use .to_local() to work on this rank's "
        "piece, or .full_tensor() (on every rank) to work on the whole tensor."
    )
    text += (optimizer := asking_optimizer())
    if func is torch.ops.aten.cat.default and not optimizer:
        text += " (DistributedDataParallel joins parameters so: a sharded model needs none.)"
    names = [n for n in (getattr(a, "_ya_fsdp_fqn", None) for a in args) if n]
    if not names:
        return text
    return (
        f"parameter '{names[0]}' is sharded: {text} Its module's forward, or module.unshard(), "
        "puts the whole parameter in its place."
    )


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
            raise NotImplementedError(_refusal(func, args))
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
        single = isinstance(placement, RaggedShard)
        placements = cast("tuple[Placement, ...]", (placement,) if single else tuple(placement))  # type: ignore[arg-type]
        piece = ragged_mesh.piece_of(full.detach(), mesh, placements)
        local = piece.clone(memory_format=torch.contiguous_format)
        return new_ragged(local, mesh, placements, full.shape, requires_grad=requires_grad)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is spread over."""
        return cast(DeviceMesh, self._spec.mesh)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return cast("tuple[Placement, ...]", self._spec.placements)

    @property
    def ragged_axis(self) -> int:
        """The mesh axis over which the tensor is cut."""
        return ragged_axis(self._spec.placements)

    @property
    def ragged_placement(self) -> RaggedShard:
        """The placement on :attr:`ragged_axis`."""
        return cast(RaggedShard, self._spec.placements[self.ragged_axis])

    @property
    def ragged_rank(self) -> int:
        """This process's rank on :attr:`ragged_axis`."""
        return mesh_rank(self._spec.mesh, self.ragged_axis)

    @property
    def ragged_range(self) -> tuple[int, int]:
        """This process's range of the flattened :attr:`part`."""
        return self.ragged_placement.local_range(self.ragged_rank)

    @property
    def part(self) -> ragged_mesh.Part:
        """What the ragged axis cuts: the whole tensor, or this rank's part of it on other axes."""
        return ragged_mesh.part_of(self.shape, self.device_mesh, self.placements)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups over which a reduction goes: of :attr:`ragged_axis` and sharded axes."""
        return ragged_mesh.groups_with_other_pieces(self.device_mesh, self.placements)

    def piece_of(self, full: Tensor) -> Tensor:
        """What this rank owns of a whole tensor of this shape; a view where strides allow it."""
        return ragged_mesh.piece_of(full, self.device_mesh, self.placements)

    @property
    def data(self) -> RaggedShardDTensor:
        """The tensor without its gradient history, with the same piece."""
        return cast(RaggedShardDTensor, self.detach())

    @data.setter
    def data(self, value: Any) -> None:
        raise RuntimeError(
            "the data of a RaggedShardDTensor cannot be replaced, because the piece lies in memory "
            "that is shared with other parameters: use copy_ under torch.no_grad()"
        )

    def share_memory_(self) -> NoReturn:
        """Refused: torch's own would move memory that other parameters share, and crash."""
        raise NotImplementedError("sharded tensors can not be moved to shared memory")

    def like(self, local: Tensor, *, requires_grad: bool = False) -> RaggedShardDTensor:
        """A tensor of the same shape, mesh and placements with another piece.

        Args:
            local: A piece of the shape of this tensor's piece, of any dtype and device.
            requires_grad: Whether the result is a leaf that requires gradients.
        """
        spec = self._spec
        meta = spec.tensor_meta
        if local.dtype != meta.dtype:
            spec = respec(spec, meta.shape, meta.stride, local.dtype)
        return _wrap(local, spec, requires_grad)

    def alias(self) -> RaggedShardDTensor:
        """Another tensor with the same piece, the very object: an empty one is known by it."""
        if not torch.is_inference_mode_enabled():
            return self.like(self._local_tensor)
        # A view of a normal tensor has to be a normal one in inference mode, too.
        with torch.inference_mode(self.is_inference()):
            return self.like(self._local_tensor)

    def with_shape(self, shape: Sequence[int]) -> RaggedShardDTensor:
        """The same elements, cut at the same bounds, seen in another shape; memory is shared.

        Args:
            shape: A shape of the same number of elements; one length may be -1.
        """
        if self.part.sizes != tuple(self.shape):
            raise NotImplementedError(f"a view of a tensor with placements {self.placements}")
        shape = torch.empty(self.shape, device="meta").view(*shape).shape
        axis, rank = self.ragged_axis, self.ragged_rank
        placements = list(self.placements)
        placement = make_placement(self.ragged_placement.bounds, shape)
        placements[axis] = placement  # type: ignore[call-overload]
        local = self._local_tensor.view(placement.local_shape(shape, rank))
        with torch.inference_mode(self.is_inference()):
            return new_ragged(local, self.device_mesh, tuple(placements), shape)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's piece itself: N-D for a row cut, flat for an element cut."""
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Gathers the whole tensor on every rank; every rank of the mesh has to call it."""
        if self._local_tensor.is_meta:
            return self._local_tensor.new_empty(self.shape)
        return self._gathered().full_tensor()

    @torch.no_grad()
    def _gathered(self) -> DTensor:
        """The tensor with ``Replicate`` on the ragged axis."""
        group = self.device_mesh.get_group(self.ragged_axis)
        part = self.ragged_placement.gather(self._local_tensor, self.part.sizes, group)
        return ragged_mesh.part_as_dtensor(part, self.shape, self.device_mesh, self.placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> Any:
        """Changes the placement by way of the tensor gathered over the ragged axis.

        Args:
            device_mesh: Has to be the tensor's own mesh when given.
            placements: For each axis ``Replicate``, ``Shard`` or, on one, a ragged placement.
            **options: ``async_op`` is accepted and ignored; a ``forward_dtype`` casts.

        Returns:
            A stock ``DTensor``, or a ``RaggedShardDTensor`` for a ragged placement.

        Raises:
            ValueError: If the mesh differs or the placements do not fit it.
            NotImplementedError: For any other change.
        """
        mesh = self.device_mesh
        if device_mesh is not None and device_mesh != mesh:
            raise ValueError(f"cannot redistribute from {mesh} to another mesh, {device_mesh}")
        if placements is None or len(placements) != len(self.placements):
            raise ValueError(f"one placement for each axis of {mesh} is needed, got {placements}")
        dtype = options.get("forward_dtype") or self.dtype
        source = self if dtype == self.dtype else self.like(self._local_tensor.to(dtype))
        target = tuple(placements)
        if target == self.placements:
            return source
        done = ragged_mesh.redistributed(source._gathered(), target)
        return done if isinstance(done, DTensor) else new_ragged(done, mesh, target, self.shape)

    def data_ptr(self) -> int:
        """Address of a parameter's piece; for an empty piece a number no other tensor has.

        Helpers that follow parameters through sharding know them by it. Of other tensors it is 0,
        as of any DTensor: code that copies tensors takes anything else for plain memory.
        """
        if not getattr(self, "_is_param", False):
            return 0
        if self._local_tensor.numel() == 0:
            give_address(self._local_tensor)
        return self._local_tensor.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"RaggedShardDTensor(local_tensor={self._local_tensor}, shape={tuple(self.shape)}, "
            f"device_mesh={self.device_mesh}, placements={self.placements})"
        )

    def register_hook(self, hook: Any) -> Any:
        """Refused, because no backward pass runs through a ragged tensor.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "a hook registered with register_hook would never run: gradients of sharded "
            "parameters are assigned, not computed by autograd. Use "
            "register_post_accumulate_grad_hook, which runs with the reduced .grad."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShardDTensor:
        if id(self) not in memo:
            copy = self._as_me(self.like(self._local_tensor.clone()), self.requires_grad)
            memo[id(self)] = copy
            if self.grad is not None:
                copy.grad = deepcopy(self.grad, memo)
        return cast(RaggedShardDTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # By value of the piece: the placements and the mesh say which piece it is.
        parameter = bool(getattr(self, "_is_param", False))
        state = (self._local_tensor, self.device_mesh, self.placements, tuple(self.shape))
        return rebuild_ragged, (*state, self.requires_grad, parameter)

    def _as_me(self, tensor: RaggedShardDTensor, requires_grad: bool) -> Any:
        """``tensor`` as a parameter if this is one."""
        # torch.nn.Parameter marks instances of other tensor classes so.
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.requires_grad_(requires_grad)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> RaggedShardDTensor:
        spec, requires_grad = context
        return _wrap(inner["_local_tensor"], spec, requires_grad)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        return chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return chunk_view(self, index)


allow_foreach(RaggedShardDTensor)


def new_ragged(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    requires_grad: bool = False,
) -> RaggedShardDTensor:
    """Makes a ragged tensor from this rank's piece, without communication or copy.

    Args:
        local: This rank's piece, ``(rows, *shape[1:])`` for a row cut and flat for an element cut.
        mesh: The device mesh.
        placements: One for each mesh axis: a ``RaggedShard`` and otherwise ``Replicate`` or
            ``Shard``. Other axes come first: the ragged one cuts this rank's part on those.
        shape: Shape of the whole tensor.
        stride: Strides of the whole tensor, row-major if left out. Others are refused.
        requires_grad: Whether the result is a leaf that requires gradients.

    Raises:
        ValueError: If the piece, the placements or the strides do not fit the shape and mesh.
    """
    shape, row_major = torch.Size(shape), contiguous_stride(shape)
    ragged_mesh.check_piece(tuple(local.shape), mesh, placements, shape)
    if stride is not None and tuple(stride) != row_major:
        raise ValueError(f"only row-major tensors can be cut, got strides {tuple(stride)}")
    if local.requires_grad:
        local = local.detach()
    return _wrap(local, make_spec(mesh, placements, shape, row_major, local.dtype), requires_grad)


def rebuild_ragged(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    requires_grad: bool,
    parameter: bool,
) -> RaggedShardDTensor:
    """Makes a ragged tensor from what pickle has kept of one."""
    tensor = new_ragged(local, mesh, placements, shape)
    if parameter:
        return cast(RaggedShardDTensor, torch.nn.Parameter(tensor, requires_grad=requires_grad))
    return cast(RaggedShardDTensor, tensor.requires_grad_(requires_grad))


def _wrap(local: Tensor, spec: Any, requires_grad: bool) -> RaggedShardDTensor:
    if local.numel() == 0:
        give_address(local)
    return cast(
        RaggedShardDTensor, new_sharded_tensor(RaggedShardDTensor, local, spec, requires_grad)
    )
