"""Gather buffers that one unit uses alone give their memory back between its uses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.distributed.models import MLP, full, inputs, loss, reference_backward
from tests.harness import WorkerPool, test_device, uses_nccl
from ya_fsdp import fully_shard
from ya_fsdp.build import state_of
from ya_fsdp.graph import capture_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not uses_nccl(), reason="needs a CUDA device and YA_FSDP_TEST_NCCL=1"),
]


def pair(keep: int) -> tuple[Any, Any]:
    """A model whose last `keep` blocks stay gathered for backward, and a plain copy of it."""
    torch.manual_seed(0)
    model = MLP(4).to(test_device())
    reference = copy.deepcopy(model)
    for index, layer in enumerate(model.layers):
        fully_shard(layer, reshard_after_forward=index < 4 - keep)
    return fully_shard(model), reference


def resident(model: Any) -> list[int]:
    slots = [state_of(layer).unit.slot for layer in model.layers]  # type: ignore[union-attr]
    return [slot.resident_bytes for slot in slots if slot is not None]


def train(rank: int, world: int) -> None:
    model, reference = pair(keep=2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(4):
        xs = inputs(world, seed=step)
        value = loss(model, xs[rank])
        assert all(resident(model)), "what backward needs is there"
        value.backward()
        assert resident(model)[2:] == [0, 0]
        assert all(resident(model)[:2])
        reference_backward(reference, xs, loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            expected = reference(xs[rank])
            torch.testing.assert_close(model(xs[rank]), expected, rtol=1e-5, atol=1e-5)
        assert resident(model)[2:] == [0, 0], "nor does an evaluation keep them"
    for name, param in reference.named_parameters():
        mine = full(dict(model.named_parameters())[name])
        torch.testing.assert_close(mine, param.detach(), rtol=1e-5, atol=1e-5)


def test_a_kept_unit_holds_memory_from_forward_to_backward_only(world2: WorkerPool) -> None:
    world2.run(train)


def stale(rank: int, world: int) -> None:
    model, _ = pair(keep=2)
    kept = []
    first = model.layers[3].net[0]
    first.register_forward_hook(lambda *_: kept.append(first.weight.square().sum()))
    loss(model, inputs(world)[rank]).backward()
    with pytest.raises(RuntimeError, match="version 1048"):
        kept[0].backward()


def test_a_backward_that_comes_too_late_raises_and_reads_nothing(world2: WorkerPool) -> None:
    world2.run(stale)


def captured(rank: int, world: int) -> None:
    model, reference = pair(keep=2)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, capturable=True) for m in (model, reference)
    ]
    step = capture_step(model, optimizers[0], loss)
    for seed in range(4):
        xs = inputs(world, seed=seed)
        step(xs[rank])
        reference_backward(reference, xs, loss)
        optimizers[1].step()
        optimizers[1].zero_grad()
        with torch.no_grad():  # takes and returns the kept units' memory outside the graph
            expected = reference(xs[rank])
            torch.testing.assert_close(model(xs[rank]), expected, rtol=1e-3, atol=1e-4)


def test_a_captured_step_and_evaluations_between_take_turns(world2: WorkerPool) -> None:
    world2.run(captured)
