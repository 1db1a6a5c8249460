"""The steps of a run, with what happens between them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm import checkpoint
from lm.progress import Monitor
from lm.report import History
from lm.runtime import StopRequest
from lm.trainer import Trainer, learning_rate

# Numbers are read from the device, and ranks agree whether to stop, once in so many steps: each
# reading makes the host wait for the device.
SYNC_EVERY = 5


@dataclasses.dataclass
class Loop:
    """Trains until the last step or until somebody asks to stop.

    Attributes:
        trainer: does the steps.
        monitor: shows them.
        history: what was measured; its length is the number of steps done.
        folder: where checkpoints go.
        save_every: steps between checkpoints; 0 for none, except when a run is stopped.
        validate_every: steps between validations.
        saved_options: go into each checkpoint.
    """

    trainer: Trainer
    monitor: Monitor
    history: History
    folder: Path
    save_every: int
    validate_every: int
    saved_options: dict[str, Any]
    _waiting: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    _since: float = 0.0

    def run(self, stop: StopRequest) -> bool:
        """Runs the steps that are left; returns whether the last one was reached."""
        total = self.trainer.options.steps
        self._since = time.perf_counter()
        for step in range(len(self.history.losses), total):
            self._waiting.append(self.trainer.step(step))
            done = step + 1
            last = done == total
            save = self.save_every > 0 and (last or done % self.save_every == 0)
            validate = last or done % self.validate_every == 0
            if not (save or validate or done % SYNC_EVERY == 0):
                continue
            self._read_numbers(done)
            if validate:
                self._validate(done)
            stopping = stop.agreed()
            if save or stopping:
                self._save(done)
            if stopping:
                return last
            self._since = time.perf_counter()
        return True

    def _read_numbers(self, done: int) -> None:
        """Takes the losses of the steps since the last call from the device."""
        options, count = self.trainer.options, len(self._waiting)
        losses = self.trainer.average(torch.stack([loss for loss, _ in self._waiting]))
        norms = torch.stack([norm for _, norm in self._waiting]).tolist()
        seconds = time.perf_counter() - self._since
        self._waiting.clear()
        speed = options.batch_size * options.seq_len * count / seconds
        self.history.seconds += seconds
        self.history.losses += losses
        self.history.gradient_norms += norms
        for step in range(done - count, done):
            rate = learning_rate(step, options)
            self.history.learning_rates.append(rate)
            self.monitor.log(
                step + 1,
                loss=self.history.losses[step],
                gradient_norm=self.history.gradient_norms[step],
                learning_rate=rate,
                tokens_per_second=speed,
            )
        self.monitor.show(done, losses[-1], speed, self.trainer.runtime.peak_memory())

    def _validate(self, done: int) -> None:
        loss = self.trainer.validate()
        self.history.validation.append((done, loss))
        self.monitor.log(done, validation_loss=loss)
        self.monitor.say(f"step {done}: validation loss {loss:.4f}")

    def _save(self, done: int) -> None:
        path = checkpoint.save(
            self.folder,
            done,
            self.trainer.model,
            self.trainer.optimizer,
            self.history,
            self.saved_options,
        )
        self.monitor.say(f"saved {path}")
