"""ya_fsdp.debug: mistakes that are planted are found and named on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.models import CLASSES, MLP, WIDTH, inputs, leaf, loss, nested, pair
from tests.harness import WorkerPool, test_device
from ya_fsdp import debug, fully_shard


def replicas(rank: int, world_size: int, changed: str) -> tuple[int, str]:
    mesh = init_device_mesh(test_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model, _ = pair(MLP, nested, mesh=mesh)
    compared = debug.check_replicas(model)
    if rank == 3:
        with torch.no_grad():
            for name, param in model.named_parameters():
                local = param._local_tensor.view(-1)
                if name == changed and local.numel():
                    # Swaps two elements, whose sum stays the same.
                    local[:2] = local[:2].flip(0).clone()
    with pytest.raises(RuntimeError) as caught:
        debug.check_replicas(model)
    return compared, str(caught.value)


def test_replicas_that_drifted_are_named(world4: WorkerPool) -> None:
    answers = world4.run(replicas, "layers.1.net.2.weight")
    assert [count for count, _ in answers] == [4] * 4
    for rank, (_, message) in enumerate(answers):
        if rank % 2:
            assert "layers.1.net.2.weight" in message and "[1, 3]" in message
            assert message.startswith("1 parameters differ")
        else:
            assert "another shard" in message


def no_replicas(rank: int, world_size: int) -> int:
    model, _ = pair(MLP)
    return debug.check_replicas(model)


def test_without_a_replicate_axis_nothing_is_compared(world2: WorkerPool) -> None:
    assert world2.run(no_replicas) == [0, 0]


def not_finite(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    model, _ = pair(MLP)
    loss(model, inputs(world_size)[rank]).backward()
    before = debug.non_finite_gradients(model)
    grads = {n: p.grad._local_tensor.view(-1) for n, p in model.named_parameters()}
    for name, value in (("head.weight", float("nan")), ("layers.0.net.2.bias", float("-inf"))):
        if rank == world_size - 1 and grads[name].numel():
            grads[name][-1] = value
        elif rank == 0 and grads[name].numel():
            grads[name][0] = value
    return before, debug.non_finite_gradients(model)


def test_gradients_that_are_not_finite_are_named_on_every_rank(world3: WorkerPool) -> None:
    for before, after in world3.run(not_finite):
        assert before == []
        assert after == ["layers.0.net.2.bias", "head.weight"]


def report(rank: int, world_size: int) -> tuple[debug.MemoryReport, str, int]:
    model, reference = pair(MLP)
    loss(model, inputs(world_size)[rank]).backward()
    found = debug.memory_report(model)
    return found, str(found), sum(p.numel() for p in reference.parameters())


def test_the_memory_report_adds_up(world2: WorkerPool) -> None:
    for found, text, elements in world2.run(report):
        assert sum(group.elements for group in found.groups) == elements
        assert [group.unit for group in found.groups] == [
            *(f"layers.{i}" for i in range(3)),
            "head",
        ]
        for group in found.groups:
            assert group.gathered == 4 * (group.elements + group.padding) == 2 * group.shard
            assert group.dtypes == "float32/float32/float32"
        assert len(found.gather_slots) == 2
        assert all(group.unit in text for group in found.groups)
        assert f"{found.shards / 2**20:.2f} MiB" in text


# ---- against the plain model ---------------------------------------------------------------------


class Dropping(MLP):
    """Random numbers and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def compare_right(rank: int, world_size: int) -> list[debug.Comparison]:
    xs = inputs(world_size)
    before = torch.random.get_rng_state()
    results = [
        debug.check_against_plain(Dropping, xs[rank]),
        debug.check_against_plain(MLP, {"x": xs[rank]}, shard=leaf, steps=2),
        debug.check_against_plain(
            MLP,
            lambda step: (inputs(world_size, seed=step)[rank],),
            optimizer_fn=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            loss_fn=lambda model, batch: model(batch[0]).abs().sum(),
        ),
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    return results


def test_a_right_model_agrees_with_the_plain_one(world2: WorkerPool) -> None:
    for results in world2.run(compare_right):
        assert [len(result.losses) for result in results] == [3, 2, 3]
        assert all(result.difference < 1e-4 and result.fqn for result in results)


class Wrong(nn.Module):
    """Computes otherwise once it is sharded."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        sharded = hasattr(self, "unshard")
        y = self.first(x).tanh()
        y = self.second(y.detach() if sharded and self.what == "detached" else y).tanh()
        if sharded and self.what == "scaled":
            y = y + 0.3 * y.detach()
        return self.head(y)


class Cheating(torch.optim.SGD):
    """Skips the last parameter of a sharded model."""

    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        if hasattr(params[-1], "full_tensor"):
            params[-1].grad = None
        return super().step(closure)


def compare_wrong(rank: int, world_size: int, what: str) -> str:
    options: dict[str, Any] = {"shard": fully_shard}
    if what == "step":
        options["optimizer_fn"] = lambda params: Cheating(params, lr=0.1)
    with pytest.raises(RuntimeError) as caught:
        debug.check_against_plain(lambda: Wrong(what), inputs(world_size)[rank], **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, expected",
    [
        ("detached", "step 0: the gradient of 'first.weight' is missing"),
        ("scaled", "step 0: the gradient of 'first.weight' differs by"),
        ("step", "step 0: the weight of 'head.bias' differs by"),
    ],
)
def test_a_wrong_model_is_told_by_its_first_parameter(
    world2: WorkerPool, what: str, expected: str
) -> None:
    zero, one = world2.run(compare_wrong, what)
    assert zero == one
    assert expected in zero


def refused(rank: int, world_size: int) -> None:
    for function in (debug.check_replicas, debug.non_finite_gradients, debug.memory_report):
        with pytest.raises(ValueError, match="MLP is not sharded; call fully_shard first"):
            function(MLP())
    with pytest.raises(ValueError, match="steps must be positive, got 0"):
        debug.check_against_plain(MLP, inputs(1)[0], steps=0)


def test_what_can_not_be_looked_at_is_refused(world2: WorkerPool) -> None:
    world2.run(refused)
