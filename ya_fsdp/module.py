"""The class every managed module gets: ``FSDP<Original>``, a ``YaFSDPModule``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from . import _torch, hooks
from .build import ModuleState, schedule_of, state_of, units_of
from .checks import check_flag, check_type, not_offered
from .collectives import Collectives, check_collectives
from .gathering import UnshardHandle
from .schedule import Schedule
from .unit import Unit, reshard_units, use_collectives, watch_optimizers

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


class YaFSDPModule(FSDPModule):
    """A module managed by :func:`ya_fsdp.fully_shard`.

    It is also a torch ``FSDPModule``, so that code which asks for one finds one; every method
    here has the meaning of the method of the same name there.
    """

    _is_fsdp_managed_module = True
    _fsdp_use_orig_params = True  # dynamo refuses FSDP modules without it

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing the class (a container slicing itself, say) makes a plain module."""
        original = next(c for c in cls.__mro__ if not issubclass(c, FSDPModule))
        instance = original.__new__(original)
        if hasattr(instance, "__init__"):
            type(instance).__init__(instance, *args, **kwargs)
        return instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers parameters around the module's own call, its hooks included."""
        if torch.compiler.is_dynamo_compiling():
            _torch.break_graph()
        return call_with_unshard(self, super().__call__, args, kwargs)  # type: ignore[misc]

    # ---- gathering by hand -----------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gathers this module's parameters (not those of managed submodules).

        Args:
            async_op: Return at once with a handle whose ``wait()`` makes the parameters usable.
        """
        check_flag("async_op", async_op)
        unit, schedule = _parts(self)
        schedule.unshard(unit)
        handle = UnshardHandle(schedule, unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this module's gathered parameters (not those of managed submodules).

        Raises:
            RuntimeError: If one was written since ``unshard()``: that is lost.
        """
        state = _state(self)
        if state.schedule is not None:
            state.schedule.reshard(state.unit)

    def reset_iter_state(self) -> None:
        """Returns to a clean state after an exception; the next forward does so by itself."""
        schedule = _state(self).schedule
        if schedule is not None:
            schedule.recover()

    # ---- gradients -----------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of the forwards run so far (pipelines)."""
        check_flag("is_last_backward", is_last_backward)
        for schedule in {id(s): s for _, s in self._ya_units()}.values():
            schedule.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward communicates gradients, or adds them up in whole-size buffers."""
        check_flag("requires_gradient_sync", requires_gradient_sync)
        for unit in self._ya_managed(recurse):
            unit.sync_gradients = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add gradients up without communication.

        Every unit then holds its whole gradients in the reduce dtype until the next backward with
        communication.
        """
        units = list(self._ya_managed(True))
        before = [unit.sync_gradients for unit in units]
        for unit in units:
            unit.sync_gradients = False
        try:
            yield
        finally:
            for unit, value in zip(units, before, strict=True):
                unit.sync_gradients = value

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over the replicate axis too (2-D meshes).

        While it does not, every unit keeps its sums over the shard axis, one shard in the reduce
        dtype, and ``.grad`` stays as it was.
        """
        check_flag("requires_all_reduce", requires_all_reduce)
        for unit in self._ya_managed(recurse):
            for group in unit.groups:
                group.grads.options.all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients are summed and divided by ``factor`` instead of averaged."""
        if not isinstance(factor, (int, float)) or isinstance(factor, bool):
            raise TypeError(f"factor must be a number, got {factor!r}")
        if not factor > 0:
            raise ValueError(f"factor must be positive, got {factor}")
        for group in _state(self).unit.groups:
            group.grads.options.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sends plain sums even where the back end averages."""
        check_flag("enable", enable)
        for group in _state(self).unit.groups:
            group.grads.options.force_sum = enable

    # ---- when to reshard -----------------------------------------------------------------------

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Whether parameters are freed between forward and backward (ZeRO-3) or kept (ZeRO-2).

        An int: freed, but for a second shard over so many ranks; see :func:`ya_fsdp.fully_shard`.
        """
        reshard_units([*self._ya_managed(recurse)], reshard_after_forward)
        self._ya_slots_changed()

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after backward.

        If not, the next forward gathers them again only if an optimizer or an in-place operation
        changed weights (on all ranks alike; writes through ``.data`` go unnoticed).
        """
        check_flag("reshard_after_backward", reshard_after_backward)
        if not reshard_after_backward:
            watch_optimizers()
        for unit in self._ya_managed(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this module's parameters; off where it does not need them."""
        check_flag("unshard_in_backward", unshard_in_backward)
        _state(self).unit.unshard_in_backward = unshard_in_backward

    # ---- prefetch and buffers ---------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Modules gathered while this one's forward runs, in order."""
        _state(self).unit.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Modules gathered while this one's backward runs, in order."""
        _state(self).unit.backward_prefetch = _units_of(modules)

    def set_num_gather_buffers(self, num_buffers: int) -> None:
        """How many gather buffers units of one depth share; one fewer is prefetched ahead."""
        _check_count(num_buffers)
        schedule = schedule_of(cast(nn.Module, self))
        schedule.pool.num_buffers = num_buffers
        self._ya_slots_changed()

    def set_num_gradient_buffers(self, num_buffers: int) -> None:
        """How many gradient buffers are used in turn.

        Without a call it is 1, or 2 where a unit has ``fused_weight_gradients``, whose products
        write into the buffer during the whole of its backward.
        """
        _check_count(num_buffers)
        reducer = schedule_of(cast(nn.Module, self)).reducer
        reducer.num_buffers = reducer.chosen_buffers = num_buffers
        reducer.drop_slots()

    def set_post_optim_event(self, event: Any) -> None:
        """The next forward's gathers wait for this event instead of the whole current stream."""
        schedule_of(cast(nn.Module, self)).post_optim_event = event

    def set_collectives(self, collectives: Collectives | None, recurse: bool = True) -> None:
        """Communicates through another library from the next forward on; ``None``: the default."""
        check_collectives(collectives)
        use_collectives(list(self._ya_managed(recurse)), collectives)
        self._ya_slots_changed()

    # ---- not offered ---------------------------------------------------------------------------

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Gathers always run on a stream of their own; accepted for compatibility."""

    def _get_fsdp_state(self) -> Any:
        """What torch's own ``register_fsdp_forward_method`` brackets a method with."""
        return _ForwardBrackets(self)

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``.to()``, ``.double()``, ``.cuda()``, ``to_empty()`` on the sharded parameters."""
        self._ya_reshard_all()
        params = [p for u in self._ya_managed(True) for g in u.groups for p in g.params]
        attributes = [p.user_attributes() for p in params]
        # nn.Module's method, past FSDPModule's, which would look for torch's own state.
        result = super(FSDPModule, self)._apply(fn, *args, **kwargs)  # type: ignore[misc]
        for param, kept in zip(params, attributes, strict=True):
            vars(param.registered).update(kept)
        for unit in self._ya_managed(True):
            for group in unit.groups:
                group.readopt()
            unit.slot = None
        for _, schedule in self._ya_scheduled():
            schedule.reducer.drop_slots()
            schedule.units_changed()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, and those of microbatches without communication."""
        for unit in self._ya_managed(True):
            for group in unit.groups:
                group.grads.shard.zero_pieces(set_to_none)
                if unit.switched or group.grads.holds_microbatches:
                    group.zero_grad(set_to_none)
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> Any:
        """Refused: buffers and process groups can not be copied."""
        raise NotImplementedError(
            "a sharded module can not be deep-copied. Build the copy from the plain model, shard "
            "it, and load this one's state_dict(); for an average of weights, keep clones of "
            "parameters: {n: p.detach().clone() for n, p in model.named_parameters()}."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: pickling would store shards and process groups."""
        raise NotImplementedError(
            "a sharded module can not be pickled or copied by copy.copy. Save model.state_dict() "
            "with torch.distributed.checkpoint, or the full state dict."
        )

    # ---- helpers ---------------------------------------------------------------------------------

    def _ya_units(self) -> Iterator[tuple[Unit, Schedule]]:
        for module in cast(nn.Module, self).modules():
            state = state_of(module)
            if state is not None:
                yield state.unit, schedule_of(module)

    def _ya_managed(self, recurse: bool) -> Iterator[Unit]:
        module = cast(nn.Module, self)
        return units_of(module.modules() if recurse else (module,))

    def _ya_scheduled(self) -> Iterator[tuple[Unit, Schedule]]:
        for state in filter(None, map(state_of, cast(nn.Module, self).modules())):
            if state.schedule is not None:
                yield state.unit, state.schedule

    def _ya_reshard_all(self) -> None:
        for unit, schedule in self._ya_scheduled():
            schedule.reshard(unit)

    def _ya_slots_changed(self) -> None:
        for _, schedule in self._ya_scheduled():
            schedule.pool.dirty = True


def call_with_unshard(
    module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs ``call`` between the unit's pre-forward and post-forward."""
    state: ModuleState = module.__dict__["_ya_fsdp_state"]
    unit = state.unit
    schedule = state.schedule or schedule_of(module)
    open_calls = schedule.open_calls
    try:
        args, kwargs = hooks.pre_forward(schedule, unit, args, kwargs)
        output = call(*args, **kwargs)
        return hooks.post_forward(schedule, unit, args, kwargs, output)
    except BaseException:
        schedule.fail_forward(unit, open_calls)
        raise


for _name in set(vars(FSDPModule)) - set(vars(YaFSDPModule)):
    if _name.startswith("set_"):
        setattr(YaFSDPModule, _name, not_offered(_name))

# Compiled code begins and ends at a unit: gathers and hooks belong to no graph.
_torch.hide_from_dynamo(YaFSDPModule.__call__, with_callees=False)
_torch.hide_from_dynamo(call_with_unshard, with_callees=False)
for _function in (hooks.pre_forward, hooks.post_forward, schedule_of, Schedule.post_forward):
    _torch.hide_from_dynamo(_function, with_callees=True)


class _ForwardBrackets:
    """The two methods that torch's ``register_fsdp_forward_method`` asks a state for."""

    def __init__(self, module: Any) -> None:
        self._unit, self._schedule = _parts(module)
        self._kwargs: dict[str, Any] = {}

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, self._kwargs = hooks.pre_forward(self._schedule, self._unit, args, kwargs)
        return args, self._kwargs

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return hooks.post_forward(self._schedule, self._unit, args, self._kwargs, output)


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """``FSDP<Original>``, made once per class."""
    made = _CLASSES.get(cls)
    if made is None:
        made = type(f"FSDP{cls.__name__}", (YaFSDPModule, cls), {"__module__": cls.__module__})
        _CLASSES[cls] = made
    return made


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes another method of a managed module gather parameters as ``forward`` does.

    A module that is not managed is left alone.

    Args:
        module: A module given to :func:`ya_fsdp.fully_shard`.
        method_name: A method such as ``"generate"`` or ``"encode"``.

    Raises:
        ValueError: If the module has no such method.
    """
    check_type("module", module, nn.Module)
    check_type("method_name", method_name, str)
    if not isinstance(module, YaFSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    original = getattr(module, method_name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call_with_unshard(module, original, args, kwargs)

    module.__dict__[method_name] = wrapped


def _state(module: Any) -> ModuleState:
    state = state_of(module)
    assert state is not None, "a YaFSDPModule without state"
    return state


def _parts(module: Any) -> tuple[Unit, Schedule]:
    return _state(module).unit, schedule_of(module)


def _units_of(modules: Any) -> list[Unit]:
    if not isinstance(modules, Sequence) or isinstance(modules, str):
        raise TypeError(f"modules to prefetch come as a list, got {type(modules).__name__}")
    units = []
    for module in modules:
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise ValueError(f"{type(module).__name__} is not managed by fully_shard")
        units.append(state.unit)
    return units


def _check_count(count: Any) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"the number of buffers must be an int of at least 1, got {count!r}")
