"""Whole state dicts of sharded models, out and in, against the plain model's own."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed.checkpoint_models import (
    Net,
    adamw,
    assert_near,
    assert_same,
    assert_unchanged,
    plain_net,
    shard,
    snapshot,
    state_wholes,
    train,
    trained_plain,
    trained_sharded,
    wholes,
)
from tests.harness import WorkerPool, test_device
from tests.unit.test_cli_convert import trained_files
from ya_fsdp import checkpoint, fully_shard
from ya_fsdp.checkpoint import CheckpointError, peers
from ya_fsdp.checkpoint import full as whole_states
from ya_fsdp.cli.classic import join
from ya_fsdp.cli.classic_optimizer import join_optimizer
from ya_fsdp.ragged import FlatRaggedShard

CUTS = ["row", "element", "auto"]


# ---- out ---------------------------------------------------------------------------------------


def gather_in_turn(rank: int, world_size: int) -> list[bool]:
    """At each gather but the first, whether the one before had given its memory back."""
    model = shard(plain_net(), "auto")
    freed: list[bool] = []
    last: list[StorageWeakRef] = []
    inner = whole_states._gather_group

    def watched(group: Any) -> Any:
        # gloo's thread lets go of a collective's tensors a moment after the collective has ended.
        deadline = time.monotonic() + 5
        while last and not last[0].expired() and time.monotonic() < deadline:
            time.sleep(0.01)
        freed.extend(reference.expired() for reference in last)
        buffer = inner(group)
        last[:] = [StorageWeakRef(buffer.untyped_storage())]
        return buffer

    whole_states._gather_group = watched
    try:
        checkpoint.get_full_state_dict(model)
    finally:
        whole_states._gather_group = inner
    return freed


def test_one_group_at_a_time_is_whole(world2: WorkerPool) -> None:
    for freed in world2.run(gather_in_turn):
        assert len(freed) > 1
        assert all(freed)


def gather(rank: int, world_size: int, cut: str) -> None:
    plain = plain_net()
    expected = plain.state_dict()
    model = shard(plain_net(), cut)
    full = checkpoint.get_full_state_dict(model)
    if rank == 0:
        assert_same(full, expected)
        assert {type(value) for value in full.values()} == {torch.Tensor}
        assert full["head.weight"] is full["embedding.weight"]
        storages = {value.untyped_storage().data_ptr() for value in full.values()}
        assert len(storages) == len(full) - 1
        for value in full.values():
            value.zero_()
    else:
        assert full == {}
    assert_same(
        checkpoint.get_full_state_dict(model, cpu_offload=False, rank0_only=False), expected
    )


@pytest.mark.parametrize("cut", CUTS)
def test_a_full_state_dict_is_the_plain_models_and_shares_no_memory(
    any_pool: WorkerPool, cut: str
) -> None:
    any_pool.run(gather, cut)


def gather_by_torch(rank: int, world_size: int, cut: str) -> None:
    expected = plain_net().state_dict()
    model = shard(plain_net(), cut)
    full = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        assert_same(full, expected)
        assert {type(value) for value in full.values()} == {torch.Tensor}
    else:
        assert full == {}


@pytest.mark.parametrize("cut", CUTS)
def test_torchs_full_state_dict_has_whole_tensors_on_the_first_rank(
    world2: WorkerPool, cut: str
) -> None:
    world2.run(gather_by_torch, cut)


def after_forward(rank: int, world_size: int) -> None:
    """A state dict right after forward, and while gathered, is sharded; training goes on."""
    model, optimizer = trained_sharded(1)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    expected = wholes(model)
    model(tokens)
    assert_same(checkpoint.get_full_state_dict(model, rank0_only=False), expected)
    model.unshard()
    assert {type(v).__name__ for n, v in model.state_dict().items() if "blocks" in n} == {
        "RaggedShardDTensor"
    }
    assert_same(checkpoint.get_full_state_dict(model, rank0_only=False), expected)
    train(model, optimizer, 2, first=1)
    reference, _ = trained_plain(3)
    assert_near(wholes(model), wholes(reference))


def test_a_state_dict_right_after_forward_or_unshard_is_sharded(world2: WorkerPool) -> None:
    world2.run(after_forward)


def called_on_one_rank(rank: int, world_size: int) -> None:
    model = shard(plain_net())
    peers.ARRIVAL_TIMEOUT = datetime.timedelta(seconds=0.5)
    try:
        if rank == 0:
            assert len(model.state_dict()) == len(plain_net().state_dict())
            with pytest.raises(CheckpointError, match=r"collective call.*ranks \[1\] did not"):
                checkpoint.get_full_state_dict(model)
    finally:
        peers.ARRIVAL_TIMEOUT = datetime.timedelta(minutes=10)
    torch.distributed.barrier()
    assert_same(checkpoint.get_full_state_dict(model, rank0_only=False), plain_net().state_dict())
    out, back = checkpoint.get_full_state_dict, checkpoint.load_full_state_dict
    with pytest.raises(CheckpointError, match="ranks made different calls at once"):
        out(model) if rank == 0 else back(model, None)


def test_a_gather_on_one_rank_only_ends_with_a_message_that_names_the_absent(
    world2: WorkerPool,
) -> None:
    world2.run(called_on_one_rank)


# ---- in ----------------------------------------------------------------------------------------


def spread(rank: int, world_size: int, cut: str) -> None:
    source = plain_net(seed=5)
    source.calls.fill_(9)
    full = source.state_dict() if rank == 0 else None
    model = shard(plain_net(), cut)
    tokens = torch.arange(6).view(2, 3)
    with torch.no_grad():
        model(tokens)
        assert checkpoint.load_full_state_dict(model, full) == ([], [])
        torch.testing.assert_close(model(tokens), source(tokens))
    assert_same(wholes(model), source.state_dict())
    assert model.head.weight is model.embedding.weight
    train(model, adamw(model), 2)
    train(source, adamw(source), 2)
    assert_near(wholes(model), wholes(source))


@pytest.mark.parametrize("cut", CUTS)
def test_what_the_first_rank_has_reaches_every_ranks_pieces(any_pool: WorkerPool, cut: str) -> None:
    any_pool.run(spread, cut)


def half(rank: int, world_size: int) -> None:
    source = plain_net(seed=5).bfloat16()
    model = shard(plain_net())
    checkpoint.load_full_state_dict(model, source.state_dict() if rank == 0 else {})
    result = wholes(model)
    assert result["blocks.0.up.weight"].dtype == torch.float32
    for name, value in source.state_dict().items():
        assert torch.equal(result[name], value.to(result[name].dtype))


def test_a_full_state_dict_of_another_dtype_is_converted(world2: WorkerPool) -> None:
    world2.run(half)


def mistakes(rank: int, world_size: int) -> None:
    model = shard(plain_net())
    before = snapshot(model)
    plain = plain_net(seed=5)
    good = plain.state_dict()

    def refuses(change: dict[str, Any], drop: str, message: str) -> None:
        given = {**good, **change}
        given.pop(drop, None)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_full_state_dict(model, given if rank == 0 else None)
        assert_unchanged(model, before)

    refuses({"new": torch.ones(1)}, "offset", r'Missing .*"offset"\.\s+Unexpected .*"new"\.')
    refuses({"scale": torch.ones(3)}, "", r"size mismatch for scale: .*\[3\].*\[1\]")
    with pytest.raises(CheckpointError, match="has to pass a state dict, got NoneType"):
        checkpoint.load_full_state_dict(model, None)
    with pytest.raises(CheckpointError, match=r"is sharded.*rank 0"):
        checkpoint.load_full_state_dict(model, model.state_dict() if rank == 0 else None)
    assert_unchanged(model, before)


def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank_and_writes_nothing(
    world2: WorkerPool,
) -> None:
    world2.run(mistakes)


def messages(rank: int, world_size: int) -> None:
    state = plain_net().state_dict()
    del state["blocks.1.up.bias"]
    state["blocks.9.up.bias"] = torch.ones(1)
    with pytest.raises(RuntimeError) as plain:
        plain_net().load_state_dict(state)
    with pytest.raises(RuntimeError) as direct:
        shard(plain_net()).load_state_dict(state)
    with pytest.raises(CheckpointError) as ours:
        checkpoint.load_full_state_dict(shard(plain_net()), state)

    def words(error: Any) -> list[str]:
        return str(error.value).replace("FSDPNet", "Net").split()

    assert words(direct) == words(plain)
    assert words(ours)[1:] == words(plain)


def test_errors_name_the_keys_that_the_plain_model_names(world2: WorkerPool) -> None:
    world2.run(messages)


def not_strict(rank: int, world_size: int) -> None:
    source = plain_net(seed=5).state_dict()
    state = {**source, "new": torch.ones(1)}
    del state["offset"], state["embedding.weight"]
    model = shard(plain_net())
    kept = model.offset.clone()
    result = checkpoint.load_full_state_dict(model, state if rank == 0 else {}, strict=False)
    assert result == (["offset"], ["new"])
    loaded = wholes(model)
    assert torch.equal(loaded.pop("offset"), kept)
    del source["offset"]
    assert_same(loaded, source)


def test_a_load_that_is_not_strict_tells_what_differs_and_needs_one_name_of_a_tied_weight(
    world2: WorkerPool,
) -> None:
    world2.run(not_strict)


def direct(rank: int, world_size: int, cut: str) -> None:
    source = plain_net(seed=5)
    model = shard(plain_net(), cut)
    model.load_state_dict(source.state_dict())
    assert_same(wholes(model), source.state_dict())


@pytest.mark.parametrize("cut", CUTS)
def test_load_state_dict_takes_a_plain_full_state_dict(any_pool: WorkerPool, cut: str) -> None:
    any_pool.run(direct, cut)


def spread_by_torch(rank: int, world_size: int) -> None:
    source = plain_net(seed=5).state_dict()
    for broadcast in (False, True):
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=broadcast, strict=False
        )
        model = shard(plain_net(), "row")
        given = {**source, "new": torch.ones(1)} if rank == 0 or not broadcast else {}
        set_model_state_dict(model, given, options=options)
        assert_same(wholes(model), source)
    options = StateDictOptions(full_state_dict=True)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "new"'):
        set_model_state_dict(model, {**source, "new": torch.ones(1)}, options=options)
    flat = shard(plain_net(), "element")
    set_model_state_dict(flat, dict(source), options=options)
    assert_same(wholes(flat), source)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    alone = plain_net().blocks[0].down
    before = alone.weight.detach().clone()
    fully_shard(alone, granularity="element")
    assert isinstance(alone.weight.placements[0], FlatRaggedShard)
    given = {name: torch.ones(value.shape) for name, value in alone.state_dict().items()}
    given = given if rank == 0 else {}
    with pytest.raises(NotImplementedError, match=r"checkpoint\.load_full_state_dict\(model"):
        set_model_state_dict(alone, given, options=whole)
    assert torch.equal(alone.weight.full_tensor(), before)


def test_torchs_setter_spreads_a_full_state_dict_and_names_our_loader_where_it_can_not(
    world2: WorkerPool,
) -> None:
    world2.run(spread_by_torch)


# ---- names and adapters ------------------------------------------------------------------------


def wrapped(rank: int, world_size: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = plain_net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    shard(model)
    compiled = torch.compile(model, backend="eager")
    expected = plain_net().state_dict()
    for each in (model, compiled):
        assert_same(checkpoint.get_full_state_dict(each, rank0_only=False), expected)
    source = plain_net(seed=5).state_dict()
    checkpoint.load_full_state_dict(compiled, source)
    assert_same(checkpoint.get_full_state_dict(model, rank0_only=False), source)
    keys = get_model_state_dict(model).keys()
    assert list(keys) == list(expected)


def test_names_have_no_trace_of_activation_checkpointing_and_compilation(
    world2: WorkerPool,
) -> None:
    world2.run(wrapped)


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.lora_a = nn.Linear(6, 3, bias=False)
        self.lora_b = nn.Linear(3, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def adapters(rank: int, world_size: int) -> None:
    model = nn.Sequential(Adapter(), Adapter())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    lora = {name: p for name, p in model.named_parameters() if "lora" in name}
    for parameter in lora.values():
        parameter.to_local().detach().fill_(rank + 1)
    full = checkpoint.get_full_state_dict(model, rank0_only=False)
    saved = {name: value for name, value in full.items() if "lora" in name}
    assert sum(v.numel() for v in saved.values()) == 4 * 18
    assert {float(x) for v in saved.values() for x in v.flatten()} == {1.0, 2.0}
    with torch.no_grad():
        for parameter in lora.values():
            parameter.zero_()
    result = checkpoint.load_full_state_dict(model, saved, strict=False)
    assert len(result.missing_keys) == 4 and not result.unexpected_keys
    for parameter in lora.values():
        assert (parameter.to_local() == rank + 1).all()


def test_adapters_alone_are_saved_and_restored_on_every_rank(world2: WorkerPool) -> None:
    world2.run(adapters)


# ---- optimizers --------------------------------------------------------------------------------


def optimizer_out_and_in(rank: int, world_size: int) -> None:
    plain, reference = trained_plain(2)
    model, optimizer = trained_sharded(2)
    full = checkpoint.get_full_optimizer_state_dict(model, optimizer, rank0_only=False)
    names = [name for name, _ in plain.named_parameters()]
    assert full["param_groups"][0]["params"] == names
    assert full["param_groups"][0]["lr"] == 0.05
    flat = {f"{n}.{k}": v for n, values in full["state"].items() for k, v in values.items()}
    assert {type(value) for value in flat.values()} == {torch.Tensor}
    assert_near(flat, state_wholes(plain, reference))
    weights = checkpoint.get_full_state_dict(model)
    other = shard(plain_net(seed=9), "element")
    fresh = adamw(other)
    fresh.param_groups[0]["lr"] = 77.0
    checkpoint.load_full_state_dict(other, weights)
    checkpoint.load_full_optimizer_state_dict(other, fresh, full if rank == 0 else None)
    assert_same(state_wholes(other, fresh), flat)
    train(other, fresh, 2, first=2)
    train(plain, reference, 2, first=2)
    assert_near(wholes(other), wholes(plain))


def test_a_full_optimizer_state_goes_out_and_in_and_training_goes_on(any_pool: WorkerPool) -> None:
    any_pool.run(optimizer_out_and_in)


def before_first_step(rank: int, world_size: int) -> None:
    model, plain = shard(plain_net()), plain_net()
    optimizer, reference = adamw(model), adamw(plain)
    full = checkpoint.get_full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert full["state"] == {}
    assert not optimizer.state
    checkpoint.load_full_optimizer_state_dict(model, optimizer, full)
    train(model, optimizer, 1)
    train(plain, reference, 1)
    assert_near(wholes(model), wholes(plain))
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}


def test_asking_for_the_state_before_the_first_step_changes_nothing(world2: WorkerPool) -> None:
    world2.run(before_first_step)


def wrong_optimizers(rank: int, world_size: int) -> None:
    model, optimizer = trained_sharded(1)
    full = checkpoint.get_full_optimizer_state_dict(model, optimizer)
    given = full if rank == 0 else None
    load = checkpoint.load_full_optimizer_state_dict
    before = state_wholes(model, optimizer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match="another optimizer than SGD: it has the options"):
        load(model, sgd, given)
    assert not sgd.state
    part = torch.optim.AdamW(list(model.parameters())[:2])
    with pytest.raises(CheckpointError, match="the optimizer does not have the checkpoint's"):
        load(model, part, given)
    with pytest.raises(CheckpointError, match="group 0 are not parameters of the model"):
        load(model, adamw(nn.Linear(2, 2)), given)
    bigger: Net = shard(plain_net(width=8))
    with pytest.raises(CheckpointError, match=r"shape \[7, 6\], the parameter \[7, 8\]"):
        load(bigger, adamw(bigger), given)
    numbered = {"state": {0: {}}, "param_groups": []}
    with pytest.raises(CheckpointError, match="numbered, not named"):
        load(model, optimizer, numbered if rank == 0 else None)
    assert_same(state_wholes(model, optimizer), before)


def test_the_state_of_another_optimizer_or_model_is_refused_on_every_rank(
    world2: WorkerPool,
) -> None:
    world2.run(wrong_optimizers)


class Tree(nn.Module):
    """Parameters under given names, dots and all."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            owner.register_parameter(last, nn.Parameter(value.clone()))

    def forward(self) -> torch.Tensor:
        return sum(p.sum() for p in self.parameters())  # type: ignore[return-value]


def continue_from_the_original(rank: int, world: int) -> None:
    """From four ranks of the original to this many of ours."""
    files, states, truth = trained_files(4, "one group")
    whole = {name: value for name, value in join(files).items() if name in truth}
    model: Any = fully_shard(Tree(whole).to(test_device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    named = join_optimizer(files, states) if rank == 0 else None
    checkpoint.load_full_optimizer_state_dict(model, optimizer, named)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, param in model.named_parameters():
        for key, value in truth[name].items():
            found = optimizer.state[param][key]
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(found.cpu(), value, msg=f"{name} {key}")


def test_optimizer_state_of_the_original_goes_into_a_sharded_model(world2: WorkerPool) -> None:
    world2.run(continue_from_the_original)
