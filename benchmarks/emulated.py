"""One rank of an N-rank job on one GPU: implementations side by side, the network emulated.

    python3 -m benchmarks.emulated --rows "7B:2048:300 7B:2048:free" --out runs/emulated.jsonl

A row is `model:sequence:network[:world[:blocks]]`; the network is `free`, a bandwidth in GB/s that
each rank receives at, or `450/400@8` for 450 inside a node and 400 for a whole node of 8 ranks.
Implementations are named as `benchmarks/variants.py` describes. Every round visits all of them in
turn (build, warm up, measure, free), so that drift of the clocks meets them alike.
"""

from __future__ import annotations

import gc
import json
import statistics
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import emulation, models
from benchmarks.emulation import Network
from benchmarks.measure import (
    Bound,
    Sample,
    bound,
    environment,
    extrapolated,
    measure,
    merged,
    spread,
)
from benchmarks.picture import draw
from benchmarks.trainers import Job, running
from benchmarks.variants import UnavailableError, Variant

_PLAIN_BYTES = 4  # bf16 weights and gradients
_PLAIN_SHARE = 0.6  # of the device's memory; the rest is for activations
_DEPTHS = (4, 8)
_EXPERIMENT = "7B:2048:free 7B:2048:300 1B:2048:300 narrow:256:free"
_GB = 1e9


@dataclass(frozen=True)
class Row:
    """One model, sequence, network and world."""

    label: str
    model: str
    config: models.Config
    sequence: int
    network: Network
    world: int

    @classmethod
    def parse(cls, text: str, latency: float, blocks: int, fill: Any, width: int | None) -> Row:
        """Read `model:sequence:network[:world[:blocks]]`."""
        parts = text.split(":")
        if not 3 <= len(parts) <= 5:
            raise ValueError(f"a row is model:sequence:network[:world[:blocks]], not {text!r}")
        config = models.config_of(parts[0], width=width)
        world = int(parts[3]) if len(parts) > 3 else config.world
        blocks = int(parts[4]) if len(parts) > 4 else blocks
        network = Network.parse(parts[2], latency=latency, blocks=blocks, fill=fill)
        return cls(text, parts[0], config, int(parts[1]), network, world)


@dataclass
class Plan:
    """How much is measured."""

    warmup: int
    steps: int
    rounds: int
    batch: int
    device: torch.device


def _plain_fits(row: Row, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    total = torch.cuda.get_device_properties(device).total_memory
    return _PLAIN_BYTES * sum(models.unit_elements(row.config)) < _PLAIN_SHARE * total


def _visit(row: Row, variant: Variant, plan: Plan) -> Sample:
    traffic = emulation.start(row.world, row.network)
    job = Job(row.config, plan.batch, row.sequence, row.world, plan.device)
    if variant.implementation != "plain" or _plain_fits(row, plan.device):
        with running(job, variant) as trainer:
            sections = variant.implementation == "plain"
            return measure(trainer, traffic, plan.warmup, plan.steps, sections)
    owned = -(-sum(models.unit_elements(row.config)) // row.world)
    found = []
    for depth in _DEPTHS:
        config = models.config_of(row.model, layers=depth)
        short = Job(config, plan.batch, row.sequence, row.world, plan.device)
        with running(short, variant, owned=owned) as trainer:
            found.append(measure(trainer, traffic, plan.warmup, plan.steps, sections=True))
    return extrapolated(found[0], found[1], _DEPTHS, row.config.layers)


def _reason(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return f"{type(error).__name__}: {text}"[:200]


def measure_row(
    row: Row, variants: list[Variant], plan: Plan
) -> tuple[dict[str, Sample], dict[str, str]]:
    """Samples of one row by label, and reasons for the implementations that gave none."""
    samples: dict[str, list[Sample]] = {}
    failures: dict[str, str] = {}
    for _ in range(plan.rounds):
        for variant in variants:
            if variant.label in failures:
                continue
            # The reason is kept as text: the exception would keep the model alive.
            reason = None
            try:
                samples.setdefault(variant.label, []).append(_visit(row, variant, plan))
            except UnavailableError as error:
                reason = str(error)
            except Exception as error:  # one implementation's failure is a result
                reason = _reason(error)
                if not isinstance(error, torch.OutOfMemoryError):
                    traceback.print_exc()
            if reason is not None:
                failures[variant.label] = reason
                samples.pop(variant.label, None)
                gc.collect()
                if plan.device.type == "cuda":
                    torch.cuda.empty_cache()
    return {label: merged(visits) for label, visits in samples.items()}, failures


def records_of(
    row: Row,
    variants: list[Variant],
    plan: Plan,
    samples: dict[str, Sample],
    failures: dict[str, str],
) -> list[dict[str, Any]]:
    """One JSON-ready record per implementation of a row."""
    shared = {
        **environment(plan.device),
        "row": row.label,
        "model": row.model,
        "sequence": row.sequence,
        "batch": plan.batch,
        "world": row.world,
        "network": asdict(row.network),
    }
    base = samples.get("plain") or next(
        (samples[v.label] for v in variants if v.implementation == "plain" and v.label in samples),
        None,
    )
    least: Bound | None = None
    if base is not None and base.sections:
        least = bound(row.config, row.world, row.network, base.sections)
    records = []
    for variant in variants:
        record: dict[str, Any] = {**shared, "implementation": variant.label}
        sample = samples.get(variant.label)
        if sample is None:
            record["failed"] = failures.get(variant.label, "not run")
            records.append(record)
            continue
        median = statistics.median(sample.steps)
        record |= {
            "step_ms": spread(sample.steps),
            "host_ms": spread(sample.host),
            "sections_ms": {part: spread(times) for part, times in sample.sections.items()},
            "calls": sample.calls,
            "bytes": sample.bytes,
            "allocated_gib": sample.allocated,
            "reserved_gib": sample.reserved,
            "allocated_before_gib": sample.before,
            "alloc_retries": sample.retries,
            "segments_while_measured": sample.segments,
            "finite": sample.finite,
        }
        if base is not None:
            record["ratio_to_plain"] = median / statistics.median(base.steps)
            record["plain_extrapolated"] = not _plain_fits(row, plan.device)
        if least is not None:
            record["bound"] = asdict(least)
            record["ratio_to_bound"] = median / least.total
        records.append(record)
    return records


HEADER = (
    f"{'row':<22} {'implementation':<26} {'step ms (min-max)':>22} {'host':>7} {'/plain':>7} "
    f"{'/bound':>7} {'alloc':>7} {'resv':>7} {'retry':>5} {'coll':>5} {'GB':>6}"
)


def line_of(record: dict[str, Any]) -> str:
    """One row of the table."""
    start = f"{record['row']:<22} {record['implementation']:<26} "
    if "failed" in record:
        return start + record["failed"][:90]
    step, ratio = record["step_ms"], record.get("ratio_to_bound")
    times = f"{step['median']:.1f} ({step['min']:.1f}-{step['max']:.1f})"
    plain = record.get("ratio_to_plain")
    numbers = [
        f"{times:>22}",
        f"{record['host_ms']['min']:>7.1f}",
        f"{plain:>7.3f}" if plain else f"{'-':>7}",
        f"{ratio:>7.3f}" if ratio else f"{'-':>7}",
        *(
            f"{record[key]:>7.2f}" if record[key] is not None else f"{'-':>7}"
            for key in ("allocated_gib", "reserved_gib")
        ),
        f"{record['alloc_retries']:>5}",
        f"{sum(record['calls'].values()):>5.0f}",
        f"{sum(record['bytes'].values()) / _GB:>6.2f}",
    ]
    return start + " ".join(numbers)


def _print_bound(records: list[dict[str, Any]]) -> None:
    least = next((record["bound"] for record in records if "bound" in record), None)
    if least is not None:
        parts = ", ".join(f"{name} {value:.1f}" for name, value in least.items())
        typer.echo(f"  bound: {parts}")
    odd = [r["implementation"] for r in records if not r.get("finite", True)]
    if odd:
        typer.echo(f"  not finite (a free network leaves others' shards unwritten): {odd}")


def main(
    rows: Annotated[str, typer.Option(help="Rows, separated by spaces.")] = _EXPERIMENT,
    impls: Annotated[str, typer.Option(help="Implementations.")] = "plain fsdp2 ours",
    steps: Annotated[int, typer.Option(help="Measured steps per visit.")] = 5,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 3,
    rounds: Annotated[int, typer.Option(help="Visits to every implementation.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 1,
    latency: Annotated[float, typer.Option(help="Microseconds per collective.")] = 20.0,
    blocks: Annotated[int, typer.Option(help="Thread blocks of a collective.")] = 16,
    fill: Annotated[str, typer.Option(help="Free network writes: own, once or all.")] = "once",
    width: Annotated[int | None, typer.Option(help="Scale models to this width (tests).")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a PNG here.")] = None,
) -> None:
    """Measure rows and print a table."""
    variants = [Variant.parse(text) for text in impls.split()]
    parsed = [Row.parse(text, latency, blocks, fill, width) for text in rows.split()]
    plan = Plan(warmup, steps, rounds, batch, torch.device(device, 0 if device == "cuda" else None))
    every: list[dict[str, Any]] = []
    if device == "cpu":
        torch.set_num_threads(1)
    typer.echo(HEADER)
    for row in parsed:
        records = records_of(row, variants, plan, *measure_row(row, variants, plan))
        for record in records:
            typer.echo(line_of(record))
        _print_bound(records)
        every += records
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
    emulation.stop()
    if picture is not None and not draw(every, picture):
        typer.echo("no picture: matplotlib is not installed")


if __name__ == "__main__":
    typer.run(main)
