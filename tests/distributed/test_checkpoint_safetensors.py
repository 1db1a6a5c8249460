"""Hugging Face safetensors in and out of sharded models, against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from tests.distributed.checkpoint_models import (
    assert_same,
    assert_unchanged,
    plain_net,
    shard,
    snapshot,
    wholes,
)
from tests.harness import WorkerPool
from ya_fsdp import checkpoint, fully_shard
from ya_fsdp.checkpoint import CheckpointError, safetensors_files

INDEX = "model.safetensors.index.json"


def source_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What another program would have written: no second name of the tied weight."""
    state = plain_net(seed=5).to(dtype).state_dict()
    del state["head.weight"]
    return state


def write_sharded(folder: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    names = list(tensors)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, str(folder / file))
        weight_map.update(dict.fromkeys(part, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ---- in ----------------------------------------------------------------------------------------


def load_on(rank: int, world_size: int, places: list[str], cut: str) -> None:
    expected = plain_net(seed=5).state_dict()
    for place in places:
        model = shard(plain_net(), cut)
        assert checkpoint.load_safetensors(model, place) == ([], [])
        assert_same(wholes(model), expected)
        assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("cut", ["row", "element"])
def test_a_model_is_filled_from_a_file_an_index_or_a_folder(
    any_pool: WorkerPool, tmp_path: Path, cut: str
) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "one").mkdir()
    write_sharded(tmp_path / "many", source_tensors(), 3)
    save_file(source_tensors(), str(tmp_path / "one" / "anything.safetensors"))
    places = ["many", f"many/{INDEX}", "one", "one/anything.safetensors"]
    any_pool.run(load_on, [str(tmp_path / place) for place in places], cut)


def counted(rank: int, world_size: int, file: str, cut: str) -> int:
    model = shard(plain_net(), cut)
    read = 0
    whole, box = safetensors_files.Reader.whole, safetensors_files.Reader.box

    def count_whole(self: Any, name: str) -> torch.Tensor:
        nonlocal read
        tensor = whole(self, name)
        read += tensor.numel()
        return tensor

    def count_box(self: Any, *args: Any) -> torch.Tensor:
        nonlocal read
        tensor = box(self, *args)
        read += tensor.numel()
        return tensor

    safetensors_files.Reader.whole, safetensors_files.Reader.box = count_whole, count_box
    try:
        checkpoint.load_safetensors(model, file)
    finally:
        safetensors_files.Reader.whole, safetensors_files.Reader.box = whole, box
    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert read == own + sum(buffer.numel() for buffer in (model.offset, model.calls))
    return own


@pytest.mark.parametrize("cut", ["row", "element"])
def test_a_rank_reads_the_elements_that_it_owns_and_no_other(
    any_pool: WorkerPool, tmp_path: Path, cut: str
) -> None:
    save_file(source_tensors(), str(tmp_path / "model.safetensors"))
    owned = any_pool.run(counted, str(tmp_path), cut)
    assert sum(owned) == sum(parameter.numel() for parameter in plain_net().parameters())


def load_bfloat16(rank: int, world_size: int, folder: str) -> None:
    model = shard(plain_net(), "element")
    checkpoint.load_safetensors(model, folder)
    for name, value in wholes(model).items():
        expected = plain_net(seed=5).bfloat16().state_dict()[name]
        own = plain_net().state_dict()[name].dtype
        assert value.dtype == own
        assert torch.equal(value, expected.to(own))


def test_values_are_converted_to_the_dtype_of_the_parameter(
    world2: WorkerPool, tmp_path: Path
) -> None:
    save_file(source_tensors(torch.bfloat16), str(tmp_path / "model.safetensors"))
    world2.run(load_bfloat16, str(tmp_path))


def to_theirs(name: str) -> str | None:
    """Their blocks are called layers, and they do not know our scale."""
    if name == "scale":
        return None
    return name.replace("blocks.", "transformer.layers.")


def load_mapped(rank: int, world_size: int, folder: str) -> None:
    model = shard(plain_net())
    checkpoint.load_safetensors(model, folder, name_map=to_theirs)
    expected = plain_net(seed=5).state_dict()
    expected["scale"] = plain_net().scale.detach()
    assert_same(wholes(model), expected)
    checkpoint.save_safetensors(model, f"{folder}/out", name_map=to_theirs)
    if rank == 0:
        written = load_file(f"{folder}/out/model.safetensors")
        assert_same(dict(sorted(written.items())), load_file(f"{folder}/model.safetensors"))
    with pytest.raises(CheckpointError, match="name_map gives 'x' for both"):
        checkpoint.load_safetensors(model, folder, name_map=lambda name: "x")
    with pytest.raises(CheckpointError, match="name_map gives 'x' for both"):
        checkpoint.save_safetensors(model, folder, name_map=lambda name: "x")


def test_a_function_maps_names_in_both_directions(world2: WorkerPool, tmp_path: Path) -> None:
    theirs = {to_theirs(name): value for name, value in source_tensors().items()}
    del theirs[None]
    save_file(theirs, str(tmp_path / "model.safetensors"))
    world2.run(load_mapped, str(tmp_path))


def mistakes(rank: int, world_size: int, folder: str, message: str) -> None:
    model = shard(plain_net())
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_safetensors(model, folder)
    assert_unchanged(model, before)


def test_what_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded(
    world2: WorkerPool, tmp_path: Path
) -> None:
    good = source_tensors()
    file = tmp_path / "model.safetensors"

    def check(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, str(file))
        world2.run(mistakes, str(tmp_path), message)

    check({**good, "new": torch.ones(1)}, r'Unexpected key\(s\) in state_dict: "new"')
    without = {name: value for name, value in good.items() if name != "offset"}
    check(without, r'Missing key\(s\) in state_dict: "offset"')
    check({**good, "scale": torch.ones(2)}, r"size mismatch for scale: .*\[2\].*\[1\]")
    save_file(good, str(file))
    file.write_bytes(file.read_bytes()[:-7])
    world2.run(mistakes, str(tmp_path), r"model\.safetensors can not be read")
    file.unlink()
    world2.run(mistakes, str(tmp_path), "no safetensors files in")
    world2.run(mistakes, str(tmp_path / "absent"), "absent does not exist")
    write_sharded(tmp_path, good, 2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    world2.run(mistakes, str(tmp_path), "files that are not there: model-00002-of-00002")
    (tmp_path / INDEX).write_text("{}")
    world2.run(mistakes, str(tmp_path), "is not an index")


def not_strict(rank: int, world_size: int, folder: str) -> None:
    model = shard(plain_net())
    result = checkpoint.load_safetensors(model, folder, strict=False)
    assert result.missing_keys == ["scale"] and result.unexpected_keys == ["new"]
    assert torch.equal(
        model.blocks[2].up.weight.full_tensor(), plain_net(seed=5).blocks[2].up.weight
    )
    with pytest.raises(CheckpointError, match="meta device"):
        checkpoint.load_safetensors(plain_net().to("meta"), folder)


def test_a_load_that_is_not_strict_tells_what_differs(world2: WorkerPool, tmp_path: Path) -> None:
    tensors = {**source_tensors(), "new": torch.ones(1)}
    del tensors["scale"]
    save_file(tensors, str(tmp_path / "model.safetensors"))
    world2.run(not_strict, str(tmp_path))


# ---- out ---------------------------------------------------------------------------------------


def save_on(rank: int, world_size: int, folder: str, size: Any, cut: str) -> None:
    checkpoint.save_safetensors(shard(plain_net(seed=5), cut), folder, max_shard_size=size)


@pytest.mark.parametrize("cut", ["row", "element"])
def test_a_small_model_becomes_one_file(any_pool: WorkerPool, tmp_path: Path, cut: str) -> None:
    any_pool.run(save_on, str(tmp_path), "5GB", cut)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    written = load_file(tmp_path / "model.safetensors")
    assert_same(dict(sorted(written.items())), dict(sorted(source_tensors().items())))


def test_a_large_model_becomes_files_of_limited_size_with_an_index(
    world2: WorkerPool, tmp_path: Path
) -> None:
    world2.run(save_on, str(tmp_path), "5GB", "row")
    world2.run(save_on, str(tmp_path), 600, "element")
    index = json.loads((tmp_path / INDEX).read_text())
    expected = source_tensors()
    total = sum(value.numel() * value.itemsize for value in expected.values())
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"].keys() == expected.keys()
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    for file in files:
        tensors = load_file(tmp_path / file)
        assert sum(value.numel() * value.itemsize for value in tensors.values()) <= 600
        for name, value in tensors.items():
            assert index["weight_map"][name] == file
            assert torch.equal(value, expected[name])
    world2.run(load_on, [str(tmp_path)], "row")
    world2.run(save_on, str(tmp_path), "1 MiB", "row")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


class Config:
    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "config.json").write_text(json.dumps(vars(self)))


class Pretrained(nn.Module):
    """What a transformers model tells about itself."""

    _tied_weights_keys = ("^first.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.first.weight = self.second.weight
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def save_pretrained(rank: int, world_size: int, folder: str) -> None:
    model = fully_shard(Pretrained())
    checkpoint.save_safetensors(model, folder, dtype=torch.bfloat16)
    Path(folder, "file").touch()
    with pytest.raises(CheckpointError, match="rank 0"):
        checkpoint.save_safetensors(model, f"{folder}/file/out")


def test_a_transformers_model_keeps_its_class_and_the_right_name_of_a_tied_weight(
    world2: WorkerPool, tmp_path: Path
) -> None:
    world2.run(save_pretrained, str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == {"second.weight", "second.bias"}
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"architectures": ["Pretrained"]}


def llama(rank: int, world_size: int, folder: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        expected = model(tokens).logits
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    checkpoint.save_safetensors(model, folder, max_shard_size=4000)
    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(again) is LlamaForCausalLM
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)
    if rank == 0:
        again.save_pretrained(f"{folder}/theirs")
    torch.distributed.barrier()
    torch.manual_seed(4)
    other = fully_shard(LlamaForCausalLM(config))
    checkpoint.load_safetensors(other, f"{folder}/theirs")
    with torch.no_grad():
        assert torch.equal(other(tokens).logits, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_opens_what_we_write_and_we_open_what_it_writes(
    world2: WorkerPool, tmp_path: Path, tied: bool
) -> None:
    pytest.importorskip("transformers")
    world2.run(llama, str(tmp_path), tied, timeout=120)


@pytest.mark.parametrize(
    "text, size", [("5GB", 5 * 10**9), ("2 MiB", 2**21), (7, 7), ("10kb", 10_000)]
)
def test_sizes_are_read_as_people_write_them(text: Any, size: int) -> None:
    assert safetensors_files.parse_size(text) == size


@pytest.mark.parametrize("text", ["five", "5", 0, -1, True, "5 XB", 1.5])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_size must be"):
        safetensors_files.parse_size(text)
