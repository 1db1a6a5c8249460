"""The other ranks of an emulated job, as far as a checkpoint needs them.

Checkpoints exchange Python objects: plans, results, errors. An emulated rank is alone, so inside
`absent_peers` every such exchange is answered for the others. What they would plan to write is made
by the same code under their rank, outside of the measured time; what they would load is planned as
this rank's, because nobody looks at it. Objects are pickled and read as often as the leading rank
of a real job would do it.

Private names of torch used here: `checkpoint.utils._DistWrapper`, through which torch's planner
talks to other ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.utils import _DistWrapper

from ya_fsdp import ragged_tensor
from ya_fsdp.checkpoint import store
from ya_fsdp.checkpoint.peers import Peers


@dataclass
class Exchange:
    """What the emulated ranks cost.

    Attributes:
        planning: Seconds that the leading rank spent on each plan: its own, and that of all.
        untimed: Seconds spent on being the other ranks.
    """

    planning: list[float] = field(default_factory=list)
    untimed: float = 0.0


@contextlib.contextmanager
def _as_rank(rank: int) -> Iterator[None]:
    """Ragged tensors describe the piece of another rank inside the block."""
    with mock.patch.object(ragged_tensor, "mesh_rank", return_value=rank):
        yield


def _plan_of_all(
    exchange: Exchange, world: int, map_fun: Callable[[], Any], reduce_fun: Callable[[Any], Any]
) -> Any:
    start = time.perf_counter()
    own = map_fun()
    sent = [pickle.dumps(own)] * world
    seconds = time.perf_counter() - start
    if isinstance(own, SavePlan):
        start = time.perf_counter()
        for rank in range(1, world):
            with _as_rank(rank):
                plan = map_fun()
                # Numbers and options are written by the first rank alone.
                items = [item for item in plan.items if item.type is WriteItemType.SHARD]
                sent[rank] = pickle.dumps(replace(plan, items=items))
        map_fun()  # the planner is this rank's again
        exchange.untimed += time.perf_counter() - start
    start = time.perf_counter()
    plans = reduce_fun([pickle.loads(data) for data in sent])
    replies = [pickle.dumps(plan) for plan in plans]
    own = pickle.loads(replies[0])
    exchange.planning.append(seconds + time.perf_counter() - start)
    return own


@contextlib.contextmanager
def absent_peers(world: int) -> Iterator[Exchange]:
    """Answers for the ranks that do not exist; this process is rank 0 of `world`."""
    exchange = Exchange()

    def reduce_scatter(self: Any, step: str, map_fun: Any, reduce_fun: Any) -> Any:
        return _plan_of_all(exchange, world, map_fun, reduce_fun)

    def all_reduce(self: Any, step: str, map_fun: Any, reduce_fun: Any) -> Any:
        return reduce_fun([map_fun()] * world)

    def all_gather(self: Any, step: str, map_fun: Any) -> Any:
        return [map_fun()] * world

    patches = [
        mock.patch.object(_DistWrapper, "reduce_scatter", reduce_scatter),
        mock.patch.object(_DistWrapper, "all_reduce", all_reduce),
        mock.patch.object(_DistWrapper, "all_gather", all_gather),
        mock.patch.object(Peers, "arrive", return_value=None),
        mock.patch.object(Peers, "gather", lambda self, value: [value] * self.size),
        mock.patch.object(Peers, "broadcast", lambda self, value: value),
        mock.patch.object(store, "_background_group", lambda group: group),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield exchange
