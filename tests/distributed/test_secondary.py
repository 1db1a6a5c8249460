"""A second shard over a node's ranks (``reshard_after_forward=int``): bytes, values, refusals."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

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
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, fully_shard, set_resident_budget
from ya_fsdp.build import units_of
from ya_fsdp.collectives import C10dCollectives
from ya_fsdp.communication import persistent_buffers
from ya_fsdp.debug import memory_report

NODE = 2
LAYERS = 5


class Wires(C10dCollectives):
    """Counts the bytes that this rank receives from ranks of its node and from others."""

    name = "counting wires"

    def __init__(self, node: int = NODE) -> None:
        self.node = node
        self.inside = self.across = self.reduced_across = 0

    def others(self, group: dist.ProcessGroup) -> tuple[int, int]:
        ranks = dist.get_process_group_ranks(group)
        mine = dist.get_rank() // self.node
        near = sum(r // self.node == mine for r in ranks) - 1
        return near, len(ranks) - 1 - near

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        near, far = self.others(group)
        size = input.numel() * input.element_size()
        self.inside += near * size
        self.across += far * size
        super().all_gather(output, input, group)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        _, far = self.others(group)
        self.reduced_across += far * output.numel() * input.element_size()
        super().reduce_scatter(output, input, average, group)

    def take(self) -> tuple[int, int]:
        """Bytes gathered inside and across since the last call."""
        found = self.inside, self.across
        self.inside = self.across = 0
        return found


def unit_bytes(model: Any) -> int:
    (unit,) = units_of([model.layers[0]])
    return sum(group.gather_bytes for group in unit.groups)


class Layers(nn.Module):
    """Equal layers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(LAYERS).layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def count(rank: int, world: int, reshard: bool | int) -> list[tuple[float, float]]:
    """Whole units received by a node's rank from its own and from other nodes, per pass."""
    wires = Wires()
    model, reference = pair(Layers, nested, reshard_after_forward=reshard, collectives=wires)
    part = unit_bytes(model) / world
    found = []
    for step in range(4):
        wires.take()
        xs = inputs(world, seed=step)
        model.zero_grad()
        reference.zero_grad()
        value = loss(model, xs[rank])
        forward = wires.take()
        value.backward()
        backward = wires.take()
        reference_backward(reference, xs)
        assert_same_gradients(model, reference)
        found = [tuple(n / part for n in counted) for counted in (forward, backward)]
    assert wires.reduced_across
    return found  # type: ignore[return-value]


def test_backward_gathers_nothing_across_nodes(world4: WorkerPool) -> None:
    again = LAYERS - 2  # the last two are still in their buffers
    for plain in world4.run(count, True):
        assert plain == [(LAYERS * 1, LAYERS * 2), (again * 1, again * 2)]
    for second in world4.run(count, NODE):
        # A rank of two has half of a unit already and receives the other half.
        assert second == [(LAYERS * 1, LAYERS * 2), (again * 2, 0)]


# ---- values --------------------------------------------------------------------------------------


def mesh_of(*shape: int) -> Any:
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    return init_device_mesh(test_device().type, shape, mesh_dim_names=names)


def train(rank: int, world: int, shape: tuple[int, ...]) -> None:
    for shard in (leaf, nested, root):
        model, reference = pair(MLP, shard, mesh=mesh_of(*shape), reshard_after_forward=NODE)
        optimizers = tuple(torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, reference))
        for step in range(3):
            x = inputs(world, seed=step)
            train_step(model, reference, rank, x, optimizers=optimizers)
            assert_none_stale(model, reference, x[rank])


@pytest.mark.parametrize("shape", [(4,), (1, 4)], ids=["4", "1x4"])
def test_a_second_shard_trains_as_the_whole_model(
    world4: WorkerPool, shape: tuple[int, ...]
) -> None:
    world4.run(train, shape)


def eventful(rank: int, world: int) -> None:
    model, reference = pair(Layers, nested, reshard_after_forward=NODE)
    optimizers = sgd_pair(model, reference)
    for step, event in enumerate(["no_sync", "no backward", "evaluate", "write", "load", "none"]):
        for micro in range(3):
            xs = inputs(world, seed=10 * step + micro)
            with model.no_sync() if event == "no_sync" and micro < 2 else nullcontext():
                value = loss(model, xs[rank])
                if event == "evaluate":
                    assert_none_stale(model, reference, xs[0])
                if event == "no backward" and micro == 1:
                    for layer in (*model.layers, model):
                        layer.reshard()
                    continue
                value.backward()
            reference_backward(reference, xs)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if event == "write":
            with torch.no_grad():
                for param in (*model.parameters(), *reference.parameters()):
                    param.mul_(1.5)
        if event == "load":
            torch.manual_seed(5)
            other = Layers().to(test_device())
            reference.load_state_dict(other.state_dict())
            model.load_state_dict(nested(other).state_dict())
        assert_same_parameters(model, reference)


def test_a_second_shard_is_never_stale(world4: WorkerPool) -> None:
    world4.run(eventful)


def losses(rank: int, world: int, reshard: bool | int, gather: torch.dtype | None) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, gather_dtype=gather)
    model, _ = pair(MLP, nested, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(4):
        value = loss(model, inputs(world, seed=step, dtype=torch.bfloat16)[rank])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.detach())
    return found


@pytest.mark.parametrize("gather", [None, torch.int8], ids=["16 bits", "8 bits"])
def test_losses_are_those_of_gathers_from_all_ranks(
    world4: WorkerPool, gather: torch.dtype | None
) -> None:
    plain, second = (world4.run(losses, reshard, gather) for reshard in (True, NODE))
    assert plain == second
    assert plain[0][0] != plain[0][-1]


# ---- settings ------------------------------------------------------------------------------------


def switch(rank: int, world: int) -> list[Any]:
    wires = Wires()
    model, reference = pair(Layers, nested, collectives=wires)
    part = unit_bytes(model) / world
    found = []
    for step, reshard in enumerate([True, NODE, False, NODE, 1, world]):
        model.set_reshard_after_forward(reshard)
        for _ in range(2):  # the first of them may move buffers
            model.zero_grad()
            reference.zero_grad()
            xs = inputs(world, seed=step)
            value = loss(model, xs[rank])
            wires.take()
            value.backward()
            reference_backward(reference, xs)
            assert_same_gradients(model, reference)
        found.append(tuple(n / part for n in wires.take()))
    return found


def test_a_second_shard_comes_and_goes_between_steps(world4: WorkerPool) -> None:
    again = LAYERS - 2
    plain, second, stays = (again * 1, again * 2), (again * 2, 0), (0, 0)
    for found in world4.run(switch):
        assert found == [plain, second, stays, second, stays, plain]


def addresses(rank: int, world: int) -> None:
    model, _ = pair(Layers, nested, reshard_after_forward=NODE)
    (unit,) = units_of([model.layers[0]])
    seen = []
    for step in range(3):
        loss(model, inputs(world, seed=step)[rank]).backward()
        assert unit.secondary is not None
        (kept,) = unit.secondary.buffers()
        assert kept.numel() == unit.groups[0].layout.total_numel // NODE
        assert kept.data_ptr() in {buffer.data_ptr() for buffer in persistent_buffers(model)}
        seen.append(kept.data_ptr())
    assert len(set(seen)) == 1
    report = memory_report(model)
    assert report.secondary == LAYERS * kept.numel() * kept.itemsize
    assert "second shards" in str(report)


def test_second_shards_keep_their_memory(world4: WorkerPool) -> None:
    world4.run(addresses)


def recompute(rank: int, world: int) -> list[tuple[int, int]]:
    wires = Wires()
    model, reference = pair(Layers, nested, reshard_after_forward=NODE, collectives=wires)
    found = []
    for step in range(2):
        xs = inputs(world, seed=step)
        model.zero_grad()
        reference.zero_grad()
        x = xs[rank]
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        value = x.pow(2).mean()
        wires.take()
        value.backward()
        found.append(wires.take())
        reference_backward(reference, xs)
        assert_same_gradients(model, reference)
    return found


def test_activation_checkpointing_recomputes_from_the_second_shard(world4: WorkerPool) -> None:
    for found in world4.run(recompute):
        assert all(inside > 0 and across == 0 for inside, across in found)


def budget(rank: int, world: int) -> tuple[float, float]:
    wires = Wires()
    model, _ = pair(Layers, nested, reshard_after_forward=NODE, collectives=wires)
    kept = set_resident_budget(model, 2 * unit_bytes(model) + 512)
    assert len(kept) == 2
    for step in range(3):
        value = loss(model, inputs(world, seed=step)[rank])
        wires.take()
        value.backward()
    part = unit_bytes(model) / world
    inside, across = wires.take()
    return inside / part, across / part


def test_a_budget_keeps_some_of_the_units_whole(world4: WorkerPool) -> None:
    for found in world4.run(budget):
        assert found == ((LAYERS - 2 - 2) * 2, 0)


# ---- refusals ------------------------------------------------------------------------------------


def refuse(rank: int, world: int) -> None:
    for value in (0, -2, 3, 8):
        model = MLP().to(test_device())
        with pytest.raises(ValueError, match=rf"={value} of MLP.*the 4 ranks.*\[1, 2, 4\]"):
            fully_shard(model, reshard_after_forward=value)
        assert type(model) is MLP
    with pytest.raises(ValueError, match=r"=4 of MLP.*the 2 ranks"):
        fully_shard(MLP().to(test_device()), mesh=mesh_of(2, 2), reshard_after_forward=4)
    model = MLP().to(test_device())
    for layer in model.layers[:2]:
        fully_shard(layer)
    fully_shard(model.layers[2], mesh=mesh_of(4, 1))
    fully_shard(model)
    with pytest.raises(ValueError, match=r"=2 of unit '.*the 1 ranks"):
        model.set_reshard_after_forward(2)
    assert all(unit.secondary is None for unit in units_of(model.modules()))
    for wrong in (None, "2", 2.0):
        with pytest.raises(TypeError, match="reshard_after_forward"):
            model.set_reshard_after_forward(wrong)


def test_numbers_of_ranks_that_do_not_divide_are_refused_by_name(world4: WorkerPool) -> None:
    world4.run(refuse)
