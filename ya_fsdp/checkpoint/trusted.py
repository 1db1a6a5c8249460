"""Reads torch's distributed checkpoints without running what a file says, and inside its folder.

torch unpickles ``.metadata`` and every entry that is no tensor as they are, so that a checkpoint
from somebody else may run anything. Here only the classes that describe tensors can be made.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from .peers import CheckpointError

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def _enum_member(owner: Any, name: Any) -> Enum:
    """What ``getattr`` may stand for in a file."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise CheckpointError(f"it asks for the attribute {name!r} of {owner!r}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Classes that describe tensors, and dtypes; nothing else."""
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 pickles a member of an enum as getattr(its class, its name).
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"it asks for {module}.{name}, which describes no tensor")


def check_inside(folder: Path, name: str) -> Path:
    """The path of a file that a checkpoint names.

    Raises:
        CheckpointError: If the name leads out of the folder.
    """
    pure = PurePath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise CheckpointError(f"{folder} names a file outside of itself: {name!r}")
    return folder / pure


class TrustedReader(FileSystemReader):
    """torch's reader, for checkpoints of anybody."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint consists of.

        Raises:
            CheckpointError: If the file is damaged, asks for anything but descriptions of tensors,
                or names files outside of the checkpoint.
        """
        folder = Path(self.path)
        path = folder / ".metadata"
        try:
            with path.open("rb") as file:
                metadata: Metadata = _Unpickler(file).load()
            places = {info.relative_path for info in (metadata.storage_data or {}).values()}
        except (CheckpointError, pickle.UnpicklingError, AttributeError, EOFError) as error:
            raise CheckpointError(f"{path} is not safe to read or damaged: {error}") from error
        for place in places:
            check_inside(folder, place)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TrustedPlanner(DefaultLoadPlanner):
    """torch's planner, which reads entries that are no tensors with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Checks one entry before torch reads it.

        Raises:
            UnpicklingError: If it holds more than tensors, numbers, text and containers.
        """
        torch.load(value, weights_only=True, map_location="cpu")
        value.seek(0)
        super().load_bytes(read_item, value)
