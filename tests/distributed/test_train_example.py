"""The training example, run as a user runs it: by torchrun, in processes of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_lm.py"
TINY = shlex.split(
    "--dim 32 --layers 2 --heads 2 --kv-heads 1 --seq-len 32 --batch-size 8 --warmup 5"
)
SHORT = shlex.split("--lr 1e-2 --validate-every 20 --device cpu --sample 8")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that a tiny model learns in a few steps."""
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text("def add(a, b):\n    return a + b\n\n\n" * 300)
    return path


def _command(processes: int, text: Path, out: Path, *options: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [
        *(sys.executable, *(launcher if processes > 1 else []), str(SCRIPT)),
        *("--data", str(text), "--out", str(out), *TINY, *SHORT, *options),
    ]


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "RANK"}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _train(processes: int, text: Path, out: Path, *options: str) -> dict[str, Any]:
    command = _command(processes, text, out, *options)
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 60 steps on two processes, with its folder."""
    out = tmp_path_factory.mktemp("unbroken")
    return out, _train(2, text, out, "--steps", "60", "--save-every", "30")


def test_the_loss_falls_and_the_report_is_complete(unbroken: tuple[Path, dict[str, Any]]) -> None:
    out, report = unbroken
    losses = report["history"]["losses"]
    assert len(losses) == 60
    assert losses[0] > 5.0, "an untrained model guesses among 256 bytes: 5.55 nats"
    assert losses[-1] < 2.0
    assert [step for step, _ in report["history"]["validation"]] == [20, 40, 60]
    assert report["validation_loss"] < 2.0
    assert report["sample"].startswith("def ") and len(report["sample"]) == 12
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.glob("step_*")) == ["step_000030", "step_000060"]


def test_one_process_without_torchrun_has_the_losses_of_two(
    text: Path, tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    alone = _train(1, text, tmp_path, "--steps", "60", "--accumulate", "2", "--save-every", "0")
    # The same global batches; sums in another order.
    expected = unbroken[1]["history"]["losses"]
    assert alone["history"]["losses"] == pytest.approx(expected, rel=1e-3)


def test_sigterm_saves_and_resuming_gives_the_losses_of_an_unbroken_run_to_the_bit(
    text: Path, tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    options = "--steps", "60", "--save-every", "5", "--checkpoint-layers", "1"
    whole = unbroken[1]["history"]
    process = subprocess.Popen(
        _command(2, text, tmp_path, *options),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "step_000005").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    stopped = json.loads((tmp_path / "report.json").read_text())
    steps = stopped["steps"]
    assert 5 <= steps < 60, output
    assert f"stopped after {steps} of 60 steps" in output
    assert (tmp_path / f"step_{steps:06d}").exists()
    assert stopped["history"]["losses"] == whole["losses"][:steps]

    resumed = _train(2, text, tmp_path, *options, "--resume")
    assert resumed["history"]["losses"] == whole["losses"]
    assert resumed["history"]["validation"] == whole["validation"]
    assert resumed["history"]["gradient_norms"] == whole["gradient_norms"]


def test_a_run_resumes_on_another_number_of_processes_as_if_nothing_had_happened(
    text: Path, tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    out, report = unbroken
    whole = report["history"]["losses"]
    shutil.copytree(out / "step_000030", tmp_path / "step_000030")
    options = "--steps", "60", "--accumulate", "2", "--save-every", "0"
    resumed = _train(1, text, tmp_path, *options, "--resume")["history"]["losses"]
    assert resumed[:30] == whole[:30]
    assert resumed[30:] == pytest.approx(whole[30:], rel=1e-3)


# ---- processes that die --------------------------------------------------------------------------


def _launch(
    text: Path, out: Path, processes: int, *launcher: str
) -> tuple[subprocess.Popen[str], Path]:
    """Starts an agent of torchrun whose workers restart and go on from the last checkpoint."""
    options = "--steps", "60", "--save-every", "5", "--checkpoint-layers", "1", "--resume"
    script = _command(1, text, out, *options)[1:]
    run = (sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", *launcher)
    # Else restarted workers may read addresses of the dead ones, see docs/troubleshooting.md.
    environment = _environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = out.parent / f"agent{len(list(out.parent.glob('agent*')))}.log"
    with log.open("w") as file:
        agent = subprocess.Popen(
            [*run, f"--nproc_per_node={processes}", *script],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return agent, log


def _workers(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(agent.pid).children() if SCRIPT.name in str(p.cmdline())]


def _wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def _finish(agent: subprocess.Popen[str], log: Path, out: Path) -> tuple[dict[str, Any], str]:
    try:
        code = agent.wait(timeout=90)
    finally:
        agent.kill()
    assert code == 0, log.read_text()
    return json.loads((out / "report.json").read_text()), log.read_text()


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_no_bit(
    text: Path, tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    agent, log = _launch(text, tmp_path / "out", 2, "--standalone")
    _wait_for(tmp_path / "out" / "step_000010")
    _workers(agent)[1].kill()
    report, output = _finish(agent, log, tmp_path / "out")
    assert "resumed from" in output
    assert report["options"]["world_size"] == 2
    assert report["history"]["losses"] == unbroken[1]["history"]["losses"]


def test_a_lost_machine_leaves_the_others_training_on_from_the_last_checkpoint(
    text: Path, tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    out = tmp_path / "out"
    patience = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=2"
    rendezvous = "--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"
    agents = [
        _launch(text, out, 1, *rendezvous, f"--rdzv-conf={patience},is_host={host}")
        for host in (1, 0)
    ]
    try:
        _wait_for(out / "step_000010")
        lost = agents[1][0]
        (worker,) = _workers(lost)
        lost.kill()
        worker.kill()
        report, output = _finish(*agents[0], out)
    finally:
        for agent, _ in agents:
            agent.kill()
            agent.wait()
    assert "resumed from" in output
    assert report["options"]["world_size"] == 1
    whole, joined = unbroken[1]["history"]["losses"], report["history"]["losses"]
    assert joined[:10] == whole[:10]
    assert joined == pytest.approx(whole, rel=1e-3)
