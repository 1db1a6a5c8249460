"""NCCL's own memory where the installed NCCL or driver offers none."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from ya_fsdp import _torch_memory
from ya_fsdp.collectives import NcclBufferCollectives, nccl_buffers


class WithoutAllocator:
    """What a process group of NCCL answers where the driver can not share memory."""

    @property
    def mem_allocator(self) -> object:
        raise RuntimeError("NCCL mem allocator is not supported in this NCCL version\nmore")


def test_an_allocator_that_nccl_refuses_is_done_without_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = SimpleNamespace(WORLD=object())
    fake = SimpleNamespace(is_initialized=lambda: True, group=group)
    monkeypatch.setattr(nccl_buffers, "dist", fake)
    monkeypatch.setattr(_torch_memory, "nccl_backend", lambda *_: WithoutAllocator())
    collectives = NcclBufferCollectives()
    with caplog.at_level(logging.WARNING, logger="ya_fsdp"):
        for _ in range(2):
            assert collectives._pool_on(torch.device("cuda")) is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert "is not supported in this NCCL version, so buffers come from torch's" in message
    assert "more" not in message
