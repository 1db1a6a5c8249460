"""Where each parameter of a group lies in the flat buffer, and which rank owns which elements.

Everything here is integer arithmetic on element counts; tensors, dtypes and processes are somebody
else's business. A group's unsharded flat buffer is ``world_size`` shards of equal length, one after
the other, so rank ``r`` owns ``[r * shard_numel, (r + 1) * shard_numel)``. Parameters lie in it in
order, each contiguous, with padding between them where a shard boundary must not cut a block.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm
from typing import Literal

from ya_fsdp.packing import FAR, smallest_shard

COPY_BYTES = 16
"""Bytes on which collectives and vectorized kernels want every shard and every view to start."""

Granularity = Literal["auto", "row", "element"] | int


@dataclass(frozen=True, slots=True)
class ParamSpan:
    """The place of one parameter in the unsharded flat buffer.

    Attributes:
        offset: First element in the unsharded flat buffer.
        numel: Number of elements, possibly 0.
        block: Elements that no shard boundary may cut: boundaries fall on multiples of ``block``,
            counted from the parameter's own first element. 1 means anywhere.
    """

    offset: int
    numel: int
    block: int

    @property
    def end(self) -> int:
        """One past the last element in the unsharded flat buffer."""
        return self.offset + self.numel


@dataclass(frozen=True)
class ShardLayout:
    """The flat buffer of one group: equal shards, one per rank, and a span per parameter.

    Attributes:
        spans: One span per parameter, in the group's order.
        world_size: Number of shards.
        shard_numel: Elements per shard, a multiple of ``alignment``.
        alignment: Every shard and every parameter starts on a multiple of this many elements.

    Raises:
        ValueError: If the numbers contradict each other, e.g. two parameters overlap or a shard
            boundary cuts a block.
    """

    spans: tuple[ParamSpan, ...]
    world_size: int
    shard_numel: int
    alignment: int

    def __post_init__(self) -> None:
        _check_sizes(self.world_size, self.alignment)
        if self.shard_numel < 0 or self.shard_numel % self.alignment:
            raise ValueError(
                f"shard_numel must be a multiple of alignment {self.alignment}, "
                f"got {self.shard_numel}"
            )
        for index, span in enumerate(self.spans):
            self._check_span(index, span)
        for before, after in pairwise(self._in_buffer_order()):
            if before.end > after.offset:
                raise ValueError(f"parameters overlap in the flat buffer: {before} and {after}")

    def _check_span(self, index: int, span: ParamSpan) -> None:
        if span.numel < 0 or span.block < 1:
            raise ValueError(f"parameter {index} needs numel >= 0 and block >= 1, got {span}")
        if span.offset < 0 or span.offset % self.alignment:
            raise ValueError(
                f"parameter {index} must start on a multiple of alignment {self.alignment}, "
                f"got {span}"
            )
        if span.end > self.total_numel:
            raise ValueError(
                f"parameter {index} passes the end {self.total_numel} of the flat buffer: {span}"
            )
        if span.numel == 0:
            return
        first = (span.offset // self.shard_numel + 1) * self.shard_numel
        cut = first < span.end and (first - span.offset) % span.block != 0
        # Boundaries are shard_numel apart, so the first one and the distance settle all of them.
        cut = cut or (first + self.shard_numel < span.end and self.shard_numel % span.block != 0)
        if cut:
            raise ValueError(
                f"a shard boundary cuts a block of parameter {index}: {span} "
                f"with shards of {self.shard_numel} elements"
            )

    def _in_buffer_order(self) -> list[ParamSpan]:
        return sorted((span for span in self.spans if span.numel), key=lambda span: span.offset)

    @property
    def total_numel(self) -> int:
        """Elements of the unsharded flat buffer, padding included."""
        return self.world_size * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements of the unsharded flat buffer that belong to no parameter."""
        return self.total_numel - sum(span.numel for span in self.spans)

    def owned(self, rank: int, i: int) -> tuple[int, int]:
        """The elements of parameter ``i`` that ``rank`` owns.

        Args:
            rank: Rank in the shard group.
            i: Index of the parameter.

        Returns:
            ``[start, end)`` in the parameter's own flattened coordinates; ``start == end`` if the
            rank owns none of it.

        Raises:
            IndexError: If ``rank`` or ``i`` is out of range.
        """
        self._check_rank(rank)
        span, begin = self.spans[i], rank * self.shard_numel
        return (
            _clamp(begin - span.offset, span.numel),
            _clamp(begin + self.shard_numel - span.offset, span.numel),
        )

    def local_range(self, rank: int, i: int) -> tuple[int, int]:
        """Where the elements of :meth:`owned` lie inside the rank's shard.

        Args:
            rank: Rank in the shard group.
            i: Index of the parameter.

        Returns:
            ``[start, end)`` with ``0 <= start <= end <= shard_numel``,
            of the same length.

        Raises:
            IndexError: If ``rank`` or ``i`` is out of range.
        """
        self._check_rank(rank)
        span, begin = self.spans[i], rank * self.shard_numel
        return (
            _clamp(span.offset - begin, self.shard_numel),
            _clamp(span.end - begin, self.shard_numel),
        )

    def bounds(self, i: int) -> tuple[int, ...]:
        """How parameter ``i`` is divided among the ranks.

        Args:
            i: Index of the parameter.

        Returns:
            ``world_size + 1`` numbers that never fall, from 0 to ``numel``: rank ``r`` owns
            elements ``bounds[r]`` to ``bounds[r + 1]`` of the flattened parameter.
        """
        span = self.spans[i]
        return tuple(
            _clamp(rank * self.shard_numel - span.offset, span.numel)
            for rank in range(self.world_size + 1)
        )

    def padding_ranges(self) -> tuple[tuple[int, int], ...]:
        """The gaps of the unsharded flat buffer, ``[start, end)`` each, in ascending order."""
        return tuple(self._gaps())

    def _gaps(self) -> Iterator[tuple[int, int]]:
        position = 0
        for span in self._in_buffer_order():
            if position < span.offset:
                yield position, span.offset
            position = span.end
        if position < self.total_numel:
            yield position, self.total_numel

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank must be in [0, {self.world_size}), got {rank}")


def plan_layout(
    numels: Sequence[int], blocks: Sequence[int], world_size: int, alignment: int
) -> ShardLayout:
    """Finds the smallest equal shards that hold the parameters in order and cut no block.

    Args:
        numels: Elements of each parameter; 0 is legal.
        blocks: Elements of each parameter that no shard boundary may cut, counted from its first.
        world_size: Number of ranks that share the parameters; may exceed the number of elements.
        alignment: Every shard and every parameter starts on a multiple of this many elements.

    Returns:
        The layout with the least ``shard_numel`` that this order of parameters allows. It is 0 if
        and only if all parameters are empty.

    Raises:
        ValueError: If the arguments have different lengths, or a number is out of its range.
    """
    _check_sizes(world_size, alignment)
    _check_params(numels, blocks)
    shard_numel, offsets = _pack(numels, blocks, world_size, alignment)
    spans = tuple(map(ParamSpan, offsets, numels, blocks))
    return ShardLayout(spans, world_size, shard_numel, alignment)


def choose_blocks(
    numels: Sequence[int],
    row_numels: Sequence[int],
    granularities: Sequence[Granularity],
    world_size: int,
    alignment: int,
    *,
    max_padding: float = 0.01,
) -> tuple[int, ...]:
    """Decides for each parameter which elements must stay together on one rank.

    Whole rows (``"row"``) make a shard an ordinary N-D tensor, single elements (``"element"``) pad
    nothing. ``"auto"`` takes rows wherever the shard grows by at most ``max_padding`` over the one
    that has every ``"auto"`` parameter cut by elements: for all of them if that is possible, else
    for as many of the largest families of equal rows as possible, smallest members first.

    Args:
        numels: Elements of each parameter.
        row_numels: Elements of one dim-0 row of each parameter; 1 for 0-D and 1-D ones.
        granularities: ``"auto"``, ``"row"``, ``"element"`` or a number of elements. A number of
            at least ``numel`` keeps the whole parameter on one rank.
        world_size: Number of ranks that share the parameters.
        alignment: As in :func:`plan_layout`.
        max_padding: Fraction of the shard that ``"auto"`` may spend on whole rows.

    Returns:
        A block per parameter, for :func:`plan_layout`.

    Raises:
        ValueError: If the arguments have different lengths, or a value is not one of those above.
    """
    _check_sizes(world_size, alignment)
    if not len(numels) == len(row_numels) == len(granularities):
        raise ValueError(
            "numels, row_numels and granularities must have equal lengths, got "
            f"{len(numels)}, {len(row_numels)} and {len(granularities)}"
        )
    rows = [max(row, 1) for row in row_numels]
    blocks = [
        _explicit_block(granularity, numel, row)
        for numel, row, granularity in zip(numels, rows, granularities, strict=True)
    ]
    _check_params(numels, blocks)
    families: dict[int, list[int]] = {}
    for i, granularity in enumerate(granularities):
        if granularity == "auto" and rows[i] > 1:
            families.setdefault(rows[i], []).append(i)
    if not families:
        return tuple(blocks)
    by_elements, _ = _pack(numels, blocks, world_size, alignment)
    limit = int(by_elements * (1 + max_padding))

    def by_rows_if_cheap(members: Iterable[int]) -> bool:
        trial = list(blocks)
        for i in members:
            trial[i] = rows[i]
        if smallest_shard(numels, trial, world_size, alignment, limit) is None:
            return False
        blocks[:] = trial
        return True

    if by_rows_if_cheap(i for members in families.values() for i in members):
        return tuple(blocks)
    for members in sorted(families.values(), key=lambda family: -sum(numels[i] for i in family)):
        pending = [sorted(members, key=lambda i: numels[i])]
        while pending:
            part = pending.pop()
            if not by_rows_if_cheap(part) and len(part) > 1:
                pending += [part[len(part) // 2 :], part[: len(part) // 2]]
    return tuple(blocks)


def group_alignment(itemsizes: Iterable[int]) -> int:
    """Elements on which shards must start so that they start on 16 bytes in every dtype.

    Args:
        itemsizes: Bytes per element of every dtype in which the group is gathered or reduced.

    Returns:
        The least number of elements that fills a multiple of 16 bytes in each of the dtypes.

    Raises:
        ValueError: If there is no dtype, or an item size is below 1.
    """
    sizes = tuple(itemsizes)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"itemsizes must be positive and at least one, got {sizes}")
    return lcm(*(COPY_BYTES // gcd(COPY_BYTES, size) for size in sizes))


def _explicit_block(granularity: Granularity, numel: int, row_numel: int) -> int:
    if granularity == "row":
        return row_numel
    if granularity in ("auto", "element"):
        return 1
    if isinstance(granularity, bool) or not isinstance(granularity, int) or granularity < 1:
        raise ValueError(
            "granularity must be 'auto', 'row', 'element' or a number of elements >= 1, "
            f"got {granularity!r}"
        )
    return min(granularity, max(numel, 1))


def _check_sizes(world_size: int, alignment: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1, got {alignment}")


def _check_params(numels: Sequence[int], blocks: Sequence[int]) -> None:
    if len(numels) != len(blocks):
        raise ValueError(
            f"numels and blocks must have equal lengths, got {len(numels)} and {len(blocks)}"
        )
    for index, (numel, block) in enumerate(zip(numels, blocks, strict=True)):
        if numel < 0 or block < 1:
            raise ValueError(
                f"parameter {index} needs numel >= 0 and block >= 1, got {numel} and {block}"
            )


def _clamp(value: int, upper: int) -> int:
    return max(0, min(value, upper))


def _pack(
    numels: Sequence[int], blocks: Sequence[int], world_size: int, alignment: int
) -> tuple[int, list[int]]:
    packed = smallest_shard(numels, blocks, world_size, alignment, FAR)
    assert packed is not None, "one shard as long as the group always holds it"
    return packed
