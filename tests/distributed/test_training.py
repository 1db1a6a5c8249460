"""Sharded training against a plain model that sees the global batch, whatever is sharded how."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import (
    CLASSES,
    MLP,
    SHARDINGS,
    WIDTH,
    Block,
    assert_none_stale,
    assert_same_gradients,
    assert_same_parameters,
    full,
    inputs,
    layers_only,
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
from ya_fsdp import fully_shard


def train(
    rank: int,
    world_size: int,
    build: Callable[[], nn.Module],
    shard: Callable[..., Any],
    steps: int = 3,
    **options: Any,
) -> None:
    """Trains both for some steps; gradients and parameters must agree after each."""
    model, reference = pair(build, shard, **options)
    optimizers = sgd_pair(model, reference)
    for step in range(steps):
        train_step(model, reference, rank, inputs(world_size, seed=step), optimizers=optimizers)


# ---- what is sharded -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHARDINGS)
def test_gradients_and_weights_are_those_of_the_global_batch(pool: WorkerPool, name: str) -> None:
    pool.run(train, MLP, SHARDINGS[name])


@pytest.mark.parametrize("name", SHARDINGS)
def test_one_rank_trains_like_the_plain_model(world1: WorkerPool, name: str) -> None:
    world1.run(train, MLP, SHARDINGS[name])


class Expert(nn.Module):
    """Two linear experts mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        outputs = [expert(x) * weights[:, i : i + 1] for i, expert in enumerate(self.experts)]
        return x + torch.stack(outputs).sum(0)


class MixtureOfExperts(nn.Module):
    def __init__(self, n: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(n))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard_experts(model: Any, **options: Any) -> Any:
    """Parents with parameters inside parents with parameters, three levels deep."""
    for layer in model.layers:
        for expert in layer.experts:
            fully_shard(expert, **options)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_parents_with_parameters_inside_parents_keep_their_own_buffers(
    pool: WorkerPool, reshard: bool | None
) -> None:
    pool.run(train, MixtureOfExperts, shard_experts, reshard_after_forward=reshard)


def shard_pair(model: Any, **options: Any) -> Any:
    fully_shard([model.layers[0], model.layers[1]], **options)
    fully_shard([model.layers[2], model.head], **options)
    return fully_shard(model, **options)


def test_a_list_of_modules_is_one_unit_that_trains(pool: WorkerPool) -> None:
    pool.run(train, MLP, shard_pair)


# ---- how modules are called ----------------------------------------------------------------------


class Looped(MLP):
    """Runs all its layers twice."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class Recursive(MLP):
    """Calls each layer twice in a row."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return self.head(x)


@pytest.mark.parametrize("build", [Looped, Recursive])
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_module_called_twice_gets_the_gradient_of_both_calls(
    world2: WorkerPool, name: str, build: Callable[[], nn.Module]
) -> None:
    world2.run(train, build, SHARDINGS[name])


class TwoNames(nn.Module):
    """One layer under two names, another one between its two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)).tanh())


def shard_two_names(model: Any, **options: Any) -> Any:
    fully_shard(model.a, **options)
    fully_shard(model.middle, **options)
    return fully_shard(model, **options)


def test_a_module_reachable_by_two_names_is_one_unit(pool: WorkerPool) -> None:
    pool.run(train, TwoNames, shard_two_names)
    pool.run(train, TwoNames, root)


class Ordered(MLP):
    """Runs its layers in whatever order it is told."""

    def __init__(self, n: int = 4) -> None:
        super().__init__(n)
        self.sequence = list(range(n))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.sequence:
            x = self.layers[index](x)
        return self.head(x)


def train_in_changing_order(rank: int, world_size: int, shard: Callable[..., Any]) -> None:
    model, reference = pair(Ordered, shard)
    optimizers = sgd_pair(model, reference)
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3], [2, 0], [1, 3, 1], [0, 1, 2, 3], [2]]
    for step, order in enumerate(orders):
        model.sequence = reference.sequence = order
        train_step(model, reference, rank, inputs(world_size, seed=step), optimizers=optimizers)


@pytest.mark.parametrize("name", SHARDINGS)
def test_modules_may_run_in_another_order_in_every_step(world2: WorkerPool, name: str) -> None:
    world2.run(train_in_changing_order, SHARDINGS[name])


class Retained(MLP):
    """Returns all hidden states; a loss may use some of them."""

    def forward(self, x: Tensor) -> list[Tensor]:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        states.append(self.head(x))
        return states


class Side(nn.Module):
    """The second of four units gives an output that the loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0](x)
        side = self.layers[1](x)
        return self.head(self.layers[3](self.layers[2](x))), side


def train_with_partial_losses(rank: int, world_size: int, shard: Callable[..., Any]) -> None:
    model, reference = pair(Side, shard)
    optimizers = sgd_pair(model, reference)
    losses: list[Callable[[Any, Any], Tensor]] = [
        lambda m, x: m(x)[0].pow(2).mean(),
        lambda m, x: m(x)[1].pow(2).mean(),
        lambda m, x: sum(o.pow(2).mean() for o in m(x)),  # type: ignore[arg-type, return-value]
        lambda m, x: m(x)[0].pow(2).mean(),
    ]
    for step, part in enumerate(losses):
        xs = inputs(world_size, seed=step)
        train_step(model, reference, rank, xs, loss=part, optimizers=optimizers)
    states, plain = pair(Retained, shard)
    for step in range(4):
        train_step(
            states,
            plain,
            rank,
            inputs(world_size, seed=step),
            loss=lambda m, x, step=step: m(x)[step].pow(2).mean(),  # type: ignore[misc]
        )


@pytest.mark.parametrize("name", SHARDINGS)
def test_outputs_that_the_loss_leaves_out_leave_their_unit_without_gradient(
    world2: WorkerPool, name: str
) -> None:
    world2.run(train_with_partial_losses, SHARDINGS[name])


class TwoHeads(MLP):
    """Uses ``head`` or ``aux``."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(WIDTH, CLASSES)
        self.use_aux = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.aux(x) if self.use_aux else self.head(x)


def leaf_and_aux(model: Any, **options: Any) -> Any:
    fully_shard(model.aux, **options)
    return leaf(model, **options)


def alternate_heads(rank: int, world_size: int, shard: Callable[..., Any]) -> None:
    model, reference = pair(TwoHeads, shard)
    optimizers = sgd_pair(model, reference)
    for step, use_aux in enumerate((False, True, False, True, True)):
        model.use_aux = reference.use_aux = use_aux
        train_step(model, reference, rank, inputs(world_size, seed=step), optimizers=optimizers)
        unused = model.head if use_aux else model.aux
        assert all(p.grad is None for p in unused.parameters())


@pytest.mark.parametrize("shard", [leaf_and_aux, nested, root])
def test_a_head_that_a_step_leaves_out_has_no_gradient_in_that_step(
    pool: WorkerPool, shard: Callable[..., Any]
) -> None:
    pool.run(alternate_heads, shard)


class Unused(MLP):
    """Owns a layer nobody calls and a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(5, 2))


@pytest.mark.parametrize("shard", [leaf, nested, root])
def test_a_layer_nobody_calls_and_a_parameter_nobody_uses_stay_without_gradient(
    pool: WorkerPool, shard: Callable[..., Any]
) -> None:
    pool.run(train, Unused, shard)


def never_called_unit(model: Any, **options: Any) -> Any:
    fully_shard(model.never, **options)
    return nested(model, **options)


def test_a_unit_nobody_calls_does_no_harm(world2: WorkerPool) -> None:
    world2.run(train, Unused, never_called_unit)


# ---- several forwards ----------------------------------------------------------------------------


def two_forwards_one_backward(model: Any, x: Tensor) -> Tensor:
    return loss(model, x) + loss(model, 2 * x)


def several_forwards(rank: int, world_size: int, name: str) -> None:
    model, reference = pair(MLP, SHARDINGS[name])
    optimizers = sgd_pair(model, reference)
    for step in range(3):
        xs = inputs(world_size, seed=step)
        train_step(model, reference, rank, xs, two_forwards_one_backward, optimizers)
    for step in range(2):
        xs = inputs(world_size, seed=10 + step)
        model.zero_grad()
        reference.zero_grad()
        first, second = loss(model, xs[rank]), loss(model, 2 * xs[rank])
        if step:
            first, second = second, first
        first.backward()
        second.backward()
        reference_backward(reference, xs, two_forwards_one_backward)
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("name", SHARDINGS)
def test_two_forwards_may_be_followed_by_one_backward_or_two(world2: WorkerPool, name: str) -> None:
    world2.run(several_forwards, name)


def evaluate_between_steps(rank: int, world_size: int, name: str, mode: str) -> None:
    contexts: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "grad": torch.enable_grad,
    }
    model, reference = pair(MLP, SHARDINGS[name])
    optimizers = sgd_pair(model, reference)
    for step in range(3):
        x = inputs(1, seed=100 + step)[0]
        with contexts[mode]():
            first, second = model(x), model(2 * x)
            torch.testing.assert_close(first.detach(), reference(x).detach())
            torch.testing.assert_close(second.detach(), reference(2 * x).detach())
        train_step(model, reference, rank, inputs(world_size, seed=step), optimizers=optimizers)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_evaluations_before_and_between_steps_see_new_weights_and_disturb_nothing(
    world2: WorkerPool, name: str, mode: str
) -> None:
    world2.run(evaluate_between_steps, name, mode)


class PartlyFrozenPass(MLP):
    """Its first two layers run without gradient, the first in inference's sense or not."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers[:2]:
                x = layer(x)
        for layer in self.layers[2:]:
            x = layer(x)
        return self.head(x)


def five_layers() -> nn.Module:
    return PartlyFrozenPass(5)


@pytest.mark.parametrize("name", SHARDINGS)
def test_layers_that_run_under_no_grad_inside_a_training_forward_get_no_gradient(
    world2: WorkerPool, name: str
) -> None:
    world2.run(train, five_layers, SHARDINGS[name])


def submodule_first(rank: int, world_size: int, shard: Callable[..., Any]) -> None:
    model, reference = pair(MLP, shard)
    x = inputs(1, seed=9)[0]
    assert_none_stale(model.layers[0], reference.layers[0], x)
    train_step(model.layers[1], reference.layers[1], rank, inputs(world_size), optimizers=None)
    optimizers = sgd_pair(model, reference)
    for step in range(2):
        train_step(model, reference, rank, inputs(world_size, seed=step), optimizers=optimizers)
        assert_none_stale(model.layers[2], reference.layers[2], x)


@pytest.mark.parametrize("shard", [leaf, nested, layers_only])
def test_a_submodule_may_run_and_train_before_and_between_runs_of_the_root(
    world2: WorkerPool, shard: Callable[..., Any]
) -> None:
    world2.run(submodule_first, shard)


def shard_after_a_submodule_ran(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = MLP().to(test_device())
    reference = copy.deepcopy(model)
    x = inputs(1)[0]
    for layer in model.layers:
        fully_shard(layer)
    assert_none_stale(model.layers[0], reference.layers[0], x)
    assert_none_stale(model, reference, x)
    fully_shard(model)
    for step in range(2):
        train_step(model, reference, rank, inputs(world_size, seed=step))


def test_a_root_may_be_sharded_after_its_layers_have_run(world2: WorkerPool) -> None:
    world2.run(shard_after_a_submodule_ran)


# ---- a list whose members run apart --------------------------------------------------------------


class NormAndHead(nn.Module):
    """Returns hidden states; the caller applies norm and head, whole or in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.apply_head = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.apply_head else self.norm(x)


def shard_norm_and_head(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.norm, model.head])
    return fully_shard(model)


def chunked_loss(model: Any, x: Tensor) -> Tensor:
    hidden = model(x)
    return sum(model.head(chunk).pow(2).sum() for chunk in hidden.chunk(4))  # type: ignore[return-value]


def head_in_chunks(rank: int, world_size: int) -> None:
    model, reference = pair(NormAndHead, shard_norm_and_head)
    optimizers = sgd_pair(model, reference, lr=0.01)
    for step in range(4):
        model.apply_head = reference.apply_head = step % 2 == 0
        train_step(
            model,
            reference,
            rank,
            inputs(world_size, seed=step),
            loss if step % 2 == 0 else chunked_loss,
            optimizers,
        )


def test_a_head_grouped_with_its_norm_may_be_called_alone_per_chunk(pool: WorkerPool) -> None:
    pool.run(head_in_chunks)


# ---- two models ----------------------------------------------------------------------------------


def two_models(rank: int, world_size: int, name: str) -> None:
    policy, policy_reference = pair(MLP, SHARDINGS[name])
    frozen, frozen_reference = pair(MLP, SHARDINGS[name], seed=1)
    critic, critic_reference = pair(MLP, SHARDINGS[name], seed=2)
    frozen.requires_grad_(False)
    frozen_reference.requires_grad_(False)

    def combined(models: Any, x: Tensor) -> Tensor:
        first, second, third = models
        outputs = first(x), second(x), third(x)
        return (outputs[0] - outputs[1]).pow(2).mean() + (outputs[0] * outputs[2]).mean()

    optimizers = [*sgd_pair(policy, policy_reference), *sgd_pair(critic, critic_reference)]
    for step in range(3):
        xs = inputs(world_size, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        combined((policy, frozen, critic), xs[rank]).backward()
        reference_backward((policy_reference, frozen_reference, critic_reference), xs, combined)
        assert_same_gradients(policy, policy_reference)
        assert_same_gradients(frozen, frozen_reference)
        assert_same_gradients(critic, critic_reference)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(policy, policy_reference)


@pytest.mark.parametrize("name", SHARDINGS)
def test_two_trained_models_and_a_frozen_one_interleave(world2: WorkerPool, name: str) -> None:
    world2.run(two_models, name)


def chained_models(rank: int, world_size: int) -> None:
    """One model's output is the other's input, in alternating roles (generator, critic)."""
    first, first_reference = pair(lambda: Square(), leaf)
    second, second_reference = pair(lambda: Square(), leaf, seed=1)

    def chained(models: Any, x: Tensor) -> Tensor:
        return models[1](models[0](x)).pow(2).mean()

    for step in range(4):
        order = (0, 1) if step % 2 == 0 else (1, 0)
        models = [first, second]
        references = [first_reference, second_reference]
        for model in (*models, *references):
            model.zero_grad()
        xs = inputs(world_size, seed=step)
        chained([models[i] for i in order], xs[rank]).backward()
        reference_backward([references[i] for i in order], xs, chained)
        assert_same_gradients(first, first_reference)
        assert_same_gradients(second, second_reference)


class Square(MLP):
    """Its output is as wide as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)


def test_one_model_may_feed_another_in_either_order(world2: WorkerPool) -> None:
    world2.run(chained_models)


# ---- parameters that only some ranks use ---------------------------------------------------------


class Branches(nn.Module):
    """``a`` is always used, ``b`` only when told; a wide head fills the gradient buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.use_b = True

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) if self.use_b else self.a(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branches() for _ in range(3))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def branch(rank: int, world_size: int, shard: Callable[..., Any]) -> None:
    model, reference = pair(Branching, shard)
    optimizers = sgd_pair(model, reference)
    first = {0}
    everyone = set(range(world_size))
    for step, users in enumerate((everyone, set(), first, everyone - first, set(), first)):
        xs = inputs(world_size, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.layers[1].use_b = rank in users
        loss(model, xs[rank]).backward()
        for each, x in enumerate(xs):
            reference.layers[1].use_b = each in users
            (loss(reference, x) / world_size).backward()
        assert_same_gradients(model, reference)
        assert (model.layers[1].b.weight.grad is None) is (not users)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_parameter_that_some_ranks_use_gets_its_average_on_every_rank(
    pool: WorkerPool, name: str
) -> None:
    pool.run(branch, SHARDINGS[name])


def branch_while_accumulating(rank: int, world_size: int) -> None:
    model, reference = pair(Branching, leaf)
    for step in range(3):
        xs = inputs(world_size, seed=step)
        model.layers[1].use_b = rank == step % world_size
        loss(model, xs[rank]).backward()
        for each, x in enumerate(xs):
            reference.layers[1].use_b = each == step % world_size
            (loss(reference, x) / world_size).backward()
    assert_same_gradients(model, reference)


def test_partial_use_is_right_when_gradients_accumulate_over_backwards(pool: WorkerPool) -> None:
    pool.run(branch_while_accumulating)


class Skipping(MLP):
    """May skip its second layer, or give it an empty batch."""

    mode = "run"

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == 1 and self.mode == "empty":
                x = torch.cat([layer(x[:0]), x])
            elif index != 1 or self.mode == "run":
                x = layer(x)
        return self.head(x)


def empty_batches(rank: int, world_size: int) -> None:
    model, reference = pair(Skipping, leaf)
    for step in range(2):
        xs = inputs(world_size, seed=step)
        for each in (model, reference):
            each.zero_grad()
        model.mode = "empty" if rank else "run"
        loss(model, xs[rank]).backward()
        for each, x in enumerate(xs):
            reference.mode = "empty" if each else "run"
            (loss(reference, x) / world_size).backward()
        assert_same_gradients(model, reference)


def test_an_expert_called_with_an_empty_batch_contributes_zeros(pool: WorkerPool) -> None:
    pool.run(empty_batches)


# ---- gradients that accumulate -------------------------------------------------------------------


def accumulate(rank: int, world_size: int, shard: Callable[..., Any], communicate: bool) -> None:
    model, reference = pair(MLP, shard)
    optimizers = sgd_pair(model, reference)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step != 1)
        for micro in range(3):
            xs = inputs(world_size, seed=10 * step + micro)
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(communicate or micro == 2)
            loss(model, xs[rank]).backward()
            reference_backward(reference, xs)
            if communicate:
                assert_same_gradients(model, reference)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("communicate", [True, False], ids=["communicating", "silent"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_microbatches_add_up_with_and_without_communication(
    world2: WorkerPool, name: str, communicate: bool
) -> None:
    world2.run(accumulate, SHARDINGS[name], communicate)


# ---- weights changed by anything ---------------------------------------------------------------


def change_weights(rank: int, world_size: int, how: str, name: str, reshard: bool) -> None:
    model, reference = pair(MLP, SHARDINGS[name], reshard_after_forward=reshard)
    x = inputs(1, seed=5)[0]
    assert_none_stale(model, reference, x)
    for round_ in range(2):
        if round_:
            train_step(model, reference, rank, inputs(world_size, seed=round_))
        CHANGES[how](model, reference)
        assert_none_stale(model, reference, x)
        train_step(model, reference, rank, inputs(world_size, seed=round_ + 7))
        with torch.inference_mode():
            torch.testing.assert_close(model(x), reference(x))


def both(model: Any, reference: Any) -> list[tuple[Any, Any]]:
    plain = dict(reference.named_parameters())
    return [(param, plain[name]) for name, param in model.named_parameters()]


def by_data(model: Any, reference: Any) -> None:
    for ours, plain in both(model, reference):
        ours.data.mul_(1.5)
        plain.data.mul_(1.5)


def by_no_grad(model: Any, reference: Any) -> None:
    with torch.no_grad():
        for ours, plain in both(model, reference):
            ours.add_(0.25)
            plain.add_(0.25)


def by_init(model: Any, reference: Any) -> None:
    for ours, plain in both(model, reference):
        nn.init.constant_(ours, 0.125)
        nn.init.constant_(plain, 0.125)


def by_fused(model: Any, reference: Any) -> None:
    by_optimizer(model, reference, fused=True)


def by_for_loop(model: Any, reference: Any) -> None:
    by_optimizer(model, reference, foreach=False)


def by_optimizer(model: Any, reference: Any, **options: Any) -> None:
    for each in (model, reference):
        if all(p.grad is None for p in each.parameters()):
            for param in each.parameters():
                param.grad = torch.ones_like(param)
        torch.optim.AdamW(each.parameters(), lr=0.1, **options).step()


def new_values(model: Any, reference: Any) -> None:
    for param in reference.parameters():
        param.data = param.data * 0.5 + 0.25


def sharded_state(model: Any, reference: Any) -> dict[str, Any]:
    new_values(model, reference)
    return {
        name: value * 0.5 + 0.25
        for name, value in ((n, p.detach()) for n, p in model.named_parameters())
    }


def by_load_state_dict(model: Any, reference: Any) -> None:
    model.load_state_dict(sharded_state(model, reference))


def by_load_state_dict_assign(model: Any, reference: Any) -> None:
    model.load_state_dict(sharded_state(model, reference), assign=True)


def by_full_load_state_dict(model: Any, reference: Any) -> None:
    new_values(model, reference)
    model.load_state_dict({n: p.detach().clone() for n, p in reference.named_parameters()})


def by_average_swap(model: Any, reference: Any) -> None:
    for each in (model, reference):
        backup = {n: p.detach().clone() for n, p in each.named_parameters()}
        average = {n: value * 0.9 + 0.05 for n, value in backup.items()}
        with torch.no_grad():
            for name, param in each.named_parameters():
                param.copy_(average[name])


CHANGES = {
    "data": by_data,
    "no_grad": by_no_grad,
    "nn.init": by_init,
    "fused optimizer": by_fused,
    "for-loop optimizer": by_for_loop,
    "load_state_dict": by_load_state_dict,
    "load_state_dict assign": by_load_state_dict_assign,
    "load_state_dict of full tensors": by_full_load_state_dict,
    "average of weights": by_average_swap,
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["nested", "layers only"])
def test_the_next_forward_computes_with_whatever_changed_the_weights(
    world2: WorkerPool, how: str, name: str
) -> None:
    world2.run(change_weights, how, name, True)


@pytest.mark.parametrize("how", CHANGES)
def test_a_unit_that_stays_gathered_notices_changed_weights_too(
    world2: WorkerPool, how: str
) -> None:
    world2.run(change_weights, how, "nested", False)


# ---- when parameters are given back --------------------------------------------------------------


def reshard_settings(rank: int, world_size: int, setting: str) -> None:
    options = {"reshard_after_forward": setting != "all False"}
    model, reference = pair(six_layers, nested if setting == "nested" else leaf, **options)
    if setting == "mixed":
        for module in (*model.layers[4:], model.head):
            module.set_reshard_after_forward(False)
    optimizers = sgd_pair(model, reference)
    x = inputs(1, seed=50)[0]
    for step in range(4):
        train_step(model, reference, rank, inputs(world_size, seed=step), optimizers=optimizers)
        assert_none_stale(model, reference, x)
        assert_none_stale(model, reference, 2 * x)
        if step == 0 and setting == "setter":
            model.set_reshard_after_forward(False)
        if step == 0 and setting == "after backward":
            model.set_reshard_after_backward(False)
        if step == 1 and setting in ("setter", "nested"):
            model.layers[2].set_reshard_after_forward(setting == "setter")


def six_layers() -> nn.Module:
    return MLP(6)


@pytest.mark.parametrize("setting", ["all False", "mixed", "setter", "nested", "after backward"])
def test_parameters_may_stay_gathered_by_argument_and_by_setter(
    world2: WorkerPool, setting: str
) -> None:
    world2.run(reshard_settings, setting)


def unshard_by_hand(rank: int, world_size: int) -> None:
    model, reference = pair(MLP, leaf)
    head = model.head
    for asynchronous in (False, True):
        handle = head.unshard(async_op=asynchronous)
        if handle is not None:
            handle.wait()
        torch.testing.assert_close(head.weight.detach(), reference.head.weight.detach())
        x = inputs(world_size)
        train_step(model, reference, rank, x)
        head.reshard()
        assert_none_stale(model, reference, x[0])
        assert full(head.weight.detach()).shape == reference.head.weight.shape


def test_parameters_may_be_gathered_and_given_back_by_hand(world2: WorkerPool) -> None:
    world2.run(unshard_by_hand)
