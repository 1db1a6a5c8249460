"""Tensor and sequence parallelism beside sharding: four ranks as 2x2 against a plain model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed.checkpoint_models import assert_near, assert_same, state_wholes, wholes
from tests.harness import WorkerPool, test_device
from ya_fsdp import RaggedShardDTensor, checkpoint, clip_grad_norm_, flat_parameters, fully_shard

WORDS, WIDTH = 7, 6  # no multiple of the ranks: parts on the TP axis have unequal sizes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def world_of(*shape: int) -> DeviceMesh:
    names = ("replicate", "dp", "tp")[-len(shape) :]
    return init_device_mesh(test_device().type, shape, mesh_dim_names=names)


def plain_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(test_device())


def parallelise(model: Net, mesh: DeviceMesh) -> None:
    """Activations are sharded by sequence between the linear layers."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, plan)


def shard(model: Net, world: DeviceMesh, cut: str = "auto", apply: Any = fully_shard) -> Net:
    parallelise(model, world["tp"])
    names = world.mesh_dim_names or ()
    dp = world["dp"] if len(names) == 2 else world["replicate", "dp"]
    apply = partial(apply, granularity=cut) if apply is fully_shard else apply
    for block in model.blocks:
        apply(block, mesh=dp)
    return apply(model, mesh=dp)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, **options)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int, parts: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (parts, 3, 5), generator=generator).to(test_device())


def train(model: nn.Module, optimizer: Any, world: DeviceMesh, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        batch = batch_of(step, world["dp"].size())
        loss_of(model, batch[world.get_local_rank("dp")]).backward()
        optimizer.step()
        optimizer.zero_grad()


def reference_backward(reference: nn.Module, batch: Tensor) -> None:
    torch.stack([loss_of(reference, part) for part in batch]).mean().backward()


def parity(rank: int, world_size: int, shape: tuple[int, ...], cut: str, clip: str) -> None:
    world = world_of(*shape)
    reference = plain_net()
    model = shard(plain_net(), world, cut)
    names = [name for name, _ in model.named_parameters()]
    flat = clip == "flat"
    optimizers = (adamw(flat_parameters(model) if flat else model.parameters()),)
    optimizers += (adamw(reference.parameters()),)
    for step in range(3):
        batch = batch_of(step, world["dp"].size())
        loss_of(model, batch[world.get_local_rank("dp")]).backward()
        reference_backward(reference, batch)
        if not flat:
            grads = {name: p.grad for name, p in reference.named_parameters()}
            assert_near({n: p.grad.full_tensor() for n, p in model.named_parameters()}, grads)
        p = float("inf") if step == 1 else 2.0
        truth = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, p)
        if clip == "torch":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, p)
        else:
            norm = clip_grad_norm_(model, 0.05, p)
        assert float(norm) == pytest.approx(float(truth), rel=1e-4)
        assert truth > 0.05, "nothing would be clipped"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [name for name, _ in model.named_parameters()] == names
    assert_near(wholes(model), wholes(reference))


@pytest.mark.parametrize(
    ("shape", "cut", "clip"),
    [
        ((2, 2), "row", "torch"),
        ((2, 2), "element", "flat"),
        ((1, 2, 2), "auto", "ours"),
        ((4, 1), "auto", "torch"),
        ((1, 4), "auto", "ours"),
    ],
)
def test_tensor_and_sequence_parallel_training_is_that_of_the_plain_model(
    world4: WorkerPool, shape: tuple[int, ...], cut: str, clip: str
) -> None:
    world4.run(parity, shape, cut, clip)


def layout(rank: int, world_size: int, cut: str) -> None:
    world = world_of(2, 2)
    tp = world.get_local_rank("tp")
    plain = dict(plain_net().named_parameters())
    model = shard(plain_net(), world, cut)
    kinds = set()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, RaggedShardDTensor)
        assert parameter.device_mesh == world and parameter.placements[0] == (
            parameter.ragged_placement
        )
        kinds.add(repr(parameter.placements[1]))
        truth = plain[name].detach()
        assert parameter.shape == truth.shape
        assert torch.equal(parameter.full_tensor(), truth)
        for target in ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(0))):
            moved = parameter.redistribute(world, target)
            assert type(moved) is DTensor and moved.placements == target
            assert torch.equal(moved.full_tensor(), truth)
            back = RaggedShardDTensor.from_full(truth, world, parameter.placements)
            assert torch.equal(back.to_local(), parameter.to_local())
            again = back.redistribute(world, (Replicate(), Shard(0)))
            assert torch.equal(again.full_tensor(), truth)
        for reduce in (torch.sum, torch.mean, torch.amax, torch.linalg.vector_norm, torch.std):
            torch.testing.assert_close(reduce(parameter.detach()), reduce(truth))
        assert torch.equal(parameter.detach(), truth)
        zeros = torch.zeros_like(parameter.detach())
        assert torch.equal(zeros.copy_(truth).to_local(), parameter.to_local())
    assert kinds == {"Replicate()", "Shard(dim=0)", "Shard(dim=1)"}
    # Inside forward, modules hold what parallelize_module has made.
    seen = []
    model.head.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model(batch_of(0, 1)[0, :, :4])
    assert type(seen[0]).__name__ == "ReleasedDTensor" and isinstance(seen[0], DTensor)
    with pytest.raises(RuntimeError, match=r"parameter 'head.weight' was read"):
        seen[0] + 1
    model.unshard()
    weight = model.head.weight
    assert type(weight) is DTensor and weight.placements == (Shard(0),)
    assert weight.device_mesh == world["tp"]
    expected = plain["head.weight"].chunk(2)[tp]
    assert torch.equal(weight.to_local(), expected)
    model.reshard()


@pytest.mark.parametrize("cut", ["row", "element"])
def test_a_sharded_parameter_has_both_placements_and_the_plain_models_values(
    world4: WorkerPool, cut: str
) -> None:
    world4.run(layout, cut)


def states(rank: int, world_size: int, folder: str, cut: str) -> None:
    """What 2x2 ranks save reaches plain models, FSDP2 and other meshes, and comes back."""
    world = world_of(2, 2)
    model = shard(plain_net(), world, cut)
    optimizer = adamw(model.parameters())
    train(model, optimizer, world, 2)
    weights = wholes(model)
    moments = state_wholes(model, optimizer)
    reference = plain_net()
    steps = adamw(reference.parameters())
    for step in range(2):
        reference_backward(reference, batch_of(step, 2))
        steps.step()
        steps.zero_grad()
    assert_near(weights, wholes(reference))
    assert_near(moments, state_wholes(reference, steps))

    full = checkpoint.get_full_state_dict(model, rank0_only=False)
    assert_same(full, weights)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    by_torch = get_model_state_dict(model, options=options)
    if rank == 0:
        assert_same(by_torch, weights)
    states = checkpoint.get_full_optimizer_state_dict(model, optimizer, rank0_only=False)
    saved = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=f"{folder}/dcp")
    checkpoint.save(f"{folder}/run", model, optimizer, step=2)
    checkpoint.save_safetensors(model, f"{folder}/hub")

    plain = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load({"model": plain}, checkpoint_id=f"{folder}/dcp")
    assert_same(plain, weights)
    torchs = shard(plain_net(1), world, apply=torch_fully_shard)
    dcp.load({"model": torchs.state_dict()}, checkpoint_id=f"{folder}/dcp")
    assert_same(wholes(torchs), weights)
    dcp.save({"model": torchs.state_dict()}, checkpoint_id=f"{folder}/torchs")

    for shape in ((2, 2), (1, 4), (4, 1)):
        there = world_of(*shape)
        other = shard(plain_net(1), there, "element" if shape == (4, 1) else cut)
        fresh = adamw(other.parameters())
        checkpoint.load(f"{folder}/run", other, fresh)
        assert_same(wholes(other), weights)
        assert_same(state_wholes(other, fresh), moments)
    zero(other)
    checkpoint.load_full_state_dict(other, full if rank == 0 else None)
    assert_same(wholes(other), weights)
    checkpoint.load_full_optimizer_state_dict(other, fresh, states if rank == 0 else None)
    assert_same(state_wholes(other, fresh), moments)
    zero(other)
    other.load_state_dict(full)
    assert_same(wholes(other), weights)
    zero(other)
    set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
    assert_same(wholes(other), weights)
    zero(other)
    checkpoint.load_safetensors(other, f"{folder}/hub")
    assert_same(wholes(other), weights)
    zero(other)
    dcp.load({"model": other.state_dict()}, checkpoint_id=f"{folder}/torchs")
    assert_same(wholes(other), weights)


def zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().zero_()


def load_without_tensor_parallelism(rank: int, world_size: int, folder: str) -> None:
    model = plain_net(1)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    checkpoint.load(f"{folder}/run", model, optimizer)
    reference = plain_net()
    steps = adamw(reference.parameters())
    for step in range(2):
        reference_backward(reference, batch_of(step, 2))
        steps.step()
        steps.zero_grad()
    assert_near(wholes(model), wholes(reference))
    assert_near(state_wholes(model, optimizer), state_wholes(reference, steps))


@pytest.mark.parametrize("cut", ["row", "element"])
def test_checkpoints_leave_and_enter_through_every_door(
    world4: WorkerPool, world3: WorkerPool, tmp_path: Path, cut: str
) -> None:
    world4.run(states, str(tmp_path), cut)
    world3.run(load_without_tensor_parallelism, str(tmp_path))


def refusals(rank: int, world_size: int) -> None:
    world = world_of(2, 2)
    model = plain_net()
    parallelise(model, world["tp"])
    held = list(model.parameters())
    with pytest.raises(ValueError, match=r"'embedding.weight' is a DTensor on .* world\[\"tp\"\]"):
        fully_shard(model, mesh=world["tp"])
    with pytest.raises(ValueError, match=r"'embedding.weight' is a DTensor on"):
        fully_shard(model, mesh=init_device_mesh(test_device().type, (4,)))
    partial_sum = nn.Linear(4, 4).to(test_device())
    partial_sum.weight = nn.Parameter(
        DTensor.from_local(partial_sum.weight.detach(), world["tp"], [Partial()])
    )
    with pytest.raises(ValueError, match=r"'weight' has the placements \(Partial"):
        fully_shard(partial_sum, mesh=world["dp"])
    sharded = shard(plain_net(), world, apply=torch_fully_shard)
    with pytest.raises(ValueError, match=r"'.*' (is a DTensor|has the placements)"):
        fully_shard(sharded.head, mesh=world["dp"])
    # The model is as it was, and goes on.
    assert all(mine is now for mine, now in zip(held, model.parameters(), strict=True))
    loss_of(model, batch_of(0, 1)[0]).backward()
    fully_shard(model, mesh=world["dp"])
    with pytest.raises(RuntimeError, match=r"'embedding.weight' was replaced by fully_shard"):
        adamw(held).step()


def test_what_can_not_be_combined_is_refused_by_name(world4: WorkerPool) -> None:
    world4.run(refusals)
