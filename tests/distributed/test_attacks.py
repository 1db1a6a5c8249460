"""What users do to a sharded model that it can not follow is refused, and it trains on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from tests.distributed.models import (
    CLASSES,
    HIDDEN,
    MLP,
    WIDTH,
    assert_same_gradients,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    reference_backward,
    root,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import fully_shard
from ya_fsdp.graph import capture_step


def assert_trains_as_reference(model: Any, reference: nn.Module, rank: int, world: int) -> None:
    model.zero_grad()
    reference.zero_grad()
    x = inputs(world)
    loss(model, x[rank]).backward()
    reference_backward(reference, x, loss)
    assert_same_gradients(model, reference)


def call_with_other_weights(rank: int, world: int, name: str) -> None:
    model, reference = pair(MLP, nested)
    x = inputs(world)[rank]
    assert_trains_as_reference(model, reference, rank, world)
    for _ in range(2):
        other = {name: torch.zeros_like(reference.get_parameter(name).detach())}
        with pytest.raises(RuntimeError, match=f"'{name}' was replaced by a plain tensor"):
            functional_call(model, other, (x,))
        assert_trains_as_reference(model, reference, rank, world)


@pytest.mark.parametrize("name", ["head.weight", "layers.1.net.0.bias"])
def test_a_functional_call_with_other_weights_is_refused_and_keeps_ours(
    world2: WorkerPool, name: str
) -> None:
    world2.run(call_with_other_weights, name)


class Tied(nn.Module):
    """An embedding and an output layer of the same shape, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def change_ties(rank: int, world: int) -> None:
    x = torch.ones(2, WIDTH, device=test_device())
    model = fully_shard(Tied(tied=False).to(test_device()))
    model.last.weight = model.first.weight
    with pytest.raises(RuntimeError, match=r"'last\.weight' was tied to 'first\.weight' after"):
        model(x)
    model = fully_shard(Tied(tied=True).to(test_device()))
    model.last.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=test_device()))
    with pytest.raises(RuntimeError, match=r"'first\.weight' was replaced under one of its names"):
        model(x)
    model = fully_shard(Tied(tied=True).to(test_device()))
    model.last.weight = model.first.weight  # tied already: nothing changes
    assert model(x).shape == x.shape


def test_weights_tied_or_untied_after_sharding_are_refused_by_name(world2: WorkerPool) -> None:
    world2.run(change_ties)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrise_late(rank: int, world: int) -> None:
    model = MLP().to(test_device())
    root(model)
    parametrize.register_parametrization(model.head, "weight", Doubled())
    with pytest.raises(RuntimeError, match=r"head.*weight.*was removed \(or given a param"):
        model(inputs(world)[rank])


def test_a_parametrization_registered_after_sharding_is_refused(world2: WorkerPool) -> None:
    world2.run(parametrise_late)


def assign_a_parameter(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    value = torch.full((CLASSES, WIDTH), 0.5, device=test_device())
    model.head.weight = nn.Parameter(value.clone())
    reference.head.weight = nn.Parameter(value.clone())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_trains_as_reference(model, reference, rank, world)
    with pytest.raises(RuntimeError, match=r"'head\.weight' was replaced"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_optimizer_that_holds_a_parameter_assigned_after_sharding_is_told_so(
    world2: WorkerPool,
) -> None:
    world2.run(assign_a_parameter)


class Recurrent(nn.Module):
    """A recurrent layer that may be deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0] if hasattr(self, "lstm") else x)


def delete_a_layer(rank: int, world: int) -> None:
    model, reference = pair(Recurrent, root)
    x = torch.randn(world, 2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    x = x.to(test_device())
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        model(x[rank]).square().mean().backward()
        reference(x.flatten(0, 1)).square().mean().backward()
        assert_same_gradients(model, reference)
        for each in (model, reference):
            if hasattr(each, "lstm"):
                del each.lstm


def test_a_recurrent_layer_deleted_from_a_unit_leaves_the_rest_training(
    world2: WorkerPool,
) -> None:
    world2.run(delete_a_layer)


def give_too_few_microbatches(rank: int, world: int) -> None:
    model = MLP().to(test_device())
    leaf(model)
    step = capture_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, accumulation=3)
    with pytest.raises(ValueError, match="accumulation=3, but the batch is a list of 1"):
        step([inputs(world)[rank]])


def test_a_captured_step_refuses_another_number_of_microbatches(world2: WorkerPool) -> None:
    world2.run(give_too_few_microbatches)


def outlive_another_model(rank: int, world: int) -> None:
    gc.collect()
    gc.disable()  # one rank keeps models in reference cycles that the others have collected
    try:
        for turn in range(4):
            model, reference = pair(MLP, root, seed=turn)
            for _ in range(turn + 1):
                assert_trains_as_reference(model, reference, rank, world)
            model.cycle = [model]
            del model
            if rank:
                gc.collect()
    finally:
        gc.enable()


def test_ranks_that_collect_old_models_at_different_times_train_on(world2: WorkerPool) -> None:
    world2.run(outlive_another_model)
