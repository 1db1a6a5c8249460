"""Which units share gather and gradient buffers: by process group, and as the user maps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.models import (
    MLP,
    assert_same_gradients,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    sgd_pair,
    train_step,
)
from tests.distributed.test_schedule import Recorder
from tests.harness import WorkerPool, test_device
from ya_fsdp import fully_shard, set_buffer_groups
from ya_fsdp.build import schedule_of, units_of


def half_on_other_ranks(model: Any) -> Any:
    """Even layers over all ranks, odd ones over pairs of ranks."""
    mesh = init_device_mesh(test_device().type, (2, 2), mesh_dim_names=("far", "near"))
    for index, layer in enumerate(model.layers):
        fully_shard(layer, mesh=mesh["near"] if index % 2 else None)
        if index % 2:
            layer.set_gradient_divide_factor(4)
    fully_shard(model.head)
    return fully_shard(model)


def slots_of(modules: Any) -> list[int]:
    return [id(unit.slot) for unit in units_of(modules)]


def apart(rank: int, world: int) -> None:
    model, _ = pair(lambda: MLP(6), half_on_other_ranks)
    for step in range(3):
        loss(model, inputs(world, seed=step)[rank]).backward()
    wide, narrow = slots_of(model.layers[::2]), slots_of(model.layers[1::2])
    assert len(set(wide)) == len(set(narrow)) == 2
    assert not set(wide) & set(narrow)
    rings = {unit.ring for unit in units_of([*model.layers, model.head])}
    slots = schedule_of(model).reducer.slots
    assert len(rings) == 2
    assert {slot.ring for slot in slots} == rings


def test_units_of_different_process_groups_share_no_buffers(world4: WorkerPool) -> None:
    world4.run(apart)


def joined(rank: int, world: int) -> None:
    model, reference = pair(lambda: MLP(6), leaf)
    optimizers = sgd_pair(model, reference)
    names = dict(zip(model.layers, ["a", "b", "c"] * 2, strict=True))
    for buffers, expected in ((names, 3), (None, 2), (dict.fromkeys(model.layers, 0), 1)):
        set_buffer_groups(model, buffers)
        for step in range(3):
            train_step(model, reference, rank, inputs(world, seed=step), optimizers=optimizers)
        slots = slots_of(model.layers)
        assert len(set(slots)) == expected
        if buffers:
            kept = dict(zip(slots, buffers.values(), strict=True))
            assert [kept[slot] for slot in slots] == list(buffers.values())


def test_units_take_turns_in_the_buffers_a_user_names(world4: WorkerPool) -> None:
    world4.run(joined)


def across(rank: int, world: int) -> None:
    model, reference = pair(lambda: MLP(6), half_on_other_ranks)
    set_buffer_groups(model, {layer: i // 2 % 2 for i, layer in enumerate(model.layers)})
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        x = inputs(world, seed=step)
        loss(model, x[rank]).backward()
        for each in x:
            (loss(reference, each) / world).backward()
    wide = [layer for i, layer in enumerate(model.layers) if i % 2 == 0]
    for layer in (*wide, model.head):
        name = next(n for n, m in model.named_modules() if m is layer)
        assert_same_gradients(layer, reference.get_submodule(name))
    assert len(set(slots_of(model.layers))) == 2
    assert len({slot.ring for slot in schedule_of(model).reducer.slots}) == 1


def test_a_name_joins_units_of_different_process_groups(world4: WorkerPool) -> None:
    world4.run(across)


def gathers(rank: int, world: int) -> int:
    model, _ = pair(lambda: MLP(4), nested)
    set_buffer_groups(model, {layer: i % 4 for i, layer in enumerate(model.layers)})
    recorder = Recorder.on(model)
    for step in range(3):
        recorder.take()
        loss(model, inputs(world, seed=step)[rank]).backward()
    return recorder.take()["gather"]


def test_a_buffer_for_every_unit_gathers_once_per_step(world4: WorkerPool) -> None:
    assert world4.run(gathers) == [5] * 4


def refuse(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested)
    with pytest.raises(ValueError, match=r"'MLP' and 'layers\.0', one of which contains"):
        set_buffer_groups(model, {model: "a", model.layers[0]: "a"})
    for wrong in (nn.Linear(1, 1), model.head, leaf(MLP().to(test_device())).layers[0], "head"):
        with pytest.raises(ValueError, match="sharded modules of the model that own parameters"):
            set_buffer_groups(model, {model.layers[0]: "a", wrong: "b"})
    with pytest.raises(ValueError, match="has no name"):
        set_buffer_groups(model, {model.layers[0]: None})
    with pytest.raises(ValueError, match="is not sharded"):
        set_buffer_groups(nn.Linear(1, 1), {})
    value = loss(model, inputs(world)[rank])
    with pytest.raises(RuntimeError, match="between steps"):
        set_buffer_groups(model, {model.layers[0]: "a"})
    assert all(unit.buffer is None for unit in units_of(model.modules()))
    value.backward()
    assert torch.isfinite(value)


def test_mappings_that_can_not_be_are_refused(world4: WorkerPool) -> None:
    world4.run(refuse)
