"""Ragged tensors in state dicts and distributed checkpoints, against plain and FSDP2-like ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.harness import WorkerPool
from ya_fsdp._torch import DTENSOR_SUBCLASS_OK
from ya_fsdp.ragged import (
    RaggedShardDTensor,
    distribute_ragged,
    make_placement,
    match_optimizer_state,
)

SHAPES = {"a": (7, 5), "b": (2, 4), "c": (3, 2, 5), "d": (13,), "e": (2, 3, 2, 3), "f": (1, 6)}
CUTS = ("row", "element", "lopsided")

with_torchs_helpers = pytest.mark.skipif(
    not DTENSOR_SUBCLASS_OK, reason="torch's helpers gather DTensors only, which need torch 2.13"
)


def cut(full: torch.Tensor, mesh: DeviceMesh, how: str) -> RaggedShardDTensor:
    if how != "lopsided":
        return distribute_ragged(full, mesh, how)  # type: ignore[arg-type]
    bounds = [0, *[1] * (mesh.size() - 1), full.numel()]
    return RaggedShardDTensor.from_full(full, mesh, make_placement(bounds, full.shape))


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shared_folder(rank: int) -> str:
    names: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names, src=0)
    return str(names[0])


def save_and_load(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    fulls = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    makers = {how: lambda full, how=how: cut(full, mesh, how) for how in CUTS}
    makers["plain"] = torch.clone
    makers["DTensor"] = lambda full: distribute_tensor(full, mesh, [Shard(0)])
    for writer in makers:
        folder = shared_folder(rank)
        dcp.save({name: makers[writer](full) for name, full in fulls.items()}, checkpoint_id=folder)
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        assert {name: tuple(metadata[name].size) for name in SHAPES} == SHAPES
        for reader in makers if writer in CUTS else CUTS:
            target = {n: makers[reader](torch.zeros(full.shape)) for n, full in fulls.items()}
            dcp.load(target, checkpoint_id=folder)
            for name, full in fulls.items():
                assert torch.equal(whole(target[name]), full), (writer, reader, name)


def test_a_checkpoint_is_read_however_the_reader_is_cut(pool: WorkerPool) -> None:
    pool.run(save_and_load)


def write_at(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    values = {n: torch.arange(float(torch.Size(s).numel())).view(s) for n, s in SHAPES.items()}
    dcp.save({n: cut(full, mesh, "element") for n, full in values.items()}, checkpoint_id=folder)


def read_at(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    target = {name: cut(torch.zeros(shape), mesh, "row") for name, shape in SHAPES.items()}
    dcp.load(target, checkpoint_id=folder)
    for name, shape in SHAPES.items():
        expected = torch.arange(float(torch.Size(shape).numel())).view(shape)
        assert torch.equal(target[name].full_tensor(), expected)


def test_a_checkpoint_of_three_ranks_is_read_by_two_and_the_reverse(
    world2: WorkerPool, world3: WorkerPool, tmp_path: Path
) -> None:
    for writer, reader in ((world3, world2), (world2, world3)):
        folder = str(tmp_path / str(writer.world_size))
        writer.run(write_at, folder)
        reader.run(read_at, folder)


def replicas(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    full = torch.randn(7, 5)
    folder = shared_folder(rank)
    dcp.save({"w": distribute_ragged(full, mesh)}, checkpoint_id=folder)
    target = {"w": distribute_ragged(torch.zeros(7, 5), mesh)}
    assert target["w"].placements[0] == Replicate()
    dcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["w"].to_local(), full)


def test_every_replica_reads_what_the_first_one_wrote(world2: WorkerPool) -> None:
    world2.run(replicas)


def model_of(mesh: DeviceMesh, how: str, fulls: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, full in fulls.items():
        model.register_parameter(name, torch.nn.Parameter(cut(full, mesh, how)))
    model.register_buffer("scale", torch.ones(3))
    return model


def plain_model(fulls: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, full in fulls.items():
        model.register_parameter(name, torch.nn.Parameter(full.clone()))
    model.register_buffer("scale", torch.ones(3))
    return model


def full_state_dict(rank: int, world_size: int, how: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    fulls = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    model = model_of(mesh, how, fulls)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert {name: type(value) for name, value in gathered.items()} == dict.fromkeys(
        [*SHAPES, "scale"], torch.Tensor
    )
    for name, full in fulls.items():
        assert torch.equal(gathered[name], full)
    on_first = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert len(on_first) == (len(SHAPES) + 1 if rank == 0 else 0)
    model.load_state_dict(
        {**{name: full + 1 for name, full in fulls.items()}, "scale": torch.ones(3)}
    )
    for name, full in fulls.items():
        assert torch.equal(getattr(model, name).full_tensor(), full + 1)
        assert isinstance(getattr(model, name), torch.nn.Parameter)


@with_torchs_helpers
@pytest.mark.parametrize("how", CUTS)
def test_torch_gathers_a_full_state_dict_and_a_plain_one_is_loaded(
    pool: WorkerPool, how: str
) -> None:
    pool.run(full_state_dict, how)


def set_full_state_dict(rank: int, world_size: int, broadcast: bool) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    fulls = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    model = model_of(mesh, "row", {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    state = {**fulls, "scale": torch.full((3,), 2.0)}
    pieces = {name: getattr(model, name).to_local() for name in SHAPES}
    set_model_state_dict(
        model,
        {} if broadcast and rank else state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast),
    )
    for name, full in fulls.items():
        assert torch.equal(getattr(model, name).full_tensor(), full)
        assert getattr(model, name).to_local() is pieces[name]
    assert torch.equal(model.scale, state["scale"])


@pytest.mark.parametrize("broadcast", [False, True], ids=["every rank", "rank 0 only"])
def test_torch_sets_a_full_state_dict_on_row_cut_parameters(
    pool: WorkerPool, broadcast: bool
) -> None:
    pool.run(set_full_state_dict, broadcast)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape)
        ragged = isinstance(parameter, RaggedShardDTensor)
        parameter.grad = torch.zeros_like(parameter).copy_(grad) if ragged else grad
    optimizer.step()
    optimizer.zero_grad()


def optimizer_state(rank: int, world_size: int, how: str, full: bool, broadcast: bool) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    fulls = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    plain = plain_model(fulls)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model = model_of(mesh, how, fulls)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        train(one, its, 1)
    options = StateDictOptions(full_state_dict=full)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    expected = get_optimizer_state_dict(plain, plain_optimizer)
    for name in SHAPES:
        for key, value in expected["state"][name].items():
            own = state["state"][name][key]
            assert isinstance(own, RaggedShardDTensor) == (not full and value.dim() > 0)
            torch.testing.assert_close(whole(own), value)
    again = model_of(mesh, how, {name: getattr(plain, name).detach() for name in SHAPES})
    restored = torch.optim.AdamW(again.parameters(), lr=0.1)
    set_optimizer_state_dict(
        again,
        restored,
        {} if broadcast and rank else state,
        options=StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast),
    )
    if full and not broadcast:
        # Here torch cuts the state evenly, whatever the parameters look like.
        momentum = restored.state[again.a]["exp_avg"]
        with pytest.raises(TypeError, match="call match_optimizer_state"):
            momentum.lerp_(torch.zeros_like(again.a), 0.1)
        match_optimizer_state(restored)
    for one, its in ((plain, plain_optimizer), (again, restored)):
        train(one, its, 2)
    for name in SHAPES:
        torch.testing.assert_close(
            getattr(again, name).detach().full_tensor(), getattr(plain, name).detach()
        )


@with_torchs_helpers
@pytest.mark.parametrize(
    "how, full, broadcast",
    [
        ("row", False, False),
        ("element", False, False),
        ("row", True, False),
        ("row", True, True),
    ],
)
def test_optimizer_state_goes_through_torchs_state_dicts(
    pool: WorkerPool, how: str, full: bool, broadcast: bool
) -> None:
    pool.run(optimizer_state, how, full, broadcast)


def resume_from_checkpoint(rank: int, world_size: int, how: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    fulls = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    plain = plain_model(fulls)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train(plain, plain_optimizer, 1)
    folder = shared_folder(rank)
    dcp.save(
        {
            "model": get_model_state_dict(plain),
            "optimizer": get_optimizer_state_dict(plain, plain_optimizer),
        },
        checkpoint_id=folder,
    )
    model = model_of(mesh, how, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    target = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(model, target["model"])
    set_optimizer_state_dict(model, optimizer, target["optimizer"])
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        train(one, its, 2)
    for name in SHAPES:
        torch.testing.assert_close(
            getattr(model, name).detach().full_tensor(), getattr(plain, name).detach()
        )


@pytest.mark.parametrize("how", CUTS)
def test_training_resumes_from_the_checkpoint_of_a_plain_model(pool: WorkerPool, how: str) -> None:
    pool.run(resume_from_checkpoint, how)
