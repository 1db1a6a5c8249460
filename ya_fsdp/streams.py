"""Streams and events of one device, or their absence on CPU.

The compute stream is whatever stream is current where the user runs the model; the communication
stream is ours. On CPU every operation is synchronous and all of this does nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from . import _torch
from ._torch import StreamKey


class _OnStream:
    """Makes one of our streams current; one reusable object, since this is a hot path."""

    def __init__(self, streams: Streams, key: StreamKey | None) -> None:
        self._streams = streams
        self._key = key
        self._previous: StreamKey | None = None

    def __enter__(self) -> None:
        streams = self._streams
        if streams.asynchronous:
            streams.compute  # noqa: B018  (notices a change of the current stream)
            self._previous = streams.compute_key
            _torch.set_stream(self._key)

    def __exit__(self, *_: object) -> Literal[False]:
        if self._streams.asynchronous:
            _torch.set_stream(self._previous)
        return False


class Streams:
    """The communication streams of one device and the events that order them with compute.

    Attributes:
        comm: Where everything is sent, but for
        across: sums over the replicas of a 2-D mesh; made when first needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asynchronous = device.type not in ("cpu", "meta")
        self.comm: Any = None
        self._module: Any = None
        self._compute: Any = None
        self._compute_id = -1
        self.comm_key: StreamKey | None = None
        self.compute_key: StreamKey | None = None
        self.across: Any = None
        if self.asynchronous:
            self._module = torch.get_device_module(device)
            self.comm = self._module.Stream(device=device, priority=-1)
            self.comm_key = _torch.stream_key(self.comm)
        self._on_comm = _OnStream(self, self.comm_key)
        self._on_across: _OnStream | None = None

    @property
    def compute(self) -> Any:
        """The stream that is current now; the object is kept while the stream stays the same."""
        current = _torch.current_stream_id(self.device)
        if current != self._compute_id:
            self._compute = self._module.current_stream(self.device)
            self._compute_id = current
            self.compute_key = _torch.stream_key(self._compute)
        return self._compute

    def new_event(self) -> Any:
        """An event without timing, or ``None`` on CPU."""
        return self._module.Event() if self.asynchronous else None

    def on_comm(self) -> AbstractContextManager[Any]:
        """Makes the communication stream current; does not nest."""
        return self._on_comm

    def on_across(self) -> AbstractContextManager[Any]:
        """Makes the stream of sums over replicas current, after what was sent so far."""
        if self._on_across is None:
            if self.asynchronous:
                self.across = self._module.Stream(device=self.device, priority=-1)
            self._on_across = _OnStream(self, self.across and _torch.stream_key(self.across))
        if self.across is not None:
            self.across.wait_stream(self.comm)
        return self._on_across

    def used_across(self, tensor: torch.Tensor) -> None:
        """Memory of ``tensor`` may be another stream's and is not given away before its use."""
        if self.across is not None:
            tensor.record_stream(self.across)

    def comm_waits_for_across(self) -> None:
        """Later collectives start after every sum over replicas enqueued so far."""
        if self.across is not None:
            self.comm.wait_stream(self.across)

    def record_across(self, event: Any) -> Any:
        """Records ``event`` on the stream of sums over replicas and returns it."""
        if event is not None:
            event.record(self.across)
        return event

    def record_compute(self, event: Any) -> Any:
        """Records ``event`` on the compute stream and returns it."""
        if event is not None:
            event.record(self.compute)
        return event

    def record_comm(self, event: Any) -> Any:
        """Records ``event`` on the communication stream and returns it."""
        if event is not None:
            event.record(self.comm)
        return event

    def compute_waits(self, event: Any) -> None:
        """Later kernels of the compute stream start after ``event``."""
        if event is not None:
            self.compute.wait_event(event)

    def comm_waits(self, event: Any) -> None:
        """Later collectives start after ``event``."""
        if event is not None:
            self.comm.wait_event(event)

    def comm_waits_for_compute(self) -> None:
        """Later collectives start after everything enqueued on the compute stream so far."""
        if self.asynchronous:
            self.comm.wait_stream(self.compute)

    def compute_waits_for_comm(self) -> None:
        """Later kernels start after every collective enqueued so far."""
        if self.asynchronous:
            self.compute.wait_stream(self.comm)
