"""Bad arguments: the right exception, the value, the name, the remedy, and nothing half done."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.distributed.models import (
    MLP,
    assert_none_stale,
    inputs,
    leaf,
    nested,
    pair,
    sgd_pair,
    train_step,
)
from tests.harness import WorkerPool, test_device
from ya_fsdp import (
    RaggedShardDTensor,
    YaFSDPModule,
    fully_shard,
    register_fsdp_forward_method,
)


def untouched(model: nn.Module, before: list[Any], classes: list[type]) -> None:
    """No parameter, class or hook of the model has changed, and it trains as it did."""
    assert [type(m) for m in model.modules()] == classes
    now = list(model.parameters())
    assert len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    for param in now:
        assert not isinstance(param, RaggedShardDTensor)
        _ = param.grad
    for module in model.modules():
        assert not module._state_dict_pre_hooks
        assert "_ya_fsdp_state" not in vars(module)


def mesh2() -> Any:
    return init_device_mesh("cpu", (2,))


def raising(fqn: str, param: nn.Parameter) -> str:
    if "head" in fqn:
        raise ZeroDivisionError("the user's own")
    return "row"


class Scalar(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


class Mixed(MLP):
    """Two groups, of which the second is the one that can not be planned."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bfloat16()


class WithDTensor(MLP):
    def __init__(self) -> None:
        super().__init__()
        weight = distribute_tensor(self.head.weight.detach(), mesh2(), [Shard(0)])
        self.head.weight = nn.Parameter(weight)


class WithTensorParallel(MLP):
    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(self, mesh["tp"], {"head": ColwiseParallel()})


def sparse_weight() -> nn.Module:
    model = MLP()
    model.head.weight = nn.Parameter(torch.eye(3, 6).to_sparse())
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4))


def data_parallel() -> nn.Module:
    return nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(test_device())))


Case = tuple[Callable[[], Any], dict[str, Any], type[BaseException], str]

BAD: dict[str, Case] = {
    "reshard int": (MLP, {"reshard_after_forward": 5}, ValueError, r"=5 of MLP.*divide"),
    "reshard text": (MLP, {"reshard_after_forward": "yes"}, TypeError, "'yes'"),
    "policy": (MLP, {"mp_policy": torch.bfloat16}, TypeError, r"MixedPrecision.*bfloat16"),
    "mesh type": (MLP, {"mesh": 2}, TypeError, "DeviceMesh"),
    "alignment zero": (MLP, {"shard_alignment": 0}, ValueError, r"positive.*0"),
    "alignment text": (MLP, {"shard_alignment": "8"}, ValueError, "'8'"),
    "granularity word": (MLP, {"granularity": "column"}, ValueError, "'column'"),
    "granularity zero": (MLP, {"granularity": 0}, ValueError, "0"),
    "granularity of one": (
        MLP,
        {"granularity": lambda fqn, p: 1.5 if fqn == "head.bias" else "row"},
        (TypeError, ValueError),  # type: ignore[dict-item]
        r"head\.bias.*1\.5|1\.5.*head\.bias",
    ),
    "granularity raises": (Mixed, {"granularity": raising}, ZeroDivisionError, "the user's own"),
    "ignored names": (MLP, {"ignored_params": ["head.weight"]}, TypeError, "'head.weight'"),
    "ignored one": (
        MLP,
        {"ignored_params": torch.ones(3)},
        TypeError,
        "ignored_params",
    ),
    "sync of replicas": (MLP, {"sync_replicas": None}, TypeError, "sync_replicas.*None"),
    "scalar": (Scalar, {}, ValueError, r"'temperature'.*reshape\(1\).*ignored_params"),
    "tensor parallel": (
        WithTensorParallel,
        {},
        ValueError,
        r"'head\.weight'.*DTensor.*ignored_params",
    ),
    "a DTensor": (WithDTensor, {}, ValueError, r"'head\.weight'.*DTensor.*ignored_params"),
    "sparse": (sparse_weight, {}, ValueError, r"'head\.weight'.*sparse.*to_dense"),
    "lazy": (lazy, {}, ValueError, r"'0\.weight' has no shape yet.*dry run"),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True)),
        {},
        ValueError,
        r"Embedding\(4, 2, sparse=True\).*sparse=False",
    ),
    "rows rescaled in forward": (
        lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)),
        {},
        ValueError,
        r"Embedding\(4, 2, max_norm=1\.0\) rewrites its weight.*optimizer",
    ),
    "data parallel": (data_parallel, {}, ValueError, "DistributedDataParallel.*inside it"),
    "a list": (lambda: nn.ModuleList([nn.Linear(2, 2)]), {}, ValueError, r"ModuleList.*no forward"),
    "a dict": (lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}), {}, ValueError, "ModuleDict"),
}


def scripted(rank: int, world: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's own
        model = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"scripted.*torch\.compile"):
        fully_shard(model)


def test_a_scripted_module_is_refused(world2: WorkerPool) -> None:
    world2.run(scripted)


def refuse(rank: int, world: int) -> None:
    wrong = []
    for name, (build, options, kind, pattern) in BAD.items():
        model = build()
        before, classes = list(model.parameters()), [type(m) for m in model.modules()]
        try:
            with pytest.raises(kind, match=pattern):
                fully_shard(model, **options)
            untouched(model, before, classes)
        except BaseException as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_bad_arguments_are_refused_by_value_and_change_nothing(world2: WorkerPool) -> None:
    world2.run(refuse)


def refuse_modules(rank: int, world: int) -> None:
    for bad, kind, pattern in (
        ([], ValueError, "empty list"),
        (3, TypeError, "nn.Module"),
        ([nn.Linear(2, 2), "head"], TypeError, "nn.Module"),
        (None, TypeError, "nn.Module"),
    ):
        with pytest.raises(kind, match=pattern):
            fully_shard(bad)  # type: ignore[call-overload]
    one = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="twice"):
        fully_shard([one, one])
    assert type(one) is nn.Linear
    fully_shard(one)
    with pytest.raises(ValueError, match="FSDPLinear is sharded already"):
        fully_shard(one)
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard([other, one])
    assert type(other) is nn.Linear and type(other.weight) is nn.Parameter
    with pytest.raises(TypeError, match="offload_policy"):
        fully_shard(other, offload_policy=None)  # type: ignore[call-overload]
    cube = init_device_mesh("cpu", (2, 1, 1))
    with pytest.raises(ValueError, match=r"3-D.*dp_replicate"):
        fully_shard(other, mesh=cube)
    alone = init_device_mesh("cpu", (1,))  # of rank 0
    if rank == 0:
        fully_shard(nn.Linear(2, 2), mesh=alone)(torch.ones(1, 2)).sum().backward()
    else:
        with pytest.raises(ValueError, match="rank 1 is not part of"):
            fully_shard(other, mesh=alone)
    assert type(other) is nn.Linear


def test_bad_modules_are_refused_by_name(world2: WorkerPool) -> None:
    world2.run(refuse_modules)


METHODS: list[tuple[str, tuple[Any, ...], dict[str, Any], type[BaseException], str]] = [
    ("set_requires_gradient_sync", (1,), {}, TypeError, "requires_gradient_sync.*1"),
    ("set_requires_all_reduce", ("no",), {}, TypeError, "requires_all_reduce.*'no'"),
    ("set_is_last_backward", (None,), {}, TypeError, "is_last_backward.*None"),
    ("set_reshard_after_forward", (5,), {}, ValueError, "reshard_after_forward=5 of unit"),
    ("set_reshard_after_backward", ("x",), {}, TypeError, "reshard_after_backward.*'x'"),
    ("set_unshard_in_backward", (0,), {}, TypeError, "unshard_in_backward.*0"),
    ("set_force_sum_reduction_for_comms", (0,), {}, TypeError, "enable.*0"),
    ("set_gradient_divide_factor", (0,), {}, ValueError, "positive.*0"),
    ("set_gradient_divide_factor", (-1.0,), {}, ValueError, r"positive.*-1\.0"),
    ("set_gradient_divide_factor", ("2",), {}, TypeError, "factor.*'2'"),
    ("set_gradient_divide_factor", (float("nan"),), {}, ValueError, "nan"),
    ("set_num_gather_buffers", (0,), {}, ValueError, "at least 1.*0"),
    ("set_num_gather_buffers", (1.5,), {}, ValueError, r"1\.5"),
    ("set_num_gradient_buffers", (True,), {}, ValueError, "True"),
    ("set_modules_to_forward_prefetch", (nn.Linear(2, 2),), {}, TypeError, "list"),
    ("set_modules_to_forward_prefetch", ([nn.Linear(2, 2)],), {}, ValueError, "Linear.*managed"),
    ("set_modules_to_backward_prefetch", ([nn.ReLU()],), {}, ValueError, "ReLU.*managed"),
    ("set_modules_to_backward_prefetch", (["head"],), {}, (TypeError, ValueError), "head|str"),  # type: ignore[list-item]
]


def refuse_settings(rank: int, world: int) -> None:
    model, reference = pair(MLP, leaf)
    wrong = []
    for name, args, options, kind, pattern in METHODS:
        try:
            with pytest.raises(kind, match=pattern):
                getattr(model, name)(*args, **options)
        except BaseException as error:
            wrong.append(f"{name}{args}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    with pytest.raises(ValueError, match="no method 'generate'"):
        register_fsdp_forward_method(model, "generate")
    for step in range(2):
        train_step(model, reference, rank, inputs(world, seed=step))


def test_bad_settings_are_refused_and_training_goes_on(world2: WorkerPool) -> None:
    world2.run(refuse_settings)


# ---- what a sharded module is --------------------------------------------------------------------


def identity(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    assert type(model).__name__ == "FSDPMLP"
    assert isinstance(model, MLP)
    assert isinstance(model, YaFSDPModule) and isinstance(model, FSDPModule)
    assert type(model).__module__ == MLP.__module__
    assert type(model.layers[0]) is type(model.layers[1])
    assert type(model.layers) is nn.ModuleList
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in reference.named_modules()]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert all(isinstance(p, RaggedShardDTensor) for p in model.parameters())
    sequence = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert type(sequence[:1]) is nn.Sequential


def test_a_sharded_module_is_of_its_own_class_with_a_prefix(world2: WorkerPool) -> None:
    world2.run(identity)


def pickling(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    with pytest.raises(NotImplementedError, match=r"pickled.*state_dict.*checkpoint"):
        torch.save(model, io.BytesIO())
    with pytest.raises(NotImplementedError, match="deep-copied"):
        copy.deepcopy(model)
    train_step(model, reference, rank, inputs(world))


def test_pickling_a_sharded_module_is_refused_with_a_remedy(world2: WorkerPool) -> None:
    world2.run(pickling)


def no_parameters(rank: int, world: int) -> None:
    calls: list[str] = []
    relu = nn.ReLU()
    relu.register_forward_hook(lambda *_: calls.append("forward"))
    fully_shard(relu)
    assert relu(torch.tensor([-1.0, 2.0], device=test_device())).tolist() == [0.0, 2.0]
    assert calls == ["forward"]
    assert isinstance(relu, YaFSDPModule)
    for name in ("unshard", "reshard"):
        getattr(relu, name)()


def test_a_module_without_parameters_is_sharded_as_well(world2: WorkerPool) -> None:
    world2.run(no_parameters)


def replaced_by_other_shape(rank: int, world: int) -> None:
    model, _ = pair(MLP, nested)
    model.head.weight = nn.Parameter(torch.ones(4, 6, device=test_device()))
    with pytest.raises(ValueError, match=r"'head\.weight'.*\(4, 6\).*\(3, 6\)"):
        model(inputs(world)[rank])


def test_a_parameter_replaced_by_one_of_another_shape_is_named(world2: WorkerPool) -> None:
    world2.run(replaced_by_other_shape)


def replaced_by_other_values(rank: int, world: int) -> None:
    model, reference = pair(MLP, nested)
    optimizers = sgd_pair(model, reference)
    value = torch.randn(3, 6).to(test_device())
    model.head.weight = nn.Parameter(value.clone())
    with torch.no_grad():
        reference.head.weight.copy_(value)
    assert_none_stale(model, reference, inputs(world)[rank])
    for step in range(2):
        x = inputs(world, seed=step)
        train_step(model, reference, rank, x, optimizers=optimizers)


def test_a_parameter_replaced_by_another_is_cut_and_optimized(world2: WorkerPool) -> None:
    world2.run(replaced_by_other_values)


def list_of_modules(rank: int, world: int) -> None:
    def shard(model: Any) -> None:
        given = [model.layers[0], model.layers[1]]
        assert fully_shard(given) is given
        assert fully_shard(model) is model

    model, reference = pair(MLP, shard)
    optimizers = sgd_pair(model, reference)
    for step in range(2):
        train_step(model, reference, rank, inputs(world, seed=step), optimizers=optimizers)


def test_a_list_of_modules_is_one_unit(world2: WorkerPool) -> None:
    world2.run(list_of_modules)
