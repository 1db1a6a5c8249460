"""Units that stay gathered within a budget: which, what is no longer sent, and the same values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import (
    MLP,
    assert_same_gradients,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    reference_backward,
    root,
    sgd_pair,
    train_step,
)
from tests.distributed.test_schedule import Recorder
from tests.harness import WorkerPool, uses_nccl
from ya_fsdp import residency, set_resident_budget
from ya_fsdp.build import schedule_of, state_of


def six_layers() -> nn.Module:
    return MLP(6)


def layer_bytes(model: Any) -> int:
    state = state_of(model.layers[0])
    assert state is not None
    return state.unit.gather_bytes


def counted_step(model: Any, reference: Any, rank: int, xs: Any, recorder: Recorder) -> Any:
    model.zero_grad()
    reference.zero_grad()
    recorder.take()
    output = loss(model, xs[rank])
    forward = recorder.take()["gather"]
    output.backward()
    backward = recorder.take()["gather"]
    reference_backward(reference, xs)
    assert_same_gradients(model, reference)
    return forward, backward


def budgets(rank: int, world: int) -> list[tuple[Any, list[str], tuple[int, int]]]:
    model, reference = pair(six_layers, nested)
    recorder = Recorder.on(model)
    optimizers = sgd_pair(model, reference)
    size = layer_bytes(model)
    found = []
    for budget in (None, 0, size - 1, size, 3 * size + 1, 100 * size, 2 * size, None):
        names = set_resident_budget(model, budget)
        for step in range(3):
            xs = inputs(world, seed=step)
            counts = counted_step(model, reference, rank, xs, recorder)
            for optimizer in optimizers:
                optimizer.step()
        found.append((None if budget is None else budget // size, names, counts))
    return found


def test_gathers_of_a_backward_fall_by_the_units_that_fit(world2: WorkerPool) -> None:
    """Six layers share two buffers, which still hold two of them when backward begins."""
    late = [f"layers.{i}" for i in range(6)]
    expected = [
        (None, [], (7, 4)),
        (0, [], (7, 4)),
        (0, [], (7, 4)),
        (1, late[5:], (7, 3)),
        (3, late[3:], (7, 1)),
        (100, late, (7, 0)),
        (2, late[4:], (7, 2)),
        (None, [], (7, 4)),
    ]
    for found in world2.run(budgets):
        assert found == expected


def own_buffers(rank: int, world: int) -> None:
    model, reference = pair(six_layers, nested)
    set_resident_budget(model, 2 * layer_bytes(model))
    for step in range(3):
        train_step(model, reference, rank, inputs(world, seed=step))
    slots = [state_of(layer).unit.slot for layer in model.layers]  # type: ignore[union-attr]
    uses = Counter(id(slot) for slot in slots)
    assert [uses[id(slot)] for slot in slots] == [2, 2, 2, 2, 1, 1]


def test_units_that_stay_have_buffers_of_their_own(world2: WorkerPool) -> None:
    world2.run(own_buffers)


def free_ones(rank: int, world: int) -> None:
    for shard in (root, leaf, nested):
        model, reference = pair(lambda: MLP(2), shard)
        expected = ["layers.0", "layers.1", "head"] if shard is leaf else []
        assert set_resident_budget(model, 1 << 40) == expected
        train_step(model, reference, rank, inputs(world))
    model, _ = pair(six_layers, nested)
    model.layers[5].set_reshard_after_forward(False)
    assert set_resident_budget(model, 1 << 40) == [f"layers.{i}" for i in range(5)]
    set_resident_budget(model, None)
    reshards = [state_of(e).unit.reshard_after_forward for e in model.layers]  # type: ignore[union-attr]
    assert reshards == [True] * 5 + [False], "what the user said comes back"


def test_units_that_are_gathered_once_anyway_take_nothing_of_the_budget(
    world2: WorkerPool,
) -> None:
    world2.run(free_ones)


def whole_shards(rank: int, world: int) -> None:
    model, reference = pair(six_layers, nested)
    assert set_resident_budget(model, 1 << 40) == []
    train_step(model, reference, rank, inputs(world))


def test_one_rank_alone_has_no_traffic_to_save(world1: WorkerPool) -> None:
    world1.run(whole_shards)


def after_the_first_step(rank: int, world: int) -> list[tuple[int, int]]:
    model, reference = pair(six_layers, nested)
    recorder = Recorder.on(model)
    optimizers = sgd_pair(model, reference)
    size = layer_bytes(model)
    # Ranks with different free memory have to agree: three units fit on one, two on the other.
    residency._Watch(schedule_of(model), lambda: (3 - rank) * size)
    counts = []
    for micro in range(6):
        xs = inputs(world, seed=micro)
        counts.append(counted_step(model, reference, rank, xs, recorder))
        if micro % 2:  # two microbatches a step
            for optimizer in optimizers:
                optimizer.step()
    assert not schedule_of(model).after_backward, "it chooses once"
    set_resident_budget(model, None)
    counts.append(counted_step(model, reference, rank, inputs(world), recorder))
    return counts


def test_auto_waits_for_the_first_step_and_takes_the_least_of_all_ranks(
    world2: WorkerPool,
) -> None:
    for counts in world2.run(after_the_first_step):
        assert counts == [(7, 4)] * 3 + [(7, 2)] * 3 + [(7, 4)]


def refuse(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    bad: Any
    if not uses_nccl():  # a GPU knows how much memory is free
        with pytest.raises(ValueError, match=r"needs a device.*cpu.*number of bytes"):
            set_resident_budget(model, "auto")
    for bad, kind, pattern in (
        ("all", TypeError, "'all'"),
        (1.5, TypeError, r"1\.5"),
        (True, TypeError, "True"),
        (-1, ValueError, "-1"),
    ):
        with pytest.raises(kind, match=pattern):
            set_resident_budget(model, bad)
    with pytest.raises(ValueError, match=r"MLP is not sharded.*fully_shard"):
        set_resident_budget(MLP(), 8)
    train_step(model, reference, rank, inputs(world))


def test_a_budget_that_is_none_is_refused(world2: WorkerPool) -> None:
    world2.run(refuse)


def between_forward_and_backward(rank: int, world: int) -> None:
    model, reference = pair(six_layers, nested)
    for budget in (4 * layer_bytes(model), None):
        for step in range(2):
            xs = inputs(world, seed=step)
            model.zero_grad()
            reference.zero_grad()
            output = loss(model, xs[rank])
            set_resident_budget(model, budget)
            output.backward()
            reference_backward(reference, xs)
            assert_same_gradients(model, reference)
            with torch.no_grad():
                torch.testing.assert_close(model(xs[rank]), reference(xs[rank]))


def test_a_budget_set_between_forward_and_backward_waits_for_the_next(
    world2: WorkerPool,
) -> None:
    world2.run(between_forward_and_backward)
