"""Captured steps against the same steps run eagerly; where there is no GPU, nothing is captured."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import MLP, assert_same_parameters, inputs, loss, nested, pair
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, clip_grad_norm_, flat_parameters, fully_shard
from ya_fsdp.checkpoint import get_full_state_dict
from ya_fsdp.graph import WARMUP_STEPS, CapturedStep, capture_step

STEPS = WARMUP_STEPS + 4
ON_GPU = test_device().type == "cuda"
ADAMW: dict[str, Any] = {"lr": 1e-2, "fused": True}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(flat_parameters(model), **ADAMW)


def twins(make: Callable[[], nn.Module] = MLP, **options: Any) -> tuple[Any, Any]:
    """Two sharded models with the same weights."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = make().to(test_device())
        for layer in model.layers:
            fully_shard(layer, **options)
        made.append(fully_shard(model, **options))
    return made[0], made[1]


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name  # type: ignore[attr-defined]


def eagerly(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, clip: float) -> Tensor:
    value = loss(model, x)
    value.backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model, clip)
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def captures(step: CapturedStep, number: int) -> None:
    assert step.captures == (number if ON_GPU else 0)


@contextmanager
def warnings_of_graph() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ya_fsdp")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def whole_steps(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    mine = torch.optim.AdamW(flat_parameters(model), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    step = capture_step(model, mine, loss, accumulation=2, clip=0.1)
    for index in range(WARMUP_STEPS + 2):
        parts = [inputs(world, seed=2 * index), inputs(world, seed=2 * index + 1)]
        value = step([part[rank] for part in parts])
        expected = sum(loss(reference, part[rank]).item() for part in parts) / 2
        assert value.item() == pytest.approx(expected, abs=1e-5)
        for part in parts:
            for x in part:
                (loss(reference, x) / (2 * world)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        theirs.step()
        theirs.zero_grad()
        assert_same_parameters(model, reference)
    captures(step, 1)
    assert step.eager_steps == (WARMUP_STEPS if ON_GPU else WARMUP_STEPS + 2)


def test_a_whole_step_equals_its_parts_run_by_hand(pool: WorkerPool) -> None:
    pool.run(whole_steps)


def schedules(rank: int, world: int) -> None:
    model, twin = twins()
    mine, theirs = adamw(model), adamw(twin)
    step = capture_step(model, mine, loss, clip=0.1)
    plans = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
        for optimizer in (mine, theirs)
    ]
    for seed in range(STEPS):
        x = inputs(world, seed=seed)[rank]
        assert torch.equal(step(x), eagerly(twin, theirs, x, 0.1))
        for plan in plans:
            plan.step()
        if seed == WARMUP_STEPS + 1:
            for optimizer in (mine, theirs):
                optimizer.param_groups[0]["weight_decay"] = 0.5
        assert_equal(model, twin)
        with torch.no_grad():
            assert torch.equal(model(x), twin(x))
        whole, expected = get_full_state_dict(model), get_full_state_dict(twin)
        assert all(torch.equal(whole[name], expected[name]) for name in expected)
    captures(step, 2)  # one for each weight decay


def test_replays_follow_schedules_and_settings_and_others_see_their_weights(
    world2: WorkerPool,
) -> None:
    world2.run(schedules)


def scaled(rank: int, world: int, clip: float | None) -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model, twin = twins(mp_policy=half)
    mine, theirs = adamw(model), adamw(twin)
    scalers = [
        torch.amp.GradScaler(test_device().type, init_scale=2.0**24, growth_interval=3)
        for _ in range(2)
    ]
    step = capture_step(model, mine, loss, clip=clip, scaler=scalers[0])
    skipped = 0
    for seed in range(3 * STEPS):
        x = inputs(world, seed=seed)[rank]
        value = loss(twin, x)
        scale = scalers[1].get_scale()
        scalers[1].scale(value).backward()
        if clip is not None:
            scalers[1].unscale_(theirs)
            clip_grad_norm_(twin, clip)
        scalers[1].step(theirs)
        scalers[1].update()
        theirs.zero_grad()
        skipped += scalers[1].get_scale() < scale
        assert torch.equal(step(x), value.detach())
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_equal(model, twin)
    assert 2 <= skipped < 3 * STEPS - 5, "some steps overflow and others train"
    captures(step, 1)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaler_skips_and_grows_as_it_does_eagerly(
    world2: WorkerPool, clip: float | None
) -> None:
    world2.run(scaled, clip)


class Dropping(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def dropout(rank: int, world: int) -> None:
    model, _ = twins(Dropping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    step = capture_step(model, optimizer, loss)
    x = inputs(world)[rank]
    losses = {step(x).item() for _ in range(STEPS + 4)}
    assert len(losses) == STEPS + 4, "every step draws its own"
    captures(step, 1)
    model.eval()
    expected = loss(model, x).item()
    assert step(x).item() == pytest.approx(expected, rel=1e-6)
    assert step(x).item() == pytest.approx(expected, rel=1e-6)
    captures(step, 2)


def test_every_replay_draws_its_own_dropout_and_evaluation_draws_none(world2: WorkerPool) -> None:
    world2.run(dropout)


def shapes(rank: int, world: int) -> None:
    model, twin = twins()
    mine, theirs = adamw(model), adamw(twin)
    step = capture_step(model, mine, loss, clip=1.0, max_captures=2)
    with warnings_of_graph() as said:
        for seed in range(2 * STEPS):
            for rows in (4, 2, 3):
                x = inputs(world, seed=seed)[rank][:rows]
                assert torch.equal(step(x), eagerly(twin, theirs, x, 1.0))
        assert_equal(model, twin)
    captures(step, 2)
    assert len(said) == (1 if ON_GPU else 0)
    assert all("max_captures" in message for message in said)


def test_as_many_shapes_as_allowed_are_captured_and_others_run_eagerly(world2: WorkerPool) -> None:
    world2.run(shapes)


class Asking(MLP):
    """Reads a value on the host, which no graph can."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e6:
            x = x / 2
        return super().forward(x)


def uncapturable(rank: int, world: int) -> None:
    model, twin = twins(Asking)
    mine, theirs = adamw(model), adamw(twin)
    step = capture_step(model, mine, loss, clip=1.0)
    with warnings_of_graph() as said:
        for seed in range(STEPS):
            x = inputs(world, seed=seed)[rank]
            assert torch.equal(step(x), eagerly(twin, theirs, x, 1.0))
            assert_equal(model, twin)
    captures(step, 0)
    assert step.eager_steps == STEPS
    if ON_GPU:
        assert len(said) == 1
        assert "the model raised" in said[0]


def test_a_step_that_cannot_be_captured_says_where_and_runs_eagerly(world2: WorkerPool) -> None:
    world2.run(uncapturable)


class Compiled(MLP):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="inductor" if ON_GPU else "aot_eager")


def compiled(rank: int, world: int) -> None:
    # Dynamo hides a warning of its own in a way that does not work where warnings are errors.
    warnings.simplefilter("ignore")
    model, twin = twins(Compiled)
    mine, theirs = adamw(model), adamw(twin)
    step = capture_step(model, mine, loss, clip=0.1)
    for seed in range(STEPS):
        x = inputs(world, seed=seed)[rank]
        assert torch.equal(step(x), eagerly(twin, theirs, x, 0.1))
        assert_equal(model, twin)
    captures(step, 1)


def test_steps_of_compiled_blocks_are_captured(world2: WorkerPool) -> None:
    world2.run(compiled)


def waiting_for_the_host(rank: int, world: int) -> None:
    model, _ = twins()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = torch.amp.GradScaler(test_device().type)
    if ON_GPU:
        with pytest.raises(ValueError, match="fused=True"):
            capture_step(model, optimizer, loss, scaler=scaler)
    else:
        capture_step(model, optimizer, loss, scaler=scaler)


def test_an_optimizer_that_asks_the_host_about_overflows_is_refused_on_a_gpu(
    world2: WorkerPool,
) -> None:
    world2.run(waiting_for_the_host)
