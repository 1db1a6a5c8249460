"""The classic interface: ``YaFSDP(model, zero_stage=..., ...)`` against plain training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.test_gradients import counted
from tests.harness import WorkerPool, test_device
from ya_fsdp import YaFSDP, YaFSDPModule, checkpoint, fully_shard
from ya_fsdp.build import schedule_of, state_of
from ya_fsdp.collectives import C10dCollectives
from ya_fsdp.flat import groups_of

VOCABULARY, WIDTH, LAYERS, LENGTH = 11, 6, 3, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor([1.5]))
        self.title = "network"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.scale.to(x.dtype))


def network(layers: int = LAYERS) -> Network:
    torch.manual_seed(0)
    return Network(layers).to(test_device())


def wrap(model: Any, zero_stage: int = 3, steps: int = 1, **options: Any) -> Any:
    """Wraps embedding, layers and head, as the original's migration guide does."""
    given: dict[str, Any] = {
        "param_dtype": torch.float32,
        "modules_to_wrap_with_names": [
            (model.embed, "embed"),
            *((layer, f"layers.{i}") for i, layer in enumerate(model.layers)),
            (model.head, "head"),
        ],
        "layer_norm_module_cls": nn.LayerNorm,
        "rogue_layer_norm_modules_with_names": {model.norm: "norm"},
    }
    given.update(options)
    return YaFSDP(model, zero_stage=zero_stage, gradient_accumulation_steps=steps, **given)


def tokens(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator).to(test_device())


def loss_of(model: Any, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def plain_step(reference: nn.Module, batches: list[list[Tensor]]) -> list[float]:
    """Adds the mean gradient over microbatches and ranks; returns this step's losses."""
    losses = []
    count = len(batches) * len(batches[0])
    for micro in batches:
        for batch in micro:
            loss = loss_of(reference, batch)
            (loss / count).backward()
            losses.append(loss.item())
    return losses


def assert_same_weights(model: YaFSDP, reference: nn.Module) -> None:
    whole = model.state_dict()
    expected = reference.state_dict()
    if dist.get_rank() == 0:
        assert list(whole) == list(expected)
        for name, value in whole.items():
            torch.testing.assert_close(value, expected[name].cpu(), atol=2e-5, rtol=1e-4, msg=name)
    else:
        assert whole == {}


# ---- training ------------------------------------------------------------------------------------


def train(rank: int, world: int, stage: int, steps: int) -> None:
    model, reference = network(), network()
    wrapped = wrap(model, stage, steps)
    ours = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(10):
        losses = []
        batches = [[tokens(step * steps + m, r) for r in range(world)] for m in range(steps)]
        for micro in batches:
            loss = loss_of(wrapped, micro[rank])
            loss.backward()
            losses.append(loss.item())
        expected = plain_step(reference, batches)[rank::world]
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
        norm = wrapped.clip_grad_norm_(0.5)
        truth = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(norm, truth, atol=1e-5, rtol=1e-4)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(wrapped, reference)


@pytest.mark.parametrize("steps", [1, 4], ids=["one microbatch", "four microbatches"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ten_steps_equal_plain_training(pool: WorkerPool, stage: int, steps: int) -> None:
    pool.run(train, stage, steps)


def sizes_gathered(model: YaFSDP, steps: int, rank: int, with_evaluation: bool) -> list[int]:
    """Elements of every all-gather of one training step, after a step that warms up."""
    seen: list[int] = []
    original = C10dCollectives.all_gather

    def noting(self: Any, output: Tensor, input: Tensor, group: Any) -> None:
        seen.append(output.numel())
        original(self, output, input, group)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    C10dCollectives.all_gather = noting  # type: ignore[method-assign]
    try:
        for _ in range(2):
            seen.clear()
            for micro in range(steps):
                if with_evaluation and micro == 1:
                    with torch.no_grad():
                        loss_of(model, tokens(9, rank))
                loss_of(model, tokens(micro, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        C10dCollectives.all_gather = original  # type: ignore[method-assign]
    return seen


def count_traffic(rank: int, world: int) -> None:
    units, steps = LAYERS + 3, 4
    for stage in (1, 2, 3):
        model = wrap(network(), stage, steps)
        with counted() as counts:
            seen = sizes_gathered(model, steps, rank, with_evaluation=False)
        reductions = units if stage == 1 else units * steps
        assert counts["reduce_scatter"] == 2 * reductions, stage
        if stage < 3:
            assert len(seen) == units
        of_norms = state_of(model.module).unit.groups[0].layout.total_numel
        assert seen.count(of_norms) == 1, "norms are gathered once per step at every stage"
        assert len(seen) > units or stage < 3
    evaluated = sizes_gathered(wrap(network(), 2, steps), steps, rank, with_evaluation=True)
    assert len(evaluated) == units


def test_each_stage_gathers_and_reduces_as_often_as_it_promises(world2: WorkerPool) -> None:
    world2.run(count_traffic)


def change_weights_between_microbatches(rank: int, world: int) -> None:
    for by_optimizer in (True, False):
        model, reference = wrap(network(), 2, 2), network()
        loss_of(model, tokens(0, rank)).backward()
        parameters = list(model.parameters())
        if by_optimizer:
            for param in parameters:
                param.grad = torch.ones_like(param)
            torch.optim.Adam(parameters, lr=0.1, fused=True).step()
            for param in reference.parameters():
                param.grad = torch.ones_like(param)
            torch.optim.Adam(reference.parameters(), lr=0.1, fused=True).step()
        else:
            with torch.no_grad():
                for param in parameters + list(reference.parameters()):
                    param.mul_(0.5)
        batch = tokens(1, rank)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, batch), loss_of(reference, batch))


def call_the_model_itself(rank: int, world: int) -> None:
    model, reference = wrap(network(), 2, 2), network()
    parameters = list(model.parameters())
    for micro in range(2):
        loss_of(model, tokens(micro, rank)).backward()
    with torch.no_grad():
        for param in parameters + list(reference.parameters()):
            param.data.mul_(0.5)  # what no version counter sees
        batch = tokens(2, rank)
        torch.testing.assert_close(loss_of(model.module, batch), loss_of(reference, batch))


def test_the_wrapped_model_may_be_called_past_the_wrapper(world2: WorkerPool) -> None:
    world2.run(call_the_model_itself)


def test_weights_changed_between_microbatches_are_gathered_anew(world2: WorkerPool) -> None:
    world2.run(change_weights_between_microbatches)


def accumulate_as_under_fsdp1(rank: int, world: int) -> None:
    """``no_sync`` with one step counts nothing; with four it leaves the count right."""
    for steps in (1, 3):
        model, reference = wrap(network(), 3, steps), network()
        parameters = list(model.parameters())
        for step in range(2):
            batches = [[tokens(3 * step + m, r) for r in range(world)] for m in range(3)]
            with counted() as counts, model.no_sync():
                for micro in batches[:2]:
                    (loss_of(model, micro[rank]) * steps / 3).backward()
            assert counts["reduce_scatter"] == 0
            (loss_of(model, batches[2][rank]) * steps / 3).backward()
            plain_step(reference, batches)
            for whole, truth in zip(gathered_gradients(model), reference.parameters(), strict=True):
                torch.testing.assert_close(whole, truth.grad, atol=1e-5, rtol=1e-4)
            assert any(p.grad is not None for p in parameters)
            model.zero_grad(set_to_none=step == 0)
            reference.zero_grad()


def gathered_gradients(model: YaFSDP) -> list[Tensor]:
    """Whole gradients in the order of the plain model's parameters, off the flat ones."""
    norms = {id(g) for g in state_of(model.module).unit.groups}
    flat = {name: p.grad for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.module.named_parameters()}
    found: dict[str, Tensor] = {}
    index = {"main_parameter": 0, "layernorm_parameter": 0}
    for group in groups_of(model.module):
        kind = "layernorm_parameter" if id(group) in norms else "main_parameter"
        grad = flat[f"{kind}.{index[kind]}"]
        index[kind] += 1
        assert grad is not None
        world = dist.get_world_size()
        parts = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(parts, grad)
        whole = torch.cat(parts)
        for param, span in zip(group.params, group.layout.spans, strict=True):
            found[names[id(param.sharded)]] = whole[span.offset : span.offset + span.numel].view(
                param.shape
            )
    return [found[name] for name, _ in Network().named_parameters()]


def test_no_sync_may_be_used_besides_the_count(world2: WorkerPool) -> None:
    world2.run(accumulate_as_under_fsdp1)


def reset_in_the_middle(rank: int, world: int) -> None:
    for stage in (1, 3):
        model = wrap(network(), stage, 2)
        reference = network()
        parameters = list(model.parameters())
        loss_of(model, tokens(0, rank)).backward()
        model.zero_grad()
        assert all(p.grad is None for p in parameters)
        batches = [[tokens(m, r) for r in range(world)] for m in (1, 2)]
        for micro in batches:
            loss_of(model, micro[rank]).backward()
        plain_step(reference, batches)
        for ours, truth in zip(gathered_gradients(model), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, truth.grad, atol=1e-5, rtol=1e-4)


def test_zero_grad_begins_the_count_anew(world2: WorkerPool) -> None:
    world2.run(reset_in_the_middle)


# ---- dtypes --------------------------------------------------------------------------------------


def use_16_bits(rank: int, world: int) -> None:
    for bit16 in (False, True):
        model = wrap(network(), param_dtype=torch.bfloat16, bit16_reduce_scatter=bit16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        wire = {g.dtypes.reduce for g in groups_of(model.module)}
        assert wire == {torch.bfloat16 if bit16 else torch.float32}
        reference = network()
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        for step in range(5):
            batches = [[tokens(step, r) for r in range(world)]]
            loss = loss_of(model, batches[0][rank])
            loss.backward()
            expected = plain_step(reference, batches)[rank]
            assert loss.item() == pytest.approx(expected, abs=0.05)
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
        whole = model.state_dict()
        assert all(v.dtype == torch.float32 for v in whole.values())


def test_weights_stay_in_32_bits_while_compute_takes_16(world2: WorkerPool) -> None:
    world2.run(use_16_bits)


def freeze(rank: int, world: int) -> None:
    reference = network().to(torch.bfloat16)
    model = wrap(network(), param_dtype=torch.bfloat16, is_trainable=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    batch = tokens(0, rank)
    logits = model(batch)
    assert not logits.requires_grad
    torch.testing.assert_close(logits, reference(batch), atol=0.02, rtol=0.02)
    hidden = torch.randn(2, WIDTH, dtype=torch.bfloat16, device=test_device(), requires_grad=True)
    schedule = schedule_of(model.module)
    model.module.head(hidden).sum().backward()
    assert hidden.grad is not None
    assert schedule.reducer.slots == []
    assert all(g.grads.shard._flat is None for g in groups_of(model.module))


def test_a_frozen_model_is_stored_in_16_bits_and_has_no_gradient_memory(
    world2: WorkerPool,
) -> None:
    world2.run(freeze)


# ---- process groups ------------------------------------------------------------------------------


class GatherSequence(torch.autograd.Function):
    """Every tensor-parallel rank's part of the sequence, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.length = group, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.length
        return grad[:, start : start + ctx.length], None


class ScatterSequence(torch.autograd.Function):
    """The sum over tensor-parallel ranks, each with its own part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        length = x.shape[1] // dist.get_world_size(group)
        start = dist.get_rank(group) * length
        return x[:, start : start + length].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class SplitBlock(nn.Module):
    """``x + down(gelu(up(norm(x))))``, the hidden dim split over ``group``, norms over tokens."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        size = 1 if group is None else dist.get_world_size(group)
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8 // size, bias=False)
        self.down = nn.Linear(8 // size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = h if self.group is None else GatherSequence.apply(h, self.group)
        h = self.down(F.gelu(self.up(h)))
        return x + (h if self.group is None else ScatterSequence.apply(h, self.group))


class SplitNetwork(nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SplitBlock(group) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def take_slice(whole: nn.Module, part: nn.Module, rank: int, size: int) -> None:
    with torch.no_grad():
        for (name, source), target in zip(whole.named_parameters(), part.parameters(), strict=True):
            target.copy_(slice_of(name, source, rank, size))


def slice_of(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    if "norm" in name:
        return whole
    return whole.chunk(size, 0 if ".up." in name else 1)[rank]


def split_in_two(rank: int, world: int) -> None:
    model_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    data_rank, model_rank = divmod(rank, 2)
    split, data = model_groups[data_rank], data_groups[model_rank]
    torch.manual_seed(0)
    reference = SplitNetwork().to(test_device())
    model = SplitNetwork(split).to(test_device())
    take_slice(reference, model, model_rank, 2)
    wrapped = YaFSDP(
        model,
        zero_stage=3,
        param_dtype=torch.float32,
        modules_to_wrap_with_names=[(m, f"layers.{i}") for i, m in enumerate(model.layers)],
        layer_norm_module_cls=nn.LayerNorm,
        gradient_accumulation_steps=2,
        data_parallel_process_group=data,
        model_parallel_process_group=split,
        all_reduce_grads_across_model_parallel_group=True,
        rogue_layer_norm_modules_with_names={model.norm: "norm"},
    )
    ours = torch.optim.SGD(wrapped.parameters(), lr=0.3)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.3)
    target = torch.randn(WIDTH, generator=torch.Generator().manual_seed(5)).to(test_device())
    for step in range(10):
        for micro in range(2):
            for part in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + part)
                x = torch.randn(2, 4, WIDTH, generator=generator).to(test_device())
                ((reference(x) - target).pow(2).mean() / 4).backward()
                if part == data_rank:
                    own = x.chunk(2, 1)[model_rank]
                    ((wrapped(own) - target).pow(2).sum() / x.numel()).backward()
        p = (2.0, float("inf"), 3.0)[step % 3]
        norm = wrapped.clip_grad_norm_(0.2, p)
        truth = nn.utils.clip_grad_norm_(reference.parameters(), 0.2, p)
        torch.testing.assert_close(norm, truth, atol=1e-5, rtol=1e-4)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    whole = wrapped.state_dict()
    assert bool(whole) == (data_rank == 0)
    for name, value in whole.items():
        expected = slice_of(name, dict(reference.named_parameters())[name], model_rank, 2)
        torch.testing.assert_close(value, expected.detach().cpu(), atol=1e-5, rtol=1e-4, msg=name)


def test_norms_are_summed_over_a_tensor_parallel_group_of_two(world4: WorkerPool) -> None:
    world4.run(split_in_two)


def leave_a_parameter_out(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([r]) for r in range(4)][rank]
    model = network()
    with pytest.raises(ValueError, match=r"'head\.weight' is in no module"):
        wrap(
            model,
            modules_to_wrap_with_names=[(model.embed, "embed"), *named_layers(model)],
            data_parallel_process_group=alone,
            model_parallel_process_group=groups[rank // 2],
        )
    assert not isinstance(model, YaFSDPModule), "nothing was changed"


def named_layers(model: Network) -> list[tuple[nn.Module, str]]:
    return [(layer, f"layers.{i}") for i, layer in enumerate(model.layers)]


def test_tensor_parallel_parameters_outside_of_wrapped_modules_are_refused(
    world4: WorkerPool,
) -> None:
    world4.run(leave_a_parameter_out)


def two_nodes_of_two(rank: int) -> Any:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]


def start_on_meta(rank: int, world: int) -> None:
    node = two_nodes_of_two(rank)
    expected = network()
    for initialise in (False, True):
        if rank % 2 == 0:
            model = network()
        else:
            with torch.device("meta"):
                model = Network()
        called: list[str] = []

        def init(module: nn.Module, called: list[str] = called) -> None:
            called.append(type(module).__name__)
            module.to_empty(device=test_device(), recurse=False)

        wrapped = wrap(
            model,
            sync_module_states=True,
            param_init_fn=init if initialise else None,
            intra_node_data_parallel_process_group=node,
        )
        whole = wrapped.state_dict()
        assert bool(whole) == (rank % 2 == 0), "the first rank of each node has it"
        for name, value in whole.items():
            torch.testing.assert_close(value, expected.state_dict()[name].cpu(), msg=name)
        torch.testing.assert_close(wrapped.scale, expected.scale)
        assert bool(called) == (initialise and rank % 2 == 1)


def test_the_first_rank_of_each_node_fills_the_others(world4: WorkerPool) -> None:
    world4.run(start_on_meta)


def stay_on_meta(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = Network()
    with pytest.raises(ValueError, match="on the meta device; pass sync_module_states=True"):
        wrap(model)


def test_meta_without_a_source_of_values_is_refused(world2: WorkerPool) -> None:
    world2.run(stay_on_meta)


# ---- state dicts -----------------------------------------------------------------------------


def save_and_load(rank: int, world: int) -> None:
    model, other = wrap(network()), network()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(rank + 1)  # whatever is not loaded differs
    other = wrap(other, zero_stage=2)
    other.load_state_dict(model.local_state_dict())
    for ours, theirs in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    batch = tokens(0, rank)
    assert torch.equal(model(batch), other(batch))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    whole = network().state_dict()
    model.load_state_dict(whole if rank == 0 else {})
    assert torch.equal(model(batch), other(batch))


def test_local_and_whole_state_dicts_load_back(pool: WorkerPool) -> None:
    pool.run(save_and_load)


def refuse_foreign_state(rank: int, world: int) -> None:
    model = wrap(network())
    local = model.local_state_dict()
    meta = local["meta"]
    assert meta["rank"] == rank
    total = sum(p.numel() for p in Network().parameters())
    shapes = [s for part in meta["sections"].values() for g in part for s in g["shapes"]]
    assert sum(torch.Size(s).numel() for s in shapes) == total
    with pytest.raises(ValueError, match=f"of rank {rank + 1}, loaded on rank {rank}"):
        model.load_state_dict({**local, "meta": {**meta, "rank": rank + 1}})
    with pytest.raises(ValueError, match=r"'world_size' differs \(7 saved, 2 now\)"):
        model.load_state_dict({**local, "meta": {**meta, "world_size": 7}})
    with pytest.raises(ValueError, match="'sections' differs"):
        wrap(network(layers=2)).load_state_dict(local)
    with pytest.raises(ValueError, match="ya-fsdp convert"):
        model.load_state_dict({"main_parameter": torch.zeros(3)})


def resume(rank: int, world: int, folder: str) -> None:
    """Two steps and a save on two ranks, or two more steps by both interfaces on three."""

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss_of(model, tokens(number, 0)).backward()
        optimizer.step()
        model.zero_grad()

    reference = network()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for number in range(4 if world == 3 else 2):
        step(reference, theirs, number)
    for model in (wrap(network()), fully_shard(network()))[: world - 1]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if world == 3:
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            checkpoint.load(folder, model, optimizer)
            states = checkpoint.get_full_optimizer_state_dict(model, optimizer)
            checkpoint.load_full_optimizer_state_dict(model, optimizer, states)
            checkpoint.load_safetensors(model, f"{folder}/hub")
            checkpoint.load_full_state_dict(model, checkpoint.get_full_state_dict(model))
        for number in (2, 3) if world == 3 else (0, 1):
            step(model, optimizer, number)
        if world == 2:
            checkpoint.save(folder, model, optimizer, step=2)
            checkpoint.save_safetensors(model, f"{folder}/hub")
        inner = model.module if isinstance(model, YaFSDP) else model
        for ours, truth in zip(
            inner.state_dict().values(), reference.state_dict().values(), strict=True
        ):
            whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            torch.testing.assert_close(whole, truth, atol=1e-5, rtol=1e-4)


def test_a_run_resumes_on_other_ranks_and_under_the_other_interface(
    world2: WorkerPool, world3: WorkerPool, tmp_path: Path
) -> None:
    world2.run(resume, str(tmp_path))
    world3.run(resume, str(tmp_path))


def test_a_local_state_dict_of_something_else_is_refused(world2: WorkerPool) -> None:
    world2.run(refuse_foreign_state)


def use_other_names(rank: int, world: int) -> None:
    model = network()
    wrapped = wrap(
        model,
        modules_to_wrap_with_names=[
            (model.embed, "model.embed"),
            *((m, f"model.blocks.{i}") for i, m in enumerate(model.layers)),
            (model.head, "model.head"),
        ],
        rogue_layer_norm_modules_with_names={model.norm: "model.norm"},
    )
    names = list(wrapped.state_dict())
    assert rank or {"model.embed.weight", "model.blocks.1.norm.bias", "scale"} <= set(names)
    assert rank or "model.norm.weight" in names
    whole = wrapped.state_dict()
    wrapped.load_state_dict(whole)
    fqns = wrapped.local_state_dict()["meta"]["sections"]["main_parameter"][0]["fqns"]
    assert fqns == ["model.embed.weight"]


def test_state_dicts_have_the_names_given(world2: WorkerPool) -> None:
    world2.run(use_other_names)


# ---- the object ------------------------------------------------------------------------------


def look_at_it(rank: int, world: int) -> None:
    model = network()
    wrapped = wrap(model)
    assert wrapped.title == "network"
    assert wrapped.module is model
    assert wrapped.layers[1] is model.layers[1]
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = wrapped.nothing_of_this_name
    wrapped.to(torch.float32)
    flat = dict(wrapped.named_parameters())
    assert {p.ndim for p in flat.values()} == {1}
    assert {n.partition(".")[0] for n in flat} == {"main_parameter", "layernorm_parameter"}
    assert list(flat.values()) == list(wrapped.parameters()), "the same objects every time"
    total = torch.tensor(sum(p.numel() for p in wrapped.parameters()))
    dist.all_reduce(total)
    assert total >= sum(p.numel() for p in Network().parameters())
    with pytest.raises(RuntimeError, match=r"after parameters\(\) was called"):
        wrapped.to(torch.float64)


def test_the_wrapper_shows_the_model_and_flat_parameters(world2: WorkerPool) -> None:
    world2.run(look_at_it)


def share_weights(rank: int, world: int) -> None:
    model, reference = network(), network()
    for each in (model, reference):
        each.head.weight = each.embed.weight
    wrapped = wrap(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, reference)]
    for step in range(3):
        batches = [[tokens(step, r) for r in range(world)]]
        loss_of(wrapped, batches[0][rank]).backward()
        plain_step(reference, batches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(wrapped, reference)
    half = network()
    half.head.weight = half.embed.weight
    with pytest.raises(ValueError, match=r"'head\.weight' is shared with a module"):
        wrap(half, modules_to_wrap_with_names=[(half.embed, "embed")])


def test_wrapped_modules_that_share_a_weight_form_one_unit(world2: WorkerPool) -> None:
    world2.run(share_weights)


def profile_a_forward(rank: int, world: int) -> None:
    model = wrap(network(), profile=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        model(tokens(0, rank))
    names = [event.key for event in seen.key_averages() if "YaFSDP::forward" in event.key]
    expected = ["embed", *(f"layers.{i}" for i in range(LAYERS)), "head"]
    assert sorted(names) == sorted(f"YaFSDP::forward ({name})" for name in expected)


def test_profiles_name_the_wrapped_modules(world2: WorkerPool) -> None:
    world2.run(profile_a_forward)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"zero_stage": 4}, ValueError, "zero_stage must be 1, 2 or 3, got 4"),
    ({"zero_stage": True}, ValueError, "zero_stage"),
    ({"param_dtype": torch.int8}, TypeError, "param_dtype must be a floating-point"),
    ({"steps": 0}, ValueError, "gradient_accumulation_steps"),
    ({"hpz_first_layers_num": 2}, ValueError, "=2 needs an intra_node_data_parallel_process_group"),
    ({"hpz_first_layers_num": 6}, ValueError, "from 0 to the 5 modules"),
    ({"use_yccl": True}, ImportError, "package yccl"),
    ({"yccl_intra_inter_expr": "(0, rank)"}, TypeError, "never evaluated"),
    ({"yccl_intra_inter_expr": 3}, TypeError, "yccl_intra_inter_expr must be a pair"),
    ({"yccl_intra_inter_expr": (0, 1)}, ValueError, "no effect without use_yccl"),
    ({"yccl_all_gather_stages": 2}, ValueError, "no effect without use_yccl"),
    ({"layer_norm_module_cls": "LayerNorm"}, TypeError, "layer_norm_module_cls"),
    ({"modules_to_wrap_with_names": [nn.Linear(1, 1)]}, TypeError, "pairs"),
    ({"modules_to_wrap_with_names": [(nn.Linear(1, 1), "x")]}, ValueError, "no part of the model"),
    ({"all_reduce_grads_across_model_parallel_group": True}, ValueError, "needs a"),
    ({"device_id": 0}, ValueError, "this machine has none"),
]


def refuse(rank: int, world: int) -> None:
    for options, error, message in REFUSED:
        if "device_id" in options and torch.accelerator.is_available():
            continue
        model = network()
        with pytest.raises(error, match=message):
            wrap(model, **options)
        assert not isinstance(model, YaFSDPModule), "nothing was changed"
    ignored = wrap(network(), bit32_acc_for_bit16_reduce_scatter=True, use_yccl_padding=True)
    assert {g.dtypes.reduce for g in groups_of(ignored.module)} == {torch.float32}


def test_what_is_not_available_is_refused_by_name_before_anything_changes(
    world2: WorkerPool,
) -> None:
    world2.run(refuse)


def sum_wide(rank: int, world: int) -> None:
    wrapped = wrap(
        network(),
        param_dtype=torch.bfloat16,
        bit16_reduce_scatter=True,
        bit32_acc_for_bit16_reduce_scatter=True,
    )
    states = [s for m in wrapped.module.modules() if (s := state_of(m)) is not None]
    assert states
    for state in states:
        for group in state.unit.groups:
            assert state.unit.collectives.accumulation_dtype(group.dtypes.reduce) == torch.float32


def test_16_bit_reductions_are_summed_in_32_bits_where_asked(world2: WorkerPool) -> None:
    world2.run(sum_wide)


def wrap_beside_plain_units(rank: int, world: int) -> None:
    """A schedule made earlier, for a unit that ran alone, gives way to the wrapper's."""
    model, reference = network(), network()
    wrapped = wrap(model, 1, 2)
    assert len(list(wrapped.parameters())) > 1
    outer = nn.Sequential(wrapped)
    fully_shard(outer)
    batches = [[tokens(m, r) for r in range(world)] for m in range(2)]
    for micro in batches:
        loss_of(outer, micro[rank]).backward()
    plain_step(reference, batches)
    for ours, truth in zip(gathered_gradients(wrapped), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, truth.grad, atol=1e-5, rtol=1e-4)


def test_a_wrapped_model_may_lie_below_another_root(world2: WorkerPool) -> None:
    world2.run(wrap_beside_plain_units)
