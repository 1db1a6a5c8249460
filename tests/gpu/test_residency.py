"""A budget taken from the free memory of a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.models import MLP, loss, nested
from tests.harness import WorkerPool, test_device, uses_nccl
from ya_fsdp import set_resident_budget
from ya_fsdp.build import state_of
from ya_fsdp.residency import MARGIN, spare_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not uses_nccl(), reason="needs a CUDA device and YA_FSDP_TEST_NCCL=1"),
]


def measure(rank: int, world: int) -> None:
    device = test_device()
    total = torch.cuda.mem_get_info(device)[1]
    before = spare_bytes(device)
    assert 0 < before < (1 - MARGIN) * total
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert before - spare_bytes(device) > (1 << 30) - (256 << 20)
    del held
    torch.cuda.empty_cache()
    assert before - spare_bytes(device) > (1 << 30) - (256 << 20), "a peak counts after it is over"


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
