"""The programs and tables of ``docs/migration.md``."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import ya_fsdp
import ya_fsdp.checkpoint
from tests.harness import WorkerPool, uses_nccl

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
SECTIONS = {
    title.strip(): body
    for title, body in re.findall(r"^###? (.+)\n((?:(?!^###? ).*\n?)*)", PAGE, re.M)
}
BEGINNING = PAGE.partition("\n## ")[0]


def programs(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


PAIRS = {title: programs(body) for title, body in SECTIONS.items() if programs(body)}


def run_program(rank: int, world: int, source: str) -> Any:
    names: dict[str, Any] = {"print": lambda *_: None}
    (beginning,) = programs(BEGINNING)
    # Torch warns of what its own fully_shard does with the model's output.
    warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
    exec(compile(beginning + source, "docs/migration.md", "exec"), names)
    return names["losses"]


@pytest.mark.skipif(uses_nccl(), reason="the page's programs run on CPU")
@pytest.mark.parametrize("title", PAIRS)
def test_before_and_after_give_the_same_losses(world2: WorkerPool, title: str) -> None:
    before, after = (world2.run(run_program, source) for source in PAIRS[title])
    assert len(before[0]) >= 4
    assert before[0] != before[1], "ranks see other data"
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_every_migration_has_a_program_before_and_after() -> None:
    assert len(PAIRS) == 4
    assert {len(pair) for pair in PAIRS.values()} == {2}


def rows(title: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", SECTIONS[title], re.M)


@pytest.mark.parametrize(
    "title, function",
    [
        ("From FullyShardedDataParallel", FullyShardedDataParallel.__init__),
        ("From torch.distributed.fsdp.fully_shard", inspect.unwrap(torch_fully_shard)),
        ("The class `YaFSDP`", ya_fsdp.YaFSDP.__init__),
    ],
)
def test_a_table_has_a_row_for_every_argument(title: str, function: Any) -> None:
    arguments = [name for name in inspect.signature(function).parameters if name != "self"]
    missing = set(arguments) - set(rows(title))
    assert len(arguments) > 6
    assert not missing


def test_the_tables_name_no_function_of_ours_that_does_not_exist() -> None:
    for path in set(re.findall(r"`ya_fsdp\.([\w.]+)", PAGE)):
        target: Any = ya_fsdp
        for part in path.split("."):
            target = getattr(target, part)
    for name in re.findall(r"`(set_\w+)`", PAGE.partition("## From the original")[0]):
        assert hasattr(ya_fsdp.YaFSDPModule, name), name
