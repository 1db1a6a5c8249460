"""Hundreds of steps with everything that happens in a run: right to the end, and nothing grows.

The long one, 2,000 steps on four processes, takes minutes and runs when asked for:

    YA_FSDP_SOAK_STEPS=2000 python -m pytest tests/distributed/test_soak.py -k four
"""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.distributed.models import (
    MLP,
    assert_none_stale,
    assert_same_parameters,
    full,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    reference_backward,
)
from tests.harness import WorkerPool
from ya_fsdp import checkpoint
from ya_fsdp.checkpoint import get_full_state_dict, load_full_state_dict


class UserError(Exception):
    """Raised by a hook."""


def raise_in_forward(*_: Any) -> None:
    raise UserError


def raise_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("as if")


def resources() -> dict[str, int]:
    gc.collect()
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "os threads": len(list(Path("/proc/self/task").iterdir())),
        "objects": len(gc.get_objects()),
        "megabytes": psutil.Process().memory_info().rss >> 20,
    }


class Soak:
    def __init__(self, rank: int, world_size: int, shard: Any, folder: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.model, self.reference = pair(MLP, shard)
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (self.model, self.reference)
        ]
        self.saved: Any = None
        self.folder = folder
        self.in_folder: Any = None

    def backward(self, seed: int) -> None:
        xs = inputs(self.world_size, seed=seed)
        loss(self.model, xs[self.rank]).backward()
        reference_backward(self.reference, xs)

    def interrupted(self, seed: int, where: str) -> None:
        """A step that ends in an exception and is not repeated."""
        layer = self.model.layers[seed % 3]
        if where == "forward":
            handle = layer.net[1].register_forward_hook(raise_in_forward)
        else:
            handle = layer.net[1].register_full_backward_hook(raise_out_of_memory)
        with pytest.raises((UserError, torch.OutOfMemoryError)):
            loss(self.model, inputs(self.world_size, seed=seed)[self.rank]).backward()
        handle.remove()

    def step(self, seed: int, action: str) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if action == "evaluate":
            assert_none_stale(self.model, self.reference, inputs(1, seed=seed)[0])
        elif action in ("forward", "backward"):
            self.interrupted(seed, action)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        elif action == "save":
            self.saved = get_full_state_dict(self.model, rank0_only=False)
            copies = {k: v.clone() for k, v in self.reference.state_dict().items()}
            self.saved = (self.saved, copies)
        elif action == "load" and self.saved is not None:
            load_full_state_dict(self.model, self.saved[0])
            self.reference.load_state_dict(self.saved[1])
        elif action == "accumulate":
            with self.model.no_sync():
                self.backward(seed + 1000)
        elif action == "checkpoint":
            checkpoint.save(self.folder, self.model, self.optimizers[0], step=seed, keep_last=2)
            self.in_folder = copy.deepcopy(
                (self.reference.state_dict(), self.optimizers[1].state_dict())
            )
        elif action == "restore" and self.in_folder is not None:
            newest = checkpoint.latest(self.folder)
            checkpoint.load(newest, self.model, self.optimizers[0])
            self.reference.load_state_dict(self.in_folder[0])
            self.optimizers[1].load_state_dict(copy.deepcopy(self.in_folder[1]))
        self.backward(seed)
        for optimizer in self.optimizers:
            optimizer.step()


ACTIONS = (
    "train",
    "train",
    "train",
    "evaluate",
    "forward",
    "backward",
    "save",
    "load",
    "accumulate",
    "checkpoint",
    "restore",
)


def soak(
    rank: int, world_size: int, shard: Any, steps: int, folder: str
) -> tuple[dict[str, int], ...]:
    run = Soak(rank, world_size, shard, folder)
    choose = random.Random(5)
    before = resources()  # the first call makes objects of its own
    for step in range(steps):
        run.step(step, choose.choice(ACTIONS))
        if step == steps // 2:
            before = resources()
    after = resources()
    assert_same_parameters(run.model, run.reference, atol=1e-3)
    # The two have not simply stayed where they began.
    torch.manual_seed(0)
    start = MLP().to(full(run.model.head.weight).device)
    assert (full(run.model.head.weight) - start.head.weight).abs().max() > 0.02
    return before, after


def assert_nothing_grew(before: dict[str, int], after: dict[str, int]) -> None:
    assert after["file descriptors"] <= before["file descriptors"]
    assert after["threads"] <= before["threads"]
    assert after["os threads"] <= before["os threads"]
    assert after["objects"] <= before["objects"] + 60
    assert after["megabytes"] <= before["megabytes"] + 8


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shard", [leaf, nested], ids=["leaf", "nested"])
def test_a_long_eventful_run_stays_right_and_grows_nothing(
    world2: WorkerPool, shard: Any, tmp_path: Path
) -> None:
    for before, after in world2.run(soak, shard, 150, str(tmp_path), timeout=180):
        assert_nothing_grew(before, after)


LONG = int(os.environ.get("YA_FSDP_SOAK_STEPS", "0"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not LONG, reason="takes minutes; set YA_FSDP_SOAK_STEPS=2000")
def test_a_very_long_run_of_four_processes_stays_right_and_grows_nothing(
    world4: WorkerPool, tmp_path: Path
) -> None:
    for before, after in world4.run(soak, nested, LONG, str(tmp_path), timeout=7000):
        assert_nothing_grew(before, after)
