"""Tensor subclasses with an all-gather of their own, against weights changed by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._pytree import tree_map_only

from tests.distributed.models import full
from tests.harness import WorkerPool, test_device
from ya_fsdp import MixedPrecisionPolicy, fully_shard
from ya_fsdp.build import state_of
from ya_fsdp.collectives import RecordingCollectives

BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8
aten = torch.ops.aten


class Scaled(Tensor):
    """Sent as int8 with one scale for all ranks; unsharded memory is its own."""

    KEEPS = (
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.slice.Tensor,
        aten.copy_.default,
        aten.view.default,
        aten.as_strided.default,
        aten._to_copy.default,
        aten.split.Tensor,
        aten.clone.default,
        aten.detach.default,
    )

    @staticmethod
    def __new__(cls, values: Tensor, steps: int) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            values.shape,
            strides=values.stride(),
            dtype=values.dtype,
            device=values.device,
            requires_grad=values.requires_grad,
        )

    def __init__(self, values: Tensor, steps: int) -> None:
        self.values_ = values
        self.steps = steps

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["values_"], self.steps

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], steps: int, size: Any, stride: Any) -> Any:
        return Scaled(parts["values_"], steps)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        steps = next(a.steps for a in (*args, *args[:1]) if isinstance(a, Scaled))
        plain = tree_map_only(Scaled, lambda t: t.values_, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func not in cls.KEEPS:
            return out
        return tree_map_only(Tensor, lambda t: Scaled(t, steps), out)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Module) and mp_policy.reduce_dtype in (None, FP32)
        assert outer_stride[-1] == 1 and len(outer_size) == self.dim()
        largest = self.values_.abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / self.steps
        return ((self.values_ / scale).round().to(INT8),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (elements,), (scale,) = outputs, metadata
        values = (elements.float() * scale).to(param_dtype)
        if out is not None:
            # FSDP2 leaves that to the subclass.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(values[: out.shape[0]])
            return None
        return values, (values,)

    @staticmethod
    def by_hand(weight: Tensor, steps: int) -> Tensor:
        scale = weight.abs().max() / steps
        return (weight / scale).round().to(INT8).float() * scale


class TwoParts(Tensor):
    """Sent as bf16 and what that has left, with the contract's old form of one argument."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        values = self.as_subclass(Tensor)
        high = values.to(BF16)
        return (high, (values - high).to(torch.float16)), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata is None
        if out is not None:
            high, rest = (part[: out.shape[0]] for part in outputs)  # rows past the end
            torch.add(high.to(out.dtype), rest, out=out)
            return None
        values = outputs[0].to(param_dtype) + outputs[1].to(param_dtype)
        return values, (values,)


class Passing(TwoParts):
    """The unsharded parameter is what arrived, without memory of its own."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(Tensor).to(BF16).float(),), ()

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return None if out is not None else (outputs[0], outputs)


def scaled(weight: Tensor) -> Tensor:
    return Scaled(weight, 100)


def two_parts(weight: Tensor) -> Tensor:
    return weight.as_subclass(TwoParts)


def passing(weight: Tensor) -> Tensor:
    return weight.as_subclass(Passing)


def through(kind: Any, weight: Tensor) -> Tensor:
    """What computation sees of a weight."""
    if kind is scaled:
        return Scaled.by_hand(weight, 100)
    high = weight.to(BF16)
    return high.float() if kind is passing else high + (weight - high).to(torch.float16)


class Net(nn.Module):
    """Seven rows of an extended weight (uneven on two and three ranks) between ordinary ones."""

    def __init__(self, rows: int = 7, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(5, rows)
        self.second = nn.Linear(rows, width)
        self.extra = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.second(self.first(x).relu()).relu())


def extend(model: Any, kind: Any) -> None:
    for layer in (model.first, model.second):
        layer.weight = nn.Parameter(kind(layer.weight.detach()))


def two_models(
    kind: Any, shard: Any = None, rows: int = 7, width: int = 5, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net(rows, width).to(test_device())
    model: Any = copy.deepcopy(plain)
    extend(model, kind)
    if shard is None:
        fully_shard([model.first, model.second], **options)
        fully_shard(model, **options)
    else:
        shard(model)
    return model, plain


def batches(world: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(world, 4, 5, generator=generator).to(test_device())


def low_copy(plain: Any, kind: Any) -> Any:
    low = copy.deepcopy(plain)
    with torch.no_grad():
        for layer in (low.first, low.second):
            layer.weight.copy_(through(kind, layer.weight))
    return low


def train(rank: int, world: int, kind: Any, reshard: bool) -> None:
    model, plain = two_models(kind, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(4):
        xs = batches(world, step)
        low = low_copy(plain, kind)
        torch.stack([low(x).pow(2).mean() for x in xs]).mean().backward()
        optimizer.zero_grad()
        if step == 2:
            with model.no_sync():
                model(xs[rank]).pow(2).mean().backward()
            for other in low.parameters():
                other.grad *= 2
        if step == 3:
            with torch.no_grad():
                torch.testing.assert_close(model(xs[rank]), low(xs[rank]))
        value = model(xs[rank]).pow(2).mean()
        torch.testing.assert_close(value, low(xs[rank]).pow(2).mean())
        value.backward()
        for (name, param), other in zip(model.named_parameters(), low.parameters(), strict=True):
            assert type(param.detach().to_local()) is Tensor, "optimizers see plain values"
            torch.testing.assert_close(full(param.grad), other.grad, atol=1e-6, rtol=1e-4, msg=name)
        optimizer.step()
        with torch.no_grad():
            for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
                param.copy_(full(mine))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [scaled, two_parts, passing])
def test_gradients_are_those_of_a_model_with_the_weights_that_arrive(
    any_pool: WorkerPool, kind: Any, reshard: bool
) -> None:
    any_pool.run(train, kind, reshard)


def beside_torch(rank: int, world: int) -> None:
    """Torch's own FSDP2 gives the same losses with the same subclass."""

    def shard(model: Any) -> None:
        torch_fully_shard([model.first, model.second])
        torch_fully_shard(model)

    ours, _ = two_models(scaled, rows=5 * world, width=2 * world)
    theirs, _ = two_models(scaled, shard, rows=5 * world, width=2 * world)
    losses: list[list[float]] = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses.append([])
        for step in range(3):
            value = model(batches(world, step)[rank]).pow(2).mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(value.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_losses_are_those_of_fsdp2_with_the_same_subclass(world2: WorkerPool) -> None:
    world2.run(beside_torch)


def traffic(rank: int, world: int) -> None:
    recorder = RecordingCollectives()
    policy = MixedPrecisionPolicy(param_dtype=BF16, all_gather_dtype_to_param_cls={INT8: Scaled})
    model, plain = two_models(scaled, rows=8 * world, collectives=recorder, mp_policy=policy)
    with torch.no_grad():
        model(batches(world, 0)[rank])
    sent = {(c.dtype, c.numel) for c in recorder.calls if c.kind == "all_gather"}
    assert (INT8, 8 * world * 5) in sent and any(d == BF16 for d, _ in sent)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(full(state[name]), value), "checkpoints hold the masters"


def test_several_dtypes_travel_in_one_module(any_pool: WorkerPool) -> None:
    if any_pool.world_size == 1:
        pytest.skip("one rank sends nothing")
    any_pool.run(traffic)


class Wide(nn.Parameter):
    """A parameter that wants fp32 in a bf16 model."""


class Packed(nn.Parameter):
    """A parameter that wants to travel in 8 bits."""


def by_class(rank: int, world: int) -> None:
    model: Any = nn.Linear(32, 64).to(test_device())
    model.bias = Wide(model.bias.detach())
    model.weight = Packed(model.weight.detach())
    truth = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        reduce_dtype=FP32,
        all_gather_dtype_to_param_cls={FP32: Wide, INT8: Packed},
    )
    fully_shard(model, mp_policy=policy)
    model.unshard()
    assert torch.equal(model.bias, truth["bias"])
    assert model.weight.dtype == BF16
    error = (model.weight.float() - truth["weight"]).abs().max()
    assert 0 < error < truth["weight"].abs().max() / 127
    wires = {g.params[0].fqn: g.dtypes.wire for g in state_of(model).unit.groups}
    assert wires == {"weight": INT8, "bias": None}


def test_parameters_of_a_class_are_gathered_in_the_dtype_of_the_class(world2: WorkerPool) -> None:
    world2.run(by_class)


def replicated(rank: int, world: int) -> None:
    mesh = init_device_mesh(test_device().type, (2, 2))
    model, plain = two_models(scaled, mesh=mesh)
    xs = batches(world, 0)
    low = low_copy(plain, scaled)
    torch.stack([low(x).pow(2).mean() for x in xs]).mean().backward()
    model(xs[rank]).pow(2).mean().backward()
    for param, other in zip(model.parameters(), low.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), other.grad, atol=1e-6, rtol=1e-4)


def test_replicas_gather_over_their_own_ranks(world4: WorkerPool) -> None:
    world4.run(replicated)


def refuse(rank: int, world: int) -> None:
    class Half(Tensor):
        def fsdp_pre_all_gather(self, mesh: Any) -> None: ...

    class Odd(TwoParts):
        def fsdp_pre_all_gather(self, mesh: Any, other: Any) -> None: ...  # type: ignore[override]

    def sharded(kind: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4))
        model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(kind))
        fully_shard(model)

    with pytest.raises(ValueError, match=r"'0\.weight' is a Half, which lacks fsdp_post_all_gath"):
        sharded(Half)
    with pytest.raises(ValueError, match=r"Odd\.fsdp_pre_all_gather of parameter '0\.weight'"):
        sharded(Odd)
    policy = MixedPrecisionPolicy(all_gather_dtype_to_param_cls={BF16: Scaled})
    model, _ = two_models(scaled, mp_policy=policy)
    with pytest.raises(RuntimeError, match=r"'first\.weight' is gathered in torch\.int8, but"):
        model(batches(world, 0)[rank])


def test_half_a_contract_and_a_wrong_dtype_are_named(world2: WorkerPool) -> None:
    world2.run(refuse)


def convert(rank: int, world: int) -> None:
    model, plain = two_models(two_parts)
    xs = batches(world, 0)
    for dtype in (torch.float64, FP32):
        model.to(dtype)
        plain.to(dtype)
        assert all(p.dtype == dtype for p in model.parameters())
        with torch.no_grad():
            torch.testing.assert_close(
                model(xs[rank].to(dtype)), plain(xs[rank].to(dtype)), atol=1e-5, rtol=1e-4
            )
    released = [p for g in state_of(model.first).unit.groups for p in g.params]
    assert all(t.untyped_storage().nbytes() == 0 for p in released for t in own_memory(p))


def own_memory(param: Any) -> list[Tensor]:
    return [param.unsharded.data] if param.extension is not None else []


def test_a_conversion_keeps_the_subclass_and_release_frees_its_memory(world2: WorkerPool) -> None:
    world2.run(convert)
