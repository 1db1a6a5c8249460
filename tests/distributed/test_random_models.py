"""Random trees of modules, sharded at random, against the plain model."""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.distributed.models import (
    assert_same_gradients,
    assert_same_parameters,
    inputs,
    loss,
    reference_backward,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import fully_shard

WIDTH = 4
LEAVES = ("linear", "norm", "bare", "frozen", "shared", "double", "empty")


@dataclass(frozen=True)
class Tree:
    """A node: what it computes itself, its children in order of calls, how it is sharded.

    Attributes:
        kind: One of ``LEAVES``.
        children: Called before the node's own computation, residually.
        sharded: Whether ``fully_shard`` is called on it.
        keep: Its ``reshard_after_forward``, negated.
        calls: How often each forward calls the children.
        skips: Whether only odd steps call the last child.
        checkpoint: Whether the first child runs under activation checkpointing.
    """

    kind: str
    children: tuple[Tree, ...] = ()
    sharded: bool = False
    keep: bool = False
    calls: int = 1
    skips: bool = False
    checkpoint: bool = False


def trees(depth: int = 3) -> st.SearchStrategy[Tree]:
    """Trees of at most ``depth`` levels."""
    children = st.just(()) if depth == 1 else st.lists(trees(depth - 1), max_size=3).map(tuple)
    return st.builds(
        Tree,
        kind=st.sampled_from(LEAVES),
        children=children,
        sharded=st.booleans(),
        keep=st.booleans(),
        calls=st.sampled_from((1, 1, 1, 2)),
        skips=st.booleans(),
        checkpoint=st.booleans(),
    )


@dataclass(frozen=True)
class Case:
    """A tree and what is done with it.

    Attributes:
        actions: ``"train"``, ``"evaluate"``, ``"micro"`` (a backward without communication, then
            one with it), ``"twice"`` (two forwards, one backward), ``"raise"`` (the user's code
            raises in forward), ``"thaw"`` (frozen parameters are trained from now on).
        buffers: The number of gather buffers.
    """

    tree: Tree
    actions: tuple[str, ...] = ("train",)
    buffers: int = 2


ACTIONS = ("train", "train", "evaluate", "micro", "twice", "raise", "thaw")


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        tree=trees(),
        actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=4).map(tuple),
        buffers=st.sampled_from((1, 2, 3)),
    )


class UserError(Exception):
    """Raised by a node that was told to."""


class Node(nn.Module):
    def __init__(self, tree: Tree, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.tree = tree
        self.step = 0
        self.fails = False
        self.weight: nn.Parameter | None = None
        if tree.sharded:
            shared = None  # a weight that two units share is refused; test_arguments has that
        if tree.kind == "shared":
            shared = shared if shared is not None else nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.weight = shared
        elif tree.kind == "bare":
            self.weight = nn.Parameter(torch.randn(WIDTH, 3))
            self.back = nn.Parameter(torch.randn(3, WIDTH))
        elif tree.kind in ("linear", "frozen", "double"):
            self.own = nn.Linear(WIDTH, WIDTH).requires_grad_(tree.kind != "frozen")
        elif tree.kind == "norm":
            self.own = nn.LayerNorm(WIDTH)
        self.inner = nn.ModuleList(Node(child, shared) for child in tree.children)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.tree.calls):
            for index, child in enumerate(self.inner):
                if self.tree.skips and index == len(self.inner) - 1 and self.step % 2 == 0:
                    continue
                if self.tree.checkpoint and index == 0:
                    y = torch.utils.checkpoint.checkpoint(child, x, use_reentrant=False)
                else:
                    y = child(x)
                x = x + 0.5 * y
        if self.fails:
            raise UserError
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        kind = self.tree.kind
        if kind == "shared":
            return (x @ self.weight).tanh()
        if kind == "bare":
            return (x @ self.weight).tanh() @ self.back
        if kind == "double":
            return self.own(self.own(x).tanh()).tanh()
        return x.tanh() if kind == "empty" else self.own(x).tanh()


@dataclass
class Run:
    """Both models of one case on one rank."""

    case: Case
    rank: int
    world_size: int
    seed: int = 0
    model: Any = field(init=False)
    reference: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(Node(self.case.tree), nn.Linear(WIDTH, 2)).to(test_device())
        self.reference = copy.deepcopy(self.model)
        for module in reversed(list(self.model.modules())):
            if isinstance(module, Node) and module.tree.sharded:
                fully_shard(module, reshard_after_forward=not module.tree.keep)
        fully_shard(self.model)
        self.model.set_num_gather_buffers(self.case.buffers)
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.05) for model in (self.model, self.reference)
        ]

    def both(self, name: str, value: Any) -> None:
        for model in (self.model, self.reference):
            for module in model.modules():
                if isinstance(module, Node):
                    setattr(module, name, value)

    def backward(self, times: int = 1) -> None:
        """Backward of the sum over ``times`` forwards, on both."""
        self.seed += 1
        xs = inputs(self.world_size, 3, WIDTH, seed=self.seed)
        sum(loss(self.model, x[self.rank]) for x in (xs, 2 * xs)[:times]).backward()
        for x in (xs, 2 * xs)[:times]:
            reference_backward(self.reference, x)

    def do(self, action: str) -> None:
        xs = inputs(1, 3, WIDTH, seed=self.seed + 50)[0]
        self.both("step", self.seed)
        if action == "thaw":
            for model in (self.model, self.reference):
                for param in model.parameters():
                    param.requires_grad_(True)
        elif action == "evaluate":
            with torch.no_grad():
                torch.testing.assert_close(self.model(xs), self.reference(xs))
        elif action == "raise":
            nodes = [m for m in self.model.modules() if isinstance(m, Node)]
            random.Random(self.seed).choice(nodes).fails = True
            with contextlib.suppress(UserError):
                self.model(xs)
            self.both("fails", False)
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if action == "micro":
                with self.model.no_sync():
                    self.backward()
            self.backward(2 if action == "twice" else 1)
            assert_same_gradients(self.model, self.reference)
            for optimizer in self.optimizers:
                optimizer.step()
            assert_same_parameters(self.model, self.reference)


def run_case(rank: int, world_size: int, case: Case) -> None:
    run = Run(case, rank, world_size)
    for action in (*case.actions, "train"):
        run.do(action)


QUICK = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@QUICK
@given(case=cases())
def test_any_tree_trains_like_the_plain_model_on_one_rank(world1: WorkerPool, case: Case) -> None:
    world1.run(run_case, case)


@QUICK
@given(case=cases())
def test_any_tree_trains_like_the_plain_model_on_two_ranks(world2: WorkerPool, case: Case) -> None:
    world2.run(run_case, case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(QUICK, max_examples=200, derandomize=False)
@given(case=cases())
def test_many_trees_train_like_the_plain_model_on_two_ranks(world2: WorkerPool, case: Case) -> None:
    world2.run(run_case, case)
