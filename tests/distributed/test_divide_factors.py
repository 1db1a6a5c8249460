"""Every way to divide gives the same gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.models import full
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, fully_shard
from ya_fsdp.collectives import C10dCollectives, RecordingCollectives

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Averaging(C10dCollectives):
    """Averages, as NCCL does."""

    name = "averaging"

    def supports_average(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        return True

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        super().reduce_scatter(output, input, False, group)
        if average:
            output.div_(group.size())


class Dividing(Averaging):
    """Divides by any number on the way into the sum, as NCCL does."""

    name = "dividing"

    def supports_divisor(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        return True

    def reduce_scatter_divided(
        self, output: Tensor, input: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        super().reduce_scatter(output, input / divisor, False, group)


class Constant(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(21, 5))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def same_from_all_paths(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(1)
    # Multiples of the number of ranks, small: every sum and quotient is exact in every dtype.
    values = world * torch.randint(-8, 9, (world, 21, 5), generator=generator)
    truth = values.double().mean(0)
    policies: list[dict[str, Any]] = [
        {"param_dtype": dtype, "reduce_dtype": reduce, "bit32_acc_for_bit16_reduce_scatter": wide}
        for dtype, reduce in [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32)]
        for wide in (False, True)
    ]
    for policy in policies:
        for back_end in (C10dCollectives(), Averaging(), Dividing()):
            for setting in ("plain", "force_sum", "factor"):
                model: Any = Constant().to(test_device())
                fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy), collectives=back_end)
                if setting == "force_sum":
                    model.set_force_sum_reduction_for_comms(True)
                elif setting == "factor":
                    model.set_gradient_divide_factor(float(world))
                model(values[rank].to(test_device(), policy["param_dtype"])).backward()
                grad = full(model.weight.grad).cpu().double()
                where = (policy, back_end.name, setting)
                # fp16 divides by a power of two first: thirds are rounded on the way.
                exact = not (world == 3 and policy["reduce_dtype"] == FP16)
                torch.testing.assert_close(
                    grad, truth, atol=0, rtol=0 if exact else 2**-10, msg=str(where)
                )


def test_gradients_are_the_same_however_they_are_divided(any_pool: WorkerPool) -> None:
    any_pool.run(same_from_all_paths)


def fp16_range(rank: int, world: int) -> None:
    """Gradients whose plain sum overflows, and small ones, survive a mean of equal parts."""
    limits = torch.finfo(FP16)
    # Divided by the square root of the number of ranks only, which leaves a factor of two.
    for value in (limits.max / 2, limits.smallest_normal * 4):
        model: Any = Constant().to(test_device())
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=FP16))
        model(torch.full((21, 5), value, dtype=FP16, device=test_device())).backward()
        grad = full(model.weight.grad)
        torch.testing.assert_close(grad, torch.full_like(grad, value), atol=0, rtol=2**-9)


def test_fp16_means_neither_overflow_nor_underflow(any_pool: WorkerPool) -> None:
    any_pool.run(fp16_range)


def one_rank(rank: int, world: int) -> None:
    recorder = RecordingCollectives()
    for factor in (None, 4.0):
        model: Any = fully_shard(Constant().to(test_device()), collectives=recorder)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        grad = torch.arange(105.0, device=test_device()).view(21, 5)
        for times in (1, 2):
            model(grad).backward()
            assert torch.equal(full(model.weight.grad), times * grad / (factor or 1.0))
    assert not recorder.calls


def test_one_rank_divides_without_communication(world1: WorkerPool) -> None:
    world1.run(one_rank)
