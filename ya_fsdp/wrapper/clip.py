"""The gradient norm of a model whose layers are split over tensor-parallel ranks too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..clipping import grads_of, local_power, reduced
from ..group import ParamGroup
from ..kernels import scale_from_norm
from .arguments import Ranks


@torch.no_grad()
def clip_with_model_parallel(
    split: Sequence[ParamGroup],
    norms: Sequence[ParamGroup],
    ranks: Ranks,
    max_norm: float | Tensor,
    norm_type: float,
) -> Tensor:
    """Scales all gradients so that the norm of the whole model's gradient is ``max_norm`` at most.

    Args:
        split: Groups whose parameters are slices, other ones on every tensor-parallel rank.
        norms: Groups whose parameters are the same on all of them, so that they count once.
        ranks: The process groups.
        max_norm: Upper bound of the norm.
        norm_type: Order of the norm, positive or ``inf``.

    Returns:
        The norm before clipping, 0-dim, fp32, the same on every rank.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    assert ranks.model is not None
    of_split = [g for group in split for g in grads_of(group)]
    of_norms = [g for group in norms for g in grads_of(group)]
    parts = torch.stack([local_power(g, norm_type, ranks.device) for g in (of_split, of_norms)])
    parts = reduced(reduced(parts, norm_type, ranks.data), norm_type, ranks.model)
    if norm_type == float("inf"):
        total = parts.max()
    else:
        # A mean and not this rank's own value: replicas may differ in the last bit, and scales
        # must not.
        copies = dist.get_world_size(ranks.model)
        total = (parts[0] + parts[1] / copies).pow(1.0 / norm_type)
    scale_from_norm(of_split + of_norms, total, max_norm)
    return total
