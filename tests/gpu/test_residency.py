"""A budget taken from the free memory of a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.distributed.models import (
    MLP,
    assert_same_gradients,
    inputs,
    loss,
    nested,
    reference_backward,
)
from tests.harness import WorkerPool, test_device, uses_nccl
from ya_fsdp import set_resident_budget
from ya_fsdp.build import schedule_of, state_of
from ya_fsdp.reserve import MemoryState
from ya_fsdp.residency import MARGIN, spare_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not uses_nccl(), reason="needs a CUDA device and YA_FSDP_TEST_NCCL=1"),
]


def measure(rank: int, world: int) -> None:
    device = test_device()
    total = torch.cuda.mem_get_info(device)[1]
    before = spare_bytes(MemoryState.of(device))
    assert 0 < before < (1 - MARGIN) * total
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert before - spare_bytes(MemoryState.of(device)) > (1 << 30) - (256 << 20)
    del held
    torch.cuda.empty_cache()
    assert before - spare_bytes(MemoryState.of(device)) > (1 << 30) - (256 << 20), (
        "a peak counts after it is over"
    )


def test_spare_memory_is_what_no_moment_needed(world1: WorkerPool) -> None:
    world1.run(measure)


def train(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nested(MLP(6).to(test_device()))
    optimizer = torch.optim.AdamW(model.parameters())
    assert set_resident_budget(model, "auto") == []
    reshards = []
    for _ in range(3):
        loss(model, torch.ones(4, 6, device=test_device())).backward()
        states = [state_of(layer) for layer in model.layers]
        reshards.append([s.unit.reshard_after_forward for s in states if s is not None])
        optimizer.step()
        optimizer.zero_grad()
    assert reshards == [[True] * 6, [False] * 6, [False] * 6]


def test_small_units_all_stay_after_the_first_step(world2: WorkerPool) -> None:
    world2.run(train)


def run_out_of_memory(rank: int, world: int) -> None:
    """Twelve units want to stay, and from the second step on there is memory for six."""
    device = test_device()
    torch.manual_seed(0)
    model = MLP(12, 2048, 4096).to(device)
    reference = copy.deepcopy(model)
    nested(model)
    size = state_of(model.layers[0]).unit.gather_bytes  # type: ignore[union-attr]
    assert len(set_resident_budget(model, 12 * size)) == 12
    reserve = schedule_of(model).reserve
    xs = inputs(world, 4, 2048)
    kept = []
    for step in range(5):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if step:
            total = torch.cuda.mem_get_info(device)[1]
            room = torch.cuda.memory_allocated(device) + 6.5 * size
            torch.cuda.set_per_process_memory_fraction(room / total, device)
        loss(model, xs[rank]).backward()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        kept.append(reserve.num_bytes // size)
        if step in (1, 4):
            reference.zero_grad()
            reference_backward(reference, xs)
            assert_same_gradients(model, reference)
            reference.zero_grad()
        model.zero_grad()
    assert kept[0] == 12 and 0 < kept[-1] < 8, kept


def test_a_step_that_runs_out_of_memory_goes_on_and_the_budget_shrinks(
    world2: WorkerPool,
) -> None:
    world2.run(run_out_of_memory)
