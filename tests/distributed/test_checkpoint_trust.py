"""Checkpoints of somebody else: nothing in them runs, and no name leads out of their folder."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import WorkerPool
from ya_fsdp import checkpoint, fully_shard
from ya_fsdp.checkpoint import CheckpointError, load_safetensors


class Runs:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Extra(nn.Linear):
    """Has state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"count": 1}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def saved(folder: Path) -> tuple[nn.Module, Path]:
    model = nn.Sequential(Extra(3, 3))
    return model, checkpoint.save(folder, model, step=1)


def refused(path: Path, model: nn.Module, message: str) -> None:
    before = model[0].weight.detach().clone()  # type: ignore[index]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, model, verify=False)
    assert torch.equal(model[0].weight, before)  # type: ignore[index]


def write(path: Path, name: str, content: bytes) -> None:
    """Puts a file into a step, with a manifest that agrees."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name][0] = len(content)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    model, path = saved(tmp_path / "run")
    made = tmp_path / "made"
    original = (path / ".metadata").read_bytes()
    metadata = pickle.loads(original)
    metadata.planner_data = Runs(made)
    write(path, ".metadata", pickle.dumps(metadata))
    refused(path, model, r"\.metadata is not safe to read.*Path\.touch|asks for .*touch")
    write(path, ".metadata", original[:50])
    refused(path, model, r"\.metadata is not safe to read or damaged")

    # An entry that is no tensor, at its place in the file of entries.
    metadata = pickle.loads(original)
    for index, info in metadata.storage_data.items():
        if "extra_state" in index.fqn:
            buffer = io.BytesIO()
            torch.save(Runs(made), buffer)
            content = (path / info.relative_path).read_bytes()
            name = info.relative_path
            info.offset, info.length = len(content), len(buffer.getvalue())
            content += buffer.getvalue()
    write(path, name, content)
    write(path, ".metadata", pickle.dumps(metadata))
    refused(path, model, "[Ww]eights_only|Weights only")
    assert not made.exists()

    write(path, ".metadata", original)
    model[0].weight.data.zero_()  # type: ignore[index]
    checkpoint.load(path, model, verify=False)
    assert model[0].weight.any() and model[0].count == 1  # type: ignore[index]


def test_members_of_enums_are_read_as_the_first_releases_of_python_3_11_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = vars(torch.distributed.checkpoint.metadata)["_MEM_FORMAT_ENCODING"]
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "__reduce_ex__", lambda self, _: (getattr, (encoding, self.name)))
        model, path = saved(tmp_path / "run")
    assert b"getattr" in (path / ".metadata").read_bytes()
    expected = model[0].weight.detach().clone()  # type: ignore[index]
    model[0].weight.data.zero_()  # type: ignore[index]
    checkpoint.load(path, model)
    assert torch.equal(model[0].weight, expected)  # type: ignore[index]

    # Every other attribute stays out of reach: of an enum, and of a class that may be named.
    for owner in (encoding, torch.Size):
        reads = type("Reads", (), {"__reduce__": lambda _, owner=owner: (getattr, (owner, "mro"))})
        write(path, ".metadata", pickle.dumps(reads()))
        refused(path, model, "asks for the attribute 'mro' of <")


def test_no_name_in_a_checkpoint_leads_out_of_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "run"
    model, path = saved(root)
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    outside = "names a file outside of itself: '\\.\\./\\.\\./secret'"
    original = (path / ".metadata").read_bytes()
    metadata = pickle.loads(original)
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"
    write(path, ".metadata", pickle.dumps(metadata))
    refused(path, model, outside)
    write(path, ".metadata", original)

    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = [9, 0]
    (path / "manifest.json").write_text(json.dumps(manifest))
    refused(path, model, outside)

    for name in ("../secret", str(secret)):
        (root / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="outside of itself"):
            checkpoint.latest(root)
        index = {"weight_map": {"0.weight": name}}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="outside of itself"):
            load_safetensors(nn.Sequential(nn.Linear(3, 3)), root)


def load_on_ranks(rank: int, world: int, folder: str) -> str:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3)))
    path = checkpoint.save(folder, model, step=1)
    torch.distributed.barrier()
    if rank == 0:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data = Runs(Path(folder) / "made")
        write(path, ".metadata", pickle.dumps(metadata))
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, model, verify=False)
    return str(caught.value)


def test_every_rank_refuses_a_checkpoint_that_would_run_something(
    world2: WorkerPool, tmp_path: Path
) -> None:
    for message in world2.run(load_on_ranks, str(tmp_path)):
        assert "not safe to read" in message
    assert not (tmp_path / "made").exists()
