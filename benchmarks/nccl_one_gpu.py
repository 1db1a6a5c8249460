"""Several real NCCL ranks on one GPU: nothing emulated, ours against FSDP2.

    python3 -m benchmarks.nccl_one_gpu --worlds "2 4 8"

NCCL refuses two ranks of one communicator on one device of one host; a host name of its own for
every rank (`NCCL_HOSTID`) and the loopback interface get around that. The network is then far
slower than any real one, so the times only compare implementations with each other.
`--device cpu` does the same over gloo.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import models
from benchmarks.measure import environment

_PACKAGES = {"fsdp2": "torch.distributed.fsdp", "ours": "ya_fsdp"}
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Experiment:
    """What every rank does."""

    world: int
    device: str
    layers: int
    width: int
    sequence: int
    steps: int
    bf16: bool
    packages: tuple[str, ...]
    port: int


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _join(rank: int, experiment: Experiment) -> torch.device:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(experiment.port)}
    if experiment.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=experiment.world)
        return torch.device("cpu")
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=experiment.world)
    return device


def _build(name: str, experiment: Experiment, device: torch.device) -> torch.nn.Module:
    package: Any = importlib.import_module(_PACKAGES[name])
    config = models.config_of("narrow", layers=experiment.layers, width=experiment.width)
    model = models.on_meta(config)
    # Whole, and the same on every rank: the two cut it differently, so shards cannot be drawn.
    models.materialise(model, device)
    mesh = init_device_mesh(device.type, (experiment.world,), mesh_dim_names=("fsdp",))
    compute = torch.bfloat16 if experiment.bf16 else None
    policy = package.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for unit in model.units():
        package.fully_shard(unit, mesh=mesh, mp_policy=policy)
    package.fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _train(
    model: torch.nn.Module, rank: int, experiment: Experiment, device: torch.device
) -> tuple[list[float], list[float]]:
    """Mean losses over the ranks, and milliseconds, by step."""
    config = models.config_of("narrow", layers=experiment.layers, width=experiment.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (2, 1, experiment.sequence)
    losses, times = [], []
    for _ in range(experiment.steps):
        data = torch.randint(config.vocabulary, shape, generator=generator).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        loss = model(data[0], data[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / experiment.world)
    return losses, times


def _worker(rank: int, experiment: Experiment, results: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    device = _join(rank, experiment)
    for name in experiment.packages:
        model = _build(name, experiment, device)
        losses, times = _train(model, rank, experiment, device)
        del model
        if rank == 0:
            results.put((name, losses, times))
    dist.destroy_process_group()


def compare(experiment: Experiment) -> dict[str, Any]:
    """Run one experiment in processes of its own.

    Returns:
        Losses and step times by implementation, the largest difference of the losses relative to
        their size, and the ratio of the median times after the first two steps.
    """
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_worker, (experiment, results), nprocs=experiment.world)
    found: dict[str, Any] = {"losses": {}, "ms": {}}
    while not results.empty():
        name, losses, times = results.get()
        found["losses"][name], found["ms"][name] = losses, times
    if {"fsdp2", "ours"} <= found["losses"].keys():
        pairs = list(zip(found["losses"]["fsdp2"], found["losses"]["ours"], strict=True))
        found["difference"] = max(abs(a - b) / abs(a) for a, b in pairs)
        medians = {name: statistics.median(times[2:]) for name, times in found["ms"].items()}
        found["ratio"] = medians["ours"] / medians["fsdp2"]
    return found


def main(
    worlds: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2 4 8",
    device: Annotated[str, typer.Option(help="cuda (NCCL) or cpu (gloo).")] = "cuda",
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 8,
    width: Annotated[int, typer.Option(help="Their width.")] = 256,
    sequence: Annotated[int, typer.Option(help="Tokens per rank and step.")] = 128,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 10,
    bf16: Annotated[bool, typer.Option(help="Compute in bf16.")] = False,
    impls: Annotated[str, typer.Option(help="fsdp2 and ours, or one of them.")] = "fsdp2 ours",
    tolerance: Annotated[float, typer.Option(help="Largest relative difference in fp32.")] = 1e-5,
    out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
) -> None:
    """Compare losses and times; exits with 1 when losses in fp32 differ by more than rounding."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    apart = False
    for world in map(int, worlds.split()):
        experiment = Experiment(
            world, device, layers, width, sequence, steps, bf16, tuple(impls.split()), _free_port()
        )
        found = compare(experiment)
        line = f"{world} ranks:"
        for name, times in found["ms"].items():
            last = found["losses"][name][-1]
            line += f" {name} {statistics.median(times[2:] or times):.1f} ms (loss {last:.6f})"
        if "ratio" in found:
            line += f", ours/fsdp2 {found['ratio']:.3f}, losses differ by {found['difference']:.1e}"
            apart = apart or (not bf16 and found["difference"] > tolerance)
        typer.echo(line)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                record = {**environment(where), "one_gpu": True, **asdict(experiment), **found}
                file.write(json.dumps(record) + "\n")
    if apart:
        typer.echo("losses differ by more than rounding")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
