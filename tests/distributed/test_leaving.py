"""How a program ends whose process group fully_shard has made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, glob, os, sys

def threads():
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    print("left:", sorted(name for name in names if "gloo" in name), flush=True)

atexit.register(threads)  # runs after what is registered later

import torch
import torch.distributed as dist
from torch import nn
from ya_fsdp import flat_parameters, fully_shard

if sys.argv[1] == "others":
    dist.init_process_group()
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(flat_parameters(model), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[1] == "failing":
    raise ValueError("of the user")
if sys.argv[1] == "destroyed":
    dist.destroy_process_group()
"""


def end(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program in one process, as torchrun would start it."""
    (folder / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(folder / "program.py"), how]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


@needs_proc
def test_threads_of_a_group_made_by_us_end_before_the_interpreter(tmp_path: Path) -> None:
    for how in ("quietly", "destroyed"):
        done = end(how, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["left: []"]


@needs_proc
def test_a_group_of_somebody_else_and_one_after_an_error_are_left_alone(tmp_path: Path) -> None:
    assert "gloo" in end("others", tmp_path).stdout
    failed = end("failing", tmp_path)
    assert failed.returncode != 0
    assert "ValueError: of the user" in failed.stderr
    assert "gloo" in failed.stdout
