"""What a user may ask or set about communication as a whole."""

from __future__ import annotations

from torch import Tensor, nn

from .build import groups_of, require_sharded, schedule_of, units_of
from .checks import check_flag


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
