"""Ragged tensors over two and three ranks, against plain tensors that see the whole data."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# The function that torch's state dict helpers ask for a rank's rows.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.harness import WorkerPool
from ya_fsdp._torch import DTENSOR_SUBCLASS_OK
from ya_fsdp.ragged import RaggedShardDTensor, distribute_ragged, make_placement

# With three ranks, rows of the second and fourth leave ranks without a piece.
SHAPES = [(7, 5), (2, 4), (2, 3, 4), (1, 6), (13,)]
CUTS = ("row", "element", "lopsided")

with_stock_dtensors = pytest.mark.skipif(
    not DTENSOR_SUBCLASS_OK, reason="before torch 2.13 a stock DTensor refuses ragged tensors"
)


def line(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def cut(full: torch.Tensor, mesh: DeviceMesh, how: str) -> RaggedShardDTensor:
    """Cuts by row, by element, or gives the last rank all but one element."""
    if how != "lopsided":
        return distribute_ragged(full, mesh, how)  # type: ignore[arg-type]
    bounds = [0, *[1] * (mesh.size() - 1), full.numel()]
    return RaggedShardDTensor.from_full(full, mesh, make_placement(bounds, full.shape))


def assert_close(ragged: Any, plain: torch.Tensor, **tolerances: float) -> None:
    assert isinstance(ragged, RaggedShardDTensor)
    torch.testing.assert_close(ragged.full_tensor(), plain, **tolerances)


# ---- gathering and changing the placement ------------------------------------------------------


def gather_and_redistribute(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for shape in (*SHAPES, (0, 3), (), (5, 1)):
        full = torch.randn(shape)
        for how in ("row", "element") if full.numel() < 2 else CUTS:
            ragged = cut(full, mesh, how)
            assert torch.equal(ragged.full_tensor(), full)
            replicated = ragged.redistribute(placements=[Replicate()])
            assert type(replicated) is DTensor
            assert torch.equal(replicated.to_local(), full)
            other = make_placement([*[0] * world_size, full.numel()], shape)
            moved = ragged.redistribute(placements=[other])
            assert moved.placements == (other,)
            assert torch.equal(moved.full_tensor(), full)
            if full.dim() == 0:
                continue
            sharded = ragged.redistribute(mesh, [Shard(0)])
            assert sharded.placements == (Shard(0),)
            expected = distribute_tensor(full, mesh, [Shard(0)]).to_local()
            assert torch.equal(sharded.to_local(), expected)


def test_gathering_and_redistributing_gives_the_whole_tensor_back(pool: WorkerPool) -> None:
    pool.run(gather_and_redistribute)


def stock_tensor_with_row_placement(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    full = torch.randn(7, 3)
    for rows in ([0, *[1] * (world_size - 1), 7], [*[0] * world_size, 7]):
        placement = make_placement([3 * row for row in rows], full.shape)
        shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, [placement])
        assert shape == (rows[rank + 1] - rows[rank], 3)
        assert shape[0] == 0 or offset == (rows[rank], 0)
        piece = full[rows[rank] : rows[rank + 1]]
        stock = DTensor.from_local(piece, mesh, [placement], shape=full.shape, stride=full.stride())
        assert torch.equal(stock.full_tensor(), full)
        for source in (stock, distribute_tensor(full, mesh, [placement])):
            ragged = RaggedShardDTensor.from_full(torch.zeros(7, 3), mesh, placement)
            assert torch.equal(ragged.copy_(source).to_local(), piece)


@with_stock_dtensors
def test_a_stock_tensor_cut_by_rows_of_unequal_number_is_understood(pool: WorkerPool) -> None:
    pool.run(stock_tensor_with_row_placement)


def copies(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for shape in SHAPES:
        full = torch.randn(shape)
        for how in CUTS:
            target = cut(torch.zeros(shape), mesh, how)
            piece = target.to_local()
            for source in (
                full,
                full.double(),
                cut(full, mesh, how),
                cut(full, mesh, "row"),
                cut(full, mesh, "lopsided"),
                distribute_tensor(full, mesh, [Shard(len(shape) - 1)]),
                torch.nn.Parameter(full),
            ):
                target.zero_()
                with torch.no_grad():
                    assert target.copy_(source) is target
                assert_close(target, full)
            assert target.to_local() is piece
            assert_close(target.copy_(torch.tensor(3.0)), torch.full(shape, 3.0))
            assert_close(target.copy_(torch.ones(shape[-1])), torch.ones(shape))
            plain = torch.zeros(shape)
            plain.copy_(cut(full, mesh, how))
            assert torch.equal(plain, full)
            stock = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
            stock.copy_(cut(full, mesh, how))
            assert torch.equal(stock.full_tensor(), full)
            with pytest.raises(RuntimeError):
                target.copy_(torch.zeros(97, 89))


@with_stock_dtensors
def test_copy_takes_the_local_range_of_any_source(pool: WorkerPool) -> None:
    pool.run(copies)


# ---- optimizers --------------------------------------------------------------------------------

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {}),
    ("Adamax", {"weight_decay": 0.1}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def three_steps(rank: int, world_size: int, name: str, how: str, options: dict[str, Any]) -> None:
    mesh = line(world_size)
    fulls = [torch.randn(shape) for shape in SHAPES]
    plain = [torch.nn.Parameter(full.clone()) for full in fulls]
    ragged = [torch.nn.Parameter(cut(full, mesh, how)) for full in fulls]
    optimizers = [
        getattr(torch.optim, name)(params, lr=0.1, **options) for params in (plain, ragged)
    ]
    for _ in range(3):
        for p, r in zip(plain, ragged, strict=True):
            p.grad = torch.randn(p.shape)
            r.grad = RaggedShardDTensor.from_full(p.grad, mesh, r.placements)
        for optimizer in optimizers:
            optimizer.step()
    for p, r, full in zip(plain, ragged, fulls, strict=True):
        assert isinstance(r, torch.nn.Parameter)
        assert_close(r.detach(), p.detach(), rtol=2e-6, atol=1e-6)
        assert not torch.allclose(p, full)
        for key, state in optimizers[0].state[p].items():
            own = optimizers[1].state[r][key]
            if isinstance(state, torch.Tensor) and state.shape == p.shape:
                assert_close(own, state, rtol=2e-6, atol=1e-6)
    for set_to_none in (False, True):
        optimizers[1].zero_grad(set_to_none=set_to_none)
        assert all((r.grad is None) == set_to_none for r in ragged)
        assert set_to_none or all(float(r.grad.abs().max()) == 0 for r in ragged)


CASES = [
    (name, {**options, **switch})
    for name, options in OPTIMIZERS
    for switch in ({"foreach": False}, {"foreach": True}, {"fused": True})
    if "fused" not in switch or name in FUSED
]


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("name, options", CASES, ids=[f"{n}-{o}" for n, o in CASES])
def test_an_optimizer_steps_as_over_plain_tensors(
    world3: WorkerPool, name: str, options: dict[str, Any], how: str
) -> None:
    world3.run(three_steps, name, how, options)


def default_implementation(rank: int, world_size: int) -> None:
    for name, options in OPTIMIZERS:
        three_steps(rank, world_size, name, "element", options)


def test_every_optimizer_steps_with_its_default_implementation(world2: WorkerPool) -> None:
    world2.run(default_implementation)


def adafactor(rank: int, world_size: int) -> str:
    mesh = line(world_size)
    parameter = torch.nn.Parameter(cut(torch.randn(7, 5), mesh, "row"))
    parameter.grad = cut(torch.randn(7, 5), mesh, "row")
    with pytest.raises(NotImplementedError) as caught:
        torch.optim.Adafactor([parameter]).step()
    return str(caught.value)


def test_adafactor_says_that_it_needs_whole_rows_and_columns(world2: WorkerPool) -> None:
    for message in world2.run(adafactor):
        assert "only reductions to one value are defined" in message
        assert ".full_tensor()" in message


# ---- norms and reductions ----------------------------------------------------------------------


def clipping(rank: int, world_size: int, p: float, foreach: bool | None, bad: float | None) -> None:
    mesh = line(world_size)
    for how in CUTS:
        grads = [torch.randn(shape) for shape in SHAPES] + [torch.randn(4)]
        if bad is not None:
            grads[0][3, 2] = bad
        reference = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        params = [torch.nn.Parameter(cut(torch.zeros(shape), mesh, how)) for shape in SHAPES]
        params.insert(2, torch.nn.Parameter(torch.zeros(4)))
        order = [0, 1, 5, 2, 3, 4]
        for own, grad in zip(reference, grads, strict=True):
            own.grad = grad.clone()
        for own, index in zip(params, order, strict=True):
            plain = not isinstance(own, RaggedShardDTensor)
            own.grad = grads[index].clone() if plain else cut(grads[index], mesh, how)
        expected = torch.nn.utils.clip_grad_norm_(reference, 0.5, p, foreach=foreach)
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5, p, foreach=foreach)
        torch.testing.assert_close(norm, expected, equal_nan=True)
        assert float(norm) == norm.item() or norm.isnan()
        for own, index in zip(params, order, strict=True):
            value = own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad
            torch.testing.assert_close(value, reference[index].grad, equal_nan=True)


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, math.inf, -math.inf, -1.0])
def test_clipping_uses_the_norm_over_all_ranks(
    pool: WorkerPool, p: float, foreach: bool | None
) -> None:
    pool.run(clipping, p, foreach, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_non_finite_gradient_on_one_rank_shows_in_the_norm_on_all(
    pool: WorkerPool, p: float, bad: float
) -> None:
    for foreach in (True, False):
        pool.run(clipping, p, foreach, bad)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "sum of a dtype": lambda t: t.sum(dtype=torch.float64),
    "sum over every dim": lambda t: t.sum(dim=tuple(range(t.dim()))),
    "mean": lambda t: t.mean(),
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(),
    "std": lambda t: t.std(),
    "var": lambda t: torch.var(t, correction=0),
    "norm": lambda t: t.norm(),
    "norm of a dtype": lambda t: torch.linalg.vector_norm(t, 3, dtype=torch.float64),
    "infinity norm": lambda t: t.norm(math.inf),
    "any": lambda t: (t > 1).any(),
    "all": lambda t: (t > -9).all(),
    "isnan": lambda t: t.isnan().any(),
    "isfinite": lambda t: t.isfinite().all(),
    "count_nonzero": lambda t: t.count_nonzero(),
    "sum of a mask": lambda t: (t > 0).sum(),
    "sum of integers": lambda t: (t * 100).to(torch.int32).sum(),
    "max of integers": lambda t: (t * 100).to(torch.int32).max(),
    "dot": lambda t: (t * t).view(-1).dot((t + 1).view(-1)),
}


def reductions(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for shape in SHAPES[:3]:
        for dtype in (torch.float32, torch.bfloat16):
            full = torch.randn(shape).to(dtype)
            for how in CUTS:
                for bad in (None, math.nan, -math.inf):
                    if bad is not None:
                        full.view(-1)[full.numel() // 2] = bad
                    compare_reductions(full, cut(full, mesh, how), bad is None)


def compare_reductions(full: torch.Tensor, ragged: RaggedShardDTensor, finite: bool) -> None:
    for name, reduce in REDUCTIONS.items():
        if not finite and "integers" in name:
            continue
        actual, expected = reduce(ragged), reduce(full)
        assert type(actual) is torch.Tensor, name
        assert actual.dtype == expected.dtype, name
        tolerances = (
            {"rtol": 1e-5, "atol": 1e-6} if full.dtype.itemsize > 2 else {"rtol": 0.02, "atol": 0.1}
        )
        same = torch.allclose(actual.double(), expected.double(), equal_nan=True, **tolerances)
        assert same, f"{name} of {full.dtype}: {actual} instead of {expected}"


def test_a_reduction_gives_the_same_plain_value_on_every_rank(pool: WorkerPool) -> None:
    pool.run(reductions)


def comparisons(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    full = torch.randn(7, 5)
    other = full.clone()
    other[0, 0] += 1
    for how in CUTS:
        ragged = cut(full, mesh, how)
        assert torch.equal(ragged, cut(full, mesh, how))
        assert torch.equal(ragged, cut(full, mesh, "element"))
        assert torch.equal(ragged, full)
        assert torch.equal(full, ragged)
        assert not torch.equal(ragged, cut(other, mesh, how))
        assert not torch.equal(ragged, torch.zeros(5, 7))
        assert torch.allclose(ragged, cut(full + 1e-9, mesh, how))
        assert not torch.allclose(ragged, cut(other, mesh, how))
        assert cut(torch.full((1, 1), 2.5), mesh, "row").item() == 2.5
        with pytest.raises(RuntimeError, match="mean needs a floating point"):
            ragged.to(torch.int64).mean()
        with pytest.raises(RuntimeError, match="has no value"):
            cut(torch.zeros(0, 3), mesh, "row").max()


def test_equal_and_allclose_compare_all_pieces(pool: WorkerPool) -> None:
    pool.run(comparisons)


# ---- gradient scaling --------------------------------------------------------------------------


def overflow_on_one_rank(rank: int, world_size: int, fused: bool) -> tuple[float, bool, bool]:
    mesh = line(world_size)
    results = []
    for bad in (math.inf, 1.0):
        parameter = torch.nn.Parameter(cut(torch.ones(6, 2), mesh, "row"))
        grad = torch.ones(6, 2)
        grad[-1, -1] = bad
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        parameter.grad = cut(grad * 4.0, mesh, "row")
        scaler.step(optimizer)
        scaler.update()
        results.append((scaler.get_scale(), torch.equal(parameter.detach(), torch.ones(6, 2))))
    return results[0][0], results[0][1], results[1][1]


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_the_last_rank_makes_every_rank_skip_the_step(
    pool: WorkerPool, fused: bool
) -> None:
    answers = pool.run(overflow_on_one_rank, fused)
    assert answers == [(2.0, True, False)] * pool.world_size


# ---- random numbers ----------------------------------------------------------------------------

INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda t: torch.nn.init.normal_(t, 1.0, 2.0),
    "uniform": lambda t: torch.nn.init.uniform_(t, -1.0, 2.0),
    "trunc_normal": torch.nn.init.trunc_normal_,
    "narrow trunc_normal": lambda t: torch.nn.init.trunc_normal_(t, 0.0, 1.0, 1.0, 1.5),
    "kaiming_normal": torch.nn.init.kaiming_normal_,
    "kaiming_uniform": lambda t: torch.nn.init.kaiming_uniform_(t, a=math.sqrt(5)),
    "xavier_normal": torch.nn.init.xavier_normal_,
    "xavier_uniform": torch.nn.init.xavier_uniform_,
    "constant": lambda t: torch.nn.init.constant_(t, 3.0),
    "ones": torch.nn.init.ones_,
    "zeros": torch.nn.init.zeros_,
    "erfinv": lambda t: t.uniform_(-0.9, 0.9).erfinv_().mul_(2.0).clamp_(-1, 1),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "exponential": lambda t: t.exponential_(),
    "a generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(3)),
    "randn_like": lambda t: t.copy_(torch.randn_like(t)),
    "rand_like": lambda t: t.copy_(torch.rand_like(t)),
}


def initializers(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for name, initialize in INITIALIZERS.items():
        for shape in ((7, 5), (2, 4), (2, 3, 4)):
            torch.manual_seed(7)
            plain = torch.full(shape, 0.5)
            with torch.no_grad():
                initialize(plain)
            state = torch.get_rng_state()
            for how in CUTS:
                torch.manual_seed(7)
                parameter = torch.nn.Parameter(cut(torch.full(shape, 0.5), mesh, how))
                with torch.no_grad():
                    initialize(parameter)
                assert torch.equal(parameter.detach().full_tensor(), plain), name
                assert torch.equal(torch.get_rng_state(), state), name


def test_a_seed_gives_the_same_numbers_at_any_world_size(pool: WorkerPool) -> None:
    pool.run(initializers)


# ---- pickling and torch.save -------------------------------------------------------------------


def saved_and_loaded(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for how in CUTS:
        tensor = cut(torch.randn(7, 5), mesh, how)
        parameter = torch.nn.Parameter(cut(torch.randn(2, 4), mesh, how), requires_grad=False)
        file = io.BytesIO()
        torch.save({"tensor": tensor, "parameter": parameter}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded["tensor"], tensor)
        assert loaded["tensor"].placements == tensor.placements
        assert torch.equal(loaded["parameter"], parameter)
        assert isinstance(loaded["parameter"], torch.nn.Parameter)
        assert not isinstance(loaded["tensor"], torch.nn.Parameter)
        assert not loaded["parameter"].requires_grad


def test_a_piece_survives_torch_save_with_weights_only(pool: WorkerPool) -> None:
    pool.run(saved_and_loaded)


# ---- replicas on another mesh axis -------------------------------------------------------------


def replicated(rank: int, world_size: int) -> None:
    for mesh_shape in ((world_size, 1), (1, world_size)):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        for how in ("row", "element"):
            full = torch.randn(7, 5)
            ragged = distribute_ragged(full, mesh, how)  # type: ignore[arg-type]
            assert ragged.placements[0] == Replicate()
            assert ragged.ragged_axis == 1
            assert torch.equal(ragged.full_tensor(), full)
            torch.testing.assert_close(ragged.sum(), full.sum())
            torch.testing.assert_close(ragged.norm(), full.norm())
            torch.testing.assert_close(torch._foreach_norm([ragged])[0], full.norm())
            stock = ragged.redistribute(placements=[Replicate(), Shard(0)])
            assert torch.equal(stock.full_tensor(), full)
            written = len(ragged.__create_write_items__("weight", ragged))
            assert (written > 0) == (mesh.get_coordinate()[0] == 0)
            assert len(ragged.__create_chunk_list__()) > 0


def test_a_replica_is_neither_counted_nor_written_twice(pool: WorkerPool) -> None:
    pool.run(replicated)


# ---- what is refused ---------------------------------------------------------------------------


def refusals(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    square = cut(torch.randn(6, 6), mesh, "row")
    with pytest.raises(NotImplementedError, match=r"aten\.mm\.default is not defined.*\.to_local"):
        square @ square
    with pytest.raises(ValueError, match="cut alike"):
        square + cut(torch.randn(6, 6), mesh, "lopsided")
    with pytest.raises(ValueError, match="cut alike"):
        torch._foreach_add_([square], [cut(torch.randn(6, 6), mesh, "lopsided")])
    with pytest.raises(TypeError, match=r"a Tensor of shape \(6, 6\)"):
        square.mul_(torch.randn(6, 6))
    with pytest.raises(TypeError, match=r"a Tensor of shape \(6, 6\)"):
        torch.randn(6, 6).mul_(square)
    with pytest.raises(TypeError, match=r"a DTensor of shape \(6, 6\)"):
        square.mul_(distribute_tensor(torch.randn(6, 6), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"a Tensor of shape \(6, 6\)"):
        torch._foreach_mul_([square], [torch.randn(6, 6)])
    replicated = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
    assert torch.equal(square * replicated, square + square)
    with pytest.raises(NotImplementedError, match="only reductions to one value"):
        square.sum(dim=0)
    with pytest.raises(NotImplementedError, match="is not defined"):
        square[0]
    with pytest.raises(ValueError, match="to another mesh"):
        square.redistribute(init_device_mesh("cpu", (1, world_size)), [Replicate()])
    with pytest.raises(ValueError, match="one placement for each axis"):
        square.redistribute(placements=[Replicate(), Replicate()])


@with_stock_dtensors
def test_an_operator_without_a_meaning_is_refused_by_name(world2: WorkerPool) -> None:
    world2.run(refusals)
