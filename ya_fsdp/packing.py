"""The least equal shards that hold parameters in a given order without cutting a block.

For a given shard length, putting each parameter at its earliest legal offset is optimal, because
what is legal depends on the absolute position alone. Which lengths are feasible is not monotone, so
the search goes through the candidates in ascending order. It skips those that must fail for the
same reason as the one just tried: as the shard grows by ``d``, every offset grows by a fixed
multiple of ``d`` (its slope, the number of the boundary that it hangs on) until some parameter
changes its way of lying there, and that first change is known.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm


@dataclass(frozen=True, slots=True)
class _Item:
    """A parameter: its elements, and those from its start to the end of the group, aligned.

    Both boundaries and offsets are multiples of the alignment, so a boundary inside lies a multiple
    of ``step = lcm(alignment, block)`` behind the offset.
    """

    numel: int
    step: int
    rest: int


@dataclass(frozen=True, slots=True)
class _Place:
    """An offset, its slope, and the least growth of the shard that may change either's rule."""

    offset: int
    slope: int
    change: int


FAR = sys.maxsize
_NOWHERE = -1


def smallest_shard(
    numels: Sequence[int], blocks: Sequence[int], world_size: int, alignment: int, limit: int
) -> tuple[int, list[int]] | None:
    """Finds the least shard length and the offset of each parameter.

    Args:
        numels: Elements of each parameter, at least 0.
        blocks: Elements of each parameter that no shard boundary may cut, at least 1.
        world_size: Number of shards.
        alignment: Shard length and offsets are multiples of it.
        limit: Largest shard length of interest.

    Returns:
        The length and the offsets in the unsharded buffer, or ``None`` if the length would be above
        ``limit``.
    """
    items = _items(numels, blocks, alignment)
    total = items[0].rest if items else 0
    lowest = max((min(pair) for pair in zip(numels, blocks, strict=True)), default=0)
    lowest = _round_up(max(lowest, -(-total // world_size)), alignment)
    # A parameter of more than two shards has two boundaries inside, one shard apart, so its step
    # divides the shard. Up to the next half of a parameter, the same parameters are that long.
    halves = {_round_up(-(-item.numel // 2), alignment) for item in items}
    starts = sorted({lowest, *(half for half in halves if half > lowest)})
    for start, stop in pairwise([*starts, FAR]):
        stride = lcm(alignment, *(item.step for item in items if item.numel > 2 * start))
        shard = _round_up(start, stride)
        while shard < stop and shard <= limit:
            offsets, growth = _pack(items, shard, world_size, alignment, stride)
            if offsets is not None:
                return shard, offsets
            # At `total` everything fits on the first rank, so there is no need to pass it.
            growth = max(min(growth, total - shard), 1)
            shard += _round_up(growth, stride)
    return None


def _items(numels: Sequence[int], blocks: Sequence[int], alignment: int) -> list[_Item]:
    items, rest = [], 0
    for numel, block in zip(reversed(numels), reversed(blocks), strict=True):
        rest += _round_up(numel, alignment)
        items.append(_Item(numel, lcm(alignment, block), rest))
    return items[::-1]


def _pack(
    items: list[_Item], shard: int, world_size: int, alignment: int, stride: int
) -> tuple[list[int] | None, int]:
    """Offsets in shards of this length, or ``None`` and a growth below which there are none.

    ``stride`` divides the length and every growth that will be asked for.
    """
    offsets: list[int] = []
    position = slope = 0
    growth = FAR
    capacity = world_size * shard
    for item in items:
        if item.numel == 0:
            offsets.append(position)
            continue
        place = _place(item, position, slope, shard, alignment, stride)
        growth = min(growth, place.change)
        if place.offset == _NOWHERE:
            return None, growth
        slope = place.slope
        missing = place.offset + item.rest - capacity
        if missing > 0:
            if slope < world_size:
                growth = min(growth, -(-missing // (world_size - slope)))
            return None, growth
        offsets.append(place.offset)
        position = _round_up(place.offset + item.numel, alignment)
    return offsets, growth


def _place(
    item: _Item, position: int, slope: int, shard: int, alignment: int, stride: int
) -> _Place:
    """The earliest legal offset from ``position`` on."""
    if item.step == alignment:
        return _Place(position, slope, FAR)
    boundary = position // shard + 1
    room = boundary * shard - position
    change = FAR
    if slope < boundary - 1:
        # The boundary behind moves faster than the position and will overtake it.
        change = (shard - room) // (boundary - 1 - slope) + 1
    if item.numel <= room:
        return _Place(position, slope, change)
    if shard % item.step == 0:
        fits = -(-(item.numel - room) // (boundary - slope))
        change = min(change, fits) if stride % item.step == 0 else stride
        return _Place(_round_up(position, item.step), slope, change)
    change = min(change, item.step - shard % item.step)
    # One boundary at most may fall inside: this one, or the next for a start in the next shard.
    for number, space, start_slope in ((boundary, room, slope), (boundary + 1, shard, boundary)):
        if item.numel <= space:
            return _Place((number - 1) * shard, start_slope, change)
        steps = space // item.step
        missing = min(item.numel, (steps + 1) * item.step) - space
        change = min(change, -(-missing // (number - start_slope)))
        behind = item.numel - steps * item.step
        if steps and behind <= shard:
            return _Place(number * shard - steps * item.step, number, change)
        if steps:
            change = min(change, behind - shard)
    return _Place(_NOWHERE, 0, change)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
