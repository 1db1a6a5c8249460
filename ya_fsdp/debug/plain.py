"""Trains a model sharded and plain, and says where they first differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..build import state_of
from ..checks import check_callable
from ..fully_shard import fully_shard
from ..tree import map_tensors, tensors_in
from .units import units_of


@dataclass(frozen=True)
class Comparison:
    """What :func:`check_against_plain` saw where everything agreed.

    Attributes:
        losses: This rank's loss of every step, of the sharded model.
        difference: The largest difference of any gradient or weight, relative to that tensor's
            largest element.
        fqn: Where that was.
    """

    losses: tuple[float, ...]
    difference: float
    fqn: str


def check_against_plain(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    *,
    shard: Callable[[nn.Module], object] | None = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    steps: int = 3,
    tolerance: float = 1e-3,
) -> Comparison:
    """Trains the same model sharded and plain and raises where they first differ.

    The plain model runs on every rank with that rank's batch, and its gradients are averaged one
    by one: what data-parallel training without sharding does. Random numbers (dropout) are seeded
    alike before every forward.

    Args:
        model_fn: Makes the plain model; called once, after the same seed on every rank. It has to
            fit on one device twice.
        batch: A tensor, a dict (passed as keywords) or a tuple (passed as arguments); or a
            function of the step that returns this rank's.
        shard: Shards the model in place. ``None``: :func:`fully_shard` on every element of every
            ``ModuleList`` and ``Sequential`` that is not inside another one, then on the model.
        loss_fn: Maps model and batch to a scalar. ``None``: the output's ``loss``, or the mean
            square of its floating-point tensors.
        optimizer_fn: Makes an optimizer. ``None``: SGD with a learning rate of 0.01.
        steps: How many steps to train.
        tolerance: Largest difference that is allowed, relative to the largest element of each
            gradient or weight. 16-bit computation wants 0.05.

    Returns:
        Losses and the largest difference.

    Raises:
        RuntimeError: On every rank; names step, parameter, and gradient or weight.
        ValueError: If ``steps`` is not positive.
    """
    if isinstance(model_fn, nn.Module):
        raise TypeError(
            f"model_fn must be a function that makes the plain model, got a {type(model_fn)}"
        )
    for name, value in (("model_fn", model_fn), ("loss_fn", loss_fn), ("shard", shard)):
        if value is not None or name == "model_fn":
            check_callable(name, value)
    if steps < 1:
        raise ValueError(f"steps must be positive, got {steps}")
    loss_fn = loss_fn or _default_loss
    make = optimizer_fn or (lambda params: torch.optim.SGD(params, lr=0.01))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sharded = model_fn()
        plain = copy.deepcopy(sharded)
        (shard or _shard_blocks)(sharded)
        device = next((g.device for u in units_of(sharded) for g in u.groups), None)
        plain.to(device)
        optimizers = make(sharded.parameters()), make(plain.parameters())
        losses: list[float] = []
        worst = (0.0, "")
        for step in range(steps):
            given = batch(step) if callable(batch) else batch
            given = map_tensors(given, lambda t: t.to(device))
            for model, optimizer in zip((sharded, plain), optimizers, strict=True):
                torch.manual_seed(1000 * step + dist.get_rank())
                optimizer.zero_grad()
                loss = loss_fn(model, given)
                torch.autograd.backward(loss)
                if model is sharded:
                    losses.append(float(loss.detach()))
            _average_gradients(plain)
            worst = max(worst, _compare(sharded, plain, step, "gradient", tolerance))
            for optimizer in optimizers:
                optimizer.step()
            worst = max(worst, _compare(sharded, plain, step, "weight", tolerance))
    return Comparison(tuple(losses), *worst)


def _shard_blocks(model: nn.Module) -> None:
    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, (nn.ModuleList, nn.Sequential)):
                for block in child:
                    if any(True for _ in block.parameters()) and state_of(block) is None:
                        fully_shard(block)
            else:
                visit(child)

    visit(model)
    fully_shard(model)


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [t for t in tensors_in(output) if t.is_floating_point()]
    if not floats:
        raise ValueError("the model returns no floating-point tensor; pass loss_fn")
    return torch.stack([t.float().pow(2).mean() for t in floats]).sum()


def _average_gradients(model: nn.Module) -> None:
    """Ranks without a gradient contribute zeros where another rank has one."""
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        return
    has = torch.tensor([p.grad is not None for p in params], dtype=torch.int32)
    has = has.to(params[0].device)
    dist.all_reduce(has, op=dist.ReduceOp.MAX)
    for param, anywhere in zip(params, has.tolist(), strict=True):
        if anywhere:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def _compare(
    sharded: nn.Module, plain: nn.Module, step: int, what: str, tolerance: float
) -> tuple[float, str]:
    """The largest relative difference and its FQN; raises at the first above the tolerance."""
    expected = dict(plain.named_parameters())
    worst = (0.0, "")
    first = ""
    for name, param in sharded.named_parameters():
        is_weight = what == "weight"
        mine = param.detach() if is_weight else param.grad
        truth = expected[name].detach() if is_weight else expected[name].grad
        # Every rank gathers every parameter, whatever it found before.
        whole = getattr(mine, "full_tensor", lambda same=mine: same)()
        if whole is None or truth is None:
            if (whole is None) != (truth is None):
                state = "missing" if whole is None else "there"
                first = first or f"is {state}, unlike the plain model's"
                worst = worst if worst[1] else (float("inf"), name)
            continue
        scale = truth.float().abs().max().clamp_min(1e-12) if truth.numel() else 1.0
        apart = (whole.float() - truth.float()).abs().max() if truth.numel() else torch.zeros(())
        difference = float(apart / scale)
        if not difference <= tolerance and not first:
            first = f"differs by {difference:.2e} of its largest element"
            worst = (difference, name)
            continue
        if not first:
            worst = max(worst, (difference, name))
    if first:
        raise RuntimeError(
            f"step {step}: the {what} of '{worst[1]}' {first} (allowed: {tolerance:g}); it is the "
            "first parameter, in registration order, in which the sharded model differs from the "
            "plain one"
        )
    return worst
