"""Checks the emulated network on a GPU: values, times, order on the wire, capture, host cost.

    python3 -m benchmarks.check

Exits with 1 when a value is wrong or a collective takes a tenth longer or shorter than it should.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import typer

from benchmarks import emulation, kernels
from benchmarks.emulation import Network

_WORLD = 8
_MIB = 2**20


def _gather(output: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(output, source, **options)


def _scatter(output: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
    new = hasattr(dist, "reduce_scatter_single")
    name = "reduce_scatter_single" if new else "reduce_scatter_tensor"
    return getattr(dist, name)(output, source, **options)


def _milliseconds(run: Callable[[], Any], repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def wrong_values(network: Network) -> list[str]:
    """Collectives whose result differs from what torch computes, over sizes and alignments."""
    emulation.start(_WORLD, network)
    found = []
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        for elements in (1, 3, 8, 1000, 4096 * 5 + 7, 2**20):
            label = f"{elements} elements of {dtype}"
            source = torch.randint(1, 100, (_WORLD * elements,), device="cuda").to(dtype)
            shard = source[:elements].clone()
            output = torch.zeros_like(source)
            _gather(output, shard)
            if not torch.equal(output, shard.repeat(_WORLD)):
                found.append(f"gather of {label}")
            inside = source.clone()
            _gather(inside, inside[:elements])
            if network.bandwidth is not None and not torch.equal(inside, shard.repeat(_WORLD)):
                found.append(f"gather in place of {label}")
            slice_of = torch.zeros_like(shard)
            _scatter(slice_of, source)
            if not torch.equal(slice_of, shard):
                found.append(f"reduce-scatter of {label}")
            work = _gather(output.zero_(), shard, async_op=True)
            work.wait()
            if network.bandwidth is not None and not torch.equal(output, shard.repeat(_WORLD)):
                found.append(f"asynchronous gather of {label}")
    exchanged, sent = (
        torch.zeros(_WORLD * 64, device="cuda"),
        torch.randn(_WORLD * 64, device="cuda"),
    )
    dist.all_to_all_single(exchanged, sent)
    if not torch.equal(exchanged, sent):
        found.append("all-to-all")
    return found


def times() -> list[tuple[str, float, float]]:
    """Collectives with the milliseconds they took and those they should."""
    found = []
    for bandwidth, blocks in ((100.0, 16), (300.0, 8), (300.0, 16), (400.0, 16)):
        network = Network(bandwidth, 20.0, blocks)
        emulation.start(_WORLD, network)
        for size in (_MIB, 64 * _MIB, 400 * _MIB):
            whole = torch.zeros(size // 4, device="cuda")
            part = torch.zeros(size // 4 // _WORLD, device="cuda")
            want = network.nanoseconds(size * (_WORLD - 1) / _WORLD, range(_WORLD)) / 1e6
            label = f"of {size // _MIB} MiB at {bandwidth:.0f} GB/s with {blocks} blocks"
            taken = _milliseconds(lambda whole=whole, part=part: _gather(whole, part))
            found.append((f"gather {label}", taken, want))
            taken = _milliseconds(lambda whole=whole, part=part: _scatter(part, whole))
            found.append((f"reduce-scatter {label}", taken, want))
    return found


def two_streams() -> tuple[float, float]:
    """Milliseconds of two collectives issued on two streams, and of one."""
    emulation.start(_WORLD, Network(100.0, 20.0, 16))
    whole = [torch.zeros(16 * _MIB, device="cuda") for _ in range(2)]
    part = [torch.zeros(16 * _MIB // _WORLD, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        for stream, output, source in zip(streams, whole, part, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                _gather(output, source)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return _milliseconds(both), _milliseconds(lambda: _gather(whole[0], part[0]))


def captured_is_wrong() -> bool:
    """Whether a gather on a second stream inside a graph gives something else when replayed."""
    emulation.start(_WORLD, Network(300.0, 20.0, 16))
    shard, output = torch.randn(4096, device="cuda"), torch.zeros(4096 * _WORLD, device="cuda")
    reduced = torch.zeros(4096, device="cuda")
    side = torch.cuda.Stream()

    def work() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _gather(output, shard)
        torch.cuda.current_stream().wait_stream(side)
        _scatter(reduced, output)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    shard.normal_()
    graph.replay()
    torch.cuda.synchronize()
    wrong = not (torch.equal(output, shard.repeat(_WORLD)) and torch.equal(reduced, shard))
    work()
    torch.cuda.synchronize()
    return wrong


def host_microseconds(network: Network, calls: int = 200) -> float:
    """Host time of one gather by way of c10d."""
    emulation.start(_WORLD, network)
    output, source = torch.zeros(_WORLD * 8, device="cuda"), torch.zeros(8, device="cuda")
    for _ in range(10):
        _gather(output, source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        _gather(output, source)
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / calls * 1e6


def failures(report: Callable[[str], None]) -> list[str]:
    """Run every check; what is measured goes to `report`."""
    found = []
    report(f"kernels: {type(kernels.load()).__name__}")
    for network in (Network(2000.0, 1.0, 16), Network(None, fill="all")):
        found += [f"{text} over {network}" for text in wrong_values(network)]
    for label, taken, want in times():
        odd = abs(taken - want) > 0.1 * want + 0.03
        report(f"{label}: {taken:.3f} ms, should be {want:.3f}{'  <--' if odd else ''}")
        if odd:
            found.append(label)
    both, one = two_streams()
    report(f"two collectives on two streams: {both:.3f} ms, one {one:.3f} ms")
    if both < 1.8 * one:
        found.append("two collectives share the wire")
    if captured_is_wrong():
        found.append("capture")
    for name, network in (("paced", Network(2000.0, 0.0, 1)), ("free", Network())):
        report(f"host time of a {name} gather: {host_microseconds(network):.1f} us")
    emulation.stop()
    return found


def main() -> None:
    """Check and print."""
    if not torch.cuda.is_available():
        typer.echo("no CUDA device")
        raise typer.Exit(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = failures(typer.echo)
    typer.echo("wrong: " + "; ".join(found) if found else "all right")
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
