"""Writes `docs/benchmarks/<date>-<gpu>.md` and a picture from the JSON lines of other scripts.

python3 -m benchmarks.report runs/*.jsonl
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.picture import draw

Record = dict[str, Any]

_GB = 1e9


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, the first two columns to the left."""
    rule = ["---" if place < 2 else "---:" for place in range(len(header))]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *escaped)] + [""]


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


def _several(records: list[Record]) -> list[str]:
    header = (
        "row", "implementation", "ranks", "GPUs", "step ms", "tokens/s", "communication ms",
        "exposed ms", "allocated GiB", "reserved GiB",
    )  # fmt: skip
    rows, losses = [], []
    for record in records:
        name = [record["row"], record["implementation"], str(record["ranks"])]
        name.append("1" if record["one_gpu"] else str(record["ranks"]))
        missing = record.get("error") or record.get("left_out")
        if missing:
            rows.append([*name, missing, *[""] * 5])
        elif record["row"] == "difference":
            losses.append(f"{record['implementation']} {record['relative']:.1e}")
        elif "step_ms" in record:
            rows.append(
                [
                    *name,
                    _number(record["step_ms"]),
                    _number(record["tokens_per_second"], 0),
                    _number(record["communication_ms"]),
                    _number(record["exposed_ms"]),
                    _number(record["allocated_gib"], 2),
                    _number(record["reserved_gib"], 2),
                ]
            )
    lines = ["## Several ranks over NCCL", ""]
    if losses:
        lines += [f"Largest relative difference of ten fp32 losses: {', '.join(losses)}.", ""]
    return lines + (table(header, rows) if rows else [])


def _memory(records: list[Record]) -> list[str]:
    header = (
        "row", "implementation", "allocated GiB", "expected GiB", "ratio", "reserved/allocated",
        "parts, GiB",
    )  # fmt: skip
    rows = [
        [
            f"{record['row']}, {record['world']} ranks",
            record["implementation"],
            _number(record["allocated_gib"], 2),
            _number(record["expected_gib"], 2),
            _number(record["allocated_over_expected"], 3),
            _number(record["reserved_over_allocated"], 3),
            ", ".join(f"{k.replace('_', ' ')} {v:.2f}" for k, v in record["parts_gib"].items()),
        ]
        for record in records
    ]
    return ["## Peak memory against the sum of its parts", "", *table(header, rows)]


def _sharding(records: list[Record]) -> list[str]:
    return [
        f"Sharding one unit of {record['sharded_elements'] / 1e6:.0f} M elements takes "
        f"{_number(record['extra_over_own'], 3)} times its bytes beside them and "
        f"{record['host_ms']:.1f} ms of host time.\n"
        for record in records
    ]


def _checkpoint(records: list[Record]) -> list[str]:
    header = (
        "row", "implementation", "shard GB", "save s", "of it planning", "async save holds up s",
        "load s", "of it planning", "host GB beside the shard", "device GB", "restored",
    )  # fmt: skip
    rows = [
        [
            f"{record['row']}, 1 of {record['world']} ranks",
            record["implementation"],
            _number(record["shard"] / _GB, 2),
            _number(record["save_s"], 2),
            _number(record["save_planning_s"], 2),
            _number(record["async_save_waiting_s"], 2),
            _number(record["load_s"], 2),
            _number(record["load_planning_s"], 2),
            _number(max(record["save_host_extra"], record["load_host_extra"]) / _GB, 2),
            _number(max(record["save_device_extra"], record["load_device_extra"]) / _GB, 2),
            "yes" if record["restored"] else "NO",
        ]
        for record in records
    ]
    return ["## Checkpoints", "", *table(header, rows)]


def _optimizer(records: list[Record]) -> list[str]:
    header = (
        "model", "implementation", "tensors", "clip ms", "bound", "kernels", "optimizer ms",
        "bound", "kernels", "both of bound", "host waits",
    )  # fmt: skip
    rows = []
    for record in records:
        parts = [record["clip"], record["optimizer"]]
        cells = [
            cell
            for part in parts
            for cell in (
                _number(part["ms"], 3),
                _number(part["bound_ms"], 3),
                _number(part["kernels"], 0),
            )
        ]
        name = f"{record['optimizer_row']}, 1 of {record['world']} ranks"
        waits = "yes" if any(part["host_waits"] for part in parts) else "no"
        ratio = _number(record["ratio"], 2)
        rows.append([name, record["implementation"], str(record["tensors"]), *cells, ratio, waits])
    return ["## Clipping and the optimizer", "", *table(header, rows)]


def _kernels(records: list[Record]) -> list[str]:
    header = (
        "kernel", "copies GB/s", "elements", "bound us", "Triton us", "of bandwidth", "torch us",
        "of bandwidth",
    )  # fmt: skip
    rows = [
        [
            record["kernel"],
            _number(record["copies_gb_s"], 0),
            f"{record['elements'] / 1e6:.0f}M",
            _number(record["bound_us"], 0),
            _number(record["triton_us"], 0),
            _number(record["bound_us"] / record["triton_us"], 2),
            _number(record["torch_us"], 0),
            _number(record["bound_us"] / record["torch_us"], 2),
        ]
        for record in records
    ]
    return ["## Kernels beside collectives", "", *table(header, rows)]


_KINDS: tuple[tuple[str, Callable[[list[Record]], list[str]]], ...] = (
    # A key that no other script's records have, and what writes them.
    ("network", _emulated),
    ("host", _host),
    ("trace", _traces),
    ("bf16", _one_gpu),
    ("ranks", _several),
    ("expected_gib", _memory),
    ("sharded_elements", _sharding),
    ("save_s", _checkpoint),
    ("optimizer_row", _optimizer),
    ("triton_us", _kernels),
)


def _sorted(records: list[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {key: [] for key, _ in _KINDS}
    for record in records:
        kind = next((key for key in found if key in record), None)
        if kind is None:
            raise ValueError(f"no benchmark writes a record with these keys: {sorted(record)}")
        found[kind].append(record)
    return found


def render(records: list[Record], commands: Sequence[str] = (), picture: str | None = None) -> str:
    """The report of records that share a date and a device, as Markdown."""
    first = records[0]
    title = f"# {first['device']}, {first['date'][:10]}"
    where = f"torch {first['torch']}"
    if first.get("driver"):
        where += f", CUDA {first['cuda']}, driver {first['driver']}"
    lines = [title, "", where + ".", ""]
    if commands:
        lines += ["```", *commands, "```", ""]
    if picture is not None:
        lines += [f"![The same in bars]({picture})", ""]
    kinds = _sorted(records)
    for key, write in _KINDS:
        if kinds[key]:
            lines += write(kinds[key])
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
        picture = Path(name).with_suffix(".png").name
        drawn = picture if draw(records, folder / picture) else None
        (folder / name).write_text(render(records, command or (), drawn))
        typer.echo(folder / name)


if __name__ == "__main__":
    typer.run(main)
