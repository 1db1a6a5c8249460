"""``ya-fsdp convert`` on files made by hand after the description of the original's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

from ya_fsdp.cli.app import app
from ya_fsdp.cli.classic import join
from ya_fsdp.cli.errors import ConversionError

MODULES = {
    "embed": {"weight": (5, 3)},
    "layers.0": {"mlp.up.weight": (4, 3), "mlp.up.bias": (4,), "mlp.down.weight": (3, 4)},
    "layers.1": {"mlp.up.weight": (4, 3), "mlp.up.bias": (4,), "mlp.down.weight": (3, 4)},
}
NORMS = [
    ["layers.0.norm.weight", "layers.0.norm.bias"],
    ["layers.1.norm.weight", "layers.1.norm.bias"],
    ["norm.weight"],
]


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {f"{m}.{n}": torch.randn(s) for m, ps in MODULES.items() for n, s in ps.items()}
    return found | {name: torch.randn(3) for names in NORMS for name in names}


def cut(flat: Tensor, world: int, multiple: int) -> list[Tensor]:
    """Equal shards, each a multiple of so many elements, zeros at the end."""
    size = -(-flat.numel() // world)
    size = -(-size // multiple) * multiple
    padded = torch.cat([flat, torch.zeros(size * world - flat.numel())])
    return list(padded.split(size))


def original_files(truth: dict[str, Tensor], world: int, multiple: int = 1) -> list[Any]:
    """What the original's ``local_state_dict`` gives on every rank."""
    meta: dict[str, list[Any]] = {
        "main_parameter_shard_bounaries": [],
        "main_parameter_padded_numels": [],
        "main_shards_fqns": [],
        "main_shards_numels": [],
        "main_parameter_orig_shapes": [],
    }
    pieces: list[list[Tensor]] = [[] for _ in range(world)]
    for module, params in MODULES.items():
        names = [f"{module}.{name}" for name in params]
        shards = cut(torch.cat([truth[n].flatten() for n in names]), world, multiple)
        for rank, shard in enumerate(shards):
            pieces[rank].append(shard)
        meta["main_parameter_shard_bounaries"].append(shards[0].numel())
        meta["main_parameter_padded_numels"].append(shards[0].numel() * world)
        meta["main_shards_fqns"].append(names)
        meta["main_shards_numels"].append([truth[n].numel() for n in names])
        meta["main_parameter_orig_shapes"].append([list(truth[n].shape) for n in names])
    meta["layernorm_fqns"] = NORMS
    meta["layernorm_numels"] = [[truth[n].numel() for n in names] for names in NORMS]
    meta["layernorm_orig_shapes"] = [[truth[n].shape for n in names] for names in NORMS]
    flat_norms = torch.cat([truth[n] for names in NORMS for n in names])
    files: list[Any] = []
    for rank, shard in enumerate(cut(flat_norms, world, multiple)):
        files.append(
            {
                "main_parameter": torch.cat(pieces[rank]),
                "layernorm_parameter": shard,
                "module.layers.0.root_module.table": torch.arange(3),
            }
        )
    files[0]["meta"] = meta
    return files


def write(folder: Path, files: list[Any], model_parallel_rank: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, state in enumerate(files):
        torch.save(state, folder / f"yafsdp_model_{rank:05d}_{model_parallel_rank:02d}.pt")
    return folder


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def assert_equal(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert set(found) == set(truth)
    for name, value in truth.items():
        assert torch.equal(found[name], value), name


# ---- one file per rank ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 8], ids=["tight", "padded for yccl"])
def test_files_of_every_rank_become_one_file(tmp_path: Path, world: int, multiple: int) -> None:
    truth = weights()
    source = write(tmp_path / "old", original_files(truth, world, multiple))
    result = run(source, tmp_path / "model.pt")
    assert result.exit_code == 0, result.output
    truth["layers.0.table"] = torch.arange(3)
    assert_equal(torch.load(tmp_path / "model.pt"), truth)
    elements = sum(t.numel() for t in truth.values())
    assert f"{len(truth)} tensors, {elements} elements" in result.stdout


def test_safetensors_and_distributed_checkpoints_are_written_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    truth = weights()
    source = write(tmp_path / "old", original_files(truth, 2))
    truth["layers.0.table"] = torch.arange(3)
    assert run(source, tmp_path / "new" / "model.safetensors").exit_code == 0
    assert_equal(load_file(tmp_path / "new" / "model.safetensors"), truth)
    assert run(source, tmp_path / "checkpoint").exit_code == 0
    found = {name: torch.full_like(value, 7) for name, value in truth.items()}
    load_alone(found, tmp_path / "checkpoint")
    assert_equal(found, truth)


@settings(deadline=None, max_examples=25)
@given(world=st.integers(1, 9), multiple=st.sampled_from([1, 8]), seed=st.integers(0, 99))
def test_any_number_of_ranks_joins_to_the_same(world: int, multiple: int, seed: int) -> None:
    torch.manual_seed(seed)
    truth = weights()
    whole = join(original_files(truth, world, multiple))
    assert_equal({n: v for n, v in whole.items() if n in truth}, truth)


def test_a_tensor_parallel_rank_has_to_be_chosen(tmp_path: Path) -> None:
    truth = weights()
    other = {name: value + 1 for name, value in truth.items()}
    source = write(tmp_path / "old", original_files(truth, 2))
    write(source, original_files(other, 2), model_parallel_rank=1)
    refused = run(source, tmp_path / "model.pt")
    assert refused.exit_code == 1
    assert "--model-parallel-rank" in refused.stderr
    assert run(source, tmp_path / "model.pt", "--model-parallel-rank", 1).exit_code == 0
    found = torch.load(tmp_path / "model.pt")
    assert torch.equal(found["embed.weight"], other["embed.weight"])
    assert "of tensor-parallel rank 5" in run(source, "x", "--model-parallel-rank", 5).stderr


def test_incomplete_or_foreign_files_are_refused_in_one_line(tmp_path: Path) -> None:
    files = original_files(weights(), 3)
    source = write(tmp_path / "old", files)
    (source / "yafsdp_model_00001_00.pt").unlink()
    result = run(source, tmp_path / "model.pt")
    assert result.exit_code == 1
    assert result.stderr == f"error: {source} has no file of data-parallel rank 1\n"
    assert "is a file missing?" in run(write(tmp_path / "b", files[:2]), "x.pt").stderr
    assert "has no meta" in run(write(tmp_path / "c", files[1:]), "x.pt").stderr
    assert "neither" in run(tmp_path, "x.pt").stderr
    assert "is not a folder" in run(tmp_path / "nothing", "x.pt").stderr
    assert "exists already" in run(source, source).stderr
    files[2]["main_parameter"] = files[2]["main_parameter"][:-1]
    with pytest.raises(ConversionError, match="elements"):
        join(files)


# ---- flattened distributed checkpoints -------------------------------------------------------


def load_alone(state: dict[str, Any], folder: Path) -> None:
    """Loads without a process group, which torch announces by a warning."""
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=folder)


def flattened_checkpoint(folder: Path) -> nn.Module:
    """A model and its optimizer state with every tensor flattened to 1-D."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = {
        name: {"exp_avg": torch.randn(p.numel()), "step": torch.tensor(3.0)}
        for name, p in model.named_parameters()
    }
    state = {
        "model": {n: p.detach().flatten() for n, p in model.named_parameters()},
        "optimizer": {"state": optimizer, "lr": 0.25},
        "extra": torch.arange(3),
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=folder)
    return model


@pytest.mark.parametrize("kind", ["json", "pt", "safetensors"])
def test_flattened_tensors_get_their_shapes_back(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import save_file

    model = flattened_checkpoint(tmp_path / "old")
    shapes = tmp_path / f"shapes.{kind}"
    if kind == "json":
        shapes.write_text(json.dumps({n: p.shape for n, p in model.named_parameters()}))
    elif kind == "pt":
        torch.save(model.state_dict(), shapes)
    else:
        save_file(model.state_dict(), shapes)
    result = run(tmp_path / "old", tmp_path / "new", "--shapes", shapes)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1].endswith("no shape is known for it: extra")
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    momentum = torch.zeros(4, 3)
    state = {
        "model": other.state_dict(),
        "optimizer": {"state": {"0.weight": {"exp_avg": momentum}}, "lr": 0.0},
    }
    load_alone(state, tmp_path / "new")
    assert_equal(other.state_dict(), model.state_dict())
    assert state["optimizer"]["lr"] == 0.25
    old = {"optimizer": {"state": {"0.weight": {"exp_avg": torch.zeros(12)}}}}
    load_alone(old, tmp_path / "old")
    assert torch.equal(momentum.flatten(), old["optimizer"]["state"]["0.weight"]["exp_avg"])


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    flattened_checkpoint(tmp_path / "old")
    assert "--shapes" in run(tmp_path / "old", tmp_path / "new").stderr
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"0.weight": [5, 3]}')
    refused = run(tmp_path / "old", tmp_path / "new", "--shapes", shapes)
    assert refused.exit_code == 1
    assert "has 12 elements, but '0.weight' has the shape [5, 3]" in refused.stderr
    shapes.write_text("[1, 2")
    assert "could not be read" in run(tmp_path / "old", "new", "--shapes", shapes).stderr
    assert "neither .json" in run(tmp_path / "old", "new", "--shapes", tmp_path).stderr


# ---- the command -----------------------------------------------------------------------------


def test_the_installed_command_is_this_one() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["ya-fsdp"].partition(":")
    assert callable(getattr(import_module(module), name))
    assert any(need.startswith("typer") for need in project["optional-dependencies"]["cli"])


def test_without_typer_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from ya_fsdp.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "the ya-fsdp command needs typer: pip install 'ya-fsdp[cli]'\n"
