"""On which CUDA streams a 2-D mesh communicates, and that values are right with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.models import MLP, inputs, nested, pair, train_step
from tests.distributed.test_hsdp import mesh_of
from tests.harness import WorkerPool, uses_nccl
from ya_fsdp.collectives import C10dCollectives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not uses_nccl(), reason="needs a CUDA device and YA_FSDP_TEST_NCCL=1"),
]


class StreamsUsed(C10dCollectives):
    """Notes the current stream of every collective."""

    def __init__(self, outer: Any) -> None:
        self.outer = outer
        self.seen: dict[str, set[int]] = {}

    def _note(self, kind: str) -> None:
        self.seen.setdefault(kind, set()).add(torch.cuda.current_stream().cuda_stream)

    def all_gather(self, *args: Any) -> None:
        self._note("inside")
        super().all_gather(*args)

    def reduce_scatter(self, output: Any, input: Any, average: bool, group: Any) -> None:
        self._note("across" if group is self.outer else "inside")
        super().reduce_scatter(output, input, average, group)

    def all_reduce(self, tensor: Any, op: str, group: Any) -> None:
        if op != "max":
            self._note("across")
        super().all_reduce(tensor, op, group)


def train(rank: int, world: int, over_replicas: bool) -> None:
    mesh = mesh_of((2, 2))
    used = StreamsUsed(mesh.get_group(0))
    model, reference = pair(
        lambda: MLP(6, 64, 256),
        nested,
        mesh=mesh,
        collectives=used,
        shard_optimizer_over_replicas=over_replicas,
    )
    optimizers = tuple(torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    for step in range(5):
        train_step(model, reference, rank, inputs(world, 32, 64, seed=step), optimizers=optimizers)
    compute = torch.cuda.current_stream().cuda_stream
    (inside,), (across,) = used.seen["inside"], used.seen["across"]
    assert len({inside, across, compute}) == 3


@pytest.mark.parametrize("over_replicas", [False, True])
def test_sums_over_replicas_have_a_stream_of_their_own(
    world4: WorkerPool, over_replicas: bool
) -> None:
    world4.run(train, over_replicas)
