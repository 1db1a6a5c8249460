"""Optimizer state cut over the replicas of a 2-D mesh, too, against a plain model on 4 ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.distributed.models import (
    MLP,
    assert_none_stale,
    assert_same_gradients,
    assert_same_parameters,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    reference_backward,
    root,
    train_step,
)
from tests.distributed.test_hsdp import SHAPES, mesh_of
from tests.distributed.test_secondary import NODE, Layers, Wires, unit_bytes
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from ya_fsdp.build import groups_of, units_of

IDS = ["2x2", "4x1", "1x4"]


def options(*shape: int) -> dict[str, Any]:
    return {"mesh": mesh_of((shape[0], shape[1])), "shard_optimizer_over_replicas": True}


def train(rank: int, world: int, shape: tuple[int, int]) -> None:
    for shard in (leaf, nested, root):
        model, reference = pair(MLP, shard, **options(*shape))
        total = sum(p.numel() for p in reference.parameters())
        mine = sum(group.layout.shard_numel for group in groups_of(model))
        assert mine < total / world + 200, "a quarter and padding"
        optimizers = tuple(torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, reference))
        for step in range(3):
            x = inputs(world, seed=step)
            train_step(model, reference, rank, x, optimizers=optimizers)
            assert_none_stale(model, reference, x[rank])
        state = optimizers[0].state
        moments = sum(state[p]["exp_avg"].to_local().numel() for p in model.parameters())
        assert moments <= mine
        loss(model, x[rank]).backward()
        reference_backward(reference, x)
        truth = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        assert float(clip_grad_norm_(model, 0.01)) == pytest.approx(float(truth), rel=1e-5)
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_shards_over_replicas_train_as_the_whole_model(
    world4: WorkerPool, shape: tuple[int, int]
) -> None:
    world4.run(train, shape)


def accumulate(rank: int, world: int, shape: tuple[int, int], how: str) -> None:
    model, reference = pair(MLP, nested, **options(*shape))
    for _step in range(2):
        for micro in range(3):
            x = inputs(world, seed=micro)
            if how == "no outer sums":
                model.set_requires_all_reduce(micro == 2)
            quiet = how == "no_sync" and micro < 2
            with model.no_sync() if quiet else nullcontext():
                loss(model, x[rank]).backward()
            reference_backward(reference, x)
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("how", ["every time", "no_sync", "no outer sums"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=["2x2", "4x1"])
def test_microbatches_add_up_over_both_axes(
    world4: WorkerPool, shape: tuple[int, int], how: str
) -> None:
    world4.run(accumulate, shape, how)


def precisions(rank: int, world: int, shape: tuple[int, int]) -> None:
    """16 bits on the wire, also summed in 32, against the same on one axis."""
    for reduce, wide in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=reduce, bit32_acc_for_bit16_reduce_scatter=wide
        )
        losses: list[list[Tensor]] = []
        for given in (options(*shape), {}):
            model, _ = pair(MLP, nested, mp_policy=policy, **given)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses.append([])
            for step in range(4):
                value = loss(model, inputs(world, seed=step, dtype=torch.bfloat16)[rank])
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(value.detach())
        torch.testing.assert_close(*losses, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=["2x2", "4x1"])
def test_every_precision_works_over_both_axes(world4: WorkerPool, shape: tuple[int, int]) -> None:
    world4.run(precisions, shape)


def count(rank: int, world: int) -> list[float]:
    """Quarters of a unit received from the other node in forward, in backward, and in sums."""
    wires = Wires(NODE)
    model, _ = pair(Layers, nested, collectives=wires, **options(2, 2))
    part = unit_bytes(model) / world
    for step in range(3):
        model.zero_grad()
        wires.take()
        wires.reduced_across = 0
        value = loss(model, inputs(world, seed=step)[rank])
        forward = wires.take()[1]
        value.backward()
        backward = wires.take()[1]
    return [forward / part, backward / part, wires.reduced_across / part]


def test_nodes_send_each_other_one_shard_per_forward_and_backward(world4: WorkerPool) -> None:
    layers = len(Layers().layers)
    for found in world4.run(count):
        assert found == [layers * 1, 0, layers * 1]


def save_and_load(rank: int, world: int, folder: str) -> None:
    model, _ = pair(MLP, nested, **options(2, 2))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other, reference = pair(MLP, nested, seed=3, mesh=mesh_of((2, 2)))
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    torch.manual_seed(0)
    assert_same_parameters(other, MLP().to(test_device()), atol=0)
    assert len(get_model_state_dict(model)) == len(list(reference.parameters()))


def test_checkpoints_go_over_to_plain_replicas(world4: WorkerPool, tmp_path: Path) -> None:
    world4.run(save_and_load, str(tmp_path / "checkpoint"))


def refuse(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mesh": None}, "needs a 2-D mesh"),
        ({"mesh": mesh["dp_shard"]}, "needs a 2-D mesh"),
        ({"reshard_after_forward": 2}, "=2 of MLP.*within a replica already"),
        ({"mp_policy": MixedPrecisionPolicy(gather_dtype=torch.int8)}, "gather_dtype=torch.int8"),
    ]
    for given, message in cases:
        model = MLP().to(test_device())
        with pytest.raises(ValueError, match=message):
            fully_shard(model, **{**options(2, 2), **given})
        assert type(model) is MLP
    axes = init_device_mesh(test_device().type, (2, 1, 2), mesh_dim_names=("far", "near", "tp"))
    model = MLP().to(test_device())
    parallelize_module(model.head, axes["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match=r"'head\.weight' is a DTensor on other mesh axes"):
        fully_shard(model, mesh=axes["far", "near"], shard_optimizer_over_replicas=True)
    assert type(model) is MLP
    model = fully_shard(MLP().to(test_device()), **options(2, 2))
    with pytest.raises(ValueError, match="within a replica already"):
        model.set_reshard_after_forward(2)
    model.set_reshard_after_forward(False)
    assert all(unit.secondary is not None for unit in units_of([model]))
    with pytest.raises(TypeError, match="shard_optimizer_over_replicas must be a bool"):
        fully_shard(MLP(), shard_optimizer_over_replicas=1)


def test_what_does_not_go_together_is_refused(world4: WorkerPool) -> None:
    world4.run(refuse)
