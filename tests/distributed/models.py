"""Small models, ways to shard them, and the gradients a sharded model must have.

A reference is a deep copy taken before sharding. It sees what all ranks see::

    model = MLP()
    reference = copy.deepcopy(model)
    leaf(model)
    x = inputs(world_size)
    loss(model, x[rank]).backward()
    reference_backward(reference, x, loss)
    assert_same_gradients(model, reference)
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import test_device, uses_nccl
from ya_fsdp import fully_shard

WIDTH = 6
HIDDEN = 10
CLASSES = 3
BATCH = 4

Loss = Callable[[Any, Any], Tensor]
Shard = Callable[..., Any]


class Block(nn.Module):
    """``x + Linear(ReLU(Linear(x)))``."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class MLP(nn.Module):
    """``n`` blocks in ``layers``, then a linear ``head``."""

    def __init__(self, n: int = 3, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(n))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def leaf(model: Any, **options: Any) -> Any:
    """Shards every layer, the head, and then the root, which owns no parameter."""
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model.head, **options)
    return fully_shard(model, **options)


def nested(model: Any, **options: Any) -> Any:
    """Shards every layer, and then the root, which owns the rest."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def root(model: Any, **options: Any) -> Any:
    """Shards everything as one unit."""
    return fully_shard(model, **options)


def layers_only(model: Any, **options: Any) -> Any:
    """Shards every layer and the head; nothing is above them."""
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model.head, **options)
    return model


SHARDINGS: dict[str, Shard] = {
    "leaf": leaf,
    "nested": nested,
    "root": root,
    "layers only": layers_only,
}


def inputs(
    world_size: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The same random tensor (ranks, *shape) on every rank; rank r feeds ``inputs(...)[r]``."""
    generator = torch.Generator().manual_seed(seed)
    size = (world_size, *(shape or (BATCH, WIDTH)))
    return torch.randn(size, generator=generator, dtype=dtype).to(test_device())


def pair(
    build: Callable[[], nn.Module], shard: Shard = leaf, seed: int = 0, **options: Any
) -> tuple[Any, Any]:
    """A sharded model and its unsharded reference, with the same weights on every rank."""
    torch.manual_seed(seed)
    model = build().to(test_device())
    reference = copy.deepcopy(model)
    shard(model, **options)
    return model, reference


def loss(model: Any, x: Any) -> Tensor:
    """The mean square of the output."""
    return model(x).pow(2).mean()


def reference_backward(reference: Any, xs: Sequence[Any] | Tensor, loss: Loss = loss) -> None:
    """Adds to ``reference``'s gradients the mean over ranks of what each rank's loss gives."""
    for x in xs:
        (loss(reference, x) / len(xs)).backward()


def full(tensor: Tensor) -> Tensor:
    """The whole tensor behind a sharded one (a collective call), or the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_gradients(model: Any, reference: Any, atol: float = 1e-5) -> None:
    """Grad truth: gathered gradients equal the reference's and are ``None`` where its are.

    Runs the same collectives on every rank whether or not gradients are right there, so that a
    failure is an assertion on every rank and not a hang.
    """
    expected = dict(reference.named_parameters())
    actual = dict(model.named_parameters())
    assert list(actual) == list(expected)
    wrong: list[str] = []
    for name, param in actual.items():
        truth = expected[name].grad
        if param.grad is None or truth is None:
            if (param.grad is None) != (truth is None):
                wrong.append(f"{name}: is None is {param.grad is None}, not {truth is None}")
            continue
        gradient = full(param.grad)
        if not torch.allclose(gradient, truth, atol=atol, rtol=1e-4):
            error = (gradient - truth).abs().max().item()
            wrong.append(f"{name}: off by {error:.2e}, truth up to {truth.abs().max().item():.2e}")
    assert not wrong, "\n".join(wrong)


def over_16_bits(atol: float, world: int) -> float:
    """``atol`` for gradients below one that three or more ranks sum in 16 bits.

    NCCL divides what each rank gives and rounds it before it sums, and sums in an order of its own:
    the result may be three of bfloat16's units of 2**-8 away, where gloo's is one or two away.
    Halves are exact, and two numbers have one sum.
    """
    return max(atol, 3 * 2**-8) if uses_nccl() and world > 2 else atol


def assert_same_parameters(model: Any, reference: Any, atol: float = 1e-5) -> None:
    """Gathered parameters equal the reference's."""
    expected = dict(reference.named_parameters())
    actual = {name: full(p.detach()) for name, p in model.named_parameters()}
    assert list(actual) == list(expected)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name].detach(), atol=atol, rtol=1e-4, msg=name)


def assert_none_stale(model: Any, reference: Any, x: Any) -> None:
    """A forward without gradients gives what the reference gives."""
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), atol=1e-5, rtol=1e-4)


def train_step(
    model: Any,
    reference: Any,
    rank: int,
    xs: Sequence[Any] | Tensor,
    loss: Loss = loss,
    optimizers: tuple[Any, Any] | None = None,
) -> None:
    """One step of both; compares gradients, and parameters where optimizers are given."""
    model.zero_grad()
    reference.zero_grad()
    loss(model, xs[rank]).backward()
    reference_backward(reference, xs, loss)
    assert_same_gradients(model, reference)
    if optimizers is not None:
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(model, reference)


def ignore_scattered_rnn_weights() -> None:
    """Lets a test that makes warnings errors run recurrent layers on a GPU.

    cuDNN wants the weights of such a layer in one piece of memory that holds nothing else. Gathered
    weights are views into the unit's buffer, whose order is not cuDNN's, so torch copies them.
    """
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")


def sgd_pair(model: Any, reference: Any, lr: float = 0.1) -> tuple[Any, Any]:
    """The same plain SGD for both."""
    return (
        torch.optim.SGD(model.parameters(), lr=lr),
        torch.optim.SGD(reference.parameters(), lr=lr),
    )
