"""Exceptions, forwards without backward and stale reads: training goes on right, or is refused."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

import ya_fsdp
from tests.distributed.models import (
    BATCH,
    CLASSES,
    MLP,
    SHARDINGS,
    WIDTH,
    Block,
    assert_none_stale,
    full,
    inputs,
    loss,
    pair,
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool, test_device, uses_nccl
from ya_fsdp import MixedPrecisionPolicy, _torch, fully_shard
from ya_fsdp.debug import memory_report


class OutOfMemory(RuntimeError):
    """What the user's code raises."""


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise OutOfMemory("in backward")


class FragileBlock(Block):
    """Raises where it is told to."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            raise OutOfMemory("in forward")
        y = super().forward(x)
        if self.where == "after":
            raise OutOfMemory("in forward")
        return Raises.apply(y) if self.where == "backward" else y


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FragileBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def raise_and_go_on(rank: int, world_size: int, name: str, where: str, options: Any) -> None:
    model, reference = pair(Fragile, SHARDINGS[name], **options)
    optimizers = sgd_pair(model, reference)
    for index in (3, 0, 1):
        layer = model.layers[index]
        layer.where = where
        # More than once in a row, with and without a step between.
        for _ in range(2):
            with pytest.raises(OutOfMemory, match="in backward" if where == "backward" else "in f"):
                loss(model, inputs(world_size)[rank]).backward()
        layer.where = ""
        model.zero_grad()
        xs = inputs(world_size, seed=index)
        train_step(model, reference, rank, xs, optimizers=optimizers)
        assert_none_stale(model, reference, xs[0])
        train_step(model, reference, rank, xs, optimizers=optimizers)


@pytest.mark.parametrize("where", ["before", "after", "backward"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_training_goes_on_after_an_exception_of_the_user(
    pool: WorkerPool, name: str, where: str
) -> None:
    pool.run(raise_and_go_on, name, where, {})


@pytest.mark.parametrize("where", ["after", "backward"])
def test_training_of_units_that_stay_gathered_goes_on_after_an_exception(
    world2: WorkerPool, where: str
) -> None:
    world2.run(raise_and_go_on, "nested", where, {"reshard_after_forward": False})


def optimizer_step_after_exception(rank: int, world_size: int, name: str, where: str) -> None:
    model, reference = pair(Fragile, SHARDINGS[name])
    optimizers = sgd_pair(model, reference)
    train_step(model, reference, rank, inputs(world_size), optimizers=optimizers)
    model.layers[2].where = where
    with pytest.raises(OutOfMemory):
        loss(model, inputs(world_size)[rank]).backward()
    model.layers[2].where = ""
    # Nobody zeroes gradients or runs a forward: weights change while the model looks half-run.
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
        for param in reference.parameters():
            param.mul_(0.5)
    assert_none_stale(model, reference, inputs(1)[0])
    train_step(model, reference, rank, inputs(world_size, seed=3), optimizers=optimizers)


@pytest.mark.parametrize("where", ["before", "after", "backward"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_weights_changed_after_an_exception_are_what_the_next_forward_uses(
    world2: WorkerPool, name: str, where: str
) -> None:
    world2.run(optimizer_step_after_exception, name, where)


def microbatch_lost(rank: int, world_size: int, name: str) -> None:
    model, reference = pair(Fragile, SHARDINGS[name])
    units = [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]
    for module in units:
        module.set_requires_gradient_sync(False)
    loss(model, inputs(world_size)[rank]).backward()
    model.layers[1].where = "backward"
    with pytest.raises(OutOfMemory):
        loss(model, inputs(world_size)[rank]).backward()
    model.layers[1].where = ""
    for module in units:
        module.set_requires_gradient_sync(True)
    model.zero_grad()
    for step in range(2):
        train_step(model, reference, rank, inputs(world_size, seed=step))


@pytest.mark.parametrize("name", SHARDINGS)
def test_zero_grad_after_an_exception_forgets_microbatches_without_communication(
    world2: WorkerPool, name: str
) -> None:
    world2.run(microbatch_lost, name)


def forward_only(rank: int, world_size: int, name: str, reshard: bool) -> None:
    model, reference = pair(MLP, SHARDINGS[name], reshard_after_forward=reshard)
    optimizers = sgd_pair(model, reference)
    kept = []
    for step in range(3):
        kept.append(model(inputs(1, seed=step)[0]))  # its backward never comes
        xs = inputs(world_size, seed=step)
        train_step(model, reference, rank, xs, optimizers=optimizers)
        assert_none_stale(model, reference, xs[0])
        if step == 1:
            kept.clear()
    with torch.no_grad():
        for param in (*model.parameters(), *reference.parameters()):
            param.add_(0.5)
    assert_none_stale(model, reference, inputs(1)[0])


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_forward_without_a_backward_makes_nothing_stale(
    world2: WorkerPool, name: str, reshard: bool
) -> None:
    world2.run(forward_only, name, reshard)


# ---- stale reads ---------------------------------------------------------------------------------


class Steals(nn.Linear):
    """Keeps its gathered weight for later."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.weight]
        return super().forward(x)


class Stealing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Steals(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x @ self.layers[0].kept[0])


def steal(rank: int, world_size: int, name: str) -> str:
    model, _ = pair(Stealing, SHARDINGS[name])
    for layer in model.layers:
        layer.kept = []
    try:
        loss(model, inputs(world_size)[rank]).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["leaf", "nested", "layers only"])
def test_a_weight_read_after_its_unit_was_resharded_is_an_error_that_names_it(
    world2: WorkerPool, name: str
) -> None:
    for message in world2.run(steal, name):
        assert "weight" in message and "resharded" in message and "unshard()" in message


def shapes_of_released(rank: int, world_size: int) -> None:
    model, _ = pair(Stealing, SHARDINGS["layers only"])
    model.layers[0](inputs(1)[0])
    (kept,) = model.layers[0].kept
    assert kept.shape == (WIDTH, WIDTH) and kept.dtype == torch.float32 and kept.requires_grad
    for read in (lambda p: p + 1, torch.sum, lambda p: p.clone(), lambda p: p.tolist()):
        with pytest.raises(RuntimeError, match=r"weight.*resharded"):
            read(kept)  # type: ignore[operator]


def test_a_released_weight_tells_its_shape_but_not_its_values(world2: WorkerPool) -> None:
    world2.run(shapes_of_released)


def weights_changed_before_backward(rank: int, world_size: int, name: str) -> str:
    """Forward, another forward of other shape, weights changed, then the first's backward."""
    model, _ = pair(MLP, SHARDINGS[name])
    first = loss(model, inputs(world_size)[rank])
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
        model(inputs(1)[0])
    try:
        first.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["leaf", "nested"])
def test_weights_changed_between_forward_and_backward_are_no_silent_mistake(
    world2: WorkerPool, name: str
) -> None:
    for message in world2.run(weights_changed_before_backward, name):
        assert "modified by an inplace operation" in message or "changed" in message


# ---- mistakes that are refused -------------------------------------------------------------------


def bypass_everything(rank: int, world_size: int) -> None:
    """A loss of kept tensors alone, through parameters that nothing watches."""
    model, reference = pair(Bypassed, SHARDINGS["root"])
    x = inputs(world_size)[rank].requires_grad_()
    model(x)
    model.kept.sum().backward()
    with pytest.raises(RuntimeError, match="not reduced"):
        model(x)
    model.zero_grad()
    reference.zero_grad()
    for step in range(2):
        train_step(model, reference, rank, inputs(world_size, seed=step))


class Bypassed(nn.Module):
    """Keeps a tensor made with its second parameter; the first is watched, the second is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.second(x)
        return self.first(x)


def test_gradients_that_no_unit_saw_coming_are_an_error_and_not_lost(world2: WorkerPool) -> None:
    world2.run(bypass_everything)


def replaced(rank: int, world_size: int) -> None:
    model, reference = pair(MLP, SHARDINGS["leaf"])
    train_step(model, reference, rank, inputs(world_size))
    with pytest.raises(ValueError, match="is sharded already"):
        fully_shard(model.layers[0])
    train_step(model, reference, rank, inputs(world_size))


def test_a_refused_second_sharding_leaves_the_model_as_it_was(world2: WorkerPool) -> None:
    world2.run(replaced)


# ---- interrupts, memory, processes ---------------------------------------------------------------

PACKAGE = str(Path(ya_fsdp.__file__).parent)


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the n-th line of the package.

    Between the start of a collective and the wait for it, too, where gloo's own thread writes on.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self.line if name.startswith(PACKAGE) else None

    def line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self.line


def interrupted_step(model: Any, x: Tensor, at: int) -> tuple[int, bool]:
    interrupt = Interrupt(at)
    sys.settrace(interrupt)
    try:
        loss(model, x).backward()
    except KeyboardInterrupt:
        return interrupt.lines, True
    finally:
        sys.settrace(None)
    return interrupt.lines, False


def interrupt_everywhere(rank: int, world_size: int, name: str, stride: int) -> None:
    model, reference = pair(lambda: MLP(2), SHARDINGS[name])
    xs = inputs(world_size)
    for _ in range(2):
        train_step(model, reference, rank, xs)
    lines, _ = interrupted_step(model, xs[rank], 10**9)
    assert lines > 500
    for at in range(1, lines, stride):
        assert interrupted_step(model, xs[rank], at)[1]
        train_step(model, reference, rank, xs)


@pytest.mark.parametrize("name", ["leaf", "nested"])
def test_training_goes_on_after_an_interrupt_at_any_line(world2: WorkerPool, name: str) -> None:
    world2.run(interrupt_everywhere, name, 37)


class Interrupted:
    """Interrupts once between a collective's start and its end, which comes later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.at = 0
        self.threads: list[threading.Thread] = []
        for name in ("all_gather_flat", "reduce_scatter_flat", "all_to_all_flat"):
            monkeypatch.setattr(_torch, name, self._counted(getattr(_torch, name)))

    def _counted(self, collective: Callable[..., None]) -> Callable[..., None]:
        def call(output: Tensor, *args: Any) -> None:
            self.calls += 1
            if self.calls == self.at:
                late = threading.Thread(target=self._write_late, args=(output.detach(),))
                self.threads.append(late)
                late.start()
                raise KeyboardInterrupt
            collective(output, *args)

        return call

    @staticmethod
    def _write_late(output: Tensor) -> None:
        for _ in range(40):
            time.sleep(0.002)
            with torch.no_grad():
                output.fill_(7)

    def count(self, step: Callable[[], Any]) -> int:
        """Collectives of a step."""
        self.calls = 0
        step()
        return self.calls

    def interrupt(self, step: Callable[[], Any], at: int) -> None:
        """Runs a step until its collective number ``at``."""
        self.calls, self.at = 0, at
        with pytest.raises(KeyboardInterrupt):
            step()
        self.at = 0


LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "leaf": ("leaf", {}),
    "nested": ("nested", {}),
    "summed in 32 bits": (
        "nested",
        {
            "mp_policy": MixedPrecisionPolicy(
                reduce_dtype=torch.bfloat16, bit32_acc_for_bit16_reduce_scatter=True
            )
        },
    ),
    "gathered in 8 bits": ("nested", {"mp_policy": MixedPrecisionPolicy(gather_dtype=torch.int8)}),
    "over replicas": ("nested", {"shard_optimizer_over_replicas": True}),
}


def late_writes(rank: int, world_size: int, name: str) -> None:
    sharding, options = LATE[name]
    if name == "over replicas":
        axes = ("replicate", "shard")
        mesh = init_device_mesh(test_device().type, (world_size, 1), mesh_dim_names=axes)
        options = {**options, "mesh": mesh}
    model, _ = pair(lambda: MLP(2), SHARDINGS[sharding], **options)
    x = inputs(world_size)[rank]

    def step() -> None:
        model.zero_grad()
        loss(model, x).backward()

    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupted = Interrupted(monkeypatch)
        for _ in range(2):
            step()
        expected = {n: full(p.grad).clone() for n, p in model.named_parameters()}
        for at in range(1, interrupted.count(step) + 1):
            interrupted.interrupt(step, at)
            wrong = set()
            for turn in range(4):
                if turn == 3:
                    for late in interrupted.threads:
                        late.join()
                step()
                for key, param in model.named_parameters():
                    if not torch.equal(full(param.grad), expected[key]):
                        wrong.add(f"{key} in step {turn} after an interrupt in collective {at}")
            assert not wrong, wrong


@pytest.mark.parametrize("name", LATE)
def test_a_collective_that_goes_on_after_an_interrupt_writes_into_nothing_that_is_used(
    world2: WorkerPool, name: str
) -> None:
    world2.run(late_writes, name)


class TooLarge(MLP):
    """Runs out of memory on large batches, in forward or in backward."""

    where = "forward"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if len(x) > BATCH and self.where == "forward":
            raise torch.OutOfMemoryError("as if")
        if len(x) > BATCH:
            y.register_hook(out_of_memory)
        return y


def out_of_memory(_: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("as if")


def smaller_batch(rank: int, world_size: int, where: str) -> None:
    model, reference = pair(TooLarge, SHARDINGS["nested"])
    model.where = where
    optimizers = sgd_pair(model, reference)
    xs = inputs(world_size)
    train_step(model, reference, rank, xs, optimizers=optimizers)
    held = memory_report(model)
    gc.disable()
    try:
        for _ in range(3):
            model.zero_grad()
            activations: list[Any] = []
            handle = (
                model.layers[1]
                .net[0]
                .register_forward_hook(
                    lambda _, args, out, kept=activations: kept.append(weakref.ref(out))
                )
            )
            large = inputs(1, 4 * BATCH, WIDTH)[0]
            with pytest.raises(torch.OutOfMemoryError):
                loss(model, large).backward()
            handle.remove()
            assert activations and all(ref() is None for ref in activations)
            train_step(model, reference, rank, xs, optimizers=optimizers)
            assert memory_report(model) == held
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_out_of_memory_a_smaller_batch_trains_and_memory_is_back(
    world2: WorkerPool, where: str
) -> None:
    world2.run(smaller_batch, where)


class Numbers(Dataset[Tensor]):
    """Six batches of one sample; may raise at one of them."""

    def __init__(self, rank: int, world_size: int, bad: int = -1) -> None:
        self.rank, self.world_size, self.bad = rank, world_size, bad

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if index == self.bad:
            raise OutOfMemory("no such sample")
        return inputs(self.world_size, seed=index)[self.rank]


def forked_workers(rank: int, world_size: int) -> None:
    model, reference = pair(MLP, SHARDINGS["nested"])
    optimizers = sgd_pair(model, reference)

    def epoch(bad: int = -1) -> int:
        done = 0
        options: Any = {"num_workers": 1, "multiprocessing_context": "fork", "batch_size": None}
        for step, x in enumerate(DataLoader(Numbers(rank, world_size, bad), **options)):
            xs = inputs(world_size, seed=step)
            assert torch.equal(x, xs[rank].cpu())
            train_step(model, reference, rank, xs, optimizers=optimizers)
            done += 1
        return done

    # The harness's processes are daemons, which may have no children.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", False)
    assert epoch() == 6
    with pytest.raises(OutOfMemory):
        epoch(bad=3)
    assert epoch() == 6
    monkeypatch.undo()


@pytest.mark.skipif(uses_nccl(), reason="a process that uses CUDA can not be forked")
def test_training_with_forked_workers_of_a_loader_survives_its_exception(
    world2: WorkerPool,
) -> None:
    world2.run(forked_workers)
