"""Placements of a parameter that is cut into contiguous pieces of unequal size."""

from collections.abc import Sequence
from itertools import count, pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from ya_fsdp._torch import all_gather_flat


class RaggedShard:
    """What the two ragged placements share: who owns which elements of the flattened tensor.

    Attributes:
        bounds: ``world_size + 1`` ascending element offsets; rank ``r`` of the mesh axis owns
            ``bounds[r]:bounds[r + 1]`` of the flattened, row-major tensor. A rank may own nothing.
    """

    bounds: tuple[int, ...]
    _hash: int

    def _set_bounds(self, bounds: Sequence[int]) -> None:
        bounds = tuple(bounds)
        if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
            raise ValueError(
                f"bounds must be world_size + 1 ascending offsets that start at 0, got {bounds}"
            )
        self.bounds = bounds
        self._hash = hash((type(self), bounds))

    @property
    def world_size(self) -> int:
        """Ranks on the mesh axis."""
        return len(self.bounds) - 1

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.bounds[-1]

    @property
    def max_numel(self) -> int:
        """Elements of the largest piece."""
        return max(b - a for a, b in pairwise(self.bounds))

    def local_range(self, rank: int) -> tuple[int, int]:
        """The element range ``(start, end)`` that ``rank`` of the mesh axis owns."""
        return self.bounds[rank], self.bounds[rank + 1]

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank`` for a whole tensor of ``shape``."""
        raise NotImplementedError

    def local_slice(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The piece of a whole tensor that ``rank`` owns, in the local tensor's shape.

        Args:
            full: The whole tensor, any dtype and strides, ``numel`` elements.
            rank: Rank on the ragged mesh axis.

        Returns:
            A view of ``full`` where its strides allow one.
        """
        start, end = self.local_range(rank)
        piece = full.reshape(-1)[start:end]
        return piece.reshape(self.local_shape(full.shape, rank))

    def gather(
        self, local: torch.Tensor, shape: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Collects all pieces over ``group``.

        Every piece is padded to the largest one, because gloo refuses unequal pieces.

        Args:
            local: This rank's piece.
            shape: Shape of the whole tensor.
            group: The process group of the ragged mesh axis.

        Returns:
            A new contiguous tensor of ``shape``, the same on every rank.
        """
        largest = self.max_numel
        padded = local.new_zeros(largest)
        padded[: local.numel()].copy_(local.reshape(-1))
        if self.world_size == 1 or largest == 0:
            return padded.reshape(tuple(shape))
        gathered = local.new_empty(self.world_size * largest)
        all_gather_flat(gathered, padded, group)
        pieces = [
            gathered[rank * largest : rank * largest + end - start]
            for rank, (start, end) in enumerate(pairwise(self.bounds))
        ]
        return torch.cat(pieces).reshape(tuple(shape))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and self.bounds == other.bounds)

    def __ne__(self, other: object) -> bool:
        # DTensorSpec refuses a shard placement for which `placement != Shard(dim)`. Only that
        # check is satisfied here: `==`, which decides about redistribution, still tells them apart.
        if type(other) is Shard:
            return bool(other.dim != 0)
        return not self == other

    def _reduce_shard_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(f"reducing a partial tensor into {self}: reduce it to Replicate")

    def _to_new_shard_dim(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(f"resharding from {self} to another dim: go through Replicate")


class RowRaggedShard(RaggedShard, Shard):
    """A ragged cut between dim-0 rows; the local tensor is ``(rows, *shape[1:])``.

    It is a ``Shard(0)`` whose pieces have their own sizes: torch's helpers ask the placement for
    size and offset and so work with it unchanged.

    Args:
        bounds: Element offsets, all of them multiples of ``row_size``.
        row_size: Elements of one row, at least 1.

    Raises:
        ValueError: If a bound cuts a row.
    """

    row_size: int

    def __init__(self, bounds: Sequence[int], row_size: int) -> None:
        # Skipping the C++ base's __init__ crashes the process later, without an exception.
        Shard.__init__(self, 0)
        self._set_bounds(bounds)
        if row_size < 1 or any(bound % row_size for bound in self.bounds):
            raise ValueError(f"bounds {self.bounds} cut rows of {row_size} elements")
        self.row_size = row_size
        self._hash = hash((self._hash, row_size))

    __hash__ = RaggedShard.__hash__
    __ne__ = RaggedShard.__ne__

    def __eq__(self, other: object) -> bool:
        return (
            RaggedShard.__eq__(self, other) and self.row_size == other.row_size  # type: ignore[attr-defined]
        )

    def __repr__(self) -> str:
        return f"RowRaggedShard(rows={_abridged([b // self.row_size for b in self.bounds])})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return RowRaggedShard, (self.bounds, self.row_size)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank`` for a whole tensor of ``shape``."""
        start, end = self.local_range(rank)
        return ((end - start) // self.row_size, *shape[1:])

    def _rows(self, rank: int) -> tuple[int, int]:
        start, end = self.local_range(rank)
        return start // self.row_size, end // self.row_size

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        if num_chunks != self.world_size or curr_local_size * self.row_size != self.numel:
            raise ValueError(
                f"{self} places {self.numel // self.row_size} rows on {self.world_size} ranks, "
                f"asked for {curr_local_size} rows on {num_chunks} ranks: "
                + _no_rows("whose rows another mesh axis (tensor parallelism) cuts too")
            )
        start, end = self._rows(int(rank))
        return end - start, start

    def _split_tensor(
        self,
        tensor: torch.Tensor,
        num_chunks: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
    ) -> tuple[list[torch.Tensor], list[int]]:
        sizes = [
            self._local_shard_size_and_offset(tensor.size(0), num_chunks, rank)[0]
            for rank in range(num_chunks)
        ]
        pieces = list(torch.split(tensor, sizes))
        if not with_padding:
            return [piece.contiguous() if contiguous else piece for piece in pieces], []
        pads = [max(sizes) - size for size in sizes]
        return [_pad_rows(piece, pad) for piece, pad in zip(pieces, pads, strict=True)], pads

    def _to_replicate_tensor(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[Any],
    ) -> torch.Tensor:
        return self.gather(local_tensor, current_logical_shape, mesh.get_group(mesh_dim))


class FlatRaggedShard(RaggedShard, Shard):
    """A ragged cut between elements; the local tensor is flat.

    It counts as a ``Shard(0)`` for torch's helpers that only need to know that ranks hold parts:
    ``distribute_tensor`` makes an even shard for it, which ``copy_`` takes. Those that ask for a
    range of rows get an error that names what to call instead.

    Args:
        bounds: Element offsets.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        # Skipping the C++ base's __init__ crashes the process later, without an exception.
        Shard.__init__(self, 0)
        self._set_bounds(bounds)

    __hash__ = RaggedShard.__hash__
    __eq__ = RaggedShard.__eq__
    __ne__ = RaggedShard.__ne__

    def _local_shard_size_and_offset(self, *args: Any, **kwargs: Any) -> tuple[int, Any]:
        raise NotImplementedError(_no_rows("cut by elements"))

    def _split_tensor(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_no_rows("cut by elements"))

    def _to_replicate_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(_no_rows("cut by elements"))

    def __repr__(self) -> str:
        return f"FlatRaggedShard(elements={_abridged(self.bounds)})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatRaggedShard, (self.bounds,)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank`` for a whole tensor of ``shape``."""
        start, end = self.local_range(rank)
        return (end - start,)


def _no_rows(kind: str) -> str:
    return (
        f"torch can not cut a whole tensor for a parameter {kind}. For a full state dict on rank 0 "
        "call ya_fsdp.checkpoint.load_full_state_dict(model, state_dict), for an optimizer's "
        "load_full_optimizer_state_dict(model, optimizer, state_dict); set_model_state_dict and "
        "set_optimizer_state_dict do without broadcast_from_rank0"
    )


def make_placement(bounds: Sequence[int], shape: Sequence[int]) -> RaggedShard:
    """Picks the placement for a parameter cut at ``bounds``.

    Args:
        bounds: ``world_size + 1`` element offsets into the flattened parameter.
        shape: Shape of the whole parameter.

    Returns:
        A row placement when no bound cuts a dim-0 row, else a flat one.

    Raises:
        ValueError: If the bounds do not ascend from 0 to the number of elements.
    """
    if bounds[-1] != prod(shape):
        raise ValueError(f"bounds {tuple(bounds)} do not end at the {prod(shape)} elements")
    row_size = prod(shape[1:])
    if len(shape) > 0 and row_size > 0 and all(bound % row_size == 0 for bound in bounds):
        return RowRaggedShard(bounds, row_size)
    return FlatRaggedShard(bounds)


def ragged_axis(placements: Sequence[Placement]) -> int:
    """The mesh axis with the ragged placement.

    Raises:
        ValueError: If there is not exactly one, or another axis is neither replicated nor sharded.
    """
    found = -1
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            if found >= 0:
                raise ValueError(f"only one mesh axis may be ragged, got {placements}")
            found = axis
        elif not placement.is_replicate() and type(placement) is not Shard:
            raise ValueError(
                f"the other axes of a ragged tensor are Replicate or Shard, got {placements}"
            )
    if found < 0:
        raise ValueError(f"one mesh axis has to be ragged, got {placements}")
    return found


def mesh_rank(mesh: DeviceMesh, axis: int) -> int:
    """This process's rank on ``axis``.

    Raises:
        ValueError: If the process is not part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of {mesh}")
    return coordinate[axis]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


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


def give_address(local: torch.Tensor) -> None:
    """Gives an empty piece an address of its own."""
    # Helpers that match parameters by address would take all empty pieces for one.
    if "data_ptr" not in local.__dict__:
        local.data_ptr = PieceAddress()  # type: ignore[method-assign]


def _pad_rows(piece: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([piece, piece.new_zeros(rows, *piece.shape[1:])]) if rows else piece.clone()


def _abridged(numbers: Sequence[int], limit: int = 9) -> str:
    if len(numbers) <= limit:
        return str(list(numbers))
    head = ", ".join(map(str, numbers[: limit - 1]))
    return f"[{head}, ..., {numbers[-1]}]"
