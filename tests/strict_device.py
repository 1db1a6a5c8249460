"""Finds tensors that a test forgot to put on ``test_device()``, on a machine without a GPU.

With ``YA_FSDP_TEST_STRICT_DEVICE=1`` the device of tests is ``cpu:0``. Tensors there are ordinary
ones, but torch passes the index on to whatever makes or moves a tensor, which tells "made on the
device of the tests" from "made on the CPU because nobody said where". Memory of the two kinds is
kept apart by a note for each storage, and an operation on both raises as it would with a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ROOT = Path(__file__).resolve().parents[1]
_TESTS, _LIBRARY = str(_ROOT / "tests"), str(_ROOT / "ya_fsdp")
_HOST, _DEVICE = "the CPU", "the device of the tests"
# These take tensors of two devices with a GPU too.
_CROSSING = {"aten::copy_", "aten::_to_copy", "aten::lift_fresh", "aten::set_", "aten::detach"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class StrictDeviceError(RuntimeError):
    """An operation took tensors of the CPU and of the device."""


class _Storages(TorchDispatchMode):
    """Notes where each storage would be, and refuses operations on both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.where: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in (Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # A subclass runs its inner operations, which come here.
        kwargs = kwargs or {}
        taken = list(_tensors((args, kwargs)))
        name = func._schema.name
        place = self._check(name, taken)
        if _is_device(kwargs.get("device")):
            place = _DEVICE
        elif not taken or name == "aten::lift_fresh":
            place = _place_of_caller()
        result = func(*args, **kwargs)
        known = {_key(tensor) for tensor in taken if not tensor.is_meta}
        for tensor in _tensors(result):
            if not tensor.is_meta and _key(tensor) not in known:
                self.note(tensor, place)
        if name == "aten::lift_fresh" and place is not None:
            self.note(result, place)
        return result

    def note(self, tensor: Tensor, place: str | None) -> None:
        if place is None:
            self.where.pop(_key(tensor), None)
        else:
            self.where[_key(tensor)] = place

    def _check(self, name: str, tensors: list[Tensor]) -> str | None:
        places: dict[str, Tensor] = {}
        for tensor in tensors:
            place = None if tensor.is_meta else self.where.get(_key(tensor))
            # Numbers of the CPU may be operands of anything.
            if place is not None and (tensor.dim() > 0 or place == _DEVICE):
                places.setdefault(place, tensor)
        if name in _INDEXING and tensors:
            return self.where.get(_key(tensors[0]))
        if len(places) == 2 and name not in _CROSSING and not name.startswith("c10d::"):
            both = " and ".join(f"{tuple(t.shape)} on {p}" for p, t in places.items())
            raise StrictDeviceError(f"{name} took {both}")
        return next(iter(places), None)


class _Moves(TorchFunctionMode):
    """Tells the storages' notes of moves that a machine without a GPU does not make."""

    def __init__(self, storages: _Storages) -> None:
        self.storages = storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if type(result) is not Tensor or result.is_meta:
            return result
        device = kwargs.get("device")
        if func is Tensor.cpu or (func is Tensor.to and _says_cpu((*args[1:], *kwargs.values()))):
            if _place_of_caller() == _HOST:
                result = result.clone()
                self.storages.note(result, _HOST)
        elif func in (torch.tensor, torch.as_tensor) and _is_device(device):
            self.storages.note(result, _DEVICE)
        elif isinstance(device, torch.device) and not _is_device(device):
            self.storages.note(result, None)  # likely another tensor's, which knows no index
        return result


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).index is not None


def _says_cpu(values: Iterable[Any]) -> bool:
    devices = [torch.device(v) for v in values if isinstance(v, (str, torch.device))]
    return any(device.type == "cpu" and device.index is None for device in devices)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place_of_caller() -> str | None:
    """Tests that name no device make tensors on the CPU, the library on its mesh's device."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARY):
            return _DEVICE
        if file.startswith(_TESTS) and file != __file__:
            return None if file.endswith("/harness.py") else _HOST
        frame = frame.f_back
    return None


@contextmanager
def strict_device() -> Iterator[None]:
    """While inside, operations on tensors of the CPU and of the device raise."""
    storages = _Storages()
    with ExitStack() as stack:
        stack.enter_context(storages)
        stack.enter_context(_Moves(storages))
        yield
