"""Which parameters and modules a call manages, their groups, and the root they run under."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from .agreement import mark_of
from .checks import check_type
from .collectives import default_collectives
from .extensions import ExtendedGroup, Extension, plan_rows
from .group import ParamGroup
from .kernels import BLOCK
from .layout import Granularity, ShardLayout, choose_blocks, group_alignment, plan_layout
from .mesh import MeshInfo
from .param import TAKEN, ReplacedParameter, ShardedParam, parameter_table
from .precision import MixedPrecisionPolicy, ResolvedDtypes, resolve
from .ragged import RaggedShardDTensor
from .schedule import Schedule
from .strays import Census
from .streams import Streams
from .tensor_parallel import TensorParallel
from .unit import Phase, Unit

GranularityOption = Granularity | Callable[[str, nn.Parameter], Granularity]


@dataclass
class ModuleState:
    """What a managed module carries: its unit, and the schedule once its root is known.

    ``above`` is the outermost managed module seen so far that contains this one. A root has a
    ``census``, here and not in the schedule, which its modules refer to: a deleted model is to be
    freed without the garbage collector.
    """

    unit: Unit
    is_list: bool = False
    schedule: Schedule | None = None
    above: weakref.ref[nn.Module] | None = None
    census: Census | None = None


_STATE = "_ya_fsdp_state"


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of a managed module, ``None`` of any other."""
    return module.__dict__.get(_STATE)


def require_sharded(model: nn.Module) -> None:
    """Refuses what ``fully_shard`` has not been called on.

    Raises:
        TypeError: If it is no module.
        ValueError: If it is not sharded.
    """
    check_type("model", model, nn.Module)
    if state_of(model) is None:
        raise ValueError(f"{type(model).__name__} is not sharded; call fully_shard first")


def units_of(modules: Iterable[nn.Module]) -> Iterator[Unit]:
    """The units of those of some modules that are managed, each once, in the modules' order."""
    seen: set[Unit] = set()
    for module in modules:
        state = state_of(module)
        if state is not None and state.unit not in seen:
            seen.add(state.unit)
            yield state.unit


def groups_of(model: nn.Module) -> Iterator[ParamGroup]:
    """Every parameter group at or below a module once, in module order."""
    for unit in units_of(model.modules()):
        yield from unit.groups


def managed_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules a call manages: everything below the roots that no earlier call manages."""
    seen: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        if id(module) in seen or state_of(module) is not None:
            return
        seen[id(module)] = module
        for child in module.children():
            visit(child)

    for root in roots:
        visit(root)
    return list(seen.values())


def named_sites(
    roots: Sequence[nn.Module], modules: Sequence[nn.Module]
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every (FQN, owner, name, parameter) of the managed modules, tied ones several times."""
    prefixes: dict[int, str] = {}
    for position, root in enumerate(roots):
        start = "" if len(roots) == 1 else f"{position}."
        for name, module in root.named_modules():
            prefixes.setdefault(id(module), f"{start}{name}." if name else start)
    for module in modules:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefixes[id(module)]}{name}", module, name, param


def collect_params(
    roots: Sequence[nn.Module],
    modules: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    mesh: DeviceMesh,
) -> list[ShardedParam]:
    """One entry per distinct parameter, with all the places that refer to it."""
    found: dict[int, ShardedParam] = {}
    tables = {module: parameter_table(module) for module in modules}
    for fqn, module, name, param in named_sites(roots, modules):
        if param in ignored:
            continue
        entry = found.get(id(param))
        if entry is None:
            check_param(fqn, param)
            parallel = TensorParallel.of(fqn, param, mesh)
            entry = found[id(param)] = ShardedParam(fqn, param, [], parallel)
            entry.owner = weakref.ref(module)
            entry.extension = Extension.of(fqn, param)
        entry.sites.append((tables[module], name))
    return list(found.values())


def check_param(fqn: str, param: nn.Parameter) -> None:
    """Refuses what can not be sharded, by name and with the way out."""
    taken = getattr(param, TAKEN, None)
    if isinstance(param, RaggedShardDTensor) or taken is not None:
        raise ValueError(
            f"parameter '{fqn}' is shared with one that an earlier fully_shard call manages"
            f"{f' as {taken!r}' if taken else ''}; both would train apart. Shard the modules that "
            "share it in one call: fully_shard([first, second])."
        )
    if is_lazy(param):
        raise ValueError(
            f"parameter '{fqn}' has no shape yet; call the model once (a dry run) before "
            "fully_shard."
        )
    if param.layout != torch.strided:
        raise ValueError(
            f"parameter '{fqn}' is {param.layout} and can not be cut; make it dense "
            "(nn.Parameter(value.to_dense())) or pass it in ignored_params."
        )
    if param.ndim == 0:
        raise ValueError(
            f"parameter '{fqn}' is 0-dim and can not be cut; make it 1-dim "
            f"(nn.Parameter(value.reshape(1))) or pass it in ignored_params."
        )


class Kind(NamedTuple):
    """What the parameters of a group have in common.

    Attributes:
        dtypes: Their dtypes in every role.
        trainable: Whether they require gradients now.
        is_meta: Whether they have no values yet.
        own_mesh: Mesh axes that they came with (TP), ``None`` for plain parameters.
        alone: Number of the parameter where its tensor subclass is gathered in its own way.
    """

    dtypes: ResolvedDtypes
    trainable: bool
    is_meta: bool
    own_mesh: DeviceMesh | None
    alone: int | None


def make_groups(
    params: list[ShardedParam],
    policy: MixedPrecisionPolicy,
    mesh_info: MeshInfo,
    device: torch.device,
    alignment: int | None,
    granularity: GranularityOption,
) -> list[ParamGroup]:
    """Sorts parameters into homogeneous groups and cuts each."""
    kinds: dict[Kind, list[ShardedParam]] = {}
    for number, param in enumerate(params):
        tensor = param.sharded
        dtypes = resolve(policy, tensor.dtype, tensor.requires_grad, tensor.ndim, param.kind)
        parallel = param.tensor_parallel
        key = Kind(
            dtypes,
            tensor.requires_grad,
            tensor.device.type == "meta",
            None if parallel is None else parallel.own_mesh,
            None if param.extension is None else number,
        )
        kinds.setdefault(key, []).append(param)
    # Every layout is planned before any parameter is touched: a user's function may raise.
    layouts = [
        _plan(members, kind.dtypes, mesh_info.shard_size, alignment, granularity)
        if kind.alone is None
        else plan_rows(members[0], mesh_info)
        for kind, members in kinds.items()
    ]
    groups = []
    for (kind, members), layout in zip(kinds.items(), layouts, strict=True):
        originals = [m.sharded for m in members]
        where = torch.device("meta") if kind.is_meta else device
        group_class = ParamGroup if kind.alone is None else ExtendedGroup
        groups.append(group_class(members, layout, policy, mesh_info, where))
        for original, member in zip(originals, members, strict=True):
            ReplacedParameter.mark(original, member.fqn)
    return groups


def _plan(
    members: list[ShardedParam],
    dtypes: ResolvedDtypes,
    size: int,
    alignment: int | None,
    granularity: GranularityOption,
) -> ShardLayout:
    sizes = [dtypes.master.itemsize, dtypes.gather.itemsize, dtypes.reduce.itemsize]
    step = lcm(group_alignment(sizes), alignment or 1)
    if dtypes.wire is not None:
        step = lcm(step, BLOCK)
    numels = [m.shape.numel() for m in members]
    rows = [m.shape[1:].numel() or 1 for m in members]
    wishes = [granularity_of(granularity, m) for m in members]
    return plan_layout(numels, choose_blocks(numels, rows, wishes, size, step), size, step)


def granularity_of(option: GranularityOption, param: ShardedParam) -> Granularity:
    """The granularity a user's option gives one parameter."""
    if not callable(option):
        return option
    value = option(param.fqn, param.sharded)
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not is_size and value not in ("auto", "row", "element"):
        raise ValueError(
            f"granularity of parameter '{param.fqn}' must be 'auto', 'row', 'element' or a number "
            f"of elements >= 1, got {value!r}"
        )
    return value


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Brings buffers to the mesh's device; meta buffers stay, their values are the user's."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in (device.type, "meta"):
                module._buffers[name] = buffer.to(device)


# ---- roots ---------------------------------------------------------------------------------------

# Kept for good: when the last model of a device is collected differs between ranks, and what a
# schedule counts (backward passes, say) must not.
_orphanages: dict[tuple[str, int], Schedule] = {}


def schedule_of(module: nn.Module) -> Schedule:
    """The schedule a managed module runs under, made when its root first runs."""
    state = state_of(module)
    assert state is not None, "not a managed module"
    if state.schedule is not None:
        return state.schedule
    root = module
    while True:
        above = state_of(root)
        parent = above.above() if above is not None and above.above is not None else None
        if parent is None:
            break
        root = parent
    return finalize(root)


def finalize(root: nn.Module) -> Schedule:
    """Puts every unit below ``root`` under one schedule and gives it a name and a depth."""
    root_state = state_of(root)
    assert root_state is not None
    members = list(_managed_below(root))
    units: dict[Unit, None] = {}
    for _, _, state in members:
        units.setdefault(state.unit)
    for name, depth, state in members:
        unit = state.unit
        if state.schedule is not None:
            _leave(state.schedule, unit)
        unit.fqn = name or unit.fqn
        unit.depth = max(unit.depth, depth)
    for index, unit in enumerate(units):
        unit.index = index
        mark_of(unit)  # other ranks may speak of it before it runs here
    root_state.census = Census(root)
    _name_params(root)
    _check_materialised(units)
    is_alone = len(units) == 1 and state_of(root) is not None and root_state.above is None
    schedule = _schedule_for(list(units), is_alone)
    for _, _, state in members:
        state.schedule = schedule
    if not schedule.is_orphanage:
        schedule.before_iteration = _checks_of(root)
    return schedule


def _checks_of(root: nn.Module) -> Callable[[], None]:
    """What looks, before every iteration, whether the root still is what it was."""
    reference = weakref.ref(root)

    def look() -> None:
        present = reference()
        state = None if present is None else state_of(present)
        if state is None or (state.census is not None and not state.census.changed()):
            return
        assert present is not None, "a state without its module"
        state.census = Census(present)

    return look


def _managed_below(root: nn.Module) -> Iterator[tuple[str, int, ModuleState]]:
    """(FQN, number of managed ancestors that own parameters, state), parents first."""

    def visit(
        module: nn.Module, name: str, depth: int, seen: set[int]
    ) -> Iterator[tuple[str, int, ModuleState]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        state = state_of(module)
        if state is not None:
            yield name, depth, state
            depth += bool(state.unit.groups)
        for child_name, child in module.named_children():
            yield from visit(child, f"{name}.{child_name}" if name else child_name, depth, seen)

    yield from visit(root, "", 0, set())


def _name_params(root: nn.Module) -> None:
    names = {id(p): n for n, p in root.named_parameters()}
    for _, _, state in _managed_below(root):
        for group in state.unit.groups:
            for param in group.params:
                param.fqn = names.get(id(param.sharded), param.fqn)
                param.sharded._ya_fsdp_fqn = param.fqn  # type: ignore[attr-defined]


def _check_materialised(units: Iterable[Unit]) -> None:
    on_meta = [
        p.fqn
        for unit in units
        for group in unit.groups
        for p in group.params
        if p.sharded.device.type == "meta"
    ]
    if on_meta:
        shown = ", ".join(on_meta[:8]) + (", ..." if len(on_meta) > 8 else "")
        raise RuntimeError(
            f"{len(on_meta)} parameters are still on the meta device: {shown}. Materialise them "
            "before the first forward: model.to_empty(device=...) and then initialise or load."
        )


def _schedule_for(units: list[Unit], is_alone: bool) -> Schedule:
    device = next((g.device for u in units for g in u.groups), torch.device("cpu"))
    if is_alone:
        key = (device.type, device.index or 0)
        schedule = _orphanages.get(key)
        if schedule is None:
            schedule = Schedule([], Streams(device), default_collectives(), is_orphanage=True)
            _orphanages[key] = schedule
        schedule.units.extend(units)
        for unit in units:
            unit.on_forget = schedule.remove_unit
        for index, unit in enumerate(schedule.units):
            unit.index = index
    else:
        schedule = Schedule(units, Streams(device), default_collectives(), is_orphanage=False)
    schedule.units_changed()
    return schedule


def _leave(schedule: Schedule, unit: Unit) -> None:
    """A unit that ran on its own gets a root: it must be idle to move."""
    if unit.phase is not Phase.IDLE:
        raise RuntimeError(f"unit '{unit.fqn}' is running and can not get a new root now")
    schedule.remove_unit(unit)
