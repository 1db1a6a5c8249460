"""Losses of the example with parameters gathered in full and in 8 bits, over several seeds.

    python -m benchmarks.gather_loss         # a table of docs/numerics.md, 10 minutes

One run proves nothing: two trainings part after a few steps whatever makes the first difference,
so the same seeds are trained in every way and the differences are averaged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_lm.py"
SIZE = [
    "--dim",
    "64",
    "--layers",
    "2",
    "--batch-size",
    "8",
    "--seq-len",
    "64",
    "--save-every",
    "0",
    "--validate-every",
    "250",
]


def final_losses(gather: str, seed: int, steps: int) -> tuple[float, float]:
    """Training loss (mean of the last tenth of the steps) and validation loss of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", "2", str(EXAMPLE), "--device", "cpu", "--bf16", *SIZE]
        command += ["--gather", gather, "--seed", str(seed), "--steps", str(steps)]
        subprocess.run(
            [*command, "--out", folder],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        report = json.loads((Path(folder) / "report.json").read_text())
    training = [float(loss) for loss in report["history"]["losses"]]
    return mean(training[-steps // 10 :]), float(report["validation_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    full = [final_losses("full", seed, options.steps) for seed in range(options.seeds)]
    print("| `--gather` | training | against bf16 | validation | against bf16 |")
    print("|---|---|---|---|---|")
    ways = [("full", full)]
    for gather in ("fp8", "int8"):
        runs = [final_losses(gather, seed, options.steps) for seed in range(options.seeds)]
        ways.append((gather, runs))
    for gather, runs in ways:
        cells = []
        for index in (0, 1):
            cells.append(f"{mean(run[index] for run in runs):.4f}")
            changes = [a[index] / b[index] - 1 for a, b in zip(runs, full, strict=True)]
            spread = stdev(changes) / len(changes) ** 0.5
            cells.append("" if runs is full else f"{mean(changes):+.2%} ± {spread:.2%}")
        print(f"| `{gather}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
