"""Host time per group and step, over an emulated network that costs nothing.

    python3 -m benchmarks.host
    python3 -m benchmarks.host --profile "fsdp2 ours"

The model is 96 narrow layers, so that Python is what limits it; on a CPU the layers are narrower
still, since compute there is host time too. Totals are measured without instrumentation; the split
by phase comes from a second pass in which the implementation's hooks are timed (a call inside
another one is counted once, where it happens), and the backward runs on the calling thread.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import gc
import importlib
import io
import itertools
import json
import pstats
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks import emulation, models
from benchmarks.measure import environment
from benchmarks.trainers import Job, Trainer, running
from benchmarks.variants import UnavailableError, Variant

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_EMULATED = "benchmarks.emulation"

# Module, function or Class.method, phase. What does not exist in an installed version is skipped.
_PLACES: dict[str, list[tuple[str, str, str]]] = {
    "fsdp2": [
        (_STATE, "FSDPState._root_pre_forward", "root"),
        (_STATE, "FSDPState._root_post_backward_final_callback", "root"),
        (_STATE, "FSDPState._pre_forward", "pre-forward"),
        (_STATE, "FSDPState._post_forward", "post-forward"),
        (_STATE, "FSDPState._pre_backward", "pre-backward"),
        (_GROUP, "FSDPParamGroup.post_backward", "post-backward"),
    ],
    "ours": [
        ("ya_fsdp.schedule", "Schedule.begin_iteration", "root"),
        ("ya_fsdp.schedule", "Schedule.end_backward_pass", "root"),
        ("ya_fsdp.hooks", "pre_forward", "pre-forward"),
        ("ya_fsdp.schedule", "Schedule.pre_forward", "pre-forward"),
        ("ya_fsdp.hooks", "post_forward", "post-forward"),
        ("ya_fsdp.schedule", "Schedule.post_forward", "post-forward"),
        ("ya_fsdp.schedule", "Schedule.pre_backward", "pre-backward"),
        ("ya_fsdp.schedule", "Schedule.try_end_backward", "post-backward"),
        ("ya_fsdp.schedule", "Schedule.end_backward", "post-backward"),
        ("ya_fsdp.reducer", "Reducer.reduce", "post-backward"),
        ("ya_fsdp.gradients", "*", "gradients"),
    ],
}
_COLLECTIVES = [
    (_EMULATED, f"EmulatedGroup.{name}", "collectives")
    for name in (
        "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single",
        "allreduce",
    )
]  # fmt: skip


class Phases:
    """Time spent in each phase itself, calls of other phases taken out."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inner: list[float] = []

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its own time added to `phase`."""
        clock, inner = time.perf_counter, self._inner

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                whole = clock() - start
                own = whole - inner.pop()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + own
                self.calls[phase] = self.calls.get(phase, 0) + 1
                if inner:
                    inner[-1] += whole

        return wrapper


def _targets(module: Any, name: str) -> list[tuple[Any, str]]:
    """Owners and attribute names that a name of `_PLACES` stands for."""
    if name == "*":
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        return [
            (owner, attribute)
            for owner in classes
            for attribute, value in vars(owner).items()
            if callable(value)
            and (not attribute.startswith("__") or attribute == "__call__")
            and not isinstance(value, (type, staticmethod, classmethod))
        ]
    owner_name, _, attribute = name.rpartition(".")
    owner = getattr(module, owner_name, None) if owner_name else module
    return [(owner, attribute)] if owner is not None and hasattr(owner, attribute) else []


@contextlib.contextmanager
def instrumented(implementation: str, phases: Phases) -> Iterator[None]:
    """Time the implementation's hooks inside the block; models have to be built in it too."""
    undo: list[tuple[Any, str, Any]] = []
    package = implementation if implementation != "ours" else "ya_fsdp"
    for module_name, name, phase in [*_PLACES.get(implementation, []), *_COLLECTIVES]:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for owner, attribute in _targets(module, name):
            original = getattr(owner, attribute)
            wrapped = phases.timed(phase, original)
            owners = [owner]
            if owner is module:
                # A function may have been imported by name elsewhere in its package.
                owners += [
                    other
                    for key, other in list(sys.modules.items())
                    if key.startswith(package)
                    and getattr(other, attribute, None) is original
                    and other is not module
                ]
            for place in owners:
                undo.append((place, attribute, original))
                setattr(place, attribute, wrapped)
    try:
        yield
    finally:
        for owner, attribute, original in reversed(undo):
            setattr(owner, attribute, original)


@dataclass
class HostTimes:
    """Milliseconds of Python per step."""

    total: float
    parts: dict[str, float]
    phases: dict[str, float]
    phase_calls: dict[str, float]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _timed_steps(trainer: Trainer, steps: int) -> tuple[float, dict[str, float]]:
    """The quickest step, and the quickest of each of its parts."""
    # On a CPU the process's own time, which other processes on the machine do not disturb.
    clock = time.perf_counter if trainer.job.device.type == "cuda" else time.process_time
    totals: list[float] = []
    parts: dict[str, list[float]] = {}
    points: list[tuple[str, float]] = []
    trainer.mark = lambda part: points.append((part, clock()))
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            _synchronize(trainer.job.device)
            points.clear()
            start = clock()
            trainer.step()
            totals.append((clock() - start) * 1e3)
            for (part, begin), (_, end) in itertools.pairwise(points):
                parts.setdefault(part, []).append((end - begin) * 1e3)
    finally:
        gc.enable()
    trainer.mark = lambda part: None
    return min(totals), {part: min(times) for part, times in parts.items()}


def measure_host(job: Job, variant: Variant, steps: int, warmup: int) -> HostTimes:
    """Host time of one implementation, then its split by phase."""
    emulation.start(job.world)
    with running(job, variant) as trainer:
        for _ in range(warmup):
            trainer.step()
        total, parts = _timed_steps(trainer, steps)
    phases = Phases()
    if variant.implementation not in _PLACES:
        return HostTimes(total, parts, {}, {})
    emulation.start(job.world)
    with (
        instrumented(variant.implementation, phases),
        torch.autograd.set_multithreading_enabled(False),
        running(job, variant) as trainer,
    ):
        for _ in range(warmup):
            trainer.step()
        phases.reset()
        for _ in range(steps):
            _synchronize(job.device)
            trainer.step()
    per_step = 1e3 / steps
    return HostTimes(
        total,
        parts,
        {phase: seconds * per_step for phase, seconds in phases.seconds.items()},
        {phase: calls / steps for phase, calls in phases.calls.items()},
    )


def profile(job: Job, variant: Variant, steps: int, warmup: int, top: int = 20) -> str:
    """Functions by their own time over some steps, as text."""
    emulation.start(job.world)
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False), running(job, variant) as trainer:
        for _ in range(warmup):
            trainer.step()
        _synchronize(job.device)
        profiler.enable()
        for _ in range(steps):
            trainer.step()
        profiler.disable()
        _synchronize(job.device)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(top)
    return text.getvalue()


def collective_cost(device: torch.device, world: int, calls: int = 300) -> float:
    """Microseconds of host time of one small gather by way of c10d: what emulation itself costs."""
    emulation.start(world)
    output = torch.zeros(world * 8, device=device)
    source = torch.zeros(8, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(10):
            gather(output, source)
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            gather(output, source)
        spent = time.perf_counter() - start
    _synchronize(device)
    return spent / calls * 1e6


def _record(
    job: Job, variant: Variant, times: HostTimes, plain: HostTimes | None, groups: int
) -> dict[str, Any]:
    record: dict[str, Any] = {
        **environment(job.device),
        "host": True,
        "implementation": variant.label,
        "layers": job.config.layers,
        "width": job.config.width,
        "sequence": job.sequence,
        "world": job.world,
        "groups": groups,
        "host_ms": times.total,
        "parts_ms": times.parts,
        "phases_ms": times.phases,
        "phase_calls": times.phase_calls,
    }
    if plain is not None:
        record["per_group_ms"] = (times.total - plain.total) / groups
        passes = [
            sum(t.parts.get(part, 0.0) for part in ("forward", "backward")) for t in (times, plain)
        ]
        record["per_group_passes_ms"] = (passes[0] - passes[1]) / groups
        record["ratio_to_plain"] = times.total / plain.total
    return record


def _print(record: dict[str, Any]) -> None:
    ratio, group = record.get("ratio_to_plain"), record.get("per_group_ms")
    line = f"{record['implementation']:<22} {record['host_ms']:>8.1f} ms"
    if ratio is not None and group is not None:
        passes = record["per_group_passes_ms"]
        line += (
            f" {ratio:>6.2f} of plain, per group {group:.3f} ms ({passes:.3f} without optimizer)"
        )
    typer.echo(line)
    for title, key in (("parts", "parts_ms"), ("phases", "phases_ms")):
        if record[key]:
            text = ", ".join(f"{name} {value:.2f}" for name, value in record[key].items())
            typer.echo(f"    {title}: {text}")


def main(
    impls: Annotated[str, typer.Option(help="Implementations.")] = "plain fsdp2 ours",
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one.")] = "",
    model: Annotated[str, typer.Option(help="Model of benchmarks/models.py.")] = "narrow",
    sequence: Annotated[int | None, typer.Option(help="Tokens; 256, or 8 on a CPU.")] = None,
    width: Annotated[int | None, typer.Option(help="Scale to this width; 32 on a CPU.")] = None,
    layers: Annotated[int | None, typer.Option(help="Depth, if not the model's own.")] = None,
    world: Annotated[int, typer.Option(help="Ranks of the emulated job.")] = 64,
    steps: Annotated[int, typer.Option(help="Measured steps.")] = 5,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 3,
    profile_of: Annotated[
        str, typer.Option("--profile", help="Implementations to profile, top 20 functions.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
) -> None:
    """Measure host time and print its split."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
        width = width or 32
    config = models.config_of(model, layers=layers, width=width)
    where = torch.device(device) if on_cpu else torch.device(device, 0)
    job = Job(config, 1, sequence or (8 if on_cpu else 256), world, where)
    groups = len(models.unit_elements(config))
    cost = collective_cost(where, world)
    typer.echo(
        f"{model}: {config.layers} layers of {config.width}, {job.sequence} tokens, "
        f"{groups} groups, world {world}; one emulated collective costs {cost:.1f} us"
    )
    plain: HostTimes | None = None
    for text in impls.split():
        variant = Variant.parse(text)
        try:
            times = measure_host(job, variant, steps, warmup)
        except UnavailableError as error:
            typer.echo(f"{text:<22} {error}")
            continue
        if variant.implementation == "plain":
            plain = times
        record = _record(job, variant, times, plain, groups) | {"collective_us": cost}
        _print(record)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    for text in profile_of.split():
        typer.echo(f"--- {text}\n" + profile(job, Variant.parse(text), steps, warmup))
    emulation.stop()


if __name__ == "__main__":
    typer.run(main)
