"""The classic interface: ``YaFSDP(model, zero_stage=..., ...)`` against plain training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.test_gradients import counted
from tests.harness import WorkerPool, test_device
from ya_fsdp import YaFSDP, YaFSDPModule, fully_shard

VOCABULARY, WIDTH, LAYERS, LENGTH = 11, 6, 3, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor([1.5]))
        self.title = "network"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.scale)


def network(layers: int = LAYERS) -> Network:
    torch.manual_seed(0)
    return Network(layers).to(test_device())


def wrap(model: Any, zero_stage: int = 3, steps: int = 1, **options: Any) -> Any:
    """Wraps embedding, layers and head, as the original's migration guide does."""
    given: dict[str, Any] = {
        "param_dtype": torch.float32,
        "modules_to_wrap_with_names": [
            (model.embed, "embed"),
            *((layer, f"layers.{i}") for i, layer in enumerate(model.layers)),
            (model.head, "head"),
        ],
        "layer_norm_module_cls": nn.LayerNorm,
        "rogue_layer_norm_modules_with_names": {model.norm: "norm"},
    }
    given.update(options)
    return YaFSDP(model, zero_stage=zero_stage, gradient_accumulation_steps=steps, **given)


def tokens(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator).to(test_device())


def loss_of(model: Any, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def plain_step(reference: nn.Module, batches: list[list[Tensor]]) -> list[float]:
    """Adds the mean gradient over microbatches and ranks; returns this step's losses."""
    losses = []
    count = len(batches) * len(batches[0])
    for micro in batches:
        for batch in micro:
            loss = loss_of(reference, batch)
            (loss / count).backward()
            losses.append(loss.item())
    return losses


def assert_same_weights(model: YaFSDP, reference: nn.Module) -> None:
    whole = model.state_dict()
    expected = reference.state_dict()
    if dist.get_rank() == 0:
        assert list(whole) == list(expected)
        for name, value in whole.items():
            torch.testing.assert_close(value, expected[name].cpu(), atol=2e-5, rtol=1e-4, msg=name)
    else:
        assert whole == {}


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def pool(request: pytest.FixtureRequest) -> WorkerPool:
    return request.getfixturevalue(f"world{request.param}")


# ---- training ------------------------------------------------------------------------------------


def train(rank: int, world: int, stage: int, steps: int) -> None:
    model, reference = network(), network()
    wrapped = wrap(model, stage, steps)
    ours = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(10):
        losses = []
        batches = [[tokens(step * steps + m, r) for r in range(world)] for m in range(steps)]
        for micro in batches:
            loss = loss_of(wrapped, micro[rank])
            loss.backward()
            losses.append(loss.item())
        expected = plain_step(reference, batches)[rank::world]
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
        norm = wrapped.clip_grad_norm_(0.5)
        truth = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(norm, truth, atol=1e-5, rtol=1e-4)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(wrapped, reference)


@pytest.mark.parametrize("steps", [1, 4], ids=["one microbatch", "four microbatches"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ten_steps_equal_plain_training(pool: WorkerPool, stage: int, steps: int) -> None:
    pool.run(train, stage, steps)
