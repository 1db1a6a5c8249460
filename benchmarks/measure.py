"""Measures a trainer, and computes the bound that no schedule can beat."""

from __future__ import annotations

import datetime
import gc
import itertools
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import models
from benchmarks.emulation import Network, Traffic
from benchmarks.trainers import Trainer

_GIB = 2**30
_GATHER_BYTES = 2
_HOST_STEPS = 3


@dataclass
class Sample:
    """What one visit to one implementation gave.

    Attributes:
        steps: Milliseconds of each step, run back to back.
        host: Milliseconds of Python per step, the device idle at its start.
        sections: Milliseconds of each part (`forward`, `backward`, `clip`, `optimizer`) by step.
        calls, bytes: Collectives per step by kind, and bytes that this rank receives.
        allocated, reserved: Peak GiB over the measured steps; `None` on a CPU.
        before: GiB that were allocated before the model was built: what a predecessor leaked.
        retries: Times that the allocator had to free its cache since then.
        segments: Segments asked of the driver during the measured steps.
        finite: Whether the last loss is a number.
    """

    steps: list[float]
    host: list[float]
    sections: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    allocated: float | None = None
    reserved: float | None = None
    before: float = 0.0
    retries: int = 0
    segments: int = 0
    finite: bool = True


class _Clock:
    """Points in time on the device's current stream, or of the host where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self.cuda else (end - start) * 1e3

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def _memory(name: str) -> int:
    return int(torch.cuda.memory_stats().get(name, 0))


def _sections(trainer: Trainer, clock: _Clock, steps: int) -> dict[str, list[float]]:
    points: list[tuple[str, Any]] = []
    trainer.mark = lambda part: points.append((part, clock.now()))
    for _ in range(steps):
        trainer.step()
    clock.synchronize()
    trainer.mark = lambda part: None
    found: dict[str, list[float]] = {}
    for (part, start), (_, end) in itertools.pairwise(points):
        if part != "end":
            found.setdefault(part, []).append(clock.between(start, end))
    return found


def measure(
    trainer: Trainer, traffic: Traffic, warmup: int, steps: int, sections: bool = False
) -> Sample:
    """Run a trainer: `warmup` steps, `steps` back to back, then a few for the host alone."""
    clock = _Clock(trainer.job.device)
    for _ in range(warmup):
        trainer.step()
    clock.synchronize()
    gc.collect()
    # The collector's pauses would land in whichever implementation makes the most garbage objects.
    gc.disable()
    try:
        if clock.cuda:
            torch.cuda.reset_peak_memory_stats()
        segments = _memory("num_device_alloc") if clock.cuda else 0
        traffic.reset()
        points = [clock.now()]
        for _ in range(steps):
            trainer.step()
            points.append(clock.now())
        clock.synchronize()
        sample = Sample([clock.between(a, b) for a, b in itertools.pairwise(points)], [])
        sample.calls = {kind: count / steps for kind, count in traffic.calls.items()}
        sample.bytes = {kind: count / steps for kind, count in traffic.bytes.items()}
        if clock.cuda:
            sample.allocated = torch.cuda.max_memory_allocated() / _GIB
            sample.reserved = torch.cuda.max_memory_reserved() / _GIB
            sample.before = trainer.allocated_before / _GIB
            sample.retries = _memory("num_alloc_retries") - trainer.retries_before
            sample.segments = _memory("num_device_alloc") - segments
        for _ in range(_HOST_STEPS if clock.cuda else 0):
            start = time.perf_counter()
            trainer.step()
            sample.host.append((time.perf_counter() - start) * 1e3)
            clock.synchronize()
        if sections:
            sample.sections = _sections(trainer, clock, steps)
    finally:
        gc.enable()
    sample.host = sample.host or sample.steps
    if trainer.loss is not None:
        sample.finite = bool(torch.isfinite(trainer.loss).item())
    return sample


def merged(samples: Sequence[Sample]) -> Sample:
    """All visits to one implementation as one sample; memory is the largest of them."""
    whole = Sample([], [])
    for sample in samples:
        whole.steps += sample.steps
        whole.host += sample.host
        for part, times in sample.sections.items():
            whole.sections.setdefault(part, []).extend(times)
        whole.calls, whole.bytes = sample.calls, sample.bytes
        if sample.allocated is not None and sample.reserved is not None:
            whole.allocated = max(whole.allocated or 0.0, sample.allocated)
            whole.reserved = max(whole.reserved or 0.0, sample.reserved)
        whole.before = max(whole.before, sample.before)
        whole.retries = max(whole.retries, sample.retries)
        whole.segments = max(whole.segments, sample.segments)
        whole.finite = whole.finite and sample.finite
    return whole


def extrapolated(shallow: Sample, deep: Sample, depths: tuple[int, int], depth: int) -> Sample:
    """The sample of a deeper model, times being linear in the number of layers."""
    slope = (depth - depths[0]) / (depths[1] - depths[0])

    def at(first: list[float], second: list[float]) -> list[float]:
        low, high = statistics.median(first), statistics.median(second)
        return [low + (high - low) * slope]

    sections = {
        part: at(times, deep.sections[part])
        for part, times in shallow.sections.items()
        if part in deep.sections
    }
    return Sample(at(shallow.steps, deep.steps), at(shallow.host, deep.host), sections)


@dataclass
class Bound:
    """First gather + max(forward) + max(backward) + last reduction + optimizer, in ms."""

    total: float
    forward_compute: float
    forward_traffic: float
    backward_compute: float
    backward_traffic: float
    first_gather: float
    last_reduction: float
    optimizer: float


def bound(
    config: models.Config,
    world: int,
    network: Network,
    sections: dict[str, list[float]],
    reduce_bytes: int = 4,
) -> Bound:
    """The shortest step when every group is gathered twice and reduced once.

    The last group stays gathered between its forward and its backward. Compute times are those of
    the unsharded model, with nothing else on the device.
    """
    elements = models.unit_elements(config)
    ranks = range(world)

    def milliseconds(count: int, width: int) -> float:
        wire = count * width * (world - 1) / world
        return network.nanoseconds(wire, ranks) / 1e6

    gathers = [milliseconds(count, _GATHER_BYTES) for count in elements]
    reductions = [milliseconds(count, reduce_bytes) for count in elements]
    median = {part: statistics.median(times) for part, times in sections.items()}
    forward, backward = sum(gathers), sum(gathers[:-1]) + sum(reductions)
    optimizer = median["optimizer"] + median.get("clip", 0.0)
    total = (
        gathers[0]
        + max(median["forward"], forward)
        + max(median["backward"], backward)
        + reductions[0]
        + optimizer
    )
    return Bound(
        total,
        median["forward"],
        forward,
        median["backward"],
        backward,
        gathers[0],
        reductions[0],
        optimizer,
    )


def environment(device: torch.device) -> dict[str, Any]:
    """Where and when a number was measured."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
        "torch": torch.__version__,
        "device": "CPU",
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.split("\n")[0].strip() or None


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}
