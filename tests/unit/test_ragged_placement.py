"""Placements without a process group."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from ya_fsdp.ragged import FlatRaggedShard, RaggedShard, RowRaggedShard, make_placement


def test_bounds_that_cut_no_row_give_a_row_placement() -> None:
    placement = make_placement((0, 10, 10, 35), (7, 5))
    assert isinstance(placement, RowRaggedShard)
    assert [placement.local_shape((7, 5), rank) for rank in range(3)] == [(2, 5), (0, 5), (5, 5)]
    assert isinstance(make_placement((0, 3, 3), (3,)), RowRaggedShard)


@pytest.mark.parametrize(
    "bounds, shape", [((0, 11, 35), (7, 5)), ((0, 0, 1), ()), ((0, 0, 0), (3, 0))]
)
def test_other_bounds_give_a_flat_placement(
    bounds: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    placement = make_placement(bounds, shape)
    assert isinstance(placement, FlatRaggedShard)
    for rank in range(2):
        assert placement.local_shape(shape, rank) == (bounds[rank + 1] - bounds[rank],)


def test_a_tensor_without_elements_is_cut_by_rows_where_rows_have_a_size() -> None:
    placement = make_placement((0, 0, 0), (0, 5))
    assert isinstance(placement, RowRaggedShard)
    assert placement.local_shape((0, 5), 1) == (0, 5)


def test_the_local_slice_is_a_view_of_the_ranks_elements() -> None:
    full = torch.arange(35.0).view(7, 5)
    rows = make_placement((0, 10, 35), (7, 5)).local_slice(full, 1)
    assert torch.equal(rows, full[2:])
    assert rows.data_ptr() == full[2:].data_ptr()
    flat = make_placement((0, 11, 35), (7, 5)).local_slice(full, 1)
    assert torch.equal(flat, full.view(-1)[11:])
    transposed = torch.arange(35.0).view(5, 7).t()
    piece = make_placement((0, 11, 35), (7, 5)).local_slice(transposed, 1)
    assert torch.equal(piece, transposed.reshape(-1)[11:])


def test_only_equal_cuts_are_equal() -> None:
    row, flat = RowRaggedShard((0, 5, 15), 5), FlatRaggedShard((0, 5, 15))
    assert row == RowRaggedShard((0, 5, 15), 5)
    assert hash(row) == hash(RowRaggedShard((0, 5, 15), 5))
    assert flat == FlatRaggedShard([0, 5, 15])
    others = [
        RowRaggedShard((0, 10, 15), 5),
        RowRaggedShard((0, 5, 15), 1),
        flat,
        Shard(0),
        Replicate(),
        "row",
    ]
    assert not any(row == other for other in others)
    assert not any(other == row for other in others)
    assert len({row, flat, *others[:2]}) == 4


def test_a_row_placement_answers_torchs_questions_about_shards() -> None:
    row, flat = RowRaggedShard((0, 5, 15), 5), FlatRaggedShard((0, 5, 15))
    assert row.is_shard() and row.is_shard(0) and not row.is_shard(1)
    assert isinstance(row, Shard) and isinstance(row, RaggedShard)
    assert row.dim == 0
    assert flat.is_shard() and not flat.is_replicate() and not flat.is_partial()
    assert row._local_shard_size_and_offset(3, 2, 1) == (2, 1)
    with pytest.raises(ValueError, match="asked for 4 rows on 2 ranks"):
        row._local_shard_size_and_offset(4, 2, 1)
    pieces, pads = row._split_tensor(torch.arange(15.0).view(3, 5), 2, with_padding=True)
    assert pads == [1, 0]
    assert torch.equal(pieces[0], torch.tensor([[0.0, 1, 2, 3, 4], [0] * 5]))
    with pytest.raises(NotImplementedError, match="go through Replicate"):
        row._to_new_shard_dim(None, None, 0, (3, 5), 1)
    with pytest.raises(NotImplementedError, match="reduce it to Replicate"):
        row._reduce_shard_tensor(None, None, "sum", 0)


@pytest.mark.parametrize("bounds", [(), (0,), (1, 2), (0, 3, 2)])
def test_bounds_that_do_not_ascend_from_zero_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending offsets"):
        FlatRaggedShard(bounds)


def test_a_bound_inside_a_row_is_refused_by_a_row_placement() -> None:
    with pytest.raises(ValueError, match=r"\(0, 4, 15\) cut rows of 5"):
        RowRaggedShard((0, 4, 15), 5)
    with pytest.raises(ValueError, match="do not end at the 12 elements"):
        make_placement((0, 4, 11), (3, 4))


@pytest.mark.parametrize(
    "placement", [RowRaggedShard((0, 5, 15), 5), FlatRaggedShard((0, 5, 15))], ids=["row", "flat"]
)
def test_a_placement_survives_copying_pickling_and_torch_save(placement: RaggedShard) -> None:
    file = io.BytesIO()
    torch.save(placement, file)
    file.seek(0)
    for again in (
        copy.deepcopy(placement),
        pickle.loads(pickle.dumps(placement)),
        torch.load(file, weights_only=True),
    ):
        assert type(again) is type(placement)
        assert again == placement and hash(again) == hash(placement)


def test_the_representation_is_short_for_many_ranks() -> None:
    assert repr(RowRaggedShard((0, 5, 15), 5)) == "RowRaggedShard(rows=[0, 1, 3])"
    many = repr(FlatRaggedShard(range(1025)))
    assert many == "FlatRaggedShard(elements=[0, 1, 2, 3, 4, 5, 6, 7, ..., 1024])"
