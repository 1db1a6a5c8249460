"""Flat ranges as boxes, against indices written into a whole tensor."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ya_fsdp.ragged import flat_range_to_boxes

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_cover_a_range_once_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    boxes = flat_range_to_boxes(shape, start, end)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    numbers = torch.arange(numel).view(shape)
    covered: list[int] = []
    for box in boxes:
        assert box.start == len(covered)
        region = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert numbers[region].shape == box.sizes
        assert numbers[region].numel() == box.numel
        covered += numbers[region].reshape(-1).tolist()
    assert covered == list(range(start, end))


def test_whole_rows_are_one_box() -> None:
    assert flat_range_to_boxes((7, 2, 3), 12, 30) == [((2, 0, 0), (3, 2, 3), 0)]


def test_a_range_that_cuts_every_dim_at_both_ends_has_the_most_boxes() -> None:
    boxes = flat_range_to_boxes((4, 4, 4), 21, 43)
    assert [(box.offsets, box.sizes) for box in boxes] == [
        ((1, 1, 1), (1, 1, 3)),
        ((1, 2, 0), (1, 2, 4)),
        ((2, 0, 0), (1, 2, 4)),
        ((2, 2, 0), (1, 1, 3)),
    ]
    assert len(flat_range_to_boxes((4, 4, 4), 5, 59)) == 5


@pytest.mark.parametrize("start, end", [(-1, 2), (3, 2), (0, 13)])
def test_a_range_outside_the_tensor_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="does not lie in a tensor of 12 elements"):
        flat_range_to_boxes((3, 4), start, end)
