"""What users do with autograd: graphs kept and differentiated twice, containers, checkpointing."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.models import (
    CLASSES,
    MLP,
    SHARDINGS,
    WIDTH,
    Block,
    assert_same_gradients,
    full,
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
from tests.harness import WorkerPool
from ya_fsdp import MixedPrecisionPolicy, fully_shard

# ---- graphs that are kept, differentiated twice, or only in part ---------------------------------


def keep_graph(rank: int, world_size: int, name: str, reshard: bool) -> None:
    model, reference = pair(MLP, SHARDINGS[name], reshard_after_forward=reshard)
    for step in range(2):
        xs = inputs(world_size, seed=step)
        model.zero_grad()
        reference.zero_grad()
        output = model(xs[rank])
        output.pow(2).sum().backward(retain_graph=True)
        output.sum().backward()
        reference_backward(reference, xs, lambda m, x: m(x).pow(2).sum() + m(x).sum())
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_two_backwards_of_one_graph_add_up(world2: WorkerPool, name: str, reshard: bool) -> None:
    world2.run(keep_graph, name, reshard)


class Forked(MLP):
    """Two heads on the same hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return self.head(x), self.aux(x)


def shard_forked(model: Any) -> Any:
    fully_shard(model.aux)
    return leaf(model)


def one_backward_per_head(rank: int, world_size: int, shard: Callable[..., Any]) -> None:
    model, reference = pair(Forked, shard)
    xs = inputs(world_size)
    first, second = model(xs[rank])
    first.pow(2).mean().backward(retain_graph=True)
    second.pow(2).mean().backward()
    reference_backward(reference, xs, lambda m, x: sum(o.pow(2).mean() for o in m(x)))
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("shard", [shard_forked, nested, root])
def test_two_heads_may_each_have_a_backward_of_their_own(
    world2: WorkerPool, shard: Callable[..., Any]
) -> None:
    world2.run(one_backward_per_head, shard)


class Smooth(nn.Module):
    """Four tanh layers and a linear one, twice differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.pow(2).sum()


def penalise_gradient(rank: int, world_size: int, shard: Callable[..., Any], way: str) -> str:
    options = {"reshard_after_forward": way == "default"}
    model, reference = pair(lambda: Smooth().double(), shard, **options)
    if way == "kept":
        model.set_reshard_after_backward(False)
    for step in range(2):
        xs = inputs(world_size, seed=step, dtype=torch.float64)
        model.zero_grad()
        reference.zero_grad()
        try:
            gradient_penalty(model, xs[rank]).backward()
        except RuntimeError as error:
            return str(error)
        reference_backward(reference, xs, gradient_penalty)
        assert_same_gradients(model, reference)
    return ""


@pytest.mark.parametrize("shard", [leaf, nested, root])
def test_second_order_gradients_are_right_when_parameters_stay_gathered(
    world2: WorkerPool, shard: Callable[..., Any]
) -> None:
    assert world2.run(penalise_gradient, shard, "kept") == ["", ""]


@pytest.mark.parametrize("shard", [leaf, nested, root])
def test_second_order_gradients_are_right_or_refused_by_default(
    world2: WorkerPool, shard: Callable[..., Any]
) -> None:
    for message in world2.run(penalise_gradient, shard, "default"):
        assert message == "" or "modified by an inplace operation" in message


def gradient_of_input_only(rank: int, world_size: int, name: str) -> None:
    model, reference = pair(MLP, SHARDINGS[name])
    x = inputs(world_size)[rank].requires_grad_()
    plain = x.detach().clone().requires_grad_()
    (ours,) = torch.autograd.grad(model(x).sum(), x)
    (truth,) = torch.autograd.grad(reference(plain).sum(), plain)
    torch.testing.assert_close(ours, truth)
    assert all(p.grad is None for p in model.parameters())
    for step in range(2):
        train_step(model, reference, rank, inputs(world_size, seed=step))


@pytest.mark.parametrize("name", SHARDINGS)
def test_the_gradient_of_an_input_alone_fills_no_parameter_gradient(
    world2: WorkerPool, name: str
) -> None:
    world2.run(gradient_of_input_only, name)


def inputs_that_require_grad(rank: int, world_size: int, name: str) -> None:
    model, reference = pair(MLP, SHARDINGS[name])
    for step in range(3):
        xs = inputs(world_size, seed=step)
        x = xs[rank].clone().requires_grad_()
        plain = xs[rank].clone().requires_grad_()
        model.zero_grad()
        loss(model, x).backward()
        loss(reference, plain).backward()
        torch.testing.assert_close(x.grad, plain.grad)
        reference.zero_grad()
        reference_backward(reference, xs)
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("name", SHARDINGS)
def test_inputs_that_require_grad_get_their_own_gradient(world2: WorkerPool, name: str) -> None:
    world2.run(inputs_that_require_grad, name)


# ---- outputs that are more than a tensor ---------------------------------------------------------


class Keeper(nn.Module):
    """Keeps one result and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.used(x)
        return x * 2


class Keepers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeper() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of_kept(model: Any, x: Tensor) -> Tensor:
    model(x)
    return sum(layer.kept.pow(2).mean() for layer in model.layers)  # type: ignore[return-value]


def train_on_kept(rank: int, world_size: int, name: str) -> str:
    model, reference = pair(Keepers, SHARDINGS[name])
    for step in range(2):
        xs = inputs(world_size, seed=step)
        model.zero_grad()
        reference.zero_grad()
        try:
            loss_of_kept(model, xs[rank]).backward()
        except RuntimeError as error:
            message = str(error)
            model.zero_grad()
            reference.zero_grad()
            train_step(model, reference, rank, xs, loss)
            return message
        reference_backward(reference, xs, loss_of_kept)
        assert_same_gradients(model, reference)
    return ""


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_loss_of_tensors_that_are_no_outputs_is_right_or_refused(
    world2: WorkerPool, name: str
) -> None:
    for message in world2.run(train_on_kept, name):
        assert message == ""


class ViewOut(nn.Module):
    """Returns a view of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.sin()).unsqueeze(0).squeeze(0)


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ViewOut() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            out += x
            x = out
        return self.head(x)


def train(rank: int, world_size: int, build: Any, shard: Callable[..., Any], **kw: Any) -> None:
    model, reference = pair(build, shard)
    optimizers = sgd_pair(model, reference)
    for step in range(3):
        xs = inputs(world_size, seed=step)
        train_step(model, reference, rank, xs, optimizers=optimizers, **kw)


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_view_that_is_edited_in_place_keeps_its_gradient(world2: WorkerPool, name: str) -> None:
    world2.run(train, AddsInPlace, SHARDINGS[name])


# ---- containers ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Out:
    y: Tensor
    note: str = "unchanged"


Named = namedtuple("Named", ["y", "extra"])


@dataclasses.dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Dict and dataclass in one, as Hugging Face's outputs are."""

    y: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


class Custom:
    """A class of the user's that nothing knows."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": lambda y: Out(y),
    "namedtuple": lambda y: Named(y, {"k": 3}),
    "model output": lambda y: ModelOutput(y=y, hidden=(y, y)),
    "nested": lambda y: {"a": [None, (y, "text", 3)], "b": torch.arange(3)},
    "custom class": lambda y: Custom(y),
    "slots": lambda y: Slotted(y),
}


def unwrap(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict) and "a" in value:
        assert value["a"][0] is None and value["a"][1][1:] == ("text", 3)
        assert value["b"].tolist() == [0, 1, 2]
        return value["a"][1][0]
    assert getattr(value, "note", "unchanged") == "unchanged"
    if isinstance(value, ModelOutput):
        assert value["y"] is value.y and value[0] is value.y
        assert value.hidden is not None and value.hidden[0].shape == value.y.shape
    return value.y


class Wrapped(nn.Module):
    """Takes and returns containers of one kind, in its layers and as a whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WrappedBlock(kind) for _ in range(4))
        self.head = WrappedBlock(kind)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WrappedBlock(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any) -> Any:
        result = WRAPS[self.kind](super().forward(unwrap(x)))
        assert isinstance(x, Tensor) or type(x) is type(result)
        return result


def train_wrapped(rank: int, world_size: int, kind: str, name: str, dtype: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype)
    model, reference = pair(lambda: Wrapped(kind), SHARDINGS[name], mp_policy=policy)
    plain = WRAPS[kind](inputs(1)[0])
    assert type(model(plain)) is type(plain)
    assert unwrap(model(plain)).dtype == (dtype or torch.float32)

    def wrapped_loss(m: Any, x: Tensor) -> Tensor:
        return unwrap(m(WRAPS[kind](x))).float().pow(2).mean()

    for step in range(2):
        xs = inputs(world_size, seed=step)
        model.zero_grad()
        reference.zero_grad()
        wrapped_loss(model, xs[rank]).backward()
        reference_backward(reference, xs, wrapped_loss)
        # bfloat16 has eight bits: gradients agree to a few per cent of the largest.
        assert_same_gradients(model, reference, atol=1e-5 if dtype is None else 0.05)


# Objects of unknown classes are searched for tensors, never rebuilt in another dtype.
CONTAINERS = [(kind, None) for kind in WRAPS] + [
    (kind, torch.bfloat16) for kind in WRAPS if kind not in ("custom class", "slots")
]


@pytest.mark.parametrize("kind, dtype", CONTAINERS)
def test_inputs_and_outputs_may_be_containers_of_any_kind(
    world2: WorkerPool, kind: str, dtype: Any
) -> None:
    world2.run(train_wrapped, kind, "leaf", dtype)
    world2.run(train_wrapped, kind, "nested", dtype)


class KeywordOnly(nn.Module):
    """Takes keywords only and returns what it was given along with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor, cfg: Any = None, items: Any = ()) -> dict[str, Any]:
        return {"y": self.net(x), "n": 3, "s": "t", "none": None, "cfg": cfg, "items": items}


def keywords(rank: int, world_size: int) -> None:
    model, reference = pair(KeywordOnly, root)
    cfg = object()
    items = [1, ("a", None), torch.arange(2)]
    output = model(x=inputs(1)[0], cfg=cfg, items=items)
    assert output["cfg"] is cfg and output["items"] is items
    assert (output["n"], output["s"], output["none"]) == (3, "t", None)
    for step in range(2):
        train_step(
            model,
            reference,
            rank,
            inputs(world_size, seed=step),
            lambda m, x: m(x=x.clone().requires_grad_(), cfg=cfg, items=items)["y"].pow(2).mean(),
        )


def test_keywords_and_values_that_are_no_tensors_pass_unchanged(world2: WorkerPool) -> None:
    world2.run(keywords)


class Writing(Block):
    """Writes its result into a dict that all layers share."""

    def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
        x = super().forward(x)
        cache[f"layer {len(cache)}"] = x
        return x


class SharedCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writing() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache=cache)
        return self.head(x)


def share_cache(rank: int, world_size: int, name: str, dtype: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model, _ = pair(SharedCache, SHARDINGS[name], mp_policy=policy)
    cache: dict[str, Any] = {}
    output = model(inputs(world_size)[rank].requires_grad_(), cache=cache)
    assert list(cache) == ["layer 0", "layer 1", "layer 2"]
    assert cache["layer 2"].requires_grad and cache["layer 2"].shape == (4, WIDTH)
    output.float().sum().backward()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_dict_that_layers_write_to_stays_the_callers(
    world2: WorkerPool, name: str, dtype: Any
) -> None:
    world2.run(share_cache, name, dtype)


def loss_of_cache(model: Any, x: Tensor) -> Tensor:
    cache: dict[str, Any] = {}
    output = model(x, cache=cache)
    return output.pow(2).mean() + sum(value.pow(2).mean() for value in cache.values())


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_loss_may_use_what_layers_wrote_to_a_dict(world2: WorkerPool, name: str) -> None:
    world2.run(train, SharedCache, SHARDINGS[name], loss=loss_of_cache)


# ---- activation checkpointing --------------------------------------------------------------------


class Checkpointed(MLP):
    """Recomputes every layer; the wrapper is outside the units."""

    def __init__(self, reentrant: bool, preserve: bool = True) -> None:
        super().__init__(4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class InsideBlock(Block):
    """Recomputes its own body; the wrapper is inside the unit."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.net, x, use_reentrant=self.reentrant)


class CheckpointedInside(MLP):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(InsideBlock(reentrant) for _ in range(4))


class CheckpointedTwice(MLP):
    """One wrapper spans two layers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for first in (0, 2):
            x = checkpoint(self.two, x, first, use_reentrant=self.reentrant)
        return self.head(x)

    def two(self, x: Tensor, first: int) -> Tensor:
        return self.layers[first + 1](self.layers[first](x))


def train_checkpointed(
    rank: int, world_size: int, build: Any, name: str, reentrant: bool, reshard: bool
) -> None:
    model, reference = pair(
        lambda: build(reentrant), SHARDINGS[name], reshard_after_forward=reshard
    )
    optimizers = sgd_pair(model, reference)
    for step in range(3):
        xs = inputs(world_size, seed=step)
        train_step(
            model, reference, rank, xs, lambda m, x: loss(m, x.clone().requires_grad_()), optimizers
        )
        if step == 1 and not reentrant:  # which warns about inputs without gradient
            with torch.no_grad():
                torch.testing.assert_close(model(xs[0]), reference(xs[0]))


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("build", [Checkpointed, CheckpointedInside, CheckpointedTwice])
@pytest.mark.parametrize("name", SHARDINGS)
def test_recomputed_activations_give_the_same_gradients(
    world2: WorkerPool, name: str, build: Any, reentrant: bool, reshard: bool
) -> None:
    world2.run(train_checkpointed, build, name, reentrant, reshard)


# ---- torch.compile -------------------------------------------------------------------------------


class Compiled(MLP):
    """Its layers are compiled before they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="aot_eager")


def count_compilations(function: Callable[[], None]) -> int:
    before = dict(torch._dynamo.utils.counters["stats"])
    function()
    after = torch._dynamo.utils.counters["stats"]
    return after["unique_graphs"] - before.get("unique_graphs", 0)


def train_compiled(rank: int, world_size: int, shard: Callable[..., Any], what: str) -> None:
    torch._dynamo.reset()
    # Dynamo hides a warning of its own in a way that does not work where warnings are errors.
    warnings.simplefilter("ignore")
    model, reference = pair(Compiled if what == "layers" else MLP, shard)
    for layer in reference.layers:
        layer._compiled_call_impl = None
    runs = torch.compile(model, backend="aot_eager") if what == "model" else model
    optimizers = sgd_pair(model, reference)

    def step(seed: int) -> None:
        xs = inputs(world_size, seed=seed)
        for each in optimizers:
            each.zero_grad()
        loss(runs, xs[rank]).backward()
        reference_backward(reference, xs)
        assert_same_gradients(model, reference)
        for each in optimizers:
            each.step()

    first = count_compilations(lambda: step(0))
    assert first > 0 or what == "model"
    step(1)
    assert count_compilations(lambda: step(2)) == 0
    assert count_compilations(lambda: step(3)) == 0


@pytest.mark.parametrize("what", ["layers", "model"])
@pytest.mark.parametrize("shard", [leaf, nested])
def test_compiled_layers_and_models_train_and_compile_once(
    world2: WorkerPool, shard: Callable[..., Any], what: str
) -> None:
    world2.run(train_compiled, shard, what)


# ---- weights used outside ------------------------------------------------------------------------


def weight_outside(rank: int, world_size: int) -> str:
    model, reference = pair(MLP, leaf)
    x = inputs(world_size)
    train_step(model, reference, rank, x)
    hidden = x[rank]
    try:
        torch.nn.functional.linear(hidden, model.head.weight)
    except (RuntimeError, NotImplementedError) as error:
        message = str(error)
    else:
        message = "no error"
    expected = torch.nn.functional.linear(hidden, reference.head.weight)
    actual = torch.nn.functional.linear(hidden, full(model.head.weight.detach()))
    torch.testing.assert_close(actual, expected)
    return message


def test_a_weight_used_outside_its_units_forward_is_an_error_with_the_way_out(
    world2: WorkerPool,
) -> None:
    for message in world2.run(weight_outside):
        assert "sharded" in message and ("full_tensor" in message or "unshard" in message)
