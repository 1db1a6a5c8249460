"""ZeRO-2 and ZeRO-3 over microbatches: what is gathered and reduced, and the gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from torch import nn

from tests.distributed.models import (
    MLP,
    assert_none_stale,
    assert_same_gradients,
    assert_same_parameters,
    inputs,
    loss,
    nested,
    pair,
    reference_backward,
    sgd_pair,
)
from tests.distributed.test_schedule import Recorder
from tests.distributed.test_training import CHANGES
from tests.harness import WorkerPool

UNITS = 6
MICROBATCHES = 3


def five_layers() -> nn.Module:
    return MLP(UNITS - 1)


Quiet = Callable[[Any, int], Any]


def every_time(model: Any, micro: int) -> Any:
    model.set_reshard_after_backward(micro == MICROBATCHES - 1)
    return nullcontext()


def once(model: Any, micro: int) -> Any:
    last = micro == MICROBATCHES - 1
    model.set_reshard_after_backward(last)
    return nullcontext() if last else model.no_sync()


def resharding(model: Any, micro: int) -> Any:
    return nullcontext()


Case = tuple[bool, Quiet, list[tuple[int, int]]]

CASES: dict[str, Case] = {
    "stage 2, reduced every time": (False, every_time, [(6, 6), (0, 6), (0, 6)]),
    "stage 2, reduced once": (False, once, [(6, 0), (0, 0), (0, 6)]),
    "stage 2, gathered every time": (False, resharding, [(6, 6), (6, 6), (6, 6)]),
}


def train(rank: int, world: int, case: str) -> list[list[tuple[int, int]]]:
    reshard, context, _ = CASES[case]
    model, reference = pair(five_layers, nested, reshard_after_forward=reshard)
    recorder = Recorder.on(model)
    optimizers = sgd_pair(model, reference)
    steps = []
    for step in range(3):
        counts = []
        for micro in range(MICROBATCHES):
            xs = inputs(world, seed=10 * step + micro)
            with context(model, micro):
                loss(model, xs[rank]).backward()
            reference_backward(reference, xs)
            taken = recorder.take()
            assert set(taken) <= {"gather", "reduce", "all_reduce max"}
            counts.append((taken["gather"], taken["reduce"]))
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
        recorder.take()
        steps.append(counts)
    return steps


@pytest.mark.parametrize("case", CASES)
def test_stage_two_gathers_once_for_all_microbatches(world2: WorkerPool, case: str) -> None:
    for steps in world2.run(train, case):
        # In the first step buffers are assigned anew, by the order in which units ran.
        assert steps[1:] == [CASES[case][2]] * 2


def change(rank: int, world: int, how: str, reshard: bool) -> None:
    model, reference = pair(five_layers, nested, reshard_after_forward=reshard)
    model.set_reshard_after_backward(False)
    for step in range(2):
        for micro in range(2):
            model.zero_grad()
            reference.zero_grad()
            xs = inputs(world, seed=10 * step + micro)
            loss(model, xs[rank]).backward()
            reference_backward(reference, xs)
            assert_same_gradients(model, reference)
        CHANGES[how](model, reference)
        assert_none_stale(model, reference, inputs(world)[rank])


@pytest.mark.parametrize("reshard", [False, True], ids=["kept after forward", "freed"])
@pytest.mark.parametrize("how", [how for how in CHANGES if how != "data"])
def test_weights_that_stay_over_a_backward_are_gathered_again_once_changed(
    world2: WorkerPool, how: str, reshard: bool
) -> None:
    world2.run(change, how, reshard)
