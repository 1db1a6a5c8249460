"""A profile of one step, read back: exposed communication, gaps in the compute, copies.

    python3 -m benchmarks.trace --row 7B:2048:300 --impls "fsdp2 ours" --folder runs/traces

Writes one trace per implementation, for https://ui.perfetto.dev, and prints what it says.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import emulation
from benchmarks.emulated import Row
from benchmarks.measure import environment
from benchmarks.trainers import Job, Trainer, running
from benchmarks.variants import UnavailableError, Variant

Span = tuple[float, float]

_COMMUNICATION = ("emulated_", "nccl")
_COPY_KERNELS = ("copy", "Copy", "cat", "Cat", "split_with_sizes")
_DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_MEASURED = "measured step"
_GAP = 2.0  # microseconds between two kernels that belong to launching them


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans merged where they touch, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Total length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The parts of merged `spans` that no one of the merged `others` covers."""
    left: list[Span] = []
    index = 0
    for start, end in spans:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at, cursor = start, index
        while cursor < len(others) and others[cursor][0] < end:
            if others[cursor][0] > at:
                left.append((at, others[cursor][0]))
            at = max(at, others[cursor][1])
            cursor += 1
        if at < end:
            left.append((at, end))
    return left


@dataclass
class Gap:
    """A time in which the compute stream had nothing to run, in microseconds."""

    start: float
    length: float
    after: str
    before: str
    while_communicating: float


@dataclass
class Reading:
    """What a trace of one step says; times in milliseconds.

    Attributes:
        span: From the first work on the device to the last.
        compute: Time with a compute kernel running.
        communication: Time with a collective running.
        exposed: Of that, the time with no compute kernel running.
        idle: Time within `span` with nothing running at all.
        gaps: Time between kernels of the compute stream, and how many such gaps there are.
        copies: Bytes of memory copies (not of copy kernels).
        copy_kernels: Time of kernels that only move data, on the compute stream and beside it.
        longest: The longest gaps.
        exposed_by: Exposed time by the collective's kernel.
    """

    span: float
    compute: float
    communication: float
    exposed: float
    idle: float
    gaps: float
    gap_count: int
    copies: int
    copy_kernels: tuple[float, float]
    longest: list[Gap] = field(default_factory=list)
    exposed_by: dict[str, float] = field(default_factory=dict)


def _is_communication(event: dict[str, Any]) -> bool:
    return event["cat"] == "kernel" and event["name"].startswith(_COMMUNICATION)


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _gaps(events: list[dict[str, Any]], communication: list[Span]) -> list[Gap]:
    found = []
    end, name = _span(events[0])[1], events[0]["name"]
    for event in events[1:]:
        start, stop = _span(event)
        if start - end > _GAP:
            hidden = without([(end, start)], communication)
            waiting = (start - end) - length(hidden)
            found.append(Gap(end, start - end, name[:60], event["name"][:60], waiting))
        if stop > end:
            end, name = stop, event["name"]
    return found


def read(events: Iterable[dict[str, Any]], longest: int = 8) -> Reading:
    """Read the device's side of a Chrome trace.

    Args:
        events: `traceEvents` of a trace that `torch.profiler` exported.
        longest: How many of the longest gaps to keep.

    Raises:
        ValueError: The trace has no work on a device.
    """
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in _DEVICE_WORK]
    if not work:
        raise ValueError("the trace has no kernels: was it taken on a CPU?")
    work.sort(key=lambda event: float(event["ts"]))
    collectives = [event for event in work if _is_communication(event)]
    others = [event for event in work if not _is_communication(event)]
    busy: dict[Any, float] = {}
    for event in others:
        busy[_stream(event)] = busy.get(_stream(event), 0.0) + float(event["dur"])
    main = max(busy, key=lambda stream: busy[stream]) if busy else None
    computing = [e for e in others if _stream(e) == main]
    compute = union(map(_span, computing))
    communication = union(map(_span, collectives))
    everything = union(map(_span, work))
    gaps = _gaps(computing, communication) if computing else []
    by_name: dict[str, list[Span]] = {}
    for event in collectives:
        by_name.setdefault(event["name"], []).append(_span(event))
    moving = [e for e in others if any(word in e["name"] for word in _COPY_KERNELS)]
    here = sum(float(e["dur"]) for e in moving if _stream(e) == main)
    beside = sum(float(e["dur"]) for e in moving) - here
    span = everything[-1][1] - everything[0][0]
    return Reading(
        span / 1e3,
        length(compute) / 1e3,
        length(communication) / 1e3,
        length(without(communication, compute)) / 1e3,
        (span - length(everything)) / 1e3,
        sum(gap.length for gap in gaps) / 1e3,
        len(gaps),
        sum(int(e["args"].get("bytes", 0)) for e in work if e["cat"] == "gpu_memcpy"),
        (here / 1e3, beside / 1e3),
        sorted(gaps, key=lambda gap: -gap.length)[:longest],
        {name: length(without(union(s), compute)) / 1e3 for name, s in by_name.items()},
    )


class CopiedBytes(TorchDispatchMode):
    """Counts bytes read and written by operators that only move or convert data.

    Custom operators that copy inside are counted by their arguments, since what they call is not
    seen from here; wrapper subclasses are skipped, the operators on their parts are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        counter = _COPYING.get(name)
        if counter is not None and all(
            kind in (torch.Tensor, torch.nn.Parameter) for kind in types
        ):
            size = counter(args, kwargs or {}, out)
            self.bytes[name] = self.bytes.get(name, 0) + size
        return out


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.element_size()
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


def _first_to_second(args: tuple[Any, ...], kwargs: Any, out: Any) -> int:
    return _size(args[0]) + _size(args[1])


def _first_to_out(args: tuple[Any, ...], kwargs: Any, out: Any) -> int:
    return _size(args[0]) + _size(kwargs.get("out", out))


def _first_twice(args: tuple[Any, ...], kwargs: Any, out: Any) -> int:
    return 2 * _size(args[0])


_COPYING = {
    "copy_": _first_to_second,
    "_foreach_copy_": _first_to_second,
    "_to_copy": _first_to_out,
    "clone": _first_to_out,
    "cat": _first_to_out,
    "_chunk_cat": _first_to_out,
    "split_with_sizes_copy": _first_to_out,
    "chunk_cat": _first_to_out,
    "all_gather_copy_in": _first_twice,
}


def copied_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes that one step's copying operators read and write, by operator."""
    with CopiedBytes() as mode:
        trainer.step()
    return mode.bytes


def record(trainer: Trainer, path: Path) -> Reading | None:
    """Trace one step to `path` (gzipped JSON) and read it; `None` where there is no GPU."""
    from torch.profiler import ProfilerActivity, profile, record_function

    on_gpu = trainer.job.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    if on_gpu:
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        # The first step under a profiler pays for starting it.
        for name in ("first", _MEASURED):
            with record_function(name):
                trainer.step()
                if on_gpu:
                    torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    if not on_gpu:
        return None
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    events = json.loads(text)["traceEvents"]
    return read(_last_step(events))


def _last_step(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What began after the host began the measured step, the device being idle then."""
    marks = [e for e in events if e.get("name") == _MEASURED and e.get("ph") == "X"]
    begin = min((float(event["ts"]) for event in marks), default=0.0)
    return [e for e in events if e.get("cat") in _DEVICE_WORK and float(e["ts"]) >= begin]


def _print(label: str, reading: Reading | None, copied: dict[str, int]) -> None:
    typer.echo(f"{label}:")
    if reading is not None:
        typer.echo(
            f"  span {reading.span:.1f} ms, compute {reading.compute:.1f}, communication "
            f"{reading.communication:.1f} of which exposed {reading.exposed:.1f}, idle "
            f"{reading.idle:.1f}, {reading.gap_count} gaps of {reading.gaps:.1f} in all, copy "
            f"kernels {reading.copy_kernels[0]:.1f} on the compute stream and "
            f"{reading.copy_kernels[1]:.1f} beside it, memcpy {reading.copies / 1e9:.2f} GB"
        )
        exposed = ", ".join(f"{name} {ms:.1f}" for name, ms in reading.exposed_by.items())
        typer.echo(f"  exposed by: {exposed}")
        start = reading.longest[0].start if reading.longest else 0.0
        start = min([gap.start for gap in reading.longest], default=start)
        for gap in reading.longest:
            typer.echo(
                f"  gap {gap.length:8.0f} us (communicating {gap.while_communicating:.0f}) at "
                f"+{(gap.start - start) / 1e3:.1f} ms: {gap.after} -> {gap.before}"
            )
    total = sum(copied.values())
    largest = sorted(copied.items(), key=lambda item: -item[1])[:5]
    parts = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in largest)
    typer.echo(f"  copying operators: {total / 1e9:.3g} GB read and written ({parts})")


def main(
    row: Annotated[str, typer.Option(help="model:sequence:network[:world[:blocks]].")],
    impls: Annotated[str, typer.Option(help="Implementations.")] = "fsdp2 ours",
    warmup: Annotated[int, typer.Option(help="Steps before the traced one.")] = 4,
    latency: Annotated[float, typer.Option(help="Microseconds per collective.")] = 20.0,
    blocks: Annotated[int, typer.Option(help="Thread blocks of a collective.")] = 16,
    width: Annotated[int | None, typer.Option(help="Scale models to this width (tests).")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    folder: Annotated[Path, typer.Option(help="Where traces go.")] = Path("runs/traces"),
    out: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
) -> None:
    """Trace one step of each implementation and print what the trace says."""
    parsed = Row.parse(row, latency, blocks, "once", width)
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    job = Job(parsed.config, 1, parsed.sequence, parsed.world, where)
    for text in impls.split():
        variant = Variant.parse(text)
        emulation.start(parsed.world, parsed.network)
        name = f"{row}-{text}".replace(":", "_").replace("/", "_").replace("=", "_")
        try:
            with running(job, variant) as trainer:
                for _ in range(warmup):
                    trainer.step()
                copied = copied_bytes(trainer)
                reading = record(trainer, folder / f"{name}.json.gz")
        except UnavailableError as error:
            typer.echo(f"{text}: {error}")
            continue
        _print(text, reading, copied)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            line = {**environment(where), "trace": True, "row": row, "implementation": text}
            line |= {"copied": copied, "reading": asdict(reading) if reading else None}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    emulation.stop()


if __name__ == "__main__":
    typer.run(main)
