"""Flat parameters, clipping over flat shards, whole steps, against a plain model and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.distributed.models import (
    MLP,
    assert_same_parameters,
    full,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    reference_backward,
    root,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import (
    clip_grad_norm_,
    flat_optimizer_state_dict,
    flat_parameters,
    load_flat_optimizer_state_dict,
)

SHARDS = {"leaf": leaf, "nested": nested, "root": root}
DECAY = {"decay": {"weight_decay": 0.5}, "rest": {"weight_decay": 0.0}}


def by_dim(name: str, param: Tensor) -> str:
    return "decay" if param.ndim > 1 else "rest"


def plain_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if by_dim(n, p) == key], **options}
        for key, options in DECAY.items()
    ]


def flat_adamw(rank: int, world: int, shard: str, max_norm: float, **options: Any) -> None:
    model, reference = pair(MLP, SHARDS[shard])
    flat = flat_parameters(model, DECAY, by_dim)
    mine = torch.optim.AdamW(flat, lr=1e-2, **options)
    theirs = torch.optim.AdamW(plain_groups(reference), lr=1e-2)
    for step in range(4):
        x = inputs(world, seed=step)
        loss(model, x[rank]).backward()
        reference_backward(reference, x)
        norm = clip_grad_norm_(model, max_norm)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        torch.testing.assert_close(norm, expected)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("shard", SHARDS)
def test_an_optimizer_over_flat_parameters_equals_one_over_all(
    pool: WorkerPool, shard: str, options: dict[str, Any]
) -> None:
    pool.run(flat_adamw, shard, 0.1, **options)


def flat_owns_every_element_once(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested)
    local = sum(p.to_local().numel() for p in model.parameters())
    flat = flat_parameters(model)
    padding = sum(p.numel() for p in flat) - local
    assert padding >= 0
    assert len(flat) < len(list(model.parameters()))
    with torch.no_grad():
        for p in flat:
            p.fill_(3.0)
    assert all(torch.equal(full(p), torch.full_like(full(p), 3.0)) for p in model.parameters())


def test_flat_parameters_share_the_memory_of_every_sharded_parameter(pool: WorkerPool) -> None:
    pool.run(flat_owns_every_element_once)


def accumulate_flat(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    mine = torch.optim.SGD(flat_parameters(model), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        for part in range(3):
            x = inputs(world, seed=10 * step + part)
            model.set_requires_gradient_sync(part != 1)
            loss(model, x[rank]).backward()
            reference_backward(reference, x)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        assert_same_parameters(model, reference)


def test_flat_gradients_accumulate_with_and_without_communication(pool: WorkerPool) -> None:
    pool.run(accumulate_flat)


def flat_state(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    mine = torch.optim.AdamW(flat_parameters(model), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    x = inputs(world)
    for _ in range(2):
        loss(model, x[rank]).backward()
        reference_backward(reference, x)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    saved = flat_optimizer_state_dict(model, mine)
    truth = get_optimizer_state_dict(reference, theirs)["state"]
    assert set(saved["state"]) == set(truth)
    for name, values in truth.items():
        for key, value in values.items():
            torch.testing.assert_close(full(saved["state"][name][key]), value)
    fresh, _ = pair(MLP, nested)
    with torch.no_grad():
        for target, source in zip(fresh.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    other = torch.optim.AdamW(flat_parameters(fresh), lr=1e-2)
    load_flat_optimizer_state_dict(fresh, other, saved)
    loss(fresh, x[rank]).backward()
    reference_backward(reference, x)
    other.step()
    theirs.step()
    assert_same_parameters(fresh, reference)


def test_flat_optimizer_state_is_kept_by_parameter_name(pool: WorkerPool) -> None:
    pool.run(flat_state)


def clip_any_norm(rank: int, world: int) -> None:
    for order in (1.0, 2.0, 3.0, float("inf")):
        model, reference = pair(MLP, nested)
        x = inputs(world)
        loss(model, x[rank]).backward()
        reference_backward(reference, x)
        norm = clip_grad_norm_(model, 0.05, order)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, order)
        torch.testing.assert_close(norm, expected)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)
    with pytest.raises(ValueError, match="norm_type must be positive"):
        clip_grad_norm_(model, 1.0, 0.0)


def test_clipping_gives_the_global_norm_of_any_order(pool: WorkerPool) -> None:
    pool.run(clip_any_norm)


def wrong_groups(rank: int, world: int) -> None:
    model, _ = pair(MLP, root)
    with pytest.raises(ValueError, match="groups and key go together"):
        flat_parameters(model, DECAY)
    with pytest.raises(ValueError, match="'other' is not in groups"):
        flat_parameters(model, DECAY, lambda name, param: "other")


def test_flat_parameters_refuse_half_a_grouping(pool: WorkerPool) -> None:
    pool.run(wrong_groups)


def one_rank_overflows(rank: int, world: int, **options: Any) -> None:
    model, reference = pair(MLP, nested)
    mine = torch.optim.AdamW(flat_parameters(model), lr=1e-2, **options)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(test_device().type, init_scale=1024.0, growth_interval=100)
    for step in range(4):
        x = inputs(world, seed=step)
        scaler.scale(loss(model, x[rank])).backward()
        if step == 1 and rank == 0:
            largest = max(mine.param_groups[0]["params"], key=lambda p: p.numel())
            largest.grad[0] = float("inf")
        if step == 2:
            scaler.unscale_(mine)
        scaler.step(mine)
        scaler.update()
        mine.zero_grad()
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        reference_backward(reference, x)
        if step != 1:
            theirs.step()
        theirs.zero_grad()
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_of_flat_parameters_on_all(
    pool: WorkerPool, options: dict[str, Any]
) -> None:
    pool.run(one_rank_overflows, **options)


def norms_of_torch(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    flat = flat_parameters(model)
    x = inputs(world)
    loss(model, x[rank]).backward()
    reference_backward(reference, x)
    before = [full(p.grad) for p in model.parameters()]
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match=r"ya_fsdp\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(flat, 0.05, foreach=foreach)
    with pytest.raises(RuntimeError, match="another number on every rank"):
        flat[0].grad.norm()
    for grad, p in zip(before, model.parameters(), strict=True):
        assert torch.equal(grad, full(p.grad))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.testing.assert_close(full(norm), nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)


def test_torchs_clipping_is_right_over_the_model_and_refused_over_flat_parameters(
    pool: WorkerPool,
) -> None:
    pool.run(norms_of_torch)


class Lion(torch.optim.Optimizer):
    """Nobody here knows it."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.add_(param.grad.sign(), alpha=-0.1)


def said_by_us(action: Callable[[], object]) -> list[str]:
    """Warnings that the library logs meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ya_fsdp").addHandler(handler)
    try:
        action()
    finally:
        logging.getLogger("ya_fsdp").removeHandler(handler)
    return said


def nothing_loaded(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested)
    optimizer = torch.optim.AdamW(flat_parameters(model), lr=1e-2)
    empty = flat_optimizer_state_dict(model, optimizer)
    (message,) = said_by_us(lambda: load_flat_optimizer_state_dict(model, optimizer, empty))
    assert "begins anew" in message
    loss(model, inputs(world)[rank]).backward()
    optimizer.step()
    full_state = flat_optimizer_state_dict(model, optimizer)
    assert not said_by_us(lambda: load_flat_optimizer_state_dict(model, optimizer, full_state))


def test_loading_an_empty_optimizer_state_is_warned_of(world2: WorkerPool) -> None:
    world2.run(nothing_loaded)


def optimizers_beyond_elements(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    flat = flat_parameters(model)
    x = inputs(world)
    loss(model, x[rank]).backward()
    before = [full(p) for p in model.parameters()]
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        optimizer = kind(flat)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"{kind.__name__}.*model\.parameters\(\)"):
                optimizer.step(lambda: loss(model, x[rank]))
    assert all(torch.equal(p, full(q)) for p, q in zip(before, model.parameters(), strict=True))
    lion = Lion(flat, {})
    said = said_by_us(lion.step) + said_by_us(lion.step)
    assert len(said) == 1
    assert said[0].startswith("Lion updates flat parameters")
    reference_backward(reference, x)
    with torch.no_grad():
        for p in reference.parameters():
            p.sub_(p.grad.sign(), alpha=0.2)
    assert_same_parameters(model, reference)


def test_optimizers_that_need_whole_parameters_are_refused_or_asked_about(pool: WorkerPool) -> None:
    pool.run(optimizers_beyond_elements)
