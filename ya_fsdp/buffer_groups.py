"""Which units take turns in which gather buffer, as a user maps them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import nn

from .build import require_sharded, schedule_of, state_of, units_of
from .checks import check_type
from .unit import Unit, ring_of


def set_buffer_groups(model: nn.Module, buffers: Mapping[nn.Module, Hashable] | None) -> None:
    """Maps units to gather buffers: those with one name take turns in one buffer.

    By default units of one depth (so many sharded modules with parameters around them) and one
    process group take turns in ``set_num_gather_buffers`` buffers, and others have buffers of
    their own. A name joins any units that are not alive at the same time, those of different
    process groups too; such also share gradient buffers from then on. Units with equal names are
    gathered ahead only as their buffer allows, so neighbours had better have different names. Units
    without a name, and those that stay gathered after forward, are placed as by default.

    Every rank has to call it alike, between steps; it counts from the next forward on, and a later
    call replaces an earlier one.

    Args:
        model: A sharded model, the root of its units.
        buffers: From sharded modules to names of buffers, any hashable but ``None``. ``None``:
            all as by default.

    Raises:
        ValueError: If the model is not sharded, a key is no sharded module of it with parameters,
            or a name joins modules one of which contains the other.
        RuntimeError: If a unit is in use or owes a backward. Nothing is changed then.
    """
    require_sharded(model)
    check_type("buffers", buffers or {}, Mapping)
    schedule = schedule_of(model)
    modules = {module: name for name, module in model.named_modules()}
    found: dict[Hashable, dict[Unit, nn.Module]] = {}
    for module, buffer in (buffers or {}).items():
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None or not state.unit.groups or module not in modules:
            raise ValueError(
                f"set_buffer_groups takes sharded modules of the model that own parameters, got "
                f"{type(module).__name__} for buffer {buffer!r}"
            )
        if buffer is None:
            raise ValueError(f"the buffer of unit '{state.unit.fqn}' has no name; leave it out")
        found.setdefault(buffer, {}).setdefault(state.unit, module)
    for buffer, members in found.items():
        _refuse_nested(buffer, members)
    units = list(units_of(model.modules()))
    for unit in units:
        if unit.in_use or unit.pending_backward:
            raise RuntimeError(f"unit '{unit.fqn}' is in use; call set_buffer_groups between steps")
    for unit in units:
        unit.buffer = None
        if unit.groups:
            unit.ring = ring_of(unit.groups[0].mesh_info.shard_group)
    for buffer, members in found.items():
        for unit in members:
            unit.buffer = buffer
    _join_rings(found)
    schedule.reducer.drop_slots()
    schedule.pool.dirty = True


def _refuse_nested(buffer: Hashable, members: Mapping[Unit, nn.Module]) -> None:
    for outer, module in members.items():
        inside = set(units_of(module.modules()))
        for inner in members:
            if inner is not outer and inner in inside:
                raise ValueError(
                    f"buffer {buffer!r} of units '{outer.fqn}' and '{inner.fqn}', one of which "
                    "contains the other: both are gathered at the same time and need two buffers"
                )


def _join_rings(found: Mapping[Hashable, Mapping[Unit, nn.Module]]) -> None:
    """Units that share a gather buffer across process groups share gradient buffers."""
    for members in found.values():
        first = min(unit.ring for unit in members)
        for unit in members:
            unit.ring = first
