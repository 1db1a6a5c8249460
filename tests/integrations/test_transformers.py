"""transformers' Trainer on two ranks, against accelerate's FSDP2 and one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="the extra [accelerate] is not installed")
pytest.importorskip("transformers", reason="the extra [transformers] is not installed")

from tests.harness import WorkerPool
from tests.integrations.support import (
    Rows,
    foreign,
    history,
    llama,
    needs_sharded_optimizers,
    tokens,
)

OPTIONS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "ddp_backend": "gloo",
    "disable_tqdm": True,
    "seed": 5,
}


def make_trainer(
    folder: str, model: Any, *, ours: bool | None = True, kind: str = "FULL_STATE_DICT", **more: Any
) -> Any:
    """A trainer on ya_fsdp, on FSDP2 (``ours=False``) or as it is (``None``)."""
    from transformers import Trainer, TrainingArguments

    from ya_fsdp.integrations import YaFSDPConfig
    from ya_fsdp.integrations.transformers import attach

    sharded = {} if ours is None else {"fsdp": True, "fsdp_config": {"state_dict_type": kind}}
    args = TrainingArguments(output_dir=folder, **{**OPTIONS, **sharded, **more})
    rows = Rows(tokens(8).repeat(8, 1))
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=Rows(tokens(6, seed=7)))
    return trainer if ours is None else attach(trainer, YaFSDPConfig(enabled=ours))


def generated(model: Any) -> Any:
    with torch.no_grad():
        return model.generate(tokens(1, 4), max_new_tokens=8, do_sample=False).tolist()


def generating(trainer: Any, result: dict[str, Any]) -> Any:
    """A callback that generates in the middle, and what a plain model of the weights then says."""
    from transformers import TrainerCallback

    class Generating(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step != 2:
                return
            result["in the middle"] = generated(trainer.model)
            weights = trainer.accelerator.get_state_dict(trainer.model)
            if trainer.is_world_process_zero():
                plain = llama()
                plain.load_state_dict(weights)
                result["by a plain model"] = generated(plain.eval())

    return Generating()


@foreign
def whole_run(rank: int, world_size: int, folder: str, ours: bool, kind: str) -> dict[str, Any]:
    """Evaluates, trains with checkpoints and the best one loaded, saves, generates, resumes."""
    result: dict[str, Any] = {}
    saving = {"save_strategy": "steps", "save_steps": 3}
    evaluating = {"eval_strategy": "steps", "eval_steps": 3}
    trainer = make_trainer(
        folder, llama(), ours=ours, kind=kind, load_best_model_at_end=True, **saving, **evaluating
    )
    if ours:
        result["before"] = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        result["class"] = type(trainer.model).__name__
        trainer.add_callback(generating(trainer, result))
    trainer.train()
    result["losses"] = history(trainer)
    result["evals"] = [h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h]
    result["best"] = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/final")
    result["generated"] = generated(trainer.model)
    dist.barrier()
    again = make_trainer(folder, llama(seed=8), ours=ours, kind=kind, **evaluating)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    result["resumed"] = history(again)
    return result


@foreign
def plain_run(rank: int, world_size: int, folder: str) -> Any:
    """One process with the batches of two."""
    trainer = make_trainer(folder, llama(), ours=None, per_device_train_batch_size=4)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, history(trainer)


@pytest.fixture(scope="module")
def fsdp2(world2: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fsdp2")
    result: dict[str, Any] = world2.run(whole_run, str(folder), False, "FULL_STATE_DICT")[0]
    return result


@pytest.mark.parametrize(
    "kind", ["FULL_STATE_DICT", pytest.param("SHARDED_STATE_DICT", marks=needs_sharded_optimizers)]
)
def test_a_whole_run_equals_fsdp2_and_leaves_a_model_that_loads(
    world2: WorkerPool, tmp_path: Path, fsdp2: dict[str, Any], kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    got = world2.run(whole_run, str(tmp_path), True, kind)[0]
    assert got["losses"] == pytest.approx(fsdp2["losses"], rel=1e-5)
    assert got["resumed"] == got["losses"]
    assert got["class"] == "FSDPLlamaForCausalLM"
    # The log holds the two evaluations before training as well.
    assert got["evals"][-len(fsdp2["evals"]) :] == pytest.approx(fsdp2["evals"], rel=1e-5)
    assert got["best"] == pytest.approx(min(fsdp2["evals"]), rel=1e-5)
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert generated(loaded) == got["generated"]
    assert got["in the middle"] == got["by a plain model"]


def test_two_ranks_train_and_evaluate_as_one_process(
    world1: WorkerPool, world2: WorkerPool, tmp_path: Path, fsdp2: dict[str, Any]
) -> None:
    before, losses = world1.run(plain_run, str(tmp_path))[0]
    got = world2.run(evaluate_only, str(tmp_path))[0]
    assert got == pytest.approx([before, before], rel=1e-5)
    assert fsdp2["losses"] == pytest.approx(losses, rel=1e-4)


@foreign
def evaluate_only(rank: int, world_size: int, folder: str) -> list[float]:
    trainer = make_trainer(folder, llama())
    return [trainer.evaluate()["eval_loss"] for _ in range(2)]


@foreign
def in_bf16(rank: int, world_size: int, folder: str, kind: str) -> set[torch.dtype]:
    model = llama().to(torch.bfloat16)
    trainer = make_trainer(folder, model, kind=kind, bf16=True, max_steps=1)
    trainer.train()
    trainer.save_model()
    return {p.dtype for p in trainer.model.parameters()}


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_model_loaded_in_bf16_is_saved_in_bf16(
    world2: WorkerPool, tmp_path: Path, kind: str
) -> None:
    from safetensors.torch import load_file

    assert world2.run(in_bf16, str(tmp_path), kind)[0] == {torch.float32}
    saved = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@foreign
def with_the_mixin(rank: int, world_size: int, folder: str, layers: int) -> Any:
    from transformers import Trainer, TrainingArguments

    from ya_fsdp import YaFSDPModule
    from ya_fsdp.integrations.transformers import YaFSDPTrainerMixin

    class OurTrainer(YaFSDPTrainerMixin, Trainer):  # type: ignore[misc]
        pass

    options = {"ya_fsdp": {"num_layers_to_checkpoint": layers}}
    args = TrainingArguments(output_dir=folder, **OPTIONS, fsdp=True, fsdp_config=options)
    trainer = OurTrainer(llama(), args, train_dataset=Rows(tokens(8).repeat(8, 1)))
    trainer.train()
    plugin = trainer.accelerator.state.fsdp_plugin
    units = sum(isinstance(m, YaFSDPModule) for m in trainer.model.modules())
    return history(trainer), plugin.config.num_layers_to_checkpoint, units


def test_the_mixin_reads_our_options_from_the_trainers_own(
    world2: WorkerPool, tmp_path: Path, fsdp2: dict[str, Any]
) -> None:
    losses, layers, units = world2.run(with_the_mixin, str(tmp_path), 2)[0]
    assert layers == 2
    assert units == 5  # three layers, the embedding, the root
    assert losses == pytest.approx(fsdp2["losses"], rel=1e-5)


@foreign
def attach_twice(rank: int, world_size: int, folder: str) -> None:
    from ya_fsdp.integrations.transformers import attach

    trainer = make_trainer(folder, llama(), ours=None)
    model = llama()
    trainer.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attach(trainer)


def test_a_trainer_that_has_wrapped_its_model_is_refused(
    world2: WorkerPool, tmp_path: Path
) -> None:
    from ya_fsdp.integrations.transformers import attach

    with pytest.raises(RuntimeError, match="wrapped a model already"):
        world2.run(attach_twice, str(tmp_path))
    with pytest.raises(TypeError, match="takes a transformers Trainer, got list"):
        attach([])
