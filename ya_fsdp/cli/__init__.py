"""The command ``ya-fsdp``."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; says what to install where typer is missing."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("the ya-fsdp command needs typer: pip install typer")
    app()
