"""Observers of steps, told by a loop of one's own."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness import WorkerPool
from ya_fsdp import fully_shard
from ya_fsdp.integrations.callbacks import (
    IterationTime,
    MemorySnapshot,
    ProfilerTrace,
    StepObserver,
    unit_report,
)


def run(steps: int, *observers: StepObserver, seconds: float = 0.0) -> None:
    for step in range(steps):
        for observer in observers:
            observer.step_begins(step)
        torch.ones(3).cos()
        time.sleep(seconds)
        for observer in observers:
            observer.step_ends(step)
    for observer in observers:
        observer.run_ends()


def test_the_median_step_gives_tokens_and_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said: list[str] = []
    meter = IterationTime(1000, flops_per_token=6.0, peak_flops=1e6, say=said.append)
    meter.seconds = [100.0, 100.0, 0.1, 0.2, 0.6]
    summary = meter.summary()
    assert summary == pytest.approx({"seconds": 0.2, "tokens_per_second": 5000.0, "mfu": 0.015})
    meter.run_ends()
    assert said == ["seconds 0.2, tokens_per_second 5000, mfu 0.015"]


def test_steps_are_timed_and_no_step_is_an_error() -> None:
    meter = IterationTime(skip=1)
    with pytest.raises(RuntimeError, match="no step was timed"):
        meter.summary()
    run(3, meter, seconds=0.02)
    assert len(meter.seconds) == 3
    assert 0.015 < meter.summary()["seconds"] < 1


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_trace_has_the_asked_steps(tmp_path: Path, ends_early: bool) -> None:
    trace = ProfilerTrace(tmp_path / "traces", first_step=1, steps=2)
    run(2 if ends_early else 5, trace)
    events = json.loads(gzip.decompress(trace.path.read_bytes()))["traceEvents"]
    seen = [event for event in events if event.get("name") == "aten::cos"]
    assert len(seen) == (1 if ends_early else 2)


def test_a_trace_of_no_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ProfilerTrace(tmp_path, steps=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to take a snapshot of")
def test_no_snapshot_is_written_without_a_gpu(tmp_path: Path) -> None:
    run(5, MemorySnapshot(tmp_path / "rank{rank}.pickle"))
    assert not list(tmp_path.iterdir())


def report(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[1].bias.requires_grad_(False)
    fully_shard(model[0])
    return unit_report(fully_shard(model))


def test_the_report_counts_every_element_once(world2: WorkerPool) -> None:
    tables = [[line.split() for line in text.splitlines()[1:]] for text in world2.run(report)]
    assert [row[:5] for row in tables[0]] == [
        ["0", "float32", "trainable", "2", "40"],
        ["(root)", "float32", "trainable", "1", "32"],
        ["(root)", "float32", "frozen", "1", "4"],
    ]
    for first, second in zip(*tables, strict=True):
        assert int(first[5]) + int(second[5]) == int(first[4])
