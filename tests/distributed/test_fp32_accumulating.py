"""16-bit gradients on the wire that are summed in fp32, against sums in fp64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.models import full
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, fully_shard
from ya_fsdp.build import state_of
from ya_fsdp.collectives import (
    C10dCollectives,
    Fp32AccumulatingCollectives,
    RecordingCollectives,
    fp32_accumulating,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=[2, 3, 4], ids=["2 ranks", "3 ranks", "4 ranks"])
def pool(request: pytest.FixtureRequest) -> WorkerPool:
    return request.getfixturevalue(f"world{request.param}")


def contributions(world: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Random values of very different size that sums in 16 bits lose; shape (world, numel)."""
    generator = torch.Generator().manual_seed(numel)
    scale = 2.0 ** torch.randint(-6, 7, (world, numel), generator=generator)
    return (torch.randn(world, numel, generator=generator) * scale).to(test_device(), dtype)


def error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


def sums(rank: int, world: int, dtype: torch.dtype) -> None:
    back_end, plain = Fp32AccumulatingCollectives(C10dCollectives()), C10dCollectives()
    group = dist.group.WORLD
    assert group is not None
    assert back_end.accumulation_dtype(dtype) == FP32
    assert back_end.supports_average(group, dtype)
    for numel in (4096, 64, 1024):  # the receive buffer grows, and is reused by smaller ones
        values = contributions(world, world * numel, dtype)
        truth = values.double().sum(0).view(world, numel)[rank]
        for average in (False, True):
            expected = truth / world if average else truth
            wide = torch.empty(numel, dtype=FP32, device=test_device())
            back_end.reduce_scatter(wide, values[rank].clone(), average, group)
            assert error(wide, expected) < 2e-7
            source = values[rank].clone()
            narrow = source[rank * numel : (rank + 1) * numel]
            back_end.reduce_scatter(narrow, source, average, group)
            assert torch.equal(narrow, wide.to(dtype)), "rounded once"
        if world > 2:
            rounded = values[rank].clone()
            plain.reduce_scatter(rounded[:numel].clone(), rounded, False, group)
            ordinary = torch.empty(numel, dtype=dtype, device=test_device())
            plain.reduce_scatter(ordinary, values[rank].clone(), False, group)
            back_end.reduce_scatter(wide, values[rank].clone(), False, group)
            assert error(wide, truth) * 100 < error(ordinary, truth)
    assert [b.numel() for b in back_end._received.buffers.values()] == [world * 4096 * 2]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_a_16_bit_reduce_scatter_is_rounded_at_most_once(
    pool: WorkerPool, dtype: torch.dtype
) -> None:
    pool.run(sums, dtype)


class Constant(nn.Module):
    """Its gradient is what it is given, in the compute dtype."""

    def __init__(self, numel: int = 37) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel, 3))
        self.bias = nn.Parameter(torch.ones(numel))

    def forward(self, grads: tuple[Tensor, Tensor]) -> Tensor:
        return (self.weight * grads[0]).sum() + (self.bias * grads[1]).sum()


POLICY: dict[str, Any] = {"bit32_acc_for_bit16_reduce_scatter": True}


def gradients(rank: int, world: int, dtype: torch.dtype, how: str, factor: float | None) -> None:
    """Gradients in a model equal the fp64 sum of the 16-bit contributions to fp32 accuracy."""
    model: Any = Constant().to(test_device())
    mesh = None
    if how == "hsdp":
        mesh = init_device_mesh(test_device().type, (2, 2))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, **POLICY)
    fully_shard(model, mp_policy=policy, mesh=mesh)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    divisor = factor or world
    truth = [torch.zeros(37, 3, dtype=torch.float64), torch.zeros(37, dtype=torch.float64)]
    truth = [t.to(test_device()) for t in truth]
    for step in range(3):
        values = [contributions(world, n + step, dtype)[:, :n] for n in (111, 37)]
        values = [v.reshape(world, *t.shape) for v, t in zip(values, truth, strict=True)]
        # Only the last counts under no_sync, so that the accumulator, kept in 16 bits, is exact.
        quiet = how == "no_sync" and step < 2
        if quiet:
            values = [torch.zeros_like(v) for v in values]
        if how == "hsdp":
            model.set_requires_all_reduce(step == 2)
        with model.no_sync() if quiet else nullcontext():
            model(tuple(v[rank] for v in values)).backward()
        truth = [t + v.double().sum(0) / divisor for t, v in zip(truth, values, strict=True)]
    for param, expected in zip((model.weight, model.bias), truth, strict=True):
        assert param.grad.dtype == FP32
        assert error(full(param.grad), expected) < 5e-7


@pytest.mark.parametrize("factor", [None, 5.0, 0.25], ids=["mean", "by 5", "by a quarter"])
@pytest.mark.parametrize("how", ["every time", "no_sync"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_the_gradient_shard_gets_the_fp32_sum(
    pool: WorkerPool, dtype: torch.dtype, how: str, factor: float | None
) -> None:
    pool.run(gradients, dtype, how, factor)


@pytest.mark.parametrize("factor", [None, 5.0], ids=["mean", "by 5"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_replicas_add_up_fp32_sums(
    world4: WorkerPool, dtype: torch.dtype, factor: float | None
) -> None:
    world4.run(gradients, dtype, "hsdp", factor)


def overflow(rank: int, world: int) -> None:
    model: Any = fully_shard(
        Constant().to(test_device()),
        mp_policy=MixedPrecisionPolicy(param_dtype=FP16, **POLICY),
    )
    large = torch.finfo(FP16).max
    tiny = torch.finfo(FP16).smallest_normal * 2**-10
    grads = [torch.full(s, v, dtype=FP16) for s, v in (((37, 3), large), ((37,), tiny))]
    model([g.to(test_device()) for g in grads]).backward()
    assert torch.equal(full(model.weight.grad).cpu(), grads[0].float())
    assert torch.equal(full(model.bias.grad).cpu(), grads[1].float())


def test_fp16_sums_neither_overflow_nor_underflow(pool: WorkerPool) -> None:
    pool.run(overflow)


def bf16_master(rank: int, world: int) -> None:
    for factor in (None, 5.0):
        model: Any = Constant().to(test_device(), BF16)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**POLICY))
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        values = contributions(world, 111, BF16).view(world, 37, 3)
        model((values[rank], torch.zeros(37, dtype=BF16, device=test_device()))).backward()
        truth = values.double().sum(0) / (factor or world)
        # fp32's own rounding may fall on the other side of a tie.
        grad = full(model.weight.grad)
        assert grad.dtype == BF16
        assert (grad != truth.to(BF16)).float().mean() < 0.02
        torch.testing.assert_close(grad.double(), truth, atol=0, rtol=2**-8)


def test_16_bit_gradients_of_16_bit_parameters_are_rounded_once(pool: WorkerPool) -> None:
    pool.run(bf16_master)


def wire(rank: int, world: int) -> None:
    """As many bytes as without, gathers untouched, one receive buffer for all units."""
    models: Any = [Constant().to(test_device()) for _ in range(2)]
    recorder = RecordingCollectives()
    for model in models:
        policy = MixedPrecisionPolicy(reduce_dtype=BF16, **POLICY)
        fully_shard(model, mp_policy=policy, collectives=recorder)
    used = {id(state_of(m).unit.collectives) for m in models}
    assert used == {id(fp32_accumulating(recorder))}
    grads = (torch.ones(37, 3, device=test_device()), torch.ones(37, device=test_device()))
    for model in models:
        model(grads).backward()
    # The exchange of usage flags goes another way; sums were made by the wrapper itself.
    assert set(recorder.take()) == {"all_gather"}
    wide: Any = Constant().to(test_device())
    fully_shard(wide, mp_policy=MixedPrecisionPolicy(**POLICY), collectives=recorder)
    wide(grads).backward()
    assert recorder.take()["reduce_scatter"] == 1, "fp32 is reduced as ever"


def test_units_share_the_receive_buffer_and_fp32_is_reduced_as_ever(pool: WorkerPool) -> None:
    pool.run(wire)
