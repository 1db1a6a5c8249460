"""Private names of torch about gradient scalers; see ``_torch``."""

from __future__ import annotations

import torch

unscale_and_find_overflow = torch._amp_foreach_non_finite_check_and_unscale_
"""What a GradScaler calls: scales gradients in place and notes whether any was not finite."""


def skips_steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's kernels read a GradScaler's verdict, so that the host need not."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def forget_scaler_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Lets a GradScaler begin an optimizer's step anew after one that an exception ended."""
    scaler._per_optimizer_states.pop(id(optimizer), None)
