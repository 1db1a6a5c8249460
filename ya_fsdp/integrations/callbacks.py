"""What to watch a training run with, whatever trains it.

An observer is told of every step. A loop of one's own calls it; for the trainers there are
adapters::

    meter = IterationTime(tokens_per_step=8192)
    trainer.add_callback(for_transformers(meter, ProfilerTrace("traces")))
    Trainer(callbacks=[for_lightning(meter)])
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ya_fsdp import YaFSDPModule


class StepObserver:
    """Base of observers; every method may be left out."""

    def step_begins(self, step: int) -> None:
        """Called before the forward of optimizer step ``step``, counted from 0."""

    def step_ends(self, step: int) -> None:
        """Called after the optimizer has stepped."""

    def run_ends(self) -> None:
        """Called once, after the last step."""


class IterationTime(StepObserver):
    """Times steps.

    Args:
        tokens_per_step: Tokens of all ranks in a step.
        flops_per_token: Floating-point operations of forward and backward per token; six times
            the number of parameters is the usual estimate without attention.
        peak_flops: What one device can do per second, in the dtype of compute.
        skip: Steps at the beginning that are not counted.
        say: Called with a line of text at the end of the run, ``print`` for one.
    """

    def __init__(
        self,
        tokens_per_step: int | None = None,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        skip: int = 2,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.skip = skip
        self.say = say
        self.seconds: list[float] = []
        self._begun: float | None = None

    def step_begins(self, step: int) -> None:
        """Starts the clock, once the device is done with the step before."""
        _wait_for_device()
        self._begun = time.perf_counter()

    def step_ends(self, step: int) -> None:
        """Stops the clock, once the device is done."""
        if self._begun is not None:
            _wait_for_device()
            self.seconds.append(time.perf_counter() - self._begun)
            self._begun = None

    def run_ends(self) -> None:
        """Says the summary."""
        if self.say is not None and self.seconds:
            self.say(", ".join(f"{name} {value:.6g}" for name, value in self.summary().items()))

    def summary(self) -> dict[str, float]:
        """The median step.

        Returns:
            ``seconds``, and where the numbers are known ``tokens_per_second`` (all ranks) and
            ``mfu`` (model FLOPs utilization, between 0 and 1).

        Raises:
            RuntimeError: If no step was timed.
        """
        counted = self.seconds[self.skip :] or self.seconds
        if not counted:
            raise RuntimeError("no step was timed")
        found = {"seconds": statistics.median(counted)}
        if self.tokens_per_step is not None:
            found["tokens_per_second"] = self.tokens_per_step / found["seconds"]
            if self.flops_per_token is not None and self.peak_flops is not None:
                ranks = int(os.environ.get("WORLD_SIZE", "1"))
                done = found["tokens_per_second"] * self.flops_per_token
                found["mfu"] = done / (self.peak_flops * ranks)
        return found


class ProfilerTrace(StepObserver):
    """Writes a trace of some steps for Perfetto (https://ui.perfetto.dev), a file per rank.

    Args:
        folder: Where to; made if it is not there.
        first_step: The first step in the trace.
        steps: How many.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 3, steps: int = 2) -> None:
        if first_step < 1 or steps < 1:
            raise ValueError(f"first_step and steps must be positive, got {first_step}, {steps}")
        self.folder = Path(folder)
        self.first_step = first_step
        self.steps = steps
        self.path = self.folder / f"rank{os.environ.get('RANK', '0')}.json.gz"
        self._profiler: torch.profiler.profile | None = None

    def step_begins(self, step: int) -> None:
        """Begins to record."""
        if step == self.first_step:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def step_ends(self, step: int) -> None:
        """Writes after the last step of the trace."""
        if self._profiler is not None and step >= self.first_step + self.steps - 1:
            self.run_ends()

    def run_ends(self) -> None:
        """Writes what there is."""
        if self._profiler is not None:
            _wait_for_device()
            self._profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self.path))
            self._profiler = None


class MemorySnapshot(StepObserver):
    """Writes what the CUDA allocator holds after a step, for https://pytorch.org/memory_viz.

    Without a GPU nothing is written.

    Args:
        path: The file; ``{rank}`` in it is replaced.
        step: After which step.
    """

    def __init__(self, path: str | Path, *, step: int = 3) -> None:
        self.path = Path(str(path).replace("{rank}", os.environ.get("RANK", "0")))
        self.step = step

    def step_ends(self, step: int) -> None:
        """Writes after its step."""
        if step == self.step and torch.cuda.is_available():
            _wait_for_device()
            snapshot: Callable[[], Any] = torch.cuda.memory_snapshot
            content = {"segments": snapshot(), "device_traces": []}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(pickle.dumps(content))


def unit_report(model: nn.Module) -> str:
    """A table of the units of a sharded model, as this rank sees them.

    Args:
        model: A model sharded by :func:`ya_fsdp.fully_shard`, or one that contains such modules.

    Returns:
        A line per unit and dtype: name, dtype, trainable or frozen, parameters, elements of all
        ranks, elements of this rank.
    """
    rows: dict[tuple[str, str, str], list[int]] = {}
    units = [name for name, m in model.named_modules() if isinstance(m, YaFSDPModule)]
    for name, parameter in model.named_parameters():
        inside = [u for u in units if not u or name.startswith(f"{u}.")]
        unit = max(inside, key=len, default="(not sharded)")
        kind = "trainable" if parameter.requires_grad else "frozen"
        dtype = str(parameter.dtype).removeprefix("torch.")
        row = rows.setdefault((unit or "(root)", dtype, kind), [0, 0, 0])
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        row[0] += 1
        row[1] += parameter.numel()
        row[2] += local.numel()
    width = max([len(unit) for unit, _, _ in rows] + [4])
    lines = [f"{'unit':<{width}}  dtype     kind       parameters     elements  of this rank"]
    for (unit, dtype, kind), (count, whole, local_count) in rows.items():
        lines.append(
            f"{unit:<{width}}  {dtype:<8}  {kind:<9}  {count:>10}  {whole:>11}  {local_count:>12}"
        )
    return "\n".join(lines)


def for_transformers(*observers: StepObserver) -> Any:
    """A ``TrainerCallback`` that tells observers of steps."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        """Tells observers of steps."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for observer in observers:
                observer.step_begins(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for observer in observers:
                observer.step_ends(state.global_step - 1)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for observer in observers:
                observer.run_ends()

    return Callback()


def for_lightning(*observers: StepObserver) -> Any:
    """A Lightning ``Callback`` that tells observers of batches."""
    from lightning.pytorch import Callback as LightningCallback

    class Callback(LightningCallback):
        """Tells observers of batches."""

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            for observer in observers:
                observer.step_begins(trainer.fit_loop.total_batch_idx)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for observer in observers:
                observer.step_ends(trainer.fit_loop.total_batch_idx)

        def on_train_end(self, *_: Any) -> None:
            for observer in observers:
                observer.run_ends()

    return Callback()


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


__all__ = [
    "IterationTime",
    "MemorySnapshot",
    "ProfilerTrace",
    "StepObserver",
    "for_lightning",
    "for_transformers",
    "unit_report",
]
