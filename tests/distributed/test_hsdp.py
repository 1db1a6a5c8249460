"""Two-axis meshes (replicate, shard): four ranks as 2x2, 4x1 and 1x4, against a plain model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.nn.utils import clip_grad_norm_

from tests.distributed.models import (
    MLP,
    assert_none_stale,
    assert_same_gradients,
    assert_same_parameters,
    full,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    reference_backward,
    root,
    train_step,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy
from ya_fsdp.build import schedule_of
from ya_fsdp.collectives import C10dCollectives
from ya_fsdp.streams import Streams

SHAPES = [(2, 2), (4, 1), (1, 4)]


def mesh_of(shape: tuple[int, int]) -> Any:
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(test_device().type, shape, mesh_dim_names=names)


def train(rank: int, world: int, shape: tuple[int, int]) -> None:
    mesh = mesh_of(shape)
    for shard in (leaf, nested, root):
        model, reference = pair(MLP, shard, mesh=mesh)
        for param in model.parameters():
            assert isinstance(param.placements[0], Replicate)
            assert param.shape == param.full_tensor().shape
        optimizers = tuple(torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, reference))
        for step in range(3):
            x = inputs(world, seed=step)
            train_step(model, reference, rank, x, optimizers=optimizers)
            assert_none_stale(model, reference, x[rank])
        for param in model.parameters():
            local = param.to_local().detach().contiguous()
            first = local.clone()
            dist.broadcast(first, group=mesh.get_group(0), group_src=0)
            assert torch.equal(first, local), "replicas have parted"


@pytest.mark.parametrize("shape", SHAPES, ids=["2x2", "4x1", "1x4"])
def test_replicated_shards_train_as_the_whole_model(
    world4: WorkerPool, shape: tuple[int, int]
) -> None:
    world4.run(train, shape)


def clip(rank: int, world: int, shape: tuple[int, int]) -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        model, reference = pair(MLP, nested, mesh=mesh_of(shape))
        x = inputs(world)
        loss(model, x[rank]).backward()
        reference_backward(reference, x)
        total, truth = (
            clip_grad_norm_(m.parameters(), 0.05, norm_type=norm_type) for m in (model, reference)
        )
        assert truth > 0.05, "nothing would be clipped"
        assert float(total) == pytest.approx(float(truth), rel=1e-5)
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("shape", SHAPES, ids=["2x2", "4x1", "1x4"])
def test_a_norm_counts_every_replica_once(world4: WorkerPool, shape: tuple[int, int]) -> None:
    world4.run(clip, shape)


def accumulate(rank: int, world: int, how: str) -> None:
    model, reference = pair(MLP, nested, mesh=mesh_of((2, 2)))
    for _step in range(2):
        for micro in range(3):
            x = inputs(world, seed=micro)
            if how == "no all-reduce":
                model.set_requires_all_reduce(micro == 2)
            quiet = how == "no_sync" and micro < 2
            with model.no_sync() if quiet else nullcontext():
                loss(model, x[rank]).backward()
            reference_backward(reference, x)
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("how", ["every time", "no_sync", "no all-reduce"])
def test_microbatches_on_a_two_axis_mesh_add_up(world4: WorkerPool, how: str) -> None:
    world4.run(accumulate, how)


def weights_of(replica: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(replica)
    return MLP().to(test_device()).state_dict()


def start_unequal(rank: int, world: int, shape: tuple[int, int], how: str) -> None:
    mesh = mesh_of(shape)
    replica = mesh.get_local_rank(0)
    reference = MLP().to(test_device())
    reference.load_state_dict(weights_of(0))
    with torch.device("meta" if how == "meta" else test_device()):
        model: Any = MLP()
    if how != "meta":
        model.load_state_dict(weights_of(replica))
    nested(model, mesh=mesh)
    if how == "meta":
        model.to_empty(device=test_device())
        with torch.no_grad():
            for name, value in weights_of(replica).items():
                model.get_parameter(name).copy_(value)
        begins_right = torch.equal(full(model.head.bias), reference.head.bias)
        assert begins_right == (replica == 0)
        with torch.no_grad():
            model(inputs(world)[rank])
    assert_same_parameters(model, reference, atol=0)
    for step in range(2):
        optimizers = tuple(torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
        train_step(model, reference, rank, inputs(world, seed=step), optimizers=optimizers)


@pytest.mark.parametrize("how", ["whole", "meta"])
@pytest.mark.parametrize("shape", SHAPES, ids=["2x2", "4x1", "1x4"])
def test_replicas_that_begin_apart_get_the_values_of_the_first(
    world4: WorkerPool, shape: tuple[int, int], how: str
) -> None:
    world4.run(start_unequal, shape, how)


def leave_unequal(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    replica = mesh.get_local_rank(0)
    model = MLP().to(test_device())
    model.load_state_dict(weights_of(replica))
    nested(model, mesh=mesh, sync_replicas=False)
    for name, param in model.named_parameters():
        assert torch.equal(full(param.detach()), weights_of(replica)[name])


def test_replicas_stay_apart_where_the_user_says_so(world4: WorkerPool) -> None:
    world4.run(leave_unequal)


def state_dicts(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested, mesh=mesh_of((2, 2)))
    other, reference = pair(MLP, leaf, seed=1, mesh=mesh_of((2, 2)))
    model.load_state_dict(other.state_dict())
    assert_same_parameters(model, reference)


def test_a_state_dict_goes_over_to_another_sharding_of_the_mesh(world4: WorkerPool) -> None:
    world4.run(state_dicts)


# ---- what waits for what -------------------------------------------------------------------------


class Clocks(Streams):
    """Streams that run nothing and know, for every collective, which ones it had to wait for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.seen: dict[str, set[str]] = {"compute": set(), "comm": set(), "sums": set()}
        self.current = "compute"
        self.log: dict[str, tuple[str, frozenset[str]]] = {}

    def note(self, kind: str) -> None:
        name = f"{kind} {sum(k.startswith(kind) for k in self.log)}"
        self.log[name] = self.current, frozenset(self.seen[self.current])
        self.seen[self.current].add(name)

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        self.current = stream
        yield
        self.current = "compute"

    def on_comm(self) -> Any:
        return self._on("comm")

    def on_across(self) -> Any:
        self.seen["sums"] |= self.seen["comm"]
        return self._on("sums")

    def new_event(self) -> Any:
        return set()

    def _record(self, event: Any, stream: str) -> Any:
        if event is not None:
            event.clear()
            event.update(self.seen[stream])
        return event

    def record_compute(self, event: Any) -> Any:
        return self._record(event, "compute")

    def record_comm(self, event: Any) -> Any:
        return self._record(event, "comm")

    def record_across(self, event: Any) -> Any:
        return self._record(event, "sums")

    def compute_waits(self, event: Any) -> None:
        self.seen["compute"] |= event or set()

    def comm_waits(self, event: Any) -> None:
        self.seen["comm"] |= event or set()

    def comm_waits_for_compute(self) -> None:
        self.seen["comm"] |= self.seen["compute"]

    def compute_waits_for_comm(self) -> None:
        self.seen["compute"] |= self.seen["comm"]

    def comm_waits_for_across(self) -> None:
        self.seen["comm"] |= self.seen["sums"]


class Noted(C10dCollectives):
    """Tells the clocks of every collective."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    def all_gather(self, *args: Any) -> None:
        self.clocks.note("gather")
        super().all_gather(*args)

    def reduce_scatter(self, *args: Any) -> None:
        self.clocks.note("scatter")
        super().reduce_scatter(*args)

    def all_reduce(self, tensor: Any, op: str, group: Any) -> None:
        self.clocks.note(f"all-reduce {op}")
        super().all_reduce(tensor, op, group)


def overlap(rank: int, world: int, in_slot: bool) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64 if in_slot else torch.float32)
    model, reference = pair(lambda: MLP(5), nested, mesh=mesh_of((2, 2)), mp_policy=policy)
    model.set_num_gradient_buffers(2)
    clocks = Clocks()
    model.set_collectives(Noted(clocks))
    schedule = schedule_of(model)
    schedule.streams = schedule.reducer.streams = clocks
    for step in range(3):
        clocks.log.clear()
        for seen in clocks.seen.values():
            seen.clear()
        model.zero_grad()
        reference.zero_grad()
        xs = inputs(world, seed=step)
        loss(model, xs[rank]).backward()
        reference_backward(reference, xs)
        assert_same_gradients(model, reference)
    log = clocks.log
    sums = [name for name in log if name.startswith("all-reduce sum")]
    gathers = [name for name in log if name.startswith("gather")][6:]
    assert len(sums) == 6, "one per unit"
    assert len(gathers) == 6 - 3, "units whose buffers were taken"
    for name in log:
        assert log[name][0] == ("sums" if name in sums else "comm")
    for i, name in enumerate(sums):
        assert f"scatter {i}" in log[name][1], "shards are summed before replicas are"
        assert f"scatter {i + 1}" not in log[name][1], "before the next unit's backward"
    for gather in gathers:
        assert not log[gather][1] & set(sums), "gathers wait for no sum over replicas"
    # The third unit writes gradients where the first one's lay, perhaps with their sums.
    assert (sums[0] in log["scatter 2"][1]) is in_slot
    assert sums[1] not in log["scatter 2"][1]
    assert clocks.seen["compute"] >= set(sums), "the optimizer waits for all of them"


@pytest.mark.parametrize("in_slot", [True, False], ids=["sums in the slot", "in the shard"])
def test_sums_over_replicas_go_on_beside_the_next_gathers(
    world4: WorkerPool, in_slot: bool
) -> None:
    world4.run(overlap, in_slot)
