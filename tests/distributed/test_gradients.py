"""Accumulation, clipping, hooks, optimizers and averages of weights, against a plain model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel

from tests.distributed.models import (
    MLP,
    Block,
    assert_none_stale,
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
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import clip_grad_norm_ as clip_whole_norm_
from ya_fsdp import fully_shard
from ya_fsdp.build import groups_of
from ya_fsdp.collectives import C10dCollectives


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts what goes over the wire inside."""
    names = ("all_gather", "reduce_scatter", "all_reduce")
    counts = dict.fromkeys(names, 0)
    before = {name: getattr(C10dCollectives, name) for name in names}

    def counting(name: str) -> Any:
        def call(self: Any, *args: Any) -> None:
            counts[name] += 1
            before[name](self, *args)

        return call

    for name in names:
        setattr(C10dCollectives, name, counting(name))
    try:
        yield counts
    finally:
        for name, method in before.items():
            setattr(C10dCollectives, name, method)


# ---- accumulation --------------------------------------------------------------------------------


def accumulate_with_communication(rank: int, world: int) -> None:
    for shard in (leaf, nested, root):
        model, reference = pair(MLP, shard)
        for micro in range(3):
            x = inputs(world, seed=micro)
            loss(model, x[rank]).backward()
            reference_backward(reference, x)
            assert_same_gradients(model, reference)


def test_backward_passes_without_zero_grad_add_up(pool: WorkerPool) -> None:
    pool.run(accumulate_with_communication)


def accumulate_without_communication(rank: int, world: int, with_context: bool) -> None:
    for shard, units in ((leaf, 4), (nested, 4), (root, 1)):
        model, reference = pair(MLP, shard)
        optimizers = sgd_pair(model, reference)
        for _step in range(3):
            for micro in range(3):
                last = micro == 2
                x = inputs(world, seed=micro)
                if not with_context:
                    model.set_requires_gradient_sync(last)
                quiet = with_context and not last
                with counted() as counts, model.no_sync() if quiet else nullcontext():
                    loss(model, x[rank]).backward()
                assert counts["reduce_scatter"] == (units if last else 0)
                assert counts["all_reduce"] == (1 if last else 0)
                assert units <= counts["all_gather"] <= 2 * units - 1
                reference_backward(reference, x)
                if not last and _step == 0:
                    assert all(p.grad is None for p in model.parameters())
            assert_same_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(model, reference)


@pytest.mark.parametrize("with_context", [True, False], ids=["no_sync", "the setter"])
def test_microbatches_without_communication_reduce_once(
    pool: WorkerPool, with_context: bool
) -> None:
    pool.run(accumulate_without_communication, with_context)


def accumulate_in_turn(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    for micro, quiet in enumerate((True, False, True, True, False)):
        x = inputs(world, seed=micro)
        with model.no_sync() if quiet else nullcontext():
            loss(model, x[rank]).backward()
        reference_backward(reference, x)
        if not quiet:
            assert_same_gradients(model, reference)


def test_quiet_and_loud_microbatches_in_turn_add_up(pool: WorkerPool) -> None:
    pool.run(accumulate_in_turn)


def forget_microbatches(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    x = inputs(world)
    with model.no_sync():
        loss(model, x[rank]).backward()
    model.zero_grad()
    train_step(model, reference, rank, x)


def test_zero_grad_forgets_quiet_microbatches(world2: WorkerPool) -> None:
    world2.run(forget_microbatches)


def evaluate_between(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    for micro in range(2):
        x = inputs(world, seed=micro)
        with model.no_sync() if micro == 0 else nullcontext():
            loss(model, x[rank]).backward()
        reference_backward(reference, x)
        assert_none_stale(model, reference, x[rank])
    assert_same_gradients(model, reference)


def test_an_evaluation_between_microbatches_loses_nothing(world2: WorkerPool) -> None:
    world2.run(evaluate_between)


def skip_in_last(rank: int, world: int) -> None:
    """The last microbatch, the one that communicates, does not touch the first layer."""

    class Switch(MLP):
        skip = False

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[1 if self.skip else 0 :]:
                x = layer(x)
            return self.head(x)

    model, reference = pair(Switch, leaf)
    for micro in range(2):
        for each in (model, reference):
            each.skip = micro == 1
        x = inputs(world, seed=micro)
        with model.no_sync() if micro == 0 else nullcontext():
            loss(model, x[rank]).backward()
        reference_backward(reference, x)
    assert_same_gradients(model, reference)


def test_a_layer_that_only_quiet_microbatches_use_is_reduced(pool: WorkerPool) -> None:
    pool.run(skip_in_last)


def zero_in_place(rank: int, world: int) -> None:
    for shard in (leaf, root):
        model, reference = pair(MLP, shard)
        optimizers = sgd_pair(model, reference)
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            x = inputs(world, seed=step)
            loss(model, x[rank]).backward()
            reference_backward(reference, x)
            assert_same_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()
        for each in (model, reference):
            each.zero_grad(set_to_none=False)
        assert all(not full(p.grad).any() for p in model.parameters())
        assert_same_parameters(model, reference)


def test_zeroed_gradients_hold_the_next_step_alone(pool: WorkerPool) -> None:
    pool.run(zero_in_place)


def keep_gradients(rank: int, world: int) -> None:
    for keep in (lambda g: g, lambda g: g.to_local(), lambda g: g.detach()):
        model, _ = pair(MLP, nested)
        loss(model, inputs(world, seed=0)[rank]).backward()
        kept = {name: keep(p.grad) for name, p in model.named_parameters()}
        values = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        local = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
        for seed in (1, 2):
            model.zero_grad(set_to_none=True)
            loss(model, inputs(world, seed=seed)[rank]).backward()
        for name, param in model.named_parameters():
            now = kept[name]
            assert torch.equal(now.to_local() if hasattr(now, "to_local") else now, local[name])
            assert not torch.equal(full(param.grad), values[name])


def test_a_gradient_the_user_keeps_never_changes(pool: WorkerPool) -> None:
    pool.run(keep_gradients)


def gradient_made_by_user(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    for name, param in model.named_parameters():
        if "bias" in name:
            param.grad = torch.ones_like(param)
            truth = reference.get_parameter(name)
            truth.grad = torch.ones_like(truth)
    x = inputs(world)
    loss(model, x[rank]).backward()
    reference_backward(reference, x)
    assert_same_gradients(model, reference)
    model.zero_grad()
    reference.zero_grad()
    assert_none_stale(model, reference, x[rank])  # gives the gradients' memory back
    for each in (model, reference):
        each.head.bias.grad = torch.ones_like(each.head.bias)
    loss(model, x[rank]).backward()
    reference_backward(reference, x)
    assert_same_gradients(model, reference)


def test_a_gradient_set_before_backward_is_added_to(pool: WorkerPool) -> None:
    pool.run(gradient_made_by_user)


def divide(rank: int, world: int) -> None:
    for factor, force in ((1.0, False), (4.0, False), (None, True), (0.5, True)):
        model, reference = pair(MLP, leaf)
        for module in (*model.layers, model.head):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(force)
        x = inputs(world)
        loss(model, x[rank]).backward()
        for each in x:
            (loss(reference, each) / (factor or world)).backward()
        assert_same_gradients(model, reference, atol=1e-4)


def test_the_divide_factor_replaces_the_number_of_ranks(pool: WorkerPool) -> None:
    pool.run(divide)


def frozen_costs_nothing(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1, bias=False))
    model.to(test_device())
    model[0].requires_grad_(False)
    fully_shard(model)
    sizes: list[int] = []
    before = C10dCollectives.reduce_scatter

    def record(self: Any, output: Tensor, input: Tensor, *args: Any) -> None:
        sizes.append(input.numel())
        before(self, output, input, *args)

    C10dCollectives.reduce_scatter = record  # type: ignore[method-assign]
    try:
        model(torch.randn(2, 1000).to(test_device())).sum().backward()
    finally:
        C10dCollectives.reduce_scatter = before  # type: ignore[method-assign]
    assert len(sizes) == 1 and sizes[0] < 1100


def test_frozen_parameters_take_no_part_in_the_reduction(world2: WorkerPool) -> None:
    world2.run(frozen_costs_nothing)


# ---- hooks ---------------------------------------------------------------------------------------


def post_accumulate(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    calls: dict[str, list[Tensor]] = {}
    for name, param in model.named_parameters():

        def hook(p: Any, name: str = name) -> None:
            calls.setdefault(name, []).append(p.grad)

        param.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        quiet = step == 1
        with model.no_sync() if quiet else nullcontext():
            loss(model, inputs(world)[rank]).backward()
        expected = (1, 1, 2)[step]
        assert {name: len(seen) for name, seen in calls.items()} == {
            name: expected for name, _ in reference.named_parameters()
        }
        assert all(seen[-1] is not None for seen in calls.values())


def test_post_accumulate_hooks_run_once_per_reduced_backward(pool: WorkerPool) -> None:
    pool.run(post_accumulate)


def step_in_backward(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    for param in model.parameters():

        def hook(p: Any, optimizer: Any) -> None:
            optimizer.step()
            optimizer.zero_grad()

        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda p, o=optimizer: hook(p, o))
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x = inputs(world, seed=step)
        loss(model, x[rank]).backward()
        other.zero_grad()
        reference_backward(reference, x)
        other.step()
        assert all(p.grad is None for p in model.parameters())
        assert_same_parameters(model, reference)


def test_an_optimizer_step_inside_the_hook_trains(pool: WorkerPool) -> None:
    pool.run(step_in_backward)


def tensor_hook(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested)
    with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
        model.head.weight.register_hook(lambda grad: grad)


def test_a_tensor_hook_that_could_never_fire_is_refused(world2: WorkerPool) -> None:
    world2.run(tensor_hook)


# ---- clipping ------------------------------------------------------------------------------------


class Uneven(nn.Module):
    """With three ranks some pieces are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 1), nn.Linear(1, 2), nn.Linear(2, 6)])
        self.head = nn.Linear(6, 3)
        self.skipped = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def clip_norms(rank: int, world: int) -> None:
    for norm_type in (2.0, 1.0, float("inf"), 3.0):
        for foreach in (None, True, False):
            model, reference = pair(Uneven, leaf)
            x = inputs(world)
            loss(model, x[rank]).backward()
            reference_backward(reference, x)
            total, truth = (
                clip_grad_norm_(m.parameters(), 0.05, norm_type=norm_type, foreach=foreach)
                for m in (model, reference)
            )
            assert truth > 0.05, "nothing would be clipped"
            for value in (float(total), total.detach().item(), full(total).item()):
                assert value == pytest.approx(truth.item(), rel=1e-5)
            assert_same_gradients(model, reference)


def test_norm_clipping_equals_the_whole_models(pool: WorkerPool) -> None:
    pool.run(clip_norms)


def clip_values(rank: int, world: int) -> None:
    for foreach in (None, True, False):
        model, reference = pair(Uneven, leaf)
        x = inputs(world)
        loss(model, x[rank]).backward()
        reference_backward(reference, x)
        before = [p.grad.clone() for p in reference.parameters() if p.grad is not None]
        for each in (model, reference):
            clip_grad_value_(each.parameters(), 0.01, foreach=foreach)
        after = [p.grad for p in reference.parameters() if p.grad is not None]
        assert not all(map(torch.equal, before, after)), "nothing would be clipped"
        assert_same_gradients(model, reference)


def test_value_clipping_equals_the_whole_models(pool: WorkerPool) -> None:
    pool.run(clip_values)


def scale(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    optimizers = sgd_pair(model, reference)
    scaler = torch.amp.GradScaler(test_device().type, init_scale=1024.0, growth_interval=100)
    for step in range(3):
        x = inputs(world, seed=step)
        value = loss(model, x[rank])
        if step == 1 and rank == 0:
            value = value * float("inf")
        before = {n: full(p.detach()).clone() for n, p in model.named_parameters()}
        scaler.scale(value).backward()
        scaler.unscale_(optimizers[0])
        if step != 1:
            reference_backward(reference, x)
            assert_same_gradients(model, reference)
            optimizers[1].step()
        scaler.step(optimizers[0])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step == 1:
            after = {n: full(p.detach()) for n, p in model.named_parameters()}
            assert all(torch.equal(before[n], after[n]) for n in before)
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        assert_same_parameters(model, reference)


def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: WorkerPool) -> None:
    pool.run(scale)


# ---- optimizers ----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW tensor lr": (torch.optim.AdamW, {"lr": "tensor"}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW maximize": (torch.optim.AdamW, {"maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Rprop": (torch.optim.Rprop, {}),
}


def build(name: str, model: Any) -> Any:
    kind, options = OPTIMIZERS[name]
    options = {"lr": 0.05, **options}
    if options["lr"] == "tensor":
        options["lr"] = torch.tensor(0.05)
    return kind(model.parameters(), **options)


def optimize(rank: int, world: int) -> None:
    for name in OPTIMIZERS:
        model, reference = pair(Uneven, nested)
        optimizers = build(name, model), build(name, reference)
        for step in range(3):
            train_step(model, reference, rank, inputs(world, seed=step))
            for optimizer in optimizers:
                optimizer.step()
            assert_same_parameters(model, reference, atol=1e-4)
        for param, state in optimizers[0].state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim() > 0:
                    assert value.to_local().numel() == param.to_local().numel()
        states = [m.skipped in o.state for m, o in zip((model, reference), optimizers, strict=True)]
        assert states[0] is states[1]


def test_every_optimizer_of_torch_updates_shards_as_it_updates_weights(pool: WorkerPool) -> None:
    pool.run(optimize)


def whole_parameters(rank: int, world: int) -> None:
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
        model, reference = pair(MLP, nested)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer: Any = kind(matrices, lr=0.05)
        train_step(model, reference, rank, inputs(world))
        with pytest.raises(
            NotImplementedError, match=rf"RaggedShardDTensor.*\({kind.__name__} asks"
        ):
            optimizer.step(lambda: 0.0)


def test_an_optimizer_that_needs_whole_parameters_is_refused_by_name(world2: WorkerPool) -> None:
    world2.run(whole_parameters)


def optimizer_made_before(rank: int, world: int) -> None:
    for shard in (leaf, root):
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            model = MLP()
            optimizer = kind(model.parameters(), lr=0.1)
            parameters = list(model.parameters())
            shard(model)
            with pytest.raises(RuntimeError, match=r"optimizer.*after fully_shard"):
                optimizer.zero_grad()
            loss(model, inputs(world)[rank]).backward()
            with pytest.raises(RuntimeError, match=r"'.*weight'.*optimizer.*after fully_shard"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="after fully_shard"):
                clip_grad_norm_(parameters, 1.0)
            assert torch.isfinite(parameters[0].detach().sum())


def test_an_optimizer_made_before_sharding_is_told_so(world2: WorkerPool) -> None:
    world2.run(optimizer_made_before)


def tie_outside(rank: int, world: int) -> None:
    model = MLP()
    plain = nn.Linear(6, 3)
    plain.weight = model.head.weight
    leaf(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.randn(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="replaced by fully_shard"):
        optimizer.step()


def test_a_weight_tied_to_a_module_that_stays_plain_does_not_part_in_silence(
    world2: WorkerPool,
) -> None:
    world2.run(tie_outside)


def optimizer_made_after_forward(rank: int, world: int) -> None:
    for shard in (leaf, nested, root):
        for options in ({}, {"reshard_after_forward": False}):
            model, reference = pair(MLP, shard, **options)
            x = inputs(world)
            loss(model, x[rank])
            optimizers = tuple(
                torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)
            )
            for _ in range(2):
                train_step(model, reference, rank, x, optimizers=optimizers)


def test_an_optimizer_made_after_a_forward_trains(pool: WorkerPool) -> None:
    pool.run(optimizer_made_after_forward)


def recurrent(rank: int, world: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(6, 6, batch_first=True), nn.GRU(6, 6)])
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.layers[0](x)
            x, _ = self.layers[1](x)
            return self.head(x)

    ignore_scattered_rnn_weights()
    for shard in (leaf, root):
        model, reference = pair(Recurrent, shard)
        optimizers = sgd_pair(model, reference)
        for step in range(3):
            x = inputs(world, 2, 4, 6, seed=step)
            train_step(model, reference, rank, x, optimizers=optimizers)
            assert_none_stale(model, reference, x[rank])


def test_recurrent_layers_that_keep_a_list_of_their_weights_train(pool: WorkerPool) -> None:
    pool.run(recurrent)


# ---- averages and copies -------------------------------------------------------------------------


def moving_average(rank: int, world: int) -> None:
    model, reference = pair(Uneven, nested)
    optimizers = sgd_pair(model, reference)
    names = [name for name, _ in model.named_parameters()]
    plain, fused = ([p.detach().clone() for p in model.parameters()] for _ in range(2))
    truth = [p.detach().clone() for p in reference.parameters()]
    for step in range(3):
        train_step(model, reference, rank, inputs(world, seed=step), optimizers=optimizers)
        with torch.no_grad():
            for average, param in zip(plain, model.parameters(), strict=True):
                average.mul_(0.9).add_(param.detach(), alpha=0.1)
            torch._foreach_lerp_(fused, list(model.parameters()), 0.1)
            for average, param in zip(truth, reference.parameters(), strict=True):
                average.mul_(0.9).add_(param, alpha=0.1)
    for name, one, other, expected in zip(names, plain, fused, truth, strict=True):
        for value in (one, other):
            torch.testing.assert_close(full(value), expected, atol=1e-5, rtol=1e-4, msg=name)
    with torch.no_grad():
        for param, average in zip(model.parameters(), plain, strict=True):
            param.copy_(average)
        for param, average in zip(reference.parameters(), truth, strict=True):
            param.copy_(average)
    assert_none_stale(model, reference, inputs(world)[rank])


def test_a_moving_average_of_shards_is_that_of_the_weights(pool: WorkerPool) -> None:
    pool.run(moving_average)


def copies(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    for attempt in (copy.deepcopy, AveragedModel, lambda m: copy.deepcopy(m.layers)):
        with pytest.raises(NotImplementedError, match=r"deep-copied.*state_dict.*clone"):
            attempt(model)
    train_step(model, reference, rank, inputs(world))


def test_a_deep_copy_is_refused_with_a_remedy(world2: WorkerPool) -> None:
    world2.run(copies)


# ---- padding -------------------------------------------------------------------------------------


def two_kinds() -> MLP:
    model = MLP(3)
    model.layers[0], model.layers[1] = Block(hidden=7), Block(hidden=7)
    return model


def look_at_padding(rank: int, world: int) -> None:
    """Norms of whole shards count it, and a buffer has held other gradients before."""
    model, reference = pair(two_kinds, nested)
    for step in range(3):
        xs = inputs(world, seed=step)
        for quiet in (True, False):
            model.layers[1].set_requires_gradient_sync(not quiet)
            loss(model, xs[rank]).backward()
            reference_backward(reference, xs)
        for group in groups_of(model):
            flat = group.grads.shard.flat
            ours = torch.zeros_like(flat, dtype=torch.bool)
            for index in range(len(group.params)):
                start, end = group.layout.local_range(rank, index)
                ours[start:end] = True
            assert not flat[~ours].any(), f"step {step}: {flat[~ours]}"
        truth = clip_grad_norm_(reference.parameters(), 1e9)
        torch.testing.assert_close(clip_whole_norm_(model, 1e9), truth)
        model.zero_grad()
        reference.zero_grad()


def test_padding_holds_no_gradients_of_other_units(pool: WorkerPool) -> None:
    pool.run(look_at_padding)
