"""Optimizer steps during the backward, for those who need no norm of all gradients first."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from . import _torch
from .build import require_sharded, schedule_of, units_of
from .checks import check_type
from .unit import Unit


class OptimizerInBackward:
    """What :func:`optimizer_in_backward` returns; :meth:`remove` ends it."""

    def __init__(self, steps: list[_UnitStep], optimizer: torch.optim.Optimizer) -> None:
        self._steps = steps
        self._hook = optimizer.register_step_post_hook(self._iteration_ended)

    def _iteration_ended(self, *_: object) -> None:
        for step in self._steps:
            step.reset()

    def remove(self) -> None:
        """Returns to ``optimizer.step()`` after the backward; call it between iterations."""
        self._hook.remove()
        for step in self._steps:
            step.unit.early = None
            for group in step.unit.groups:
                group.grads.shard.forget()  # memory of the communication stream
        self._steps = []


class _UnitStep:
    """Steps one unit's parameters with an optimizer of their own and drops their gradients.

    The optimizer is a copy of the user's that shares its state and reads its options anew in every
    step, so that schedulers, state dicts and ``load_state_dict`` know the user's only.
    """

    def __init__(
        self, unit: Unit, root: nn.Module, optimizer: torch.optim.Optimizer, members: set[int]
    ) -> None:
        self.unit = unit
        self._root = weakref.ref(root)
        self._theirs = optimizer
        self._own = copy.copy(optimizer)
        for name, value in vars(optimizer).items():
            if name != "step":  # which a scheduler wraps to count calls
                vars(self._own).setdefault(name, value)
        self._own.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in members]}
            for group in optimizer.param_groups
        ]
        self._stepped = False

    def refuse_again(self) -> None:
        """Raises if weights were updated already from a part of this iteration's gradients."""
        if self._stepped:
            raise RuntimeError(
                f"unit '{self.unit.fqn}' gets more gradients after optimizer_in_backward has "
                "updated its weights. If they come from another backward pass, tell all but the "
                "last one of an iteration with set_requires_gradient_sync(False) or "
                "set_is_last_backward(False), and call optimizer.step() after the last one. If "
                "they come from the same one, its parameters are used outside of its forward: "
                "give them to one unit with the modules that use them, or do without "
                "optimizer_in_backward. Units before this one in the backward are updated."
            )

    def step(self) -> None:
        """Updates the weights if all gradients are there; else ``optimizer.step()`` will."""
        root, groups = self._root(), self.unit.groups
        if root is None or any(g.grads.partial is not None or g.grads.unresolved for g in groups):
            return
        schedule = schedule_of(root)
        if not schedule.is_last_backward:
            return
        self._stepped = True
        own, theirs = self._own, self._theirs
        own.state = theirs.state  # load_state_dict makes a new one
        for mine, options in zip(own.param_groups, theirs.param_groups, strict=False):
            mine.update({k: v for k, v in options.items() if k != "params"})
        schedule.streams.comm_waits_for_across()
        with schedule.streams.on_comm():
            own.step()
        for mine in own.param_groups:
            for param in mine["params"]:
                param.grad = None
        for group in groups:
            group.grads.release_unused()

    def reset(self) -> None:
        """A new iteration begins, or an exception ended the backward."""
        self._stepped = False


def optimizer_in_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> OptimizerInBackward:
    """Updates each unit's weights as soon as its gradients are reduced, and frees these at once.

    The update runs behind the unit's reduction on the communication stream, while earlier layers
    are still in their backward, so reduced gradients of one unit exist at a time. The training loop
    stays as it is: ``optimizer.step()`` updates what the backward could not (parameters outside the
    sharded model, or of which only another rank knows whether they were used) and ends the
    iteration. Schedulers, state dicts and loading go through ``optimizer`` as ever.

    With gradient accumulation only the last backward updates: announce the others with
    ``set_requires_gradient_sync(False)`` or ``set_is_last_backward(False)``. No norm over all
    gradients exists: :func:`ya_fsdp.clip_grad_norm_` raises, ``torch.nn.utils.clip_grad_norm_``
    finds nothing, and a loss that turns out not to be finite is in the weights already.

    Args:
        model: The root given to :func:`ya_fsdp.fully_shard`.
        optimizer: Any optimizer that updates each parameter by itself, over ``model.parameters()``
            or :func:`ya_fsdp.flat_parameters`.

    Returns:
        A handle whose ``remove()`` returns to the ordinary way.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not sharded, has gradients, or an optimizer in its backward
            already, if the optimizer has none of its parameters or needs a closure, or if a
            parameter has a hook that wants the gradient after it was accumulated.
    """
    require_sharded(model)
    check_type("optimizer", optimizer, torch.optim.Optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the model several times per step, not in its backward")
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    steps = []
    for unit in units_of(model.modules()):
        _check_unit(unit)
        members = theirs & {id(p) for p in _holders(unit)}
        if members:
            steps.append(_UnitStep(unit, model, optimizer, members))
    if not steps:
        raise ValueError(
            "the optimizer has no parameter of this model; make it from model.parameters() or "
            "ya_fsdp.flat_parameters(model) after fully_shard"
        )
    for step in steps:
        for group in step.unit.groups:
            group.grads.shard.forget()  # from here on it is memory of the communication stream
        step.unit.early = step
    return OptimizerInBackward(steps, optimizer)


def _holders(unit: Unit) -> Iterator[nn.Parameter]:
    for group in unit.groups:
        yield from group.grads.shard.holders()


def _check_unit(unit: Unit) -> None:
    if unit.early is not None:
        raise ValueError(
            f"unit '{unit.fqn}' has an optimizer in its backward already; remove() it first"
        )
    if any(param.grad is not None for param in _holders(unit)):
        raise ValueError(
            f"parameters of unit '{unit.fqn}' have gradients; call optimizer_in_backward between "
            "iterations, after optimizer.zero_grad()"
        )
    for group in unit.groups:
        for param in group.params:
            if _torch.post_accumulate_hooks(param.sharded):
                raise ValueError(
                    f"parameter '{param.fqn}' has a hook of register_post_accumulate_grad_hook, "
                    "which runs after the backward, when optimizer_in_backward has used and freed "
                    "the gradient; remove the hook"
                )
