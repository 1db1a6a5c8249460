"""Memory of a step against what it must be, and the cost of sharding one large unit.

    python3 -m benchmarks.memory --row 7B:2048 --out runs/memory.jsonl

Expected peak = shards (master and two optimizer states in fp32) + gather slots + the larger of two
moments: activations at their peak, or activations and one unit's gradients when its backward ends
+ the gradient slot that they move into (with `fused` the slot is there during the whole backward
of its unit, and this is too little). Activations are measured, not computed: what the unsharded
bf16 model allocates in the same step beside its weights and its optimizer. The second part shards
one unit of 200 M elements and gives the bytes and the host time that took.
"""

from __future__ import annotations

import functools
import gc
import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks import emulation, models
from benchmarks.emulation import Network
from benchmarks.measure import environment
from benchmarks.trainers import Job, Trainer, running
from benchmarks.variants import Variant

_GIB = 1 << 30


def _peak(trainer: Trainer, steps: int) -> tuple[int, int]:
    """Peak allocated and reserved bytes of steps in the steady state."""
    for _ in range(3):
        trainer.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        trainer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def activations(job: Job) -> tuple[int, int]:
    """Bytes of a step of the unsharded model beside its weights and its optimizer.

    Gradients are dropped at the end of their unit's backward, as where they are reduced there.

    Returns:
        The peak of the step, and the most that is alive, the unit's gradients included, when any
        unit's backward ends.
    """
    with running(job, Variant.parse("plain")) as trainer:
        trainer.step()
        torch.cuda.synchronize()
        trainer.model.zero_grad()
        before = torch.cuda.memory_allocated()
        ends: list[int] = []
        for unit in trainer.model.units():
            modules = unit if isinstance(unit, list) else [unit]
            modules[0].register_forward_pre_hook(functools.partial(_watch, ends, modules))
        peak, _ = _peak(trainer, 2)
        return peak - before, max(ends) - before


def _watch(ends: list[int], unit: list[nn.Module], first: nn.Module, args: tuple[Any, ...]) -> None:
    def backward_ended(_: torch.Tensor) -> None:
        ends.append(torch.cuda.memory_allocated())
        for module in unit:
            module.zero_grad()

    if args[0].requires_grad:
        args[0].register_hook(backward_ended)


def expected(job: Job, trainer: Trainer) -> dict[str, int]:
    """What the sharded model has to hold, by kind."""
    from ya_fsdp import persistent_buffers

    shard = sum(p.to_local().numel() for p in trainer.model.parameters())
    buffers = persistent_buffers(trainer.model)
    slots = sum(b.untyped_storage().nbytes() for b in buffers if b.dtype == torch.uint8)
    return {
        "shards": 12 * shard,  # gradients come with the first reduction, after the peak
        "gather_slots": slots,
        "gradient_slots": max(models.unit_elements(job.config)) * 4,
    }


def step_memory(row: str, world: int, label: str) -> dict[str, Any]:
    """One row: measured peaks and what they are made of, GiB."""
    name, sequence = row.split(":")
    config = models.config_of(name)
    job = Job(config, 1, int(sequence), world, torch.device("cuda", 0))
    emulation.start(world, Network())
    with running(job, Variant.parse(label)) as trainer:
        allocated, reserved = _peak(trainer, 3)
        parts = expected(job, trainer)
    peak, at_unit_end = activations(job)
    parts |= {"activations": peak, "activations_at_unit_end": at_unit_end}
    held = parts["shards"] + parts["gather_slots"]
    total = held + max(peak, at_unit_end + parts["gradient_slots"])
    return {
        **environment(job.device),
        "row": row,
        "world": world,
        "implementation": label,
        "allocated_gib": allocated / _GIB,
        "reserved_gib": reserved / _GIB,
        "expected_gib": total / _GIB,
        "parts_gib": {k: v / _GIB for k, v in parts.items()},
        "allocated_over_expected": allocated / total,
        "reserved_over_allocated": reserved / allocated,
    }


def sharding_cost(world: int, device: torch.device, numel: int = 200_000_000) -> dict[str, Any]:
    """Bytes beyond the unit's own and host seconds that `fully_shard` takes for one large unit."""
    from ya_fsdp import fully_shard

    emulation.start(world, Network())
    width = 1 << 12
    rows = max(1, numel // (10 * width))
    on_gpu = device.type == "cuda"
    module = nn.Sequential(*(nn.Linear(width, rows, bias=False, device=device) for _ in range(10)))
    own = sum(p.nbytes for p in module.parameters())
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    start = time.perf_counter()
    fully_shard(module)
    seconds = time.perf_counter() - start
    if on_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return {
        **environment(device),
        "sharded_elements": own // 4,
        "extra_over_own": (peak - before) / own if on_gpu else None,
        "host_ms": 1e3 * seconds,
    }


def main(
    row: Annotated[str, typer.Option(help="model:sequence.")] = "7B:2048",
    world: Annotated[int, typer.Option(help="Ranks of the job.")] = 64,
    impl: Annotated[str, typer.Option(help="Variant of ours.")] = "ours@flat",
    device: Annotated[str, typer.Option(help="cuda, or cpu for the second part only.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
) -> None:
    """Measure and print."""
    where = torch.device(device, 0 if device == "cuda" else None)
    records = [step_memory(row, world, impl)] if device == "cuda" else []
    records.append(sharding_cost(world, where))
    for record in records:
        typer.echo(json.dumps({k: v for k, v in record.items() if k not in ("torch", "cuda")}))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    emulation.stop()


if __name__ == "__main__":
    typer.run(main)
