"""Bad arguments of everything but fully_shard: class of the error, name, value; nothing half done.

``test_arguments.py`` has those of fully_shard and of a sharded module's methods.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ya_fsdp
from tests.distributed.models import MLP, inputs, nested, pair, train_step
from tests.harness import WorkerPool
from ya_fsdp import checkpoint, debug, graph

Model = Any
Case = tuple[Callable[[Model, Any], Any], type[Exception], str]
PLAIN = nn.Linear(2, 2)
UNSHARDED = "Linear is not sharded; call fully_shard"


def nowhere(_: Any) -> None:
    raise AssertionError("refused before anything runs")


BAD: dict[str, Case] = {
    "flat, no model": (lambda m, o: ya_fsdp.flat_parameters("m"), TypeError, "model.*Module.*'m'"),
    "flat, no key": (lambda m, o: ya_fsdp.flat_parameters(m, {"a": {}}), ValueError, "together"),
    "flat, groups": (
        lambda m, o: ya_fsdp.flat_parameters(m, [1], lambda *_: 1),  # type: ignore[arg-type]
        TypeError,
        r"groups must be a Mapping, got \[1\]",
    ),
    "flat, key": (lambda m, o: ya_fsdp.flat_parameters(m, {"a": {}}, "a"), TypeError, "key.*'a'"),  # type: ignore[arg-type]
    "clip, parameters": (
        lambda m, o: ya_fsdp.clip_grad_norm_(list(m.parameters()), 1.0),  # type: ignore[arg-type]
        TypeError,
        "pass the model, not its parameters",
    ),
    "clip, none": (lambda m, o: ya_fsdp.clip_grad_norm_(m, None), TypeError, "max_norm.*None"),  # type: ignore[arg-type]
    "clip, negative": (lambda m, o: ya_fsdp.clip_grad_norm_(m, -1.0), ValueError, r"max_norm.*-1"),
    "clip, nan": (lambda m, o: ya_fsdp.clip_grad_norm_(m, float("nan")), ValueError, "max_n.*nan"),
    "clip, type": (lambda m, o: ya_fsdp.clip_grad_norm_(m, 1.0, "2"), TypeError, "norm_type.*'2'"),  # type: ignore[arg-type]
    "clip, zero type": (
        lambda m, o: ya_fsdp.clip_grad_norm_(m, 1.0, 0),
        ValueError,
        "norm_type.*0",
    ),
    "clip, groups": (
        lambda m, o: ya_fsdp.clip_grad_norm_(m, 1.0, norm_groups=[1]),  # type: ignore[arg-type]
        TypeError,
        "norm_groups.*Mapping",
    ),
    "early, plain": (
        lambda m, o: ya_fsdp.optimizer_in_backward(PLAIN, o),
        ValueError,
        UNSHARDED,
    ),
    "early, optimizer": (
        lambda m, o: ya_fsdp.optimizer_in_backward(m, "o"),  # type: ignore[arg-type]
        TypeError,
        "optimizer must be an Optimizer, got 'o'",
    ),
    "flat state, model": (
        lambda m, o: ya_fsdp.flat_optimizer_state_dict("m", o),  # type: ignore[arg-type]
        TypeError,
        "model.*'m'",
    ),
    "flat state, optimizer": (
        lambda m, o: ya_fsdp.flat_optimizer_state_dict(m, "o"),  # type: ignore[arg-type]
        TypeError,
        "optimizer must be an Optimizer, got 'o'",
    ),
    "flat load, empty": (
        lambda m, o: ya_fsdp.load_flat_optimizer_state_dict(m, o, {"model": {}}),
        ValueError,
        r"no optimizer state: it lacks \['state', 'param_groups'\], has \['model'\]",
    ),
    "flat load, none": (
        lambda m, o: ya_fsdp.load_flat_optimizer_state_dict(m, o, None),  # type: ignore[arg-type]
        TypeError,
        "state_dict.*None",
    ),
    "sms, word": (lambda m, o: ya_fsdp.set_communication_sms(m, "many"), ValueError, "'many'"),  # type: ignore[arg-type]
    "sms, negative": (lambda m, o: ya_fsdp.set_communication_sms(m, -1), ValueError, "-1"),
    "sms, plain": (lambda m, o: ya_fsdp.set_communication_sms(PLAIN, 8), ValueError, UNSHARDED),
    "sms, plain back": (
        lambda m, o: ya_fsdp.set_communication_sms(PLAIN, None),
        ValueError,
        UNSHARDED,
    ),
    "unused, plain": (lambda m, o: ya_fsdp.set_reduce_unused(PLAIN), ValueError, UNSHARDED),
    "unused, flag": (lambda m, o: ya_fsdp.set_reduce_unused(m, 3), TypeError, "enable.*bool.*3"),  # type: ignore[arg-type]
    "budget, word": (lambda m, o: ya_fsdp.set_resident_budget(m, "lots"), TypeError, "'lots'"),  # type: ignore[arg-type]
    "budget, negative": (lambda m, o: ya_fsdp.set_resident_budget(m, -1), ValueError, "-1"),
    "budget, plain": (lambda m, o: ya_fsdp.set_resident_budget(PLAIN, 1), ValueError, UNSHARDED),
    "buffers, plain": (lambda m, o: ya_fsdp.persistent_buffers(PLAIN), ValueError, UNSHARDED),
    "buffers, no model": (lambda m, o: ya_fsdp.persistent_buffers(3), TypeError, "model.*3"),  # type: ignore[arg-type]
    "groups, plain": (lambda m, o: ya_fsdp.set_buffer_groups(PLAIN, {}), ValueError, UNSHARDED),
    "groups, list": (
        lambda m, o: ya_fsdp.set_buffer_groups(m, ["a"]),  # type: ignore[arg-type]
        TypeError,
        "buffers must be a Mapping",
    ),
    "method, no model": (
        lambda m, o: ya_fsdp.register_fsdp_forward_method("m", "f"),  # type: ignore[arg-type]
        TypeError,
        "module.*'m'",
    ),
    "method, number": (
        lambda m, o: ya_fsdp.register_fsdp_forward_method(m, 3),  # type: ignore[arg-type]
        TypeError,
        "method_name must be a str, got 3",
    ),
    "ragged, tensor": (lambda m, o: ya_fsdp.distribute_ragged(1, None), TypeError, "full.*Tensor"),  # type: ignore[arg-type]
    "ragged, mesh": (
        lambda m, o: ya_fsdp.distribute_ragged(torch.ones(3), "x"),  # type: ignore[arg-type]
        TypeError,
        "mesh.*DeviceMesh.*'x'",
    ),
    "unshard": (lambda m, o: m.unshard("yes"), TypeError, "async_op must be a bool, got 'yes'"),
    "a method of torch's": (
        lambda m, o: m.set_custom_all_gather(None),
        NotImplementedError,
        "set_custom_all_gather is not offered by ya_fsdp; use set_collectives",
    ),
    "one without a counterpart": (
        lambda m, o: m.set_all_reduce_hook(nowhere),
        NotImplementedError,
        "set_all_reduce_hook is not offered by ya_fsdp$",
    ),
    "replicas, plain": (lambda m, o: debug.check_replicas(PLAIN), ValueError, UNSHARDED),
    "finite, plain": (lambda m, o: debug.non_finite_gradients(PLAIN), ValueError, UNSHARDED),
    "memory, no model": (lambda m, o: debug.memory_report("m"), TypeError, "model.*'m'"),  # type: ignore[arg-type]
    "memory, plain": (lambda m, o: debug.memory_report(PLAIN), ValueError, UNSHARDED),
    "plain, a model": (lambda m, o: debug.check_against_plain(m, 1), TypeError, "model_fn.*makes"),
    "plain, a word": (lambda m, o: debug.check_against_plain("m", 1), TypeError, "model_fn.*'m'"),  # type: ignore[arg-type]
    "plain, loss": (
        lambda m, o: debug.check_against_plain(MLP, 1, loss_fn="l"),  # type: ignore[arg-type]
        TypeError,
        "loss_fn.*'l'",
    ),
    "plain, steps": (lambda m, o: debug.check_against_plain(MLP, 1, steps=0), ValueError, "got 0"),
    "capture, model": (lambda m, o: graph.capture_step("m", o, nowhere), TypeError, "model.*'m'"),  # type: ignore[arg-type]
    "capture, optimizer": (
        lambda m, o: graph.capture_step(m, "o", nowhere),  # type: ignore[arg-type]
        TypeError,
        "optimizer.*'o'",
    ),
    "capture, loss": (lambda m, o: graph.capture_step(m, o, "l"), TypeError, "loss_fn.*'l'"),  # type: ignore[arg-type]
    "capture, microbatches": (
        lambda m, o: graph.capture_step(m, o, nowhere, accumulation=0),  # type: ignore[arg-type]
        ValueError,
        "accumulation.*0",
    ),
    "capture, scaler": (
        lambda m, o: graph.capture_step(m, o, nowhere, scaler=1.0),  # type: ignore[arg-type]
        TypeError,
        "scaler.*1.0",
    ),
    "full, no model": (lambda m, o: checkpoint.get_full_state_dict("m"), TypeError, "model.*'m'"),  # type: ignore[arg-type]
    "full, no dict": (
        lambda m, o: checkpoint.load_full_state_dict(m, "x"),  # type: ignore[arg-type]
        checkpoint.CheckpointError,
        "state dict, got str",
    ),
}


def refuse(rank: int, world: int) -> list[str]:
    model, reference = pair(MLP, nested)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, reference, rank, inputs(world))
    files = set(os.listdir())
    before = {n: (p, p.grad, type(p)) for n, p in model.named_parameters()}
    wrong = []
    for name, (call, kind, pattern) in BAD.items():
        try:
            with pytest.raises(kind, match=pattern):
                call(model, optimizer)
        except BaseException as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    for name, param in model.named_parameters():
        old, grad, cls = before[name]
        assert param is old and param.grad is grad and type(param) is cls, name
    assert set(os.listdir()) == files
    for step in range(2):
        train_step(model, reference, rank, inputs(world, seed=step))
    return wrong


def test_bad_arguments_of_public_functions_are_refused_by_name_and_change_nothing(
    world2: WorkerPool,
) -> None:
    for wrong in world2.run(refuse):
        assert not wrong, "\n".join(wrong)


def test_the_table_has_every_public_function_that_takes_arguments() -> None:
    """Classes, and functions that only look at containers, have tests of their own."""
    elsewhere = {"fully_shard", "map_tensors", "tensors_in"}
    source = "".join(str(call[0].__code__.co_names) for call in BAD.values())
    for module in (ya_fsdp, debug):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not isinstance(value, type) and name not in elsewhere:
                assert name in source, name
