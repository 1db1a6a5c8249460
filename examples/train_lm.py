"""Trains a small Llama-style language model, sharded over all processes.

    torchrun --nproc_per_node 2 examples/train_lm.py
    torchrun --nproc_per_node 2 examples/train_lm.py --resume
    python examples/train_lm.py --data my_texts/ --steps 2000 --dim 384 --layers 8

Tokens are bytes. Without ``--data`` the text is the Python standard library's own source, which
lies on every machine that can run this. ``make train`` installs what this needs; so does
``pip install '.[examples]'``.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lm import checkpoint
from lm.data import Corpus, load_corpus
from lm.errors import UsageError
from lm.loop import Loop
from lm.model import Block, Decoder, ModelConfig
from lm.progress import Monitor
from lm.report import History, draw_losses, write_json
from lm.runtime import Runtime, StopRequest, finish, make_deterministic, start
from lm.sample import generate
from lm.trainer import Trainer, TrainingOptions
from ya_fsdp import MixedPrecisionPolicy, fully_shard
from ya_fsdp.checkpoint import CheckpointError

GATHER_DTYPES = {"full": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def build_model(config: ModelConfig, options: TrainingOptions, runtime: Runtime) -> Decoder:
    """Makes the model, the same on every rank, and shards it block by block."""
    torch.manual_seed(options.seed)
    model = Decoder(config).to(runtime.device)
    gather_dtype = GATHER_DTYPES[options.gather]
    policy = MixedPrecisionPolicy(gather_dtype=gather_dtype)
    if options.bf16:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, gather_dtype=gather_dtype
        )
    for block in model.blocks:
        assert isinstance(block, Block)
        if options.compile:
            block.compile_compute()
        fully_shard(block, mesh=runtime.mesh, mp_policy=policy)
    fully_shard(model, mesh=runtime.mesh, mp_policy=policy)
    return model


def describe(trainer: Trainer, corpus: Corpus) -> str:
    """Model and text in words."""
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    megabytes = (len(corpus.train) + len(corpus.validation)) / 1e6
    return f"{parameters:,} parameters, {megabytes:.1f} MB of text ({corpus.source})"


def prepare(
    trainer: Trainer, folder: Path, resume: bool, options: dict[str, Any]
) -> tuple[History, list[str]]:
    """Loads the newest checkpoint when the run is to be resumed, else makes room for new ones.

    Returns:
        The history so far, and what the user should know.
    """
    if not resume:
        return History(), checkpoint.set_aside(folder)
    newest = checkpoint.latest(folder)
    if newest is None:
        return History(), [f"no checkpoint in {folder}: starting from the beginning"]
    history, changes = checkpoint.load(newest, trainer.model, trainer.optimizer, options)
    notes = [f"resumed from {newest}"]
    if changes:
        notes.append(f"losses will differ from those of an unbroken run: {'; '.join(changes)}")
    return history, notes


def report(
    trainer: Trainer, monitor: Monitor, history: History, folder: Path, facts: dict[str, Any]
) -> None:
    """Writes the report and draws the losses, on the leading rank."""
    if not trainer.runtime.leads:
        return
    losses = history.losses
    last = history.validation[-1][1] if history.validation else None
    validation = "" if last is None else f" (validation {last:.3f})"
    facts |= {
        "torch": torch.__version__,
        "steps": len(losses),
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "validation_loss": last,
        "training_seconds": round(history.seconds, 1),
        "peak_memory_bytes": trainer.runtime.peak_memory(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", history, facts)
    draw_losses(folder / "losses.png", history, f"{facts['text']}, {facts['where']}")
    monitor.say(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}{validation} in {len(losses)} steps, "
        f"{facts['wall_seconds']} s; see {folder / 'report.json'} and {folder / 'losses.png'}"
    )


def main(
    data: Annotated[
        Path | None,
        typer.Option(help="A file or folder of text; default: Python's standard library."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and reports.")] = Path(
        "runs/train_lm"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 900,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step, all ranks.")] = 16,
    seq_len: Annotated[int, typer.Option(min=1, help="Bytes of a sequence.")] = 128,
    accumulate: Annotated[int, typer.Option(min=1, help="Microbatches a step.")] = 1,
    dim: Annotated[int, typer.Option(min=2, help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Number of blocks.")] = 3,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 2,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 6e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of rising learning rate.")] = 30,
    weight_decay: Annotated[float, typer.Option(min=0, help="AdamW's weight decay.")] = 0.1,
    clip: Annotated[float, typer.Option(min=0, help="Largest norm of the gradient.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    bf16: Annotated[
        bool | None, typer.Option(help="Compute in bf16; default: on GPUs that have it.")
    ] = None,
    gather: Annotated[
        str, typer.Option(help="Parameters travel in: full (that of compute), fp8 or int8.")
    ] = "full",
    compile: Annotated[bool, typer.Option("--compile", help="Compile each block.")] = False,
    checkpoint_layers: Annotated[
        int, typer.Option(min=0, help="Blocks, from the first, that recompute in backward.")
    ] = 0,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints.")] = 300,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    validate_every: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = 100,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Log for it too.")] = False,
    deterministic: Annotated[bool, typer.Option(help="Same bits in every run.")] = True,
    prompt: Annotated[str, typer.Option(help="Beginning of the sample.")] = "def ",
    sample: Annotated[int, typer.Option(min=0, help="Bytes to generate at the end.")] = 300,
) -> None:
    """Trains a Llama-style language model on bytes, sharded over the processes of torchrun."""
    began = time.perf_counter()
    runtime = start(device)
    stop = StopRequest()
    if deterministic:
        make_deterministic()
    if bf16 is None:
        bf16 = runtime.device.type == "cuda" and torch.cuda.is_bf16_supported()
    config = ModelConfig(
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        checkpoint_layers=checkpoint_layers,
    )
    options = TrainingOptions(
        steps=steps,
        seq_len=seq_len,
        batch_size=batch_size,
        accumulate=accumulate,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        bf16=bf16,
        compile=compile,
        gather=gather,
    )
    if gather not in GATHER_DTYPES:
        raise UsageError(f"--gather is one of {', '.join(GATHER_DTYPES)}, not {gather!r}")
    parts = runtime.world_size * accumulate
    if batch_size % parts:
        raise UsageError(
            f"--batch-size {batch_size} is not a multiple of {parts}, the {runtime.world_size} "
            f"processes times --accumulate {accumulate}"
        )
    corpus = load_corpus(data)
    trainer = Trainer(build_model(config, options, runtime), options, corpus, runtime)
    saved = dataclasses.asdict(options) | {
        "model": dataclasses.asdict(config),
        "text": corpus.fingerprint,
        "world_size": runtime.world_size,
    }
    history, notes = prepare(trainer, out, resume, saved)
    board = out / "tensorboard" if tensorboard else None
    with Monitor(runtime.leads, len(history.losses), steps, board) as monitor:
        monitor.say(f"{describe(trainer, corpus)}, {runtime.describe()}")
        for note in notes:
            monitor.say(note)
        loop = Loop(trainer, monitor, history, out, save_every, validate_every, saved)
        finished = loop.run(stop)
    facts: dict[str, Any] = {"options": saved, "text": corpus.source, "where": runtime.describe()}
    if finished and sample:
        text = generate(trainer.model, prompt.encode(), sample, seq_len, runtime.device)
        facts["sample"] = text.decode(errors="replace")
        monitor.say(f"\n{facts['sample']}\n")
    if not finished:
        monitor.say(f"stopped after {len(history.losses)} of {steps} steps; --resume goes on")
    facts["wall_seconds"] = round(time.perf_counter() - began, 1)
    report(trainer, monitor, history, out, facts)
    finish()


if __name__ == "__main__":
    try:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(main)
        app()
    except (UsageError, CheckpointError) as error:
        # A traceback from each rank would bury the one line that helps.
        sys.exit(f"error: {error}")
