"""What the command line offers, and how errors look there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ya_fsdp import __version__

from .convert import ConversionError, convert_folder

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tools that go with the library.",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ya-fsdp {__version__}")
        raise typer.Exit


@app.callback()
def tools(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Tools that go with the library."""


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder with yafsdp_model_*.pt files, or of a distributed checkpoint with "
            "flattened tensors."
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            help="What to write: a .safetensors or .pt file, or (any other name) the folder of a "
            "distributed checkpoint."
        ),
    ],
    shapes: Annotated[
        Path | None,
        typer.Option(
            help="The parameters' shapes, for flattened distributed checkpoints: a .json file "
            '{"name": [rows, columns]}, or a .safetensors or .pt file of the plain model.'
        ),
    ] = None,
    model_parallel_rank: Annotated[
        int | None,
        typer.Option(help="Which tensor-parallel rank's parameters, if there are several."),
    ] = None,
    optimizer: Annotated[
        Path | None,
        typer.Option(
            help="Write the state of yafsdp_optim_*.pt files here, by parameters' names: a .pt "
            "file for load_full_optimizer_state_dict, or the folder of a distributed checkpoint."
        ),
    ] = None,
) -> None:
    """Converts a checkpoint of the original YaFSDP to whole tensors of their true shapes."""
    try:
        report = convert_folder(source, output, shapes, model_parallel_rank, optimizer)
    except ConversionError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{report.tensors} tensors, {report.elements:,} elements: {output}")
    if optimizer is not None:
        typer.echo(f"optimizer state of {report.optimizer_entries} parameters: {optimizer}")
    for name in report.left_flat:
        typer.echo(f"left as it was, no shape is known for it: {name}", err=True)
