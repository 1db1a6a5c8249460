"""Features crossed with each other at random, against the plain model."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.distributed.models import full
from tests.harness import WorkerPool, test_device
from ya_fsdp import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    set_reduce_unused,
    set_resident_budget,
)
from ya_fsdp.build import schedule_of

WIDTH, HIDDEN, TOKENS = 7, 13, 11
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """What is combined.

    Attributes:
        replicas: Length of the mesh's replicate axis; 0 for a 1-D mesh.
        over_replicas: Whether optimizer state is cut over that, too.
        reshard: ``True``, ``False``, or a number of ranks that keep a second shard.
        units: Which calls of ``fully_shard`` are made.
        policy: Arguments of ``MixedPrecisionPolicy``.
        masters: Dtype of the first layer's parameters.
        fused: ``fused_weight_gradients``.
        recompute: Activation checkpointing: none, or whether it is the reentrant one.
        budget: Thirds of all parameters that may stay gathered.
        accumulate: What the first of two microbatches leaves out; ``None`` for one microbatch.
        stays: ZeRO-1 and 2: units stay gathered between microbatches.
        buffers: Gather buffers and gradient buffers.
        first_only: Whether rank 0 alone uses the branch.
        short: Whether memory is always short on the last rank.
    """

    replicas: int = 0
    over_replicas: bool = False
    reshard: bool | int = True
    units: str = "nested"
    granularity: Any = "auto"
    policy: tuple[tuple[str, Any], ...] = ()
    masters: torch.dtype = FP32
    fused: bool = False
    recompute: bool | None = None
    budget: int | None = None
    accumulate: str | None = None
    stays: bool = False
    buffers: tuple[int, int] = (2, 1)
    first_only: bool = False
    short: bool = False

    @property
    def tolerance(self) -> float:
        """Relative to the norm of a gradient."""
        return 0.1 if BF16 in (self.masters, *dict(self.policy).values()) else 1e-4


def cases(world: int) -> st.SearchStrategy[Case]:
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    policies = st.fixed_dictionaries(
        {},
        optional={
            "param_dtype": st.sampled_from((FP32, BF16)),
            "reduce_dtype": st.sampled_from((FP32, BF16)),
            "bit32_acc_for_bit16_reduce_scatter": st.booleans(),
            "gather_dtype": st.sampled_from((torch.int8, torch.float8_e4m3fn)),
        },
    ).map(lambda chosen: tuple(sorted(chosen.items())))
    return st.builds(
        Case,
        replicas=st.sampled_from((0, 0, *divisors)),
        over_replicas=st.booleans(),
        reshard=st.sampled_from((True, True, False, *divisors)),
        units=st.sampled_from(("nested", "leaf", "root", "list")),
        granularity=st.sampled_from(("auto", "row", "element", 5)),
        policy=policies,
        masters=st.sampled_from((FP32, FP32, BF16)),
        fused=st.booleans(),
        recompute=st.sampled_from((None, False, True)),
        budget=st.sampled_from((None, 1, 2, 3)),
        accumulate=st.sampled_from((None, "gradient sync", "all reduce", "nothing")),
        stays=st.booleans(),
        buffers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        first_only=st.booleans(),
        short=st.booleans(),
    ).filter(lambda case: allowed(case, world))


def allowed(case: Case, world: int) -> bool:
    """Whether ``fully_shard`` takes the combination; test_combinations has all refusals."""
    number = type(case.reshard) is int
    if case.over_replicas:
        return case.replicas > 0 and not number and "gather_dtype" not in dict(case.policy)
    return not number or (world // (case.replicas or 1)) % case.reshard == 0


class Layer(nn.Module):
    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return self.compute(x)
        result: Tensor = checkpoint(self.compute, x, use_reentrant=self.recompute)
        return result

    def compute(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for _ in range(2):  # the same weights twice
            y = 0.25 * self.down(self.up(y).tanh())
        return x + self.frozen(y).tanh()


class Net(nn.Module):
    """Layers around a branch that a call may leave out; the output layer is the embedding."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(recompute) for _ in range(5))
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, branch: bool) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 2 and branch:
                x = x + self.branch(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2).float(), tokens.flatten())


def shard(model: Any, case: Case, world: int) -> None:
    device = test_device().type
    options: dict[str, Any] = {"mesh": init_device_mesh(device, (world,))}
    if case.replicas:
        shape = (case.replicas, world // case.replicas)
        options["mesh"] = init_device_mesh(device, shape)
        options["shard_optimizer_over_replicas"] = case.over_replicas
    options["reshard_after_forward"] = case.reshard
    options["granularity"] = case.granularity
    options["fused_weight_gradients"] = case.fused
    options["mp_policy"] = MixedPrecisionPolicy(**dict(case.policy))
    if case.units == "list":
        fully_shard([*model.layers[1:3]], **options)
    elif case.units != "root":
        for layer in model.layers:
            fully_shard(layer, **options)
    if case.units == "leaf":
        fully_shard(model.branch, **options)
    fully_shard(model, **options)


def redraw(model: Any, reference: Any, seed: int) -> None:
    """Other weights in both; matrices of -1/4, 0 and 1/4, which 8 bits hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            if other.ndim > 1:
                value = torch.randint(-1, 2, other.shape, generator=generator) / 4
            else:
                value = torch.randn(other.shape, generator=generator).to(BF16)
            other.copy_(value)
            param.copy_(other.to(param.dtype))


def backward(case: Case, model: Any, reference: Any, rank: int, world: int, seed: int) -> None:
    """One microbatch or two; adds to the reference's gradients what all ranks give."""
    micros = 1 if case.accumulate is None else 2
    for micro in range(micros):
        last = micro == micros - 1
        if case.accumulate == "gradient sync":
            model.set_requires_gradient_sync(last)
        elif case.accumulate == "all reduce":
            model.set_requires_all_reduce(last)
        if case.stays:
            model.set_reshard_after_backward(last)
        generator = torch.Generator().manual_seed(100 * seed + micro)
        tokens = torch.randint(TOKENS, (world, 2, 3), generator=generator).to(test_device())
        uses = [not case.first_only or each == 0 for each in range(world)]
        value = model(tokens[rank], uses[rank])
        truth = [reference(tokens[each], uses[each]) for each in range(world)]
        torch.testing.assert_close(value, truth[rank], atol=case.tolerance, rtol=case.tolerance)
        value.backward()
        (torch.stack(truth).sum() / world).backward()


def compare(case: Case, model: Any, reference: Any) -> None:
    wrong = []
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is None:
            continue
        assert param.grad.dtype == param.dtype
        error, size = (full(param.grad).float() - other.grad).norm(), other.grad.norm()
        if not error <= case.tolerance * size + 1e-7:
            wrong.append(f"{name}: {error:.2e} of {size:.2e}")
    assert not wrong, "\n".join(wrong)


def run(rank: int, world: int, case: Case) -> None:
    torch.manual_seed(0)
    model = Net(case.recompute)
    reference = copy.deepcopy(model).to(test_device())
    model.layers[0].to(case.masters)
    if case.masters is not FP32 and not dict(case.policy).get("param_dtype"):
        case = Case(**{**vars(case), "policy": (*case.policy, ("param_dtype", FP32))})
    model.to(test_device())
    shard(model, case, world)
    if case.first_only and case.units == "leaf":
        set_reduce_unused(model)  # the branch is a unit
    model.set_num_gather_buffers(case.buffers[0])
    model.set_num_gradient_buffers(case.buffers[1])
    if case.budget is not None:
        size = sum(p.numel() * 4 for p in model.parameters())
        set_resident_budget(model, size * case.budget // 3)
        if case.short and rank == world - 1:
            reserve = schedule_of(model).reserve
            for layer in model.layers:
                layer.register_forward_hook(lambda *_: (reserve.make_room(), None)[1])
    for step in range(3):
        redraw(model, reference, step)
        for each in (model, reference):
            each.zero_grad()
        backward(case, model, reference, rank, world, step)
        compare(case, model, reference)
        if step == 1:
            with torch.no_grad():
                tokens = torch.arange(6).view(2, 3).to(test_device())
                torch.testing.assert_close(
                    model(tokens, True),
                    reference(tokens, True),
                    atol=case.tolerance,
                    rtol=case.tolerance,
                )
    norm = clip_grad_norm_(model, 0.1)
    truth = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(norm.float(), truth, atol=0, rtol=case.tolerance)
    compare(case, model, reference)


# YA_FSDP_TEST_EXAMPLES=300 looks for combinations that nobody has tried yet.
EXAMPLES = int(os.environ.get("YA_FSDP_TEST_EXAMPLES", "0"))
QUICK = settings(
    max_examples=EXAMPLES or 3,
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

FOUND = {
    "a list of modules that recompute": Case(units="list", recompute=True, reshard=False),
    "a branch of one rank, units kept in shared buffers": Case(
        stays=True, first_only=True, accumulate="nothing"
    ),
    "a unit of one rank, kept": Case(
        units="leaf", stays=True, first_only=True, accumulate="nothing", buffers=(2, 2)
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_combinations_that_once_failed_train_like_the_plain_model(
    world2: WorkerPool, case: Case
) -> None:
    world2.run(run, case)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@QUICK
@given(data=st.data())
def test_crossed_features_train_like_the_plain_model(
    request: pytest.FixtureRequest, world: int, data: st.DataObject
) -> None:
    request.getfixturevalue(f"world{world}").run(run, data.draw(cases(world)))
