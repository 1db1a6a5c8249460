"""``ya-fsdp convert`` on files made by hand after the description of the original's."""

from __future__ import annotations

import json
import os
import pickle
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

import ya_fsdp
from ya_fsdp.cli.app import app
from ya_fsdp.cli.classic import join
from ya_fsdp.cli.classic_optimizer import join_optimizer
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


# ---- optimizer state beside them ---------------------------------------------------------------


def trained_files(world: int, groups: str) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Every rank's weights and AdamW state over flat parameters, and AdamW's of a plain model."""
    truth = weights()
    plain = {name: nn.Parameter(value.clone()) for name, value in truth.items()}
    files = original_files(truth, world, 8)
    flats = [[nn.Parameter(f[n]) for n in ("layernorm_parameter", "main_parameter")] for f in files]
    decays = (0.0, 0.1) if groups == "two groups" else (0.1, 0.1)

    def adamw(norms: list[Any], others: list[Any]) -> torch.optim.AdamW:
        if groups == "one group":
            return torch.optim.AdamW([*norms, *others], lr=0.1, weight_decay=0.1)
        pair = zip((norms, others), decays, strict=True)
        made = [{"params": params, "weight_decay": decay} for params, decay in pair]
        return torch.optim.AdamW(made[::-1], lr=0.1)

    names = {name for each in NORMS for name in each}
    theirs = adamw(
        [p for n, p in plain.items() if n in names], [p for n, p in plain.items() if n not in names]
    )
    ours = [adamw([norms], [main]) for norms, main in flats]
    for _ in range(3):
        grads = {name: torch.randn_like(value) for name, value in truth.items()}
        for name, param in plain.items():
            param.grad = grads[name]
        pieces = original_files(grads, world, 8)
        for piece, (norms, main) in zip(pieces, flats, strict=True):
            norms.grad, main.grad = piece["layernorm_parameter"], piece["main_parameter"]
        for optimizer in (theirs, *ours):
            optimizer.step()
    trained = original_files({n: p.detach() for n, p in plain.items()}, world, 8)
    named = {name: theirs.state[param] for name, param in plain.items()}
    return trained, [optimizer.state_dict() for optimizer in ours], named


@pytest.mark.parametrize("groups", ["one group", "two groups"])
@pytest.mark.parametrize("world", [1, 3])
def test_optimizer_state_goes_over_to_the_parameters(
    tmp_path: Path, world: int, groups: str
) -> None:
    files, states, truth = trained_files(world, groups)
    source = write(tmp_path / "old", files)
    for rank, state in enumerate(states):
        torch.save(state, source / f"yafsdp_optim_{rank:05d}_00.pt")
    result = run(source, tmp_path / "model.pt", "--optimizer", tmp_path / "optimizer.pt")
    assert result.exit_code == 0, result.output
    assert f"optimizer state of {len(truth)} parameters" in result.stdout
    found = torch.load(tmp_path / "optimizer.pt")
    assert set(found["state"]) == set(truth)
    for name, values in truth.items():
        assert set(found["state"][name]) == set(values) == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in values.items():
            torch.testing.assert_close(found["state"][name][key], value, msg=f"{name} {key}")
    names = {name for each in NORMS for name in each}
    sets = [set(group["params"]) for group in found["param_groups"]]
    assert sets == ([set(truth)] if groups == "one group" else [set(truth) - names, names])
    assert found["param_groups"][0]["weight_decay"] == 0.1


def test_a_converted_optimizer_continues_on_a_plain_model(tmp_path: Path) -> None:
    files, states, truth = trained_files(2, "one group")
    named = join_optimizer(files, states)
    whole = join(files)
    params = {name: nn.Parameter(whole[name].clone()) for name in truth}
    optimizer = torch.optim.AdamW(params.values(), lr=0.5)
    order = [name for group in named["param_groups"] for name in group["params"]]
    numbers = {name: i for i, name in enumerate(truth)}
    state = {numbers[name]: values for name, values in named["state"].items()}
    options = {k: v for k, v in named["param_groups"][0].items() if k != "params"}
    optimizer.load_state_dict(
        {"state": state, "param_groups": [{**options, "params": list(range(len(truth)))}]}
    )
    assert sorted(order) == sorted(truth)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, param in params.items():
        assert torch.equal(optimizer.state[param]["exp_avg"], truth[name]["exp_avg"])


def test_optimizer_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    files, states, _ = trained_files(2, "one group")
    source = write(tmp_path / "old", files)
    out, target = tmp_path / "model.pt", tmp_path / "optimizer.pt"
    assert "no files named like yafsdp_optim" in run(source, out, "--optimizer", target).stderr
    assert "can not hold numbers" in run(source, out, "--optimizer", "x.safetensors").stderr
    assert not out.exists()
    with pytest.raises(ConversionError, match="1 files of optimizer state and 2 of weights"):
        join_optimizer(files, states[:1])
    three = {**states[0], "param_groups": [{"params": [0, 1, 2]}]}
    with pytest.raises(ConversionError, match=r"parameters \[0, 1, 2\]; there should be two"):
        join_optimizer(files, [three, states[1]])
    with pytest.raises(ConversionError, match="no state and param_groups"):
        join_optimizer(files, [states[0], {}])
    moments = states[0]["state"][1]
    moments["exp_avg"] = moments["exp_avg"][:-1]
    with pytest.raises(ConversionError, match=r"'exp_avg' has .* do not belong together"):
        join_optimizer(files, states)
    states[1]["state"].pop(0)
    with pytest.raises(ConversionError, match="different kinds of optimizer state"):
        join_optimizer(files, states)


def test_a_release_that_puts_an_underscore_before_names_is_read_too() -> None:
    truth = weights()
    files = [
        {name if name == "meta" else f"_{name}": value for name, value in file.items()}
        for file in original_files(truth, 2)
    ]
    truth["layers.0.table"] = torch.arange(3)
    assert_equal(join(files), truth)


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


class Runs:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_flattened_checkpoint_that_would_run_something_is_refused(tmp_path: Path) -> None:
    model = flattened_checkpoint(tmp_path / "old")
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({n: p.shape for n, p in model.named_parameters()}))
    metadata = pickle.loads((tmp_path / "old" / ".metadata").read_bytes())
    metadata.planner_data["extra"] = Runs(tmp_path / "made")
    (tmp_path / "old" / ".metadata").write_bytes(pickle.dumps(metadata))
    result = run(tmp_path / "old", tmp_path / "new", "--shapes", shapes)
    assert result.exit_code != 0
    assert "is not safe to read" in result.stderr
    assert not (tmp_path / "made").exists()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"entry": Runs(tmp_path / "made")}, checkpoint_id=tmp_path / "other")
    result = run(tmp_path / "other", tmp_path / "new", "--shapes", shapes)
    assert result.exit_code != 0
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "new").exists()


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


def test_the_help_shows_what_a_file_of_shapes_holds() -> None:
    assert '{"name": [rows, columns]}' in " ".join(run("--help").stdout.split())


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
    assert done.stderr == "the ya-fsdp command needs typer: pip install typer\n"


def test_the_command_tells_its_version() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert told.output == f"ya-fsdp {ya_fsdp.__version__}\n"
