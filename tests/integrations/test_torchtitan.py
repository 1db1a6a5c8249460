"""torchtitan's extension point, called with stand-ins for its arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import WorkerPool
from ya_fsdp import YaFSDPModule
from ya_fsdp.integrations.torchtitan import parallelize_fn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """Blocks in a dictionary, as in torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.output = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def shard_and_step(rank: int, world_size: int, by_keyword: bool) -> Any:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    training = SimpleNamespace(
        mixed_precision_param="bfloat16", mixed_precision_reduce="float32", other=1
    )
    job = SimpleNamespace(training=training, activation_checkpoint=SimpleNamespace(mode="full"))
    dims = SimpleNamespace(dp_replicate_enabled=False, get_mesh=lambda name: mesh)
    if by_keyword:
        model = parallelize_fn(model=Model(), parallel_dims=dims, training=training, unknown=3)
    else:
        model = parallelize_fn(Model(), dims, job)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    model(x.chunk(world_size)[rank]).float().square().mean().backward()
    units = [name for name, m in model.named_modules() if isinstance(m, YaFSDPModule)]
    policy = {p.dtype for p in model.parameters()}
    grad = model.output.weight.grad
    assert grad is not None
    return units, policy, grad.full_tensor()  # type: ignore[attr-defined]


@pytest.mark.parametrize("by_keyword", [True, False])
def test_every_layer_is_a_unit_and_gradients_are_those_of_one_process(
    world2: WorkerPool, by_keyword: bool
) -> None:
    units, dtypes, grad = world2.run(shard_and_step, by_keyword)[0]
    assert units == ["", "layers.0", "layers.1"]
    assert dtypes == {torch.float32}
    model = Model()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    model(x).square().mean().backward()
    want = model.output.weight.grad
    assert want is not None
    assert torch.allclose(grad, want, rtol=0.05, atol=0.01)
    assert not torch.equal(grad, want)  # computed in bfloat16


def test_other_kinds_of_parallelism_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="does not offer tp"):
        parallelize_fn(Model(), SimpleNamespace(tp_enabled=True))
