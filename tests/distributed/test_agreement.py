"""Ranks that disagree, and YA_FSDP_DEBUG=1: an error on every rank, never a hang or a silence."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.models import (
    CLASSES,
    MLP,
    SHARDINGS,
    WIDTH,
    inputs,
    loss,
    pair,
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool, test_device, uses_nccl
from ya_fsdp import agreement, watchdog
from ya_fsdp.build import schedule_of, state_of

REPOSITORY = Path(__file__).parents[2]


class Ordered(MLP):
    """Runs its layers in the order it is told."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x)


def messages(step: Callable[[], Any]) -> str:
    """The text of the RuntimeError that ``step`` raises."""
    with pytest.raises(RuntimeError) as caught:
        step()
    return str(caught.value)


def step_of(model: Any, x: Tensor) -> Callable[[], Any]:
    return lambda: loss(model, x).backward()


# ---- another order -------------------------------------------------------------------------------


def run_in_another_order(rank: int, world_size: int, name: str) -> str:
    model, _ = pair(Ordered, SHARDINGS[name])
    if rank == 1:
        model.order = (2, 1, 0)
    return messages(step_of(model, inputs(world_size)[rank]))


@pytest.mark.parametrize("name", ["leaf", "nested"])
def test_ranks_that_run_layers_in_another_order_are_told_at_once(
    world2: WorkerPool, name: str
) -> None:
    zero, one = world2.run(run_in_another_order, name)
    assert zero == one  # nobody is left waiting
    assert "backward pass 1:" in zero
    assert "rank 0 gathers 'layers.0', rank 1 gathers 'layers.2'" in zero


def freeze_differently(rank: int, world_size: int, agreed: int, passed: int) -> str:
    every, agreement.EVERY = agreement.EVERY, 4
    try:
        model, _ = pair(MLP)
        x = inputs(world_size)[rank]
        for _ in range(agreed):
            loss(model, x).backward()
        if rank == 1:
            model.layers[1].net[0].weight.requires_grad_(False)
        for _ in range(passed):
            loss(model, x).backward()
        return messages(step_of(model, x))
    finally:
        agreement.EVERY = every


@pytest.mark.parametrize("agreed, passed", [(0, 0), (1, 0), (2, 1)])
def test_a_parameter_frozen_on_one_rank_is_told_at_the_next_comparison(
    world2: WorkerPool, agreed: int, passed: int
) -> None:
    for message in world2.run(freeze_differently, agreed, passed):
        assert f"backward pass {agreed + passed + 1}:" in message
        assert "requires_grad in 'layers.1', alike on ranks [0] and on [1]" in message


# ---- replicas ------------------------------------------------------------------------------------


def hsdp_mesh() -> DeviceMesh:
    return init_device_mesh(test_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))


def evaluate_on_one_replica(rank: int, world_size: int) -> None:
    model, reference = pair(MLP, mesh=hsdp_mesh())
    if rank < 2:
        with torch.no_grad():
            model(inputs(1)[0])
    for step in range(3):
        train_step(model, reference, rank, inputs(world_size, seed=step))


def disagreeing_replicas(rank: int, world_size: int, rank_apart: int) -> str:
    model, _ = pair(Ordered, mesh=hsdp_mesh())
    if rank == rank_apart or (rank_apart < 0 and rank >= 2):
        model.order = (2, 1, 0)
    return messages(step_of(model, inputs(world_size)[rank]))


def test_a_replica_may_evaluate_alone(world4: WorkerPool) -> None:
    world4.run(evaluate_on_one_replica)


def test_replicas_that_run_in_another_order_are_told_on_every_rank(world4: WorkerPool) -> None:
    for rank, message in enumerate(world4.run(disagreeing_replicas, -1)):
        own = sorted({rank % 2, rank % 2 + 2})
        assert f"rank {own[0]} reduces the gradients of 'layers.2'" in message
        assert f"rank {own[1]} reduces the gradients of 'layers.0'" in message


def test_one_rank_apart_is_told_in_every_shard_group(world4: WorkerPool) -> None:
    answers = world4.run(disagreeing_replicas, 3)
    assert all("did not run the same collectives" in message for message in answers)
    for message in answers[2:]:
        assert "rank 2 gathers 'layers.0', rank 3 gathers 'layers.2'" in message


# ---- debug mode ----------------------------------------------------------------------------------


def in_debug(function: Callable[..., Any], *args: Any) -> Any:
    os.environ["YA_FSDP_DEBUG"] = "1"
    try:
        return function(*args)
    finally:
        del os.environ["YA_FSDP_DEBUG"]


def skip_layer(rank: int, world_size: int) -> str:
    def build() -> str:
        agreement._NAMES.clear()  # which other models have filled
        model, _ = pair(Ordered)
        if rank == 1:
            model.order = (0, 2)
        return messages(step_of(model, inputs(world_size)[rank]))

    return in_debug(build)


def test_debug_mode_names_the_unit_that_a_rank_skips_before_anything_is_sent(
    world2: WorkerPool,
) -> None:
    zero, one = world2.run(skip_layer)
    assert zero == one
    assert "rank 0 gathers 'layers.1', rank 1 gathers 'layers.2'" in zero
    assert "after 1 equal ones" in zero


def train_in_debug(rank: int, world_size: int, name: str, reshard: bool) -> None:
    def train() -> None:
        model, reference = pair(MLP, SHARDINGS[name], reshard_after_forward=reshard)
        optimizers = sgd_pair(model, reference)
        for step in range(3):
            xs = inputs(world_size, seed=step)
            train_step(model, reference, rank, xs, optimizers=optimizers)
        assert schedule_of(model if name == "root" else model.layers[0]).trail.debug

    in_debug(train)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", SHARDINGS)
def test_debug_mode_trains_like_any_other(world2: WorkerPool, name: str, reshard: bool) -> None:
    world2.run(train_in_debug, name, reshard)


class KeepsView(nn.Module):
    """Keeps an alias of its weight that no check can see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def read_alias(rank: int, world_size: int) -> tuple[bool, bool]:
    def read() -> bool:
        model, _ = pair(KeepsView)
        kept = []
        model.layers[0].register_forward_hook(lambda m, *_: kept.append(m.weight.detach()))
        model(inputs(world_size)[rank])
        return bool(kept[0].isnan().all())

    return read(), in_debug(read)


def test_debug_mode_fills_released_buffers_with_nan(world2: WorkerPool) -> None:
    for plain, debug in world2.run(read_alias):
        assert debug and not plain


# ---- a rank that does not come -------------------------------------------------------------------


def short_mesh(seconds: float) -> DeviceMesh:
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds), backend="gloo")
    return DeviceMesh.from_group(group, "cpu")


def extra_forward(rank: int, world_size: int, folder: str) -> tuple[str, float]:
    """Rank 0 runs one forward more; rank 1 waits at the end without closing its connections."""
    os.environ.update(YA_FSDP_DUMP_DIR=folder, SOME_TOKEN="a secret of the environment")
    model, _ = pair(MLP, mesh=short_mesh(2))
    x = inputs(world_size)[rank]
    loss(model, x).backward()
    start = time.monotonic()
    message = ""
    if rank == 0:
        message = messages(lambda: model(x))
    took = time.monotonic() - start
    dist.barrier()
    return message, took


@pytest.mark.skipif(uses_nccl(), reason="the stuck collective is gloo's; NCCL's raises nothing")
def test_a_collective_that_gets_stuck_ends_with_where_every_rank_stands(
    world2: WorkerPool, tmp_path: Path
) -> None:
    (message, took), _ = world2.run(extra_forward, str(tmp_path))
    assert (
        "rank 0: a collective failed while gathering unit 'layers.0' (ahead of its use)" in message
    )
    assert "the last one: this rank reduces the gradients of 'layers.0'" in message
    assert re.search(
        r"rank 1: \d+ collectives started, the last one: reduces the gradients of 'layers\.0'",
        message,
    )
    assert "YA_FSDP_DEBUG=1" in message
    assert 1 < took < 30
    (dump,) = tmp_path.iterdir()
    assert str(dump) in message and dump.stat().st_mode & 0o077 == 0
    text = dump.read_text()
    for part in (
        "rank 0: a collective failed while gathering unit 'layers.0'",
        "rank 1: ",
        "last collectives, oldest first:\n  gathers 'layers.0'",
        "thread MainThread:",
        "in launch_gather",
    ):
        assert part in text, part
    assert "a secret of the environment" not in text and "SOME_TOKEN" not in text


def raise_and_tell(rank: int, world_size: int, where: str) -> list[str]:
    model, _ = pair(MLP)
    x = inputs(world_size)[rank]
    loss(model, x).backward()
    trail = schedule_of(model).trail
    said = [trail.status()]

    def raises(*_: Any) -> None:
        raise ZeroDivisionError

    def register(_: Any, args: Any, output: Tensor) -> None:
        raises() if where == "forward" else output.register_hook(raises)

    handle = model.layers[1].register_forward_hook(register)
    with pytest.raises(ZeroDivisionError):
        loss(model, x).backward()
    handle.remove()
    return [*said, trail.status()]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_where_a_rank_stands_tells_of_an_exception_that_cut_its_pass_short(
    world2: WorkerPool, where: str
) -> None:
    for before, after in world2.run(raise_and_tell, where):
        assert "exception" not in before
        assert re.search(r"; an exception ended a pass of it after \d+ collectives", after)


class FakeEvent:
    """Says whether the device has passed it."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


def stuck_on_a_device(rank: int, world_size: int, folder: str) -> tuple[bool, str, str]:
    """What the watchdog does where the host runs ahead and nothing raises."""
    os.environ["YA_FSDP_DUMP_DIR"] = folder
    model, _ = pair(MLP)
    loss(model, inputs(world_size)[rank]).backward()
    trail = schedule_of(model).trail
    watched = watchdog._Watched(trail)
    watched.look(0.0)
    timeout = trail.timeout()
    assert timeout == 120  # the harness's
    head, first = (state_of(module).unit for module in (model.head, model.layers[0]))
    done, reused, waiting = FakeEvent(True), FakeEvent(False), FakeEvent(False)
    trail.completes_with(reused)  # recorded again below: says nothing about this one
    trail.note(first, agreement.Kind.GATHER, 1)
    trail.completes_with(done)
    trail.note(head, agreement.Kind.GATHER, 1)
    trail.completes_with(reused)
    trail.note(head, agreement.Kind.REDUCE, 1)
    trail.completes_with(waiting)
    oldest = trail.stuck()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        watched.look(1.0)  # progress
        watched.look(1.0 + 0.7 * timeout)  # tells the other ranks, reports nothing
        early = said.getvalue()
        dist.barrier()
        watched.look(1.0 + 0.9 * timeout)
        watched.look(1.0 + 0.95 * timeout)  # once
    waiting.passed = reused.passed = True
    quiet = trail.stuck() is None
    dist.barrier()  # both have read what the other one told
    trail.note(first, agreement.Kind.GATHER, 1)
    watched.look(2.0 + timeout)
    return quiet and not early, str(oldest), said.getvalue()


def test_a_collective_that_a_device_does_not_finish_is_reported_before_the_timeout(
    world2: WorkerPool, tmp_path: Path
) -> None:
    for rank, (quiet, oldest, said) in enumerate(world2.run(stuck_on_a_device, str(tmp_path))):
        assert quiet
        assert oldest == "gathers 'head'"
        assert said.count("ya_fsdp: rank") == 1
        assert f"ya_fsdp: rank {rank}: gathers 'head' has not finished" in said
        assert f"rank {1 - rank}: " in said and "reduces the gradients of 'head'" in said
    assert len(list(tmp_path.iterdir())) == 2


SKIPS = """
import datetime, sys
import torch, torch.distributed as dist
from torch import nn
from ya_fsdp import fully_shard

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=3))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
model(torch.randn(2, 6)).sum().backward()

def skipping(x):
    for index, layer in enumerate(model):
        if not (rank == 1 and index == 1):
            x = layer(x)
    return x

model.forward = skipping
model(torch.randn(2, 6)).sum().backward()
print("trained on")
"""


def test_processes_one_of_which_skips_a_unit_end_with_an_error_and_not_never() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SKIPS, str(rank), f"{folder}/store"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        answers = [process.communicate(timeout=90) for process in processes]
    assert all(process.returncode != 0 for process in processes), answers
    assert all("trained on" not in out for out, _ in answers)
    assert any("a collective failed while" in error or "differ" in error for _, error in answers)
    assert any("unit '" in error or "gathers '" in error for _, error in answers)


def out_of_memory(rank: int, world_size: int) -> None:
    """An allocation that fails inside a collective keeps its class, and training goes on."""
    model, reference = pair(MLP)
    schedule = schedule_of(model)
    train_step(model, reference, rank, inputs(world_size))
    collectives = schedule.collectives

    class Full(type(collectives)):  # type: ignore[misc]
        def all_gather(self, *args: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

    schedule.collectives = Full()
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        model(inputs(1)[0])
    schedule.collectives = collectives
    for step in range(2):
        train_step(model, reference, rank, inputs(world_size, seed=step))


def test_out_of_memory_in_a_gather_keeps_its_class_and_training_goes_on(
    world2: WorkerPool,
) -> None:
    world2.run(out_of_memory)


def test_a_trail_names_the_first_difference_among_many_more_than_it_remembers() -> None:
    short, long = agreement.Path(), agreement.Path()
    for index in range(3 * agreement.REMEMBERED):
        short.add(index)
        long.add(index if index != 3 * agreement.REMEMBERED - 5 else 7)
    assert short.value != long.value
    assert short.count == long.count == 3 * agreement.REMEMBERED
    assert len(short.entries) == agreement.REMEMBERED


def test_fully_shard_reads_the_debug_switch_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("YA_FSDP_DEBUG", value)
        assert agreement.debug_mode() is expected
