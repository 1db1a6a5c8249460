"""What a person sees while a run goes on: a live line, or plain lines in a log file."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Monitor:
    """Shows progress on one rank and does nothing on the others."""

    def __init__(self, active: bool, first_step: int, steps: int, tensorboard: Path | None) -> None:
        """Opens the display.

        Args:
            active: whether this rank shows and logs.
            first_step: steps done before this run.
            steps: steps of the whole run.
            tensorboard: folder for TensorBoard's event files, ``None`` for none.
        """
        self.console = Console(quiet=not active, highlight=False)
        self._live = active and self.console.is_terminal
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step, numbers="")
        self._steps = steps
        self._between_lines = max(1, steps // 20)
        self._last_line = first_step
        self._board: Any = None
        if active and tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            # Steps after the one resumed from were lost with the run that made them.
            self._board = SummaryWriter(str(tensorboard), purge_step=first_step + 1)

    def __enter__(self) -> Monitor:
        """Starts the live line."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops the live line and closes the event file."""
        self._progress.stop()
        if self._board is not None:
            self._board.close()

    def show(self, step: int, loss: float, tokens_per_second: float, memory: int) -> None:
        """Updates the line after ``step`` steps."""
        numbers = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {memory / 2**20:,.0f} MiB"
        self._progress.update(self._task, completed=step, numbers=numbers)
        if not self._live and (step - self._last_line >= self._between_lines):
            self.say(f"step {step:>6}/{self._steps}  {numbers}")
            self._last_line = step

    def say(self, text: str) -> None:
        """Prints a line above the live one."""
        self.console.print(text, markup=False, soft_wrap=True)

    def log(self, step: int, **values: float) -> None:
        """Adds values to TensorBoard."""
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
