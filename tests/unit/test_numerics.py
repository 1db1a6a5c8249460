"""Simulated sums over many ranks: what docs/numerics.md claims."""

from __future__ import annotations

import pytest
import torch

from benchmarks.numerics import contributions, measure, ring_sum


@pytest.mark.parametrize("noise", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("ranks", [64, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_fp32_sum_is_ten_times_closer_than_a_ring_of_many_ranks(
    dtype: str, ranks: int, noise: float
) -> None:
    row = measure(dtype, ranks, noise, numel=1 << 13, seed=1)
    assert row.wide * 10 < row.ring
    assert row.narrow < row.ring


def test_the_simulated_ring_adds_each_slice_in_its_own_order() -> None:
    values = torch.tensor([[1.0, 1.0], [256.0, 1.0], [1.0, 256.0]]).to(torch.bfloat16)
    # bf16 has eight bits: 256 + 1 is 256, and 1 + 1 + 256 is 258.
    assert ring_sum(values)[0] == 256 + 0
    assert ring_sum(values).shape == (2,)
    exact = contributions(5, 64, 0.0, torch.bfloat16, seed=0)
    whole = torch.ones_like(exact)
    assert torch.equal(ring_sum(whole), torch.full((64,), 5.0, dtype=torch.bfloat16))
