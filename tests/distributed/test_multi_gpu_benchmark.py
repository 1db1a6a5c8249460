"""The benchmark for several GPUs, on two CPU processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "benchmarks.multi_gpu", "--device=cpu", f"--out={out}", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_losses_are_compared_rows_are_timed_and_a_failing_row_ends_nothing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run(
        out,
        "--same=fsdp2 ours@flat ours@hsdp ddp",
        "--rows=tiny:16",
        "--impls=ours@symmetric fsdp2 ours@flat",
        "--steps=2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    losses = {r["implementation"]: r["losses"] for r in rows if "losses" in r}
    assert list(losses) == ["fsdp2", "ours@flat", "ours@hsdp", "ddp"]
    for found in losses.values():
        assert len(found) == 10
        assert found[-1] < 0.99 * found[0], "so small a change would hide a wrong gradient"
    same = {r["implementation"]: r["same"] for r in rows if r["row"] == "difference"}
    assert same == dict.fromkeys(losses, True)
    timed: dict[str, Any] = {r["implementation"]: r for r in rows if r["row"] == "tiny:16"}
    assert "needs CUDA" in timed["ours@symmetric"]["error"]
    for name in ("fsdp2", "ours@flat"):
        assert timed[name]["step_ms"] > 0
        assert timed[name]["tokens_per_second"] == 1e3 * 2 * 16 / timed[name]["step_ms"]


def test_rows_that_would_begin_too_late_are_named(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run(out, "--same=fsdp2", "--rows=tiny:16", "--impls=ours", "--minutes=0")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["row"], r["left_out"]) for r in rows] == [
        ("losses", "no time left"),
        ("tiny:16", "no time left"),
    ]
