"""One parameter of a group: its sharded and its unsharded object, and where modules refer to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _torch
from ._torch_watch import inside_functional_call
from .mesh import MeshInfo
from .ragged import RaggedShardDTensor, new_ragged
from .tensor_parallel import TensorParallel

Site = tuple[dict[str, nn.Parameter | None], str]
"""A module's parameter table and the name under which it refers to the parameter.

The table, not the module, is kept: an edge back to the module would keep a deleted model alive.
"""

TAKEN = "_ya_fsdp_taken_by"
"""Name of the mark on a whole parameter that a sharded one has replaced: its FQN."""

OWN_ATTRIBUTES = ("_local_tensor", "_spec")

_HARMLESS = {
    *(
        _torch.getter(name)
        for name in (
            "requires_grad",
            "shape",
            "dtype",
            "device",
            "is_leaf",
            "grad_fn",
            "layout",
            "ndim",
            "_version",
        )
    ),
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_floating_point,
}
"""What may be asked of a released parameter: everything but its values and its gradient (an
optimizer that holds one by mistake asks for that first)."""


class _Released:
    """What an unsharded parameter's class adds while its memory belongs to somebody else.

    Switching ``__class__`` costs tens of nanoseconds; every torch function that would read the
    values is refused here, so a stale read can not go unnoticed.
    """

    # What changes classes must not get attributes that the other class has no place for.
    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuses every function that reads values and names the parameter."""
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with _torch.without_torch_function():
                return func(*args, **kwargs)
        fqn = "?"
        for value in (*args, *kwargs.values()):
            if isinstance(value, _Released):
                fqn = getattr(value, "_ya_fsdp_fqn", "?")
        raise RuntimeError(
            f"parameter '{fqn}' was read by {getattr(func, '__name__', func)} after it was "
            "resharded: its memory now belongs to other parameters. Read it inside the forward of "
            "the module that owns it, call module.unshard() before reading, or use "
            "set_reshard_after_forward(False) on that module."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Names the parameter without touching its values."""
        this: Any = self
        fqn = getattr(self, "_ya_fsdp_fqn", "?")
        return f"ReleasedParameter('{fqn}', shape={tuple(this.shape)})"


class ReleasedParameter(_Released, nn.Parameter):  # type: ignore[misc]  # torch types no repr
    """The class of a released parameter."""


class ReleasedDTensor(_Released, DTensor):  # type: ignore[misc]
    """The class of a released parameter that is a DTensor on other axes."""

    __slots__ = ()


_GRADIENT_ACCESS = {_torch.getter("grad"), _torch.setter("grad"), _torch.deleter("grad")}


class _Replaced:
    """What the class of a whole parameter adds whose place in the model a sharded one has taken.

    An optimizer, or a list for gradient clipping, made before ``fully_shard`` holds such objects
    and would do nothing in silence. All of them ask for ``.grad``, so that is refused.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuses to give or take a gradient."""
        if func in _GRADIENT_ACCESS:
            raise RuntimeError(
                f"parameter '{getattr(args[0], TAKEN, '?')}' was replaced by fully_shard (or by a "
                "later call of flat_parameters), so this object gets no gradients any more. Build "
                "the optimizer (and every list of parameters) from model.parameters() after "
                "fully_shard."
            )
        with _torch.without_torch_function():
            return func(*args, **(kwargs or {}))


class ReplacedParameter(_Replaced, nn.Parameter):
    """The class of a replaced parameter."""

    @classmethod
    def mark(cls, original: nn.Parameter, fqn: str) -> None:
        """Makes ``original``, which ``fqn`` was, refuse gradients."""
        setattr(original, TAKEN, fqn)
        kind: type[Any] = type(original)
        if kind is nn.Parameter:
            original.__class__ = cls
        elif kind is DTensor:
            original.__class__ = ReplacedDTensor  # type: ignore[assignment]


class ReplacedDTensor(_Replaced, DTensor):
    """The class of a replaced parameter that is a DTensor on other axes."""

    __slots__ = ()


class SetattrTable(dict[str, "nn.Parameter | None"]):
    """Stands for the parameter table of a module that must see every change of a parameter.

    A recurrent layer, for one, keeps a list of its weights and renews it in ``__setattr__``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        super().__setitem__(name, value)
        module = self._module()
        if module is not None:
            setattr(module, name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """The parameter of that name; the last one written once the module is gone."""
        module = self._module()
        if module is None:
            return super().get(name, default)
        return module._parameters.get(name, default)


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Where to write a module's parameters."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        return module._parameters
    return SetattrTable(module)


def part_of(param: Tensor) -> Tensor:
    """What sharding cuts: the parameter, or this rank's part of one with axes of its own."""
    return param.to_local() if isinstance(param, DTensor) else param


class ShardedParam:
    """One parameter under management.

    Attributes:
        fqn: Name for messages, the first under which the root module knows it.
        sites: Every (parameter table, name) that refers to it; several for tied weights.
        sharded: The ``nn.Parameter`` users and optimizers hold.
        unsharded: The plain ``nn.Parameter`` modules hold while gathered; one object for life.
        tensor_parallel: What it is on mesh axes of its own, ``None`` for a plain parameter.
        shape: N-D shape of what is gathered: the whole parameter, or this rank's part of it on
            axes of its own.
        kind: Class of the parameter as the user made it.
        owner: The first module that refers to it.
        extension: How its tensor subclass is gathered, ``None`` of an ordinary parameter.
    """

    __slots__ = (
        "extension",
        "fqn",
        "kind",
        "owner",
        "shape",
        "sharded",
        "sites",
        "tensor_parallel",
        "unsharded",
    )

    def __init__(
        self,
        fqn: str,
        param: nn.Parameter,
        sites: list[Site],
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        self.fqn = fqn
        self.sites = sites
        self.tensor_parallel = tensor_parallel
        self.shape = part_of(param).shape
        self.sharded = param
        self.unsharded: nn.Parameter | None = None
        self.kind = type(param)
        self.owner: weakref.ref[nn.Module] | None = None
        self.extension: Any = None

    def place(self, piece: Tensor, bounds: Sequence[int], info: MeshInfo) -> RaggedShardDTensor:
        """The sharded tensor over this rank's piece; no copy.

        Args:
            piece: Elements of the parameter, N-D if they are whole rows.
            bounds: Of the ranks' ranges, in elements of ``shape``.
            info: The mesh that it is sharded over.
        """
        placements, parallel = info.placements(bounds, self.shape), self.tensor_parallel
        if parallel is None:
            return new_ragged(piece, info.mesh, placements, self.shape)
        placements = (*placements, *parallel.placements)
        return new_ragged(piece, parallel.mesh, placements, parallel.shape)

    def part_of_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """A gradient of ``shape`` from that of the unsharded parameter; maybe collective."""
        if gradient is None or self.tensor_parallel is None:
            return gradient
        return self.tensor_parallel.part_of_gradient(gradient)

    def piece_of(self, whole: Tensor) -> Tensor:
        """What this rank owns of a whole tensor."""
        assert isinstance(self.sharded, RaggedShardDTensor)
        return self.sharded.piece_of(whole)

    def whole(self, view: Tensor) -> Tensor:
        """The whole parameter from what is gathered; collective if it has axes of its own."""
        parallel = self.tensor_parallel
        return view if parallel is None else parallel.wrap(view).full_tensor()

    def bind(self, view: Tensor) -> None:
        """Makes (or re-points) the unsharded parameter over ``view`` of a slot.

        ``.data`` gives the parameter a version counter of its own: filling the slot is not an
        edit of the parameter.
        """
        with torch.inference_mode(False), torch.no_grad():
            data = view.data
            requires_grad = self.sharded.requires_grad
            if self.unsharded is None:
                parallel = self.tensor_parallel
                whole = data if parallel is None else parallel.wrap(data)
                self.unsharded = nn.Parameter(whole, requires_grad=requires_grad)
                self.unsharded._ya_fsdp_fqn = self.fqn  # type: ignore[attr-defined]
                for name, value in vars(self.sharded).items():
                    if not name.startswith("_"):
                        setattr(self.unsharded, name, value)
            elif self.unsharded.dtype == data.dtype and self.unsharded.device == data.device:
                if self.tensor_parallel is None:
                    self.unsharded.__class__ = nn.Parameter
                    self.unsharded.data = data
                else:
                    self.unsharded._local_tensor = data  # type: ignore[attr-defined]
            else:
                self.unsharded = None
                self.bind(view)
                return
            self.unsharded.__class__ = self.released_class

    @property
    def whole_class(self) -> type[Any]:
        """Class of the unsharded parameter while it may be read."""
        return nn.Parameter if self.tensor_parallel is None else DTensor

    @property
    def released_class(self) -> type[Any]:
        """Class of the unsharded parameter while its memory belongs to somebody else."""
        return ReleasedParameter if self.tensor_parallel is None else ReleasedDTensor

    @property
    def registered(self) -> nn.Parameter | None:
        """Whatever the first module that owns the parameter holds now."""
        table, name = self.sites[0]
        return table.get(name)

    def check_sites(self) -> None:
        """Refuses what user code put into a module and nobody could train.

        Raises:
            RuntimeError: If the parameter was removed, tied, untied or replaced by a plain tensor
                after ``fully_shard``.
        """
        borrowed = inside_functional_call()
        for table, name in self.sites:
            current: Any = table.get(name)
            if current is self.sharded or current is self.unsharded:
                continue
            owner = getattr(current, "_ya_fsdp_fqn", self.fqn)
            if current is None:
                what = "removed (or given a parametrization)"
            elif not isinstance(current, nn.Parameter):
                what = "replaced by a plain tensor (torch.func.functional_call does so)"
            elif borrowed:
                what = "replaced by torch.func.functional_call for one call"
            elif owner != self.fqn:
                what = f"tied to '{owner}'"
            elif self.registered is self.sharded:
                what = "replaced under one of its names only"
            else:
                continue
            raise RuntimeError(
                f"parameter '{self.fqn}' was {what} after fully_shard. Change a model's "
                "parameters before fully_shard, and build the optimizer afterwards."
            )

    def user_attributes(self) -> dict[str, Any]:
        """What user code has set on the sharded parameter."""
        return {k: v for k, v in vars(self.sharded).items() if k not in OWN_ATTRIBUTES}

    def accumulate_node(self) -> Any:
        """The autograd node that adds to the unsharded parameter's ``.grad``.

        Not kept: a node belongs to the stream it was made on, and one kept over steps would stay
        on a stream that a graph capture can not use.
        """
        assert self.unsharded is not None
        with torch.enable_grad():
            return torch.autograd.graph.get_gradient_edge(self.unsharded).node
