"""Every combination of options trains like the plain model or is refused by ``fully_shard``."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.distributed.models import full
from tests.distributed.test_collectives_contract import FakeHandle
from tests.harness import WorkerPool, test_device, uses_nccl
from ya_fsdp import MixedPrecisionPolicy, RaggedShardDTensor, fully_shard
from ya_fsdp.collectives import (
    RecordingCollectives,
    SymmetricMemoryCollectives,
    YcclCollectives,
)

WIDTH = 8
WORLD = 4

MESHES = {
    "4": ((4,), ("dp",), ("dp",)),
    "2x2": ((2, 2), ("replicate", "shard"), ("replicate", "shard")),
    "1x4": ((1, 4), ("replicate", "shard"), ("replicate", "shard")),
    "4x1": ((4, 1), ("replicate", "shard"), ("replicate", "shard")),
    "2, tp 2": ((2, 2), ("dp", "tp"), ("dp",)),
    "4, tp 1": ((4, 1), ("dp", "tp"), ("dp",)),
    "1x2, tp 2": ((1, 2, 2), ("replicate", "shard", "tp"), ("replicate", "shard")),
    "1x2x2": ((1, 2, 2), ("a", "b", "c"), ("a", "b", "c")),
}
BACK_ENDS = {
    "default": lambda: None,
    "recording": RecordingCollectives,
    "yccl": lambda: YcclCollectives(FakeHandle()),
    "symmetric": SymmetricMemoryCollectives,
}


@dataclass(frozen=True)
class Case:
    mesh: str
    reshard: bool | int
    over_replicas: bool = False
    gather: torch.dtype | None = None
    granularity: Any = "auto"
    fused: bool = False
    back_end: str = "default"
    accumulate: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """Ranks of each axis that shards or replicates."""
        shape, names, used = MESHES[self.mesh]
        return tuple(shape[names.index(name)] for name in used)

    def refusal(self) -> str | None:
        """What the documentation says about it (docs/meshes.md); ``None``: it works."""
        number = type(self.reshard) is int
        if len(self.axes) > 2:
            return "mesh must be 1-D"
        if self.over_replicas:
            if len(self.axes) == 1:
                return "needs a 2-D mesh"
            if self.gather is not None:
                return "two in a row"
            if "tp" in self.mesh:
                return "on other mesh axes"
            if number:
                return "shards are cut over replicas"
        elif number and (self.reshard < 1 or self.axes[-1] % self.reshard):
            return "has to divide"
        if self.back_end == "symmetric":
            return "needs CUDA devices"
        return None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).tanh()))


def build() -> nn.Module:
    """Weights that 8 bits hold exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    for param in model.parameters():
        if param.ndim > 1:
            param.data = torch.randint(-1, 2, param.shape) / 4
    return model.to(test_device())


@cache
def mesh_of(name: str) -> tuple[DeviceMesh, DeviceMesh]:
    """All axes, and those that shard or replicate."""
    shape, names, used = MESHES[name]
    mesh = init_device_mesh(test_device().type, shape, mesh_dim_names=names)
    return mesh, mesh if used == names else mesh[used]


def shard(model: Any, case: Case) -> None:
    mesh, used = mesh_of(case.mesh)
    if "tp" in case.mesh:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model:
            parallelize_module(layer, mesh["tp"], plan)
    options = {
        "mesh": used,
        "reshard_after_forward": case.reshard,
        "shard_optimizer_over_replicas": case.over_replicas,
        "granularity": case.granularity,
        "fused_weight_gradients": case.fused,
        "collectives": BACK_ENDS[case.back_end](),
        "mp_policy": MixedPrecisionPolicy(
            gather_dtype=case.gather,
            reduce_dtype=torch.float32,
            bit32_acc_for_bit16_reduce_scatter=case.accumulate,
        ),
    }
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def try_case(rank: int, case: Case, reference: Any) -> str | None:
    """The message of the refusal, or ``None`` after a step like the reference's."""
    model: Any = copy.deepcopy(reference)
    try:
        shard(model, case)
    except (ValueError, RuntimeError) as error:
        assert not any(isinstance(p, RaggedShardDTensor) for p in model.parameters())
        assert type(model) is nn.Sequential
        return str(error)
    tp = WORLD // math.prod(case.axes)
    x = torch.randn(WORLD // tp, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    x = x.to(test_device())
    model(x[rank // tp]).square().mean().backward()
    reference.zero_grad()
    reference(x.flatten(0, 1)).square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), other.grad, atol=1e-5, rtol=1e-4, msg=name)
    return None


def try_all(rank: int, world: int, cases: list[Case]) -> dict[str | None, int]:
    reference = build()
    found: Counter[str | None] = Counter()
    for case in cases:
        message, expected = try_case(rank, case, reference), case.refusal()
        if expected is None:
            assert message is None, f"{case}: {message}"
        else:
            assert message is not None, f"{case} works"
            assert expected in message, f"{case}: {message}"
        found[expected] += 1
    return dict(found)


RESHARD: tuple[bool | int, ...] = (True, False, 0, 1, 2, 3, 4)


def test_meshes_with_every_reshard_work_or_are_refused(world4: WorkerPool) -> None:
    cases = [
        Case(mesh, reshard, over, gather)
        for mesh, reshard, over, gather in itertools.product(
            MESHES, RESHARD, (False, True), (None, torch.int8)
        )
    ]
    found = world4.run(try_all, cases)[0]
    assert found[None] > 40 and len(found) == 7


def test_other_options_cross_with_meshes(world4: WorkerPool) -> None:
    back_ends = [name for name in BACK_ENDS if name != "symmetric" or not uses_nccl()]
    cases = [
        Case(mesh, True, over, None, granularity, fused, back_end, accumulate)
        for (mesh, over), granularity, fused, back_end, accumulate in itertools.product(
            [("4", False), ("2x2", False), ("2x2", True), ("2, tp 2", False)],
            ("row", "element", 3),
            (False, True),
            back_ends,
            (False, True),
        )
    ]
    world4.run(try_all, cases[::5])  # of each option with each other one several


def switch_back_end(rank: int, world: int) -> None:
    reference = build()
    model: Any = copy.deepcopy(reference)
    shard(model, Case("4", True))
    with pytest.raises(RuntimeError, match="needs CUDA devices"):
        model.set_collectives(SymmetricMemoryCollectives())
    x = torch.ones(2, WIDTH)
    torch.testing.assert_close(model(x), reference(x))


@pytest.mark.skipif(uses_nccl(), reason="symmetric memory works on CUDA devices")
def test_a_back_end_that_can_not_work_is_refused_when_it_is_set(world4: WorkerPool) -> None:
    world4.run(switch_back_end)
