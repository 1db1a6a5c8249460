"""How many multiprocessors communication gets; kernels and times are for the GPU to show."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.models import (
    MLP,
    assert_same_parameters,
    full,
    inputs,
    loss,
    nested,
    pair,
    reference_backward,
)
from tests.harness import WorkerPool
from ya_fsdp import persistent_buffers, set_communication_sms
from ya_fsdp.build import schedule_of
from ya_fsdp.communication_sms import STEPS, Trial


def nothing_to_set(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    said = set_communication_sms(model, 4)
    if not next(model.parameters()).is_cuda:
        assert said.startswith("nothing")
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="num_sms"):
            set_communication_sms(model, wrong)
    with pytest.raises(ValueError, match="not sharded"):
        set_communication_sms(nn.Linear(2, 2), 4)
    x = inputs(world)
    before = [b.data_ptr() for b in persistent_buffers(model)]
    for _ in range(3):
        loss(model, x[rank]).backward()
        reference_backward(reference, x)
    assert {p for p in before if p} <= {b.data_ptr() for b in persistent_buffers(model)}
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)


def test_communication_sms_change_no_result_and_say_what_they_did(pool: WorkerPool) -> None:
    pool.run(nothing_to_set)


SECONDS = {  # of one step, by candidate, on rank 0 and on all others
    0: (3.0, 3.0),
    4: (1.0, 5.0),
    8: (2.0, 2.5),
    16: (2.2, 2.6),
}


def tried(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    schedule = schedule_of(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    applied: list[int] = []
    kept: list[int] = []
    elapsed = 0.0
    steps = 0

    def now() -> float:
        nonlocal elapsed
        if applied:
            first = steps % STEPS == 2  # of a candidate
            elapsed += 0.01 if first else SECONDS[applied[-1]][min(rank, 1)]
        return elapsed

    Trial(schedule, applied.append, list(SECONDS), kept.append, now)
    while schedule.after_backward:
        for half in range(2):  # microbatches, which are no steps
            x = inputs(world, seed=2 * steps + half)
            loss(model, x[rank]).backward()
            reference_backward(reference, x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
        steps += 1
        assert steps < 40
    assert applied == [0, 4, 8, 16, 8]
    assert kept == [8]
    assert steps == 2 + len(SECONDS) * STEPS


def test_auto_tries_each_for_some_steps_and_keeps_the_quickest_of_the_slowest_rank(
    pool: WorkerPool,
) -> None:
    pool.run(tried)
