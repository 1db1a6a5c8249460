"""The class ``YaFSDP``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _torch
from ..build import groups_of, schedule_of, state_of
from ..clipping import clip_grad_norm_
from ..flat import flat_parameters
from ..module import YaFSDPModule
from ..schedule import Schedule
from . import state
from .arguments import Arguments, Colours, NormClasses, find_ranks
from .clip import clip_with_model_parallel
from .profile import name_ranges
from .shard import make_plan, shard


class YaFSDP(nn.Module):
    """A model sharded under the classic interface of 2024; see ``docs/migration.md``.

    Every wrapped module is a unit of :func:`ya_fsdp.fully_shard`. The parameters of all norms
    (and whatever lies in no wrapped module) form one more, gathered once per step and kept through
    forward and backward. Backward passes are counted: after ``gradient_accumulation_steps`` of
    them, gradients are the mean over ranks and microbatches, so the loss is not divided.

    Args:
        module: The model; it is changed in place.
        zero_stage: 3: units are freed after forward and gathered again in backward. 2: they are
            gathered once per step. 1: and gradients are reduced at the last microbatch only,
            after being added up in whole-size buffers.
        param_dtype: Dtype of forward and backward and of the gather. Inputs are not cast to it.
        modules_to_wrap_with_names: (module, name) pairs; names prefix those in state dicts.
        layer_norm_module_cls: Class of norms, or a tuple of classes.
        gradient_accumulation_steps: Backward passes per optimizer step.
        data_parallel_process_group: Ranks over which to shard; ``None``: all.
        intra_node_data_parallel_process_group: Those of them on this node; ``None``: as torchrun
            numbers ranks.
        model_parallel_process_group: Ranks that hold slices of the same layers.
        all_reduce_grads_across_model_parallel_group: Sum gradients of norms over them.
        bit16_reduce_scatter: Reduce gradients in ``param_dtype`` instead of fp32.
        bit32_acc_for_bit16_reduce_scatter: Accumulate that in fp32.
        hpz_first_layers_num: How many of the wrapped modules, from the first on, keep a second
            shard over the node's ranks, from which backward gathers; needs ``zero_stage=3`` and
            an ``intra_node_data_parallel_process_group``.
        rogue_layer_norm_modules_with_names: Norms outside of wrapped modules, with their names.
        sync_module_states: Each node's first rank gives its values to the others.
        param_init_fn: Materialises a module's own parameters and buffers that are on meta.
        device_id: Device, ``None`` for the current accelerator, or CPU with gloo.
        is_trainable: ``False`` for a frozen model stored in ``param_dtype``.
        use_yccl: Gather, and sum bf16 gradients, through the package ``yccl``.
        yccl_intra_inter_expr: (intra_color, inter_color) of ``yccl``, or a function of the rank
            that returns them; ``None``: by node, and by place in the node.
        profile: Names the forward of every wrapped module in profiles.
        yccl_all_gather_stages: Stages of ``yccl``'s gather, ``None`` for its own choice.
        use_yccl_padding: Accepted; shards are padded to 16 bytes in any case.

    Raises:
        TypeError: If an argument has the wrong type, such as a string for colours.
        ValueError: If an argument's value can not be; the message names it.
        ImportError: If ``use_yccl`` is set and there is no package ``yccl``.
        RuntimeError: If there is no process group.
    """

    def __init__(
        self,
        module: nn.Module,
        zero_stage: int,
        param_dtype: torch.dtype,
        modules_to_wrap_with_names: Sequence[tuple[nn.Module, str]],
        layer_norm_module_cls: NormClasses,
        gradient_accumulation_steps: int,
        data_parallel_process_group: dist.ProcessGroup | None = None,
        intra_node_data_parallel_process_group: dist.ProcessGroup | None = None,
        model_parallel_process_group: dist.ProcessGroup | None = None,
        all_reduce_grads_across_model_parallel_group: bool = False,
        bit16_reduce_scatter: bool = False,
        bit32_acc_for_bit16_reduce_scatter: bool = False,
        hpz_first_layers_num: int = 0,
        rogue_layer_norm_modules_with_names: Mapping[nn.Module, str] | None = None,
        sync_module_states: bool = False,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | torch.device | None = None,
        is_trainable: bool = True,
        use_yccl: bool = False,
        yccl_intra_inter_expr: Colours | None = None,
        profile: bool = False,
        *,
        yccl_all_gather_stages: int | None = None,
        use_yccl_padding: bool = False,
    ) -> None:
        args = Arguments(
            zero_stage,
            param_dtype,
            modules_to_wrap_with_names,
            layer_norm_module_cls,
            gradient_accumulation_steps,
            data_parallel_process_group,
            intra_node_data_parallel_process_group,
            model_parallel_process_group,
            all_reduce_grads_across_model_parallel_group,
            bit16_reduce_scatter,
            bit32_acc_for_bit16_reduce_scatter,
            hpz_first_layers_num,
            rogue_layer_norm_modules_with_names or {},
            sync_module_states,
            param_init_fn,
            device_id,
            is_trainable,
            use_yccl,
            yccl_intra_inter_expr,
            yccl_all_gather_stages,
            use_yccl_padding,
            profile,
        )
        super().__init__()
        plan = make_plan(module, args)
        args.policy()  # refuses before anything is changed
        self._ranks = find_ranks(args)
        shard(module, plan, args, self._ranks)
        if profile:
            name_ranges(plan.wrapped, plan.names)
        self._module = module
        self._plan = plan
        self._zero_stage = zero_stage
        self._steps = gradient_accumulation_steps
        self.is_trainable = is_trainable
        self._backwards = 0
        self._quiet = False
        self._weights_gathered: tuple[int, ...] | None = None
        self._conducted: Schedule | None = None
        self._flat: dict[str, nn.Parameter] | None = None
        self._watch_optimizers()
        self._conduct()

    # ---- running -------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped model, a :class:`ya_fsdp.YaFSDPModule`."""
        return self._module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped model."""
        schedule = self._conduct()
        versions = _torch.versions_of(tuple(g.master_shard for g in groups_of(self._module)))
        schedule.weights_unchanged = self._backwards > 0 and versions == self._weights_gathered
        self._weights_gathered = versions
        try:
            return self._module(*args, **kwargs)
        finally:
            schedule.weights_unchanged = False  # the model may be called without us

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_module" not in self._modules:
                raise
            return getattr(self._module, name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add gradients up without communication; they are counted."""
        with cast(YaFSDPModule, self._module).no_sync():
            self._quiet = True
            try:
                yield
            finally:
                self._quiet = False
        self._set_sync()

    def _conduct(self) -> Schedule:
        """The schedule, which another root may have replaced, with us among its listeners."""
        schedule = schedule_of(self._module)
        if schedule is not self._conducted:
            counted = weakref.WeakMethod(self._count_backward)

            def backward_ended() -> None:
                method = counted()
                if method is not None:
                    method()

            schedule.after_backward.append(backward_ended)
            self._conducted = schedule
            self._set_sync()
        return schedule

    def _count_backward(self) -> None:
        self._backwards = (self._backwards + 1) % self._steps
        if not self._quiet:
            self._set_sync()

    def _set_sync(self) -> None:
        is_last = self._backwards == self._steps - 1
        cast(YaFSDPModule, self._module).set_requires_gradient_sync(self._zero_stage > 1 or is_last)

    def _watch_optimizers(self) -> None:
        """An optimizer step changes weights, and fused ones do so behind version counters."""
        reference = weakref.ref(self)

        def stepped(*_: Any) -> None:
            wrapper = reference()
            if wrapper is not None:
                wrapper._weights_gathered = None

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    # ---- parameters and gradients ------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """A few flat parameters over this rank's shards, which an optimizer can take.

        Their names begin with ``main_parameter`` and, for norms, ``layernorm_parameter``. From the
        first call on gradients are set on them, and not on the sharded parameters of
        :attr:`module`. Of a frozen model: its sharded parameters.
        """
        if not recurse:
            return  # the wrapper itself owns none
        if not self.is_trainable:
            yield from self._module.named_parameters(prefix, recurse, remove_duplicate)
            return
        start = f"{prefix}." if prefix else ""
        for name, param in self._flat_parameters().items():
            yield f"{start}{name}", param

    def _flat_parameters(self) -> dict[str, nn.Parameter]:
        if self._flat is None:
            norms = self._plan.norms
            kinds = flat_parameters(
                self._module,
                {state.MAIN: {"name": state.MAIN}, state.NORMS: {"name": state.NORMS}},
                lambda fqn, _: state.NORMS if fqn in norms else state.MAIN,
            )
            self._flat = {
                f"{kind['name']}.{index}": param
                for kind in cast("list[dict[str, Any]]", kinds)
                for index, param in enumerate(kind["params"])
            }
        return self._flat

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> YaFSDP:
        """Refuses to move or cast what an optimizer may hold already."""
        if self._flat is not None:
            for param in self._flat.values():
                after = fn(torch.empty(0, dtype=param.dtype, device=param.device))
                if (after.dtype, after.device) != (param.dtype, param.device):
                    raise RuntimeError(
                        f"the model can not go from {param.dtype} on {param.device} to "
                        f"{after.dtype} on {after.device} after parameters() was called: an "
                        "optimizer may hold them. Move or cast it first."
                    )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def requires_grad_(self, requires_grad: bool = True) -> YaFSDP:
        """Freezes or unfreezes the model; before ``parameters()`` is called."""
        self._module.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, and begins the count of backward passes anew."""
        self._module.zero_grad(set_to_none)
        self._backwards = 0
        if not self._quiet:
            self._set_sync()

    def clip_grad_norm_(self, max_norm: float | Tensor, norm_type: float = 2.0) -> Tensor:
        """Scales gradients so that the norm of the whole model's gradient is at most ``max_norm``.

        Parameters of norms, which every tensor-parallel rank has, count once.

        Args:
            max_norm: Upper bound of the norm.
            norm_type: Order of the norm, positive or ``inf``.

        Returns:
            The norm before clipping, 0-dim, fp32, the same on every rank.
        """
        if self._ranks.model is None:
            return clip_grad_norm_(self._module, max_norm, norm_type)
        root = state_of(self._module)
        assert root is not None
        norms = root.unit.groups
        split = [group for group in groups_of(self._module) if group not in norms]
        return clip_with_model_parallel(split, norms, self._ranks, max_norm, norm_type)

    # ---- state dicts -----------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Whole tensors on CPU on each node's first rank, nothing elsewhere; every rank calls it.

        Names are the plain model's, with the names given for wrapped modules.
        """
        whole = state.full_state_dict(self._module, self._ranks, self._plan.public_name)
        result = {} if destination is None else destination
        result.update({f"{prefix}{name}": value for name, value in whole.items()})
        return result

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's ``main_parameter`` and ``layernorm_parameter``, buffers, and ``meta``.

        ``meta`` says which elements of which parameters they are; only plain Python values.
        """
        return state.local_state_dict(self._module, self._ranks, self._plan.public_name)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads what :meth:`local_state_dict` or :meth:`state_dict` gave.

        Args:
            state_dict: This rank's local state dict; or a whole one on the first data-parallel
                rank, and anything (``{}``) on the others.
            strict: Whether names of a whole one have to match.
            assign: Not available: values are copied into the shards.

        Raises:
            ValueError: If a local state dict comes from another rank, number of ranks or model.
        """
        if assign:
            raise NotImplementedError("assign=True: values are copied into the shards")
        name = self._plan.public_name
        if state.is_local(state_dict):
            state.load_local_state_dict(self._module, self._ranks, name, state_dict)
            return None
        return state.load_full(self._module, self._ranks, name, state_dict, strict)
