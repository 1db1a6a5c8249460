"""Exceptions, forwards without backward and stale reads: training goes on right, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import (
    CLASSES,
    MLP,
    SHARDINGS,
    WIDTH,
    Block,
    assert_none_stale,
    inputs,
    loss,
    pair,
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool
from ya_fsdp import fully_shard


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def pool(request: pytest.FixtureRequest) -> WorkerPool:
    return request.getfixturevalue(f"world{request.param}")


class OutOfMemory(RuntimeError):
    """What the user's code raises."""


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise OutOfMemory("in backward")


class FragileBlock(Block):
    """Raises where it is told to."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            raise OutOfMemory("in forward")
        y = super().forward(x)
        if self.where == "after":
            raise OutOfMemory("in forward")
        return Raises.apply(y) if self.where == "backward" else y


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FragileBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def raise_and_go_on(rank: int, world_size: int, name: str, where: str, options: Any) -> None:
    model, reference = pair(Fragile, SHARDINGS[name], **options)
    optimizers = sgd_pair(model, reference)
    for index in (3, 0, 1):
        layer = model.layers[index]
        layer.where = where
        # More than once in a row, with and without a step between.
        for _ in range(2):
            with pytest.raises(OutOfMemory, match="in backward" if where == "backward" else "in f"):
                loss(model, inputs(world_size)[rank]).backward()
        layer.where = ""
        model.zero_grad()
        xs = inputs(world_size, seed=index)
        train_step(model, reference, rank, xs, optimizers=optimizers)
        assert_none_stale(model, reference, xs[0])
        train_step(model, reference, rank, xs, optimizers=optimizers)


@pytest.mark.parametrize("where", ["before", "after", "backward"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_training_goes_on_after_an_exception_of_the_user(
    pool: WorkerPool, name: str, where: str
) -> None:
    pool.run(raise_and_go_on, name, where, {})


@pytest.mark.parametrize("where", ["after", "backward"])
def test_training_of_units_that_stay_gathered_goes_on_after_an_exception(
    world2: WorkerPool, where: str
) -> None:
    world2.run(raise_and_go_on, "nested", where, {"reshard_after_forward": False})


def optimizer_step_after_exception(rank: int, world_size: int, name: str, where: str) -> None:
    model, reference = pair(Fragile, SHARDINGS[name])
    optimizers = sgd_pair(model, reference)
    train_step(model, reference, rank, inputs(world_size), optimizers=optimizers)
    model.layers[2].where = where
    with pytest.raises(OutOfMemory):
        loss(model, inputs(world_size)[rank]).backward()
    model.layers[2].where = ""
    # Nobody zeroes gradients or runs a forward: weights change while the model looks half-run.
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
        for param in reference.parameters():
            param.mul_(0.5)
    assert_none_stale(model, reference, inputs(1)[0])
    train_step(model, reference, rank, inputs(world_size, seed=3), optimizers=optimizers)


@pytest.mark.parametrize("where", ["before", "after", "backward"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_weights_changed_after_an_exception_are_what_the_next_forward_uses(
    world2: WorkerPool, name: str, where: str
) -> None:
    world2.run(optimizer_step_after_exception, name, where)


def microbatch_lost(rank: int, world_size: int, name: str) -> None:
    model, reference = pair(Fragile, SHARDINGS[name])
    units = [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]
    for module in units:
        module.set_requires_gradient_sync(False)
    loss(model, inputs(world_size)[rank]).backward()
    model.layers[1].where = "backward"
    with pytest.raises(OutOfMemory):
        loss(model, inputs(world_size)[rank]).backward()
    model.layers[1].where = ""
    for module in units:
        module.set_requires_gradient_sync(True)
    model.zero_grad()
    for step in range(2):
        train_step(model, reference, rank, inputs(world_size, seed=step))


@pytest.mark.parametrize("name", SHARDINGS)
def test_zero_grad_after_an_exception_forgets_microbatches_without_communication(
    world2: WorkerPool, name: str
) -> None:
    world2.run(microbatch_lost, name)


def forward_only(rank: int, world_size: int, name: str, reshard: bool) -> None:
    model, reference = pair(MLP, SHARDINGS[name], reshard_after_forward=reshard)
    optimizers = sgd_pair(model, reference)
    kept = []
    for step in range(3):
        kept.append(model(inputs(1, seed=step)[0]))  # its backward never comes
        xs = inputs(world_size, seed=step)
        train_step(model, reference, rank, xs, optimizers=optimizers)
        assert_none_stale(model, reference, xs[0])
        if step == 1:
            kept.clear()
    with torch.no_grad():
        for param in (*model.parameters(), *reference.parameters()):
            param.add_(0.5)
    assert_none_stale(model, reference, inputs(1)[0])


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_forward_without_a_backward_makes_nothing_stale(
    world2: WorkerPool, name: str, reshard: bool
) -> None:
    world2.run(forward_only, name, reshard)


# ---- stale reads ---------------------------------------------------------------------------------


class Steals(nn.Linear):
    """Keeps its gathered weight for later."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.weight]
        return super().forward(x)


class Stealing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Steals(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x @ self.layers[0].kept[0])


def steal(rank: int, world_size: int, name: str) -> str:
    model, _ = pair(Stealing, SHARDINGS[name])
    for layer in model.layers:
        layer.kept = []
    try:
        loss(model, inputs(world_size)[rank]).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["leaf", "nested", "layers only"])
def test_a_weight_read_after_its_unit_was_resharded_is_an_error_that_names_it(
    world2: WorkerPool, name: str
) -> None:
    for message in world2.run(steal, name):
        assert "weight" in message and "resharded" in message and "unshard()" in message


def shapes_of_released(rank: int, world_size: int) -> None:
    model, _ = pair(Stealing, SHARDINGS["layers only"])
    model.layers[0](inputs(1)[0])
    (kept,) = model.layers[0].kept
    assert kept.shape == (WIDTH, WIDTH) and kept.dtype == torch.float32 and kept.requires_grad
    for read in (lambda p: p + 1, torch.sum, lambda p: p.clone(), lambda p: p.tolist()):
        with pytest.raises(RuntimeError, match=r"weight.*resharded"):
            read(kept)  # type: ignore[operator]


def test_a_released_weight_tells_its_shape_but_not_its_values(world2: WorkerPool) -> None:
    world2.run(shapes_of_released)


def weights_changed_before_backward(rank: int, world_size: int, name: str) -> str:
    """Forward, another forward of other shape, weights changed, then the first's backward."""
    model, _ = pair(MLP, SHARDINGS[name])
    first = loss(model, inputs(world_size)[rank])
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
        model(inputs(1)[0])
    try:
        first.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["leaf", "nested"])
def test_weights_changed_between_forward_and_backward_are_no_silent_mistake(
    world2: WorkerPool, name: str
) -> None:
    for message in world2.run(weights_changed_before_backward, name):
        assert "modified by an inplace operation" in message or "changed" in message


# ---- mistakes that are refused -------------------------------------------------------------------


def bypass_everything(rank: int, world_size: int) -> None:
    """A loss of kept tensors alone, through parameters that nothing watches."""
    model, reference = pair(Bypassed, SHARDINGS["root"])
    x = inputs(world_size)[rank].requires_grad_()
    model(x)
    model.kept.sum().backward()
    with pytest.raises(RuntimeError, match="not reduced"):
        model(x)
    model.zero_grad()
    reference.zero_grad()
    for step in range(2):
        train_step(model, reference, rank, inputs(world_size, seed=step))


class Bypassed(nn.Module):
    """Keeps a tensor made with its second parameter; the first is watched, the second is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.second(x)
        return self.first(x)


def test_gradients_that_no_unit_saw_coming_are_an_error_and_not_lost(world2: WorkerPool) -> None:
    world2.run(bypass_everything)


def replaced(rank: int, world_size: int) -> None:
    model, reference = pair(MLP, SHARDINGS["leaf"])
    train_step(model, reference, rank, inputs(world_size))
    with pytest.raises(ValueError, match="is sharded already"):
        fully_shard(model.layers[0])
    train_step(model, reference, rank, inputs(world_size))


def test_a_refused_second_sharding_leaves_the_model_as_it_was(world2: WorkerPool) -> None:
    world2.run(replaced)
