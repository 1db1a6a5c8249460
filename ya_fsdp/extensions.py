"""Parameters whose tensor subclass decides what is gathered: FSDP2's all-gather extensions.

A subclass with ``fsdp_pre_all_gather`` says what each rank sends for its part (8-bit elements, say,
with scales as metadata), and ``fsdp_post_all_gather`` makes the unsharded tensor of what arrived.
Every such parameter is a group of its own, cut into equal numbers of dim-0 rows. Optimizers see
the plain values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import _torch
from .buffers import Slot, aligned
from .collectives import Collectives
from .group import ParamGroup
from .layout import ShardLayout, plan_layout
from .mesh import MeshInfo
from .param import ShardedParam

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(frozen=True)
class Extension:
    """A parameter's tensor subclass, and how to put it around other values.

    Attributes:
        cls: The subclass.
        inner: Name of the attribute that holds the values; ``None``: the tensor itself does.
        others: Tensors beside the values, as they are.
        context: What the subclass needs to be made again.
        takes_all: Whether ``fsdp_pre_all_gather`` takes five arguments, not the mesh alone.
    """

    cls: type[Tensor]
    inner: str | None
    others: Mapping[str, Tensor]
    context: Any
    takes_all: bool

    @classmethod
    def of(cls, fqn: str, tensor: Tensor) -> Extension | None:
        """The extension of a whole parameter, ``None`` of an ordinary one.

        Raises:
            ValueError: If the subclass has half of the contract, or can not be cut.
        """
        has = [hasattr(tensor, name) for name in (_PRE, _POST)]
        if not any(has):
            return None
        kind = type(tensor)
        if not all(has):
            lacks = _POST if has[0] else _PRE
            raise ValueError(
                f"parameter '{fqn}' is a {kind.__name__}, which lacks {lacks}; a tensor subclass "
                f"with an all-gather of its own defines both {_PRE} and {_POST}"
            )
        count = len(inspect.signature(getattr(tensor, _PRE)).parameters)
        if count not in (1, 5):
            raise ValueError(
                f"{kind.__name__}.{_PRE} of parameter '{fqn}' takes {count} arguments; it has to "
                "take (mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        if not hasattr(tensor, "__tensor_flatten__"):
            context = {k: v for k, v in vars(tensor).items() if not isinstance(v, Tensor)}
            return cls(kind, None, {}, context, count == 5)
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        whole = [
            name
            for name, part in parts.items()
            if part.shape == tensor.shape and part.dtype == tensor.dtype
        ]
        if len(whole) != 1:
            raise ValueError(
                f"parameter '{fqn}' is a {kind.__name__} around {', '.join(names)}; exactly one of "
                f"them has to have the parameter's shape {tuple(tensor.shape)} and dtype "
                f"{tensor.dtype}, since that is what ranks share and optimizers change. Pass the "
                "parameter in ignored_params, or convert it to a plain one"
            )
        others = {name: part for name, part in parts.items() if name != whole[0]}
        return cls(kind, whole[0], others, context, count == 5)

    def plain(self, tensor: Tensor) -> Tensor:
        """The values of a tensor of the subclass; any other tensor as it is."""
        if not isinstance(tensor, self.cls):
            return tensor.detach()
        with torch.no_grad():
            if self.inner is not None:
                values: Tensor = getattr(tensor, self.inner)
                return values.detach()
            return tensor.detach().as_subclass(Tensor)

    def wrap(self, values: Tensor) -> Any:
        """A tensor of the subclass around values."""
        if self.inner is None:
            tensor = values.as_subclass(self.cls)
            vars(tensor).update(self.context)
            return tensor
        parts = {self.inner: values, **self.others}
        kind: Any = self.cls
        return kind.__tensor_unflatten__(parts, self.context, values.shape, values.stride())


def plan_rows(param: ShardedParam, info: MeshInfo) -> ShardLayout:
    """A layout in which every rank has as many dim-0 rows; those past the end are zeros.

    No row is added for the sake of alignment: what a subclass gets is what FSDP2 would give it.

    Raises:
        ValueError: If parameters are cut over both axes of the mesh.
    """
    if info.levels is not None:
        raise ValueError(
            f"parameter '{param.fqn}' has an all-gather of its own and can not be cut over both "
            "axes of a 2-D mesh; shard over one axis, or pass it in ignored_params"
        )
    row = param.shape[1:].numel() or 1
    return plan_layout([param.shape.numel()], [row], info.shard_size, row)


def _as_sent(tensor: Tensor) -> Tensor:
    """Flat, and 8-bit floating point as bytes, which every back end sends."""
    flat = tensor.view(-1)
    return flat.view(torch.uint8) if flat.is_floating_point() and flat.itemsize == 1 else flat


class ExtendedGroup(ParamGroup):
    """A group of one parameter with an all-gather of its own.

    What arrives lies in the unit's slot, one range per tensor that the subclass sends. Their sizes
    are known once it has been asked, which happens when slots are assigned.
    """

    _received: tuple[Tensor, ...] = ()
    _sent: tuple[tuple[torch.Size, torch.dtype], ...] = ()
    _local: tuple[Tensor, Any] | None = None
    _metadata: Any = None
    _arrived = False
    _own: tuple[Tensor, ...] = ()
    _sizes: tuple[int, ...] = ()

    @property
    def _param(self) -> ShardedParam:
        return self.params[0]

    @property
    def _extension(self) -> Extension:
        extension = self._param.extension
        assert isinstance(extension, Extension)
        return extension

    def _plain(self, tensor: Tensor) -> Tensor:
        return self._extension.plain(tensor)

    # ---- what is sent ---------------------------------------------------------------------------

    def measure(self) -> None:
        """Learns what the subclass sends; every rank asks at the same time."""
        if not self._sent:
            inputs, _ = self._pre_all_gather()
            self._sent = tuple((t.shape, t.dtype) for t in inputs)

    @property
    def gather_bytes(self) -> int:
        """Bytes of what arrives, 0 before :meth:`measure`."""
        return sum(self._ranges())

    def _ranges(self) -> list[int]:
        size = self.mesh_info.shard_size
        return [aligned(size * shape.numel() * dtype.itemsize) for shape, dtype in self._sent]

    def _pre_all_gather(self) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's tensors to send and metadata, checked."""
        param, extension = self._param, self._extension
        if self._local is None or self._local[0] is not self.master_shard:
            rows = self.master_shard.view(-1, *param.shape[1:])
            self._local = (self.master_shard, extension.wrap(rows))
        arguments: tuple[Any, ...] = (self._shard_mesh(),)
        if extension.takes_all:
            stride = torch.empty(param.shape, device="meta").stride()
            module = param.owner() if param.owner is not None else None
            arguments += (param.shape, stride, module, self.policy)
        with torch.no_grad():
            inputs, metadata = self._local[1].fsdp_pre_all_gather(*arguments)
        inputs = tuple(t.contiguous() for t in inputs)
        self._check_dtype(inputs)
        sent = tuple((t.shape, t.dtype) for t in inputs)
        if self._sent and sent != self._sent:
            raise RuntimeError(
                f"{extension.cls.__name__}.{_PRE} of parameter '{param.fqn}' sends {sent} now and "
                f"sent {self._sent} before; shapes and dtypes have to stay"
            )
        return inputs, metadata

    def _check_dtype(self, inputs: tuple[Tensor, ...]) -> None:
        for dtype, kind in (self.policy.all_gather_dtype_to_param_cls or {}).items():
            if issubclass(self._extension.cls, kind) and inputs[0].dtype != dtype:
                raise RuntimeError(
                    f"parameter '{self._param.fqn}' is gathered in {inputs[0].dtype}, but "
                    f"all_gather_dtype_to_param_cls says {dtype} for {kind.__name__}"
                )

    def _shard_mesh(self) -> DeviceMesh:
        info = self.mesh_info
        if info.mesh.ndim == 1:
            return info.mesh
        if self._mesh_of_shards is None:
            self._mesh_of_shards = DeviceMesh.from_group(info.shard_group, info.mesh.device_type)
        return self._mesh_of_shards

    _mesh_of_shards: DeviceMesh | None = None

    # ---- gathering ------------------------------------------------------------------------------

    def bind_slot(self, slot: Slot, offset: int) -> None:
        """Cuts ranges for what arrives out of a slot; the unsharded parameter is made anew."""
        if self._unsharded:
            # Whatever autograd saved points at the old slot: a backward through it must raise.
            _torch.bump_version_counters(self._versioned)
        received = []
        for (shape, dtype), num_bytes in zip(self._sent, self._ranges(), strict=True):
            whole = (self.mesh_info.shard_size * shape[0], *shape[1:]) if shape else (1,)
            view = slot.view(offset, torch.Size(whole).numel(), dtype)
            received.append(view.view(whole))
            offset += num_bytes
        self._received = tuple(received)
        self._param.unsharded = None
        self._unsharded = self._versioned = self.grads.unsharded = ()
        self._versions = None
        self._own = ()
        self._arrived = False

    def gather(self, collectives: Collectives) -> None:
        """Gathers what the subclass sends."""
        self.note_version()
        inputs, self._metadata = self._pre_all_gather()
        for output, source in zip(self._received, inputs, strict=True):
            if self.mesh_info.shard_size > 1:
                group = self.mesh_info.shard_group
                collectives.all_gather(_as_sent(output), _as_sent(source), group)
            else:
                output.copy_(source.view_as(output))
        self._arrived = True

    def to_unsharded(self) -> None:
        """Lets the subclass make the unsharded parameter and registers it."""
        param = self._param
        if self._versions is not None:
            _torch.set_version_counters(self._versioned, self._versions)
            self._versions = None
        released = any(t.untyped_storage().nbytes() == 0 for t in self._own)
        if self._arrived or released:
            self._post_all_gather()
            self._arrived = False
        unsharded = param.unsharded
        assert unsharded is not None
        if unsharded.requires_grad is not param.sharded.requires_grad:
            unsharded.requires_grad_(param.sharded.requires_grad)
        for table, name in param.sites:
            table[name] = unsharded

    def _post_all_gather(self) -> None:
        param, dtype = self._param, self.dtypes.compute
        assert self._local is not None
        local = self._local[1]
        if param.unsharded is not None:
            for tensor, size in zip(self._own, self._sizes, strict=True):
                tensor.untyped_storage().resize_(size)
            kept = (param.unsharded, *self._own)
            with torch.no_grad(), _torch.keep_version_counters(kept):
                # The parameter is the same object, over memory that has been filled again.
                local.fsdp_post_all_gather(self._views, self._metadata, dtype, out=param.unsharded)
            return
        with torch.inference_mode(False), torch.no_grad():
            # Views with version counters of their own: filling the slot is no edit.
            self._views = tuple(view.data for view in self._received)
            value, inner = local.fsdp_post_all_gather(self._views, self._metadata, dtype)
            if value.dim() != len(param.shape):
                value = value.view(-1, *param.shape[1:])
            if value.shape[0] != param.shape[0]:
                value = value[: param.shape[0]]
            param.unsharded = nn.Parameter(value, requires_grad=param.sharded.requires_grad)
        param.unsharded._ya_fsdp_fqn = param.fqn  # type: ignore[attr-defined]
        slot = {view.untyped_storage().data_ptr() for view in self._received}
        self._own = tuple(t for t in inner if t.untyped_storage().data_ptr() not in slot)
        self._sizes = tuple(t.untyped_storage().nbytes() for t in self._own)
        self._unsharded = self.grads.unsharded = (param.unsharded,)
        # A subclass's operators may save what it is made of.
        self._versioned = (param.unsharded, *self._own, *self._views)

    _views: tuple[Tensor, ...] = ()

    def to_sharded(self, may_have_changed: bool) -> None:
        """Registers the sharded parameter and frees what the subclass made for the other."""
        param = self._param
        unsharded, sharded = param.unsharded, param.sharded
        if may_have_changed and unsharded is not None:
            sharded.requires_grad_(unsharded.requires_grad)
        for tensor in self._own:
            tensor.untyped_storage().resize_(0)
        for table, name in param.sites:
            table[name] = sharded

    def _rebuild(self, dtype: torch.dtype, device: torch.device) -> None:
        super()._rebuild(dtype, device)
        self._sent = ()
