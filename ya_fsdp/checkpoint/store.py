"""A run's folder of checkpoints: atomic saves, also in the background, and resuming."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from . import dcp_state
from .load_step import Loaded, load_step
from .manifest import (
    Manifest,
    clean,
    commit,
    complete_steps,
    fingerprint,
    latest,
    rotate,
    step_name,
)
from .peers import CheckpointError, Peers

_pending: list[AsyncSave] = []
_background_groups: dict[Any, dist.ProcessGroup] = {}


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    step: int,
    keep_last: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Saves model and optimizer as ``folder/step_XXXXXX``; every rank has to call it.

    Ranks write their own pieces into a folder with a temporary name, which gets its name when all
    is written; then ``folder/latest`` moves to it. A process killed at any moment leaves the last
    good checkpoint as it was. The step is an ordinary checkpoint of
    ``torch.distributed.checkpoint`` with the keys ``model`` and ``optimizer``.

    Args:
        folder: Folder of the run, on a file system that every rank sees; made if need be.
        model: A model with sharded parameters, or a plain one.
        optimizer: Its optimizer.
        extra: What else belongs to the run (numbers, strings, containers, tensors), taken from
            rank 0: something that ``torch.load(weights_only=True)`` takes.
        step: Number in the name; an older save of the same number is replaced.
        keep_last: How many saves to keep, the newest included; older ones are deleted after this
            one is complete. ``None`` keeps all.
        process_group: The ranks that share the model, ``None`` for all.

    Returns:
        The path of the new checkpoint.

    Raises:
        ValueError: If ``step`` or ``keep_last`` is out of range.
        CheckpointError: On every rank, if something can not be saved or written.
    """
    _check_numbers(step, keep_last)
    _wait_for_pending()
    peers = Peers(process_group)
    peers.arrive("save")
    with peers.together(f"save({folder})"):
        state = dcp_state.collect(model, optimizer, extra)
    return _write(Path(folder), state, step, keep_last, peers)


class AsyncSave:
    """A save that goes on in the background."""

    def __init__(self, future: Future[Path]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether this rank has nothing more to do for it."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Waits for the end and returns the checkpoint's path.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            CheckpointError: If the save failed.
            TimeoutError: If it goes on for longer than ``timeout``.
        """
        try:
            return self._future.result(timeout)
        finally:
            if self._future.done() and self in _pending:
                _pending.remove(self)


def async_save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    step: int,
    keep_last: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> AsyncSave:
    """Like :func:`save`, but returns when the state is copied to host memory.

    What is saved is the state at the call; training may go on. One save runs at a time: the next
    :func:`save` or :func:`async_save` first waits for it and raises its error if it failed.

    Args:
        folder: See :func:`save`.
        model: See :func:`save`.
        optimizer: See :func:`save`.
        extra: See :func:`save`.
        step: See :func:`save`.
        keep_last: See :func:`save`.
        process_group: See :func:`save`.

    Returns:
        A handle whose ``result()`` waits for the end and raises what went wrong.

    Raises:
        ValueError: If ``step`` or ``keep_last`` is out of range.
        CheckpointError: On every rank, if something can not be saved.
    """
    _check_numbers(step, keep_last)
    _wait_for_pending()
    caller = Peers(process_group)
    caller.arrive("async_save")
    with caller.together(f"async_save({folder})"):
        state = dcp_state.copy_to_host(dcp_state.collect(model, optimizer, extra))
    background = Peers(_background_group(process_group)) if caller.size > 1 else caller
    executor = ThreadPoolExecutor(1, thread_name_prefix="ya_fsdp_save")
    future = executor.submit(_write, Path(folder), state, step, keep_last, background)
    executor.shutdown(wait=False)
    pending = AsyncSave(future)
    _pending.append(pending)
    return pending


def _background_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A gloo group of the same ranks: two threads must not use one group at a time."""
    key = group if group is not None else dist.group.WORLD
    made = _background_groups.get(key)
    if made is None:
        ranks = dist.get_process_group_ranks(key)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _background_groups[key] = made
    return made


def _wait_for_pending() -> None:
    while _pending:
        _pending[0].result()


def _check_numbers(step: Any, keep_last: Any) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"step must be an int of at least 0, got {step!r}")
    if keep_last is not None and (
        not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1
    ):
        raise ValueError(f"keep_last must be None or an int of at least 1, got {keep_last!r}")


@torch.no_grad()
def _write(
    root: Path, state: dcp_state.State, step: int, keep_last: int | None, peers: Peers
) -> Path:
    name = step_name(step)
    partial = root / f".{name}.partial"
    what = f"save({root / name})"
    try:
        with peers.together(what):
            if peers.leads:
                root.mkdir(parents=True, exist_ok=True)
                clean(root)
                partial.mkdir()
        with peers.together(what):
            dcp_state.write(partial, state, peers)
        with peers.together(what):
            own = {path.name: fingerprint(path) for path in _own_files(partial, peers)}
        files = {name: entry for part in peers.gather(own) for name, entry in part.items()}
        with peers.together(what):
            if peers.leads:
                _finish(root, partial, name, _manifest(root, step, files, state, peers))
    except CheckpointError:
        if peers.leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with peers.together(f"{what} succeeded, but deleting older checkpoints did not"):
        if peers.leads:
            rotate(root, keep_last)
    return root / name


def _own_files(partial: Path, peers: Peers) -> list[Path]:
    """The files that this rank wrote; rank 0 also has those that all share."""
    prefix = f"__{peers.rank}_"
    mine: Callable[[str], bool] = lambda name: (  # noqa: E731
        name.startswith(prefix) or (peers.leads and not name.startswith("__"))
    )
    return [path for path in partial.iterdir() if mine(path.name)]


def _manifest(
    root: Path,
    step: int,
    files: dict[str, tuple[int, int]],
    state: dcp_state.State,
    peers: Peers,
) -> Manifest:
    earlier = complete_steps(root)
    sequence = earlier[-1][0].sequence + 1 if earlier else 1
    return Manifest(
        step, sequence, dict(sorted(files.items())), peers.size, state.model_class, state.optimizer
    )


def _finish(root: Path, partial: Path, name: str, manifest: Manifest) -> None:
    manifest.write(partial)
    commit(root, partial, name)


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Fills model and optimizer from a checkpoint, saved on any number of ranks.

    Every rank has to call it. Files, names, shapes and the kind of optimizer are checked before
    anything is written.

    Args:
        folder: The run's folder, whose latest checkpoint is taken, or a step's own folder.
        model: A model with sharded parameters, or a plain one; not on the meta device.
        optimizer: Its optimizer, new or used; left out: its state is not loaded.
        strict: Whether names, parameter groups and the class of the optimizer have to be the same.
        verify: Whether checksums are compared, which reads every file once more, each on one rank;
            sizes always are.
        process_group: The ranks that share the model, ``None`` for all.

    Returns:
        The step, what was given as ``extra`` and the checkpoint's path.

    Raises:
        CheckpointError: On every rank, if there is no checkpoint, a file is damaged (it is named)
            or something does not fit; model and optimizer are then unchanged.
    """
    _wait_for_pending()
    peers = Peers(process_group)
    peers.arrive("load")
    path = Path(folder)
    with peers.together(f"load({folder})"):
        if peers.leads and not (path / ".metadata").exists():
            found = latest(path)
            if found is None:
                raise CheckpointError(f"there is no complete checkpoint in {folder}")
            path = found
    path = peers.broadcast(path)
    return load_step(path, model, optimizer, strict=strict, verify=verify, peers=peers)


__all__ = ["AsyncSave", "Loaded", "async_save", "latest", "load", "save"]
