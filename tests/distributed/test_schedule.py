"""How often units communicate, in which order, and what stays behind in memory."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.leftovers import tensors, tensors_once_released
from tests.distributed.models import (
    CLASSES,
    MLP,
    SHARDINGS,
    WIDTH,
    assert_same_gradients,
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
from tests.harness import WorkerPool
from ya_fsdp import fully_shard
from ya_fsdp.build import schedule_of
from ya_fsdp.collectives import C10dCollectives


class Recorder(C10dCollectives):
    """Notes every collective and passes it on."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        self.log.append(("gather", output.numel()))
        super().all_gather(output, input, group)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        self.log.append(("reduce", input.numel()))
        super().reduce_scatter(output, input, average, group)

    def all_reduce(self, tensor: Tensor, op: str, group: dist.ProcessGroup) -> None:
        self.log.append((f"all_reduce {op}", tensor.numel()))
        super().all_reduce(tensor, op, group)

    def take(self) -> Counter[str]:
        """How often each kind ran since the last call."""
        counts = Counter(kind for kind, _ in self.log)
        self.log.clear()
        return counts

    @classmethod
    def on(cls, model: Any) -> Recorder:
        """A recorder in place of the model's collectives; every unit must have one root."""
        recorder = cls()
        schedule = schedule_of(model)
        schedule.collectives = schedule.reducer.collectives = recorder
        return recorder


# ---- how often -----------------------------------------------------------------------------------


class Nested(nn.Module):
    """Blocks with a gate of their own around two experts that are units too."""

    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(n))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.gate(x).tanh()).tanh())


def shard_gated(model: Any, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer.first, **options)
        fully_shard(layer.second, **options)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def five_layers() -> nn.Module:
    return MLP(5)


COUNTED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], int]] = {
    "leaf": (five_layers, leaf, 6),
    "nested": (five_layers, nested, 6),
    "root": (five_layers, root, 1),
    "three levels": (Nested, shard_gated, 10),
}


def count_steps(rank: int, world_size: int, case: str, reshard: bool) -> list[tuple[Any, Any]]:
    build, shard, _ = COUNTED[case]
    model, reference = pair(build, shard, reshard_after_forward=reshard)
    recorder = Recorder.on(model)
    counts = []
    for step in range(4):
        xs = inputs(world_size, seed=step)
        model.zero_grad()
        output = loss(model, xs[rank])
        forward = recorder.take()
        output.backward()
        counts.append((forward, recorder.take()))
    reference.zero_grad()
    reference_backward(reference, inputs(world_size, seed=3))
    assert_same_gradients(model, reference)
    return counts


@pytest.mark.parametrize("case", COUNTED)
def test_collectives_are_as_few_as_the_units_need(pool: WorkerPool, case: str) -> None:
    units = COUNTED[case][2]
    for counts in pool.run(count_steps, case, True):
        for forward, backward in counts:
            assert forward == Counter(gather=units)
            assert backward["reduce"] == units
            assert backward["gather"] <= max(units - 1, 0)
            assert backward["all_reduce max"] == 1  # which parameters had a gradient anywhere
            assert set(backward) <= {"reduce", "gather", "all_reduce max"}


@pytest.mark.parametrize("case", COUNTED)
def test_units_that_stay_gathered_gather_once_per_step(world2: WorkerPool, case: str) -> None:
    units = COUNTED[case][2]
    for counts in world2.run(count_steps, case, False):
        for forward, backward in counts:
            assert forward == Counter(gather=units)
            assert backward == Counter({"reduce": units, "all_reduce max": 1})


def count_microbatches(rank: int, world_size: int, case: str) -> list[tuple[Any, Any]]:
    build, shard, _ = COUNTED[case]
    model, reference = pair(build, shard)
    recorder = Recorder.on(model)
    counts = []
    for micro in range(4):
        xs = inputs(world_size, seed=micro)
        if micro < 3:
            with model.no_sync():
                output = loss(model, xs[rank])
                forward = recorder.take()
                output.backward()
        else:
            output = loss(model, xs[rank])
            forward = recorder.take()
            output.backward()
        counts.append((forward, recorder.take()))
        reference_backward(reference, xs)
    assert_same_gradients(model, reference)
    return counts


@pytest.mark.parametrize("case", COUNTED)
def test_microbatches_without_communication_do_nothing_but_gather(
    world2: WorkerPool, case: str
) -> None:
    units = COUNTED[case][2]
    for counts in world2.run(count_microbatches, case):
        for forward, backward in counts[:-1]:
            assert forward == Counter(gather=units)
            assert set(backward) <= {"gather"} and backward["gather"] <= units - 1
        assert counts[-1][1]["reduce"] == units


def count_evaluation(rank: int, world_size: int) -> list[Counter[str]]:
    model, reference = pair(five_layers, nested)
    recorder = Recorder.on(model)
    counts = []
    for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with context():
            torch.testing.assert_close(model(inputs(1)[0]), reference(inputs(1)[0]))
        counts.append(recorder.take())
    loss(model, inputs(world_size)[rank])  # a forward without a backward
    counts.append(recorder.take())
    return counts


def test_an_evaluation_gathers_every_unit_once(world2: WorkerPool) -> None:
    for counts in world2.run(count_evaluation):
        assert counts == [Counter(gather=6)] * 4


def count_frozen(rank: int, world_size: int) -> Counter[str]:
    model, reference = pair(five_layers, leaf)
    for each in (model, reference):
        for layer in each.layers[1:]:
            layer.requires_grad_(False)
    recorder = Recorder.on(model)
    for step in range(2):
        recorder.take()
        train_step_of_counted(model, reference, rank, inputs(world_size, seed=step))
    return recorder.take()


def train_step_of_counted(model: Any, reference: Any, rank: int, xs: Tensor) -> None:
    model.zero_grad()
    reference.zero_grad()
    loss(model, xs[rank]).backward()
    reference_backward(reference, xs)
    assert_same_gradients(model, reference)


def test_units_frozen_after_sharding_are_gathered_but_not_reduced(world2: WorkerPool) -> None:
    for counts in world2.run(count_frozen):
        assert counts["reduce"] == 2  # the first layer and the head
        assert counts["gather"] <= 6 + 5


# ---- in which order ------------------------------------------------------------------------------


def logged_steps(rank: int, world_size: int, case: str) -> list[list[tuple[str, int]]]:
    build, shard, _ = COUNTED[case]
    model, _ = pair(build, shard)
    recorder = Recorder.on(model)
    logs = []
    for step in range(4):
        recorder.log = []
        x = inputs(world_size, seed=step)[rank]
        if rank and step > 1:
            x = x.clone().requires_grad_()  # the first unit then ends by its input's gradient
        loss(model, x).backward()
        logs.append(recorder.log)
    return logs


@pytest.mark.parametrize("case", COUNTED)
def test_all_ranks_communicate_in_the_same_order(pool: WorkerPool, case: str) -> None:
    first, *others = pool.run(logged_steps, case)
    assert all(other == first for other in others)
    assert [sorted(log) for log in first[1:]] == [sorted(first[0])] * 3


def prefetch_logs(rank: int, world_size: int, buffers: int) -> list[str]:
    model, reference = pair(five_layers, leaf)
    schedule = schedule_of(model)
    model.set_num_gather_buffers(buffers)
    for step in range(2):
        train_step_of_counted(model, reference, rank, inputs(world_size, seed=step))
    events: list[str] = []
    gather = type(schedule).launch_gather

    def launch(unit: Any, stamp: int) -> None:
        before = unit.slot.content if unit.slot is not None else None
        gather(schedule, unit, stamp)
        if unit.groups and (before is not unit or unit.gather_pending):
            events.append(f"gather {unit.fqn}")

    schedule.launch_gather = launch  # type: ignore[method-assign]
    for name, module in [*model.layers.named_children(), ("head", model.head)]:
        module.register_forward_pre_hook(lambda *_, name=name: events.append(f"run {name}"))
    model(inputs(1)[0])
    return events


def test_the_next_unit_is_gathered_before_the_present_one_runs(world2: WorkerPool) -> None:
    for events in world2.run(prefetch_logs, 2):
        for index in range(4):
            following = events.index(f"gather layers.{index + 1}")
            assert following < events.index(f"run {index}")
        assert events.index("gather layers.2") > events.index("run 0")


def test_three_buffers_gather_two_units_ahead(world2: WorkerPool) -> None:
    for events in world2.run(prefetch_logs, 3):
        assert events.index("gather layers.2") < events.index("run 0")
        assert events.index("gather layers.3") > events.index("run 0")


def explicit_prefetch(rank: int, world_size: int) -> None:
    model, reference = pair(five_layers, leaf)
    layers = [*model.layers, model.head]
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
        layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])
    optimizers = sgd_pair(model, reference)
    for buffers in (2, 3, 4):
        model.set_num_gather_buffers(buffers)
        for step in range(2):
            xs = inputs(world_size, seed=step)
            train_step(model, reference, rank, xs, optimizers=optimizers)


def test_prefetch_targets_set_by_hand_train_with_any_number_of_buffers(pool: WorkerPool) -> None:
    pool.run(explicit_prefetch)


def one_buffer_each(rank: int, world_size: int, name: str) -> None:
    model, reference = pair(five_layers, SHARDINGS[name])
    model.set_num_gather_buffers(1)
    model.set_num_gradient_buffers(1)
    optimizers = sgd_pair(model, reference)
    for step in range(3):
        xs = inputs(world_size, seed=step)
        train_step(model, reference, rank, xs, optimizers=optimizers)


@pytest.mark.parametrize("name", ["leaf", "nested", "root"])
def test_one_gather_buffer_and_one_gradient_buffer_are_enough(
    world2: WorkerPool, name: str
) -> None:
    world2.run(one_buffer_each, name)


# ---- what stays ----------------------------------------------------------------------------------


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def grow(rank: int, world_size: int, name: str, mode: str) -> None:
    model, _ = pair(five_layers, SHARDINGS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    after: dict[int, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    for step in range(31):
        x = inputs(world_size, seed=step)[rank]
        if mode == "evaluation":
            with torch.no_grad():
                model(x)
            model(x)
        elif mode == "microbatches":
            model.requires_grad_(True)
            for module in model.modules():
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(step % 2 == 1)
        loss(model, x).backward()
        if mode != "microbatches" or step % 2:
            optimizer.step()
            optimizer.zero_grad()
        del x
        if step in (3, 29):
            after[step] = tensors_once_released(after.get(3, tensors()))
            counts[step] = objects()
    assert after[29][0] <= after[3][0], after
    assert after[29][1] <= after[3][1], after
    assert abs(counts[29] - counts[3]) <= 30  # the dictionaries of this test among them


@pytest.mark.parametrize("mode", ["training", "evaluation", "microbatches"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_nothing_grows_from_step_to_step(world2: WorkerPool, name: str, mode: str) -> None:
    world2.run(grow, name, mode)


def delete(rank: int, world_size: int, name: str) -> None:
    before = tensors()
    model, reference = pair(five_layers, SHARDINGS[name])
    optimizers = sgd_pair(model, reference)
    for step in range(3):
        xs = inputs(world_size, seed=step)
        train_step(model, reference, rank, xs, optimizers=optimizers)
    with torch.no_grad():
        model(xs[rank])
    first = model if name == "root" else model.layers[0]
    units = schedule_of(first).units
    watched = [
        weakref.ref(o)
        for o in (
            model,
            model.layers[0],
            model.head,
            units[0],
            schedule_of(first),
            next(model.parameters()),
            units[-1].groups[0].params[0].unsharded,
        )
    ]
    if name in ("layers only", "root"):
        del watched[4]  # units without a common root share one schedule, kept for the next ones
    del model, reference, optimizers, first, units, xs
    gc.collect()
    assert [w() for w in watched] == [None] * len(watched)
    after = tensors_once_released(before)
    assert after[0] <= before[0], (after, before)
    assert after[1] <= before[1], (after, before)


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_deleted_model_leaves_nothing_behind(world2: WorkerPool, name: str) -> None:
    world2.run(delete, name)
