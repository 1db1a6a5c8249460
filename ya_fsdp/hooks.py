"""Translates torch's forward and backward events into schedule calls, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _torch
from .schedule import Schedule
from .tree import cast_floats, map_tensors, tensors_in
from .unit import Phase, Unit

Hook = Callable[[Any], None]


def pre_forward(
    schedule: Schedule, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gathers the unit and casts floating-point inputs as its policy says."""
    schedule.pre_forward(unit)
    if schedule.trail.debug and not unit.held:
        unit.note_values(with_copy=True)
    dtype = unit.policy.param_dtype
    if dtype is not None and unit.policy.cast_forward_inputs:
        cast = cast_floats(dtype)
        args = tuple(map_tensors(arg, cast) for arg in args)
        if kwargs:
            kwargs = {key: map_tensors(value, cast) for key, value in kwargs.items()}
    return args, kwargs


def post_forward(
    schedule: Schedule, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Registers for the backward, reshards the unit and casts its output."""
    needs_backward = False
    if unit.groups and torch.is_grad_enabled() and unit.phase is Phase.FORWARD:
        needs_backward = watch_outputs(schedule, unit, output)
        if needs_backward:
            watch_inputs(schedule, unit, args, kwargs)
        else:
            schedule.watch_gradients(unit)  # a loss may reach them by a tensor that was kept
    if schedule.trail.debug and not unit.held:
        unit.refuse_lost_writes()
    schedule.post_forward(unit, needs_backward)
    if unit.policy.output_dtype is not None:
        output = map_tensors(output, cast_floats(unit.policy.output_dtype))
    return output


def watch_outputs(schedule: Schedule, unit: Unit, output: Any) -> bool:
    """Calls ``pre_backward`` when the gradient reaches any output; returns whether it can."""
    found = False
    outputs = (output,) if type(output) is Tensor else tensors_in(output)
    for tensor in outputs:
        if tensor.requires_grad:
            found = True
            arrival = _Arrival(schedule, unit, tensor)
            _torch.on_gradient(tensor, arrival)
            base = _torch.view_base(tensor)
            if base is not None and base.grad_fn is not None:
                # An in-place edit of a view gives the view another history and drops its hooks;
                # the history of what it is a view of stays in the graph.
                base.grad_fn.register_prehook(arrival)
    return found


class _Arrival:
    """The hook of an output tensor, and of the call that takes the same tensor as its input.

    One unit's output is mostly the next unit's input; one hook then begins the backward of the
    first and ends that of the second. The beginning comes first, so that the gather it may start
    is ahead of the second's reduction.
    """

    __slots__ = ("_schedule", "_unit", "_version", "ends")

    def __init__(self, schedule: Schedule, unit: Unit, tensor: Tensor) -> None:
        self._schedule = schedule
        self._unit = unit
        self._version = _torch.version_of(tensor)
        self.ends: list[tuple[Schedule, Unit]] = []
        tensor._ya_fsdp_arrival = self  # type: ignore[attr-defined]

    @classmethod
    def of(cls, tensor: Tensor) -> _Arrival | None:
        """The hook of a tensor that a unit returned and nobody has edited since."""
        arrival: _Arrival | None = getattr(tensor, "_ya_fsdp_arrival", None)
        if arrival is None or arrival._version != _torch.version_of(tensor):
            return None
        return arrival

    def __call__(self, _: Any) -> None:
        self._schedule.pre_backward(self._unit)
        for schedule, unit in self.ends:
            if unit is not self._unit:  # whose backward has just begun, perhaps to recompute
                schedule.try_end_backward(unit)


def watch_inputs(
    schedule: Schedule, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Calls ``try_end_backward`` once the gradients of all inputs that get one are complete."""
    tensors: dict[int, Tensor] = {}
    for arg in args:
        if type(arg) is Tensor:  # the usual case, without a generator
            if arg.requires_grad:
                tensors[id(arg)] = arg
            continue
        for tensor in tensors_in(arg):
            if tensor.requires_grad:
                tensors[id(tensor)] = tensor
    if kwargs:
        for tensor in tensors_in(kwargs):
            if tensor.requires_grad:
                tensors[id(tensor)] = tensor
    if not tensors:
        return
    if len(tensors) == 1:
        (tensor,) = tensors.values()
        arrival = _Arrival.of(tensor)
        if arrival is not None:
            arrival.ends.append((schedule, unit))
        else:
            _torch.on_gradient(tensor, lambda _: schedule.try_end_backward(unit))
        return
    inputs = _Inputs(schedule, unit, list(tensors.values()))
    for index, tensor in enumerate(tensors.values()):
        _torch.on_gradient(tensor, inputs.hook(index))


class _Inputs:
    """Several inputs of one call: its backward ends with the last gradient that will come."""

    def __init__(self, schedule: Schedule, unit: Unit, tensors: list[Tensor]) -> None:
        self._schedule = schedule
        self._unit = unit
        self._nodes = [torch.autograd.graph.get_gradient_edge(t).node for t in tensors]
        self._task = -1
        self._complete: set[int] = set()

    def hook(self, index: int) -> Hook:
        """The hook of one input tensor."""

        def gradient_complete(_: Any) -> None:
            task = _torch.current_graph_task()
            if task != self._task:
                self._task = task
                self._complete.clear()
            self._complete.add(index)
            missing = (n for i, n in enumerate(self._nodes) if i not in self._complete)
            if not any(_torch.will_execute(node) for node in missing):
                self._schedule.try_end_backward(self._unit)

        return gradient_complete
