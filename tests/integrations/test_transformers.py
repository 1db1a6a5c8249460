"""transformers' Trainer on two ranks, against accelerate's FSDP2 and one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [transformers] is not installed")

from tests.harness import WorkerPool
from tests.integrations.support import foreign, llama, tokens


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_trainer(
    folder: str, model: Any, *, enabled: bool = True, sharded: bool = False, **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    from ya_fsdp.integrations import YaFSDPConfig
    from ya_fsdp.integrations.transformers import attach

    kind = "SHARDED_STATE_DICT" if sharded else "FULL_STATE_DICT"
    defaults: dict[str, Any] = {
        "output_dir": folder,
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
        "optim": "adamw_torch",
        "fsdp": True,
        "fsdp_config": {"state_dict_type": kind},
    }
    args = TrainingArguments(**{**defaults, **options})
    rows = Rows(tokens(8).repeat(4, 1))
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=Rows(tokens(6, seed=7)))
    return attach(trainer, YaFSDPConfig(enabled=enabled))


def losses(trainer: Any) -> list[tuple[float, float]]:
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


@foreign
def run_plain(rank: int, world_size: int, folder: str, enabled: bool, bf16: bool) -> Any:
    trainer = make_trainer(folder, llama(), enabled=enabled, bf16=bf16)
    trainer.train()
    trainer.save_model()
    return losses(trainer)
