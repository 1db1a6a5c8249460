"""What the documents name is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import textwrap
from functools import cache
from pathlib import Path

import pytest

import ya_fsdp
from ya_fsdp import checkpoint, debug, integrations

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


@cache
def functions_of_tests() -> set[str]:
    names = set()
    for path in ROOT.glob("tests/**/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names.add(node.name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    files = {path.stem for path in ROOT.glob("tests/**/test_*.py")}
    assert named - functions_of_tests() - files == set()


def test_the_list_of_public_names_is_whole() -> None:
    listed = set(re.findall(r"`(\w+)`", (ROOT / "docs/api.md").read_text()))
    public = {n for m in (ya_fsdp, checkpoint, debug, integrations) for n in m.__all__}
    methods = {
        name
        for name, member in vars(ya_fsdp.YaFSDPModule).items()
        if callable(member) and not name.startswith("_") and member.__module__ == "ya_fsdp.module"
    }
    assert "no_sync" in methods and "set_all_reduce_hook" not in methods
    assert (public | methods) - {"__version__"} - listed == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [t for t in targets if not re.match(r"[a-z]+:", t)]
    assert [t for t in local if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_of_the_project_that_a_page_names_exists(page: Path) -> None:
    pattern = r"`((?:ya_fsdp|tests|benchmarks|examples|docs|docker)/[\w./-]+\.\w+)`"
    named = set(re.findall(pattern, page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def blocks(page: Path, *languages: str) -> list[str]:
    """Code blocks of a page; indented ones in lists too."""
    pattern = rf"^( *)```(?:{'|'.join(languages)})\n(.*?)^\1```$"
    found = re.findall(pattern, page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_on_a_page_parses_and_imports_what_we_have(page: Path) -> None:
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code, str(page))):
            source = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            # Those of a library want the library; their own tests import them.
            if not source.startswith("ya_fsdp") or "integrations." in source:
                continue
            module = importlib.import_module(source)
            assert [n.name for n in node.names if not hasattr(module, n.name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_shell_on_a_page_is_shell(page: Path) -> None:
    for code in blocks(page, "sh", "bash", "console"):
        lines = code.splitlines()
        if any(line.startswith("$ ") for line in lines):
            typed = [line[2:] for line in lines if line.startswith(("$ ", "> "))]
            # A line that goes on is followed by the rest of the command.
            typed = [line.removesuffix("\\") for line in typed]
            code = "\n".join(typed)
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_commands_on_a_page_name_exist(page: Path) -> None:
    for code in blocks(page, "sh", "bash", "console"):
        for name in re.findall(r"\b((?:examples|docker)/[\w./]+)", code):
            assert (ROOT / name).exists(), name
        for name in re.findall(r"-m (benchmarks\.\w+|ya_fsdp[.\w]*)", code):
            assert importlib.util.find_spec(name) is not None, name
