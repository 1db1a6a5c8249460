"""Experts on a mesh of their own beside dense layers on all ranks, against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.models import CLASSES, WIDTH, full, inputs, loss
from tests.distributed.test_schedule import Recorder
from tests.harness import WorkerPool, test_device
from ya_fsdp import clip_grad_norm_, fully_shard, set_reduce_unused

EXPERTS = 4
TOKENS = 8


class Experts(nn.Module):
    """Tokens go to experts by position; ``group`` holds the others of this model's experts."""

    def __init__(self, first: int, count: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.first, self.group = first, group
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        ranks = EXPERTS // len(self.experts)
        if self.group is not None:
            x = all_to_all_single_autograd(x, None, None, self.group)
        parts = x.view(ranks, len(self.experts), -1, WIDTH).unbind(1)
        y = torch.stack([e(p) for e, p in zip(self.experts, parts, strict=True)], 1)
        y = y.view(-1, WIDTH)
        return y if self.group is None else all_to_all_single_autograd(y, None, None, self.group)


class Model(nn.Module):
    def __init__(self, count: int = EXPERTS, first: int = 0, group: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(first, count, group) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, first: int, count: int, group: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.moe = Experts(first, count, group)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.dense(x).tanh())


def name_in_whole(name: str, first: int) -> str:
    parts = name.split(".")
    if "experts" in parts:
        position = parts.index("experts") + 1
        parts[position] = str(int(parts[position]) + first)
    return ".".join(parts)


def build(degree: int, reshard: bool) -> tuple[Any, Any, Any]:
    """The sharded model, the plain one of all experts, and the mesh (expert data, expert)."""
    device = test_device()
    shape = (dist.get_world_size() // degree, degree)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("expert_dp", "ep"))
    count = EXPERTS // degree
    first = count * mesh.get_local_rank("ep")
    torch.manual_seed(0)
    whole = Model().to(device)
    values = whole.state_dict()
    model = Model(count, first, mesh.get_group("ep")).to(device)
    model.load_state_dict({n: values[name_in_whole(n, first)] for n in model.state_dict()})
    for layer in model.layers:
        fully_shard(layer.moe, mesh=mesh["expert_dp"], reshard_after_forward=reshard)
        # Tokens of all ranks come to an expert: its gradient is a sum over more than its group.
        layer.moe.set_gradient_divide_factor(dist.get_world_size())
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model, whole, mesh


def compare(model: Any, whole: Any, gradients: bool) -> None:
    truth = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        expected = truth[name_in_whole(name, model.layers[0].moe.first)]
        ours = param.grad if gradients else param.detach()
        theirs = expected.grad if gradients else expected.detach()
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            torch.testing.assert_close(full(ours), theirs, msg=name, atol=1e-5, rtol=1e-4)


def train(rank: int, world: int, degree: int, reshard: bool) -> list[int]:
    model, whole, _ = build(degree, reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, whole)]
    recorder = Recorder.on(model)
    gathered = []
    for step in range(3):
        xs = inputs(world, TOKENS, WIDTH, seed=step)
        recorder.take()
        loss(model, xs[rank]).backward()
        gathered.append(recorder.take()["gather"])
        for x in xs:
            (loss(whole, x) / world).backward()
        compare(model, whole, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(model, whole, gradients=False)
    return gathered


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "stay"])
@pytest.mark.parametrize("degree", [2, 4])
def test_experts_on_their_own_mesh_train_as_the_whole_model(
    world4: WorkerPool, degree: int, reshard: bool
) -> None:
    for gathered in world4.run(train, degree, reshard):
        if not reshard:  # experts that are whole on their rank are not gathered at all
            assert gathered == [3 + 2 * (degree < 4)] * 3


def clip(rank: int, world: int, degree: int) -> None:
    for norm_type in (2.0, float("inf")):
        model, whole, mesh = build(degree, True)
        xs = inputs(world, TOKENS, WIDTH)
        loss(model, xs[rank]).backward()
        for x in xs:
            (loss(whole, x) / world).backward()
        truth = nn.utils.clip_grad_norm_(whole.parameters(), 0.02, norm_type)
        assert truth > 0.02, "nothing would be clipped"
        experts = {layer.moe: mesh.get_group("ep") for layer in model.layers}
        total = clip_grad_norm_(model, 0.02, norm_type, norm_groups=experts)
        assert float(total) == pytest.approx(float(truth), rel=1e-5)
        compare(model, whole, gradients=True)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_norm_counts_the_experts_of_all_ranks(world4: WorkerPool, degree: int) -> None:
    world4.run(clip, degree)


def only_some_experts(rank: int, world: int) -> None:
    model, whole, _ = build(4, True)
    for name, param in whole.named_parameters():
        param.requires_grad_("experts.2" not in name)
    if rank == 2:
        for layer in model.layers:
            for param in layer.moe.parameters():
                param.requires_grad_(False)
    xs = inputs(world, TOKENS, WIDTH)
    loss(model, xs[rank]).backward()
    for x in xs:
        (loss(whole, x) / world).backward()
    compare(model, whole, gradients=True)


def test_an_expert_frozen_on_its_only_rank_stays_without_gradient(world4: WorkerPool) -> None:
    world4.run(only_some_experts)


# ---- experts without tokens ----------------------------------------------------------------------


class Routed(nn.Module):
    """Tokens go to the experts that ``chosen`` names, some of which get none."""

    def __init__(self, first: int, count: int, group: Any, skip: bool) -> None:
        super().__init__()
        self.count, self.group, self.skip = count, group, skip
        self.moe = nn.Module()
        self.moe.first = first  # type: ignore[assignment]
        self.moe.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)
        )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        x = x[order]
        sent = received = None
        per_source = counts.view(1, EXPERTS)
        if self.group is not None:
            ranks = EXPERTS // self.count
            incoming = torch.empty_like(counts)
            dist.all_to_all_single(incoming, counts, group=self.group)
            per_source = incoming.view(ranks, self.count)
            sent = counts.view(ranks, self.count).sum(1).tolist()
            received = per_source.sum(1).tolist()
            x = all_to_all_single_autograd(x, received, sent, self.group)
        pieces = list(x.split(per_source.flatten().tolist()))
        for number, expert in enumerate(self.moe.experts):
            mine = range(number, len(pieces), self.count)
            tokens = torch.cat([pieces[i] for i in mine])
            if not (self.skip and len(tokens) == 0):
                parts = expert(tokens).split([len(pieces[i]) for i in mine])
                for i, part in zip(mine, parts, strict=True):
                    pieces[i] = part
        y = torch.cat(pieces)
        if self.group is not None:
            y = all_to_all_single_autograd(y, sent, received, self.group)
        return y[order.argsort()]


class Sparse(nn.Module):
    def __init__(self, count: int = EXPERTS, first: int = 0, group: Any = None, *, skip: bool):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Routed(first, count, group, skip)])

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = self.dense(x)
        return x + self.layers[0](x, chosen)


def route(rank: int, step: int) -> Tensor:
    """Everything to expert 0; rank 0 to expert 3 alone and nobody to 2; all experts."""
    spread = torch.arange(TOKENS) % EXPERTS
    if step == 0:
        return torch.zeros_like(spread)
    if step == 1:
        return torch.full_like(spread, 3) if rank == 0 else spread.masked_fill(spread == 2, 1)
    return spread


def leave_experts_empty(rank: int, world: int, degree: int, skip: bool) -> None:
    device = test_device()
    shape = (world // degree, degree)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("expert_dp", "ep"))
    count = EXPERTS // degree
    first = count * mesh.get_local_rank("ep")
    torch.manual_seed(0)
    whole = Sparse(skip=skip).to(device)
    values = whole.state_dict()
    model: Any = Sparse(count, first, mesh.get_group("ep"), skip=skip).to(device)
    model.load_state_dict({n: values[name_in_whole(n, first)] for n in model.state_dict()})
    for expert in model.layers[0].moe.experts:
        fully_shard(expert, mesh=mesh["expert_dp"])
        expert.set_gradient_divide_factor(world)
    fully_shard(model)
    if skip:
        set_reduce_unused(model)
    for step in (0, 1, 2, 0, 1):
        xs = inputs(world, TOKENS, WIDTH, seed=step)
        routes = [route(r, step).to(device) for r in range(world)]
        model(xs[rank], routes[rank]).pow(2).mean().backward()
        for x, chosen in zip(xs, routes, strict=True):
            (whole(x, chosen).pow(2).mean() / world).backward()
        compare(model, whole, gradients=True)
        for each in (model, whole):
            each.zero_grad()


@pytest.mark.parametrize("skip", [False, True], ids=["empty batches", "not called"])
@pytest.mark.parametrize("degree", [2, 4])
def test_experts_may_get_no_token_in_a_step(world4: WorkerPool, degree: int, skip: bool) -> None:
    world4.run(leave_experts_empty, degree, skip)
