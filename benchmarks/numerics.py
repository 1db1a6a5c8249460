"""Errors of gradient sums over many ranks and of quantised weights, in one process.

    python -m benchmarks.numerics            # the table of docs/numerics.md

Contributions are simulated: a common part (what the ranks agree on) plus noise of each rank, as in
gradients of one batch. A ring adds rank after rank and rounds to the dtype on the wire each time,
each slice beginning at another rank; the fp32-accumulating reduce-scatter receives the same 16-bit
numbers and runs the code of ``ya_fsdp.collectives``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ya_fsdp.kernels import sum_rows
from ya_fsdp.quantised import dequantise, quantise, row_bytes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """Relative errors (Euclidean norm) of one way to sum.

    Attributes:
        dtype: Name of the dtype on the wire.
        ranks: Contributions.
        noise: Size of each rank's own part; the common part has size 1.
        ring: Error of the ring's result.
        wide: Error of the fp32 sum as an fp32 gradient.
        narrow: Error of the fp32 sum rounded to the dtype on the wire.
    """

    dtype: str
    ranks: int
    noise: float
    ring: float
    wide: float
    narrow: float


def contributions(ranks: int, numel: int, noise: float, dtype: torch.dtype, seed: int) -> Tensor:
    """What ranks send, in the dtype on the wire; shape (ranks, numel)."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator)
    own = torch.randn(ranks, numel, generator=generator)
    return (common + noise * own).to(dtype)


def ring_sum(values: Tensor) -> Tensor:
    """Sums rows as a ring does: slice ``i`` starts at rank ``i + 1`` and is rounded every time."""
    ranks, numel = values.shape
    size = -(-numel // ranks)
    result = torch.empty_like(values[0])
    for rank in range(ranks):
        part = slice(rank * size, min((rank + 1) * size, numel))
        total = values[(rank + 1) % ranks, part]
        for step in range(2, ranks + 1):
            total = total + values[(rank + step) % ranks, part]
        result[part] = total
    return result


def error(value: Tensor, truth: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((value.double() - truth).norm() / truth.norm())


def measure(name: str, ranks: int, noise: float, numel: int = 1 << 16, seed: int = 0) -> Row:
    """Errors against the fp64 sum of the numbers on the wire."""
    dtype = DTYPES[name]
    values = contributions(ranks, numel, noise, dtype, seed)
    truth = values.double().sum(0)
    wide = torch.empty(numel, dtype=torch.float32)
    narrow = torch.empty(numel, dtype=dtype)
    sum_rows(wide, values)
    sum_rows(narrow, values)
    ring = error(ring_sum(values), truth)
    return Row(name, ranks, noise, ring, error(wide, truth), error(narrow, truth))


def rows() -> Iterator[Row]:
    """All rows of the table."""
    for name in DTYPES:
        for ranks in (8, 64, 256):
            for noise in (0.1, 1.0, 10.0):
                yield measure(name, ranks, noise)


def weight_errors(numel: int = 1 << 18) -> Iterator[tuple[str, float]]:
    """Relative errors of normally distributed weights gathered in several dtypes."""
    shard = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    yield "bf16", error(shard.to(torch.bfloat16), shard.double())
    row = torch.empty(row_bytes(numel), dtype=torch.uint8)
    for name, dtype in (("fp8 (e4m3)", torch.float8_e4m3fn), ("int8", torch.int8)):
        output = torch.empty_like(shard, dtype=torch.bfloat16)
        quantise(row, shard, dtype)
        dequantise(output, row.unsqueeze(0), dtype)
        yield name, error(output, shard.double())


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("| wire | ranks | noise | ring | fp32 sum, fp32 gradient | rounded to wire |")
    print("|---|---|---|---|---|---|")
    for row in rows():
        print(
            f"| {row.dtype} | {row.ranks} | {row.noise:g} | {row.ring:.1e} | {row.wide:.1e} "
            f"({row.ring / row.wide:.0e}x) | {row.narrow:.1e} ({row.ring / row.narrow:.1f}x) |"
        )
    print("\n| weights gathered in | relative error |")
    print("|---|---|")
    for name, value in weight_errors():
        print(f"| {name} | {value:.1e} |")


if __name__ == "__main__":
    main()
