"""Weight gradients written by the backward product itself equal those of the ordinary way."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.leftovers import tensors, tensors_once_released
from tests.distributed.models import (
    WIDTH,
    assert_none_stale,
    assert_same_gradients,
    assert_same_parameters,
    full,
    inputs,
    loss,
    reference_backward,
    sgd_pair,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, fully_shard, fused_linear
from ya_fsdp.build import state_of

BF16, FP32 = torch.bfloat16, torch.float32


class Layer(nn.Module):
    """Linear layers with and without bias, and a norm, which goes the ordinary way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x)
            else:
                reentrant = self.checkpointing == "reentrant"
                x = checkpoint(layer, x, use_reentrant=reentrant)
        return self.head(x)


class Twice(nn.Module):
    """One linear layer used twice in a forward, and its weight once more outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.linear(x).tanh())
        return self.head(x + nn.functional.linear(x, self.linear.weight).sin())


class Tied(nn.Module):
    """An embedding and an output layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 7).long() % 11
        return self.output(self.mix(self.embedding(tokens)).tanh())


class TwoTied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Sometimes(nn.Module):
    """A layer that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.other(y) if x.flatten()[0] > 0 else y


class Frozen(Net):
    """A frozen weight, a frozen bias, and a layer frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].up.weight.requires_grad_(False)
        self.layers[1].up.bias.requires_grad_(False)
        self.layers[2].requires_grad_(False)


MODELS: dict[str, Any] = {
    "plain": Net,
    "checkpointed": lambda: Net("non-reentrant"),
    "checkpointed, reentrant": lambda: Net("reentrant"),
    "used twice": Twice,
    "tied to an embedding": Tied,
    "tied to each other": TwoTied,
    "used by some": Sometimes,
    "frozen in part": Frozen,
}
# One unit for all, or one per child with the root above.
SHARDINGS = ("root", "children")
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, reduced in fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "bf16": {"param_dtype": BF16},
}
TOLERANCE = {"fp32": 1e-6, "bf16, reduced in fp32": 2e-3, "bf16": 8e-3}


def shard(model: Any, sharding: str, policy: str, fused: bool) -> Any:
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(**POLICIES[policy]),
        "fused_weight_gradients": fused,
    }
    if sharding == "children":
        for layer in getattr(model, "layers", []):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def two_ways(build: Any, sharding: str, policy: str) -> tuple[Any, Any, Any]:
    """The fused model, the ordinary one, and the unsharded one, with the same weights."""
    torch.manual_seed(0)
    plain = build().to(test_device())
    fused, ordinary = copy.deepcopy(plain), copy.deepcopy(plain)
    plain.checkpointing = "none"
    shard(fused, sharding, policy, True)
    shard(ordinary, sharding, policy, False)
    assert any(state_of(m).unit.fused for m in fused.modules() if state_of(m) is not None)
    return fused, ordinary, plain


def compare(fused: Any, ordinary: Any, atol: float) -> None:
    theirs = dict(ordinary.named_parameters())
    for name, param in fused.named_parameters():
        other = theirs[name]
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            assert param.grad.dtype == other.grad.dtype
            torch.testing.assert_close(
                full(param.grad), full(other.grad), atol=atol, rtol=1e-5, msg=name
            )


def equal(rank: int, world: int, model: str, policy: str, sharding: str) -> None:
    fused, ordinary, plain = two_ways(MODELS[model], sharding, policy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (fused, ordinary, plain)]
    for step, shape in enumerate([(4, WIDTH), (2, 3, WIDTH), (2, 1, 2, WIDTH)]):
        xs = inputs(world, *shape, seed=step)
        x = xs[rank].requires_grad_(model == "checkpointed, reentrant")
        for optimizer in optimizers:
            optimizer.zero_grad()
        for each in (fused, ordinary):
            loss(each, x).backward()
        compare(fused, ordinary, TOLERANCE[policy])
        if policy == "fp32":
            reference_backward(plain, xs)
            assert_same_gradients(fused, plain, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
            assert_same_parameters(fused, plain)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_fused_gradients_equal_those_of_the_ordinary_way(
    world2: WorkerPool, model: str, policy: str, sharding: str
) -> None:
    world2.run(equal, model, policy, sharding)


@pytest.mark.parametrize("model", ["plain", "used by some"])
def test_fused_gradients_are_right_on_any_number_of_ranks(any_pool: WorkerPool, model: str) -> None:
    any_pool.run(equal, model, "fp32", "children")


def accumulate(rank: int, world: int, model: str, policy: str, quiet: bool) -> None:
    fused, ordinary, plain = two_ways(MODELS[model], "children", policy)
    for round_ in range(2):
        for micro in range(3):
            xs = inputs(world, seed=10 * round_ + micro)
            for each in (fused, ordinary):
                with each.no_sync() if quiet and micro < 2 else nullcontext():
                    loss(each, xs[rank]).backward()
            if policy == "fp32":
                reference_backward(plain, xs)
        compare(fused, ordinary, 3 * TOLERANCE[policy])
        if policy == "fp32":
            assert_same_gradients(fused, plain)
        if round_ == 0 and quiet:  # gradients of the second round are added to those of the first
            continue
        for each in (fused, ordinary, plain):
            each.zero_grad()


@pytest.mark.parametrize("quiet", [True, False], ids=["no_sync", "every time"])
@pytest.mark.parametrize("policy", ["fp32", "bf16, reduced in fp32"])
@pytest.mark.parametrize("model", ["plain", "checkpointed", "used twice", "tied to an embedding"])
def test_microbatches_add_up(world2: WorkerPool, model: str, policy: str, quiet: bool) -> None:
    world2.run(accumulate, model, policy, quiet)


class Stumbles(Net):
    """Raises in forward or backward when told so."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.where == "forward":
                raise ValueError("on purpose")
            if index == 1 and self.where == "backward" and x.requires_grad:
                x.register_hook(self._stumble)
        return self.head(x)

    def _stumble(self, grad: Tensor) -> Tensor:
        raise ValueError("on purpose")


def go_on(rank: int, world: int) -> None:
    fused, _, plain = two_ways(Stumbles, "children", "fp32")
    optimizers = sgd_pair(fused, plain)
    for step, where in enumerate(["", "forward", "backward", "evaluation", "backward", ""]):
        xs = inputs(world, seed=step)
        if where in ("forward", "backward"):
            fused.where = where
            with pytest.raises(ValueError, match="on purpose"):
                loss(fused, xs[rank]).backward()
            fused.where = ""
            fused.zero_grad()
        elif where == "evaluation":
            assert_none_stale(fused, plain, xs[0])
            loss(fused, xs[rank])  # with gradients on, and no backward
        plain.zero_grad()
        fused.zero_grad()
        loss(fused, xs[rank]).backward()
        reference_backward(plain, xs)
        assert_same_gradients(fused, plain)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(fused, plain)


def test_training_goes_on_after_exceptions_and_evaluations(any_pool: WorkerPool) -> None:
    any_pool.run(go_on)


def leave_no_gradient(rank: int, world: int) -> None:
    """Products write the slot: no tensor of the weight's size goes through autograd."""
    fused, _, _ = two_ways(Net, "children", "fp32")
    written = []
    for module in fused.modules():
        state = state_of(module)
        for group in state.unit.groups if state is not None else ():
            original = group.grads.collect

            def note(
                target: Any, clear: bool, grads: Any = group.grads, go: Any = original
            ) -> None:
                names = [p.fqn for p in grads.params]
                written.extend(names[i] for i in grads.written)
                taken = grads.taken or []
                assert all(taken[i] is None for i in grads.written)
                go(target, clear)

            group.grads.collect = note
    loss(fused, inputs(world)[rank]).backward()
    weights = [n for n, p in fused.named_parameters() if n.endswith("weight") and p.ndim == 2]
    assert sorted(written) == sorted(weights)


def test_every_linear_weight_is_written_by_its_product(any_pool: WorkerPool) -> None:
    any_pool.run(leave_no_gradient)


class Own(nn.Linear):
    """A subclass may compute anything, so it goes the ordinary way."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * 2, self.bias)


def only_plain_linears(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Own(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).to(test_device())
    plain = copy.deepcopy(model)
    fully_shard(model, fused_weight_gradients=True)
    assert "forward" not in model[0].__dict__
    assert "forward" in model[1].__dict__
    xs = inputs(world)
    with torch.autocast(test_device().type, BF16):  # the product's dtypes are autocast's then
        loss(model, xs[rank]).backward()
        for x in xs:
            (loss(plain, x) / world).backward()
    assert_same_gradients(model, plain, atol=2e-2)
    model.zero_grad()
    plain.zero_grad()
    loss(model, xs[rank]).backward()
    reference_backward(plain, xs)
    assert_same_gradients(model, plain)


def test_other_layers_and_autocast_go_the_ordinary_way(any_pool: WorkerPool) -> None:
    any_pool.run(only_plain_linears)


def say_it_once(rank: int, world: int) -> None:
    fused_linear._said.clear()
    said: list[str] = []
    logger, handler = logging.getLogger("ya_fsdp"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).to(test_device())
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        fully_shard(model, fused_weight_gradients=True, mp_policy=policy)
        for _ in range(2):
            loss(model, inputs(world)[rank]).backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    said = [message for message in said if "fused_weight_gradients" in message]
    assert len(said) == (test_device().type == "cpu"), said
    assert not said or "no product of torch.bfloat16 into torch.float32 on cpu" in said[0]


def test_a_device_without_the_product_is_said_once(world2: WorkerPool) -> None:
    world2.run(say_it_once)


def grad_calls(rank: int, world: int) -> None:
    fused, _, plain = two_ways(Net, "children", "fp32")
    xs = inputs(world)
    mine, theirs = (xs[rank].clone().requires_grad_() for _ in range(2))
    (first,) = torch.autograd.grad(loss(fused, mine), mine)
    (second,) = torch.autograd.grad(loss(plain, theirs), theirs)
    torch.testing.assert_close(first, second)
    loss(fused, xs[rank]).backward()
    reference_backward(plain, xs)
    assert_same_gradients(fused, plain)


def test_gradients_of_inputs_alone_leave_parameters_as_they_were(any_pool: WorkerPool) -> None:
    any_pool.run(grad_calls)


class Penalised(nn.Module):
    """Asks for a gradient of its weight inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        (grad,) = torch.autograd.grad(y.sum(), self.linear.weight, retain_graph=True)
        self.seen = grad
        return y


def ask_inside(rank: int, world: int) -> None:
    fused, _, plain = two_ways(Penalised, "root", "fp32")
    xs = inputs(world)
    for _ in range(2):
        loss(fused, xs[rank]).backward()
        reference_backward(plain, xs)
        loss(plain, xs[rank])
        torch.testing.assert_close(fused.seen, plain.seen)
    assert_same_gradients(fused, plain)


def test_a_gradient_asked_for_inside_forward_is_returned(any_pool: WorkerPool) -> None:
    any_pool.run(ask_inside)


def memory(rank: int, world: int) -> None:
    fused, _, _ = two_ways(Net, "children", "fp32")
    found: list[tuple[int, int]] = []
    for step in range(8):
        loss(fused, inputs(world, seed=step)[rank]).backward()
        fused.zero_grad()
        found.append(tensors_once_released(found[2]) if step > 2 else tensors())
    assert found[-1][0] <= found[2][0], found
    assert found[-1][1] <= found[2][1], found


def test_nothing_grows_from_step_to_step(world2: WorkerPool) -> None:
    world2.run(memory)
