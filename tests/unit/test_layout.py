"""The shard layout: compared with exhaustive search, with painted buffers and with known layers."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ya_fsdp import packing
from ya_fsdp.layout import (
    ParamSpan,
    ShardLayout,
    choose_blocks,
    group_alignment,
    plan_layout,
)

GPT_OSS_120B = {
    "input_norm": (2880,),
    "sinks": (64,),
    "q": (4096, 2880),
    "q_bias": (4096,),
    "k": (512, 2880),
    "k_bias": (512,),
    "v": (512, 2880),
    "v_bias": (512,),
    "o": (2880, 4096),
    "o_bias": (2880,),
    "post_norm": (2880,),
    "router": (128, 2880),
    "router_bias": (128,),
    "gate_up": (128, 2880, 5760),
    "gate_up_bias": (128, 5760),
    "down": (128, 2880, 2880),
    "down_bias": (128, 2880),
}
LLAMA_3_70B = {
    "input_norm": (8192,),
    "q": (8192, 8192),
    "k": (1024, 8192),
    "v": (1024, 8192),
    "o": (8192, 8192),
    "post_norm": (8192,),
    "gate": (28672, 8192),
    "up": (28672, 8192),
    "down": (8192, 28672),
}
LAYERS = {"gpt-oss-120B": GPT_OSS_120B, "Llama-3-70B": LLAMA_3_70B}


def exhaustive_shard_numel(
    numels: list[int], blocks: list[int], world_size: int, alignment: int
) -> int:
    """Tries every shard length and every offset of every parameter."""
    shard = 0
    while True:
        total = world_size * shard
        ends = {0}
        for numel, block in zip(numels, blocks, strict=True):
            if numel == 0:
                continue
            boundaries = range(shard, total, shard) if shard else range(0)
            ends = {
                offset + numel
                for offset in range(0, total - numel + 1, alignment)
                if any(end <= offset for end in ends)
                and all(
                    (boundary - offset) % block == 0
                    for boundary in boundaries
                    if offset < boundary < offset + numel
                )
            }
        if ends:
            return shard
        shard += alignment


def padding_percent(layout: ShardLayout) -> float:
    return 100 * layout.padding_numel / sum(span.numel for span in layout.spans)


@st.composite
def groups(draw: st.DrawFn, largest: int, most: int) -> tuple[list[int], list[int]]:
    sizes = st.one_of(st.integers(0, largest), st.integers(0, min(largest, 40)))
    numels = draw(st.lists(sizes, max_size=most))
    block = st.one_of(st.just(1), st.integers(1, min(largest, 64)), st.integers(1, largest))
    blocks = draw(st.lists(block, min_size=len(numels), max_size=len(numels)))
    return numels, blocks


@settings(max_examples=300, deadline=None)
@given(groups(largest=14, most=4), st.integers(1, 4), st.integers(1, 4))
def test_no_smaller_shard_exists_for_tiny_groups(
    group: tuple[list[int], list[int]], world_size: int, alignment: int
) -> None:
    layout = plan_layout(*group, world_size, alignment)
    assert layout.shard_numel == exhaustive_shard_numel(*group, world_size, alignment)


@settings(max_examples=100, deadline=None)
@given(
    groups(largest=10**6, most=8),
    st.one_of(st.integers(1, 8), st.integers(1, 4096)),
    st.sampled_from([1, 2, 4, 8, 16, 64, 12]),
)
def test_ranks_cover_every_parameter_once_in_whole_blocks(
    group: tuple[list[int], list[int]], world_size: int, alignment: int
) -> None:
    numels, blocks = group
    layout = plan_layout(numels, blocks, world_size, alignment)
    assert layout.shard_numel % alignment == 0
    assert layout.total_numel == world_size * layout.shard_numel
    assert [span.numel for span in layout.spans] == numels
    position = 0
    for i, span in enumerate(layout.spans):
        assert span.offset >= position
        assert span.offset % alignment == 0
        position = span.offset + span.numel
        bounds = layout.bounds(i)
        assert len(bounds) == world_size + 1
        assert bounds[0] == 0 and bounds[-1] == span.numel
        assert list(bounds) == sorted(bounds)
        assert all(bound % blocks[i] == 0 for bound in bounds if bound < span.numel)
        for rank in {0, world_size // 3, world_size // 2, world_size - 1}:
            start, end = layout.owned(rank, i)
            assert (start, end) == (bounds[rank], bounds[rank + 1])
            local_start, local_end = layout.local_range(rank, i)
            assert 0 <= local_start <= local_end <= layout.shard_numel
            assert local_end - local_start == end - start
            if start < end:
                assert rank * layout.shard_numel + local_start == span.offset + start
    assert position <= layout.total_numel


@settings(max_examples=100, deadline=None)
@given(groups(largest=60, most=6), st.integers(1, 9), st.integers(1, 8))
def test_shards_and_gaps_agree_with_a_painted_buffer(
    group: tuple[list[int], list[int]], world_size: int, alignment: int
) -> None:
    layout = plan_layout(*group, world_size, alignment)
    buffer: list[tuple[int, int] | None] = [None] * layout.total_numel
    for i, span in enumerate(layout.spans):
        for element in range(span.numel):
            assert buffer[span.offset + element] is None
            buffer[span.offset + element] = (i, element)
    for rank in range(world_size):
        shard = buffer[rank * layout.shard_numel :][: layout.shard_numel]
        for i in range(len(layout.spans)):
            start, end = layout.owned(rank, i)
            local_start, local_end = layout.local_range(rank, i)
            mine = [(i, element) for element in range(start, end)]
            assert [cell for cell in shard if cell is not None and cell[0] == i] == mine
            assert shard[local_start:local_end] == mine
    gaps = [cell for start, end in layout.padding_ranges() for cell in range(start, end)]
    assert gaps == [index for index, cell in enumerate(buffer) if cell is None]
    assert layout.padding_numel == len(gaps)


def test_empty_parameters_take_no_place_and_an_empty_group_has_no_shard() -> None:
    layout = plan_layout([0, 0], [1, 5], world_size=3, alignment=8)
    assert (layout.shard_numel, layout.total_numel, layout.padding_numel) == (0, 0, 0)
    assert layout.bounds(1) == (0, 0, 0, 0)
    assert layout.owned(2, 0) == layout.local_range(2, 0) == (0, 0)
    assert plan_layout([], [], world_size=3, alignment=8).shard_numel == 0
    between = plan_layout([8, 0, 8], [1, 1, 1], world_size=2, alignment=8)
    assert between.shard_numel == 8
    assert [between.owned(rank, 1) for rank in range(2)] == [(0, 0), (0, 0)]


def test_a_group_smaller_than_the_world_has_one_alignment_per_rank() -> None:
    layout = plan_layout([3], [1], world_size=4, alignment=8)
    assert layout.shard_numel == 8
    assert layout.bounds(0) == (0, 3, 3, 3, 3)
    assert layout.padding_ranges() == ((3, 32),)


def test_a_block_larger_than_the_parameter_keeps_it_on_one_rank() -> None:
    layout = plan_layout([48, 48, 48], [1000, 1000, 1000], world_size=2, alignment=16)
    assert layout.shard_numel == 96
    assert [layout.bounds(i) for i in range(3)] == [(0, 48, 48), (0, 48, 48), (0, 0, 48)]


@pytest.mark.parametrize(
    "layer, rows, percent",
    [
        ("gpt-oss-120B", 0, 0.0),
        ("gpt-oss-120B", 1, 0.05),
        ("gpt-oss-120B", 16, 0.60),
        ("Llama-3-70B", 0, 0.0),
        ("Llama-3-70B", 1, 1.22),
        ("Llama-3-70B", 16, 9.80),
    ],
)
def test_padding_on_256_ranks_is_the_published_one(layer: str, rows: int, percent: float) -> None:
    shapes = LAYERS[layer].values()
    # The rows of a fused expert are those of its matrices, not whole experts.
    blocks = [rows * shape[-1] if rows and len(shape) > 1 else 1 for shape in shapes]
    layout = plan_layout([prod(shape) for shape in shapes], blocks, world_size=256, alignment=64)
    assert padding_percent(layout) == pytest.approx(percent, abs=0.005)


def test_whole_matrices_are_planned_in_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    pack = packing._pack
    monkeypatch.setattr(packing, "_pack", lambda *args: tries.append(args[1]) or pack(*args))
    numels = [prod(shape) for shape in LLAMA_3_70B.values()]
    layout = plan_layout(numels, numels, world_size=2, alignment=8)
    # Norms, attention and gate on one rank, up and down on the other: the second is the larger.
    assert layout.shard_numel == 2 * 28672 * 8192
    assert tries[-1] == layout.shard_numel
    assert len(tries) < 20


def test_auto_takes_rows_for_all_where_they_are_cheap() -> None:
    numels = [prod(shape) for shape in LLAMA_3_70B.values()]
    rows = [prod(shape[1:]) for shape in LLAMA_3_70B.values()]
    assert choose_blocks(numels, rows, ["auto"] * 9, 64, 8) == tuple(rows)
    assert padding_percent(plan_layout(numels, rows, 64, 8)) < 1


def test_auto_cuts_by_elements_only_what_would_pad_more_than_a_percent() -> None:
    numels = [prod(shape) for shape in LLAMA_3_70B.values()]
    rows = [prod(shape[1:]) for shape in LLAMA_3_70B.values()]
    blocks = choose_blocks(numels, rows, ["auto"] * 9, 256, 8)
    assert blocks == (*rows[:-1], 1)
    assert padding_percent(plan_layout(numels, blocks, 256, 8)) < 1
    assert padding_percent(plan_layout(numels, rows, 256, 8)) > 1


def test_auto_keeps_rows_of_the_small_members_of_a_family() -> None:
    # 40 rows cannot be dealt evenly to 16 ranks; one row always fits.
    numels, rows = [1024, 40 * 1024, 2**22], [1024, 1024, 1]
    blocks = choose_blocks(numels, rows, ["auto"] * 3, 16, 8)
    assert blocks == (1024, 1024, 1)
    assert choose_blocks(numels[:2], rows[:2], ["auto"] * 2, 16, 8) == (1024, 1)


def test_granularities_that_are_spelled_out_are_taken_as_they_are() -> None:
    blocks = choose_blocks(
        [100, 100, 100, 100, 0], [10, 10, 10, 10, 0], ["row", "element", 32, 1000, "row"], 7, 8
    )
    assert blocks == (10, 1, 32, 100, 1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=6),
    st.integers(1, 64),
    st.sampled_from([4, 8]),
)
def test_auto_never_pads_more_than_a_percent_over_elements(
    shapes: list[tuple[int, int]], world_size: int, alignment: int
) -> None:
    numels, rows = [prod(shape) for shape in shapes], [shape[1] for shape in shapes]
    blocks = choose_blocks(numels, rows, ["auto"] * len(shapes), world_size, alignment)
    assert all(block in (1, row) for block, row in zip(blocks, rows, strict=True))
    # By elements there are no gaps but those up to the alignment.
    aligned = sum(-(-numel // alignment) * alignment for numel in numels)
    by_elements = -(-aligned // (world_size * alignment)) * alignment
    assert plan_layout(numels, blocks, world_size, alignment).shard_numel <= 1.01 * by_elements


def test_the_allowed_padding_is_the_callers_choice() -> None:
    numels, rows, auto = [100, 10], [10, 1], ["auto", "auto"]
    assert choose_blocks(numels, rows, auto, 2, 8) == (1, 1)
    assert choose_blocks(numels, rows, auto, 2, 8, max_padding=0.5) == (10, 1)


@pytest.mark.parametrize(
    "itemsizes, numel", [([2, 4], 8), ([4], 4), ([1, 4], 16), ([8], 2), ([16], 1), ([16, 2], 8)]
)
def test_aligned_shards_start_on_sixteen_bytes_in_every_dtype(
    itemsizes: list[int], numel: int
) -> None:
    assert group_alignment(itemsizes) == numel
    assert all(numel * size % 16 == 0 for size in itemsizes)
    assert any((numel // 2) * size % 16 for size in itemsizes) or numel == 1


@pytest.mark.parametrize("granularity", ["rows", 0, -4, True, 2.5, None])
def test_an_unknown_granularity_is_refused_with_its_value(granularity: object) -> None:
    with pytest.raises(ValueError, match=repr(granularity)):
        choose_blocks([4], [1], [granularity], 1, 1)  # type: ignore[list-item]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([4], [1, 1], 1, 1), "lengths, got 1 and 2"),
        (([-4], [1], 1, 1), "parameter 0 .* got -4 and 1"),
        (([4], [0], 1, 1), "parameter 0 .* got 4 and 0"),
        (([4], [1], 0, 1), "world_size .* got 0"),
        (([4], [1], 1, 0), "alignment .* got 0"),
    ],
)
def test_impossible_arguments_are_refused_with_their_values(
    arguments: tuple[list[int], list[int], int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_layout(*arguments)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2, 1 and 2"):
        choose_blocks([4, 4], [1], ["auto", "auto"], 1, 1)
    with pytest.raises(ValueError, match=r"got \(\)"):
        group_alignment([])
    with pytest.raises(ValueError, match=r"got \(4, 0\)"):
        group_alignment([4, 0])


@pytest.mark.parametrize(
    "spans, shard_numel, message",
    [
        ([(0, 8, 1), (4, 4, 1)], 8, "overlap"),
        ([(2, 4, 1)], 8, "start on a multiple of alignment 4"),
        ([(12, 8, 1)], 8, "passes the end 16"),
        ([(0, 12, 3)], 8, "cuts a block of parameter 0"),
        ([(4, 12, 3)], 4, "cuts a block of parameter 0"),
        ([(0, 8, 1)], 6, "multiple of alignment 4, got 6"),
        ([(0, 4, 0)], 8, "block >= 1"),
    ],
)
def test_a_layout_that_contradicts_itself_cannot_be_made(
    spans: list[tuple[int, int, int]], shard_numel: int, message: str
) -> None:
    world_size = 4 if shard_numel == 4 else 2
    with pytest.raises(ValueError, match=message):
        ShardLayout(tuple(ParamSpan(*span) for span in spans), world_size, shard_numel, 4)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_owns_nothing_and_raises(rank: int) -> None:
    layout = plan_layout([8], [1], world_size=2, alignment=4)
    with pytest.raises(IndexError, match=f"got {rank}"):
        layout.owned(rank, 0)
    with pytest.raises(IndexError, match=f"got {rank}"):
        layout.local_range(rank, 0)
