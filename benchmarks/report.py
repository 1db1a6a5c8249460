"""Writes `docs/benchmarks/<date>-<gpu>.md` from the JSON lines that the other scripts append.

python3 -m benchmarks.report runs/*.jsonl
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Record = dict[str, Any]

_GB = 1e9


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, the first two columns to the left."""
    rule = ["---" if place < 2 else "---:" for place in range(len(header))]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)] + [""]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _emulated(records: list[Record]) -> list[str]:
    header = (
        "row", "implementation", "step ms", "min to max", "host ms", "of unsharded", "of bound",
        "allocated GiB", "reserved GiB", "retries", "collectives", "GB received",
    )  # fmt: skip
    rows, bounds = [], {}
    for record in records:
        name = [f"{record['row']}, {record['world']} ranks", record["implementation"]]
        if "failed" in record:
            rows.append([*name, record["failed"], *[""] * 9])
            continue
        step = record["step_ms"]
        rows.append(
            [
                *name,
                _number(step["median"]),
                f"{step['min']:.1f} to {step['max']:.1f}",
                _number(record["host_ms"]["min"]),
                _number(record.get("ratio_to_plain"), 3),
                _number(record.get("ratio_to_bound"), 3),
                _number(record["allocated_gib"], 2),
                _number(record["reserved_gib"], 2),
                str(record["alloc_retries"]),
                _number(sum(record["calls"].values()), 0),
                _number(sum(record["bytes"].values()) / _GB, 2),
            ]
        )
        if "bound" in record:
            bounds[record["row"]] = record["bound"]
    lines = ["## One rank of a larger job, the network emulated", "", *table(header, rows)]
    if bounds:
        names = list(next(iter(bounds.values())))
        cells = [[row, *(_number(part[name]) for name in names)] for row, part in bounds.items()]
        lines += [
            "Bounds, in ms:",
            "",
            *table(["row", *(n.replace("_", " ") for n in names)], cells),
        ]
    if any(record.get("plain_extrapolated") for record in records):
        lines += [
            "Where the unsharded model does not fit the device, its time is that of two shallower "
            "models extrapolated in the number of layers.",
            "",
        ]
    return lines


def _host(records: list[Record]) -> list[str]:
    header = (
        "model", "implementation", "host ms", "of unsharded", "ms per group",
        "the same without optimizer", "phases, ms",
    )  # fmt: skip
    rows = []
    for record in records:
        phases = ", ".join(f"{name} {ms:.2f}" for name, ms in record["phases_ms"].items())
        rows.append(
            [
                f"{record['layers']} layers of {record['width']}, {record['sequence']} tokens",
                record["implementation"],
                _number(record["host_ms"]),
                _number(record.get("ratio_to_plain"), 2),
                _number(record.get("per_group_ms"), 3),
                _number(record.get("per_group_passes_ms"), 3),
                phases or "-",
            ]
        )
    costs = {f"{record['collective_us']:.1f}" for record in records if "collective_us" in record}
    lines = ["## Host time", "", *table(header, rows)]
    return [*lines, f"One emulated collective costs {', '.join(sorted(costs))} us of it.", ""]


def _traces(records: list[Record]) -> list[str]:
    header = (
        "row", "implementation", "span ms", "compute", "communication", "exposed", "idle", "gaps",
        "copy kernels on the compute stream", "GB by copying operators",
    )  # fmt: skip
    rows = []
    for record in records:
        reading = record["reading"] or {}
        names = ("span", "compute", "communication", "exposed", "idle", "gaps")
        rows.append(
            [
                record["row"],
                record["implementation"],
                *(_number(reading.get(name)) for name in names),
                _number(reading["copy_kernels"][0] if reading else None),
                _number(sum(record["copied"].values()) / _GB, 2),
            ]
        )
    return ["## One step read from its trace", "", *table(header, rows)]


def _one_gpu(records: list[Record]) -> list[str]:
    header = ("ranks", "compute", "FSDP2 ms", "ours ms", "ratio", "largest relative difference")
    rows = []
    for record in records:
        medians = {
            name: sorted(ms[2:] or ms)[len(ms[2:] or ms) // 2] for name, ms in record["ms"].items()
        }
        rows.append(
            [
                str(record["world"]),
                "bf16" if record["bf16"] else "fp32",
                _number(medians.get("fsdp2")),
                _number(medians.get("ours")),
                _number(record.get("ratio"), 3),
                f"{record['difference']:.1e}" if "difference" in record else "-",
            ]
        )
    return ["## Real ranks sharing one device", "", *table(header, rows)]


def render(records: list[Record], commands: Sequence[str] = ()) -> str:
    """The report of records that share a date and a device, as Markdown."""
    first = records[0]
    title = f"# {first['device']}, {first['date'][:10]}"
    where = f"torch {first['torch']}"
    if first.get("driver"):
        where += f", CUDA {first['cuda']}, driver {first['driver']}"
    lines = [title, "", where + ".", ""]
    if commands:
        lines += ["```", *commands, "```", ""]
    kinds = (
        (_emulated, [r for r in records if "implementation" in r and "network" in r]),
        (_host, [r for r in records if r.get("host")]),
        (_traces, [r for r in records if r.get("trace")]),
        (_one_gpu, [r for r in records if r.get("one_gpu")]),
    )
    for write, chosen in kinds:
        if chosen:
            lines += write(chosen)
    return "\n".join(lines).rstrip() + "\n"


def file_name(record: Record) -> str:
    """`<date>-<gpu>.md`."""
    device = re.sub(r"[^a-z0-9]+", "-", record["device"].lower()).strip("-")
    return f"{record['date'][:10]}-{device}.md"


def main(
    inputs: Annotated[list[Path], typer.Argument(help="Files of JSON lines.")],
    folder: Annotated[Path, typer.Option(help="Where reports go.")] = Path("docs/benchmarks"),
    command: Annotated[list[str] | None, typer.Option(help="A command to quote.")] = None,
) -> None:
    """Write one report per date and device."""
    reports: dict[str, list[Record]] = {}
    for path in inputs:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            reports.setdefault(file_name(record), []).append(record)
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in reports.items():
        (folder / name).write_text(render(records, command or ()))
        typer.echo(folder / name)


if __name__ == "__main__":
    typer.run(main)
