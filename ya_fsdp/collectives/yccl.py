"""An adapter to the optional package ``yccl``."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Purpose
from .c10d import C10dCollectives

_ELEMENT = torch.bfloat16.itemsize


class YcclHandle(Protocol):
    """What is used of a ``yccl`` handle; sizes are numbers of bf16 elements."""

    def add_all_gather_input_buffer(self, numel: int) -> Tensor:
        """A registered buffer from which a rank's part is sent."""

    def add_all_gather_output_buffer(self, numel: int) -> Tensor:
        """A registered buffer in which all parts arrive."""

    def add_reduce_scatter_buffer(self, numel: int) -> Tensor:
        """A registered buffer that is reduced in place."""

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        """Gathers bf16 elements."""

    def reduce_scatter(self, buffer: Tensor) -> None:
        """Sums bf16 elements; this rank's slice of the buffer then holds its sums."""

    def enable_profiling(self) -> None:
        """Emits events of the library's own phases."""


def open_handle(
    intra_color: int,
    inter_color: int,
    *,
    all_gather_stages: int | None = None,
    profile: bool = False,
) -> YcclHandle:
    """Makes a handle of the package; every rank has to call it.

    Args:
        intra_color: The same number on ranks that share a host.
        inter_color: The same number on ranks that talk across hosts.
        all_gather_stages: Stages of the gather, ``None`` for the package's own choice.
        profile: Whether to emit profiling events.

    Raises:
        ImportError: If ``yccl`` is not installed.
    """
    try:
        yccl = importlib.import_module("yccl")
    except ImportError as error:
        raise ImportError(
            "YcclCollectives needs the package yccl, which is not installed and not published; "
            "without collectives= communication goes through torch.distributed (NCCL or gloo)"
        ) from error
    handle: YcclHandle = yccl.Handle(
        inter_color=inter_color, intra_color=intra_color, all_gather_stages=all_gather_stages
    )
    if profile:
        handle.enable_profiling()
    return handle


class YcclCollectives:
    """Gathers of any dtype and bf16 sums over one group of ranks through a ``yccl`` handle.

    Sums of other dtypes, all-reduces, and other groups of ranks (the replicas of a 2-D mesh) go
    through ``torch.distributed``. Gradients that lie outside a registered buffer are copied into
    one first. Registered buffers live as long as the handle.

    Args:
        handle: From :func:`open_handle`, or anything of that shape.
        group: The ranks that the handle connects; ``None``: all.
    """

    name = "yccl"
    keeps_memory = True

    def __init__(self, handle: YcclHandle, group: dist.ProcessGroup | None = None) -> None:
        self.handle = handle
        self._ranks = dist.get_process_group_ranks(group)
        self._fallback = C10dCollectives()
        self._served: dict[dist.ProcessGroup, bool] = {}
        self._registered: dict[str, set[int]] = {"gather": set(), "reduce": set()}
        self._staging: dict[str, Tensor] = {}

    def allocate(self, num_bytes: int, device: torch.device, purpose: Purpose) -> Tensor:
        """A registered buffer of the handle."""
        return self._add(purpose, -(-num_bytes // _ELEMENT)).view(torch.uint8)[:num_bytes]

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`."""
        num_bytes = input.numel() * input.element_size()
        if num_bytes % _ELEMENT or not self._serves(group):
            self._fallback.all_gather(output, input, group)
            return
        source = self._staged("input", input)
        source.copy_(_as_bf16(input))
        if self._is_registered("gather", output):
            self.handle.all_gather(source, _as_bf16(output))
            return
        target = self._staged("gather", output)
        self.handle.all_gather(source, target)
        _as_bf16(output).copy_(target)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
    ) -> None:
        """See :class:`Collectives`."""
        if input.dtype != torch.bfloat16 or not self._serves(group):
            self._fallback.reduce_scatter(output, input, average, group)
            return
        buffer = input
        if not self._is_registered("reduce", input):
            buffer = self._staged("reduce", input)
            buffer.copy_(input)
        self.handle.reduce_scatter(buffer)
        size = output.numel()
        own = buffer[group.rank() * size : (group.rank() + 1) * size]
        if own.data_ptr() != output.data_ptr():
            output.copy_(own)

    def all_reduce(self, tensor: Tensor, op: str, group: dist.ProcessGroup) -> None:
        """See :class:`Collectives`; through ``torch.distributed``."""
        self._fallback.all_reduce(tensor, op, group)

    def supports_average(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Never where the handle sums: it knows sums only."""
        if dtype == torch.bfloat16 and self._serves(group):
            return False
        return self._fallback.supports_average(group, dtype)

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype itself: results come back in it."""
        return dtype

    def _serves(self, group: dist.ProcessGroup) -> bool:
        served = self._served.get(group)
        if served is None:
            served = dist.get_process_group_ranks(group) == self._ranks
            self._served[group] = served
        return served

    def _add(self, purpose: str, numel: int) -> Tensor:
        makers: dict[str, Any] = {
            "input": self.handle.add_all_gather_input_buffer,
            "gather": self.handle.add_all_gather_output_buffer,
            "reduce": self.handle.add_reduce_scatter_buffer,
        }
        buffer: Tensor = makers[purpose](numel)
        self._registered.setdefault(purpose, set()).add(buffer.untyped_storage().data_ptr())
        return buffer

    def _is_registered(self, purpose: str, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._registered[purpose]

    def _staged(self, purpose: str, like: Tensor) -> Tensor:
        """The part of a registered buffer of our own that has as many bytes as ``like``."""
        numel = like.numel() * like.element_size() // _ELEMENT
        buffer = self._staging.get(purpose)
        if buffer is None or buffer.numel() < numel:
            buffer = self._staging[purpose] = self._add(purpose, numel)
        return buffer[:numel]


def _as_bf16(tensor: Tensor) -> Tensor:
    return tensor.view(torch.bfloat16)
