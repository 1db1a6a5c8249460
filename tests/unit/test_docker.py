"""The Docker files hold what a build would need: no build runs here."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions and what follows them, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    split = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word, rest) for word, rest in split]


def test_there_is_one_for_cpu_and_one_for_cuda() -> None:
    assert [path.suffix for path in FILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_what_is_copied_is_there_and_tracked_in_time(path: Path) -> None:
    present: set[str] = set()
    for word, rest in instructions(path):
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
            present |= set(sources)
        elif word == "RUN" and "grep" in rest:
            assert "requirements-dev.txt" in present
        elif word == "RUN" and '".[' in rest:
            assert {"pyproject.toml", "README.md", "LICENSE", "ya_fsdp"} <= present
        elif word == "CMD":
            script = next(w for w in re.findall(r'"([^"]*)"', rest) if w.endswith(".py"))
            assert (ROOT / script).exists()
            assert script.split("/")[0] in present


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_torch_is_the_pinned_one_and_extras_exist(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [rest for word, rest in instructions(path) if word == "RUN" and "torch==" in rest]
    (command,) = [re.search(r"\$\((grep [^)]*)\)", pin).group(1) for pin in pins]  # type: ignore[union-attr]
    found = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+\n", found.stdout)
    (extras,) = re.findall(r'"\.\[([^]]*)\]"', path.read_text())
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    image = next(rest for word, rest in instructions(path) if word == "FROM")
    minor = int(re.fullmatch(r"python:3\.(\d+)-slim", image).group(1))  # type: ignore[union-attr]
    assert minor >= int(project["requires-python"].removeprefix(">=3."))
