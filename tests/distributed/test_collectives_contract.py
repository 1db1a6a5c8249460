"""What every back end of the seam has to do, and what each does beyond that."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.models import (
    MLP,
    assert_none_stale,
    assert_same_gradients,
    inputs,
    leaf,
    loss,
    nested,
    pair,
    reference_backward,
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool, test_device, uses_nccl
from ya_fsdp import MixedPrecisionPolicy, fully_shard
from ya_fsdp.build import schedule_of
from ya_fsdp.collectives import (
    C10dCollectives,
    Call,
    Fp32AccumulatingCollectives,
    NcclBufferCollectives,
    RecordingCollectives,
    SymmetricMemoryCollectives,
    YcclCollectives,
    dividing,
    open_handle,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class FakeHandle:
    """Has the shape of a yccl handle, refuses memory it did not make, and works over gloo."""

    def __init__(self) -> None:
        self.made: dict[str, set[int]] = {"input": set(), "output": set(), "reduce": set()}
        self.calls: Counter[str] = Counter()

    def _add(self, kind: str, numel: int) -> Tensor:
        buffer = torch.full((numel,), 77.0, dtype=BF16, device=test_device())
        self.made[kind].add(buffer.untyped_storage().data_ptr())
        return buffer

    def _check(self, kind: str, tensor: Tensor) -> None:
        assert tensor.dtype == BF16
        assert tensor.untyped_storage().data_ptr() in self.made[kind], f"not a registered {kind}"

    def add_all_gather_input_buffer(self, numel: int) -> Tensor:
        return self._add("input", numel)

    def add_all_gather_output_buffer(self, numel: int) -> Tensor:
        return self._add("output", numel)

    def add_reduce_scatter_buffer(self, numel: int) -> Tensor:
        return self._add("reduce", numel)

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        self._check("input", input)
        self._check("output", output)
        self.calls["all_gather"] += 1
        parts = [torch.empty_like(input) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, input)
        output.copy_(torch.cat(parts))

    def reduce_scatter(self, buffer: Tensor) -> None:
        self._check("reduce", buffer)
        self.calls["reduce_scatter"] += 1
        whole = buffer.float()
        dist.all_reduce(whole)
        size, rank = buffer.numel() // dist.get_world_size(), dist.get_rank()
        sums = whole[rank * size : (rank + 1) * size]
        buffer.fill_(float("nan"))  # nobody may read what belongs to other ranks
        buffer[rank * size : (rank + 1) * size] = sums


def symmetric_memory() -> SymmetricMemoryCollectives:
    # All ranks of the tests share one GPU.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return SymmetricMemoryCollectives()


BACKENDS: dict[str, Callable[[], Any]] = {
    "c10d": C10dCollectives,
    "fp32": lambda: Fp32AccumulatingCollectives(C10dCollectives()),
    "recording": RecordingCollectives,
    "recording fp32": lambda: RecordingCollectives(Fp32AccumulatingCollectives(C10dCollectives())),
    "yccl": lambda: YcclCollectives(FakeHandle()),
}
if uses_nccl():  # then "c10d" is NCCL, and these have what they need
    BACKENDS["nccl buffers"] = NcclBufferCollectives
    BACKENDS["symmetric memory"] = symmetric_memory
    BACKENDS["recording symmetric"] = lambda: RecordingCollectives(symmetric_memory())


def contributions(world: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in any order and dtype; shape (world, numel)."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randint(-8, 9, (world, numel), generator=generator)
    return values.to(test_device(), dtype)


def slot(back_end: Any, numel: int, dtype: torch.dtype, purpose: str) -> Tensor:
    num_bytes = (numel * dtype.itemsize + 255) // 256 * 256
    buffer = back_end.allocate(num_bytes, test_device(), purpose)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (num_bytes,)
    return buffer[: numel * dtype.itemsize].view(dtype)


def gather(rank: int, world: int, name: str) -> None:
    back_end, group = BACKENDS[name](), world_group()
    for dtype in (FP32, BF16, FP16, torch.uint8, torch.int64):
        for numel in (16, 48):
            expected = contributions(world, numel, dtype if dtype != torch.uint8 else FP32).abs()
            expected = expected.to(dtype)
            output = slot(back_end, world * numel, dtype, "gather")
            own = output[rank * numel : (rank + 1) * numel]
            own.copy_(expected[rank])
            back_end.all_gather(output, own, group)
            assert torch.equal(output.view(world, numel), expected), (dtype, "in place")
            outside = torch.zeros(world * numel, dtype=dtype, device=test_device())
            back_end.all_gather(outside, expected[rank].clone(), group)
            assert torch.equal(outside.view(world, numel), expected), (dtype, "outside")


def reduce(rank: int, world: int, name: str) -> None:
    back_end, group = BACKENDS[name](), world_group()
    for dtype in (FP32, BF16, FP16):
        outputs = {dtype, back_end.accumulation_dtype(dtype)}
        averages = [False] + [True] * back_end.supports_average(group, dtype)
        for numel, average, out_dtype in [
            (n, a, d) for n in (16, 48) for a in averages for d in sorted(outputs, key=str)
        ]:
            values = contributions(world, world * numel, dtype)
            expected = values.double().sum(0).view(world, numel)[rank]
            if average:
                expected = expected / world
            for where in ("slot", "outside"):
                source = torch.empty(world * numel, dtype=dtype, device=test_device())
                if where == "slot":
                    source = slot(back_end, world * numel, dtype, "reduce")
                source.copy_(values[rank])
                output = torch.zeros(numel, dtype=out_dtype, device=test_device())
                if out_dtype == dtype and where == "slot":
                    output = source[rank * numel : (rank + 1) * numel]
                back_end.reduce_scatter(output, source, average, group)
                # A quotient in 16 bits may be that of a sum or a sum of quotients.
                exact = not average or world == 2
                atol = 0.0 if exact else 4 * torch.finfo(dtype).eps
                torch.testing.assert_close(
                    output, expected.to(out_dtype), rtol=0 if exact else 2**-8, atol=atol
                )
        offers = dividing(back_end, group, dtype)
        if offers is not None:
            values = contributions(world, world * 48, dtype)
            source = slot(back_end, world * 48, dtype, "reduce")
            source.copy_(values[rank])
            output = torch.zeros(48, dtype=dtype, device=test_device())
            offers.reduce_scatter_divided(output, source, 4.0, group)
            expected = values.double().sum(0).view(world, 48)[rank] / 4
            assert torch.equal(output, expected.to(dtype)), "quarters of small sums are exact"


def all_reduce(rank: int, world: int, name: str) -> None:
    back_end, group = BACKENDS[name](), world_group()
    for dtype in (FP32, BF16, torch.int32):
        values = contributions(world, 16, dtype)
        expected = {"sum": values.double().sum(0), "max": values.double().amax(0)}
        if back_end.supports_average(group, dtype):
            expected["avg"] = values.double().mean(0)
        for op, truth in expected.items():
            mine = values[rank].clone()
            back_end.all_reduce(mine, op, group)
            # NCCL divides what each rank gives before it sums.
            atol = 4 * torch.finfo(dtype).eps if op == "avg" else 0.0
            torch.testing.assert_close(mine.double(), truth, atol=atol, rtol=4e-3)


@pytest.mark.parametrize("what", [gather, reduce, all_reduce])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_back_end_gathers_and_reduces(pool: WorkerPool, name: str, what: Any) -> None:
    pool.run(what, name)


def train(rank: int, world: int, name: str, bf16: bool) -> None:
    back_end = BACKENDS[name]()
    policy = MixedPrecisionPolicy(reduce_dtype=BF16 if bf16 else None)
    for shard in (leaf, nested):
        model, reference = pair(MLP, shard, collectives=back_end, mp_policy=policy)
        if not bf16:
            optimizers = sgd_pair(model, reference)
            for step in range(3):
                xs = inputs(world, seed=step)
                train_step(model, reference, rank, xs, optimizers=optimizers)
                assert_none_stale(model, reference, xs[0])
            continue
        for step in range(3):
            xs = inputs(world, seed=step)
            model.zero_grad()
            reference.zero_grad()
            with model.no_sync():
                loss(model, xs[rank]).backward()
            loss(model, xs[rank]).backward()
            loss(model, xs[rank]).backward()  # adds to the gradient that is there
            for _ in range(3):
                reference_backward(reference, xs)
            assert_same_gradients(model, reference, atol=2e-2)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "reduced in bf16"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_trains_with_every_back_end(pool: WorkerPool, name: str, bf16: bool) -> None:
    pool.run(train, name, bf16)


def use_registered_memory(rank: int, world: int) -> None:
    handle = FakeHandle()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    model, _ = pair(MLP, leaf, collectives=YcclCollectives(handle), mp_policy=policy)
    for step in range(3):
        if step == 2:
            handle.calls.clear()
            before = {kind: len(made) for kind, made in handle.made.items()}
        loss(model, inputs(world, seed=step)[rank]).backward()
    # Four units, of which the last is still gathered when backward begins with it.
    assert handle.calls == Counter(all_gather=6, reduce_scatter=4)
    assert before == {kind: len(made) for kind, made in handle.made.items()}, "made anew"
    assert before["reduce"] == 1, "one gradient buffer is the default"


def test_yccl_moves_all_16_bit_traffic_through_its_registered_buffers(pool: WorkerPool) -> None:
    if uses_nccl():
        pytest.skip("the fake handle sums over gloo")
    pool.run(use_registered_memory)


def test_a_missing_yccl_is_named_with_the_way_out() -> None:
    assert importlib.util.find_spec("yccl") is None
    with pytest.raises(ImportError, match=r"yccl, which is not installed.*torch\.distributed"):
        open_handle(0, 0)


def test_a_yccl_handle_gets_colours_and_profiling(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    seen: dict[str, Any] = {}

    class Handle:
        def __init__(self, **options: Any) -> None:
            seen.update(options)

        def enable_profiling(self) -> None:
            seen["profile"] = True

    package = types.ModuleType("yccl")
    package.Handle = Handle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "yccl", package)
    assert isinstance(open_handle(1, 2, all_gather_stages=3, profile=True), Handle)
    assert seen == {"intra_color": 1, "inter_color": 2, "all_gather_stages": 3, "profile": True}


def no_gpu_for_it(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match=r"needs CUDA devices.*leave collectives=None"):
        pair(MLP, leaf, collectives=SymmetricMemoryCollectives())
    model, _ = pair(MLP, leaf)
    model.set_collectives(NcclBufferCollectives())
    recorded: list[str] = []
    logger = logging.getLogger("ya_fsdp")
    handler = logging.Handler()
    handler.emit = lambda record: recorded.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        loss(model, inputs(world)[rank]).backward()
    finally:
        logger.removeHandler(handler)
    assert [message for message in recorded if "no NCCL on cpu" in message] == recorded[:1]
    assert recorded


def test_what_needs_a_gpu_says_so_on_cpu(world2: WorkerPool) -> None:
    if uses_nccl():
        pytest.skip("there is one")
    world2.run(no_gpu_for_it)


def choose_per_module(rank: int, world: int) -> None:
    recorder, other = RecordingCollectives(), RecordingCollectives()
    model, reference = pair(MLP, leaf, collectives=recorder)
    model.layers[0].set_collectives(other)
    xs = inputs(world)
    train_step(model, reference, rank, xs)
    assert other.take() == {"all_gather": 2, "reduce_scatter": 1}
    assert recorder.take()["reduce_scatter"] == 3
    model.set_collectives(other, recurse=False)
    train_step(model, reference, rank, xs)
    assert other.take()["reduce_scatter"] == 1
    assert recorder.take()["reduce_scatter"] == 3
    model.set_collectives(None)
    train_step(model, reference, rank, xs)
    assert not other.calls and not recorder.calls
    model.set_collectives(other)
    train_step(model, reference, rank, xs)
    assert other.take()["reduce_scatter"] == 4


def test_collectives_are_chosen_by_call_and_by_module_between_steps(pool: WorkerPool) -> None:
    pool.run(choose_per_module)


def keep_memory_apart(rank: int, world: int) -> None:
    class Marked(C10dCollectives):
        def __init__(self) -> None:
            self.made: dict[str, set[int]] = {"gather": set(), "reduce": set()}

        def allocate(self, num_bytes: int, device: torch.device, purpose: Any) -> Tensor:
            buffer = super().allocate(num_bytes, device, purpose)
            self.made[purpose].add(buffer.untyped_storage().data_ptr())
            return buffer

        def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
            assert output.untyped_storage().data_ptr() in self.made["gather"]
            super().all_gather(output, input, group)

        def reduce_scatter(
            self, output: Tensor, input: Tensor, average: bool, group: dist.ProcessGroup
        ) -> None:
            assert input.untyped_storage().data_ptr() in self.made["reduce"]
            super().reduce_scatter(output, input, average, group)

    model, reference = pair(MLP, leaf)
    first, second = Marked(), Fp32AccumulatingCollectives(Marked())
    for index, layer in enumerate(model.layers):
        layer.set_collectives(first if index % 2 else second)
    for step in range(2):
        train_step(model, reference, rank, inputs(world, seed=step))
    model.set_collectives(second)
    for step in range(2):
        train_step(model, reference, rank, inputs(world, seed=step))


def test_a_unit_only_uses_memory_that_its_own_back_end_made(pool: WorkerPool) -> None:
    pool.run(keep_memory_apart)


def refuse(rank: int, world: int) -> None:
    class Half:
        name = "half"

        def all_gather(self) -> None: ...

    plain = MLP()
    for wrong in (Half(), C10dCollectives, "nccl"):
        with pytest.raises(TypeError, match="collectives must be an object"):
            fully_shard(plain, collectives=wrong)
    with pytest.raises(TypeError, match="it lacks keeps_memory, allocate, reduce_scatter"):
        fully_shard(plain, collectives=Half())
    model, reference = pair(MLP, leaf)
    output = loss(model, inputs(world)[rank])
    with pytest.raises(RuntimeError, match="between steps"):
        model.set_collectives(RecordingCollectives())
    output.backward()
    reference_backward(reference, inputs(world))
    assert_same_gradients(model, reference)
    assert all(u.collectives is None for u in schedule_of(model).units), "nothing was changed"


def test_what_is_no_back_end_is_refused_and_so_is_a_change_within_a_step(
    world2: WorkerPool,
) -> None:
    world2.run(refuse)


def note(rank: int, world: int) -> None:
    recorder = RecordingCollectives()
    tensor = torch.zeros(12 * world, dtype=BF16, device=test_device())
    recorder.all_gather(tensor, tensor[:12].clone(), world_group())
    recorder.all_reduce(tensor, "sum", world_group())
    gathered = 24 * (world - 1)
    assert recorder.calls == [
        Call("all_gather", 12 * world, BF16, gathered),
        Call("all_reduce sum", 12 * world, BF16, 2 * gathered),
    ]
    assert recorder.wire_bytes("all_gather") == gathered
    assert recorder.take() == {"all_gather": 1, "all_reduce sum": 1}
    assert not recorder.calls


def test_a_recording_counts_calls_and_bytes(pool: WorkerPool) -> None:
    pool.run(note)
