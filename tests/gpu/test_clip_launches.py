"""Launches of clipping and of the optimizer over flat parameters."""

from __future__ import annotations

import pytest
import torch

from benchmarks import emulation, models, optimizer
from benchmarks.trainers import Job
from benchmarks.variants import Variant
from ya_fsdp import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or kernels.triton_kernels() is None,
        reason="needs a CUDA device and Triton",
    ),
]


@pytest.fixture(autouse=True)
def with_kernels_for_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YA_FSDP_TRITON_CLIP", "1")


def test_clipping_is_two_launches_and_one_all_reduce_and_nobody_waits() -> None:
    job = Job(models.config_of("tiny"), 1, 8, 64, torch.device("cuda", 0))
    try:
        record = optimizer.measure(job, Variant.parse("ours@flat"), rate=4e12)
    finally:
        emulation.stop()
    assert record["clip"]["kernels"] == 2, record["clip"]["kernel_names"]
    assert record["clip"]["collectives"] == {"all_reduce": 1}
    assert not record["clip"]["host_waits"] and not record["optimizer"]["host_waits"]
