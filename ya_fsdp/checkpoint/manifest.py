"""The folder of a run: complete steps, the pointer to the last one, sizes and checksums."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .peers import CheckpointError
from .trusted import check_inside

MANIFEST = "manifest.json"
POINTER = "latest"
_OLD = ".old"


@dataclass
class Manifest:
    """What a complete step consists of; written last, so that its presence means complete.

    Attributes:
        step: The number the user gave.
        sequence: Counts the saves into one folder; later saves have higher numbers.
        files: Size in bytes and CRC-32 of every file.
        world_size: Ranks that saved.
        model: Class of the model.
        optimizer: Class of the optimizer, or ``None``.
    """

    step: int
    sequence: int
    files: dict[str, tuple[int, int]]
    world_size: int
    model: str
    optimizer: str | None
    version: int = 1

    def write(self, folder: Path) -> None:
        """Puts the manifest into ``folder``."""
        write_text(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads a step's manifest.

        Raises:
            CheckpointError: If there is none, or it is damaged or of a later version.
        """
        path = folder / MANIFEST
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            if content["version"] > cls.version:
                raise CheckpointError(f"{path} was written by a later version of ya_fsdp")
            return cls(**content)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is not a checkpoint of ya_fsdp.checkpoint.save: it has no {MANIFEST}. "
                "torch.distributed.checkpoint.load reads folders that torch has written."
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step_{step:06d}"


def fingerprint(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file, read in pieces."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
        return file.tell(), checksum


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str], *, read: bool) -> None:
    """Compares files with what the manifest says of them.

    Args:
        folder: The step's folder.
        manifest: Its manifest.
        names: The files to look at.
        read: Whether to compare checksums too, which reads the files.

    Raises:
        CheckpointError: If a file is missing, has another size or other content.
    """
    for name in names:
        size, checksum = manifest.files[name]
        path = check_inside(folder, name)
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        actual = path.stat().st_size
        if actual != size:
            raise CheckpointError(f"{path} has {actual} bytes instead of {size}: it is damaged")
        if read and fingerprint(path)[1] != checksum:
            raise CheckpointError(f"{path} does not have the checksum it was saved with")


def complete_steps(folder: Path) -> list[tuple[Manifest, Path]]:
    """The complete steps in a folder, in the order in which they were saved."""
    found = []
    for path in folder.glob("step_*"):
        if (path / MANIFEST).exists():
            try:
                found.append((Manifest.read(path), path))
            except CheckpointError:
                continue  # A step that can not even say what it is counts for nothing.
    return sorted(found, key=lambda item: item[0].sequence)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The last complete checkpoint of a folder that :func:`save` wrote; no communication.

    Args:
        folder: The run's folder; it need not exist.

    Returns:
        The path of the step's own folder, or ``None`` if there is no complete one.
    """
    root = Path(folder)
    try:
        target = check_inside(root, (root / POINTER).read_text().strip())
        for path in (target, target.with_name(target.name + _OLD)):
            if (path / MANIFEST).exists():
                return path
    except OSError:
        pass  # The pointer is written last: a first save may have ended before it.
    steps = complete_steps(root) if root.is_dir() else []
    return steps[-1][1] if steps else None


def commit(root: Path, partial: Path, name: str) -> Path:
    """Gives a finished folder its name, then moves the pointer to it.

    At every moment in between, the pointer leads to a complete step.
    """
    final = root / name
    _sync_folder(partial)
    if final.exists():
        # A folder can not replace another in one move, so for a moment the old one has two names.
        old = final.with_name(name + _OLD)
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
    else:
        partial.rename(final)
    _sync_folder(root)
    write_text(root / POINTER, name + "\n")
    discard(final.with_name(name + _OLD))
    return final


def rotate(root: Path, keep_last: int | None) -> None:
    """Deletes all but the last ``keep_last`` saves, once the newest of them is complete."""
    if keep_last is not None:
        for _, path in complete_steps(root)[:-keep_last]:
            discard(path)


def discard(path: Path) -> None:
    """Deletes a folder; whatever happens meanwhile, it never looks complete but half empty."""
    if path.exists():
        away = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def clean(root: Path) -> None:
    """Removes what saves and deletions that were interrupted have left."""
    for leftover in (*root.glob(".step_*.partial"), *root.glob(".step_*.deleted")):
        shutil.rmtree(leftover, ignore_errors=True)
    for old in root.glob(f"step_*{_OLD}"):
        final = old.with_name(old.name.removesuffix(_OLD))
        if final.exists():
            discard(old)
        else:
            old.rename(final)


def write_text(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all, also after a power cut."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Makes renames in a folder last; some file systems do not offer it for folders."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
