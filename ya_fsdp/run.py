"""Runs a script that knows nothing of ya_fsdp on it: ``python -m ya_fsdp.run script.py ...``.

Within the process, ``torch.distributed.fsdp.fully_shard`` is this package's while the script runs,
so that a library which imports it inside a function, as accelerate's FSDP2 does, gets it::

    accelerate launch --config_file fsdp2.yaml -m ya_fsdp.run script.py --its --arguments
    torchrun --nproc_per_node 2 -m ya_fsdp.run script.py

No file is changed. ``YA_FSDP_ENABLED=0`` runs the script as it is. Options: ``-m`` before a module
in place of a script.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import fsdp

from ya_fsdp import fully_shard

_USAGE = "usage: python -m ya_fsdp.run [-m] SCRIPT_OR_MODULE [ARGUMENT ...]"
_OFF = ("0", "false", "no", "off")


@contextmanager
def swapped_fully_shard() -> Iterator[list[str]]:
    """``torch.distributed.fsdp.fully_shard`` is ours inside.

    Modules that have imported torch's before keep it.

    Yields:
        A list that gets the class of every module that is sharded.
    """
    original = fsdp.fully_shard
    sharded: list[str] = []
    fsdp.fully_shard = _stand_in(original, sharded)
    try:
        yield sharded
    finally:
        fsdp.fully_shard = original


def _stand_in(original: Callable[..., Any], sharded: list[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stand_in(module: Any, **kwargs: Any) -> Any:
        offload = kwargs.pop("offload_policy", None)
        if isinstance(offload, fsdp.CPUOffloadPolicy):
            raise NotImplementedError(
                "ya_fsdp does not offload to CPU; leave offload_params out, or set "
                "YA_FSDP_ENABLED=0"
            )
        if kwargs.pop("shard_placement_fn", None) is not None:
            _warn_once("shard_placement_fn has no meaning for ya_fsdp and is not called")
        policy = kwargs.get("mp_policy")
        if policy is None:
            kwargs.pop("mp_policy", None)
        elif policy.output_dtype is not None and policy.output_dtype.itemsize < 4:
            _warn_once(
                f"outputs are cast to {policy.output_dtype}, the loss too, which then moves in "
                "coarse steps; accelerate's own mixed precision asks for it"
            )
        sharded.append(type(module).__name__)
        # Whole state dicts are loaded by libraries, which know rows only.
        return fully_shard(module, granularity="row", **kwargs)

    return stand_in


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the arguments name as ``__main__``.

    Args:
        argv: A script with its arguments, or ``-m``, a module and its arguments.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if words else 2)
    sys.argv = words
    if os.environ.get("YA_FSDP_ENABLED", "1").lower() in _OFF:
        _run(words[0], is_module)
        return
    with swapped_fully_shard() as sharded:
        _run(words[0], is_module)
    if not sharded and os.environ.get("RANK", "0") == "0":
        print(
            f"ya_fsdp.run: {words[0]} never called torch.distributed.fsdp.fully_shard, so nothing "
            "was sharded (accelerate calls it on GPUs only, and with FSDP of version 2)",
            file=sys.stderr,
        )


def _run(name: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if not Path(name).is_file():
        raise SystemExit(f"{name} is no file\n{_USAGE}")
    # Python puts the folder of a script first; runpy does so for folders only.
    sys.path.insert(0, str(Path(name).resolve().parent))
    runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
