"""Parameters gathered in 8 bits, against weights quantised by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.models import assert_same_parameters, full
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, fully_shard
from ya_fsdp.build import state_of
from ya_fsdp.collectives import RecordingCollectives

BF16, FP32 = torch.bfloat16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8
WIDTH = 32


class Net(nn.Module):
    """Weights of multiples of 256 elements, so that the shard's blocks are the weights' own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


def by_hand(weight: Tensor, dtype: torch.dtype, compute: torch.dtype) -> Tensor:
    """Every 256 elements divided by their largest, rounded, and multiplied again."""
    pieces = []
    for block in weight.detach().reshape(-1).float().split(256):
        scale = block.abs().max() / (448 if dtype == FP8 else 127)
        scaled = block / scale
        rounded = scaled.to(FP8).float() if dtype == FP8 else scaled.round()
        pieces.append((rounded * scale).to(compute))
    return torch.cat(pieces).view_as(weight)


def sharded(dtype: torch.dtype | None, param_dtype: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net().to(test_device())
    with torch.no_grad():
        plain.first.weight[::7] *= 100  # scales differ from block to block
        plain.norm.weight.add_(torch.randn_like(plain.norm.weight))
    model: Any = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=FP32, gather_dtype=dtype, output_dtype=FP32
    )
    fully_shard(model, mp_policy=policy, **options)
    return model, plain


def batches(world: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(world, 8, WIDTH, generator=generator).to(test_device())


def gathered(rank: int, world: int, dtype: torch.dtype, compute: Any) -> None:
    model, plain = sharded(dtype, compute)
    model.unshard()
    for name, truth in plain.named_parameters():
        value = model.get_parameter(name)
        assert value.dtype == (compute or FP32)
        if truth.ndim == 1:
            assert torch.equal(value, truth.to(value.dtype)), f"{name} is not quantised"
        else:
            assert torch.equal(value, by_hand(truth, dtype, value.dtype)), name
            assert not torch.equal(value, truth.to(value.dtype)), f"{name} is quantised"
    model.reshard()
    assert_same_parameters(model, plain, atol=0)  # the shards keep every bit


@pytest.mark.parametrize("compute", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
def test_weights_arrive_as_quantised_by_hand_and_one_dim_ones_exactly(
    pool: WorkerPool, dtype: torch.dtype, compute: Any
) -> None:
    pool.run(gathered, dtype, compute)


def train(rank: int, world: int, dtype: torch.dtype, reshard: bool) -> None:
    """Steps equal those of a model whose weights are quantised by hand before each."""
    model, plain = sharded(dtype, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        xs = batches(world, step)
        low = copy.deepcopy(plain)
        with torch.no_grad():
            for param in low.parameters():
                if param.ndim > 1:
                    param.copy_(by_hand(param, dtype, FP32))
        truth = torch.stack([low(x).pow(2).mean() for x in xs])
        value = model(xs[rank]).pow(2).mean()
        torch.testing.assert_close(value, truth[rank], atol=1e-6, rtol=1e-5)
        optimizer.zero_grad()
        value.backward()
        truth.mean().backward()
        for (name, param), other in zip(model.named_parameters(), low.parameters(), strict=True):
            grad = full(param.grad)
            torch.testing.assert_close(grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)
        optimizer.step()
        with torch.no_grad():  # both go on from the same weights, or rounding would part them
            for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
                param.copy_(full(mine))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
def test_gradients_are_those_of_a_model_with_quantised_weights(
    pool: WorkerPool, dtype: torch.dtype, reshard: bool
) -> None:
    pool.run(train, dtype, reshard)


def losses(dtype: torch.dtype | None, rank: int, world: int) -> list[float]:
    model, _ = sharded(dtype, BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target = torch.sin(torch.arange(WIDTH, device=test_device()))
    values = []
    for step in range(150):
        x = batches(world, step)[rank]
        value = (model(x) - x.roll(1, -1) * target).pow(2).mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def converge(rank: int, world: int) -> None:
    plain = losses(None, rank, world)
    end = sum(plain[-20:]) / 20
    assert end < 0.8 * plain[0], "it learns"
    for dtype in (FP8, INT8):
        mine = losses(dtype, rank, world)
        assert mine != plain
        assert sum(mine[-20:]) / 20 == pytest.approx(end, rel=0.05)


def test_training_ends_near_the_loss_of_bf16_gathers(world2: WorkerPool) -> None:
    world2.run(converge)


def traffic(rank: int, world: int) -> None:
    sent = {}
    for dtype in (None, FP8, INT8):
        recorder = RecordingCollectives()
        torch.manual_seed(0)
        model: Any = nn.Linear(256, 64 * world, bias=False).to(test_device())
        policy = MixedPrecisionPolicy(param_dtype=BF16, gather_dtype=dtype)
        fully_shard(model, mp_policy=policy, collectives=recorder)
        model(torch.ones(1, 256, device=test_device())).sum().backward()
        kinds = [c.kind for c in recorder.calls]
        assert kinds == ["all_gather", "reduce_scatter"], "scales travel with the elements"
        sent[dtype] = recorder.wire_bytes("all_gather")
    assert sent[None] == 2 * 256 * 64 * (world - 1)
    assert sent[FP8] == sent[INT8] == sent[None] // 2 * (1 + 4 / 256)


def test_gathers_send_half_the_bytes_of_bf16(pool: WorkerPool) -> None:
    pool.run(traffic)


def cases(rank: int, world: int) -> None:
    """Odd sizes, zeros, a frozen weight, integers; and what is not a number stays none."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(7, 5))
            self.zero = nn.Parameter(torch.zeros(300, 3))
            self.frozen = nn.Parameter(torch.randn(11, 13), requires_grad=False)
            self.whole = nn.Parameter(torch.arange(12).view(3, 4), requires_grad=False)

        def forward(self) -> Tensor:
            return self.a.sum() + self.zero.sum() + self.frozen.sum() + self.whole.sum()

    torch.manual_seed(0)
    model: Any = Odd().to(test_device())
    truth = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mp_policy=MixedPrecisionPolicy(gather_dtype=INT8))
    model.unshard()
    for name, expected in truth.items():
        value = model.get_parameter(name).detach()
        if name in ("zero", "whole"):
            assert torch.equal(value, expected), name
        else:
            # Half a step of the largest element that may share the block.
            step = max(t.abs().max() for n, t in truth.items() if n in ("a", "frozen")) / 127
            assert (value - expected).abs().max() <= step / 2 * 1.01, name
    model.reshard()
    model().backward()
    assert torch.equal(full(model.a.grad), torch.ones_like(truth["a"]))
    assert model.frozen.grad is None
    with torch.no_grad():
        model.a.fill_(float("nan"))
    assert model().isnan()


def test_odd_sizes_zeros_frozen_and_broken_weights(pool: WorkerPool) -> None:
    pool.run(cases)


def replicated(rank: int, world: int) -> None:
    model, plain = sharded(FP8, mesh=init_device_mesh(test_device().type, (2, 2)))
    model.unshard()
    for name in ("first.weight", "second.weight"):
        truth = by_hand(plain.get_parameter(name), FP8, FP32)
        assert torch.equal(model.get_parameter(name), truth)


def test_replicas_quantise_alike(world4: WorkerPool) -> None:
    world4.run(replicated)


def alone(rank: int, world: int) -> None:
    model, plain = sharded(FP8)
    assert torch.equal(model(batches(1, 0)[0]), plain(batches(1, 0)[0]))
    groups = state_of(model).unit.groups
    assert sorted(g.dtypes.wire is None for g in groups) == [False, True]


def test_one_rank_alone_rounds_nothing(world1: WorkerPool) -> None:
    world1.run(alone)


@pytest.mark.parametrize("wrong", [torch.bfloat16, torch.float8_e5m2, torch.uint8, "int8"])
def test_another_gather_dtype_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"gather_dtype must be torch\.float8_e4m3fn, torch\.int8"):
        MixedPrecisionPolicy(gather_dtype=wrong)
