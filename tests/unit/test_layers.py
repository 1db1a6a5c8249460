"""The order of the house, read off the source: imports, private torch names, file sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ya_fsdp

PACKAGE = Path(ya_fsdp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TOP = "__init__"

# An import goes to a lower floor, or along one of ARROWS. A new file gets its place here first.
FLOORS = {
    "fully_shard": 5,
    "module": 5,
    "flat": 5,
    "communication": 5,
    "communication_sms": 5,
    "buffer_groups": 5,
    "debug": 5,
    "residency": 5,
    "pipeline": 5,
    "optimizer_in_backward": 5,
    "clipping": 5,
    "checkpoint": 5,
    "wrapper": 5,
    "build": 4,
    "hooks": 4,
    "strays": 4,
    "leaving": 4,
    "watchdog": 1,
    "schedule": 3,
    "reducer": 3,
    "fused_linear": 3,
    "pool": 3,
    "gathering": 3,
    "reserve": 3,
    "agreement": 3,
    "unit": 2,
    "secondary": 2,
    "group": 2,
    "extensions": 2,
    "gradients": 2,
    "grad_shard": 2,
    "flat_gradient": 0,
    "param": 2,
    "tensor_parallel": 2,
    "mesh": 1,
    "buffers": 1,
    "tree": 0,
    "collectives": 1,
    "streams": 1,
    "carveout": 1,
    "quantised": 1,
    "levels": 1,
    "ragged": 1,
    "ragged_ops": 1,
    "ragged_random": 1,
    "ragged_reduce": 1,
    "ragged_checkpoint": 1,
    "ragged_tensor": 1,
    "ragged_placement": 1,
    "ragged_mesh": 1,
    "ragged_boxes": 1,
    "layout": 0,
    "packing": 0,
    "precision": 0,
    "checks": 0,
    "kernels": 0,
    "scratch": 0,
    "triton_kernels": 0,
    "_torch": -1,
    "_torch_memory": -1,
    "_torch_mesh": -1,
    "_torch_watch": -1,
    "_version": -1,
}
ARROWS = {
    ("fully_shard", "module"),
    ("fully_shard", "pipeline"),
    ("debug", "fully_shard"),
    ("wrapper", "fully_shard"),
    ("wrapper", "module"),
    ("wrapper", "flat"),
    ("wrapper", "clipping"),
    ("wrapper", "checkpoint"),
    ("checkpoint", "flat"),
    ("build", "hooks"),
    ("build", "strays"),
    ("schedule", "reducer"),
    ("schedule", "gathering"),
    ("gathering", "pool"),
    ("gathering", "reserve"),
    ("reducer", "reserve"),
    ("quantised", "collectives"),
    ("gathering", "agreement"),
    ("reducer", "agreement"),
    ("reducer", "pool"),
    ("unit", "group"),
    ("unit", "secondary"),
    ("secondary", "group"),
    ("group", "param"),
    ("extensions", "group"),
    ("extensions", "param"),
    ("group", "gradients"),
    ("gradients", "param"),
    ("gradients", "grad_shard"),
    ("grad_shard", "param"),
    ("param", "tensor_parallel"),
    ("mesh", "ragged"),
    ("mesh", "levels"),
    ("levels", "collectives"),
    ("ragged", "ragged_ops"),
    ("ragged", "ragged_tensor"),
    ("ragged", "ragged_placement"),
    ("ragged", "ragged_boxes"),
    ("ragged", "ragged_random"),
    ("ragged", "ragged_reduce"),
    ("ragged_ops", "ragged_tensor"),
    ("ragged_ops", "ragged_placement"),
    ("ragged_random", "ragged_ops"),
    ("ragged_random", "ragged_tensor"),
    ("ragged_reduce", "ragged_ops"),
    ("ragged_reduce", "ragged_random"),
    ("ragged_reduce", "ragged_tensor"),
    ("ragged", "ragged_checkpoint"),
    ("ragged_tensor", "ragged_checkpoint"),
    ("ragged_tensor", "ragged_mesh"),
    ("ragged_checkpoint", "ragged_mesh"),
    ("ragged_mesh", "ragged_placement"),
    ("ragged_tensor", "ragged_placement"),
    ("ragged_checkpoint", "ragged_boxes"),
    ("layout", "packing"),
}
# Guests live on floor 5, but come in through the front door: what `ya_fsdp` exports, or each other.
GUESTS = {"graph", "optim", "integrations", "cli", "run"}
# Packages that users import by their names, too.
DOORS = {("cli", "checkpoint"), ("integrations", "collectives")}
WITHOUT_TORCH = {"layout", "packing"}
PRIVATE_NAMES_LIVE_IN = {"_torch.py", "_torch_memory.py", "_torch_mesh.py", "_torch_watch.py"}


def public_names() -> frozenset[str]:
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def imported_modules(module: str, is_package: bool, source: str) -> Iterator[tuple[str, str]]:
    """Every import as an absolute module and a name of it, empty for the module itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + is_package
                origin = ".".join([*parts[:keep], *filter(None, [node.module])])
            yield from ((origin, alias.name) for alias in node.names)


def wrong_arrows(module: str, source: str, is_package: bool, public: frozenset[str]) -> list[str]:
    """What a file of the package may not import, one line each."""
    room = module.split(".")[1] if "." in module else TOP
    if room == TOP:
        return []
    if room not in FLOORS and room not in GUESTS:
        return [f"{room} has no place in the table of floors"]
    wrong = []
    for origin, name in imported_modules(module, is_package, source):
        first, *rest = origin.split(".")
        if first == "torch" and room in WITHOUT_TORCH:
            wrong.append(f"{module} imports torch")
        if first != "ya_fsdp":
            continue
        if not rest and (name in public or not name) and room in GUESTS:
            continue
        other = rest[0] if rest else name
        if not is_allowed(room, other):
            wrong.append(f"{module} imports {other or 'ya_fsdp'}")
    return wrong


def is_allowed(room: str, other: str) -> bool:
    if room == other:
        return True
    if room in GUESTS:
        return other in GUESTS or other == "_version" or (room, other) in DOORS
    if other not in FLOORS:
        return False
    return FLOORS[other] < FLOORS[room] or (room, other) in ARROWS


def private_torch_names(source: str) -> set[str]:
    """Dotted names below ``torch`` with a private part, in imports and in attribute chains.

    Operators in ``torch.ops`` are names of schemas, not of Python, and are left out.
    """
    bound: dict[str, str] = {}
    names: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names.add(alias.name)
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if (node.module or "").split(".")[0] == "torch":
                    names.add(f"{node.module}.{alias.name}")
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(attribute_chain(node, bound))
    return {name for name in names if is_private(name)}


def attribute_chain(node: ast.expr, bound: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        before = attribute_chain(node.value, bound)
        return before and f"{before}.{node.attr}"
    return bound.get(node.id, "") if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return not name.startswith("torch.ops.") and any(
        part.startswith("_") and not (part.startswith("__") and part.endswith("__"))
        for part in name.split(".")
    )


def module_name(path: Path) -> str:
    parts = [PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == TOP else parts)


def floors_on_the_page() -> dict[str, int]:
    """The rooms named in the architecture page's plan."""
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    floors: dict[str, int] = {}
    floor = None
    for line in page.splitlines():
        if re.match(r"    ([0-5]|porch) ", line):
            number, name, *rooms = line.split()
            floor = -1 if number == "porch" else int(number)
            rooms = [name, *rooms] if number == "porch" else rooms
        elif line.startswith("     ") and floor is not None:
            rooms = line.split()
        elif floor is not None and line:
            break
        else:
            continue
        rooms = [room.rstrip("/;:") for room in rooms]
        floors.update((room, floor) for room in rooms if room in FLOORS or room in GUESTS)
    return floors


def test_the_page_on_architecture_shows_every_room_on_its_floor() -> None:
    shown = floors_on_the_page()
    there = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    expected = {room: floor for room, floor in FLOORS.items() if room in there}
    expected |= dict.fromkeys(GUESTS & there, 5)
    expected.pop("_version")
    assert shown == expected


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_down_or_along_an_arrow(path: Path) -> None:
    source = path.read_text()
    assert not wrong_arrows(module_name(path), source, path.stem == TOP, public_names())


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_private_torch_names_live_on_the_porch(path: Path) -> None:
    if path.name not in PRIVATE_NAMES_LIVE_IN:
        assert not private_torch_names(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_file_has_more_than_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_the_arrows_of_one_floor_make_no_circle() -> None:
    below = {room: {other for start, other in ARROWS if start == room} for room in FLOORS}
    assert all(FLOORS[start] == FLOORS[end] for start, end in ARROWS)
    while leaves := {room for room, others in below.items() if not others}:
        below = {room: others - leaves for room, others in below.items() if room not in leaves}
    assert not below


@pytest.mark.parametrize(
    "module, source, wrong",
    [
        ("ya_fsdp.group", "from .param import ShardedParam", []),
        ("ya_fsdp.param", "from .group import ParamGroup", ["group"]),
        ("ya_fsdp.param", "def f():\n    from ya_fsdp.group import ParamGroup", ["group"]),
        ("ya_fsdp.hooks", "from ya_fsdp import build", ["build"]),
        ("ya_fsdp.hooks", "from . import schedule, _torch", []),
        ("ya_fsdp.hooks", "import ya_fsdp.checkpoint", ["checkpoint"]),
        ("ya_fsdp.hooks", "from ya_fsdp import fully_shard", ["fully_shard"]),
        ("ya_fsdp.hooks", "import ya_fsdp", ["ya_fsdp"]),
        ("ya_fsdp.checkpoint", "from .wrapper import YaFSDP", ["wrapper"]),
        ("ya_fsdp.schedule", "from .optim import AdamW", ["optim"]),
        ("ya_fsdp.collectives.c10d", "from .base import Collectives\nfrom .. import _torch", []),
        ("ya_fsdp.collectives.c10d", "from ..buffers import Lease", ["buffers"]),
        ("ya_fsdp.layout", "import torch.distributed as dist", ["torch"]),
        ("ya_fsdp.optim.adamw", "from ya_fsdp import fully_shard\nfrom .base import Flat", []),
        ("ya_fsdp.optim.adamw", "import ya_fsdp\nfrom ya_fsdp.graph import capture", []),
        ("ya_fsdp.optim.adamw", "from ya_fsdp import layout", ["layout"]),
        ("ya_fsdp.optim.adamw", "from ..ragged import RaggedShard", ["ragged"]),
        ("ya_fsdp.cli.main", "from ya_fsdp.fully_shard import fully_shard", ["fully_shard"]),
    ],
)
def test_a_wrong_arrow_is_found(module: str, source: str, wrong: list[str]) -> None:
    found = wrong_arrows(module, source, False, frozenset({"fully_shard"}))
    assert found == [f"{module} imports {other}" for other in wrong]


def test_a_package_resolves_its_relative_imports_from_itself() -> None:
    source = "from .c10d import C10dCollectives\nfrom ..group import ParamGroup"
    found = wrong_arrows("ya_fsdp.collectives", source, True, frozenset())
    assert found == ["ya_fsdp.collectives imports group"]


def test_a_file_without_a_place_is_found() -> None:
    assert wrong_arrows("ya_fsdp.attic", "", False, frozenset()) == [
        "attic has no place in the table of floors"
    ]


@pytest.mark.parametrize(
    "source, names",
    [
        ("import torch._C", {"torch._C"}),
        ("from torch.utils._pytree import tree_map", {"torch.utils._pytree.tree_map"}),
        ("from torch.distributed import _functional_collectives as f", None),
        ("import torch\ntorch.Tensor._make_subclass(x)", {"torch.Tensor._make_subclass"}),
        ("import torch.distributed as dist\ndist._x", {"torch.distributed._x"}),
        ("from torch import nn\nnn.Module._call_impl", {"torch.nn.Module._call_impl"}),
        ("import torch\ntorch.Tensor.__torch_dispatch__", set()),
        ("import torch\ntorch.ops.aten._to_copy.default", set()),
        ("import torch\nself._x = torch.empty(2)\nself._x._y", set()),
        ("from numpy import _core\n_core._x", set()),
    ],
)
def test_a_private_torch_name_is_found(source: str, names: set[str] | None) -> None:
    expected = {"torch.distributed._functional_collectives"} if names is None else names
    assert private_torch_names(source) == expected
