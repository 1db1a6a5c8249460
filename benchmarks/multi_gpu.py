"""Ours, FSDP2, DDP and no sharding on all GPUs of one host, over NCCL.

    torchrun --standalone --nproc_per_node gpu -m benchmarks.multi_gpu --out runs/multi_gpu.jsonl

Losses come first: ten steps in fp32 of a small model, every rank with data of its own, must equal
FSDP2's in every way of sharding and communicating. Then each row (`model:sequence`) is timed, and
traced on the first rank for the communication that no compute hides. A row that fails says why and
the next one runs; rows that would begin after `--minutes` are left out and named.

With `--one-gpu` all ranks share the first GPU, which shows that all of it works where there is no
second one (the times then compare nothing); `--device cpu` does the same over gloo:

    torchrun --standalone --nproc_per_node 4 -m benchmarks.multi_gpu --one-gpu --rows tiny:128

NVLink multicast stays off (`NCCL_NVLS_ENABLE=0`) unless the environment says otherwise.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import models, trace
from benchmarks.emulation import Traffic
from benchmarks.measure import Sample, environment, measure
from benchmarks.trainers import Job, running
from benchmarks.variants import Variant

_TIMEOUT = datetime.timedelta(seconds=90)
_SAME = 1e-5  # largest relative difference of fp32 losses that is rounding
_LOSSES = (
    "fsdp2 ours ours@flat ours@flat+fused ours@hpz ours@hsdp ours@symmetric ours@ncclbuffers "
    "ours@flat+capture ddp"
)
_IMPLS = (
    "plain ddp fsdp2 ours@flat ours@flat+fused+set_communication_sms=8 ours@flat+symmetric "
    "ours@flat+ncclbuffers ours@flat+capture ours@hpz fsdp2@hpz ours@flat+hsdp fsdp2@hsdp"
)


def join(device: str, one_gpu: bool) -> torch.device:
    """Enter the process group that torchrun describes.

    Raises:
        typer.BadParameter: There are fewer GPUs than ranks, and they were not asked to share one.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        return torch.device("cpu")
    if one_gpu:
        # NCCL refuses two ranks on one GPU of one host, so each claims a host of its own.
        os.environ |= {"NCCL_HOSTID": f"rank-{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        local = 0
    elif torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        raise typer.BadParameter(
            f"{os.environ['LOCAL_WORLD_SIZE']} ranks and {torch.cuda.device_count()} GPUs: start "
            "with --nproc_per_node gpu, or let all share one with --one-gpu"
        )
    where = torch.device("cuda", local)
    torch.cuda.set_device(where)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_TIMEOUT)
    return where


def losses(job: Job, variant: Variant, steps: int = 10) -> dict[str, Any]:
    """Mean losses over the ranks of a few steps in fp32."""
    found = []
    with running(job, variant) as trainer:
        for _ in range(steps):
            trainer.step()
            assert trainer.loss is not None
            mean = trainer.loss.float().cpu()
            dist.all_reduce(mean)
            found.append(mean.item() / job.world)
    return {"losses": found}


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest difference relative to the second."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def timed(job: Job, variant: Variant, steps: int) -> dict[str, Any]:
    """Step time, tokens per second, peak memory and exposed communication of one variant."""
    with running(job, variant) as trainer:
        sample: Sample = measure(trainer, Traffic(), warmup=3, steps=steps)
        with tempfile.TemporaryDirectory() as folder:
            # Every rank takes part in the traced steps and reads its own trace; one is reported.
            on_gpu = job.device.type == "cuda"
            reading = trace.record(trainer, Path(folder) / "step.json") if on_gpu else None
    milliseconds = statistics.median(sample.steps)
    ranks = 1 if variant.implementation == "plain" else job.world
    return {
        "step_ms": milliseconds,
        "tokens_per_second": 1e3 * ranks * job.batch * job.sequence / milliseconds,
        "allocated_gib": sample.allocated,
        "reserved_gib": sample.reserved,
        "exposed_ms": reading.exposed if reading else None,
        "communication_ms": reading.communication if reading else None,
    }


class Report:
    """Rows of the first rank, on the screen and as JSON lines."""

    def __init__(self, device: torch.device, one_gpu: bool, out: Path | None) -> None:
        self.leads = dist.get_rank() == 0
        self.records: list[dict[str, Any]] = []
        self._out = out
        self._common = {
            **environment(device),
            "ranks": dist.get_world_size(),
            "one_gpu": one_gpu,
        }

    def add(self, row: str, label: str, found: dict[str, Any]) -> None:
        """Keep a row, say it, and append it to the file."""
        record = {**self._common, "row": row, "implementation": label, **found}
        self.records.append(record)
        if not self.leads:
            return
        typer.echo(f"{row} {label}: " + ", ".join(f"{k} {_short(v)}" for k, v in found.items()))
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with self._out.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def show(self) -> None:
        """Print the timed rows as one table."""
        if not self.leads:
            return
        table = Table(title=f"{self._common['ranks']} ranks, {self._common['device']}")
        names = ("step_ms", "exposed_ms", "tokens_per_second", "allocated_gib", "reserved_gib")
        for name in ("row", "implementation", *names):
            table.add_column(name)
        for record in self.records:
            if "step_ms" in record:
                cells = [_short(record[name]) for name in names]
                table.add_row(record["row"], record["implementation"], *cells)
        Console(width=120).print(table)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)[:300]


def _attempt(
    report: Report, row: str, label: str, run: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """What `run` returns, or `None` and a row that says why there is nothing."""
    found: dict[str, Any] = {}
    try:
        found = run()
    except Exception as error:  # an implementation that fails must not end the others' rows
        found = {"error": f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found.get("error"))
    failures = [error for error in everywhere if error]
    if failures:
        found = {"error": failures[0]}
    report.add(row, label, found)
    return None if failures else found


def check_losses(
    report: Report, device: torch.device, impls: Sequence[str], deadline: float
) -> int:
    """Compare ten losses of every variant with the first one's; returns how many are apart."""
    config = models.config_of("tiny")
    job = Job(config, 1, 64, dist.get_world_size(), device, exact=True)
    reference: list[float] = []
    apart = 0
    for label in impls:
        if _late(deadline):
            report.add("losses", label, {"left_out": "no time left"})
            continue
        run = functools.partial(losses, job, Variant.parse(label))
        found = _attempt(report, "losses", label, run)
        if found is None:
            continue
        reference = reference or found["losses"]
        apart_by = difference(found["losses"], reference)
        apart += apart_by > _SAME
        report.add("difference", label, {"relative": apart_by, "same": apart_by <= _SAME})
    return apart


def _late(deadline: float) -> bool:
    """Whether the first rank's clock has passed the deadline: all ranks have to agree."""
    late = torch.tensor(int(time.monotonic() > deadline))
    dist.broadcast(late, src=0)
    return bool(late.item())


def main(
    rows: Annotated[str, typer.Option(help="model:sequence, separated by spaces.")] = "1B:2048 "
    "7B:2048",
    impls: Annotated[str, typer.Option(help="Implementations to time.")] = _IMPLS,
    same: Annotated[str, typer.Option(help="Implementations whose losses must agree.")] = _LOSSES,
    steps: Annotated[int, typer.Option(help="Measured steps.")] = 5,
    batch: Annotated[int, typer.Option(help="Sequences per rank and step.")] = 1,
    device: Annotated[str, typer.Option(help="cuda, or cpu for gloo.")] = "cuda",
    one_gpu: Annotated[bool, typer.Option(help="All ranks share the first GPU.")] = False,
    minutes: Annotated[float, typer.Option(help="No row begins after this.")] = 7.0,
    out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
) -> None:
    """Check losses, then time; exits with 1 when any losses differ by more than rounding."""
    deadline = time.monotonic() + 60 * minutes
    torch.backends.cuda.matmul.allow_tf32 = False
    where = join(device, one_gpu)
    report = Report(where, one_gpu, out)
    apart = check_losses(report, where, same.split(), deadline)
    for row in rows.split():
        model, _, sequence = row.partition(":")
        job = Job(models.config_of(model), batch, int(sequence), dist.get_world_size(), where)
        for label in impls.split():
            if _late(deadline):
                report.add(row, label, {"left_out": "no time left"})
                continue
            variant = Variant.parse(label)
            _attempt(report, row, label, functools.partial(timed, job, variant, steps))
    report.show()
    dist.barrier()
    dist.destroy_process_group()
    if apart:
        typer.echo(f"{apart} implementations' losses differ by more than rounding", err=True)
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
