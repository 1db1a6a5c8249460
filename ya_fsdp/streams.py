"""Streams and events of one device, or their absence on CPU.

The compute stream is whatever stream is current where the user runs the model; the communication
stream is ours. On CPU every operation is synchronous and all of this does nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Streams:
    """The communication stream of one device and the events that order it with compute."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asynchronous = device.type not in ("cpu", "meta")
        self.comm: Any = None
        self._module: Any = None
        if self.asynchronous:
            self._module = torch.get_device_module(device)
            self.comm = self._module.Stream(device=device, priority=-1)

    def new_event(self) -> Any:
        """An event without timing, or ``None`` on CPU."""
        return self._module.Event() if self.asynchronous else None

    def on_comm(self) -> AbstractContextManager[Any]:
        """Makes the communication stream current."""
        return self._module.stream(self.comm) if self.asynchronous else nullcontext()

    def record_compute(self, event: Any) -> Any:
        """Records ``event`` on the compute stream and returns it."""
        if event is not None:
            event.record(self._module.current_stream(self.device))
        return event

    def record_comm(self, event: Any) -> Any:
        """Records ``event`` on the communication stream and returns it."""
        if event is not None:
            event.record(self.comm)
        return event

    def compute_waits(self, event: Any) -> None:
        """Later kernels of the compute stream start after ``event``."""
        if event is not None:
            self._module.current_stream(self.device).wait_event(event)

    def comm_waits(self, event: Any) -> None:
        """Later collectives start after ``event``."""
        if event is not None:
            self.comm.wait_event(event)

    def comm_waits_for_compute(self) -> None:
        """Later collectives start after everything enqueued on the compute stream so far."""
        if self.asynchronous:
            self.comm.wait_stream(self._module.current_stream(self.device))

    def compute_waits_for_comm(self) -> None:
        """Later kernels start after every collective enqueued so far."""
        if self.asynchronous:
            self._module.current_stream(self.device).wait_stream(self.comm)
