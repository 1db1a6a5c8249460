"""Stages of torch's pipeline schedules that are sharded, against the whole model."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tests.distributed.models import MLP, WIDTH, assert_same_gradients, full, nested, root
from tests.distributed.test_schedule import Recorder
from tests.harness import WorkerPool, test_device
from ya_fsdp import clip_grad_norm_

MICROBATCHES = 4
BATCH = 2 * MICROBATCHES
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class Half(nn.Module):
    """Two blocks of the whole model, and the head in the last stage."""

    def __init__(self, whole: MLP, stage: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy(e) for e in whole.layers[2 * stage :][:2])
        self.head = copy.deepcopy(whole.head) if stage else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def train(rank: int, world: int, kind: str, name: str, reshard: bool) -> list[Counter[str]]:
    mesh = init_device_mesh(test_device().type, (2, world // 2), mesh_dim_names=("pp", "dp"))
    stage_index, replica = mesh.get_coordinate()  # type: ignore[misc]
    torch.manual_seed(0)
    whole = MLP(4).to(test_device())
    half = Half(whole, stage_index)
    shard = {"nested": nested, "root": root}[name]
    shard(half, mesh=mesh["dp"], reshard_after_forward=reshard)
    recorder = Recorder.on(half)
    stage = PipelineStage(half, stage_index, 2, test_device(), group=mesh.get_group("pp"))
    schedule = SCHEDULES[kind](stage, MICROBATCHES, mean_square)
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    counts = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(world // 2, BATCH, WIDTH, generator=generator).to(test_device())
        target = torch.randn(world // 2, BATCH, 3, generator=generator).to(test_device())
        recorder.take()
        if stage_index == 0:
            schedule.step(x[replica])
        else:
            schedule.step(target=target[replica])
        counts.append(recorder.take())
        mean_square(whole(x.flatten(0, 1)), target.flatten(0, 1)).backward()
        assert_same_gradients(half, part_of(whole, stage_index))
        if step == 1:
            stages = {half: mesh.get_group("pp")}
            total = clip_grad_norm_(half, 0.05, norm_groups=stages)
            truth = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
            assert float(total) == pytest.approx(float(truth), rel=1e-5)
            assert truth > 0.05, "nothing would be clipped"
            assert_same_gradients(half, part_of(whole, stage_index))
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
        truth = dict(part_of(whole, stage_index).named_parameters())
        for fqn, param in half.named_parameters():
            torch.testing.assert_close(full(param.detach()), truth[fqn].detach(), msg=fqn)
    return counts


def part_of(whole: Any, stage: int) -> nn.Module:
    """The whole model's own parameters, named as in a stage."""
    part = nn.Module()
    part.layers = nn.ModuleList(whole.layers[2 * stage :][:2])
    if stage:
        part.head = whole.head
    return part


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "stay"])
@pytest.mark.parametrize("name", ["nested", "root"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_sharded_stages_train_as_the_whole_model(
    world4: WorkerPool, kind: str, name: str, reshard: bool
) -> None:
    """Gradients are reduced once a step; gathers end with the first backward of the step."""
    for rank, counts in enumerate(world4.run(train, kind, name, reshard)):
        stage = rank // 2
        units = 1 if name == "root" else 2 + stage
        forwards = MICROBATCHES if kind == "GPipe" else 2 - stage  # before the first backward
        expected = Counter({"gather": forwards * units, "reduce": units, "all_reduce max": 1})
        assert counts[1:] == [expected] * 2


def test_a_pipeline_alone_trains_as_the_whole_model(world2: WorkerPool) -> None:
    world2.run(train, "1F1B", "nested", True)
