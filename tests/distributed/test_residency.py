"""Units that stay gathered within a budget: which, what is no longer sent, and the same values."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.distributed.models import (
    MLP,
    assert_none_stale,
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
from ya_fsdp import reducer, residency, set_resident_budget
from ya_fsdp.build import schedule_of, state_of
from ya_fsdp.reserve import MemoryState


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


on_cpu = pytest.mark.skipif(
    uses_nccl(), reason="a GPU's ranks agree one backward later; tests/gpu/test_residency.py"
)
TOTAL = 100  # bytes, so that margins are bytes


class Memory:
    """A device on which ``fits`` bytes of gathered units find room beside everything else."""

    def __init__(self, model: Any, fits: int = 0) -> None:
        self.fits = fits
        self.free = 1 << 30
        self.failures = 0
        self._reserve = schedule_of(model).reserve

    def __call__(self) -> MemoryState:
        most = TOTAL - int(residency.MARGIN * TOTAL) - self.fits + self._reserve.num_bytes
        return MemoryState(TOTAL, TOTAL, TOTAL - self.free, most, self.failures)


def follow(model: Any, num_bytes: int | None, memory: Memory | None) -> None:
    """``set_resident_budget`` on a device with another memory."""
    set_resident_budget(model, num_bytes)
    schedule = schedule_of(model)
    schedule.after_backward = []
    residency._Budget(schedule, num_bytes, memory)


@contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ya_fsdp").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("ya_fsdp").removeHandler(handler)


def over_steps(rank: int, world: int) -> tuple[list[tuple[int, int]], list[str]]:
    model, reference = pair(six_layers, nested)
    recorder = Recorder.on(model)
    optimizers = sgd_pair(model, reference)
    size = layer_bytes(model)
    # Ranks with different free memory have to agree: three units fit on one, two on the other.
    memory = Memory(model, (3 - rank) * size)
    follow(model, None, memory)
    counts = []
    with warnings_of_ours() as found:
        for micro in range(10):
            if micro in (5, 6, 7):
                memory.fits = (4 * size, 5 * size - 1 - rank, (9 - 8 * rank) * size)[micro - 5]
            xs = inputs(world, seed=micro)
            counts.append(counted_step(model, reference, rank, xs, recorder))
            if micro % 2:  # two microbatches a step
                for optimizer in optimizers:
                    optimizer.step()
    set_resident_budget(model, None)
    assert not schedule_of(model).after_backward
    counts.append(counted_step(model, reference, rank, inputs(world), recorder))
    return counts, found


@on_cpu
def test_auto_chooses_after_the_first_step_and_follows_the_least_memory_of_all_ranks(
    world2: WorkerPool,
) -> None:
    for counts, found in world2.run(over_steps):
        assert counts == [(7, 4)] * 3 + [(7, 2)] * 3 + [(7, 0)] * 2 + [(7, 3)] * 2 + [(7, 4)]
        assert len(found) == 1 and "memory got short on a rank" in found[0]


# ---- when memory gets short ----------------------------------------------------------------------


@contextmanager
def shortage(memory: Memory, why: str) -> Iterator[None]:
    """A step that finds less memory than the ones before it."""
    if why == "allocation":
        once = iter([torch.OutOfMemoryError("as if")])
        new_slot = reducer.new_slot

        def allocate(*args: Any) -> Any:
            for error in once:
                raise error
            return new_slot(*args)

        with patch.object(reducer, "new_slot", allocate):
            yield
    elif why == "free memory":
        memory.free = -memory.fits
        yield
        memory.free = 1 << 30
    else:
        memory.failures += 1
        yield


def run_short(rank: int, world: int, why: str) -> Any:
    """Four units stay gathered; in the second step rank 1 has too little memory for that."""
    model, reference = pair(six_layers, nested)
    recorder = Recorder.on(model)
    size = layer_bytes(model)
    memory = Memory(model, size)
    follow(model, 4 * size, memory)
    reserve = schedule_of(model).reserve
    moved, counts, kept = [], [], []
    set_aside = reserve._set_aside
    reserve._set_aside = lambda unit: moved.append(unit.fqn) or set_aside(unit)  # type: ignore
    with warnings_of_ours() as found:
        for step in range(4):
            schedule_of(model).reducer.slots.clear()
            with shortage(memory, why) if rank == 1 and step == 1 else nullcontext():
                xs = inputs(world, seed=step)
                counts.append(counted_step(model, reference, rank, xs, recorder))
            kept.append(reserve.num_bytes // size)
            assert_none_stale(model, reference, xs[rank])
            recorder.take()
    assert not reserve._aside
    return moved, counts, kept, len(found)


@on_cpu
@pytest.mark.parametrize("why", ["free memory", "allocation", "user code"])
def test_units_wait_in_host_memory_where_it_is_short_and_the_budget_shrinks(
    world2: WorkerPool, why: str
) -> None:
    rich, poor = world2.run(run_short, why)
    assert rich[0] == []
    assert poor[0] == ([] if why == "user code" else ["layers.2", "layers.3"])
    assert rich[1:] == poor[1:] == ([(7, 0)] * 2 + [(7, 2)] * 2, [4, 2, 2, 2], 1)


def two_forwards_while_short(rank: int, world: int) -> None:
    """Units in host memory that another forward, with or without gradients, wants first."""
    model, reference = pair(six_layers, nested)
    memory = Memory(model)
    follow(model, 1 << 30, memory)
    schedule = schedule_of(model)
    model.set_reshard_after_backward(False)
    xs = inputs(world)
    train_step(model, reference, rank, xs)
    model.zero_grad()
    reference.zero_grad()
    first = loss(model, xs[rank])
    if rank == 1:
        assert schedule.reserve.make_room() > 0
    second = loss(model, 2 * xs[rank])
    if rank == 1:
        assert schedule.reserve.make_room() > 0
    (first + second).backward()
    reference_backward(reference, xs)
    reference_backward(reference, 2 * xs)
    assert_same_gradients(model, reference)
    train_step(model, reference, rank, xs)


def test_units_in_host_memory_come_back_for_whoever_needs_them(world2: WorkerPool) -> None:
    world2.run(two_forwards_while_short)


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
