"""The wrapper's arguments about the network: second shards per node, yccl, wide sums."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.test_collectives_contract import FakeHandle
from tests.distributed.test_secondary import NODE, Wires
from tests.distributed.test_wrapper import (
    gathered_gradients,
    loss_of,
    network,
    plain_step,
    tokens,
    wrap,
)
from tests.harness import WorkerPool, uses_nccl
from ya_fsdp import YaFSDPModule
from ya_fsdp.build import groups_of, units_of

LAYERS = 4


def node_group(rank: int, world: int, size: int = NODE) -> dist.ProcessGroup:
    groups = [dist.new_group([*range(r, r + size)]) for r in range(0, world, size)]
    return groups[rank // size]


def layers_only(model: Any) -> dict[str, Any]:
    names = [(layer, f"layers.{i}") for i, layer in enumerate(model.layers)]
    return {"modules_to_wrap_with_names": names}


def bytes_across(rank: int, world: int, first: int) -> tuple[float, float]:
    """Quarters of a layer that came from the other node in forward and in backward."""
    model, reference = network(LAYERS), network(LAYERS)
    wrapped = wrap(
        model,
        intra_node_data_parallel_process_group=node_group(rank, world),
        hpz_first_layers_num=first,
        **layers_only(model),
    )
    wires = Wires()
    wrapped.module.set_collectives(wires)
    (unit,) = units_of([model.layers[0]])
    (root,) = units_of([model])
    part = sum(g.gather_bytes for g in unit.groups) / world
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, reference)]
    for step in range(10):
        batches = [[tokens(step, r) for r in range(world)]]
        wires.take()
        value = loss_of(wrapped, batches[0][rank])
        _, forward = wires.take()
        value.backward()
        _, backward = wires.take()
        plain_step(reference, batches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = wrapped.state_dict()
    assert bool(whole) == (rank % NODE == 0), "on each node's first rank"
    for name, value in whole.items():
        torch.testing.assert_close(value, reference.state_dict()[name].cpu(), atol=2e-5, rtol=1e-4)
    norms = sum(g.layout.shard_numel for g in root.groups) * 4 * (world - NODE)
    return (forward - norms) / part, backward / part


def test_the_first_two_of_four_layers_are_gathered_for_backward_within_the_node(
    world4: WorkerPool,
) -> None:
    layer = 4 - NODE  # quarters that the other node has
    # The last two layers are still in their buffers when backward begins.
    assert set(world4.run(bytes_across, 0)) == {(LAYERS * layer, 2 * layer)}
    assert set(world4.run(bytes_across, 1)) == {(LAYERS * layer, 1 * layer)}
    assert set(world4.run(bytes_across, 2)) == {(LAYERS * layer, 0)}


def accumulate(rank: int, world: int) -> list[int]:
    """Bytes from the other node in each forward and backward of three microbatches."""
    model, reference = network(LAYERS), network(LAYERS)
    node = node_group(rank, world)
    wrapped = wrap(
        model,
        steps=3,
        intra_node_data_parallel_process_group=node,
        hpz_first_layers_num=LAYERS,
        **layers_only(model),
    )
    wires = Wires()
    wrapped.module.set_collectives(wires)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (wrapped, reference)]
    found: list[int] = []
    for step in range(3):
        found.clear()
        batches = [[tokens(3 * step + m, r) for r in range(world)] for m in range(3)]
        for micro in batches:
            value = loss_of(wrapped, micro[rank])
            found.append(wires.take()[1])
            value.backward()
            found.append(wires.take()[1])
        plain_step(reference, batches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in wrapped.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name].cpu(), atol=2e-5, rtol=1e-4)
    return found


def test_later_microbatches_gather_within_the_node_too(world4: WorkerPool) -> None:
    for first, *others in world4.run(accumulate):
        assert first > 0
        assert others == [0] * 5


def refuse(rank: int, world: int) -> None:
    node = node_group(rank, world)
    uneven = [dist.new_group(ranks) for ranks in ([0], [1, 2, 3])][rank > 0]
    for options, message in (
        ({"zero_stage": 2}, "no effect with zero_stage=2"),
        ({"intra_node_data_parallel_process_group": uneven}, "nodes with equally many ranks"),
        ({"data_parallel_process_group": node_group(rank, world, 1)}, "and no others"),
    ):
        model = network(LAYERS)
        given: dict[str, Any] = {"intra_node_data_parallel_process_group": node, **options}
        with pytest.raises(ValueError, match=message):
            wrap(model, hpz_first_layers_num=2, **layers_only(model), **given)
        assert not isinstance(model, YaFSDPModule), "nothing was changed"


def test_second_shards_that_can_not_be_are_refused_on_all_ranks(world4: WorkerPool) -> None:
    world4.run(refuse)


# ---- yccl ----------------------------------------------------------------------------------------


def with_yccl(
    rank: int, world: int, expression: Any, stages: int | None, profile: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Trains through a stand-in for the package; how it was opened, and its calls in a step."""
    handles = []

    class Handle(FakeHandle):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options
            handles.append(self)

        def enable_profiling(self) -> None:
            self.options["profile"] = True

    package = types.ModuleType("yccl")
    package.__spec__ = importlib.machinery.ModuleSpec("yccl", None)
    package.Handle = Handle  # type: ignore[attr-defined]
    sys.modules["yccl"] = package
    try:
        model, reference = network(), network()
        wrapped = wrap(
            model,
            param_dtype=torch.bfloat16,
            bit16_reduce_scatter=True,
            use_yccl=True,
            yccl_intra_inter_expr=expression,
            yccl_all_gather_stages=stages,
            profile=profile,
        )
    finally:
        del sys.modules["yccl"]
    (handle,) = handles
    assert list(wrapped.parameters()), "gradients are set on them from here on"
    for step in range(2):
        handle.calls.clear()
        batches = [[tokens(step, r) for r in range(world)]]
        loss_of(wrapped, batches[0][rank]).backward()
        plain_step(reference, batches)
    for ours, truth in zip(gathered_gradients(wrapped), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, truth.grad, atol=0.03, rtol=0.1)
    return handle.options, dict(handle.calls)


def by_rank(rank: int) -> tuple[int, int]:
    return rank // 2, rank % 2


@pytest.mark.parametrize("expression", [None, (5, 6), by_rank], ids=["none", "pair", "function"])
def test_yccl_is_opened_as_asked_and_moves_everything(world2: WorkerPool, expression: Any) -> None:
    if uses_nccl():
        pytest.skip("the fake handle sums over gloo")
    found = world2.run(with_yccl, expression, 3, expression is None)
    for rank, (options, calls) in enumerate(found):
        colours = {None: (0, rank), (5, 6): (5, 6), by_rank: by_rank(rank)}[expression]
        assert (options.pop("intra_color"), options.pop("inter_color")) == colours
        profiling = {"profile": True} if expression is None else {}
        assert options == {"all_gather_stages": 3, **profiling}
        # Five units and the norms; two of the five are still there when backward begins.
        assert calls == {"all_gather": 6 + 3, "reduce_scatter": 6}


def misuse(rank: int, world: int) -> None:
    with pytest.raises(TypeError, match="must return a pair"):
        with_yccl(rank, world, str, None, False)


def test_an_expression_that_gives_no_pair_is_refused(world2: WorkerPool) -> None:
    world2.run(misuse)


# ---- sums ----------------------------------------------------------------------------------------


def errors(rank: int, world: int) -> list[float]:
    """How far 16-bit sums, and 32-bit sums of 16 bits, are from gradients on a 32-bit wire."""
    batches = [tokens(0, r) for r in range(world)]
    found: list[Tensor] = []
    for bit16, wide in ((False, False), (True, False), (True, True)):
        wrapped = wrap(
            network(),
            param_dtype=torch.bfloat16,
            bit16_reduce_scatter=bit16,
            bit32_acc_for_bit16_reduce_scatter=wide,
        )
        assert {g.dtypes.reduce for g in groups_of(wrapped.module)} == {
            torch.bfloat16 if bit16 else torch.float32
        }
        assert list(wrapped.parameters()), "gradients are set on them from here on"
        loss_of(wrapped, batches[rank]).backward()
        found.append(torch.cat([p.grad for p in wrapped.parameters() if p.grad is not None]))
    return [float((grads - found[0]).abs().max()) for grads in found[1:]]


def test_16_bit_gradients_summed_in_32_bits_lose_nothing_on_the_way(world4: WorkerPool) -> None:
    for narrow, wide in world4.run(errors):
        assert narrow > 1e-4, "the 16-bit sum rounds"
        assert wide < 1e-6, "16-bit gradients are exact in 16 bits, and so are their sums in 32"
