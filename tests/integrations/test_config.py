"""Where options come from, and which win."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import WorkerPool
from ya_fsdp.build import schedule_of, state_of
from ya_fsdp.collectives import Fp32AccumulatingCollectives, RecordingCollectives
from ya_fsdp.integrations import YaFSDPConfig
from ya_fsdp.integrations.config import accelerate_config_file
from ya_fsdp.integrations.sharding import find_layers, recompute_layers, shard_model

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
        ({"ya_fsdp_gather_dtype": "fp3"}, "gather_dtype must be one of"),
        ({"ya_fsdp_collectives": "pigeons"}, "collectives must be one of c10d.*'pigeons'"),
        ({"ya_fsdp_resident_budget": "lots"}, "resident_budget must be an integer.*'lots'"),
        ({"ya_fsdp_resident_budget": 1.5}, "resident_budget must be an integer.*1.5"),
        ({"ya_fsdp_communication_sms": "some"}, "communication_sms must be an integer.*'some'"),
        ({"ya_fsdp_graph": "yes"}, "graph must be false.*capture_step"),
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


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


EVERYTHING = {
    "YA_FSDP_WRAP": "Block",
    "YA_FSDP_GATHER_DTYPE": "int8",
    "YA_FSDP_PARAM_DTYPE": "bf16",
    "YA_FSDP_REDUCE_DTYPE": "bf16",
    "YA_FSDP_BIT32_ACC_FOR_BIT16_REDUCE_SCATTER": "true",
    "YA_FSDP_FUSED_WEIGHT_GRADIENTS": "1",
    "YA_FSDP_COLLECTIVES": "c10d",
    "YA_FSDP_SHARD_ALIGNMENT": "64",
    "YA_FSDP_GRANULARITY": "element",
    "YA_FSDP_NUM_GATHER_BUFFERS": "2",
    "YA_FSDP_NUM_GRADIENT_BUFFERS": "3",
    "YA_FSDP_RESIDENT_BUDGET": "100000",
    "YA_FSDP_COMMUNICATION_SMS": "auto",
    "YA_FSDP_GRAPH": "false",
}


def reaches_the_engine(rank: int, world: int) -> None:
    in_yaml = {name.lower(): value for name, value in EVERYTHING.items()}
    for config in (YaFSDPConfig.from_env(EVERYTHING), YaFSDPConfig.from_mapping(in_yaml)):
        model: Any = Model()
        shard_model(model, config)
        schedule = schedule_of(model)
        assert schedule.pool.num_buffers == 2
        assert schedule.reducer.num_buffers == 3
        for block in model.blocks:
            unit = state_of(block).unit
            (group,) = [g for g in unit.groups if g.dtypes.wire is not None]
            assert group.dtypes.wire is torch.int8
            assert group.dtypes.reduce is torch.bfloat16
            assert group.grads.fused
            assert group.layout.shard_numel % 64 == 0
            assert isinstance(unit.collectives, Fp32AccumulatingCollectives)
            assert not unit.reshard_after_forward, "three blocks fit the budget"


def test_what_the_environment_and_the_yaml_say_reaches_the_engine(world2: WorkerPool) -> None:
    world2.run(reaches_the_engine)


def trains_alike(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model: Any = Model()
    plain = copy.deepcopy(model)
    config = YaFSDPConfig(
        granularity=3,
        reshard_after_forward=2,
        fused_weight_gradients=True,
        sync_replicas=False,
        resident_budget=10**6,
        collectives=RecordingCollectives(),
        num_layers_to_checkpoint=2,
    )
    shard_model(model, config)
    for step in range(3):
        xs = torch.randn(world, 4, 3, generator=torch.Generator().manual_seed(step))
        model(xs[rank]).square().mean().backward()
        torch.stack([plain(x).square().mean() for x in xs]).mean().backward()
        for each in (model, plain):
            with torch.no_grad():
                for p in each.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach())
    assert config.collectives.calls  # type: ignore[union-attr]


def test_a_model_with_many_options_trains_like_a_plain_one(world2: WorkerPool) -> None:
    world2.run(trains_alike)
