"""A run's folder of checkpoints: resuming, mistakes, and processes killed in the middle."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.distributed.checkpoint_models import (
    Net,
    adamw,
    assert_near,
    assert_same,
    assert_unchanged,
    plain_net,
    shard,
    snapshot,
    state_wholes,
    train,
    trained_plain,
    trained_sharded,
    wholes,
)
from tests.harness import WorkerPool
from ya_fsdp import checkpoint, flat_parameters
from ya_fsdp.checkpoint import CheckpointError, store

# ---- saving and resuming -----------------------------------------------------------------------


def save_on(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    model, optimizer = trained_sharded(2, "element")
    path = checkpoint.save(folder, model, optimizer, {"losses": [1.5]}, step=2)
    assert path == Path(folder) / "step_000002"
    return wholes(model), state_wholes(model, optimizer)


def resume_on(rank: int, world_size: int, folder: str) -> tuple[Any, Any, Any]:
    model = shard(plain_net(seed=9), "row")
    optimizer = adamw(model)
    loaded = checkpoint.load(folder, model, optimizer)
    assert loaded.step == 2 and loaded.extra == {"losses": [1.5]}
    before = wholes(model), state_wholes(model, optimizer)
    train(model, optimizer, 2, first=2)
    return *before, wholes(model)


@pytest.mark.parametrize("n, m", [(2, 2), (2, 1), (2, 3), (3, 2), (1, 2), (3, 1)])
def test_a_run_resumes_on_another_number_of_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, n: int, m: int
) -> None:
    saved = request.getfixturevalue(f"world{n}").run(save_on, str(tmp_path))[0]
    reference, _ = trained_plain(4)
    for weights, states, later in request.getfixturevalue(f"world{m}").run(
        resume_on, str(tmp_path)
    ):
        assert_same(weights, saved[0])
        assert_same(states, saved[1])
        assert_near(later, wholes(reference))


def test_a_process_without_a_group_loads_into_a_plain_model(
    world2: WorkerPool, tmp_path: Path
) -> None:
    weights, states = world2.run(save_on, str(tmp_path))[0]
    model = plain_net(seed=9)
    optimizer = adamw(model)
    checkpoint.load(tmp_path, model, optimizer)
    assert_same(wholes(model), weights)
    assert_same(state_wholes(model, optimizer), states)


def read_with_torch(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    model = plain_net(seed=9)
    optimizer = adamw(model)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return wholes(model), {k: v["exp_avg"] for k, v in state["optimizer"]["state"].items()}


def test_torch_reads_a_step_as_an_ordinary_checkpoint(world2: WorkerPool, tmp_path: Path) -> None:
    weights, states = world2.run(save_on, str(tmp_path))[0]
    for found, averages in world2.run(read_with_torch, str(tmp_path / "step_000002")):
        assert_same(found, weights)
        for name, value in averages.items():
            assert torch.equal(value, states[f"{name}.exp_avg"])


class Gated(nn.Module):
    """Runs the blocks of a Net but the middle one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain_net()

    def forward(self, tokens: torch.Tensor, everything: bool) -> torch.Tensor:
        net = self.net
        x = net.embedding(tokens) + net.offset
        for index, block in enumerate(net.blocks):
            if everything or index != 1:
                x = block(x)
        return net.head(x * net.scale)


def gated_steps(model: Gated, optimizer: torch.optim.Optimizer, plan: list[bool]) -> None:
    for everything in plan:
        model(torch.arange(6).view(2, 3), everything).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def without_gradient(rank: int, world_size: int, folder: str) -> None:
    from ya_fsdp import fully_shard

    def sharded() -> tuple[Gated, torch.optim.Optimizer]:
        model = Gated()
        for block in model.net.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, adamw(model)

    model, optimizer = sharded()
    gated_steps(model, optimizer, [False, False])
    checkpoint.save(folder, model, optimizer, step=2)
    other, fresh = sharded()
    checkpoint.load(folder, other, fresh)
    assert_same(state_wholes(other, fresh), state_wholes(model, optimizer))
    assert not any("blocks.1" in name for name in state_wholes(other, fresh))
    gated_steps(other, fresh, [True])
    plain = Gated()
    reference = adamw(plain)
    gated_steps(plain, reference, [False, False, True])
    assert_near(wholes(other), wholes(plain))
    weight = other.net.blocks[1].up.weight
    assert fresh.state[weight]["step"] == 1
    assert fresh.state[other.net.scale]["step"] == 3


def test_a_parameter_that_never_had_a_gradient_starts_at_its_first_step(
    world2: WorkerPool, tmp_path: Path
) -> None:
    world2.run(without_gradient, str(tmp_path))


def unstepped(rank: int, world_size: int, folder: str) -> None:
    model, plain = shard(plain_net()), plain_net()
    optimizer, reference = adamw(model), adamw(plain)
    checkpoint.save(folder, model, optimizer, step=0)
    checkpoint.load(folder, model, optimizer)
    train(model, optimizer, 1)
    train(plain, reference, 1)
    assert_near(wholes(model), wholes(plain))
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}
    stateless = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save(folder, model, stateless, step=1)
    again = torch.optim.SGD(model.parameters(), lr=0.7)
    checkpoint.load(folder, model, again)
    assert again.param_groups[0]["lr"] == 0.1


def test_saving_before_the_first_step_takes_none(world2: WorkerPool, tmp_path: Path) -> None:
    world2.run(unstepped, str(tmp_path))


def in_turn(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = trained_sharded(2)
    handle = checkpoint.async_save(folder, model, optimizer, {"step": 2}, step=2)
    train(model, optimizer, 3, first=2)
    later = {**wholes(model), **state_wholes(model, optimizer)}
    assert handle.result(30) == Path(folder) / "step_000002"
    assert handle.done()
    checkpoint.async_save(folder, model, optimizer, step=5, keep_last=2)
    path = checkpoint.save(folder, model, optimizer, step=6, keep_last=2)
    names = [p.name for p in sorted(Path(folder).glob("step_*"))]
    assert names == ["step_000005", "step_000006"]
    for place, values in ((path.with_name("step_000005"), later), (Path(folder), later)):
        other = shard(plain_net(seed=9))
        fresh = adamw(other)
        checkpoint.load(place, other, fresh)
        assert_same({**wholes(other), **state_wholes(other, fresh)}, values)


def at_the_call(rank: int, world_size: int, folder: str) -> None:
    """What is saved is the state at the call, though training changes it while it is written."""
    model, optimizer = trained_sharded(2)
    expected = {**wholes(model), **state_wholes(model, optimizer)}
    gate = threading.Event()
    write = store._write

    def wait_and_write(*args: Any) -> Path:
        gate.wait(30)
        return write(*args)

    store._write = wait_and_write
    try:
        handle = checkpoint.async_save(folder, model, optimizer, step=2)
    finally:
        store._write = write
    train(model, optimizer, 3, first=2)
    with torch.no_grad():
        model.offset.zero_()
    gate.set()
    handle.result(30)
    other = shard(plain_net(seed=9))
    fresh = adamw(other)
    checkpoint.load(folder, other, fresh)
    assert_same({**wholes(other), **state_wholes(other, fresh)}, expected)


def test_a_background_save_has_the_state_at_the_call(world2: WorkerPool, tmp_path: Path) -> None:
    world2.run(at_the_call, str(tmp_path))


def test_saves_in_the_background_come_one_after_the_other(
    world2: WorkerPool, tmp_path: Path
) -> None:
    world2.run(in_turn, str(tmp_path))


def failing_background(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = trained_sharded(1)
    Path(folder, "file").touch()
    checkpoint.async_save(f"{folder}/file/run", model, optimizer, step=1)
    with pytest.raises(CheckpointError, match="file/run"):
        checkpoint.save(folder, model, optimizer, step=2)
    checkpoint.save(folder, model, optimizer, step=2)


def test_a_background_save_that_failed_is_reported_by_the_next_one(
    world2: WorkerPool, tmp_path: Path
) -> None:
    world2.run(failing_background, str(tmp_path))


# ---- rotation ----------------------------------------------------------------------------------


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def test_the_last_saves_are_kept_by_when_they_were_saved_not_by_their_number(
    tmp_path: Path,
) -> None:
    model = plain_net()
    for step in (1, 2, 900):
        checkpoint.save(tmp_path, model, step=step, keep_last=2)
    assert saved_steps(tmp_path) == [2, 900]
    # A run that was resumed from step 2 goes on below the steps of the one before.
    checkpoint.save(tmp_path, model, step=3, keep_last=2)
    assert saved_steps(tmp_path) == [3, 900]
    checkpoint.save(tmp_path, model, step=4, keep_last=1)
    assert saved_steps(tmp_path) == [4]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000004"


def test_a_save_that_fails_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_net()
    checkpoint.save(tmp_path, model, step=1, keep_last=1)

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.dcp_state, "write", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(tmp_path, model, step=2, keep_last=1)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step_000001"]
    assert checkpoint.load(tmp_path, model).step == 1


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    first, second = plain_net(seed=1), plain_net(seed=2)
    checkpoint.save(tmp_path, first, step=7)
    checkpoint.save(tmp_path, second, step=7)
    assert saved_steps(tmp_path) == [7]
    checkpoint.load(tmp_path, first)
    assert_same(wholes(first), wholes(second))


def test_a_step_whose_replacement_was_cut_short_is_still_the_latest(tmp_path: Path) -> None:
    model = plain_net()
    path = checkpoint.save(tmp_path, model, step=7)
    path.rename(tmp_path / "step_000007.old")
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000007.old"
    assert checkpoint.load(tmp_path, model).step == 7
    checkpoint.save(tmp_path, model, step=8)
    assert saved_steps(tmp_path) == [7, 8]


def test_the_latest_of_an_empty_or_absent_folder_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        checkpoint.load(tmp_path, plain_net())


# ---- killed in the middle ----------------------------------------------------------------------


def save_for_ever(folder: str, first: int) -> None:
    torch.set_num_threads(1)
    model = Net(blocks=1)
    for step in range(first, first + 10_000):
        for value in model.state_dict().values():
            value.fill_(step)
        checkpoint.save(folder, model, extra={"at": step}, step=step % 3, keep_last=2)


def test_a_process_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Twenty kills, also of saves that replace a step and of rotations; sizes and sums hold."""
    checkpoint.save(tmp_path, Net(blocks=1), extra={"at": 0}, step=0)
    context = multiprocessing.get_context("forkserver")
    dice = random.Random(1)
    seen = []
    for attempt in range(20):
        process = context.Process(target=save_for_ever, args=(str(tmp_path), 1 + attempt * 10_000))
        process.start()
        # The first leftover or the first new pointer says that the imports are over.
        before = (tmp_path / "latest").stat().st_mtime_ns
        while (
            not list(tmp_path.glob(".step_*.partial"))
            and (tmp_path / "latest").stat().st_mtime_ns == before
            and process.is_alive()
        ):
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.06))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        model = Net(blocks=1)
        loaded = checkpoint.load(tmp_path, model)
        values = {float(v.float().mean()) for v in model.state_dict().values()}
        assert len(values) == 1 or loaded.extra["at"] == 0
        assert loaded.step == loaded.extra["at"] % 3
        seen.append(loaded.extra["at"])
        for leftover in tmp_path.glob(".step_*.partial"):
            shutil.rmtree(leftover)
    assert len(set(seen)) > 5


# ---- damaged and foreign checkpoints -----------------------------------------------------------


def refuses(
    folder: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None, message: str
) -> None:
    before = snapshot(model)
    states = [] if optimizer is None else list(state_wholes(model, optimizer).values())
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, model, optimizer)
    assert_unchanged(model, before)
    if optimizer is not None:
        for old, new in zip(states, state_wholes(model, optimizer).values(), strict=True):
            assert torch.equal(old, new)


def damaged(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = trained_sharded(1)
    path = checkpoint.save(folder, model, optimizer, step=1)
    other = shard(plain_net(seed=9))
    fresh = adamw(other)
    victim = path / f"__{rank}_0.distcp"
    content = victim.read_bytes()

    def damage(on: int, change: bytes | None, message: str) -> None:
        torch.distributed.barrier()
        if rank == on:
            victim.unlink() if change is None else victim.write_bytes(change)
        torch.distributed.barrier()
        refuses(folder, other, fresh, message)
        torch.distributed.barrier()
        victim.write_bytes(content)
        torch.distributed.barrier()

    damage(1, content[:-5], r"__1_0\.distcp has \d+ bytes instead of \d+")
    damage(0, None, r"__0_0\.distcp is missing")
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 1
    damage(1, bytes(flipped), r"__1_0\.distcp does not have the checksum")
    checkpoint.load(folder, other, fresh)
    assert_same(wholes(other), wholes(model))


def test_a_damaged_file_is_named_on_every_rank_and_nothing_is_loaded(
    world2: WorkerPool, tmp_path: Path
) -> None:
    world2.run(damaged, str(tmp_path))


def foreign(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = trained_sharded(1)
    checkpoint.save(folder, model, optimizer, step=1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(folder, model, sgd, "has the state of AdamW, the optimizer is SGD")
    part = torch.optim.AdamW(list(model.parameters())[:3])
    refuses(folder, model, part, "the optimizer does not have the checkpoint's blocks")
    wide = shard(plain_net(width=8))
    refuses(folder, wide, adamw(wide), r"size mismatch for embedding.weight: .*\[7, 6\].*\[7, 8\]")
    deep = shard(plain_net(blocks=4))
    refuses(folder, deep, adamw(deep), r'Missing key\(s\) in state_dict: "blocks.3.up.weight"')
    flat = shard(plain_net(blocks=2))
    refuses(folder, flat, adamw(flat), r'Unexpected key\(s\) in state_dict: "blocks.2.up.weight"')
    only_model = checkpoint.save(f"{folder}/weights", model, step=1)
    refuses(only_model, model, optimizer, "saved without an optimizer")
    torch_made = f"{folder}/torch"
    dcp.save({"model": model.state_dict()}, checkpoint_id=torch_made)
    refuses(torch_made, model, None, r"has no manifest\.json")
    checkpoint.load(folder, flat, strict=False)
    assert_same(
        {k: v for k, v in wholes(flat).items() if "blocks" in k},
        {k: v for k, v in wholes(model).items() if "blocks.0" in k or "blocks.1" in k},
    )


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_and_changes_nothing(
    world2: WorkerPool, tmp_path: Path
) -> None:
    world2.run(foreign, str(tmp_path))


def unwritable(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = trained_sharded(1)
    before = snapshot(model)
    Path(folder, "file").touch()
    with pytest.raises(CheckpointError, match=r"NotADirectoryError|FileExistsError"):
        checkpoint.save(f"{folder}/file", model, optimizer, step=1)
    Path(folder, "locked").mkdir(mode=0o500, exist_ok=True)
    if os.geteuid() != 0:
        with pytest.raises(CheckpointError, match="PermissionError"):
            checkpoint.save(f"{folder}/locked", model, optimizer, step=1)
    good = checkpoint.save(folder, model, optimizer, step=1, keep_last=1)
    writing = dcp.FileSystemWriter.write_data

    def full_disk(*args: Any) -> Any:
        writing(*args)
        raise OSError(28, "No space left on device")

    if rank == 1:
        dcp.FileSystemWriter.write_data = full_disk
    try:
        with pytest.raises(CheckpointError, match=r"rank 1: OSError.*No space left"):
            checkpoint.save(folder, model, optimizer, step=2, keep_last=1)
    finally:
        dcp.FileSystemWriter.write_data = writing
    torch.distributed.barrier()  # The first rank cleans up while the others raise.
    assert checkpoint.latest(folder) == good
    assert not list(Path(folder).glob(".step_*"))
    checkpoint.load(folder, model, optimizer)
    assert_unchanged(model, before)


def test_a_folder_that_can_not_be_written_and_a_full_disk_are_errors_on_every_rank(
    world2: WorkerPool, tmp_path: Path
) -> None:
    world2.run(unwritable, str(tmp_path))


class Odd:
    """Something that torch.load(weights_only=True) refuses."""


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="extra and the optimizer's options"):
        checkpoint.save(tmp_path, plain_net(), extra=Odd(), step=1)
    with pytest.raises(CheckpointError, match="on the meta device"):
        checkpoint.save(tmp_path, plain_net().to("meta"), step=1)
    with pytest.raises(ValueError, match="keep_last must be"):
        checkpoint.save(tmp_path, plain_net(), step=1, keep_last=0)
    with pytest.raises(ValueError, match="step must be"):
        checkpoint.save(tmp_path, plain_net(), step=-1)
    assert not list(tmp_path.iterdir())


def test_a_manifest_of_a_later_version_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    model = plain_net()
    path = checkpoint.save(tmp_path, model, step=1)
    content = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**content, "version": 99}))
    refuses(path, model, None, "later version")
    (path / "manifest.json").write_text(json.dumps(content)[:40])
    refuses(path, model, None, r"manifest\.json is damaged")


class Counting(nn.Linear):
    """A module with extra state."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count, "history": [torch.ones(2), {"deep": "text"}]}

    def set_extra_state(self, state: Any) -> None:
        assert state["history"][0].tolist() == [1, 1] and state["history"][1] == {"deep": "text"}
        self.count = state["count"]


def extra_state(rank: int, world_size: int, folder: str) -> None:
    from ya_fsdp import fully_shard

    model = fully_shard(nn.Sequential(Counting(3, 3)))
    model[0].count = 5
    checkpoint.save(folder, model, step=1)
    full = checkpoint.get_full_state_dict(model)
    for load in (
        lambda m: checkpoint.load(folder, m),
        lambda m: checkpoint.load_full_state_dict(m, full),
    ):
        other = fully_shard(nn.Sequential(Counting(3, 3)))
        load(other)
        assert other[0].count == 5


def test_extra_state_of_modules_is_saved_and_restored(world2: WorkerPool, tmp_path: Path) -> None:
    world2.run(extra_state, str(tmp_path))


# ---- the documentation -------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def run_page(rank: int, world_size: int, folder: str, code: str) -> str:
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {})
    return printed.getvalue()


def test_what_the_page_on_checkpoints_shows_runs_and_prints_what_it_says(
    world2: WorkerPool, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
    promised = re.findall(r"print\(.*\)  # (.*)", code)
    assert len(promised) == 2
    for printed in world2.run(run_page, str(tmp_path), code):
        assert printed.splitlines() == promised
    command = re.findall(r"    python (-m torch.distributed.checkpoint.*)", PAGE.read_text())[0]
    assert (
        subprocess.run([sys.executable, *command.split()], cwd=tmp_path, check=False).returncode
        == 0
    )
    assert set(torch.load(tmp_path / "model.pt", weights_only=False)) == {"model", "optimizer"}


def flat_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(flat_parameters(model), lr=0.05, weight_decay=0.1)


def save_flat(rank: int, world_size: int, folder: str, flat: bool) -> None:
    model = shard(plain_net(), "element")
    optimizer = (flat_adamw if flat else adamw)(model)
    train(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer, step=2)


def resume_flat(rank: int, world_size: int, folder: str, flat: bool) -> tuple[Any, Any]:
    results = []
    for through_rank_0 in (False, True):
        model = shard(plain_net(seed=9), "row")
        optimizer = (flat_adamw if flat else adamw)(model)
        checkpoint.load(folder, model, optimizer)
        if through_rank_0:
            states = checkpoint.get_full_optimizer_state_dict(model, optimizer)
            optimizer = (flat_adamw if flat else adamw)(model)
            checkpoint.load_full_optimizer_state_dict(model, optimizer, states)
        train(model, optimizer, 2, first=2)
        results.append(wholes(model))
    return results[0], results[1]


@pytest.mark.parametrize("saved, loaded", [(True, True), (True, False), (False, True)])
def test_a_run_resumes_with_flat_parameters_where_it_had_others_and_the_other_way(
    world2: WorkerPool, world3: WorkerPool, tmp_path: Path, saved: bool, loaded: bool
) -> None:
    world2.run(save_flat, str(tmp_path), saved)
    reference, _ = trained_plain(4)
    for direct, through_rank_0 in world3.run(resume_flat, str(tmp_path), loaded):
        assert_near(direct, wholes(reference))
        assert_near(through_rank_0, wholes(reference))
