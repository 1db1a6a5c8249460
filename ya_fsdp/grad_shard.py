"""One group's reduced gradients: a flat shard and the ``.grad`` objects over it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _torch
from .flat_gradient import FLAT, FlatGradient
from .layout import ShardLayout
from .mesh import MeshInfo
from .param import ReplacedParameter, ShardedParam
from .ragged import RaggedShardDTensor

_OWN_REFERENCES = 3  # the list, the loop variable and getrefcount's argument


@dataclass(eq=False)
class FlatPiece:
    """A range of the flat shard that an optimizer holds as one plain parameter.

    Attributes:
        start: First element in the shard.
        end: One past the last element.
        param: A plain 1-D parameter that shares the shard's memory.
        members: Indices of the sharded parameters it covers.
    """

    start: int
    end: int
    param: nn.Parameter
    members: tuple[int, ...]


class FlatMember(RaggedShardDTensor):
    """The class of a sharded parameter whose gradient is part of a flat parameter's.

    Reading ``.grad`` gives a view of that part, so that what clips, counts or zeroes the gradients
    of ``model.parameters()`` does what it says.
    """

    @property
    def grad(self) -> Tensor | None:
        """A sharded view of this parameter's part of the flat gradient."""
        found = self._ya_fsdp_flat
        return None if found is None else found[0].view_of(found[1])

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(
                f"parameter '{getattr(self, '_ya_fsdp_fqn', '?')}' is part of a flat parameter, "
                "which holds its gradient; write into .grad in place, or set the flat one's"
            )
        present = self.grad
        if present is not None:
            present.zero_()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


_torch.allow_foreach(FlatMember)


@dataclass
class GradShard:
    """Hands out gradients without making objects anew, and gives their memory back.

    The objects in ``.grad`` and the flat tensor under them are made once and used again in every
    backward, unless the user kept one: what a user keeps never changes.

    Attributes:
        pieces: Flat parameters; if there are any, they get the gradients instead of the sharded
            parameters.
    """

    params: list[ShardedParam]
    layout: ShardLayout
    mesh_info: MeshInfo
    pieces: list[FlatPiece] = field(default_factory=list)
    _flat: Tensor | None = None
    _local: list[Tensor] = field(default_factory=list)
    _objects: Sequence[Tensor] = ()
    _uses: int = 0

    @property
    def flat(self) -> Tensor:
        """This rank's gradients in the master dtype, as one tensor; after :meth:`prepare`."""
        assert self._flat is not None, "prepare() comes first"
        return self._flat

    def set_pieces(self, pieces: list[FlatPiece]) -> None:
        """Hands gradients to flat parameters from now on; their members show views of them."""
        self.forget()
        for old in self.pieces:
            if old not in pieces:
                ReplacedParameter.mark(old.param, self.params[old.members[0]].fqn)
        self.pieces = pieces
        for piece in pieces:
            setattr(piece.param, FLAT, True)
            for index in piece.members:
                sharded: Any = self.params[index].sharded
                sharded.__class__ = FlatMember
                sharded._ya_fsdp_flat = (self, index)

    def move_pieces(self, master_shard: Tensor) -> None:
        """Lets flat parameters follow the shard to other memory, as ``.to(dtype)`` makes it."""
        for piece in self.pieces:
            piece.param.grad = None
            piece.param.data = master_shard[piece.start : piece.end]
        self.set_pieces(self.pieces)

    def zero_pieces(self, set_to_none: bool) -> None:
        """Resets the gradients of flat parameters."""
        for piece in self.pieces:
            if set_to_none:
                piece.param.grad = None
            elif piece.param.grad is not None:
                piece.param.grad.zero_()

    def view_of(self, index: int) -> Tensor | None:
        """A sharded view of one parameter's part of the flat gradients, if there are any."""
        piece = next(p for p in self.pieces if index in p.members)
        if piece.param.grad is None:
            return None
        info, param = self.mesh_info, self.params[index]
        start, end = self.layout.local_range(info.shard_rank, index)
        local: Tensor = param.sharded._local_tensor  # type: ignore[attr-defined]
        view = piece.param.grad[start - piece.start : end - piece.start].view(local.shape)
        return param.place(view, self.layout.bounds(index), info)

    def holders(self) -> list[nn.Parameter]:
        """The parameters whose ``.grad`` is set."""
        if self.pieces:
            return [piece.param for piece in self.pieces]
        return [param.sharded for param in self.params]

    def complete(self) -> bool:
        """Whether every holder has a gradient of ours, so that ``flat`` is all there is."""
        grads = [holder.grad for holder in self.holders()]
        return len(grads) == len(self._objects) and all(
            g is o for g, o in zip(grads, self._objects, strict=True)
        )

    def forget(self) -> None:
        """Leaves the memory to whoever holds it; the next reduction starts anew."""
        self._flat = None
        self._local = []
        self._objects = ()

    def prepare(self, dtype: torch.dtype, device: torch.device) -> set[int] | None:
        """Makes sure the flat shard can be written. Called on the compute stream, whose it is.

        Returns:
            ``None`` if it starts empty, else the holders whose gradient was a foreign object and
            now lies in the shard (to be handed out as ours).
        """
        grads = [holder.grad for holder in self.holders()]
        if all(g is None for g in grads):
            flat = self._flat
            if flat is None or (flat.untyped_storage().nbytes() and not self._exclusive()):
                self._make(dtype, device)
            else:
                _resize(flat, flat.numel())
            return None
        if self._flat is None:
            self._make(dtype, device)
            self.flat.zero_()
        elif not self._flat.untyped_storage().nbytes() and self._flat.numel():
            _resize(self._flat, self._flat.numel())
            self._flat.zero_()
        taken = set()
        for i, (grad, ours) in enumerate(zip(grads, self._objects, strict=True)):
            if grad is None:
                self._local[i].zero_()
            elif grad is not ours:
                self._local[i].copy_(getattr(grad, "_local_tensor", grad))
                self.holders()[i].grad = None
                taken.add(i)
        return taken

    def _make(self, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(self.layout.shard_numel, dtype=dtype, device=device)
            self._flat = flat
            if self.pieces:
                groups = self._groups()
                self._local = [
                    FlatGradient.mark(flat[p.start : p.end], groups) for p in self.pieces
                ]
                self._objects = self._local
            else:
                self._local, self._objects = self._make_ragged(flat)
            self._uses = _torch.storage_use_count(flat)

    def _groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups over whose ranks the gradients are cut, axes of their own included."""
        found: dict[dist.ProcessGroup, None] = {}
        for param in self.params:
            assert isinstance(param.sharded, RaggedShardDTensor)
            found.update(dict.fromkeys(param.sharded.groups))
        return tuple(found)

    def _make_ragged(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        info = self.mesh_info
        local: list[Tensor] = []
        objects: list[Tensor] = []
        for i, param in enumerate(self.params):
            start, end = self.layout.local_range(info.shard_rank, i)
            view = flat[start:end].view(param.sharded._local_tensor.shape)  # type: ignore[attr-defined]
            local.append(view)
            objects.append(param.place(view, self.layout.bounds(i), info))
        return local, objects

    def _exclusive(self) -> bool:
        """Whether nobody but us refers to the objects or to their memory."""
        if any(sys.getrefcount(o) > _OWN_REFERENCES for o in self._objects):
            return False
        owners = 0 if self.pieces else 1  # a ragged tensor refers to its piece
        if any(sys.getrefcount(t) > _OWN_REFERENCES + owners for t in self._local):
            return False
        return _torch.storage_use_count(self.flat) == self._uses

    def hand_out(self, used: set[int]) -> list[int]:
        """Sets ``.grad`` of the parameters in ``used``; returns those that still have none."""
        if self.pieces:
            for piece, grad in zip(self.pieces, self._local, strict=True):
                piece.param.grad = grad
            return []
        missing = []
        for index, param in enumerate(self.params):
            sharded = param.sharded
            if index in used:
                if sharded.grad is None:
                    sharded.grad = self._objects[index]
            elif sharded.grad is None:
                missing.append(index)
        return missing

    def resolve(self, index: int) -> None:
        """Sets ``.grad`` of a parameter that only other ranks used."""
        self.params[index].sharded.grad = self._objects[index]

    def release_unused(self) -> None:
        """Gives the memory back once every ``.grad`` is ``None``."""
        flat = self._flat
        if flat is None or any(holder.grad is not None for holder in self.holders()):
            return
        if not flat.untyped_storage().nbytes():
            return
        if self._exclusive():
            _resize(flat, 0)
        else:
            self.forget()


def _resize(flat: Tensor, numel: int) -> None:
    """Frees (0) or takes again the memory behind a tensor and all its views."""
    storage = flat.untyped_storage()
    num_bytes = numel * flat.dtype.itemsize
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)
