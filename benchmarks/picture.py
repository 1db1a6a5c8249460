"""Pictures of what the other scripts measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# Row, bar and height of a record, or nothing if it does not belong in the panel.
Reader = Callable[[Record], tuple[str, str, float] | None]


def _emulated(record: Record) -> tuple[str, str, float] | None:
    ratio = record.get("ratio_to_plain")
    if "network" not in record or ratio is None:
        return None
    return record["row"], record["implementation"], ratio


def _host(record: Record) -> tuple[str, str, float] | None:
    if not record.get("host"):
        return None
    row = f"{record['layers']} layers of {record['width']}"
    return row, record["implementation"], record["host_ms"]


def _memory(record: Record) -> tuple[str, str, float] | None:
    if "expected_gib" not in record:
        return None
    return record["row"], record["implementation"], record["allocated_over_expected"]


def _checkpoint(record: Record) -> tuple[str, str, float] | None:
    if "save_s" not in record:
        return None
    row = f"{record['row']}, 1 of {record['world']}"
    return row, record["implementation"], record["save_s"] + record["load_s"]


def _several(record: Record) -> tuple[str, str, float] | None:
    if "ranks" not in record or "step_ms" not in record:
        return None
    return f"{record['row']}, {record['ranks']} ranks", record["implementation"], record["step_ms"]


def _optimizer(record: Record) -> tuple[str, str, float] | None:
    if "optimizer_row" not in record:
        return None
    row = f"{record['optimizer_row']}, 1 of {record['world']}"
    return row, record["implementation"], record["ratio"]


PANELS: dict[str, Reader] = {
    "step over unsharded's (network emulated)": _emulated,
    "host, ms per step": _host,
    "peak memory over the sum of its parts": _memory,
    "save and load of a checkpoint, s": _checkpoint,
    "several ranks, ms per step": _several,
    "clip and optimizer over their bound": _optimizer,
}


def panels_of(records: Sequence[Record]) -> dict[str, dict[str, dict[str, float]]]:
    """Heights by panel, bar and row; a later record of the same replaces an earlier one."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for title, read in PANELS.items():
        for record in records:
            place = read(record)
            if place is not None:
                row, label, height = place
                found.setdefault(title, {}).setdefault(label, {})[row] = height
    return found


def draw(records: Sequence[Record], path: Path) -> bool:
    """Write one panel per kind of measurement; false where there is nothing to draw it with."""
    try:
        import matplotlib
    except ImportError:
        return False
    panels = panels_of(records)
    if not panels:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = dict.fromkeys(label for bars in panels.values() for label in bars)
    palette = pyplot.get_cmap("tab20")
    colours = {label: palette(place % 20) for place, label in enumerate(labels)}
    counts = [len(_rows(bars)) for bars in panels.values()]
    size = (4 + 1.2 * max(counts), 4.0 * len(panels))
    figure, axes = pyplot.subplots(len(panels), figsize=size, layout="constrained", squeeze=False)
    for (title, bars), panel in zip(panels.items(), axes[:, 0], strict=True):
        rows = _rows(bars)
        width = 0.8 / max(4, len(bars))
        for place, (label, heights) in enumerate(bars.items()):
            at = [index + place * width for index, row in enumerate(rows) if row in heights]
            panel.bar(
                at,
                [heights[row] for row in rows if row in heights],
                width,
                label=label,
                color=colours[label],
            )
        ticks = [index + (len(bars) - 1) * width / 2 for index in range(len(rows))]
        panel.set_xticks(ticks, rows, rotation=20, ha="right", fontsize=8)
        panel.set_title(title, fontsize=10)
        panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def _rows(bars: dict[str, dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(row for heights in bars.values() for row in heights))
