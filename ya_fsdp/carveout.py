"""Matrix products that leave multiprocessors to communication while there is any.

A collective's thread blocks that meet a product sized for the whole device break its single wave
and cost a third of its speed; told to leave them out, the product loses only their share.
"""

from __future__ import annotations

import torch

from . import _torch


class CarveOut:
    """Switches cuBLASLt's carve-out with the traffic, as far as the host can tell.

    The setting is read when a product is launched. It is switched on when a unit's forward or
    backward starts a collective and off at the next unit.

    Args:
        multiprocessors: How many multiprocessors collectives occupy.
    """

    def __init__(self, multiprocessors: int) -> None:
        self.multiprocessors = multiprocessors
        self._active = False
        self._library: str | None = None
        self._before: int | None = None

    def begin(self) -> None:
        """An iteration begins: choose the library that honours the carve-out."""
        if self._library is None:
            self._library = _torch.get_blas_library()
            self._before = _torch.get_carveout()
            _torch.set_blas_library("cublaslt")

    def on(self) -> None:
        """Traffic starts now."""
        if not self._active and self._library is not None:
            self._active = True
            _torch.set_carveout(self.multiprocessors)

    def off(self) -> None:
        """The traffic of the unit before this one is taken to be over."""
        if self._active:
            self._active = False
            _torch.set_carveout(self._before)

    def end(self) -> None:
        """The iteration is over: restore the user's settings."""
        self.off()
        if self._library is not None:
            _torch.set_blas_library(self._library)
            self._library = None


def carveout_available(device: torch.device) -> bool:
    """Whether this device and torch offer a carve-out."""
    return device.type == "cuda" and torch.version.cuda is not None and _torch.has_carveout()
