"""Time of the kernels beside collectives against the time their bytes take.

    python3 -m benchmarks.wire --out runs/wire.jsonl

The bound is what the device copies per second, measured with one large copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.measure import environment
from benchmarks.report import render
from ya_fsdp import kernels
from ya_fsdp.quantised import parts, row_bytes


def gathered_rows(
    ranks: int, numel: int, dtype: torch.dtype, out_dtype: torch.dtype, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for an output, and elements and scales as a gather leaves them."""
    shape = (ranks, row_bytes(numel))
    rows = torch.randint(0, 120, shape, dtype=torch.uint8, device=device)
    rows |= torch.randint(0, 2, shape, dtype=torch.uint8, device=device) << 7
    values, scales = parts(rows, numel, dtype)
    scales.copy_(torch.rand_like(scales))
    return torch.empty(ranks * numel, dtype=out_dtype, device=device), values, scales


def seconds(function: Callable[[], object], repeats: int = 20) -> float:
    """Median time on the device, caches cold."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[3:])


def bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def sum_case(ranks: int, numel: int, out: torch.dtype) -> tuple[int, list[float]]:
    """Bytes moved, and seconds of Triton and of torch."""
    rows = torch.randn(ranks, numel, device="cuda").to(torch.bfloat16)
    output = torch.empty(numel, dtype=out, device="cuda")
    moved = rows.numel() * 2 + output.numel() * output.element_size()
    ways = (kernels.sum_rows, kernels.sum_rows_torch)
    return moved, [seconds(lambda way=way: way(output, rows, float(ranks))) for way in ways]  # type: ignore[misc]


def dequantise_case(ranks: int, numel: int, dtype: torch.dtype) -> tuple[int, list[float]]:
    """Bytes moved, and seconds of Triton and of torch."""
    output, values, scales = gathered_rows(ranks, numel, dtype, torch.bfloat16)
    moved = values.numel() + scales.numel() * 4 + output.numel() * 2
    ways = (kernels.dequantise_rows, kernels.dequantise_rows_torch)
    return moved, [seconds(lambda way=way: way(output, values, scales)) for way in ways]  # type: ignore[misc]


def measured(peak: float) -> Iterator[dict[str, Any]]:
    """A row for every kernel and shape, times in microseconds."""
    unit = 202_375_168  # elements of one block of a 7B model
    shared = environment(torch.device("cuda")) | {"copies_gb_s": peak / 1e9, "elements": unit}

    def row(kernel: str, moved: int, times: list[float]) -> dict[str, Any]:
        triton, by_torch = (each * 1e6 for each in times)
        bound = moved / peak * 1e6
        return {**shared, "kernel": kernel, "bound_us": bound} | {
            "triton_us": triton,
            "torch_us": by_torch,
        }

    for ranks in (8, 64, 256):
        for out in (torch.float32, torch.bfloat16):
            name = f"sum of {ranks} bf16 rows to {str(out).removeprefix('torch.')}"
            yield row(name, *sum_case(ranks, unit // ranks // 256 * 256, out))
    for dtype in (torch.float8_e4m3fn, torch.int8):
        name = f"{str(dtype).removeprefix('torch.')} rows of 64 ranks to bf16"
        yield row(name, *dequantise_case(64, unit // 64 // 256 * 256, dtype))


def main(out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None) -> None:
    """Measure and print a table."""
    if kernels.triton_kernels() is None:
        raise SystemExit("Triton is not installed")
    records = list(measured(bandwidth()))
    typer.echo(render(records))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    typer.run(main)
