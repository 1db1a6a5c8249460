"""accelerate on two ranks, against its own FSDP2 (the same code, switched off) and one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

pytest.importorskip("accelerate", reason="the extra [accelerate] is not installed")
pytest.importorskip("transformers", reason="the extra [transformers] is not installed")

from tests.harness import WorkerPool
from tests.integrations.support import (
    foreign,
    llama,
    needs_sharded_optimizers,
    parts_tied_weights,
    tokens,
)
from ya_fsdp.integrations import YaFSDPConfig

STEPS, RESUMED = 4, 3
GLOBAL_BATCH = 24  # two micro-batches of equal size on two, three and four ranks


def prepare(
    model: nn.Module,
    *,
    enabled: bool = True,
    mixed: str = "no",
    config: dict[str, Any] | None = None,
    lr: float = 1e-2,
    **plugin: Any,
) -> tuple[Any, Any, Any]:
    """An accelerator, and a model with an optimizer of two groups prepared by it."""
    from ya_fsdp.integrations.accelerate import YaFSDPAccelerator, YaFSDPPlugin

    options = {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "FULL_STATE_DICT",
        **plugin,
    }
    settings = YaFSDPConfig(enabled=enabled, **(config or {}))
    accelerator = YaFSDPAccelerator(
        fsdp_plugin=YaFSDPPlugin(ya_fsdp=settings, **options),
        mixed_precision=mixed,
        cpu=True,
        gradient_accumulation_steps=2,
    )
    assert accelerator.is_fsdp2
    assert accelerator.ya_fsdp_enabled == enabled
    return accelerator, *accelerator.prepare(model, two_groups(model, lr))


def two_groups(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others[::-1]}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1)


def steps(
    accelerator: Any, model: Any, optimizer: Any, rank: int, world_size: int, first: int, count: int
) -> list[tuple[float, float]]:
    """Losses over the global batch and gradient norms; two micro-batches make a step."""
    seen = []
    for step in range(first, first + count):
        batch = tokens(GLOBAL_BATCH, seed=step % 2)
        mine = batch.chunk(world_size)[rank]
        total = 0.0
        for micro in mine.chunk(2):
            with accelerator.accumulate(model):
                loss = model(input_ids=micro, labels=micro).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
            total += float(accelerator.reduce(loss.detach(), "mean")) / 2
        seen.append((total, norm))
    return seen


@foreign
def train(
    rank: int, world_size: int, folder: str | None = None, *, tied: bool = False, **options: Any
) -> dict[str, Any]:
    """Trains; with a folder also saves, goes on, loads and goes on again."""
    seed = 3 if rank == 0 or not options.get("cpu_ram_efficient_loading") else 4
    model = llama(tied=tied, seed=seed)
    parameters = len(list(model.parameters()))
    accelerator, model, optimizer = prepare(model, **options)
    result: dict[str, Any] = {"parameters": parameters}
    result["optimized"] = len({id(p) for g in optimizer.param_groups for p in g["params"]})
    result["groups"] = [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups]
    result["losses"] = steps(accelerator, model, optimizer, rank, world_size, 0, STEPS)
    if folder is not None:
        accelerator.save_state(folder)
        more = (accelerator, model, optimizer, rank, world_size, STEPS, RESUMED)
        result["continued"] = steps(*more)
        accelerator.load_state(folder)
        result["resumed"] = steps(*more)
    result["state"] = accelerator.get_state_dict(model)
    return result


@foreign
def resume(rank: int, world_size: int, folder: str, **options: Any) -> list[tuple[float, float]]:
    accelerator, model, optimizer = prepare(llama(seed=99), **options)
    accelerator.load_state(folder)
    return steps(accelerator, model, optimizer, rank, world_size, STEPS, RESUMED)


def one_process(tied: bool = False) -> list[tuple[float, float]]:
    """The same training without any of this."""
    model = llama(tied=tied)
    optimizer = two_groups(model, 1e-2)
    seen = []
    for step in range(STEPS):
        batch = tokens(GLOBAL_BATCH, seed=step % 2)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(loss.detach()), float(norm)))
    return seen


def printed(losses: list[tuple[float, float]]) -> list[tuple[str, str]]:
    return [(f"{loss:.4f}", f"{norm:.3f}") for loss, norm in losses]


@pytest.fixture(scope="module")
def fsdp2(world2: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """accelerate's own FSDP2."""
    folder = str(tmp_path_factory.mktemp("fsdp2"))
    return {**world2.run(train, folder, enabled=False)[0], "folder": folder}


@pytest.mark.parametrize(
    "kind", ["FULL_STATE_DICT", pytest.param("SHARDED_STATE_DICT", marks=needs_sharded_optimizers)]
)
def test_training_saving_and_resuming_equal_fsdp2(
    world2: WorkerPool, world3: WorkerPool, tmp_path: Path, fsdp2: dict[str, Any], kind: str
) -> None:
    first, second = world2.run(train, str(tmp_path), state_dict_type=kind)
    assert first["losses"] == second["losses"]
    assert printed(first["losses"]) == printed(fsdp2["losses"])
    assert printed(first["continued"]) == printed(fsdp2["continued"])
    assert first["resumed"] == first["continued"]
    assert first["losses"][-1][0] < first["losses"][0][0] - 0.1
    on_three = world3.run(resume, str(tmp_path), state_dict_type=kind)[0]
    for got, want in zip(on_three, first["continued"], strict=True):
        assert got == pytest.approx(want, rel=1e-4)


def test_two_ranks_with_accumulation_train_as_one_process_on_the_whole_batch(
    world2: WorkerPool,
) -> None:
    got = world2.run(train)[0]["losses"]
    for (loss, norm), (want, want_norm) in zip(got, one_process(), strict=True):
        assert loss == pytest.approx(want, rel=1e-5)
        assert norm == pytest.approx(want_norm, rel=1e-4)


def test_the_optimizer_has_every_parameter_though_some_shards_are_empty(
    world3: WorkerPool,
) -> None:
    for result in world3.run(train):
        assert result["optimized"] == result["parameters"]
        assert [decay for _, decay in result["groups"]] == [0.0, 0.1]
        assert sum(count for count, _ in result["groups"]) == result["parameters"]


def test_tied_embeddings_train_as_in_one_process_and_in_fsdp2(world2: WorkerPool) -> None:
    ours = world2.run(train, tied=True)[0]
    for (loss, _), (want, _) in zip(ours["losses"], one_process(tied=True), strict=True):
        assert loss == pytest.approx(want, rel=1e-5)
    if not parts_tied_weights:
        theirs = world2.run(train, tied=True, enabled=False)[0]
        assert printed(ours["losses"]) == printed(theirs["losses"])
    state = ours["state"]
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def test_weights_come_from_rank_0_where_only_it_loads(
    world2: WorkerPool, fsdp2: dict[str, Any]
) -> None:
    got = world2.run(train, cpu_ram_efficient_loading=True)[0]
    assert printed(got["losses"]) == printed(fsdp2["losses"])


def test_a_checkpoint_of_fsdp2_is_continued_with_the_same_losses(
    world2: WorkerPool, fsdp2: dict[str, Any]
) -> None:
    got = world2.run(resume, fsdp2["folder"])[0]
    assert printed(got) == printed(fsdp2["continued"])


@pytest.mark.slow
def test_checkpoints_go_to_and_from_fsdp2_on_other_numbers_of_ranks(
    world2: WorkerPool,
    world3: WorkerPool,
    world4: WorkerPool,
    fsdp2: dict[str, Any],
    tmp_path: Path,
) -> None:
    world2.run(train, str(tmp_path))
    for pool in (world3, world4):
        theirs_by_us = pool.run(resume, fsdp2["folder"])[0]
        ours_by_them = pool.run(resume, str(tmp_path), enabled=False)[0]
        for got in (theirs_by_us, ours_by_them):
            torch.testing.assert_close(
                torch.tensor(got), torch.tensor(fsdp2["continued"]), rtol=1e-4, atol=0
            )


# ---- recomputation, precision, ranks without weights ---------------------------------------------


@foreign
def count_forwards(rank: int, world_size: int, count: int) -> tuple[list[int], float]:
    model = llama()
    calls = [0] * len(model.model.layers)
    for index, layer in enumerate(model.model.layers):

        def note(*_: Any, index: int = index) -> None:
            calls[index] += 1

        # Not after the forward: a recomputation ends as soon as it has what it needs.
        layer.mlp.register_forward_pre_hook(note)
    accelerator, model, _ = prepare(model, config={"num_layers_to_checkpoint": count})
    batch = tokens(2)
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    return calls, float(loss.detach())


def test_the_first_layers_alone_are_recomputed(world2: WorkerPool) -> None:
    none, some, all_of_them = (world2.run(count_forwards, n)[0] for n in (0, 2, -1))
    assert none[0] == [1, 1, 1]
    assert some[0] == [2, 2, 1]
    assert all_of_them[0] == [2, 2, 2]
    assert none[1] == some[1] == all_of_them[1]


@foreign
def precisions(rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    model = llama().to(torch.bfloat16)
    accelerator, model, _ = prepare(model, mixed="bf16", **options)
    batch = tokens(2)
    output = model(input_ids=batch, labels=batch)
    accelerator.backward(output.loss)
    return {
        "master": {p.dtype for p in model.parameters()},
        "grad": {p.grad.dtype for p in model.parameters()},
        "logits": output.logits.dtype,
        "saved": {t.dtype for t in (accelerator.get_state_dict(model) or {}).values()},
    }


def test_bf16_keeps_masters_in_fp32_outputs_alone_and_saves_as_loaded(world2: WorkerPool) -> None:
    got = world2.run(precisions)[0]
    assert got["master"] == got["grad"] == {torch.float32}
    assert got["saved"] == {torch.bfloat16}
    # FSDP2 by way of accelerate rounds the loss as well, which the policy here does not.
    theirs = world2.run(train, enabled=False, mixed="bf16")[0]["losses"]
    ours = world2.run(train, mixed="bf16")[0]["losses"]
    assert all(loss * 256 == round(loss * 256) for loss, _ in theirs)
    assert not all(loss * 256 == round(loss * 256) for loss, _ in ours)
    for (loss, _), (other, _) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(other, abs=0.03)


def test_the_policy_that_fsdp2_has_gives_what_fsdp2_gives(world2: WorkerPool) -> None:
    same = {"reduce_dtype": "bf16", "output_dtype": "bf16"}
    ours = world2.run(train, mixed="bf16", config=same)[0]["losses"]
    theirs = world2.run(train, mixed="bf16", enabled=False)[0]["losses"]
    assert [f"{loss:.2f}" for loss, _ in ours] == [f"{loss:.2f}" for loss, _ in theirs]


@foreign
def from_meta(rank: int, world_size: int) -> tuple[bool, bool]:
    """Ranks but the first have no weights at all."""
    want = llama()
    with torch.device("cpu" if rank == 0 else "meta"):
        model = llama()
    _, model, _ = prepare(model, cpu_ram_efficient_loading=True)
    equal = all(
        torch.equal(p.full_tensor(), w)
        for p, w in zip(model.parameters(), want.parameters(), strict=True)
    )
    buffers = zip(model.buffers(), want.buffers(), strict=True)
    return equal, all(torch.equal(b, w) for b, w in buffers)


def test_weights_and_buffers_of_rank_0_fill_models_on_meta(world2: WorkerPool) -> None:
    assert world2.run(from_meta) == [(True, True)] * 2


@foreign
def different_models(rank: int, world_size: int) -> None:
    prepare(llama(num_hidden_layers=2 + rank), cpu_ram_efficient_loading=True)


def test_ranks_with_different_models_raise_instead_of_hanging(world2: WorkerPool) -> None:
    with pytest.raises(RuntimeError, match="have different models"):
        world2.run(different_models)


# ---- order of preparation ------------------------------------------------------------------------


@foreign
def apart(rank: int, world_size: int, order: str) -> list[tuple[float, float]]:
    from ya_fsdp.integrations.accelerate import YaFSDPAccelerator

    accelerator = YaFSDPAccelerator(config=YaFSDPConfig(), cpu=True, gradient_accumulation_steps=2)
    model = llama()
    optimizer = two_groups(model, 1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    if order == "model first":
        model = accelerator.prepare(model)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    else:
        scheduler, optimizer, model = accelerator.prepare(scheduler, optimizer, model)
    assert scheduler.optimizers == [optimizer]
    return steps(accelerator, model, optimizer, rank, world_size, 0, STEPS)


@pytest.mark.parametrize("order", ["model first", "model last"])
def test_model_and_optimizer_are_prepared_in_any_order(
    world2: WorkerPool, fsdp2: dict[str, Any], order: str
) -> None:
    assert printed(world2.run(apart, order)[0]) == printed(fsdp2["losses"])


@foreign
def stray_parameter(rank: int, world_size: int) -> None:
    from ya_fsdp.integrations.accelerate import YaFSDPAccelerator

    accelerator = YaFSDPAccelerator(config=YaFSDPConfig(), cpu=True)
    accelerator.prepare(llama(), two_groups(llama(), 1e-2))


def test_an_optimizer_of_another_model_is_refused(world2: WorkerPool) -> None:
    with pytest.raises(ValueError, match="that the sharded model does not have"):
        world2.run(stray_parameter)


def test_processes_that_accelerate_has_not_joined_do_not_train_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from accelerate import Accelerator

    from ya_fsdp.integrations.accelerate import engage

    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    accelerator = Accelerator()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        RuntimeError, match=r"2 processes were started.*YaFSDPAccelerator\(cpu=True"
    ):
        engage(accelerator)
    assert type(accelerator) is Accelerator


@foreign
def without_sync(rank: int, world_size: int) -> list[int]:
    accelerator, model, _ = prepare(llama())
    counts = []
    for _ in range(2):
        with CommDebugMode() as seen, accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens(2), labels=tokens(2)).loss)
        found = seen.get_comm_counts()
        counts.append(sum(n for op, n in found.items() if "reduce_scatter" in str(op)))
    return counts


def test_a_micro_batch_that_accumulates_reduces_nothing(world2: WorkerPool) -> None:
    silent, loud = world2.run(without_sync)[0]
    assert silent == 0
    assert loud > 0
