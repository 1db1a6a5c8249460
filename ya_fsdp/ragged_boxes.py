"""Flat element ranges of row-major tensors as rectangular boxes. Integers only."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular region of a tensor that is contiguous in row-major order.

    Attributes:
        offsets: First index of the region in each dim.
        sizes: Extent of the region in each dim.
        start: Position of the region's first element in the flattened range it was cut from.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.sizes)


def flat_range_to_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Cuts ``[start, end)`` of a flattened row-major tensor into boxes.

    Args:
        shape: Shape of the whole tensor.
        start: First element of the range.
        end: One past the last element.

    Returns:
        At most ``2 * len(shape) - 1`` boxes in row-major order (one at most for a 0-dim tensor),
        which cover the range exactly once. Their ``start`` counts from the beginning of the range.

    Raises:
        ValueError: If the range does not lie in the tensor.
    """
    numel = prod(shape)
    if not 0 <= start <= end <= numel:
        raise ValueError(f"range [{start}, {end}) does not lie in a tensor of {numel} elements")
    if start == end:
        return []
    if not shape:
        return [Box((), (), 0)]
    boxes: list[Box] = []
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    position = start
    while position < end:
        dim = _outermost_full_dim(strides, position, end)
        offsets = tuple(position // strides[d] % shape[d] for d in range(len(shape)))
        room = shape[dim] - offsets[dim]
        count = min((end - position) // strides[dim], room)
        sizes = (*(1,) * dim, count, *shape[dim + 1 :])
        boxes.append(Box(offsets, sizes, position - start))
        position += count * strides[dim]
    return boxes


def _outermost_full_dim(strides: Sequence[int], position: int, end: int) -> int:
    """The first dim of which a whole index starts at ``position`` and ends by ``end``."""
    for dim, stride in enumerate(strides):
        if position % stride == 0 and position + stride <= end:
            return dim
    raise AssertionError("the innermost stride is 1, so some dim always fits")
