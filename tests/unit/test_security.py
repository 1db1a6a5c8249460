"""What the package never does, read off its source: evaluate text, start a shell, unpickle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ya_fsdp

PACKAGE = Path(ya_fsdp.__file__).parent
NEVER = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "pickle.load",
    "pickle.loads",
    "subprocess.getoutput",
}
# The converter of whole distributed checkpoints reads the file that it has just written itself.
READS_ITS_OWN = {"cli/flattened.py"}


def forbidden(source: str) -> list[str]:
    """Calls that run text, a shell or a pickle, as "line: call"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {k.arg: ast.unparse(k.value) for k in node.keywords}
        unsafe_load = name == "torch.load" and options.get("weights_only") != "True"
        if name in NEVER or unsafe_load or options.get("shell", "False") != "False":
            found.append(f"{node.lineno}: {name}")
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_no_file_evaluates_text_starts_a_shell_or_unpickles(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) not in READS_ITS_OWN:
        assert not forbidden(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)",
        "import os\nos.system('ls')",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import pickle\npickle.load(f)",
    ],
)
def test_what_is_forbidden_is_found(source: str) -> None:
    assert forbidden(source)
    assert not forbidden("import torch\ntorch.load(f, weights_only=True)\nmodel.eval()")
