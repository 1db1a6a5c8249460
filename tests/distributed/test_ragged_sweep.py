"""Every aten operator that takes a tensor, read from torch: right, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import WorkerPool
from ya_fsdp.ragged import RaggedShardDTensor, distribute_ragged

SHAPE = (6, 5)
# Arguments by the type that a schema gives; what has a default keeps it.
VALUES: dict[str, Any] = {
    "number": 2,
    "Scalar": 2,
    "int": 1,
    "SymInt": 1,
    "float": 0.5,
    "bool": False,
    "List[int]": [1],
    "List[SymInt]": [6, 5],
}
TENSORS = ("Tensor", "List[Tensor]")
UNINITIALISED = ("empty_like", "new_empty", "new_empty_strided")


def callable_overloads() -> Iterator[Any]:
    """Public aten operators whose first argument is a tensor or a list, random ones left out."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        private = name.startswith("_") and not name.startswith(("_foreach", "_fused"))
        if private or not hasattr(packet, "overloads"):
            continue
        for overload_name in packet.overloads():
            overload = getattr(packet, overload_name)
            arguments = overload._schema.arguments
            if not arguments or str(arguments[0].type) not in TENSORS:
                continue
            random = torch.Tag.nondeterministic_seeded in overload.tags
            if not random and name not in UNINITIALISED:
                yield overload


def arguments_of(overload: Any, tensors: list[Tensor]) -> list[Any] | None:
    """Positional arguments over copies of the tensors, or ``None`` where a type is unknown."""
    copies = iter([t.clone() for t in tensors])
    found: list[Any] = []
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            break
        if kind == "Tensor":
            tensor = next(copies, None)
            if tensor is None:
                return None
            found.append(tensor)
        elif kind == "List[Tensor]":
            tensor = next(copies, None)
            if tensor is None:
                return None
            found.append([tensor])
        elif kind in VALUES:
            found.append(VALUES[kind])
        else:
            return None
    return found


def whole(value: Any) -> Any:
    """Plain values, gathered where they are ragged."""
    if isinstance(value, RaggedShardDTensor):
        return value.full_tensor()
    if isinstance(value, (list, tuple)):
        return [whole(item) for item in value]
    return value


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, Tensor):
        if not isinstance(ours, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    return bool(ours == theirs)


def sweep(rank: int, world: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, list[str]] = {"right": [], "wrong": [], "refused": [], "unclear": []}
    for dtype in (torch.float32, torch.int64):
        plain = [(torch.rand(SHAPE) * 3 + 1.25).to(dtype) for _ in range(5)]
        for cut in ("row", "element"):
            ragged = [distribute_ragged(t, mesh, cut) for t in plain]
            for overload in callable_overloads():
                if dtype == torch.int64 and torch.Tag.pointwise not in overload.tags:
                    continue  # some of these divide by zero and end the process
                name = f"{overload} {dtype} {cut}"
                args = arguments_of(overload, plain)
                own = arguments_of(overload, ragged)
                if args is None or own is None:
                    continue
                try:
                    expected = whole(overload(*args))
                except Exception:
                    continue  # not an operator over tensors like these
                expected = [expected, *args]
                try:
                    result = [overload(*own), *own]
                except NotImplementedError as error:
                    # Of an operator made of others, the first that is not defined is named.
                    text = str(error)
                    remedy = "Use .to_local()" in text or "Use .full_tensor()" in text
                    ok = "aten." in text and remedy
                    found["refused" if ok else "unclear"].append(f"{name}: {error}"[:160])
                    continue
                found["right" if same(whole(result), expected) else "wrong"].append(name)
    return found


def test_no_operator_of_torch_answers_wrongly(world2: WorkerPool) -> None:
    for found in world2.run(sweep):
        assert not found["wrong"]
        assert not found["unclear"]
        assert len(found["right"]) > 300
        assert len(found["refused"]) > 100
