"""What a run leaves behind: its history as JSON and its losses as a picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class History:
    """What was measured, step by step; ``steps[i]`` belongs to step ``i + 1``."""

    losses: list[float] = dataclasses.field(default_factory=list)
    learning_rates: list[float] = dataclasses.field(default_factory=list)
    gradient_norms: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def write_json(path: Path, history: History, facts: dict[str, Any]) -> None:
    """Writes the facts of a run, with its history, as readable JSON."""
    path.write_text(json.dumps(facts | {"history": dataclasses.asdict(history)}, indent=1) + "\n")


def draw_losses(path: Path, history: History, title: str) -> None:
    """Draws training and validation loss over steps into a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # No display is needed.
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(history.losses) + 1)
    axes.plot(steps, history.losses, color="#9ecae1", linewidth=0.8, label="training, each step")
    smooth = _running_mean(history.losses, 0.9)
    axes.plot(steps, smooth, color="#08519c", linewidth=1.8, label="training, running mean")
    if history.validation:
        where, losses = zip(*history.validation, strict=True)
        axes.plot(where, losses, "o-", color="#d94801", markersize=4, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (where[-1], losses[-1]),
            textcoords="offset points",
            xytext=(0, 8),
            ha="right",
            color="#d94801",
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _running_mean(values: list[float], decay: float) -> list[float]:
    """Exponential mean without a bias towards zero at the start."""
    means: list[float] = []
    total = weight = 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        means.append(total / weight)
    return means
