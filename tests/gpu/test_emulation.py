"""The emulated network on a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from benchmarks import check


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_emulated_collectives_give_the_right_values_in_the_right_time() -> None:
    with warnings.catch_warnings():
        # From torch 2.13 the flat collectives' older names warn on every call.
        warnings.simplefilter("ignore", FutureWarning)
        assert check.failures(print) == []
