"""Persistent byte slots that units lease while their parameters are gathered or reduced.

A slot is one allocation that many units use in turn. It knows who holds it (``holder``), whose
bytes lie in it (``content``, which may outlive the hold), and the event after which the previous
holder's kernels have finished. Slots are made on the compute stream, so memory given back to the
allocator is reused in that stream's order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SLOT_ALIGNMENT = 256
"""Bytes to which every range inside a slot is rounded (covers any dtype and vector load)."""


def aligned(num_bytes: int) -> int:
    """Rounds a number of bytes up to ``SLOT_ALIGNMENT``."""
    return (num_bytes + SLOT_ALIGNMENT - 1) // SLOT_ALIGNMENT * SLOT_ALIGNMENT


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are views of one allocation."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


class Slot:
    """One persistent buffer of bytes, leased by one holder at a time.

    Args:
        num_bytes: Size of the buffer.
        allocate: Makes a flat ``uint8`` tensor of that many bytes.
        maker: Whose ``allocate`` that is; units of another maker do not use the slot.
        fixed: Whether the maker needs the memory to stay where it is.
        own: Whether one holder uses the slot alone, so that nobody needs it between its uses.

    Attributes:
        ring: Number of the process group whose units use a gradient slot.
    """

    __slots__ = (
        "buffer",
        "content",
        "fixed",
        "free_event",
        "holder",
        "maker",
        "num_bytes",
        "own",
        "ring",
        "stamp",
        "views",
    )

    def __init__(
        self,
        num_bytes: int,
        allocate: Callable[[int], Tensor],
        maker: Any = None,
        fixed: bool = False,
        own: bool = False,
    ) -> None:
        self.num_bytes = num_bytes
        self.maker = maker
        self.fixed = fixed
        self.own = own
        # Inference tensors could not be written by a later training step.
        with torch.inference_mode(False):
            self.buffer = allocate(num_bytes)
        self.holder: Any = None
        self.content: Any = None
        self.stamp = -1
        self.ring = 0
        self.free_event: Any = None
        self.views: dict[Any, Any] = {}

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat view of ``numel`` elements of ``dtype`` that starts ``offset`` bytes in."""
        with torch.inference_mode(False):
            return self.buffer[offset : offset + numel * dtype.itemsize].view(dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's elements lie in the slot."""
        return same_memory(tensor, self.buffer)

    @property
    def resident_bytes(self) -> int:
        """Bytes that are allocated now (see :meth:`free_storage`)."""
        return self.buffer.untyped_storage().nbytes()

    def free_storage(self) -> None:
        """Gives the bytes back to the allocator; views stay valid objects without memory."""
        if self.fixed:
            return
        self.buffer.untyped_storage().resize_(0)
        self.content = None

    def alloc_storage(self, num_bytes: int) -> None:
        """Takes at least ``num_bytes`` again; every view within them sees them, contents are lost.

        Freed first, so that the old bytes are neither copied nor alive beside the new ones.
        """
        if self.resident_bytes < num_bytes:
            self.free_storage()
            self.buffer.untyped_storage().resize_(num_bytes)


@dataclass(frozen=True)
class SlotRequest:
    """What one unit needs of a pool.

    Attributes:
        num_bytes: Bytes of the unit's gathered (or reduced) form.
        depth: Number of managed ancestors that own parameters. Units of different depth are alive
            at the same time, so they never share a slot.
        exclusive: Whether the unit stays gathered from forward to backward.
        maker: Number of the memory's maker; units of different makers never share a slot.
        ring: Number of the process group; units of different ones share a slot only by name.
        name: Of the one slot that the user chose for this unit, ``None`` for none.
    """

    num_bytes: int
    depth: int
    exclusive: bool
    maker: int = 0
    ring: int = 0
    name: Hashable = None

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Units of one kind share slots."""
        if self.name is not None:
            return (self.name, self.maker)
        return (self.depth, self.maker, self.ring)

    def slots(self, slots_per_depth: int) -> int:
        """How many slots the units of this kind share."""
        return slots_per_depth if self.name is None else 1


def assign_slots(requests: Sequence[SlotRequest], slots_per_depth: int) -> list[int]:
    """Colours units with slots so that units alive together never share one.

    Units of one depth and process group run one after the other and take the slots of their kind in
    turn; a unit that stays gathered has a slot of its own.

    Args:
        requests: One entry per unit, in execution order.
        slots_per_depth: How many slots units of one depth share, at least 1.

    Returns:
        The slot index of every unit, numbered from 0 without gaps.
    """
    next_slot = 0
    shared: dict[tuple[Hashable, ...], list[int]] = {}
    turns: dict[tuple[Hashable, ...], int] = {}
    result: list[int] = []
    for request in requests:
        kind = request.kind
        ring = shared.setdefault(kind, [])
        if request.exclusive or len(ring) < request.slots(slots_per_depth):
            slot, next_slot = next_slot, next_slot + 1
            if not request.exclusive:
                ring.append(slot)
                turns[kind] = 0
        else:
            slot = ring[turns[kind] % len(ring)]
            turns[kind] += 1
        result.append(slot)
    return result


def slot_sizes(requests: Sequence[SlotRequest], assignment: Sequence[int]) -> list[int]:
    """Bytes of every slot of an assignment: the largest request that uses it."""
    sizes = [0] * (max(assignment, default=-1) + 1)
    for request, slot in zip(requests, assignment, strict=True):
        sizes[slot] = max(sizes[slot], request.num_bytes)
    return sizes
