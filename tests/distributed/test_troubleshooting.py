"""docs/troubleshooting.md: its messages are those of the code, and its program runs."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
import torch

import ya_fsdp
from tests.distributed.models import MLP, inputs, loss, pair, sgd_pair, train_step
from tests.harness import WorkerPool, test_device
from ya_fsdp import debug
from ya_fsdp.unit import STALE_VERSION

PACKAGE = Path(ya_fsdp.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"(?m)^> `(.*)`$", PAGE)
PROGRAM = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)[0]


def texts_of_the_code() -> str:
    """Every string of the package; values in f-strings are an ellipsis."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_is_one_of_the_code(message: str) -> None:
    assert message in texts_of_the_code()


def test_the_page_has_messages_and_explains_versions_by_their_first_value() -> None:
    assert len(MESSAGES) >= 8
    assert f"{STALE_VERSION} + k" in PAGE and f"is at version {STALE_VERSION + 1};" in PAGE


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`debug\.(\w+)", PAGE))))
def test_what_the_page_calls_exists(name: str) -> None:
    assert name in debug.__all__


def run_program(rank: int, world_size: int) -> None:
    exec(compile(PROGRAM, "troubleshooting.md", "exec"), {})


def test_the_first_program_of_the_page_runs(world2: WorkerPool) -> None:
    world2.run(run_program)


def second_order(rank: int, world_size: int) -> tuple[str, list[int]]:
    """A backward that needs the weights of units whose buffers went to others."""
    model, _ = pair(lambda: MLP(4))
    x = inputs(world_size)[rank].requires_grad_()
    loss(model, x).backward()
    kept = []
    model.layers[1].net[0].register_forward_hook(lambda _, args, out: kept.append(out))
    loss(model, x)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(kept[0].sum(), [x])
    text = str(caught.value)
    return text, [int(n) for n in re.findall(r"is at version (\d+)", text)]


def test_autograd_names_the_unit_by_the_version_of_its_parameter(world2: WorkerPool) -> None:
    for text, versions in world2.run(second_order):
        # The root is unit 0, layers.0 unit 1, layers.1 unit 2.
        assert versions and versions[0] - STALE_VERSION in (1, 2), text


RECIPE = textwrap.dedent(re.findall(r"(?ms)^  ```python\n(.*?)^  ```", PAGE)[0])


def uneven(rank: int, world_size: int) -> int:
    """Rank 0 has three batches, rank 1 five."""
    model, reference = pair(MLP)
    optimizers = sgd_pair(model, reference)
    lengths = (3, 5)
    batches = iter([inputs(world_size, seed=step) for step in range(lengths[rank])])
    done = 0

    def step() -> None:
        nonlocal done
        train_step(model, reference, rank, inputs(world_size, seed=done), optimizers=optimizers)
        done += 1

    loop = "while True:\n    batch = next(batches, None)\n" + textwrap.indent(RECIPE, "    ")
    names = {"torch": torch, "device": test_device(), "batches": batches, "step": step}
    exec(compile(loop + "    step()\n", "recipe", "exec"), names)
    return done


def test_the_recipe_for_loaders_of_different_lengths_trains_the_common_steps(
    world2: WorkerPool,
) -> None:
    assert world2.run(uneven) == [3, 3]
