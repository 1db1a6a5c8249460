"""What a resident budget buys: as much memory as FSDP2 reserves, spent on units that stay gathered.

    python3 -m benchmarks.budget --row 7B:2048:100 --out runs/budget.jsonl

FSDP2 is measured first, then ours with budgets of what FSDP2 reserves beyond ours, until ours
reserves no more than FSDP2. The table then has both, and ours without a budget, in turn; after it
the time that the saved bytes would have taken on the wire. Rows are those of
`benchmarks/emulated.py`; without a GPU, or with `--budget`, the budget is a number of bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import emulation
from benchmarks.emulated import HEADER, Plan, Row, line_of, measure_row, records_of
from benchmarks.measure import Sample
from benchmarks.variants import Variant

_GIB = 2**30
_TRIALS = 4


def _sample(row: Row, variant: Variant, plan: Plan) -> Sample:
    samples, failures = measure_row(row, [variant], plan)
    if variant.label not in samples:
        raise SystemExit(f"{variant.label}: {failures[variant.label]}")
    return samples[variant.label]


def _with(options: str, num_bytes: int) -> Variant:
    return Variant.parse(f"{options}+set_resident_budget={num_bytes}")


def fitting_budget(row: Row, options: str, plan: Plan) -> int:
    """The bytes that ours may keep so that it reserves no more than FSDP2."""
    allowed = _sample(row, Variant.parse("fsdp2"), plan).reserved
    used = _sample(row, Variant.parse(options), plan).reserved
    assert allowed is not None and used is not None
    budget = int((allowed - used) * _GIB)
    for _ in range(_TRIALS):
        if budget <= 0:
            raise SystemExit(f"FSDP2 reserves {allowed:.2f} GiB and {options} {used:.2f} by itself")
        used = _sample(row, _with(options, budget), plan).reserved
        assert used is not None
        typer.echo(
            f"  a budget of {budget / _GIB:.2f} GiB: {used:.2f} reserved, FSDP2 {allowed:.2f}"
        )
        if used <= allowed:
            return budget
        budget -= int((used - allowed) * _GIB)
    raise SystemExit(f"no budget found within {_TRIALS} trials")


def verdict(row: Row, records: list[dict[str, Any]]) -> str:
    """What was gained against FSDP2, and what the saved bytes are worth on this network."""
    theirs, plain, ours = records
    if any("failed" in record for record in records):
        return "  something failed; no comparison"
    step, before = ours["step_ms"]["median"], theirs["step_ms"]["median"]
    saved = sum(theirs["bytes"].values()) - sum(ours["bytes"].values())
    worth = row.network.nanoseconds(max(saved, 0), range(row.world)) / 1e6
    alone = plain["step_ms"]["median"]
    return (
        f"  {step:.1f} ms against {before:.1f} of FSDP2 and {alone:.1f} without a budget; the "
        f"{saved / 1e9:.2f} GB that FSDP2 receives beyond ours take {worth:.1f} ms"
    )


def main(
    row: Annotated[str, typer.Option(help="A row as in benchmarks.emulated.")] = "7B:2048:100",
    options: Annotated[str, typer.Option(help="Ours, without a budget.")] = "ours@flat",
    budget: Annotated[
        int | None, typer.Option(help="Bytes; by FSDP2's memory if left out.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Measured steps per visit.")] = 5,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 3,
    rounds: Annotated[int, typer.Option(help="Visits to every implementation.")] = 2,
    width: Annotated[int | None, typer.Option(help="Scale models to this width (tests).")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
) -> None:
    """Find the budget, measure and print a table."""
    parsed = Row.parse(row, 20.0, 16, "once", width)
    where = torch.device(device, 0 if device == "cuda" else None)
    if device == "cpu":
        torch.set_num_threads(1)
        if budget is None:
            raise SystemExit("on CPU nothing is reserved; pass --budget")
    if budget is None:
        budget = fitting_budget(parsed, options, Plan(warmup, 2, 1, 1, where))
    variants = [Variant.parse("fsdp2"), Variant.parse(options), _with(options, budget)]
    plan = Plan(warmup, steps, rounds, 1, where)
    records = records_of(parsed, variants, plan, *measure_row(parsed, variants, plan))
    typer.echo(HEADER)
    for record in records:
        typer.echo(line_of(record))
    typer.echo(verdict(parsed, records))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    emulation.stop()


if __name__ == "__main__":
    typer.run(main)
