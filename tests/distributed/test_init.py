"""Meta device, random initialisation, conversions of device, cost of sharding, no group."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import (
    MLP,
    assert_same_parameters,
    full,
    inputs,
    leaf,
    loss,
    nested,
    root,
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool, test_device, uses_nccl
from ya_fsdp import RaggedShardDTensor, fully_shard

ROOT = Path(__file__).parents[2]


# ---- meta device ---------------------------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("frequencies", torch.arange(3.0) + 1, persistent=False)
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.frequencies.sum()


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rotary() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def on_meta(kind: Any) -> Any:
    with torch.device("meta"):
        return kind()


def used_on_meta(rank: int, world: int) -> None:
    for shard in (leaf, nested, root):
        model = shard(on_meta(MLP))
        with pytest.raises(RuntimeError, match=r"meta.*layers\.0\.net\.0\.weight.*to_empty"):
            model(inputs(world)[rank])
        partly = MLP().to(test_device())
        partly.head.to("meta")
        shard(partly)
        with pytest.raises(RuntimeError, match=r"2 parameters.*head\.weight, head\.bias"):
            partly(inputs(world)[rank])
        model.to_empty(device=test_device())
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        assert torch.isfinite(loss(model, inputs(world)[rank]))


def test_a_forward_on_meta_names_the_parameters_that_are_there(world2: WorkerPool) -> None:
    world2.run(used_on_meta)


def materialise(rank: int, world: int) -> None:
    for shard in (leaf, nested, root):
        model = shard(on_meta(WithBuffers))
        for buffer in model.buffers():
            assert type(buffer) is Tensor
            assert buffer.device.type == "meta"
        for param in model.parameters():
            assert isinstance(param, RaggedShardDTensor)
            assert param.device.type == "meta"
            assert param.to_local().device.type == "meta"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.to_empty(device=test_device())
        reference = WithBuffers().to(test_device())
        plain = dict(reference.named_parameters())
        with torch.no_grad():
            for name, param in model.named_parameters():
                assert param.device.type == test_device().type
                param.copy_(plain[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(reference.get_buffer(name))
        assert_same_parameters(model, reference)
        optimizers = (optimizer, torch.optim.SGD(reference.parameters(), lr=0.1))
        for step in range(2):
            train_step(model, reference, rank, inputs(world, seed=step), optimizers=optimizers)


def test_a_model_sharded_on_meta_is_materialised_and_trains(pool: WorkerPool) -> None:
    pool.run(materialise)


def assign_to_meta(rank: int, world: int) -> None:
    reference = MLP().to(test_device())
    sharded = nested(MLP().to(test_device()))
    sharded.load_state_dict(_like(reference, sharded))
    model = nested(on_meta(MLP))
    model.load_state_dict(sharded.state_dict(), assign=True)
    assert_same_parameters(model, reference)
    optimizers = sgd_pair(model, reference)
    for step in range(2):
        train_step(model, reference, rank, inputs(world, seed=step), optimizers=optimizers)


def _like(plain: nn.Module, sharded: nn.Module) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in sharded.state_dict().items()}
    for name, value in plain.state_dict().items():
        state[name].copy_(value)
    return state


def test_a_state_dict_assigned_to_a_model_on_meta_is_its_weights(pool: WorkerPool) -> None:
    pool.run(assign_to_meta)


def assign_whole(rank: int, world: int, dtype: torch.dtype) -> None:
    reference = MLP().to(test_device(), dtype)
    model = nested(MLP().to(test_device()))
    model.load_state_dict(
        {name: nn.Parameter(value.clone()) for name, value in reference.state_dict().items()},
        assign=True,
    )
    assert all(isinstance(p, RaggedShardDTensor) for p in model.parameters())
    assert all(p.dtype == dtype for p in model.parameters())
    assert_same_parameters(model, reference)
    optimizers = sgd_pair(model, reference)
    for step in range(2):
        x = inputs(world, seed=step, dtype=dtype)
        train_step(model, reference, rank, x, optimizers=optimizers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["same dtype", "fp64"])
def test_whole_tensors_assigned_to_a_sharded_model_are_cut(
    pool: WorkerPool, dtype: torch.dtype
) -> None:
    pool.run(assign_whole, dtype)


# ---- random initialisation -----------------------------------------------------------------------

INITIALISERS = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "truncated": nn.init.trunc_normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(17, 6))
        self.b = nn.Parameter(torch.zeros(17, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.t() + self.b.sum()


def initialise(rank: int, world: int) -> dict[str, Tensor]:
    results = {}
    for name, initialiser in INITIALISERS.items():
        for granularity in ("row", "element"):
            model = fully_shard(Weights().to(test_device()), granularity=granularity)
            torch.manual_seed(3)
            with torch.no_grad():
                initialiser(model.a)
                initialiser(model.b)
            pieces = full(model.a.detach()).clone(), full(model.b.detach()).clone()
            assert not torch.equal(*pieces)
            assert pieces[0].unique().numel() > 95, "ranks drew the same numbers"
            results[f"{name} {granularity}"] = torch.stack(pieces)
    return results


def test_random_weights_do_not_depend_on_the_number_of_ranks(
    world1: WorkerPool, world2: WorkerPool, world3: WorkerPool
) -> None:
    (alone,) = world1.run(initialise)
    for pool in (world2, world3):
        for results in pool.run(initialise):
            for name, expected in alone.items():
                assert torch.equal(results[name], expected), name


def reset(rank: int, world: int) -> dict[str, Tensor]:
    model = leaf(on_meta(MLP))
    model.to_empty(device=test_device())
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def test_reset_parameters_does_not_depend_on_the_number_of_ranks(
    world1: WorkerPool, world3: WorkerPool
) -> None:
    (alone,) = world1.run(reset)
    for results in world3.run(reset):
        for name, expected in alone.items():
            assert torch.equal(results[name], expected), name


# ---- what sharding costs -------------------------------------------------------------------------


def resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def peak_while(call: Any) -> int:
    """Most bytes above the start while ``call`` runs, sampled by a thread."""
    done = threading.Event()
    start = peak = resident_kb()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, resident_kb())

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    done.set()
    thread.join()
    return (max(peak, resident_kb()) - start) * 1024


def shard_large(rank: int, world: int) -> None:
    fully_shard(nn.Linear(8, 8))  # imports and meshes
    model = nn.Linear(5000, 5000)
    numel = sum(p.numel() for p in model.parameters())
    gc.collect()
    before = resident_kb()
    extra = peak_while(lambda: fully_shard(model))
    assert extra < 4.4 * numel, f"{extra / numel:.2f} bytes per element"
    after = (resident_kb() - before) * 1024
    assert after < -0.9 * 2 * numel, "half of the weights should be gone with two ranks"


@pytest.mark.skipif(uses_nccl(), reason="looks at the host's memory, where shards are not then")
def test_sharding_needs_no_more_than_a_copy_and_keeps_only_the_shard(world2: WorkerPool) -> None:
    world2.run(shard_large)


def shard_many(rank: int, world: int) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(64, 1024)) for _ in range(100))

        def forward(self, x: Tensor) -> Tensor:
            return sum((x @ w for w in self.weights), start=x.new_zeros(()))

    fully_shard(nn.Linear(8, 8))
    model = Many()
    items: list[int] = []
    original = Tensor.item

    def counting(self: Tensor) -> Any:
        items.append(1)
        return original(self)

    Tensor.item = counting  # type: ignore[method-assign,assignment]
    try:
        start = time.perf_counter()
        fully_shard(model)
        seconds = time.perf_counter() - start
    finally:
        Tensor.item = original  # type: ignore[method-assign]
    assert not items
    # 46 ms on one busy core (best of three); a value read per parameter and rank costs seconds.
    assert seconds < 2.0


def test_sharding_a_hundred_parameters_reads_no_value_and_takes_no_time(
    world2: WorkerPool,
) -> None:
    world2.run(shard_many)


# ---- without a group -----------------------------------------------------------------------------

NO_GROUP = """
import torch
from torch import nn
from ya_fsdp import fully_shard

model = nn.Linear(2, 2)
try:
    fully_shard(model)
except RuntimeError as error:
    message = str(error)
assert "torchrun" in message and "init_process_group" in message and "mesh=" in message, message
assert type(model) is nn.Linear and type(model.weight) is nn.Parameter
assert not torch.distributed.is_initialized()
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""

TORCHRUN = """
import torch
from torch import nn
from ya_fsdp import YaFSDP, fully_shard

model = fully_shard(nn.Linear(2, 2))
assert torch.distributed.get_world_size() == 1
model(torch.ones(1, 2)).sum().backward()
assert model.weight.grad.full_tensor().shape == (2, 2)
classic = YaFSDP(
    nn.LayerNorm(2),
    zero_stage=3,
    param_dtype=torch.float32,
    modules_to_wrap_with_names=[],
    layer_norm_module_cls=nn.LayerNorm,
    gradient_accumulation_steps=1,
)
classic(torch.ones(1, 2)).sum().backward()
torch.distributed.destroy_process_group()
"""


# What torch's CUDA wheel, pip's default on Linux, says on a machine without a GPU.
CUDA_WHEEL = """
import torch

def current_accelerator(check_available=False):
    return None if check_available else torch.device("cuda")

torch.accelerator.current_accelerator = current_accelerator
"""


def run_script(script: str, **environment: str) -> None:
    clean = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_without_a_group_the_error_says_what_to_do_and_nothing_has_changed() -> None:
    run_script(NO_GROUP)


@pytest.mark.parametrize("script", [TORCHRUN, CUDA_WHEEL + TORCHRUN], ids=["", "CUDA wheel"])
def test_a_torchrun_environment_is_enough(script: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    run_script(
        script,
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT=port,
    )
