"""One training step and one validation of a sharded language model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.data import BatchReader, Corpus
from lm.model import next_token_loss
from lm.runtime import Runtime
from ya_fsdp import YaFSDPModule

VALIDATION_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """What decides the losses, beside the model's shape."""

    steps: int
    seq_len: int
    batch_size: int
    accumulate: int
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    bf16: bool
    compile: bool
    gather: str = "full"


def build_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=(0.9, 0.95),
        weight_decay=options.weight_decay,
        fused=True,
    )


def learning_rate(step: int, options: TrainingOptions) -> float:
    """Rises over the warm-up steps, then falls along a cosine to a tenth of its peak."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Trainer:
    """Model, optimizer and data, with what one step and one validation do."""

    def __init__(
        self, model: nn.Module, options: TrainingOptions, corpus: Corpus, runtime: Runtime
    ) -> None:
        """Makes the optimizer and opens the data for a sharded model."""
        self.options = options
        self.runtime = runtime
        assert isinstance(model, YaFSDPModule), "the model must be sharded"
        self.model: nn.Module = model
        self._sharding: YaFSDPModule = model
        self.optimizer = build_optimizer(model, options)
        size = options.seq_len, options.batch_size
        self._train = BatchReader(corpus.train, *size, seed=options.seed)
        self._validation = BatchReader(corpus.validation, *size, seed=options.seed + 1)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Makes one optimizer step; returns this rank's mean loss and the gradient's norm."""
        rate = learning_rate(step, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.runtime.device)
        parts = self.options.accumulate
        for micro in range(parts):
            # Gradients of the earlier microbatches wait on each rank for those of the last one.
            self._sharding.set_requires_gradient_sync(micro == parts - 1)
            loss = self._loss(self._train, step, micro, parts) / parts
            torch.autograd.backward(loss)
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the same validation batches each time."""
        self.model.eval()
        losses = [self._loss(self._validation, i, 0, 1) for i in range(VALIDATION_BATCHES)]
        self.model.train()
        return self.average(torch.stack(losses).mean()[None])[0]

    def average(self, values: Tensor) -> list[float]:
        """Means over the ranks of a 1-D tensor."""
        dist.all_reduce(values)
        return [float(value) for value in (values / self.runtime.world_size).tolist()]

    def _loss(self, reader: BatchReader, step: int, micro: int, micros: int) -> Tensor:
        ranks = self.runtime.world_size
        inputs, targets = reader.read(step, micro * ranks + self.runtime.rank, micros * ranks)
        device = self.runtime.device
        return next_token_loss(self.model(inputs.to(device)), targets.to(device))
