"""Where options come from, and which win."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ya_fsdp.integrations import YaFSDPConfig
from ya_fsdp.integrations.config import accelerate_config_file
from ya_fsdp.integrations.sharding import find_layers, recompute_layers

YAML = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  ya_fsdp_param_dtype: bf16
  fsdp_ya_fsdp_enabled: false
  fsdp_num_layers_to_checkpoint: 3
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG_FILE", "ENABLED", "REDUCE_DTYPE", "PARAM_DTYPE", "WRAP"):
        monkeypatch.delenv(f"YA_FSDP_{name}", raising=False)


def test_a_mapping_gives_our_keys_and_those_of_the_original() -> None:
    config = YaFSDPConfig.from_mapping(
        {
            "fsdp_version": 2,
            "fsdp_ya_fsdp_enabled": False,
            "fsdp_num_layers_to_checkpoint": 4,
            "ya_fsdp_wrap": "Block, Other",
            "ya_fsdp": {"reduce_dtype": "bfloat16"},
        }
    )
    assert config.enabled is False
    assert config.num_layers_to_checkpoint == 4
    assert config.wrap == ("Block", "Other")
    assert config.reduce_dtype is torch.bfloat16


@pytest.mark.parametrize("text, value", [("1", True), ("no", False), ("False", False)])
def test_a_switch_in_the_environment_is_read(text: str, value: bool) -> None:
    assert YaFSDPConfig.from_env({"YA_FSDP_ENABLED": text}).enabled is value


def test_numbers_and_dtypes_in_the_environment_are_read() -> None:
    config = YaFSDPConfig.from_env(
        {"YA_FSDP_GRANULARITY": "32", "YA_FSDP_NUM_GATHER_BUFFERS": "3", "YA_FSDP_MASTER_DTYPE": ""}
    )
    assert config.granularity == 32
    assert config.num_gather_buffers == 3
    assert config.master_dtype is None
    for text, value in (("8", 8), ("1", True), ("false", False), ("none", None)):
        found = YaFSDPConfig.from_env({"YA_FSDP_RESHARD_AFTER_FORWARD": text})
        assert found.reshard_after_forward is value


def test_python_wins_over_the_environment_and_that_over_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml", reason="PyYAML comes with accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(YAML)
    monkeypatch.setenv("YA_FSDP_CONFIG_FILE", str(path))
    monkeypatch.setenv("YA_FSDP_ENABLED", "true")
    config = YaFSDPConfig.discover(num_layers_to_checkpoint=1)
    assert config.param_dtype is torch.bfloat16
    assert config.enabled is True
    assert config.num_layers_to_checkpoint == 1


def test_the_named_file_is_the_one_of_the_launcher() -> None:
    assert accelerate_config_file({"YA_FSDP_CONFIG_FILE": "x.yaml"}) == Path("x.yaml")
    assert accelerate_config_file({}) is None


@pytest.mark.parametrize(
    "values, message",
    [
        ({"ya_fsdp_colour": 1}, "the YaFSDP option 'colour'"),
        ({"ya_fsdp_param_dtype": "int3"}, "param_dtype must be one of"),
        ({"ya_fsdp_num_layers_to_checkpoint": "many"}, "must be an integer, got 'many'"),
        ({"ya_fsdp_num_layers_to_checkpoint": -2}, "must be -1"),
        ({"ya_fsdp_enabled": "maybe"}, "enabled must be true or false"),
        ({"ya_fsdp": {"options": {"speed": 9}}}, "has no keyword speed"),
    ],
)
def test_what_can_not_be_meant_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        YaFSDPConfig.from_mapping(values)


def test_reduction_is_in_fp32_under_mixed_precision_unless_said_otherwise() -> None:
    assert YaFSDPConfig().mp_policy().reduce_dtype is None
    policy = YaFSDPConfig(param_dtype="bf16").mp_policy()
    assert (policy.reduce_dtype, policy.output_dtype) == (torch.float32, None)
    assert YaFSDPConfig(param_dtype="bf16", reduce_dtype="bf16").mp_policy().reduce_dtype is (
        torch.bfloat16
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(3, 3)
        if tied:
            self.head.weight = self.blocks[1].linear.weight


def names(model: nn.Module, **options: object) -> list[str]:
    return [name for name, _ in find_layers(model, YaFSDPConfig(**options))]  # type: ignore[arg-type]


def test_layers_are_found_by_class_by_function_and_in_lists() -> None:
    blocks = [f"blocks.{i}" for i in range(3)]
    assert names(Model()) == blocks
    assert names(Model(), wrap=["Block"]) == blocks
    assert names(Model(), wrap=lambda n, _: n == "head") == ["head"]
    both = names(Model(), wrap=lambda n, m: isinstance(m, (Block, nn.Linear)))
    assert both.index("blocks.0.linear") < both.index("blocks.0")


def test_a_layer_that_shares_a_parameter_is_left_to_the_root() -> None:
    assert names(Model(tied=True)) == ["blocks.0", "blocks.2"]


def test_a_class_that_the_model_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="no module of class Missing to wrap"):
        names(Model(), wrap=["Block", "Missing"])


def test_recomputation_keeps_names_values_and_gradients() -> None:
    torch.manual_seed(0)
    block = Block()
    x = torch.randn(2, 3, requires_grad=True)
    block(x).sum().backward()
    want = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    before = list(block.state_dict())
    recompute_layers([block], -1)
    block.zero_grad()
    block(x).sum().backward()
    assert list(block.state_dict()) == before
    got = [p.grad for p in block.parameters() if p.grad is not None]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
