"""Every private torch name the package uses, each with its reason; version switches live here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Operators on lists of tensors have no public names; one launch serves many tensors.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
flat_norms = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

# Calling a function on a tensor subclass as if it were a plain tensor; no public name exists.
without_torch_function = torch._C.DisableTorchFunctionSubclass


def getter(name: str) -> Any:
    """What torch passes to ``__torch_function__`` when an attribute of a tensor is read."""
    return getattr(Tensor, name).__get__


def setter(name: str) -> Any:
    """What torch passes to ``__torch_function__`` when an attribute of a tensor is set."""
    return getattr(Tensor, name).__set__


def deleter(name: str) -> Any:
    """What torch passes to ``__torch_function__`` when an attribute of a tensor is deleted."""
    return getattr(Tensor, name).__delete__


# ---- engine: collectives, autograd engine, version counters ------------------------------------


def _options(kind: type[Any]) -> Any:
    options = kind()
    options.asyncOp = False
    return options


_GATHER_OPTIONS = _options(dist.distributed_c10d.AllgatherOptions)  # type: ignore[attr-defined]
_SCATTER_OPTIONS: dict[Any, Any] = {}


def real_view(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, which every back end can send, sum and average."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def all_gather_flat(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Flat all-gather on the current stream.

    The method of the group is called because the public function was renamed in 2.13 (the old
    name warns on every call) and spends four times as long on checks that the caller has done.
    """
    work = group._allgather_base(real_view(output), real_view(input), _GATHER_OPTIONS)
    if work is not None:
        work.wait()


def reduce_scatter_flat(output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Flat reduce-scatter on the current stream; see :func:`all_gather_flat` for the reason.

    ``op`` is a ``ReduceOp``, or a number by which NCCL multiplies every input before the sum.
    """
    options = _SCATTER_OPTIONS.get(op)
    if options is None:
        options = _SCATTER_OPTIONS[op] = _options(dist.distributed_c10d.ReduceScatterOptions)
        options.reduceOp = _premul_sum(op) if isinstance(op, float) else op
    work = group._reduce_scatter_base(real_view(output), real_view(input), options)
    if work is not None:
        work.wait()


def _premul_sum(factor: float) -> Any:
    """NCCL's sum of inputs times a factor, which has a public name from 2.13 on only."""
    public = getattr(dist.ReduceOp, "PREMUL_SUM", None)
    if callable(public):
        return public(factor)
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


_EXCHANGE_OPTIONS = _options(dist.distributed_c10d.AllToAllOptions)


def all_to_all_flat(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Flat all-to-all of even parts on the current stream; see :func:`all_gather_flat`."""
    work = group.alltoall_base(output, input, [], [], _EXCHANGE_OPTIONS)
    if work is not None:
        work.wait()


def current_stream_id(device: torch.device) -> int:
    """A number for the current stream; the public call makes a stream object (1 us) each time."""
    if device.type == "cuda":
        return int(torch._C._cuda_getCurrentRawStream(device.index or 0))
    return int(torch.get_device_module(device).current_stream(device).stream_id)


StreamKey = tuple[int, int, int]


def stream_key(stream: Any) -> StreamKey:
    """What torch identifies a stream by: id, device index and device type."""
    return (stream.stream_id, stream.device_index, stream.device_type)


def set_stream(key: StreamKey | None) -> None:
    """Makes a CUDA stream current; the public context manager costs four times as much."""
    if key is not None:
        torch._C._cuda_setStream(stream_id=key[0], device_index=key[1], device_type=key[2])


def break_graph() -> None:
    """Ends the graph that torch.compile is tracing; dynamo is imported when this is called."""
    torch._dynamo.graph_break()


def is_recording() -> bool:
    """Whether ``torch.jit.trace`` or ``torch.export`` records what runs; torch hides the former."""
    return bool(torch._C._is_tracing()) or torch.compiler.is_exporting()


def hide_from_dynamo(function: Any, *, with_callees: bool) -> None:
    """Keeps torch.compile from tracing a function (and what it calls, for as long as it runs).

    The public ``torch.compiler.disable`` imports dynamo and wraps every eager call (2 us).
    """
    frames = torch._C._dynamo.eval_frame
    callees = frames._FrameAction.SKIP if with_callees else frames._FrameAction.DEFAULT
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, callees)
    frames.set_code_exec_strategy(function.__code__, strategy)


def current_graph_task() -> int:
    """Number of the backward pass this thread is in, -1 outside; no public name exists."""
    return int(torch._C._current_graph_task_id())


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Runs ``callback`` at the end of the current backward pass; no public name exists."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_execute(node: Any) -> bool:
    """Whether the current backward pass will run ``node``; no public name exists."""
    return bool(torch._C._will_engine_execute_node(node))


def wants_gradient(node: Any) -> bool | None:
    """Whether the current backward pass adds to a leaf's ``.grad``.

    ``None`` where the gradient itself is asked for (``torch.autograd.grad``), about which torch's
    function raises.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def set_version_counters(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets autograd's version counters, so that its own check finds a reused buffer."""
    if tensors:
        torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def versions_of(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Autograd's version counters; ``_version`` has no public name."""
    with without_torch_function():
        return tuple([t._version for t in tensors])


def version_of(tensor: Tensor) -> int:
    """One plain tensor's version counter; inference tensors, which have none, are never asked."""
    return tensor._version


def bump_version_counters(tensors: tuple[Tensor, ...]) -> None:
    """Advances autograd's version counters by one edit each."""
    set_version_counters(tensors, tuple([v + 1 for v in versions_of(tensors)]))


def keep_version_counters(tensors: tuple[Tensor, ...]) -> Any:
    """Takes back what is done to version counters inside; edits of contents refilled alike."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tensors)


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor that ``tensor`` is a differentiable view of; ``_base`` has no public name."""
    return tensor._base


def post_accumulate_hooks(param: Tensor) -> dict[int, Callable[[Tensor], None]] | None:
    """Hooks a user registered with ``register_post_accumulate_grad_hook``."""
    return getattr(param, "_post_accumulate_grad_hooks", None)


def storage_use_count(tensor: Tensor) -> int:
    """Tensors that share the memory of ``tensor``; no public name exists."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# ---- ragged tensors -----------------------------------------------------------------------------

from torch.distributed._composable.contract import STATE_KEY  # noqa: E402
from torch.distributed.fsdp import fully_shard as _fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    _foreach_supported_types as _optimizer_foreach_types,
)
from torch.utils._foreach_utils import (  # noqa: E402
    _foreach_supported_types as _utility_foreach_types,
)

# Before 2.13 the C++ fast path for DTensor ignores a subclass's own __torch_dispatch__.
DTENSOR_SUBCLASS_OK = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)

DTENSOR_BASE: Any = DTensor if DTENSOR_SUBCLASS_OK else Tensor

# Without it a plain result, such as a norm, would be cast to the subclass; no public name exists.
disabled_torch_function = torch._C._disabled_torch_function_impl


class _Spec:
    """What of a DTensorSpec our own code reads; before 2.13 the real one refuses placements."""

    def __init__(self, mesh: Any, placements: Any, tensor_meta: Any) -> None:
        self.mesh = mesh
        self.device_mesh = mesh
        self.placements = placements
        self.tensor_meta = tensor_meta


def make_spec(mesh: Any, placements: Any, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """The layout description that a DTensor carries; no public constructor exists."""
    meta = TensorMeta(shape, stride, dtype)
    if not DTENSOR_SUBCLASS_OK:
        return _Spec(mesh, placements, meta)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def respec(spec: Any, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """The same layout with other tensor metadata, without the constructor's checks (6 us)."""
    if not DTENSOR_SUBCLASS_OK:
        return _Spec(spec.mesh, spec.placements, TensorMeta(shape, stride, dtype))
    new = DTensorSpec.__new__(DTensorSpec)
    new.__dict__.update(spec.__dict__)
    new.__dict__["tensor_meta"] = TensorMeta(shape, stride, dtype)
    new.__dict__["_hash"] = None
    return new


def new_sharded_tensor(cls: Any, local: Tensor, spec: Any, requires_grad: bool) -> Any:
    """A wrapper subclass of ``DTENSOR_BASE``; DTensor's own constructor costs 24 us in wrappers."""
    if DTENSOR_SUBCLASS_OK:
        return Tensor._dtensor__new__(cls, local, spec, requires_grad=requires_grad)
    meta = spec.tensor_meta
    # The public way to subclass with a foreign shape is to use this private constructor.
    tensor = Tensor._make_wrapper_subclass(
        cls,
        meta.shape,
        strides=meta.stride,
        dtype=local.dtype,
        device=local.device,
        layout=local.layout,
        requires_grad=requires_grad,
    )
    tensor._local_tensor = local
    tensor._spec = spec
    return tensor


unscale_and_find_overflow = torch._amp_foreach_non_finite_check_and_unscale_
"""What a GradScaler calls: scales gradients in place and notes whether any was not finite."""


def allow_foreach(cls: Any) -> None:
    """Lets optimizers and clip_grad_norm_ choose their foreach code; they ask for exact types."""
    for types in (_optimizer_foreach_types, _utility_foreach_types):
        if cls not in types:
            types.append(cls)


def op_overloads(name: str) -> dict[str, Any]:
    """The aten operator's overloads; many names that optimizers use begin with an underscore."""
    packet = getattr(torch.ops.aten, name, None)
    return {} if packet is None else {own: getattr(packet, own) for own in packet.overloads()}


@functools.cache
def writes_its_input(func: Any) -> bool:
    """Whether an operator changes its first argument; only the private schema tells."""
    info = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return info is not None and bool(info.is_write)


@functools.cache
def argument_names(func: Any) -> tuple[str, ...]:
    """Names of an operator's arguments; only the private schema tells."""
    return tuple(argument.name for argument in func._schema.arguments)


def decompose(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator by its parts, or ``NotImplemented``; inference mode skips this otherwise."""
    return func.decompose(*args, **kwargs)


def foreach_norm(tensors: list[Tensor], p: float, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """Norms of many tensors in a few kernels; the public functions take one tensor."""
    return torch._foreach_norm(tensors, p, dtype)


def on_gradient(tensor: Tensor, hook: Callable[[Any], None]) -> None:
    """``Tensor.register_hook``, which torch leaves untyped."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def on_state_dict(
    module: torch.nn.Module, before: Callable[..., None], after_load: Callable[..., None]
) -> None:
    """Calls ``before`` ahead of saving and loading; torch leaves these methods untyped."""
    register: Any = module
    register.register_state_dict_pre_hook(before)
    register.register_load_state_dict_pre_hook(before)
    register.register_load_state_dict_post_hook(after_load)


# ---- checkpoints ---------------------------------------------------------------------------------


def default_store() -> Any:
    """The key-value store of the default process group, in which ranks find each other."""
    return dist.distributed_c10d._get_default_store()


# ---- multiprocessors -----------------------------------------------------------------------------


def has_carveout() -> bool:
    """Whether torch can tell cuBLASLt to leave multiprocessors alone; no public name exists."""
    return hasattr(torch._C, "_set_sm_carveout_experimental")


def get_carveout() -> int | None:
    """The carve-out in force, ``None`` for none."""
    value = torch._C._get_sm_carveout_experimental()
    return None if value is None else int(value)


def set_carveout(multiprocessors: int | None) -> None:
    """Multiprocessors that cuBLASLt leaves alone from the next product on."""
    torch._C._set_sm_carveout_experimental(multiprocessors)


def get_blas_library() -> str:
    """The BLAS library torch uses now."""
    return str(torch._C._get_blas_preferred_backend()).rsplit(".", 1)[-1].lower()


_BLAS_LIBRARIES: dict[str, Any] = {}


def set_blas_library(name: str) -> None:
    """Chooses torch's BLAS library; the public function looks it up by name each time."""
    if not _BLAS_LIBRARIES:
        backends: Any = torch._C._BlasBackend
        _BLAS_LIBRARIES.update((k.lower(), v) for k, v in backends.__members__.items())
    torch._C._set_blas_preferred_backend(_BLAS_LIBRARIES[name])


def nccl_options(*, max_ctas: int) -> Any:
    """Options of an NCCL process group with at most ``max_ctas`` thread blocks per collective."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    options.config.min_ctas = min(max_ctas, 1)
    return options


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_FULLY_SHARD = getattr(_fully_shard, "__wrapped__", _fully_shard)


def set_composable_state(module: Any, state: Any) -> None:
    """Makes ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state``."""
    module.__dict__.setdefault(STATE_KEY, {})[_FULLY_SHARD] = state
