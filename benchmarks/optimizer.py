"""Clipping and the optimizer of one rank of many, against the time that their bytes take.

    python3 -m benchmarks.optimizer --row 7B --world 64 --out runs/optimizer.jsonl

AdamW reads weight, gradient and two states of every element this rank owns and writes all but the
gradient: 28 bytes. Clipping reads every gradient for the norm, and reads and writes it to scale it:
12 bytes. The bound is these bytes over what one large copy moves per second. Kernels are counted in
a profile; whether the host waits for the device is asked of torch.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from benchmarks import emulation, models, wire
from benchmarks.emulation import Network, Traffic
from benchmarks.measure import environment
from benchmarks.trainers import Job, Trainer, running
from benchmarks.variants import Variant

_BYTES = {"clip": 12, "optimizer": 28}
_GOAL = 1.5
_AHEAD = 50  # fills of 256 MiB, 3 ms
_TINY = 1e-30  # a bound that gradients exceed however often they were scaled to it
_SEQUENCE = 128  # of the backward that makes the gradients


def copied_per_second(device: torch.device) -> float:
    """Bytes that a large copy reads and writes in a second."""
    if device.type == "cuda":
        return wire.bandwidth()
    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    start = time.perf_counter()
    target.copy_(source)
    return 2 * source.nbytes / (time.perf_counter() - start)


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, on the device where there is one."""
    times = []
    if device.type == "cuda":
        ahead = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        for _ in range(repeats):
            for _ in range(_AHEAD):  # the host is ahead of the device, as in training
                ahead.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def kernels_of(function: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Names and numbers of kernels, copies and fills on the device, collectives left out."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    found: dict[str, int] = {}
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA and "emulated" not in event.name:
            found[event.name] = found.get(event.name, 0) + 1
    return found


def host_waits(function: Callable[[], object], device: torch.device) -> bool:
    """Whether the call makes the host wait for the device."""
    if device.type != "cuda":
        return False
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _record(
    part: str, function: Callable[[], None], owned: int, rate: float, traffic: Traffic, job: Job
) -> dict[str, Any]:
    for _ in range(2):
        function()
    traffic.reset()
    function()
    calls = dict(traffic.calls)
    launched = kernels_of(function, job.device)
    taken = milliseconds(function, job.device, 10)
    bound = 1e3 * _BYTES[part] * owned / rate
    return {
        "ms": taken,
        "bound_ms": bound,
        "ratio": taken / bound,
        "kernels": sum(launched.values()) if launched else None,
        "kernel_names": {name[:60]: count for name, count in launched.items()},
        "collectives": calls,
        "host_waits": host_waits(function, job.device),
    }


def measure(job: Job, variant: Variant, rate: float) -> dict[str, Any]:
    """Both parts, alone and together, of a model that has gradients."""
    traffic = emulation.start(job.world, Network())
    with running(job, variant) as trainer:
        trainer.step()  # its gradients stay until the next one
        owned = -(-sum(models.unit_elements(job.config)) // job.world)
        parts: dict[str, Callable[[], None]] = {
            "clip": functools.partial(trainer.clip, _TINY),
            "optimizer": trainer.update,
        }
        record = {
            part: _record(part, run, owned, rate, traffic, job) for part, run in parts.items()
        }
        tensors = _tensors(trainer)
    total = sum(part["ms"] for part in record.values())
    bound = sum(part["bound_ms"] for part in record.values())
    return {
        **record,
        "owned": owned,
        "tensors": tensors,
        "ms": total,
        "bound_ms": bound,
        "ratio": total / bound,
        "under_goal": total / bound < _GOAL,
    }


def _tensors(trainer: Trainer) -> int:
    return sum(len(group["params"]) for group in trainer.optimizer.param_groups)


def line_of(record: dict[str, Any]) -> str:
    """What is printed of a record."""
    parts = [f"{record['implementation']:<12} {record['tensors']} tensors,"]
    for part in _BYTES:
        found = record[part]
        waits = ", host waits" if found["host_waits"] else ""
        parts.append(
            f"{part} {found['ms']:.3f} ms ({found['ratio']:.2f} of the bound, "
            f"{found['kernels']} kernels, {found['collectives']}{waits}),"
        )
    return " ".join([*parts, f"together {record['ratio']:.2f} of the bound"])


def main(
    row: Annotated[str, typer.Option(help="Model.")] = "7B",
    world: Annotated[int, typer.Option(help="Ranks of the job.")] = 64,
    impls: Annotated[str, typer.Option(help="Implementations.")] = "ours@flat ours fsdp2",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
) -> None:
    """Measure and print."""
    where = torch.device(device, 0 if device == "cuda" else None)
    job = Job(models.config_of(row), 1, _SEQUENCE, world, where)
    rate = copied_per_second(where)
    typer.echo(f"a large copy moves {rate / 1e9:.0f} GB/s")
    for label in impls.split():
        record = {
            **environment(where),
            "optimizer_row": row,
            "world": world,
            "implementation": label,
            "copied_gb_per_s": rate / 1e9,
            **measure(job, Variant.parse(label), rate),
        }
        typer.echo(line_of(record))
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    emulation.stop()


if __name__ == "__main__":
    typer.run(main)
