"""What a user may set about communication as a whole: multiprocessors, communicators."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn

from . import _torch
from .build import groups_of, require_sharded, schedule_of, units_of
from .carveout import CarveOut, carveout_available
from .checks import check_flag
from .group import ParamGroup
from .mesh import MeshInfo

logger = logging.getLogger("ya_fsdp")

DEFAULT_SMS = 8
"""Blocks with which collectives reach full bandwidth on one NVLink domain (docs/performance.md)."""


def set_communication_sms(model: nn.Module, num_sms: int | Literal["auto"] | None) -> str:
    """Caps the multiprocessors of collectives and makes matrix products leave them alone.

    NCCL communicators of the model are made anew with at most ``num_sms`` thread blocks, and
    while collectives run, cuBLASLt is told to leave as many multiprocessors. Every rank of the
    model's mesh has to call it. Where device or back end offer neither, nothing changes.

    Args:
        model: A sharded model.
        num_sms: Multiprocessors for communication; ``"auto"`` takes ``DEFAULT_SMS``; ``None``
            restores the default behaviour (communicators stay).

    Returns:
        What was done, in words.

    Raises:
        ValueError: If ``num_sms`` is not positive, or the model is not sharded.
    """
    require_sharded(model)
    if num_sms is None:
        schedule_of(model).set_carveout(None)
        return "products use every multiprocessor again"
    count = DEFAULT_SMS if num_sms == "auto" else num_sms
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"num_sms must be a positive int, 'auto' or None, got {num_sms!r}")
    groups = list(groups_of(model))
    done = []
    capped = _cap_communicators(groups, count)
    if capped:
        done.append(f"{capped} NCCL communicators capped at {count} thread blocks")
    device = groups[0].device if groups else None
    if device is not None and carveout_available(device):
        schedule_of(model).set_carveout(CarveOut(count))
        done.append(f"matrix products leave {count} multiprocessors during communication")
    message = "; ".join(done) or "nothing: this device and back end offer no such setting"
    logger.info("set_communication_sms(%r): %s", num_sms, message)
    return message


def _cap_communicators(groups: list[ParamGroup], count: int) -> int:
    made: dict[int, MeshInfo] = {}
    for group in groups:
        info = group.mesh_info
        if dist.get_backend(info.shard_group) != "nccl":
            continue
        if id(info) not in made:
            ranks = dist.get_process_group_ranks(info.shard_group)
            options = _torch.nccl_options(max_ctas=count)
            capped = dist.new_group(ranks, pg_options=options, use_local_synchronization=True)
            made[id(info)] = replace(info, shard_group=capped)
        group.use_mesh(made[id(info)])
    return len(made)


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """Every buffer of a sharded model whose address stays the same from step to step."""
    require_sharded(model)
    schedule = schedule_of(model)
    shards = [group.master_shard for group in groups_of(model)]
    for unit in units_of(model.modules()):
        if unit.secondary is not None:
            shards += unit.secondary.buffers()
    return shards + [slot.buffer for slot in schedule.buffers()]


def set_reduce_unused(model: nn.Module, enable: bool = True) -> None:
    """Lets ranks use different units of a model in one step (experts, alternating branches).

    By default ranks may differ in which *parameters* of a unit get a gradient, but every rank has
    to run the same units in the same order, since each gathers and reduces by itself. With this,
    every forward of the root gathers every unit and every backward reduces every unit, in one
    fixed order: one that only some ranks used gets its right average (zeros from the others), one
    that no rank used keeps ``.grad`` ``None``. The price is the whole model gathered from forward
    to backward and reductions that start when the backward has ended. Every rank has to run as
    many root forwards and backward passes, each reaching at least one unit.

    Args:
        model: The root module given to :func:`ya_fsdp.fully_shard`, before its first forward or
            between steps.
        enable: Whether to switch it on or off.

    Raises:
        ValueError: If the model is not sharded, or not a root with units below it.
    """
    require_sharded(model)
    check_flag("enable", enable)
    schedule = schedule_of(model)
    if schedule.is_orphanage:
        raise ValueError(
            "set_reduce_unused needs a root: call fully_shard on the whole model, above its units"
        )
    schedule.uniform = enable
    schedule.pool.dirty = True
    for unit in schedule.units:
        unit.reshard_after_forward = not enable
