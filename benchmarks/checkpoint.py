"""Saving and loading one rank of a large job: time, and memory beyond what training holds.

    python3 -m benchmarks.checkpoint --row 7B:2048 --world 64 --out runs/checkpoint.jsonl

This process is rank 0, the rank with most to do, of an emulated job: it makes the plan of all ranks
out of theirs, and writes and reads its own pieces. After one training step it runs

    save         checkpoint.save, model and AdamW's state, files synced to disk
    async_save   how long training waits, and until the end in the background
    load         checkpoint.load into zeroed memory, with checksums; compared bit by bit
    full         get_full_state_dict on CPU and load_full_state_dict (`--full`)

`device_extra` and `host_extra` are peaks above the beginning of the call. Goals: planning under
2 s, no copy of the whole shard on the device, on the host at most the shard and one unit; a full
state dict holds one unit on the device beside the training state. With `--device cpu` device memory
is host memory and only the host's is reported.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks import emulation, models
from benchmarks.absent_peers import Exchange, absent_peers
from benchmarks.emulation import Network
from benchmarks.measure import environment
from benchmarks.trainers import Job, Trainer, running
from benchmarks.variants import Variant
from ya_fsdp import checkpoint

_PAGE = os.sysconf("SC_PAGE_SIZE")


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class _Watch:
    """Seconds and peaks of a block: the device's allocated bytes, the host's resident ones."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.record: dict[str, Any] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        gc.collect()
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before_device = torch.cuda.memory_allocated() if self._on_gpu else 0
        before_host = peak = _resident()
        ended = threading.Event()

        def sample() -> None:
            nonlocal peak
            while not ended.wait(0.002):
                peak = max(peak, _resident())

        sampler = threading.Thread(target=sample)
        sampler.start()
        start = time.perf_counter()
        try:
            yield
            if self._on_gpu:
                torch.cuda.synchronize()
        finally:
            seconds = time.perf_counter() - start
            ended.set()
            sampler.join()
        self.record[f"{name}_s"] = seconds
        self.record[f"{name}_host_extra"] = max(peak, _resident()) - before_host
        if self._on_gpu:
            self.record[f"{name}_device_extra"] = torch.cuda.max_memory_allocated() - before_device


def _pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything that this rank owns of model and optimizer."""
    values: list[Any] = list(model.parameters())
    values += [v for state in optimizer.state.values() for v in state.values()]
    return [getattr(v, "_local_tensor", v).detach() for v in values if isinstance(v, Tensor)]


def _save(trainer: Trainer, folder: Path, watch: _Watch, exchange: Exchange) -> None:
    with watch("save"):
        checkpoint.save(folder, trainer.model, trainer.optimizer, step=1)
    watch.record["save_s"] -= exchange.untimed
    watch.record["save_planning_s"] = exchange.planning.pop()
    exchange.untimed = 0.0


def _async_save(trainer: Trainer, folder: Path, watch: _Watch, exchange: Exchange) -> None:
    with watch("async_save"):
        start = time.perf_counter()
        pending = checkpoint.async_save(
            folder, trainer.model, trainer.optimizer, step=2, keep_last=1
        )
        watch.record["async_save_waiting_s"] = time.perf_counter() - start
        pending.result()
    watch.record["async_save_s"] -= exchange.untimed
    exchange.planning.clear()
    exchange.untimed = 0.0


def _load(trainer: Trainer, folder: Path, watch: _Watch, exchange: Exchange) -> None:
    pieces = _pieces(trainer.model, trainer.optimizer)
    expected = [piece.to("cpu", copy=True) for piece in pieces]
    for piece in pieces:
        piece.zero_()
    with watch("load"):
        checkpoint.load(folder, trainer.model, trainer.optimizer)
    watch.record["load_planning_s"] = exchange.planning.pop()
    loaded = _pieces(trainer.model, trainer.optimizer)
    same = [torch.equal(a, b.cpu()) for a, b in zip(expected, loaded, strict=True)]
    watch.record["restored"] = all(same)


def _full(trainer: Trainer, watch: _Watch) -> None:
    with watch("get_full"):
        full = checkpoint.get_full_state_dict(trainer.model)
    with watch("load_full"):
        checkpoint.load_full_state_dict(trainer.model, full)


def measure(job: Job, row: str, label: str, folder: Path, *, full: bool) -> dict[str, Any]:
    """One record; bytes and seconds."""
    emulation.start(job.world, Network())
    watch = _Watch(job.device)
    with running(job, Variant.parse(label)) as trainer, absent_peers(job.world) as exchange:
        trainer.step()
        trainer.optimizer.zero_grad()
        shard = sum(piece.nbytes for piece in _pieces(trainer.model, trainer.optimizer))
        _save(trainer, folder, watch, exchange)
        _async_save(trainer, folder, watch, exchange)
        _load(trainer, folder, watch, exchange)
        if full:
            _full(trainer, watch)
    unit = 4 * max(models.unit_elements(job.config))
    record = {
        **environment(job.device),
        "row": row,
        "world": job.world,
        "implementation": label,
        "shard": shard,
        "unit": unit,
        **watch.record,
    }
    return {**record, "goals": _goals(record)}


def _goals(record: dict[str, Any]) -> dict[str, bool]:
    """Which of the goals are reached."""
    shard, unit = record["shard"], record["unit"]
    planning = max(record["save_planning_s"], record["load_planning_s"])
    goals = {"planning_below_2_s": planning < 2.0, "restored": record["restored"]}
    calls = ("save", "async_save", "load")
    goals["host_at_most_shard_and_unit"] = all(
        record[f"{call}_host_extra"] <= shard + unit for call in calls
    )
    if "save_device_extra" in record:
        goals["no_copy_of_the_shard_on_the_device"] = all(
            record[f"{call}_device_extra"] < shard / 2 for call in calls
        )
    if "get_full_device_extra" in record:
        goals["full_state_dict_within_one_unit"] = all(
            record[f"{call}_device_extra"] <= unit * 1.05 for call in ("get_full", "load_full")
        )
    return goals


def main(
    row: Annotated[str, typer.Option(help="model:sequence.")] = "7B:2048",
    world: Annotated[int, typer.Option(help="Ranks of the job.")] = 64,
    impl: Annotated[str, typer.Option(help="Variant of ours.")] = "ours",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    folder: Annotated[Path | None, typer.Option(help="Where to save; a temporary one.")] = None,
    full: Annotated[bool, typer.Option(help="Full state dicts as well.")] = False,
    out: Annotated[Path | None, typer.Option(help="Append a JSON line here.")] = None,
) -> None:
    """Measure and print."""
    name, sequence = row.split(":")
    where = torch.device(device, 0 if device == "cuda" else None)
    job = Job(models.config_of(name), 1, int(sequence), world, where)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        record = measure(job, row, impl, Path(place), full=full)
    emulation.stop()
    typer.echo(json.dumps(record, indent=1))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    typer.run(main)
