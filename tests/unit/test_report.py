"""The report of benchmarks, from the rows that the repository keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.picture import PANELS, draw, panels_of
from benchmarks.report import render

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
OPTIMIZER: dict[str, Any] = {
    "optimizer_row": "7B",
    "world": 64,
    "implementation": "ours@flat",
    "tensors": 34,
    "ratio": 1.25,
    "clip": {"ms": 0.4, "bound_ms": 0.3, "kernels": 2, "host_waits": False},
    "optimizer": {"ms": 0.85, "bound_ms": 0.7, "kernels": 8, "host_waits": False},
}


def records(*names: str) -> list[dict[str, Any]]:
    paths = [path for name in names for path in FOLDER.glob(f"*-{name}.jsonl")]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "name, title, cells",
    [
        (
            "memory",
            "Peak memory",
            lambda r: [f"{r['allocated_gib']:.2f}", f"{r['expected_gib']:.2f}"],
        ),
        (
            "checkpoint",
            "Checkpoints",
            lambda r: [f"{r['save_s']:.2f}", f"{r['load_s']:.2f}", "yes"],
        ),
        ("multi-gpu-one", "Several ranks", lambda r: [f"{r['step_ms']:.1f}"]),
        ("host", "Host time", lambda r: [f"{r['host_ms']:.1f}"]),
        ("emulated", "the network emulated", lambda r: [f"{r['step_ms']['median']:.1f}"]),
    ],
)
def test_every_kept_row_is_in_the_report(name: str, title: str, cells: Any) -> None:
    found = records(name)
    text = render(found)
    assert title in text
    shown = 0
    for record in found:
        try:
            expected = [record["implementation"], *cells(record)]
        except (KeyError, TypeError):  # a failure, a loss, the cost of sharding
            continue
        shown += 1
        rows = [line for line in text.splitlines() if f"| {expected[0]} |" in line]
        assert any(all(f"| {cell} |" in row for cell in expected) for row in rows), expected
    assert shown


def test_all_kinds_go_into_one_report_with_a_panel_each(tmp_path: Path) -> None:
    everything = records("memory", "checkpoint", "multi-gpu-one", "host", "emulated")
    everything.append(OPTIMIZER)
    text = render(everything, picture="all.png")
    assert text.count("\n## ") == len(PANELS) and "![The same in bars](all.png)" in text
    assert "| 34 | 0.400 | 0.300 | 2 | 0.850 | 0.700 | 8 | 1.25 | no |" in text
    panels = panels_of(everything)
    assert list(panels) == list(PANELS)
    assert panels["clip and optimizer over their bound"] == {"ours@flat": {"7B, 1 of 64": 1.25}}
    pytest.importorskip("matplotlib")
    assert draw(everything, tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_a_record_of_nobody_is_named() -> None:
    with pytest.raises(ValueError, match=r"\['date', 'device', 'torch', 'weather'\]"):
        render([{"date": "2026-12-01", "device": "CPU", "torch": "2.13", "weather": 1}])


def test_kernels_are_shown_as_parts_of_the_bandwidth() -> None:
    shared = {"date": "2026-12-01 00:00:00Z", "device": "a GPU", "torch": "2.11"}
    record = {**shared, "kernel": "a sum", "copies_gb_s": 4000.0, "elements": 2_000_000}
    text = render([{**record, "bound_us": 90.0, "triton_us": 100.0, "torch_us": 1000.0}])
    assert "| a sum | 4000 | 2M | 90 | 100 | 0.90 | 1000 | 0.09 |" in text
