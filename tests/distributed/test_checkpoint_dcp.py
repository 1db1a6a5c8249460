"""torch.distributed.checkpoint and torch's state-dict functions on sharded models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.distributed.checkpoint_models import (
    Net,
    adamw,
    assert_near,
    assert_same,
    plain_net,
    shard,
    state_wholes,
    train,
    trained_plain,
    trained_sharded,
    wholes,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import checkpoint, fully_shard

WORLDS = [1, 2, 3, 4]


@pytest.fixture
def pools(request: pytest.FixtureRequest) -> dict[int, WorkerPool]:
    return {size: request.getfixturevalue(f"world{size}") for size in WORLDS}


def write(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def read(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


# ---- one number of ranks -----------------------------------------------------------------------


def resume(rank: int, world_size: int, folder: str, cut: str) -> None:
    model, optimizer = trained_sharded(2, cut)
    write(model, optimizer, folder)
    other = shard(plain_net(seed=9), cut)
    fresh = adamw(other)
    read(other, fresh, folder)
    assert_same(wholes(other), wholes(model))
    assert_same(state_wholes(other, fresh), state_wholes(model, optimizer))
    train(model, optimizer, 2, first=2)
    train(other, fresh, 2, first=2)
    assert_same(wholes(other), wholes(model))


@pytest.mark.parametrize("cut", ["row", "element"])
def test_training_resumes_bit_by_bit(world2: WorkerPool, tmp_path: Path, cut: str) -> None:
    world2.run(resume, str(tmp_path), cut)


def background(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = trained_sharded(2)
    expected = {**wholes(model), **state_wholes(model, optimizer)}
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # Its collectives would otherwise mix with those of training.
    group = dist.new_group(backend="gloo")
    future = dcp.async_save(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=folder,
        process_group=group,
    )
    train(model, optimizer, 3, first=2)
    future.result()
    other = shard(plain_net(seed=9))
    fresh = adamw(other)
    read(other, fresh, folder)
    assert_same({**wholes(other), **state_wholes(other, fresh)}, expected)


def test_torchs_async_save_has_the_state_at_the_call(world2: WorkerPool, tmp_path: Path) -> None:
    world2.run(background, str(tmp_path))


# ---- any number of ranks to any other ----------------------------------------------------------


def save_on(rank: int, world_size: int, folder: str, cut: str) -> tuple[Any, Any]:
    model, optimizer = trained_sharded(2, cut)
    write(model, optimizer, folder)
    return wholes(model), state_wholes(model, optimizer)


def load_on(rank: int, world_size: int, folder: str, cut: str) -> tuple[Any, Any]:
    model = shard(plain_net(seed=9), cut)
    optimizer = adamw(model)
    read(model, optimizer, folder)
    return wholes(model), state_wholes(model, optimizer)


def load_everything(rank: int, world_size: int, folders: dict[str, str]) -> dict[str, Any]:
    found = {}
    for name, folder in folders.items():
        cut = "row" if name.endswith("element") else "element"
        found[name] = load_on(rank, world_size, folder, cut)
    return found


def test_what_n_ranks_save_m_ranks_load_with_other_cuts(
    pools: dict[int, WorkerPool], tmp_path: Path
) -> None:
    folders, expected = {}, {}
    for size, pool in pools.items():
        for cut in ("row", "element"):
            name = f"{size} {cut}"
            folders[name] = str(tmp_path / name)
            expected[name] = pool.run(save_on, folders[name], cut)[0]
    for pool in pools.values():
        for found in pool.run(load_everything, folders):
            for name, (weights, states) in found.items():
                assert_same(weights, expected[name][0])
                assert_same(states, expected[name][1])
                # 1-element parameters on three and four ranks have empty pieces.
                assert weights["scale"].shape == (1,)


# ---- other kinds of models ---------------------------------------------------------------------


def make(kind: str, seed: int = 9) -> Net:
    if kind == "plain":
        return plain_net(seed)
    if kind == "fsdp2":
        return shard(plain_net(seed, tied=False), apply=torch_fully_shard)
    return shard(plain_net(seed, tied=False), kind)


def interchange(rank: int, world_size: int, folder: str, source: str, target: str) -> None:
    tied = "plain" in (source, target)
    first = shard(plain_net(), source) if tied and source != "plain" else make(source, 0)
    optimizer = adamw(first)
    train(first, optimizer, 2)
    write(first, optimizer, folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    assert metadata.state_dict_metadata["model.blocks.0.up.weight"].size == (10, 6)
    second = shard(plain_net(9), target) if tied and target != "plain" else make(target)
    fresh = adamw(second)
    read(second, fresh, folder)
    assert_same(wholes(second), wholes(first))
    assert_same(state_wholes(second, fresh), state_wholes(first, optimizer))
    train(first, optimizer, 2, first=2)
    train(second, fresh, 2, first=2)
    assert_near(wholes(second), wholes(first))


@pytest.mark.parametrize(
    "source, target",
    [
        ("row", "fsdp2"),
        ("element", "fsdp2"),
        ("fsdp2", "row"),
        ("fsdp2", "element"),
        ("element", "plain"),
        ("plain", "element"),
    ],
)
def test_checkpoints_pass_between_ours_fsdp2_and_plain_models(
    world2: WorkerPool, tmp_path: Path, source: str, target: str
) -> None:
    world2.run(interchange, str(tmp_path), source, target)


def test_a_sharded_checkpoint_becomes_a_file_of_torch_save(
    world2: WorkerPool, tmp_path: Path
) -> None:
    expected = world2.run(save_on, str(tmp_path / "sharded"), "element")[0][0]
    dcp_to_torch_save(str(tmp_path / "sharded"), str(tmp_path / "file.pt"))
    state = torch.load(tmp_path / "file.pt", weights_only=False)["model"]
    assert_same({name: state[name] for name in expected}, expected)
    plain_net().load_state_dict(state)


def replicas(rank: int, world_size: int, folder: str, shape: tuple[int, int]) -> None:
    device = test_device().type
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    def on_mesh(model: nn.Module, **options: Any) -> nn.Module:
        return fully_shard(model, mesh=mesh, granularity="element", **options)

    model = shard(plain_net(), apply=on_mesh)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    write(model, optimizer, folder)
    full = checkpoint.get_full_state_dict(model, rank0_only=False)
    states = state_wholes(model, optimizer)
    assert_same(full, wholes(model))
    for other in (shard(plain_net(9)), shard(plain_net(9), apply=on_mesh)):
        fresh = adamw(other)
        read(other, fresh, folder)
        assert_same(wholes(other), full)
        assert_same(state_wholes(other, fresh), states)
    checkpoint.save(f"{folder}/run", model, optimizer, step=2)
    again = shard(plain_net(9))
    fresh = adamw(again)
    checkpoint.load(f"{folder}/run", again, fresh)
    assert_same({**wholes(again), **state_wholes(again, fresh)}, {**full, **states})
    checkpoint.load_full_state_dict(model, plain_net(5).state_dict() if rank == 0 else None)
    assert_same(wholes(model), plain_net(5).state_dict())
    reference, _ = trained_plain(2)
    assert_near(full, wholes(reference))


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_replicas_save_once_and_load_into_any_other_mesh(
    world4: WorkerPool, tmp_path: Path, shape: tuple[int, int]
) -> None:
    world4.run(replicas, str(tmp_path), shape)


def on_fsdp2(rank: int, world_size: int, folder: str) -> None:
    """Our functions take FSDP2's models too: one can come from it and go back."""
    model = shard(plain_net(0, tied=False), apply=torch_fully_shard)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    expected, states = wholes(model), state_wholes(model, optimizer)
    checkpoint.save(folder, model, optimizer, step=2)
    checkpoint.save_safetensors(model, f"{folder}/files")
    full = checkpoint.get_full_state_dict(model)
    full_states = checkpoint.get_full_optimizer_state_dict(model, optimizer)
    for apply in (torch_fully_shard, fully_shard):
        for way in ("folder", "files", "memory"):
            other = shard(plain_net(9, tied=False), apply=apply)
            fresh = adamw(other)
            if way == "folder":
                checkpoint.load(folder, other, fresh)
            elif way == "files":
                checkpoint.load_safetensors(other, f"{folder}/files")
            else:
                checkpoint.load_full_state_dict(other, full)
                checkpoint.load_full_optimizer_state_dict(other, fresh, full_states)
            assert_same(wholes(other), expected)
            if way != "files":
                assert_same(state_wholes(other, fresh), states)
                train(other, fresh, 1, first=2)


def test_our_functions_read_and_write_models_of_fsdp2(world3: WorkerPool, tmp_path: Path) -> None:
    world3.run(on_fsdp2, str(tmp_path))


# ---- torch's functions -------------------------------------------------------------------------


def sharded_options(rank: int, world_size: int) -> None:
    model, optimizer = trained_sharded(2)
    expected = {**wholes(model), **state_wholes(model, optimizer)}
    for offload in (False, True):
        options = StateDictOptions(cpu_offload=offload)
        weights = get_model_state_dict(model, options=options)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        other = shard(plain_net(seed=9))
        fresh = adamw(other)
        set_model_state_dict(other, weights, options=options)
        set_optimizer_state_dict(other, fresh, states, options=options)
        assert_same({**wholes(other), **state_wholes(other, fresh)}, expected)


def test_torchs_getters_and_setters_pass_sharded_states(world2: WorkerPool) -> None:
    world2.run(sharded_options)


def full_options(rank: int, world_size: int, cut: str) -> None:
    model, optimizer = trained_sharded(2, cut)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # Torch's states share their step counters with the optimizer.
    weights, states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    assert bool(states) == bool(weights) == (rank == 0)
    expected = state_wholes(model, optimizer)
    given = checkpoint.get_full_optimizer_state_dict(model, optimizer)
    for name, values in given.get("state", {}).items():
        assert_same(states["state"][name], values)
    other = shard(plain_net(seed=9), cut)
    fresh = adamw(other)
    checkpoint.load_full_state_dict(other, weights)
    checkpoint.load_full_optimizer_state_dict(other, fresh, states)
    assert_same(wholes(other), wholes(model))
    assert_same(state_wholes(other, fresh), state_wholes(model, optimizer))
    third = shard(plain_net(seed=9), cut)
    fresh = adamw(third)
    everywhere = [weights, copy.deepcopy(states)]
    dist.broadcast_object_list(everywhere, src=0)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        third,
        fresh,
        model_state_dict=everywhere[0],
        optim_state_dict=everywhere[1],
        options=options,
    )
    assert_same(wholes(third), wholes(model))
    assert_same(state_wholes(third, fresh), state_wholes(model, optimizer))
    train(third, fresh, 2, first=2)
    train(model, optimizer, 2, first=2)
    assert_same(wholes(third), wholes(model))
    assert_same(state_wholes(third, fresh), state_wholes(model, optimizer))
    fourth = shard(plain_net(seed=9), cut)
    fresh = adamw(fourth)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if cut == "row":
        set_optimizer_state_dict(fourth, fresh, states, options=broadcast)
        assert_same(state_wholes(fourth, fresh), expected)
    else:
        with pytest.raises(NotImplementedError, match="load_full_optimizer_state_dict"):
            set_optimizer_state_dict(fourth, fresh, states, options=broadcast)


@pytest.mark.parametrize("cut", ["row", "element"])
def test_torchs_full_states_go_into_torchs_setters_and_our_loaders(
    world2: WorkerPool, cut: str
) -> None:
    world2.run(full_options, cut)


def flattened(rank: int, world_size: int) -> None:
    model, optimizer = trained_sharded(2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    assert "state.blocks.0.up.weight.exp_avg" in states
    other = shard(plain_net(seed=9))
    fresh = adamw(other)
    set_optimizer_state_dict(other, fresh, states, options=options)
    assert_same(state_wholes(other, fresh), state_wholes(model, optimizer))


def test_torchs_flattened_optimizer_state_goes_out_and_in(world2: WorkerPool) -> None:
    world2.run(flattened)
