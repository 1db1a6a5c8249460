"""Which parameters are sharded, frozen, tied, used or odd in shape, against a plain model."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.models import (
    MLP,
    assert_none_stale,
    assert_same_gradients,
    assert_same_parameters,
    full,
    inputs,
    leaf,
    loss,
    nested,
    over_16_bits,
    pair,
    reference_backward,
    root,
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import RaggedShardDTensor, fully_shard


def steps(rank: int, world: int, model: Any, reference: Any, count: int = 2, **kw: Any) -> None:
    optimizers = sgd_pair(model, reference)
    for step in range(count):
        train_step(model, reference, rank, inputs(world, seed=step), optimizers=optimizers, **kw)


# ---- frozen and trainable ------------------------------------------------------------------------


def mlp_frozen(*names: str) -> nn.Module:
    model = MLP()
    for name, param in model.named_parameters():
        if any(part in name for part in names):
            param.requires_grad_(False)
    return model


def freeze_in_group(rank: int, world: int) -> None:
    for shard in (leaf, nested, root):
        model, reference = pair(lambda: mlp_frozen("net.0.weight"), shard)
        frozen = {n: full(p).clone() for n, p in model.named_parameters() if not p.requires_grad}
        steps(rank, world, model, reference)
        for name, param in model.named_parameters():
            if name in frozen:
                assert param.grad is None
                assert torch.equal(full(param), frozen[name])


def test_frozen_and_trainable_parameters_share_a_unit(pool: WorkerPool) -> None:
    pool.run(freeze_in_group)


def frozen_block_between(rank: int, world: int) -> None:
    for names in (("layers.1.",), ("layers.0.",), ("layers.0.", "layers.1."), ("head",)):
        for shard in (leaf, nested):
            model, reference = pair(lambda names=names: mlp_frozen(*names), shard)
            steps(rank, world, model, reference)


def test_gradients_pass_through_frozen_units(pool: WorkerPool) -> None:
    pool.run(frozen_block_between)


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return self.linear(x).tanh()


class FrozenWithExtraInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TakesTwo().requires_grad_(False) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        extra = torch.ones(2, requires_grad=True, device=x.device)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, extra)
        return self.head(x)


def unused_extra_input(rank: int, world: int) -> None:
    steps(rank, world, *pair(FrozenWithExtraInput, nested))


def test_an_input_that_wants_a_gradient_and_gets_none_ends_nothing_early(world2: Any) -> None:
    world2.run(unused_extra_input)


def set_flags(model: Any, reference: Any, part: str, flag: bool) -> None:
    for each in (model, reference):
        for name, param in each.named_parameters():
            if part in name:
                param.requires_grad_(flag)


def toggle_after_sharding(rank: int, world: int) -> None:
    for shard in (leaf, nested, root):
        model, reference = pair(lambda: mlp_frozen("layers.2.", "layers.0.net.0.weight"), shard)
        x = inputs(world)
        train_step(model, reference, rank, x)
        set_flags(model, reference, "layers.1.", False)  # freezes a unit
        train_step(model, reference, rank, x)
        set_flags(model, reference, "layers.2.", True)  # unfreezes a unit
        train_step(model, reference, rank, x)
        set_flags(model, reference, "layers.0.net.0.weight", True)  # one weight of a mixed one
        train_step(model, reference, rank, x)
        set_flags(model, reference, "bias", False)  # one half of every group
        train_step(model, reference, rank, x)
        set_flags(model, reference, "", True)
        steps(rank, world, model, reference)


def test_requires_grad_switched_after_sharding_is_honoured(pool: WorkerPool) -> None:
    pool.run(toggle_after_sharding)


class TogglesInForward(nn.Module):
    """Switches flags on whatever parameter it holds while it runs, as adapters libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.train_a = True

    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.requires_grad_(self.train_a)
        self.b.requires_grad_(not self.train_a)
        return self.b(self.a(x).tanh())


def toggle_inside_forward(rank: int, world: int) -> None:
    model, reference = pair(TogglesInForward, root)
    for step, flag in enumerate((True, False, False, True)):
        model.train_a = reference.train_a = flag
        train_step(model, reference, rank, inputs(world, seed=step))
        assert model.a.weight.requires_grad is flag
        assert model.b.bias.requires_grad is not flag


def test_requires_grad_switched_inside_forward_is_honoured(pool: WorkerPool) -> None:
    pool.run(toggle_inside_forward)


def toggle_while_unsharded(rank: int, world: int) -> None:
    model, reference = pair(MLP, leaf)
    for flag in (False, True):
        model.head.unshard()
        for each in (model, reference):
            each.head.weight.requires_grad_(flag)
        train_step(model, reference, rank, inputs(world))
        assert model.head.weight.requires_grad is flag


def test_requires_grad_switched_between_unshard_and_forward_is_honoured(world2: Any) -> None:
    world2.run(toggle_while_unsharded)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.up(self.down(x)).tanh() if self.enabled else y


class Adapted(nn.Module):
    def __init__(self, n: int = 8, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LowRank() for _ in range(n))
        self.head = nn.Linear(6, 3).requires_grad_(False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def adapters(rank: int, world: int) -> None:
    for checkpointed in (False, True):
        for shard in (leaf, nested):
            model, reference = pair(lambda c=checkpointed: Adapted(checkpointed=c), shard)
            steps(rank, world, model, reference)
            trainable = [p for p in model.parameters() if p.requires_grad]
            assert len(trainable) == 16
            assert all(p.grad is not None for p in trainable)


def test_every_adapter_of_a_frozen_base_gets_its_gradient(pool: WorkerPool) -> None:
    pool.run(adapters)


def adapters_off(rank: int, world: int) -> None:
    model, reference = pair(lambda: Adapted(3), leaf)
    x = inputs(world)
    for enabled in (True, False, True):
        for each in (model, reference):
            for layer in each.layers:
                layer.enabled = enabled
        assert_none_stale(model, reference, x[rank])
    train_step(model, reference, rank, x)


def test_adapters_switched_off_for_a_reference_forward_train_on(world2: WorkerPool) -> None:
    world2.run(adapters_off)


# ---- dtypes side by side -------------------------------------------------------------------------


class MixedBlock(nn.Module):
    """bf16 base, fp32 norm and fp32 adapter in one block."""

    def __init__(self, trainable_base: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.base = nn.Linear(6, 6).bfloat16().requires_grad_(trainable_base)
        self.adapter = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.base(h.bfloat16()).float() + self.adapter(h)


class MixedModel(nn.Module):
    def __init__(self, trainable_base: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixedBlock(trainable_base) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixed_dtypes(rank: int, world: int) -> None:
    for trainable in (False, True):
        for shard in (leaf, root):
            model, reference = pair(lambda t=trainable: MixedModel(t), shard)
            for step in range(2):
                model.zero_grad()
                reference.zero_grad()
                x = inputs(world, seed=step)
                loss(model, x[rank]).backward()
                reference_backward(reference, x)
                # The reference divides by the ranks before bf16 rounds, the model after it.
                assert_same_gradients(model, reference, atol=over_16_bits(5e-3, world))
            for name, param in model.named_parameters():
                assert param.dtype == reference.get_parameter(name).dtype
                assert param.grad is None or param.grad.dtype == param.dtype


def test_bf16_weights_beside_fp32_norms_and_adapters_train(pool: WorkerPool) -> None:
    pool.run(mixed_dtypes)


class Quantised(nn.Module):
    """A byte weight that is unpacked in forward, as quantisers store it."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.arange(36, dtype=torch.uint8).view(6, 6)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.wide = nn.Linear(6, 6).double().requires_grad_(False)
        self.adapter = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x @ (self.packed.float() / 36 - 0.5)
        return self.adapter(self.wide(h.double()).float())


class Complex(nn.Module):
    """A complex filter between real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.filter = nn.Parameter(torch.randn(7, 6, dtype=torch.complex64))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.inner(x).to(torch.complex64) @ self.filter.mT).abs())


def complex_numbers(rank: int, world: int) -> None:
    model, reference = pair(Complex, root)
    assert model.filter.dtype == torch.complex64
    steps(rank, world, model, reference)


def test_complex_parameters_train(pool: WorkerPool) -> None:
    pool.run(complex_numbers)


def frozen_dtypes(rank: int, world: int) -> None:
    model, reference = pair(Quantised, root)
    for name, param in model.named_parameters():
        assert param.dtype == reference.get_parameter(name).dtype
        assert torch.equal(full(param.detach()), reference.get_parameter(name))
    steps(rank, world, model, reference)
    assert torch.equal(full(model.packed.detach()), reference.packed)


def test_frozen_bytes_and_doubles_keep_dtype_and_values(pool: WorkerPool) -> None:
    pool.run(frozen_dtypes)


# ---- tied weights --------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding of 7 words (no multiple of any world size here) tied to the head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def tied_list(model: Any) -> None:
    fully_shard([model.emb, model.head])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def tied_root(model: Any) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def tied(rank: int, world: int) -> None:
    for shard in (tied_list, tied_root, root):
        model, reference = pair(Tied, shard)
        tokens = (torch.arange(world * 5, device=test_device()) % 7).view(world, 5)
        optimizers = sgd_pair(model, reference)
        assert len(optimizers[0].param_groups[0]["params"]) == 5
        for _ in range(3):
            assert model.emb.weight is model.head.weight
            with torch.no_grad():
                torch.testing.assert_close(model(tokens[rank]), reference(tokens[rank]))
            train_step(model, reference, rank, tokens, optimizers=optimizers)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        assert model.emb.weight is model.head.weight
        train_step(model, reference, rank, tokens, optimizers=optimizers)


def test_weights_tied_inside_one_unit_stay_tied_and_train(pool: WorkerPool) -> None:
    pool.run(tied)


def tied_across(rank: int, world: int) -> None:
    model = Tied()
    fully_shard(model.emb)
    for layer in model.layers:
        fully_shard(layer)
    with pytest.raises(ValueError, match=r"'weight'.*fully_shard\(\[") as caught:
        fully_shard(model.head)
    assert "shared" in str(caught.value)
    assert type(model.head) is nn.Linear
    outer = Tied()
    fully_shard(outer.emb)
    with pytest.raises(ValueError, match=r"'head\.weight'"):
        fully_shard(outer)
    assert type(outer) is Tied
    assert not isinstance(outer.layers[0].weight, RaggedShardDTensor)


def test_weights_tied_across_units_are_refused_by_name(world2: WorkerPool) -> None:
    world2.run(tied_across)


# ---- used on some ranks only ---------------------------------------------------------------------


class Optional(nn.Module):
    """``a`` always, ``b`` on request, next to a wide head that fills the gradient slot."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.low = nn.Linear(6, 6).bfloat16()
        self.head = nn.Linear(6, 40)

    def forward(self, x: Tensor, use_b: bool, use_low: bool = False) -> Tensor:
        x = self.a(x).tanh()
        if use_b:
            x = x + self.b(x)
        if use_low:
            x = x + self.low(x.bfloat16()).float()
        return self.head(x)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Optional() for _ in range(2))
        self.wide = nn.Linear(40, 6)
        self.head = nn.Linear(6, 40)

    def forward(self, pack: tuple[Tensor, bool, bool]) -> Tensor:
        x, use_b, use_low = pack
        x = self.wide(self.layers[0](x, use_b, use_low))
        return self.head(self.wide(self.layers[1](x, use_b, use_low)))


def used_on_some_ranks(rank: int, world: int) -> None:
    for shard in (nested, root):
        model, reference = pair(Holder, shard)
        for use in (lambda r: True, lambda r: r == 0, lambda r: r > 0, lambda r: False):
            for use_low in (lambda r: False, lambda r: r == 0):
                model.zero_grad()
                reference.zero_grad()
                packs = [(inputs(world)[r], use(r), use_low(r)) for r in range(world)]
                loss(model, packs[rank]).backward()
                reference_backward(reference, packs)
                atol = over_16_bits(1e-3, world) if use_low(0) else 1e-5
                assert_same_gradients(model, reference, atol=atol)


def test_a_parameter_used_on_some_ranks_gets_its_average_on_all(pool: WorkerPool) -> None:
    pool.run(used_on_some_ranks)


def used_on_some_ranks_accumulated(rank: int, world: int) -> None:
    model, reference = pair(Holder, nested)
    for micro in range(3):
        packs = [(inputs(world, seed=micro)[r], (r + micro) % 3 == 0, False) for r in range(world)]
        model.set_requires_gradient_sync(micro == 2)
        loss(model, packs[rank]).backward()
        reference_backward(reference, packs)
    assert_same_gradients(model, reference)


def test_use_on_some_ranks_is_remembered_over_microbatches(pool: WorkerPool) -> None:
    pool.run(used_on_some_ranks_accumulated)


def unused_everywhere(rank: int, world: int) -> None:
    model, reference = pair(Holder, nested)
    for use_b in (True, False, True):
        packs = [(inputs(world)[r], use_b, False) for r in range(world)]
        train_step(model, reference, rank, packs)
        assert (model.layers[0].b.weight.grad is not None) is use_b


def test_a_parameter_no_rank_uses_keeps_no_gradient(pool: WorkerPool) -> None:
    pool.run(unused_everywhere)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, pack: tuple[Tensor, int]) -> Tensor:
        x, tokens = pack
        routed = self.layers[1](x[:tokens])
        x = torch.cat([routed, x[tokens:]])
        return self.head(self.layers[2](self.layers[0](x)))


def empty_batch(rank: int, world: int) -> None:
    for shard in (leaf, nested):
        model, reference = pair(Routed, shard)
        packs = [(inputs(world)[r], 0 if r == 1 else 3) for r in range(world)]
        optimizers = sgd_pair(model, reference)
        for _ in range(2):
            train_step(model, reference, rank, packs, optimizers=optimizers)


def test_an_expert_fed_an_empty_batch_gets_the_average_over_all_ranks(pool: WorkerPool) -> None:
    pool.run(empty_batch)


# ---- shapes --------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def small(rank: int, world: int) -> None:
    for sizes in ((1, 1, 2), (1, 2, 1), (3, 5, 7), (17, 1)):
        for options in ({}, {"shard_alignment": 8}, {"granularity": "element"}):
            for implementation in ({"fused": True}, {"foreach": True}):
                model, reference = pair(lambda s=sizes: Small(*s), leaf, **options)
                optimizers = tuple(
                    torch.optim.AdamW(m.parameters(), lr=0.1, **implementation)
                    for m in (model, reference)
                )
                x = inputs(world, 4, sizes[0])
                for _ in range(2):
                    train_step(model, reference, rank, x, optimizers=optimizers)


def test_fewer_elements_than_ranks_and_odd_sizes_train(pool: WorkerPool) -> None:
    pool.run(small)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.columns = nn.Parameter(torch.randn(4, 6).t())
        self.strided = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(1, 4).expand(6, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.columns + self.strided * self.expanded) + self.empty.sum()


def odd(rank: int, world: int) -> None:
    for granularity in ("auto", "row", "element", 5):
        model, reference = pair(Odd, root, granularity=granularity)
        for name, param in model.named_parameters():
            assert param.shape == reference.get_parameter(name).shape
            assert torch.equal(full(param.detach()), reference.get_parameter(name))
        steps(rank, world, model, reference)
        assert_same_parameters(model, reference)


def test_parameters_without_elements_or_not_contiguous_keep_values_and_train(
    pool: WorkerPool,
) -> None:
    pool.run(odd)


def granularity_by_name(rank: int, world: int) -> None:
    asked: list[str] = []

    def choose(fqn: str, param: nn.Parameter) -> Any:
        asked.append(fqn)
        return {"net.0.weight": "row", "net.2.weight": 4}.get(fqn, "element")

    model, reference = pair(MLP, leaf, granularity=choose)
    assert {"net.0.weight", "net.2.weight", "weight", "bias"} <= set(asked)
    bounds = model.layers[0].net[0].weight.ragged_placement.bounds
    assert all(bound % 6 == 0 for bound in bounds)
    bounds = model.layers[0].net[2].weight.ragged_placement.bounds
    assert all(bound % 4 == 0 for bound in bounds)
    steps(rank, world, model, reference)


def test_a_granularity_function_decides_per_parameter(pool: WorkerPool) -> None:
    pool.run(granularity_by_name)


# ---- left alone ----------------------------------------------------------------------------------


def ignored(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = MLP().to(test_device())
    reference = copy.deepcopy(model)
    kept = {"layers.0.net.0.weight", "head.bias", "layers.1.net.2.bias"}
    chosen = {model.get_parameter(name) for name in kept}
    leaf(model, ignored_params=chosen)
    x = inputs(world)
    alone = copy.deepcopy(reference)
    for _ in range(2):
        for each in (model, reference, alone):
            each.zero_grad()
        loss(model, x[rank]).backward()
        reference_backward(reference, x)
        loss(alone, x[rank]).backward()
        for name, param in model.named_parameters():
            if name in kept:
                assert param in chosen
                assert type(param) is nn.Parameter
                torch.testing.assert_close(param.grad, alone.get_parameter(name).grad)
            else:
                assert isinstance(param, RaggedShardDTensor)
                truth = reference.get_parameter(name).grad
                torch.testing.assert_close(full(param.grad), truth, atol=1e-5, rtol=1e-4)


def test_ignored_parameters_stay_as_they_are_with_local_gradients(pool: WorkerPool) -> None:
    pool.run(ignored)


def attributes(rank: int, world: int) -> None:
    model = MLP()
    model.head.weight.no_decay = True
    model.head.weight.note = {"a": 1}
    seen: list[Any] = []
    leaf(model)

    def look(module: Any, args: Any) -> None:
        seen.append((module.weight.no_decay, module.weight.note))

    model.head.register_forward_pre_hook(look)
    assert model.head.weight.no_decay is True
    assert model.head.weight.note == {"a": 1}
    loss(model, inputs(world)[rank]).backward()
    assert seen == [(True, {"a": 1})]
    model.double()
    assert model.head.weight.no_decay is True


def test_attributes_on_parameters_are_kept(world2: WorkerPool) -> None:
    world2.run(attributes)


def buffers(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model.register_buffer("rotary", torch.randn(4) + rank, persistent=False)
    model.to(test_device())
    reference = copy.deepcopy(model)
    kept = dict(model.named_buffers())
    fully_shard(model)
    x = inputs(world)[rank]
    model(x)
    reference(x)
    for name, buffer in model.named_buffers():
        assert buffer is kept[name]
        torch.testing.assert_close(buffer, reference.get_buffer(name))


def test_buffers_are_neither_sharded_nor_synchronised(world2: WorkerPool) -> None:
    world2.run(buffers)
