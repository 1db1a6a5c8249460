"""Memory that an operation needs while it runs, reused by the next one on the same stream."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor

from . import _torch

_ALL: WeakSet[Scratch] = WeakSet()


class Scratch:
    """One buffer per device and stream, as large as the largest request so far."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.device, int], Tensor] = {}
        _ALL.add(self)

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """``num_bytes`` bytes, in use until the next call on the current stream."""
        key = (device, stream_id(device))
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            with torch.inference_mode(False):
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.buffers[key] = buffer
        return buffer[:num_bytes]


def leave_scratch() -> None:
    """Leaves all scratch memory to an operation that may still be writing into it."""
    for scratch in _ALL:
        scratch.buffers.clear()


def stream_id(device: torch.device) -> int:
    """A number for the current stream, 0 on CPU."""
    return 0 if device.type == "cpu" else _torch.current_stream_id(device)
