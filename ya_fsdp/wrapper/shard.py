"""Turns a module into units: one per wrapped module, one at the root for all norms and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ..build import units_of
from ..fully_shard import fully_shard
from ..module import YaFSDPModule
from .arguments import Arguments, Ranks
from .network import after_forward, collectives_of


@dataclass
class Plan:
    """Which unit each module's own parameters go to.

    Attributes:
        wrapped: Wrapped modules by their FQN in the model, inner ones first.
        names: From the FQN of a wrapped or rogue norm module to the name the user gave it.
        norms: FQNs of the parameters that form the group of norms.
        at_root: Modules whose own parameters belong to the root's unit.
    """

    wrapped: dict[str, nn.Module] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    at_root: list[nn.Module] = field(default_factory=list)

    def public_name(self, fqn: str) -> str:
        """The name of a parameter in state dicts, by the names that the user gave."""
        for prefix in sorted(self.names, key=len, reverse=True):
            if fqn.startswith(f"{prefix}."):
                return f"{self.names[prefix]}{fqn[len(prefix) :]}"
        return fqn


def make_plan(root: nn.Module, args: Arguments) -> Plan:
    """Sorts the model's modules; nothing is changed.

    Raises:
        ValueError: If a module to wrap is not below ``root``.
    """
    fqns = {module: fqn for fqn, module in root.named_modules()}
    plan = Plan()
    given = dict(args.modules_to_wrap_with_names)
    for module, name in (*given.items(), *args.rogue_layer_norm_modules_with_names.items()):
        if not fqns.get(module):
            where = "is the model itself" if module is root else "is no part of the model"
            raise ValueError(f"{type(module).__name__} (given as {name!r}) {where}")
        plan.names[fqns[module]] = name
    inner_first = sorted(given, key=lambda module: -fqns[module].count("."))
    plan.wrapped = {fqns[module]: module for module in inner_first}
    rogue = {m for top in args.rogue_layer_norm_modules_with_names for m in top.modules()}
    inside = {m for module in given for m in module.modules()}
    for fqn, module in root.named_modules():
        is_norm = isinstance(module, args.layer_norm_module_cls) or module in rogue
        if is_norm:
            own = module.named_parameters(fqn, recurse=False, remove_duplicate=False)
            plan.norms.update(name for name, _ in own)
        if is_norm or module not in inside:
            plan.at_root.append(module)
    return plan


def shard(root: nn.Module, plan: Plan, args: Arguments, ranks: Ranks) -> None:
    """Materialises, fills and shards the model, one unit at a time; a collective call."""
    _check_leftovers(root, plan, ranks)
    second = after_forward(args, ranks) if args.hpz_first_layers_num else (True, None)
    collectives = collectives_of(args, ranks)
    at_root = set(plan.at_root)
    materialise(plan.at_root, args, ranks)
    elsewhere = {p for m in root.modules() if m not in at_root for p in m.parameters(recurse=False)}
    _check_ties(root, plan, elsewhere)
    # The root comes first, so that it can take norms out of modules that are units themselves.
    fully_shard(
        root,
        mesh=ranks.norm_mesh,
        reshard_after_forward=False,
        mp_policy=args.policy(),
        ignored_params=elsewhere,
        collectives=collectives,
    )
    for unit in _tied_together(plan.wrapped.values()):
        members = dict.fromkeys(m for top in unit for m in top.modules() if m not in at_root)
        materialise(members, args, ranks)
        fully_shard(
            unit,
            mesh=ranks.mesh,
            reshard_after_forward=args.reshard_after_forward,
            mp_policy=args.policy(),
            ignored_params=[p for m in plan.at_root for p in m.parameters(recurse=False)],
            collectives=collectives,
        )
    first = args.modules_to_wrap_with_names[: args.hpz_first_layers_num]
    for sharded in units_of(module for module, _ in first):
        sharded.reshard_after(*second)
    factor = dist.get_world_size(ranks.data) * args.gradient_accumulation_steps
    for module in root.modules():
        if isinstance(module, YaFSDPModule):
            module.set_gradient_divide_factor(factor)


def _check_leftovers(root: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """With tensor parallelism, what is a replica and what is a slice has to be known."""
    if ranks.model is None:
        return
    at_root = set(plan.at_root)
    for fqn, module in root.named_modules():
        if module in at_root:
            for name, _ in module.named_parameters(fqn, recurse=False):
                if name not in plan.norms:
                    raise ValueError(
                        f"parameter '{name}' is in no module of modules_to_wrap_with_names and in "
                        "no norm, so with a model_parallel_process_group it is not known whether "
                        "its gradient is to be summed over it. Wrap the module that owns it."
                    )


# ---- tied weights --------------------------------------------------------------------------------


def _check_ties(root: nn.Module, plan: Plan, elsewhere: set[nn.Parameter]) -> None:
    for fqn, module in root.named_modules():
        if module in plan.at_root:
            for name, param in module.named_parameters(fqn, recurse=False, remove_duplicate=False):
                if param in elsewhere:
                    raise ValueError(
                        f"parameter '{name}' is shared with a module of "
                        "modules_to_wrap_with_names but lies in none itself; wrap both modules"
                    )


def _tied_together(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Modules that share a parameter form one unit."""
    units: list[list[nn.Module]] = []
    for module in modules:
        own = set(module.parameters())
        tied = [u for u in units if any(_shares(own, other, module) for other in u)]
        units = [u for u in units if u not in tied]
        units.append([m for u in tied for m in u] + [module])
    yield from units


def _shares(own: set[nn.Parameter], other: nn.Module, module: nn.Module) -> bool:
    return other not in module.modules() and not own.isdisjoint(other.parameters())


# ---- values --------------------------------------------------------------------------------------


def materialise(modules: Iterable[nn.Module], args: Arguments, ranks: Ranks) -> None:
    """Gives modules' own parameters and buffers memory, dtype and the values of the node's first.

    Raises:
        ValueError: If a module is on the meta device and nothing says how to fill it.
    """
    for module in modules:
        if any(t.is_meta for t in _own(module)):
            _leave_meta(module, args, ranks.device)
        for name, param in module._parameters.items():
            if param is None:
                continue
            if not args.is_trainable:
                param.requires_grad_(False)
            dtype = args.master_dtype if param.is_floating_point() else param.dtype
            if param.device != ranks.device or param.dtype != dtype:
                param.data = param.data.to(ranks.device, dtype)
            assert module._parameters[name] is param
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(ranks.device)
        if args.sync_module_states and dist.get_world_size(ranks.node) > 1:
            source = dist.get_process_group_ranks(ranks.node)[0]
            with torch.no_grad():
                for tensor in _own(module):
                    dist.broadcast(tensor.detach(), source, group=ranks.node)


def _own(module: nn.Module) -> list[torch.Tensor]:
    """A module's own parameters and buffers, without those of its children."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _leave_meta(module: nn.Module, args: Arguments, device: torch.device) -> None:
    kind = type(module).__name__
    if args.param_init_fn is not None:
        args.param_init_fn(module)
        if any(t.is_meta for t in _own(module)):
            raise ValueError(f"param_init_fn left {kind} on the meta device")
    elif args.sync_module_states:
        module.to_empty(device=device, recurse=False)
    else:
        raise ValueError(
            f"{kind} is on the meta device; pass sync_module_states=True (its values come from the "
            "node's first rank) or a param_init_fn that materialises a module"
        )
