"""Checkpoints of the original YaFSDP's ``local_state_dict``: one file per rank.

Each holds this rank's part of two flat tensors. ``main_parameter`` is, one wrapped module after
the other, an equal slice of that module's flattened parameters; ``layernorm_parameter`` is an
equal slice of the flattened parameters of all norms. Both were padded at the end to divide evenly.
The first rank's file also has ``meta``, which names the parameters and gives their sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import ConversionError

FILE = re.compile(r"yafsdp_model_(\d+)_(\d+)\.pt")
MAIN, NORMS = "main_parameter", "layernorm_parameter"
OPTIMIZER_FILE = re.compile(r"yafsdp_optim_(\d+)_(\d+)\.pt")


def find_files(
    folder: Path, model_parallel_rank: int | None, kind: re.Pattern[str] = FILE
) -> list[Path]:
    """The files of one tensor-parallel rank in the order of data-parallel ranks.

    Args:
        folder: Where they are.
        model_parallel_rank: The rank, ``None`` if there is only one.
        kind: Names of files, with data-parallel and tensor-parallel rank.

    Raises:
        ConversionError: If there are several tensor-parallel ranks and none was chosen, or a file
            is missing.
    """
    found: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        match = kind.fullmatch(path.name)
        if match:
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    if not found:
        raise ConversionError(f"{folder} has no files named like {kind.pattern}")
    if model_parallel_rank is None and len(found) > 1:
        raise ConversionError(
            f"{folder} has files of {len(found)} tensor-parallel ranks, whose parameters are "
            "slices; convert one at a time with --model-parallel-rank"
        )
    chosen = min(found) if model_parallel_rank is None else model_parallel_rank
    if chosen not in found:
        raise ConversionError(
            f"{folder} has no files of tensor-parallel rank {chosen}, only of {sorted(found)}"
        )
    files = found[chosen]
    missing = sorted(set(range(max(files) + 1)) - set(files))
    if missing:
        raise ConversionError(f"{folder} has no file of data-parallel rank {missing[0]}")
    return [files[rank] for rank in sorted(files)]


def join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Whole parameters and buffers from the state dicts of all ranks, in rank order.

    Raises:
        ConversionError: If they do not fit what the first one's meta says.
    """
    meta = parts[0].get("meta")
    if not isinstance(meta, Mapping):
        raise ConversionError("the first rank's file has no meta, which says what the others hold")
    whole = join_main(meta, [flat(part, MAIN) for part in parts])
    whole.update(join_norms(meta, [flat(part, NORMS) for part in parts]))
    whole.update(_buffers(parts[0]))
    return whole


def join_main(meta: Mapping[str, Any], shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """Whole tensors of wrapped modules from what every rank has of one flat tensor."""
    whole: dict[str, Tensor] = {}
    start = 0
    for module, size in enumerate(_field(meta, "main_parameter_shard_bounaries")):
        joined = torch.cat([shard[start : start + size] for shard in shards])
        start += size
        padded = _field(meta, "main_parameter_padded_numels")[module]
        if joined.numel() != padded:
            raise ConversionError(
                f"{len(shards)} ranks hold {joined.numel()} elements of wrapped module {module}, "
                f"but there should be {padded}; is a file missing?"
            )
        _cut(
            whole,
            joined,
            _field(meta, "main_shards_fqns")[module],
            _field(meta, "main_shards_numels")[module],
            _field(meta, "main_parameter_orig_shapes")[module],
        )
    _check_used(MAIN, shards, start)
    return whole


def join_norms(meta: Mapping[str, Any], shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """Whole tensors of norms from what every rank has of one flat tensor."""
    whole: dict[str, Tensor] = {}
    fields = ("layernorm_fqns", "layernorm_numels", "layernorm_orig_shapes")
    fqns, numels, shapes = (
        [item for module in _field(meta, name) for item in module] for name in fields
    )
    if not fqns:
        return whole
    joined = torch.cat(list(shards))
    padding = joined.numel() - sum(numels)
    # Padding fills up to equal shards, with one library's up to 8 elements each.
    if not 0 <= padding < 8 * len(shards):
        raise ConversionError(
            f"{len(shards)} ranks hold {joined.numel()} elements of norms, but meta names "
            f"{sum(numels)}; is a file missing?"
        )
    _cut(whole, joined, fqns, numels, shapes)
    return whole


def _cut(
    whole: dict[str, Tensor],
    joined: Tensor,
    fqns: Sequence[str],
    numels: Sequence[int],
    shapes: Sequence[Sequence[int]],
) -> None:
    """Adds to ``whole`` the parameters that lie in ``joined``, one after the other."""
    start = 0
    for fqn, numel, shape in zip(fqns, numels, shapes, strict=True):
        if start + numel > joined.numel() or torch.Size(shape).numel() != numel:
            raise ConversionError(f"meta's size of '{fqn}', {numel} as {list(shape)}, is wrong")
        whole[fqn] = joined[start : start + numel].view(*shape).clone()
        start += numel


def flat(part: Mapping[str, Any], name: str) -> Tensor:
    """A rank's part of a flat tensor; releases differ in whether its name begins with ``_``."""
    tensor = part.get(name, part.get(f"_{name}"))
    if not isinstance(tensor, Tensor):
        raise ConversionError(f"a rank's file has no tensor '{name}'; it has {sorted(part)}")
    return tensor.detach().reshape(-1)


def _field(meta: Mapping[str, Any], name: str) -> Any:
    # The original misspells this one.
    for key in (name, name.replace("bounaries", "boundaries")):
        if key in meta:
            return meta[key]
    raise ConversionError(f"meta has no entry '{name}'; it has {sorted(meta)}")


def _check_used(name: str, shards: Sequence[Tensor], used: int) -> None:
    for rank, shard in enumerate(shards):
        if shard.numel() != used:
            raise ConversionError(
                f"rank {rank}'s '{name}' has {shard.numel()} elements where meta accounts for "
                f"{used}; the files do not belong together"
            )


def _buffers(part: Mapping[str, Any]) -> dict[str, Tensor]:
    """Buffers, whose names tell of the wrappers around modules."""
    return {
        re.sub("^_?module\\.", "", name).replace("root_module.", ""): value.detach().clone()
        for name, value in part.items()
        if name.startswith(("module.", "_module.")) and isinstance(value, Tensor)
    }
