"""Every private torch name the package uses, each with its reason; version switches live here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# ---- engine: collectives, autograd engine, version counters ------------------------------------


def _options(kind: type[Any]) -> Any:
    options = kind()
    options.asyncOp = False
    return options


_GATHER_OPTIONS = _options(dist.AllgatherOptions)
_SCATTER_OPTIONS: dict[Any, Any] = {}


def all_gather_flat(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Flat all-gather on the current stream.

    The method of the group is called because the public function was renamed in 2.13 (the old
    name warns on every call) and spends four times as long on checks that the caller has done.
    """
    work = group._allgather_base(output, input, _GATHER_OPTIONS)
    if work is not None:
        work.wait()


def reduce_scatter_flat(output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Flat reduce-scatter on the current stream; see :func:`all_gather_flat` for the reason."""
    options = _SCATTER_OPTIONS.get(op)
    if options is None:
        options = _SCATTER_OPTIONS[op] = _options(dist.ReduceScatterOptions)
        options.reduceOp = op
    work = group._reduce_scatter_base(output, input, options)
    if work is not None:
        work.wait()


def current_graph_task() -> int:
    """Number of the backward pass this thread is in, -1 outside; no public name exists."""
    return int(torch._C._current_graph_task_id())


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Runs ``callback`` at the end of the current backward pass; DDP uses the same, no public name."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_execute(node: Any) -> bool:
    """Whether the current backward pass will run ``node``; no public name exists."""
    return bool(torch._C._will_engine_execute_node(node))


def set_version_counters(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets autograd's version counters, so that its own check finds a reused buffer; no public name."""
    if tensors:
        torch._C._autograd._unsafe_set_version_counter(tensors, versions)
