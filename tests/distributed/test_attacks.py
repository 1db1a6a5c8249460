"""What users do to a sharded model that it can not follow is refused, and it trains on."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from tests.distributed.models import (
    CLASSES,
    HIDDEN,
    MLP,
    WIDTH,
    assert_same_gradients,
    assert_same_parameters,
    full,
    ignore_scattered_rnn_weights,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    reference_backward,
    root,
    train_step,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import clip_grad_norm_, flat_parameters, fully_shard
from ya_fsdp.checkpoint import get_full_state_dict
from ya_fsdp.graph import capture_step


def assert_trains_as_reference(model: Any, reference: nn.Module, rank: int, world: int) -> None:
    model.zero_grad()
    reference.zero_grad()
    x = inputs(world)
    loss(model, x[rank]).backward()
    reference_backward(reference, x, loss)
    assert_same_gradients(model, reference)


def call_with_other_weights(rank: int, world: int, name: str) -> None:
    model, reference = pair(MLP, nested)
    x = inputs(world)[rank]
    assert_trains_as_reference(model, reference, rank, world)
    for _ in range(2):
        other = {name: torch.zeros_like(reference.get_parameter(name).detach())}
        with pytest.raises(RuntimeError, match=f"'{name}' was replaced by a plain tensor"):
            functional_call(model, other, (x,))
        assert_trains_as_reference(model, reference, rank, world)


@pytest.mark.parametrize("name", ["head.weight", "layers.1.net.0.bias"])
def test_a_functional_call_with_other_weights_is_refused_and_keeps_ours(
    world2: WorkerPool, name: str
) -> None:
    world2.run(call_with_other_weights, name)


class Tied(nn.Module):
    """An embedding and an output layer of the same shape, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def change_ties(rank: int, world: int) -> None:
    x = torch.ones(2, WIDTH, device=test_device())
    model = fully_shard(Tied(tied=False).to(test_device()))
    model.last.weight = model.first.weight
    with pytest.raises(RuntimeError, match=r"'last\.weight' was tied to 'first\.weight' after"):
        model(x)
    model = fully_shard(Tied(tied=True).to(test_device()))
    model.last.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=test_device()))
    with pytest.raises(RuntimeError, match=r"'first\.weight' was replaced under one of its names"):
        model(x)
    model = fully_shard(Tied(tied=True).to(test_device()))
    model.last.weight = model.first.weight  # tied already: nothing changes
    assert model(x).shape == x.shape


def test_weights_tied_or_untied_after_sharding_are_refused_by_name(world2: WorkerPool) -> None:
    world2.run(change_ties)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrise_late(rank: int, world: int) -> None:
    model = MLP().to(test_device())
    root(model)
    parametrize.register_parametrization(model.head, "weight", Doubled())
    with pytest.raises(RuntimeError, match=r"head.*weight.*was removed \(or given a param"):
        model(inputs(world)[rank])


def test_a_parametrization_registered_after_sharding_is_refused(world2: WorkerPool) -> None:
    world2.run(parametrise_late)


def assign_a_parameter(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    value = torch.full((CLASSES, WIDTH), 0.5, device=test_device())
    model.head.weight = nn.Parameter(value.clone())
    reference.head.weight = nn.Parameter(value.clone())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_trains_as_reference(model, reference, rank, world)
    with pytest.raises(RuntimeError, match=r"'head\.weight' was replaced"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_optimizer_that_holds_a_parameter_assigned_after_sharding_is_told_so(
    world2: WorkerPool,
) -> None:
    world2.run(assign_a_parameter)


class Recurrent(nn.Module):
    """A recurrent layer that may be deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0] if hasattr(self, "lstm") else x)


def delete_a_layer(rank: int, world: int) -> None:
    ignore_scattered_rnn_weights()
    model, reference = pair(Recurrent, root)
    x = torch.randn(world, 2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    x = x.to(test_device())
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        model(x[rank]).square().mean().backward()
        reference(x.flatten(0, 1)).square().mean().backward()
        assert_same_gradients(model, reference)
        for each in (model, reference):
            if hasattr(each, "lstm"):
                del each.lstm


def test_a_recurrent_layer_deleted_from_a_unit_leaves_the_rest_training(
    world2: WorkerPool,
) -> None:
    world2.run(delete_a_layer)


def give_too_few_microbatches(rank: int, world: int) -> None:
    model = MLP().to(test_device())
    leaf(model)
    step = capture_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, accumulation=3)
    with pytest.raises(ValueError, match="accumulation=3, but the batch is a list of 1"):
        step([inputs(world)[rank]])


def test_a_captured_step_refuses_another_number_of_microbatches(world2: WorkerPool) -> None:
    world2.run(give_too_few_microbatches)


def outlive_another_model(rank: int, world: int) -> None:
    gc.collect()
    gc.disable()  # one rank keeps models in reference cycles that the others have collected
    try:
        for turn in range(4):
            model, reference = pair(MLP, root, seed=turn)
            for _ in range(turn + 1):
                assert_trains_as_reference(model, reference, rank, world)
            model.cycle = [model]
            del model
            if rank:
                gc.collect()
    finally:
        gc.enable()


def test_ranks_that_collect_old_models_at_different_times_train_on(world2: WorkerPool) -> None:
    world2.run(outlive_another_model)


def add_after_sharding(rank: int, world: int, when: str) -> None:
    model, reference = pair(MLP, nested)
    x = inputs(world)[rank]
    if when == "later":
        assert_trains_as_reference(model, reference, rank, world)
    model.layers[1].extra = nn.Linear(WIDTH, WIDTH, device=test_device())
    scale = nn.Parameter(torch.ones(3, device=test_device()))
    model.head.register_parameter("scale", scale)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'layers\.1\.extra\.weight'.*'head\.scale'"):
            model(x)
    del model.layers[1].extra
    model.head.scale.requires_grad_(False)  # nobody has to average what nobody trains
    model(x).sum().backward()
    del model.head.scale
    assert_trains_as_reference(model, reference, rank, world)


@pytest.mark.parametrize("when", ["before the first forward", "later"])
def test_parameters_that_join_a_sharded_model_unmanaged_are_refused_by_name(
    world2: WorkerPool, when: str
) -> None:
    world2.run(add_after_sharding, when)


def replace_modules(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested)
    x = inputs(world)[rank]
    loss(model, x).backward()
    old = model.head
    model.head = nn.Linear(WIDTH, CLASSES, device=test_device())
    with pytest.raises(RuntimeError, match=r"'head\.weight', 'head\.bias'"):
        model(x)
    model.head = fully_shard(model.head)
    loss(model, x).backward()
    assert model.head.weight.grad is not None and old.weight.grad is not None


def test_a_module_replaced_after_sharding_has_to_be_sharded_too(world2: WorkerPool) -> None:
    world2.run(replace_modules)


def ignore_by_name(rank: int, world: int) -> None:
    model = MLP().to(test_device())
    fully_shard(model.layers[0])
    fully_shard(model, ignored_params=list(model.head.parameters()))
    value = {k: v.detach().clone() for k, v in model.head.state_dict().items()}
    model.head.load_state_dict(value, assign=True)  # other parameter objects
    loss(model, inputs(world)[rank]).backward()
    assert model.head.weight.grad is not None


def test_ignored_parameters_stay_ignored_when_they_are_assigned_anew(world2: WorkerPool) -> None:
    world2.run(ignore_by_name)


def call_with_parameters(rank: int, world: int, kept: bool) -> None:
    model, reference = pair(MLP, nested)
    assert_trains_as_reference(model, reference, rank, world)
    if kept:
        model.set_reshard_after_backward(False)
        assert_trains_as_reference(model, reference, rank, world)
    other = {"head.weight": nn.Parameter(torch.zeros(CLASSES, WIDTH, device=test_device()))}
    with pytest.raises(RuntimeError, match=r"'head\.weight' was replaced by torch\.func\.func"):
        functional_call(model, other, (inputs(world)[rank],))
    assert_trains_as_reference(model, reference, rank, world)


@pytest.mark.parametrize("kept", [False, True])
def test_a_functional_call_with_parameters_does_not_overwrite_the_shards(
    world2: WorkerPool, kept: bool
) -> None:
    world2.run(call_with_parameters, kept)


def write_gathered(rank: int, world: int, way: str) -> None:
    model, reference = pair(MLP, nested)
    x = inputs(world)[rank]
    ways = {"reshard": model.reshard, "forward": lambda: model(x), "state_dict": model.state_dict}
    lost = r"'head\.bias' was written while it was gathered"
    for _ in range(2):
        model.unshard()
        with torch.no_grad():
            model.head.bias.fill_(7)
        with pytest.raises(RuntimeError, match=lost):
            ways[way]()
        model.reshard()
        assert_trains_as_reference(model, reference, rank, world)
    model.unshard()
    model.head.bias.sum().item()
    model.reshard()


@pytest.mark.parametrize("way", ["reshard", "forward", "state_dict"])
def test_values_written_into_gathered_parameters_are_not_lost_in_silence(
    world2: WorkerPool, way: str
) -> None:
    world2.run(write_gathered, way)


class Clamps(MLP):
    """Rewrites a weight in forward, past autograd."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def write_in_forward(rank: int, world: int) -> None:
    os.environ["YA_FSDP_DEBUG"] = "1"
    try:
        model, _ = pair(Clamps, nested)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'head\.weight' was written while"):
                model(inputs(world)[rank])
        model.unshard()
        model.head.weight.data.clamp_(-0.1, 0.1)
        with pytest.raises(RuntimeError, match=r"'head\.weight' was written while"):
            model.reshard()
    finally:
        del os.environ["YA_FSDP_DEBUG"]


def test_debug_mode_finds_writes_into_gathered_parameters_by_any_way(world2: WorkerPool) -> None:
    world2.run(write_in_forward)


def clip_by_torch(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    flat = flat_parameters(model)
    for name, param in model.named_parameters():
        assert param.grad is None, name
    for _ in range(2):
        assert_trains_as_reference(model, reference, rank, world)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        torch.testing.assert_close(full(norm), expected)
        assert_same_gradients(model, reference)
        torch.testing.assert_close(clip_grad_norm_(model, 1.0), torch.full_like(expected, 1e-2))
    model.head.bias.grad = None
    assert not full(model.head.bias.grad).any() and full(model.head.weight.grad).any()
    with pytest.raises(RuntimeError, match=r"'head\.bias' is part of a flat parameter"):
        model.head.bias.grad = model.head.bias.grad
    model.zero_grad()
    assert all(p.grad is None for p in (*flat, *model.parameters()))


def test_torch_clips_and_zeroes_sharded_gradients_that_flat_parameters_hold(
    world2: WorkerPool,
) -> None:
    world2.run(clip_by_torch)


def flat_twice(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    early = torch.optim.SGD(flat_parameters(model), lr=0.1)
    with pytest.raises(ValueError, match="key 'x' is not in groups"):
        flat_parameters(model, {"y": {}}, lambda n, _: "x" if n.startswith("head") else "y")
    early.step()  # nothing has changed
    later = torch.optim.SGD(flat_parameters(model), lr=0.1)
    with pytest.raises(RuntimeError, match="flat_parameters"):
        early.step()
    model.double()
    reference.double()
    model.zero_grad()
    xs = inputs(world, dtype=torch.float64)
    loss(model, xs[rank]).backward()
    reference_backward(reference, xs)
    later.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_same_parameters(model, reference)


def test_flat_parameters_follow_the_model_or_say_that_they_do_not(world2: WorkerPool) -> None:
    world2.run(flat_twice)


def wrap_in_data_parallel(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested)
    with pytest.raises(NotImplementedError, match=r"DistributedDataParallel.*needs none"):
        nn.parallel.DistributedDataParallel(model)


def test_data_parallel_around_a_sharded_model_is_refused_by_name(world2: WorkerPool) -> None:
    world2.run(wrap_in_data_parallel)


class Threaded(MLP):
    """May run its second layer in another thread."""

    threaded = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        second = self.layers[1]
        y = in_thread(lambda: second(x)) if self.threaded else second(x)
        return self.head(self.layers[2](y))


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(call).result()


def threads(rank: int, world: int) -> None:
    model, reference = pair(Threaded, nested)
    assert_trains_as_reference(model, reference, rank, world)
    model.threaded = True
    with pytest.raises(RuntimeError, match=r"'layers\.1' was called in thread 'other_0' while"):
        model(inputs(world)[rank])
    model.threaded = False
    assert_trains_as_reference(model, reference, rank, world)
    in_thread(lambda: assert_trains_as_reference(model, reference, rank, world))


def test_a_second_thread_inside_a_forward_is_refused_and_one_at_a_time_trains(
    world2: WorkerPool,
) -> None:
    world2.run(threads)


class CallsItself(nn.Module):
    """Its forward calls the module again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self.inner(x).tanh()
        return self(x, times - 1) if times else x


def reenter(rank: int, world: int) -> None:
    model, reference = pair(CallsItself, root)
    for _ in range(2):
        assert_trains_as_reference(model, reference, rank, world)


def test_a_unit_whose_forward_calls_the_unit_again_trains(world2: WorkerPool) -> None:
    world2.run(reenter)


def export(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    xs = inputs(world)
    for record in (
        lambda: torch.jit.trace(model, xs[rank]),
        lambda: torch.export.export(model, (xs[rank],), strict=False),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, that TorchScript is old
            with pytest.raises(RuntimeError, match=r"can not be exported.*get_full_state_dict"):
                record()
    with pytest.raises(NotImplementedError, match="shared memory"):
        model.share_memory()
    train_step(model, reference, rank, xs)
    plain = MLP().to(test_device())
    plain.load_state_dict(get_full_state_dict(model, rank0_only=False))
    exported = torch.export.export(plain, (xs[rank],)).module()
    torch.testing.assert_close(exported(xs[rank]), reference(xs[rank]))


def test_a_sharded_model_is_not_traced_or_exported_but_its_weights_are(
    world2: WorkerPool,
) -> None:
    world2.run(export)
