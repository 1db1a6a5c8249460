"""Optimizer state that was saved beside the original's ``local_state_dict``.

Every rank saved ``optimizer.state_dict()`` of a torch optimizer over its two flat parameters:
numbered entries whose tensors are as long as ``layernorm_parameter`` or ``main_parameter`` is on
that rank, and parameter groups. They become entries by the parameters' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .classic import MAIN, NORMS, flat, join_main, join_norms
from .errors import ConversionError

_JOIN = {MAIN: join_main, NORMS: join_norms}


def join_optimizer(
    models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The state under parameters' names, as ``get_full_optimizer_state_dict`` gives it.

    Args:
        models: Every rank's ``local_state_dict``, in rank order, the first one with its meta.
        optimizers: Every rank's optimizer state.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}``.

    Raises:
        ConversionError: If they do not belong together.
    """
    if len(models) != len(optimizers):
        raise ConversionError(
            f"there are {len(optimizers)} files of optimizer state and {len(models)} of weights"
        )
    meta = models[0].get("meta")
    if not isinstance(meta, Mapping):
        raise ConversionError("the first rank's file has no meta, which says what the others hold")
    for rank, saved in enumerate(optimizers):
        if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
            raise ConversionError(f"rank {rank}'s optimizer file has no state and param_groups")
    roles = _roles(models[0], optimizers[0])
    names = {
        number: list(_JOIN[role](meta, [flat(model, role) for model in models]))
        for number, role in roles.items()
    }
    state: dict[str, dict[str, Any]] = {}
    for number, role in roles.items():
        shards = [flat(model, role).numel() for model in models]
        entries = [saved["state"].get(number) for saved in optimizers]
        state.update(_by_name(meta, role, names[number], shards, entries))
    groups = [
        {**group, "params": [name for number in group["params"] for name in names[number]]}
        for group in optimizers[0]["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _roles(model: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[int, str]:
    """Which flat parameter each number stands for."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(set(numbers)) or len(numbers) > 2:
        raise ConversionError(
            f"the optimizer has the parameters {numbers}; there should be two, the flat parameter "
            "of norms and the main one"
        )
    sizes = {role: flat(model, role).numel() for role in (NORMS, MAIN)}
    found: dict[int, str] = {}
    for number in numbers:
        values = saved["state"].get(number, {}).values()
        longest = max((v.numel() for v in values if isinstance(v, Tensor)), default=0)
        fitting = [role for role in sizes if sizes[role] == longest and longest > 1]
        if len(fitting) == 1:
            found[number] = fitting[0]
    # Without state, or where both are equally long: the order in which the original had them.
    rest = [role for role in (NORMS, MAIN) if role not in found.values()]
    for number in sorted(set(numbers) - set(found)):
        found[number] = rest.pop(0) if len(numbers) > 1 else MAIN
    if len(set(found.values())) < len(found):
        raise ConversionError("the optimizer's two entries have the length of one flat parameter")
    return found


def _by_name(
    meta: Mapping[str, Any],
    role: str,
    names: Sequence[str],
    shards: Sequence[int],
    entries: Sequence[Mapping[str, Any] | None],
) -> dict[str, dict[str, Any]]:
    """One flat parameter's state, cut into its parameters'."""
    if not any(entries):
        return {}
    if any(entry is None or set(entry) != set(entries[0] or ()) for entry in entries):
        raise ConversionError(f"ranks have different kinds of optimizer state for {role}")
    state: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key in entries[0] or ():
        values = [entry[key] for entry in entries if entry is not None]
        if isinstance(values[0], Tensor) and values[0].numel() == shards[0] > 1:
            whole = _JOIN[role](meta, [value.detach().reshape(-1) for value in values])
            for name in names:
                state[name][key] = whole[name]
        elif isinstance(values[0], Tensor) and values[0].numel() > 1:
            raise ConversionError(
                f"optimizer state '{key}' has {values[0].numel()} elements where {role} has "
                f"{shards[0]}; the files do not belong together"
            )
        else:
            for name in names:
                value = values[0]
                state[name][key] = value.clone() if isinstance(value, Tensor) else value
    return state
