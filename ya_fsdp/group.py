"""One homogeneous group of parameters: its flat shard, its gather and its reduction."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _torch
from .buffers import Slot
from .collectives import Collectives
from .gradients import GroupGradients
from .layout import ShardLayout
from .mesh import MeshInfo
from .param import OWN_ATTRIBUTES, ReplacedParameter, ShardedParam, part_of
from .precision import MixedPrecisionPolicy, ResolvedDtypes, resolve
from .quantised import gather_quantised
from .ragged import RaggedShardDTensor, make_placement


class ParamGroup:
    """Parameters of one master dtype and one gather dtype that are gathered together.

    Buffers by role: ``master_shard`` (this rank's elements in the master dtype, what optimizers
    update), ``gather_output`` (the whole group in a leased slot), ``gather_input`` (this rank's
    slice of it), ``reduce_input`` (the group's gradients in a leased gradient slot) and
    ``grad_shard`` (this rank's reduced gradients, behind every ``.grad``).
    """

    def __init__(
        self,
        params: list[ShardedParam],
        layout: ShardLayout,
        policy: MixedPrecisionPolicy,
        mesh_info: MeshInfo,
        device: torch.device,
    ) -> None:
        self.params = params
        self.layout = layout
        self.policy = policy
        self.dtypes = dtypes = self._resolve(params[0].sharded.dtype)
        self.mesh_info = mesh_info
        self.device = device
        self.master_shard = self._shard_parameters()
        self.gather_output: Tensor | None = None
        self.gather_input: Tensor | None = None
        self._unsharded: tuple[nn.Parameter, ...] = ()
        self._versioned: tuple[Tensor, ...] = ()
        self._versions: tuple[int, ...] | None = None
        self._gathered_version = -1
        self.grads = GroupGradients(params, layout, dtypes, mesh_info)

    # ---- sharding ---------------------------------------------------------------------------

    def _shard_parameters(self) -> Tensor:
        """Cuts this rank's ranges out of the full parameters into one flat tensor."""
        shard = self._new_shard(self.dtypes.master, self.device)
        with torch.no_grad():
            for index, param in enumerate(self.params):
                full = param.sharded
                local = self.local_view(shard, index)
                start, end = self.layout.owned(self.mesh_info.shard_rank, index)
                if full.device.type != "meta" and end > start:
                    flat = part_of(self._plain(full)).reshape(-1)[start:end]
                    local.view(-1).copy_(flat)
                self._adopt_local(param, index, local)
        return shard

    def _plain(self, tensor: Tensor) -> Tensor:
        """The values of a whole parameter."""
        return tensor.detach()

    def sync_replicas(self) -> bool:
        """Gives every replica the values of the first; ``False`` while there are none (meta)."""
        info = self.mesh_info
        if info.replicate_group is None or info.replicate_size == 1:
            return True
        if self.master_shard.is_meta:
            return False
        if self.master_shard.numel():
            with torch.no_grad():
                shard = _torch.real_view(self.master_shard)
                dist.broadcast(shard, group=info.replicate_group, group_src=0)
        return True

    def _new_shard(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)

    def _adopt_local(self, param: ShardedParam, index: int, local: Tensor) -> None:
        """Makes the sharded parameter object over a range of the flat shard."""
        old = param.sharded
        with torch.inference_mode(False):
            ragged = param.place(local, self.layout.bounds(index), self.mesh_info)
            param.sharded = nn.Parameter(ragged, requires_grad=old.requires_grad)
        for name, value in vars(old).items():
            # A subclass's attributes are its values and what belongs to them.
            if name not in OWN_ATTRIBUTES and param.extension is None:
                setattr(param.sharded, name, value)
        for table, name in param.sites:
            table[name] = param.sharded

    def local_view(self, shard: Tensor, index: int) -> Tensor:
        """This rank's part of parameter ``index`` in a flat shard; N-D when it is whole rows."""
        start, end = self.layout.local_range(self.mesh_info.shard_rank, index)
        shape = self.params[index].shape
        rank = self.mesh_info.shard_rank
        placement = make_placement(self.layout.bounds(index), shape)
        return shard[start:end].view(placement.local_shape(shape, rank))

    def readopt(self) -> None:
        """Takes back whatever tensors modules hold now (``.to()``, ``load_state_dict(assign)``).

        Values are copied into the flat shard, and our own parameter objects stay registered, so
        that an optimizer built earlier keeps working.
        """
        first = self._first_loaded()
        if first is None:
            first = self.params[0].registered
        assert first is not None
        changed = first.dtype != self.master_shard.dtype or first.device != self.master_shard.device
        if changed:
            self._rebuild(first.dtype, first.device)
            return
        for index, param in enumerate(self.params):
            current = param.registered
            if current is param.sharded or current is param.unsharded:
                local = getattr(param.sharded, "_local_tensor")  # noqa: B009
                mine = self.local_view(self.master_shard, index)
                if local.data_ptr() != mine.data_ptr() or local.shape != mine.shape:
                    self._take(param, index, param.sharded)
            elif current is not None:
                self._take(param, index, current)

    def check_sites(self) -> None:
        """Refuses what user code put into a module and nobody could train, by name."""
        for param in self.params:
            param.check_sites()

    def adopt_assigned(self) -> None:
        """Takes the values of parameters that user code assigned; those objects get no gradient."""
        assigned = [param.registered for param in self.params]
        self.readopt()
        for tensor, param in zip(assigned, self.params, strict=True):
            if tensor is not None and tensor is not param.sharded:
                ReplacedParameter.mark(tensor, param.fqn)

    def _first_loaded(self) -> Tensor | None:
        """On meta: a parameter that ``load_state_dict(assign)`` has given values.

        The modules of a list are loaded one after the other, in any order.
        """
        if not self.master_shard.is_meta:
            return None
        current = [param.registered for param in self.params]
        return next(
            (tensor for tensor in current if tensor is not None and not tensor.is_meta), None
        )

    def _take(self, param: ShardedParam, index: int, source: Tensor) -> None:
        expected = tuple(param.sharded.shape)
        if tuple(source.shape) != expected:
            raise ValueError(
                f"parameter '{param.fqn}' was replaced by one of shape {tuple(source.shape)}; "
                f"a sharded parameter keeps its shape {expected}. Replace it before "
                "fully_shard."
            )
        mine = self.local_view(self.master_shard, index)
        self._copy_values(mine, source, index)
        param.sharded._local_tensor = mine  # type: ignore[attr-defined]
        for table, name in param.sites:
            table[name] = param.sharded

    def _rebuild(self, dtype: torch.dtype, device: torch.device) -> None:
        """Makes a new flat shard after the parameters changed dtype or device."""
        shard = self._new_shard(dtype, device)
        self.device = device
        for index, param in enumerate(self.params):
            current = param.registered
            assert current is not None
            mine = self.local_view(shard, index)
            self._copy_values(mine, current, index)
            fits = current.dtype == dtype and current.device == device
            if isinstance(current, RaggedShardDTensor) and fits:
                # The same object as before .to() in most cases, so optimizers go on with it.
                current._local_tensor = mine
                param.sharded = current
            else:
                self._adopt_local(param, index, mine)
            for table, name in param.sites:
                table[name] = param.sharded
        self.master_shard = shard
        self.dtypes = self._resolve(dtype)
        self.grads.reset(self.dtypes)
        self.grads.shard.move_pieces(shard)

    def _resolve(self, master: torch.dtype) -> ResolvedDtypes:
        trainable = any(p.sharded.requires_grad for p in self.params)
        first = self.params[0]
        return resolve(self.policy, master, trainable, len(first.shape), first.kind)

    def _copy_values(self, mine: Tensor, source: Tensor, index: int) -> None:
        """Copies this rank's elements of a sharded or whole tensor, unless it has no values."""
        with torch.no_grad():
            if isinstance(source, RaggedShardDTensor):
                values = source._local_tensor.reshape(-1)
            else:
                # torch's distribute_tensor makes even shards of our placements: all ranks gather.
                whole = source.full_tensor() if isinstance(source, DTensor) else self._plain(source)
                values = self.params[index].piece_of(whole).reshape(-1)
            if values.device.type != "meta" and mine.device.type != "meta":
                mine.view(-1).copy_(values)

    # ---- gathering --------------------------------------------------------------------------

    @property
    def gather_bytes(self) -> int:
        """Bytes of the gathered group."""
        return self.layout.total_numel * self.dtypes.gather.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the group's gradients in the reduce dtype."""
        return self.layout.total_numel * self.dtypes.reduce.itemsize

    def measure(self) -> None:
        """Learns how much room the group needs in a slot; called before one is assigned."""

    def bind_slot(self, slot: Slot, offset: int) -> None:
        """Cuts the group's views out of a slot; called when the slot is assigned."""
        self._bind(slot.view(offset, self.layout.total_numel, self.dtypes.gather))

    def _bind(self, gather_output: Tensor) -> None:
        if self._unsharded:
            # Whatever autograd saved points at the old slot: a backward through it must raise.
            _torch.bump_version_counters(self._versioned)
        self.gather_output = gather_output
        size = self.layout.shard_numel
        rank = self.mesh_info.shard_rank
        with torch.inference_mode(False):
            self.gather_input = gather_output[rank * size : (rank + 1) * size]
            for param, span in zip(self.params, self.layout.spans, strict=True):
                flat = gather_output[span.offset : span.offset + span.numel]
                param.bind(flat.view(param.shape))
        self._unsharded = tuple(p.unsharded for p in self.params if p.unsharded is not None)
        self._versioned = self._unsharded
        if self.params[0].tensor_parallel is not None:
            # A module may compute with the part, whose version counter is another.
            self._versioned += tuple(getattr(p, "_local_tensor") for p in self._unsharded)  # noqa: B009
        self.grads.unsharded = self._unsharded
        self._versions = None

    def gather(self, collectives: Collectives) -> None:
        """Casts this rank's shard into its slice of the slot and gathers the rest around it."""
        assert self.gather_input is not None and self.gather_output is not None
        self.note_version()
        if self.dtypes.wire is not None and self.mesh_info.shard_size > 1:
            gather_quantised(
                self.gather_output,
                self.master_shard,
                self.dtypes.wire,
                self.mesh_info.shard_rank,
                self.mesh_info.shard_group,
                collectives,
            )
            return
        self.gather_input.copy_(self.master_shard)  # neither requires grad
        if self.mesh_info.shard_size > 1:
            collectives.all_gather(
                self.gather_output, self.gather_input, self.mesh_info.shard_group
            )

    def note_version(self) -> None:
        """The weights as they are now are being gathered."""
        version = self._version()
        if version != self._gathered_version:
            self._gathered_version = version
            self._note_new_values()

    def _version(self) -> int:
        # Whatever changes weights in place changes all of a group: one counter speaks for them.
        return self.master_shard._version + self.params[0].sharded._version

    def is_current(self) -> bool:
        """Whether no in-place operation has changed the weights since they were gathered."""
        return self._version() == self._gathered_version

    def _note_new_values(self) -> None:
        """A backward that saved the weights before an optimizer changed them must raise."""
        if self._versions is None:
            _torch.bump_version_counters(self._versioned)
        else:
            self._versions = tuple([v + 1 for v in self._versions])

    def to_unsharded(self) -> None:
        """Registers the unsharded parameters with their modules."""
        if self._versions is not None:
            _torch.set_version_counters(self._versioned, self._versions)
            self._versions = None
        whole_class = self.params[0].whole_class  # the same for all of a group
        for unsharded, param in zip(self._unsharded, self.params, strict=True):
            unsharded.__class__ = whole_class
            requires_grad = param.sharded.requires_grad
            if unsharded.requires_grad is not requires_grad:
                unsharded.requires_grad_(requires_grad)
            for table, name in param.sites:
                table[name] = unsharded

    def to_sharded(self, may_have_changed: bool) -> None:
        """Registers the sharded parameters with their modules."""
        released_class = self.params[0].released_class
        for unsharded, param in zip(self._unsharded, self.params, strict=True):
            sharded = param.sharded
            if may_have_changed and unsharded.requires_grad is not sharded.requires_grad:
                sharded.requires_grad_(unsharded.requires_grad)
            unsharded.__class__ = released_class
            for table, name in param.sites:
                table[name] = sharded

    def replaced(self) -> bool:
        """Whether a module holds another object than our sharded parameter."""
        for param in self.params:
            sharded = param.sharded
            for table, name in param.sites:
                if table.get(name) is not sharded:
                    return True
        return False

    def use_mesh(self, mesh_info: MeshInfo) -> None:
        """Communicates through other process groups over the same ranks from now on."""
        self.mesh_info = mesh_info
        self.grads.mesh_info = mesh_info
        self.grads.shard.mesh_info = mesh_info

    def zero_grad(self, set_to_none: bool) -> None:
        """Resets what modules do not show: sharded gradients while unsharded, the accumulator."""
        self.grads.drop()
        for param in self.params:
            if param.registered is not param.sharded and param.sharded.grad is not None:
                if set_to_none:
                    param.sharded.grad = None
                else:
                    param.sharded.grad.zero_()

    def values_now(self, *, with_copy: bool) -> tuple[tuple[int, ...], Tensor | None]:
        """Version counters of the unsharded parameters, and their bytes."""
        output = self.gather_output
        copy = output.detach().clone() if with_copy and output is not None else None
        return _torch.versions_of(self._unsharded), copy

    def written_since(self, versions: tuple[int, ...], copy: Tensor | None) -> str | None:
        """The first unsharded parameter that was written since :meth:`values_now`."""
        now = self._versions or _torch.versions_of(self._unsharded)
        for index, param in enumerate(self.params):
            span = self.layout.spans[index]
            part = slice(span.offset, span.offset + span.numel)
            if now[index] != versions[index]:
                return param.fqn
            if copy is not None and self.gather_output is not None:
                before, after = copy[part], self.gather_output[part]
                if not torch.equal(before.view(torch.uint8), after.view(torch.uint8)):
                    return param.fqn
        return None

    def mark_stale(self, version: int) -> None:
        """Sets version counters so that a backward that still needs the old bytes raises."""
        if self._versions is None:
            self._versions = _torch.versions_of(self._versioned)
            _torch.set_version_counters(self._versioned, (version,) * len(self._versioned))
