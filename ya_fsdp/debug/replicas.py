"""Whether replicas hold the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..group import ParamGroup
from ..mesh import MeshInfo
from .units import by_mesh, units_of

_CHUNK = 1 << 20
_BIG = (1 << 62) - 1


def check_replicas(model: nn.Module) -> int:
    """Raises unless every replica of a 2-D mesh holds the same weights, bit for bit.

    One 64-bit hash per group travels; parameters are only looked at one by one where it differs.

    Args:
        model: A sharded model.

    Returns:
        How many groups of parameters were compared; 0 without a replicate axis.

    Raises:
        RuntimeError: On every rank, if replicas differ; names the parameters and the ranks.
        ValueError: If the model is not sharded.
    """
    groups = [g for unit in units_of(model) for g in unit.groups if g.mesh_info.replicate_size > 1]
    for info, members in by_mesh(groups):
        assert info.replicate_group is not None
        hashes = [_hash(group.master_shard) for group in members]
        apart = _differing(hashes, info.replicate_group)
        message = _name_differing([members[i] for i in apart], info) if apart else ""
        anywhere = torch.tensor([len(apart)], device=members[0].device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=info.shard_group)
        if anywhere.item():
            raise RuntimeError(message or "replicas of another shard differ; see the other ranks")
    return len(groups)


def _hash(tensor: Tensor) -> Tensor:
    """A 62-bit sum of bytes, each times an odd number for its place."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    place = torch.arange(_CHUNK, dtype=torch.int64, device=flat.device) * 2 + 1
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        weighted = (chunk.to(torch.int64) + 1) * place[: chunk.numel()]
        total += weighted.sum() * (2654435761 * number + 1)
    return total & _BIG


def _gathered(values: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """One row per rank."""
    mine = torch.stack(list(values))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return torch.stack(rows)


def _differing(hashes: Sequence[Tensor], group: dist.ProcessGroup) -> list[int]:
    rows = _gathered(hashes, group)
    return [i for i, same in enumerate((rows == rows[:1]).all(0).tolist()) if not same]


def _name_differing(groups: Sequence[ParamGroup], info: MeshInfo) -> str:
    assert info.replicate_group is not None
    params = [
        (param.fqn, _hash(group.local_view(group.master_shard, index)))
        for group in groups
        for index, param in enumerate(group.params)
    ]
    rows = _gathered([value for _, value in params], info.replicate_group)
    same = (rows == rows[:1]).all(0).tolist()
    names = [name for (name, _), equal in zip(params, same, strict=True) if not equal]
    ranks = dist.get_process_group_ranks(info.replicate_group)
    return (
        f"{len(names)} parameters differ between the replicas on ranks {ranks}, the first being "
        f"{names[:5]}. Replicas start equal and stay so if every rank loads the same checkpoint, "
        "steps its optimizer equally often and changes weights alike."
    )
