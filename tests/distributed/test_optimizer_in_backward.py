"""Updates during the backward, against the same model updated after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.models import MLP, full, inputs, leaf, loss, nested, pair
from tests.harness import WorkerPool, test_device
from ya_fsdp import (
    clip_grad_norm_,
    flat_optimizer_state_dict,
    flat_parameters,
    load_flat_optimizer_state_dict,
    map_tensors,
    optimizer_in_backward,
)
from ya_fsdp.graph import WARMUP_STEPS, capture_step

DECAY = {"decay": {"weight_decay": 0.5}, "rest": {"weight_decay": 0.0}}


def by_dim(name: str, param: Tensor) -> str:
    return "decay" if param.ndim > 1 else "rest"


def adamw(model: Any, flat: bool, **options: Any) -> torch.optim.Optimizer:
    params = flat_parameters(model, DECAY, by_dim) if flat else model.parameters()
    return torch.optim.AdamW(params, lr=1e-2, **options)


def twins(flat: bool, shard: Any = nested, build: Any = MLP, **options: Any) -> list[Any]:
    """Two equal models with an optimizer each, the first updated in its backward."""
    found = []
    for early in (True, False):
        model, _ = pair(build, shard)
        optimizer = adamw(model, flat, **options)
        if early:
            optimizer_in_backward(model, optimizer)
        found.append((model, optimizer))
    return found


def assert_equal(model: Any, other: Any) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(full(p), full(q)), name


def train(model: Any, optimizer: Any, x: Tensor, loss: Callable[..., Tensor] = loss) -> None:
    loss(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def same_weights(rank: int, world: int, flat: bool, shard: str, **options: Any) -> None:
    mesh = None
    if shard == "replicas":
        mesh = init_device_mesh(test_device().type, (world, 1), mesh_dim_names=("r", "s"))
    shards = {"leaf": leaf, "nested": nested, "replicas": lambda m: leaf(m, mesh=mesh)}
    both = twins(flat, shards[shard], **options)
    first = [full(p).clone() for p in both[0][0].parameters()]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for _, o in both]
    for step in range(3):
        x = inputs(world, seed=step)[rank]
        for (model, optimizer), scheduler in zip(both, schedulers, strict=True):
            train(model, optimizer, x)
            scheduler.step()
        assert_equal(both[0][0], both[1][0])
    assert not any(
        torch.equal(full(p), q) for p, q in zip(both[0][0].parameters(), first, strict=True)
    )


@pytest.mark.parametrize(
    "flat, shard, options",
    [
        (True, "nested", {"fused": True}),
        (True, "leaf", {"foreach": True}),
        (True, "replicas", {}),
        (False, "leaf", {}),
        (False, "nested", {"foreach": True}),
    ],
    ids=str,
)
def test_weights_are_the_same_bit_for_bit(
    world2: WorkerPool, flat: bool, shard: str, options: dict[str, Any]
) -> None:
    world2.run(same_weights, flat, shard, **options)


def accumulate(rank: int, world: int, flat: bool, announce: str) -> None:
    both = twins(flat)
    for step in range(3):
        for part in range(3):
            x = inputs(world, seed=10 * step + part)[rank]
            for model, _ in both:
                getattr(model, announce)(part == 2)
                before = [p.detach().to_local().clone() for p in model.parameters()]
                loss(model, x).backward()
                moved = [
                    not torch.equal(p.to_local(), old)
                    for p, old in zip(model.parameters(), before, strict=True)
                    if old.numel()
                ]
                assert all(moved) if (part == 2 and model is both[0][0]) else not any(moved)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(both[0][0], both[1][0])


@pytest.mark.parametrize("announce", ["set_requires_gradient_sync", "set_is_last_backward"])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "per parameter"])
def test_only_the_last_backward_of_an_accumulation_updates(
    world2: WorkerPool, flat: bool, announce: str
) -> None:
    world2.run(accumulate, flat, announce)


def captured(rank: int, world: int) -> None:
    both = twins(True)
    steps = [capture_step(m, o, lambda m, x: m(x).pow(2).mean()) for m, o in both]
    for step in range(WARMUP_STEPS + 3):
        x = inputs(world, seed=step)[rank]
        assert torch.equal(steps[0](x), steps[1](x))
        assert_equal(both[0][0], both[1][0])
    assert steps[0].captures == steps[1].captures == int(test_device().type == "cuda")


def test_a_captured_step_updates_in_its_backward(world2: WorkerPool) -> None:
    world2.run(captured)


def early_and_freed(rank: int, world: int) -> None:
    model, _ = pair(MLP, leaf)
    flat = flat_parameters(model)
    optimizer_in_backward(model, torch.optim.SGD(flat, lr=0.1))
    head = model.head.weight.detach().to_local().clone()
    seen: list[tuple[bool, int]] = []

    def watch(_: Any, __: Any, output: Tensor) -> None:
        def note(_: Tensor) -> None:
            changed = not torch.equal(model.head.weight.detach().to_local(), head)
            seen.append((changed, sum(p.grad is not None for p in flat)))

        output.register_hook(note)

    model.layers[0].register_forward_hook(watch)
    loss(model, inputs(world)[rank]).backward()
    assert seen == [(True, 0)]


def test_later_units_are_updated_and_their_gradients_gone_before_earlier_ones_begin(
    world2: WorkerPool,
) -> None:
    world2.run(early_and_freed)


def saved(model: Any, optimizer: torch.optim.Optimizer, flat: bool) -> Any:
    """By parameter name, as a checkpoint would give it back: in memory of its own."""
    state = (flat_optimizer_state_dict if flat else get_optimizer_state_dict)(model, optimizer)
    return map_tensors(state, torch.clone)


def change_over(rank: int, world: int, flat: bool) -> None:
    early, late = twins(flat)
    xs = [inputs(world, seed=step)[rank] for step in range(4)]
    for x in xs[:2]:
        train(*early, x)
        train(*late, x)
    assert saved(*early, flat)["param_groups"] == saved(*late, flat)["param_groups"]
    load = load_flat_optimizer_state_dict if flat else set_optimizer_state_dict
    # What was updated in the backward goes on after it, and the other way round.
    for source, target in zip((early, late), twins(flat)[::-1], strict=True):
        target[0].load_state_dict(source[0].state_dict())
        load(*target, saved(*source, flat))
        for x in xs[2:]:
            train(*source, x)
            train(*target, x)
        assert_equal(target[0], source[0])
    assert_equal(early[0], late[0])


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "per parameter"])
def test_a_run_goes_on_with_updates_in_the_backward_or_after_it(
    world2: WorkerPool, flat: bool
) -> None:
    world2.run(change_over, flat)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) if torch.distributed.get_rank() else self.used(x) + self.sometimes(x)


class Uneven(MLP):
    """Its first layer runs twice, and only rank 0 uses one half of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers[0](x))


def uneven(rank: int, world: int, flat: bool) -> None:
    both = twins(flat, leaf, Uneven)
    for step in range(3):
        x = inputs(world, seed=step)[rank]
        for model, optimizer in both:
            train(model, optimizer, x)
        assert_equal(both[0][0], both[1][0])


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "per parameter"])
def test_layers_that_run_twice_and_parameters_of_some_ranks_only_get_all_their_gradient(
    world2: WorkerPool, flat: bool
) -> None:
    world2.run(uneven, flat)


def refusals(rank: int, world: int) -> None:
    (model, optimizer), (late, theirs) = twins(True)
    x = inputs(world)[rank]
    loss(model, x).backward()
    with pytest.raises(RuntimeError, match=r"unit '.*' is updated during the backward"):
        clip_grad_norm_(model, 1.0)
    with pytest.raises(RuntimeError, match=r"unit '.*' gets more gradients.*is_last_backward"):
        loss(model, x).backward()
    optimizer.step()
    train(late, theirs, x)
    assert_equal(model, late)
    with pytest.raises(ValueError, match=r"already; remove\(\) it first"):
        optimizer_in_backward(model, optimizer)
    handle = optimizer_in_backward(late, theirs)
    handle.remove()
    loss(late, x).backward()
    assert clip_grad_norm_(late, 0.1) > 0.1
    with pytest.raises(ValueError, match="have gradients"):
        optimizer_in_backward(late, theirs)
    theirs.zero_grad()
    with pytest.raises(ValueError, match="no parameter of this model"):
        optimizer_in_backward(late, optimizer)
    with pytest.raises(ValueError, match="LBFGS"):
        optimizer_in_backward(late, torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))
    late.head.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"'head\.weight' has a hook"):
        optimizer_in_backward(late, theirs)


def test_what_can_not_be_updated_in_a_backward_says_so(world2: WorkerPool) -> None:
    world2.run(refusals)


def after_an_exception(rank: int, world: int) -> None:
    (model, optimizer), _ = twins(True)
    x = inputs(world)[rank]

    def fail(_: Tensor) -> None:
        raise KeyError("in the backward")

    def watch(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.layers[0].register_forward_hook(watch)
    with pytest.raises(KeyError):
        loss(model, x).backward()
    handle.remove()
    late, _ = pair(MLP, nested)
    late.load_state_dict(model.state_dict())
    theirs = adamw(late, True)
    saved = flat_optimizer_state_dict(model, optimizer)
    load_flat_optimizer_state_dict(late, theirs, saved)
    train(model, optimizer, x)
    train(late, theirs, x)
    assert_equal(model, late)


def test_training_goes_on_after_an_exception_in_the_backward(world2: WorkerPool) -> None:
    world2.run(after_an_exception)
