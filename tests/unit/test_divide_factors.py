"""How a mean over ranks is divided, as a table and by properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ya_fsdp.collectives import DivideFactors, divide_factors

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

TABLE = [
    # ranks, dtype, options, (pre, post, average)
    (1, FP32, {}, (1, 1, False)),
    (1, FP32, {"average_supported": True}, (1, 1, False)),
    (1, FP16, {}, (1, 1, False)),
    (1, FP32, {"factor": 3.0, "average_supported": True}, (1, 3, False)),
    (8, FP32, {}, (1, 8, False)),
    (8, BF16, {}, (1, 8, False)),
    (8, FP64, {"average_supported": True}, (1, 1, True)),
    (8, FP32, {"average_supported": True}, (1, 1, True)),
    (8, BF16, {"average_supported": True}, (1, 1, True)),
    (8, FP32, {"average_supported": True, "force_sum": True}, (1, 8, False)),
    (8, FP32, {"average_supported": True, "factor": 8.0}, (1, 1, True)),
    (8, FP32, {"average_supported": True, "factor": 2.5}, (1, 2.5, False)),
    (8, FP32, {"average_supported": True, "factor": 1.0}, (1, 1, False)),
    (8, BF16, {"factor": 0.5}, (1, 0.5, False)),
    (2, FP16, {}, (2, 1, False)),
    (4, FP16, {}, (2, 2, False)),
    (8, FP16, {}, (4, 2, False)),
    (8, FP16, {"average_supported": True}, (4, 2, False)),
    (6, FP16, {}, (4, 1.5, False)),
    (64, FP16, {}, (8, 8, False)),
    (256, FP16, {}, (16, 16, False)),
    (1000, FP16, {}, (32, 31.25, False)),
    (8, FP16, {"factor": 0.5}, (1, 0.5, False)),
    (8, FP16, {"factor": 1.0}, (1, 1, False)),
    # A back end that divides by itself.
    (8, FP32, {"divisor_supported": True}, (8, 1, False, True)),
    (8, BF16, {"divisor_supported": True, "average_supported": True}, (1, 1, True)),
    (8, BF16, {"divisor_supported": True, "factor": 2.5}, (2.5, 1, False, True)),
    (8, FP32, {"divisor_supported": True, "factor": 2.5, "force_sum": True}, (1, 2.5, False)),
    (8, FP32, {"divisor_supported": True, "factor": 1.0}, (1, 1, False)),
    (8, FP16, {"divisor_supported": True}, (4, 2, False, True)),
    (8, FP16, {"divisor_supported": True, "force_sum": True}, (4, 2, False)),
    (8, FP16, {"divisor_supported": True, "factor": 0.5}, (0.5, 1, False, True)),
    (1, FP32, {"divisor_supported": True}, (1, 1, False)),
]


@pytest.mark.parametrize("world, dtype, options, expected", TABLE)
def test_factors_are_those_of_the_table(
    world: int,
    dtype: torch.dtype,
    options: dict[str, float],
    expected: tuple[Any, ...],
) -> None:
    assert divide_factors(world, dtype, **options) == DivideFactors(*expected)  # type: ignore[arg-type]


@given(
    world=st.integers(1, 4096),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    factor=st.none() | st.floats(2**-10, 2**20),
    average=st.booleans(),
    divisor=st.booleans(),
    force_sum=st.booleans(),
)
def test_all_divisions_together_are_the_whole_factor(
    world: int,
    dtype: torch.dtype,
    factor: float | None,
    average: bool,
    divisor: bool,
    force_sum: bool,
) -> None:
    factors = divide_factors(
        world,
        dtype,
        factor=factor,
        average_supported=average,
        divisor_supported=divisor,
        force_sum=force_sum,
    )
    total = factors.pre * factors.post * (world if factors.average else 1)
    assert total == (world if factor is None else factor)
    assert not (factors.average and (force_sum or not average))
    assert not (factors.by_collective and (force_sum or not divisor))
    if dtype == FP16 or not factors.by_collective:
        # Exact in any dtype, so that dividing first loses nothing but small numbers.
        assert torch.frexp(torch.tensor(factors.pre)).mantissa == 0.5 or factors.pre <= 1


@given(world=st.integers(2, 4096))
def test_fp16_divides_about_the_square_root_before_and_after(world: int) -> None:
    factors = divide_factors(world, FP16)
    assert world**0.5 <= factors.pre < 2 * world**0.5
    # Sums of the largest gradient are at most as many times too large as the square root.
    assert world / factors.pre <= world**0.5
