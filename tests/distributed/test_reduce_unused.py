"""Ranks that use different units in one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import (
    MLP,
    assert_same_gradients,
    assert_same_parameters,
    inputs,
    layers_only,
    leaf,
    loss,
    nested,
    pair,
)
from tests.harness import WorkerPool
from ya_fsdp import set_reduce_unused


class Skipping(MLP):
    """Runs only the layers it is told to."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in used:
            x = self.layers[index](x)
        return self.head(x)


def used_by(rank: int, step: int) -> tuple[int, ...]:
    """Layer 3 is never used; layer 1 by rank 0 only; the order of the others differs by rank."""
    if rank == 0:
        return (0, 1, 2) if step % 2 else (0, 1)
    return (2, 0) if step % 2 else (0,)


def train(rank: int, world: int, shard: str, accumulate: bool) -> None:
    model, reference = pair(Skipping, leaf if shard == "leaf" else nested)
    set_reduce_unused(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step in range(4):
        for part in range(2 if accumulate else 1):
            x = inputs(world, seed=10 * step + part)
            model.set_requires_gradient_sync(not accumulate or part == 1)
            loss_of(model, x[rank], used_by(rank, step)).backward()
            for other in range(world):
                (loss_of(reference, x[other], used_by(other, step)) / world).backward()
        assert_same_gradients(model, reference)
        assert model.layers[3].net[0].weight.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
        with torch.no_grad():
            torch.testing.assert_close(model(x[rank]), reference(x[rank]))


def loss_of(model: Any, x: Tensor, used: tuple[int, ...]) -> Tensor:
    return model(x, used).pow(2).mean()


@pytest.mark.parametrize("accumulate", [False, True], ids=["each", "quiet microbatches"])
@pytest.mark.parametrize("shard", ["leaf", "nested"])
def test_a_layer_that_some_ranks_skip_gets_its_average_on_all(
    pool: WorkerPool, shard: str, accumulate: bool
) -> None:
    pool.run(train, shard, accumulate)


def switched_off(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    set_reduce_unused(model)
    for enable in (True, False):
        set_reduce_unused(model, enable)
        for step in range(2):
            x = inputs(world, seed=step)
            loss(model, x[rank]).backward()
            for other in x:
                (loss(reference, other) / world).backward()
            assert_same_gradients(model, reference)
            for m in (model, reference):
                m.zero_grad()
    with pytest.raises(ValueError, match="not sharded"):
        set_reduce_unused(nn.Linear(2, 2))
    alone, _ = pair(MLP, layers_only)
    with pytest.raises(ValueError, match="needs a root"):
        set_reduce_unused(alone.head)


def test_it_can_be_switched_off_and_needs_a_root(pool: WorkerPool) -> None:
    pool.run(switched_off)
