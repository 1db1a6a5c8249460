"""What the tests of checkpoints share: a model with everything in it, and its training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import test_device
from ya_fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 10)
        self.down = nn.Linear(10, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, a tied weight, a buffer of floats and one of integers, a tiny parameter."""

    def __init__(self, blocks: int = 3, width: int = 6, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.randn(width))
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def plain_net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).to(test_device())


def shard(model: Net, granularity: str = "auto", apply: Callable[..., Any] = fully_shard) -> Net:
    options = {"granularity": granularity} if apply is fully_shard else {}
    for block in model.blocks:
        apply(block, **options)
    return apply(model, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Every rank sees the same batch, so that any number of ranks goes the same way."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(7, (4, 5), generator=generator).to(test_device())
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_plain(steps: int = 2, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = plain_net(**options)
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return model, optimizer


def trained_sharded(
    steps: int = 2, granularity: str = "auto", **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    model = shard(plain_net(**options), granularity)
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return model, optimizer


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def wholes(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors, by way of each tensor's own gathering."""
    return {name: whole(value).detach().clone() for name, value in model.state_dict().items()}


def state_wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors under the names of parameters."""
    return {
        f"{name}.{key}": torch.as_tensor(whole(value)).detach().clone().cpu()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Equal names and bits."""
    assert list(first) == list(second)
    for name, value in first.items():
        assert torch.equal(value.cpu(), second[name].cpu()), name


def assert_near(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert list(first) == list(second)
    for name, value in first.items():
        torch.testing.assert_close(value.cpu(), second[name].cpu(), atol=1e-5, rtol=1e-4, msg=name)


def snapshot(model: nn.Module) -> list[Tensor]:
    """This rank's memory, to see that nothing was written."""
    values = copy.copy(model.state_dict()).values()
    return [getattr(value, "_local_tensor", value).clone() for value in values]


def assert_unchanged(model: nn.Module, before: list[Tensor]) -> None:
    for old, new in zip(before, snapshot(model), strict=True):
        assert torch.equal(old, new)
