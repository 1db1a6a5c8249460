"""Mixed precision against references that cast and round by hand."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from tests.distributed.models import (
    MLP,
    assert_same_gradients,
    full,
    inputs,
    leaf,
    loss,
    nested,
    over_16_bits,
    pair,
    root,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, fully_shard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def low_gradients(reference: Any, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """One rank's gradients of a copy of the reference in another dtype."""
    low = copy.deepcopy(reference).to(dtype)
    loss(low, x.to(dtype)).backward()
    return {name: p.grad for name, p in low.named_parameters()}


def set_mean(reference: Any, per_rank: list[dict[str, Tensor]], reduce: torch.dtype) -> None:
    """The mean over ranks, summed in the reduce dtype, as the reference's gradients."""
    for name, param in reference.named_parameters():
        total = torch.zeros_like(param, dtype=reduce)
        for grads in per_rank:
            total += grads[name].to(reduce)
        param.grad = (total / len(per_rank)).to(param.dtype)


def low_compute(rank: int, world: int, low: torch.dtype, reduce: torch.dtype | None) -> None:
    for shard in (leaf, nested, root):
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce)
        model, reference = pair(MLP, shard, mp_policy=policy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        # Three 16-bit numbers have several sums, after which the weights differ too.
        exact = reduce == FP32 or world == 2
        for step in range(2 if exact else 1):
            x = inputs(world, seed=step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            value = loss(model, x[rank])
            assert value.dtype == low
            value.backward()
            set_mean(reference, [low_gradients(reference, each, low) for each in x], reduce or low)
            atol = 1e-6 if exact else over_16_bits(4e-3, world)
            assert_same_gradients(model, reference, atol=atol)
            for param in model.parameters():
                assert param.dtype == FP32
                assert param.grad.dtype == FP32
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("reduce", [FP32, None], ids=["reduced in fp32", "reduced as computed"])
@pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
def test_low_precision_compute_gives_the_gradients_of_a_model_cast_by_hand(
    pool: WorkerPool, low: torch.dtype, reduce: torch.dtype | None
) -> None:
    pool.run(low_compute, low, reduce)


def accumulate_in_reduce_dtype(rank: int, world: int) -> None:
    for quiet in (True, False):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
        model, reference = pair(MLP, nested, mp_policy=policy)
        totals = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
        for micro in range(4):
            x = inputs(world, seed=micro)
            with model.no_sync() if quiet and micro < 3 else nullcontext():
                loss(model, x[rank]).backward()
            for each in x:
                for name, grad in low_gradients(reference, each, BF16).items():
                    totals[name] += grad.float() / world
        for name, param in reference.named_parameters():
            param.grad = totals[name]
        # Sums in bf16 would be off by a hundred times that.
        assert_same_gradients(model, reference, atol=2e-6)


def test_bf16_microbatches_add_up_in_the_reduce_dtype(pool: WorkerPool) -> None:
    pool.run(accumulate_in_reduce_dtype)


class Probe(nn.Module):
    """Notes the dtypes it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *, mask: Tensor | None = None, ids: Any = None) -> Any:
        nested = ids["nested"][0] if ids else None
        self.seen = [
            x.dtype,
            None if mask is None else mask.dtype,
            None if nested is None else nested.dtype,
            self.linear.weight.dtype,
        ]
        y = self.linear(x.to(self.linear.weight.dtype))
        return {"y": y, "ids": torch.arange(3), "text": "kept"}


def casts(rank: int, world: int) -> None:
    x = torch.randn(2, 6).to(test_device()).requires_grad_()
    ids = {"nested": [torch.arange(3, device=test_device()), "text", None, 3.5]}
    mask = torch.ones(2, dtype=torch.float64, device=test_device())

    model = fully_shard(Probe(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    out = model(x, mask=mask, ids=ids)
    assert model.seen == [BF16, BF16, torch.int64, BF16]
    assert out["y"].dtype == BF16 and out["ids"].dtype == torch.int64 and out["text"] == "kept"
    out["y"].sum().backward()
    assert x.grad is not None and x.grad.dtype == FP32
    assert ids["nested"][1:] == ["text", None, 3.5]

    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False, output_dtype=FP32)
    model = fully_shard(Probe(), mp_policy=policy)
    out = model(x, mask=mask)
    assert model.seen == [FP32, torch.float64, None, BF16]
    assert out["y"].dtype == FP32 and out["ids"].dtype == torch.int64

    model = fully_shard(Probe(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    assert model(x)["y"].dtype == torch.float64
    assert model.seen[0] == FP32

    torchs = fully_shard(Probe(), mp_policy=TorchPolicy(param_dtype=BF16, output_dtype=FP32))
    assert torchs(x)["y"].dtype == FP32
    assert torchs.seen[0] == BF16


def test_inputs_and_outputs_are_cast_as_the_policy_says(world2: WorkerPool) -> None:
    world2.run(casts)


def per_module(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = MLP().to(test_device())
    reference = copy.deepcopy(model)
    low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fully_shard(model.layers[0], mp_policy=low)
    fully_shard(model.layers[1], mp_policy=MixedPrecisionPolicy(param_dtype=FP32))
    fully_shard(
        model.layers[2],
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
    )
    fully_shard(model)
    x = inputs(world)

    def by_hand(x: Tensor) -> Tensor:
        for index, layer in enumerate(reference.layers):
            if index == 1:
                x = layer(x.float())
                continue
            cast = {n: p.to(BF16) for n, p in layer.named_parameters()}
            x = torch.func.functional_call(layer, cast, (x.to(BF16),))
        return reference.head(x.float())

    for each in x:
        (by_hand(each).pow(2).mean() / world).backward()
    loss(model, x[rank]).backward()
    # The reference divides before bf16 rounds, the model after it.
    assert_same_gradients(model, reference, atol=1e-6 if world == 2 else 4e-3)


def test_every_module_follows_its_own_policy(pool: WorkerPool) -> None:
    pool.run(per_module)


class Norms(nn.Module):
    """fp32 inputs, an integer buffer and a frozen integer weight under a bf16 policy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.bytes = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        self.register_buffer("scale", torch.ones(6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.bytes.dtype == torch.uint8
        assert self.wide.dtype == BF16
        assert self.scale.dtype == FP32
        return self.linear(x) * self.scale + self.bytes + self.wide


def others_keep_their_dtype(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model = fully_shard(Norms().to(test_device()), mp_policy=policy)
    model(torch.randn(2, 6).to(test_device())).sum().backward()
    assert full(model.bytes.detach()).tolist() == list(range(6))
    assert model.wide.dtype == torch.float64


def test_integers_and_buffers_keep_their_dtype(world2: WorkerPool) -> None:
    world2.run(others_keep_their_dtype)


def changed_weights(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for shard in (leaf, nested, root):
        for options in ({}, {"reshard_after_forward": False}):
            model, reference = pair(MLP, shard, mp_policy=policy, **options)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
            x = inputs(world)

            def same(model: Any = model, reference: Any = reference, x: Tensor = x) -> None:
                low = copy.deepcopy(reference).to(BF16)
                with torch.no_grad():
                    assert torch.equal(model(x[rank]), low(x[rank].to(BF16)))

            same()
            with torch.no_grad():
                for each in (model, reference):
                    each.head.weight.zero_()
            same()
            other = MLP().state_dict()
            for each in (model, reference):
                each.load_state_dict(other if each is reference else _like(other, model))
            same()
            with torch.no_grad():
                for param, value in zip(model.parameters(), MLP().parameters(), strict=True):
                    param.copy_(value)
                torch.manual_seed(5)
            _copy(reference, model)
            same()
            loss(model, x[rank]).backward()
            set_mean(reference, [low_gradients(reference, each, BF16) for each in x], FP32)
            same()
            for optimizer in optimizers:
                optimizer.step()
            _copy(reference, model)
            same()


def _like(plain: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The plain state dict in the form of the sharded model's."""
    state = {}
    for name, value in model.state_dict().items():
        state[name] = value.clone()
        state[name].copy_(plain[name])
    return state


def _copy(reference: Any, model: Any) -> None:
    with torch.no_grad():
        for param, value in zip(reference.parameters(), model.parameters(), strict=True):
            param.copy_(full(value.detach()))


def test_weights_changed_between_two_forwards_are_what_the_second_computes_with(
    pool: WorkerPool,
) -> None:
    pool.run(changed_weights)


def load_before_backward(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested)
    x = inputs(world)
    model(x[rank])
    other = MLP().to(test_device())
    model.load_state_dict(_like(other.state_dict(), model))
    with torch.no_grad():
        torch.testing.assert_close(model(x[rank]), other(x[rank]))
    loss(model, x[rank]).backward()
    for each in x:
        (loss(other, each) / world).backward()
    assert_same_gradients(model, other)


def test_a_state_dict_loaded_before_the_backward_is_used_afterwards(world2: WorkerPool) -> None:
    world2.run(load_before_backward)


def checkpoint_dtype(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=BF16)
    model, reference = pair(MLP, leaf, mp_policy=policy)
    with torch.no_grad():
        model(inputs(world)[rank])
    for name, value in model.state_dict().items():
        assert value.dtype == FP32
        assert torch.equal(full(value), reference.state_dict()[name])


def test_state_dicts_hold_the_masters_bit_by_bit(world2: WorkerPool) -> None:
    world2.run(checkpoint_dtype)


def conversions(rank: int, world: int) -> None:
    for shard in (leaf, nested, root):
        model, reference = pair(MLP, shard)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        kept = list(model.parameters())
        x = inputs(world)
        for dtype in (torch.float64, FP32, torch.float64, BF16):
            for each in (model, reference):
                each.to(dtype)
                each.zero_grad()
            assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
            assert all(p.dtype == dtype for p in model.parameters())
            loss(model, x[rank].to(dtype)).backward()
            per_rank = [low_gradients(reference, each, dtype) for each in x]
            set_mean(reference, per_rank, dtype)
            exact = dtype != BF16 or world == 2
            atol = 1e-6 if exact else over_16_bits(1e-2, world)
            assert_same_gradients(model, reference, atol=atol)
            assert all(p.grad.dtype == dtype for p in model.parameters())
            for optimizer in optimizers:
                optimizer.step()
        model, reference = pair(MLP, shard)
        loss(model, x[rank]).backward()
        set_mean(reference, [low_gradients(reference, each, FP32) for each in x], FP32)
        model.double()
        reference.double()
        assert_same_gradients(model, reference)


def test_a_sharded_model_converted_to_another_dtype_trains_on(pool: WorkerPool) -> None:
    pool.run(conversions)


def convert_between_microbatches(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    x = inputs(world)
    with model.no_sync():
        loss(model, x[rank]).backward()
    per_rank = [low_gradients(reference, each, FP32) for each in x]
    set_mean(reference, per_rank, FP32)
    model.double()
    first = {n: p.grad.double() for n, p in reference.named_parameters()}
    reference.double()
    loss(model, x[rank].double()).backward()
    set_mean(reference, [low_gradients(reference, each, torch.float64) for each in x], FP32)
    for name, param in reference.named_parameters():
        param.grad += first[name]
    assert_same_gradients(model, reference)


def test_quiet_microbatches_survive_a_conversion(world2: WorkerPool) -> None:
    world2.run(convert_between_microbatches)


def unsupported(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="floating-point"):
        MixedPrecisionPolicy(param_dtype=torch.int8)
    with pytest.raises(TypeError, match="mp_policy"):
        fully_shard(nn.Linear(2, 2), mp_policy=BF16)  # type: ignore[arg-type]


def test_policies_that_can_not_be_followed_are_refused(world2: WorkerPool) -> None:
    world2.run(unsupported)


class Island(nn.Module):
    """Linear layers around a norm that computes in fp32 whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(x)
        self.seen = [x.dtype, self.norm.weight.dtype, y.dtype]
        return self.second(y)


def island(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model: Any = Island().to(test_device())
    reference = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fully_shard(model.norm, mp_policy=MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16))
    fully_shard(model, mp_policy=policy)
    low = copy.deepcopy(reference)
    for layer in (low.first, low.second):
        layer.to(BF16)

    def by_hand(x: Tensor) -> Tensor:
        y = low.norm(low.first(x.to(BF16)).float()).to(BF16)
        return low.second(y)

    xs = inputs(world)
    mine = model(xs[rank])
    assert model.seen == [BF16, FP32, BF16]
    assert torch.equal(mine, by_hand(xs[rank]))
    mine.float().pow(2).mean().backward()
    per_rank = []
    for x in xs:
        low.zero_grad()
        by_hand(x).float().pow(2).mean().backward()
        per_rank.append({name: p.grad.clone() for name, p in low.named_parameters()})
    set_mean(reference, per_rank, FP32)
    assert_same_gradients(model, reference, atol=1e-6)
    assert all(p.dtype == FP32 and p.grad.dtype == FP32 for p in model.parameters())


def test_a_norm_computes_in_fp32_inside_a_bf16_model(pool: WorkerPool) -> None:
    pool.run(island)


def under_autocast(rank: int, world: int) -> None:
    kind = test_device().type
    for shard in (leaf, nested, root):
        model, reference = pair(MLP, shard)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        for step in range(2):
            xs = inputs(world, seed=step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            # The cache would hand out casts of weights that lie elsewhere by then.
            for cached in (True, False):
                with torch.autocast(kind, BF16, cache_enabled=cached):
                    value = model(xs[rank])
                    assert value.dtype == BF16
                    expected = reference(xs[rank])
                assert torch.equal(value, expected)
                value.float().pow(2).mean().backward()
            for x in (*xs, *xs):
                with torch.autocast(kind, BF16):
                    expected = reference(x)
                expected.float().pow(2).mean().backward()
            for param in reference.parameters():
                param.grad /= world  # after bf16 has rounded, as the reduction divides
            assert_same_gradients(model, reference, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()


def test_autocast_around_a_sharded_model_gives_the_gradients_of_the_plain_one(
    pool: WorkerPool,
) -> None:
    pool.run(under_autocast)


def ignored_beside_bf16(rank: int, world: int) -> None:
    model: Any = Island().to(test_device())
    reference = copy.deepcopy(model)
    kept = {model.second.weight, model.second.bias}
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16), ignored_params=kept)
    assert model.second.weight in kept and model.second.weight.dtype == FP32
    model.second.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    x = inputs(world)[rank]
    first = copy.deepcopy(reference.first).to(BF16)
    norm = copy.deepcopy(reference.norm).to(BF16)
    expected = reference.second(norm(first(x.to(BF16))).float())
    mine = model(x)
    assert torch.equal(mine, expected)
    mine.sum().backward()
    expected.sum().backward()
    assert torch.equal(model.second.weight.grad, reference.second.weight.grad), "not reduced"


def test_ignored_parameters_keep_their_dtype_and_their_own_gradients(world2: WorkerPool) -> None:
    world2.run(ignored_beside_bf16)


def scaled_fp16(rank: int, world: int) -> None:
    """The scale falls until nothing overflows, on all ranks alike; then gradients are right."""
    policy = MixedPrecisionPolicy(param_dtype=FP16)
    model, reference = pair(MLP, nested, mp_policy=policy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    scaler = torch.amp.GradScaler(test_device().type, init_scale=2.0**22, growth_interval=100)
    xs, taken, skipped = inputs(world), 0, 0
    while taken < 2:
        before = full(model.head.weight.detach()).clone()
        set_mean(reference, [low_gradients(reference, x, FP16) for x in xs], FP32)
        scale = scaler.get_scale()
        scaler.scale(loss(model, xs[rank])).backward()
        scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update()
        if scaler.get_scale() < scale:
            assert torch.equal(full(model.head.weight.detach()), before)
            skipped += 1
        else:
            assert_same_gradients(model, reference, atol=4e-3)
            optimizers[1].step()
            taken += 1
        for optimizer in optimizers:
            optimizer.zero_grad()
        _copy(reference, model)
    assert 0 < skipped < 20


def test_fp16_trains_with_a_scaler_after_the_first_overflows(pool: WorkerPool) -> None:
    pool.run(scaled_fp16)
