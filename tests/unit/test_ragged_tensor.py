"""Ragged tensors in a group of one process, which needs no second one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ya_fsdp._torch import DTENSOR_BASE
from ya_fsdp.ragged import (
    FlatRaggedShard,
    RaggedShardDTensor,
    distribute_ragged,
    make_placement,
    match_optimizer_state,
    new_ragged,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(params=["row", "element"])
def ragged(request: pytest.FixtureRequest, mesh: DeviceMesh) -> RaggedShardDTensor:
    full = torch.arange(1.0, 13.0).view(4, 3)
    placement = (
        make_placement((0, 12), (4, 3)) if request.param == "row" else FlatRaggedShard((0, 12))
    )
    return RaggedShardDTensor.from_full(full, mesh, placement)


@pytest.fixture
def full() -> torch.Tensor:
    return torch.arange(1.0, 13.0).view(4, 3)


def test_it_has_the_whole_tensors_shape_and_wraps_the_piece_itself(
    ragged: RaggedShardDTensor,
) -> None:
    assert isinstance(ragged, DTENSOR_BASE)
    assert ragged.shape == (4, 3) and ragged.stride() == (3, 1) and ragged.dtype == torch.float32
    assert ragged.to_local() is ragged._local_tensor
    assert ragged.ragged_axis == 0 and ragged.ragged_rank == 0
    flat = isinstance(ragged.ragged_placement, FlatRaggedShard)
    assert ragged.to_local().shape == ((12,) if flat else (4, 3))
    assert torch.nn.Parameter(ragged).data_ptr() == ragged.to_local().data_ptr()
    assert ragged.data_ptr() == 0


def test_a_piece_can_be_replaced_under_the_same_tensor(
    ragged: RaggedShardDTensor, full: torch.Tensor
) -> None:
    parameter = torch.nn.Parameter(ragged)
    parameter._local_tensor = ragged.to_local() * 2
    assert torch.equal(parameter.full_tensor(), full * 2)
    parameter.detach().add_(1)
    assert torch.equal(parameter.full_tensor(), full * 2 + 1)


def test_a_parameter_stays_ragged_and_takes_a_ragged_gradient(ragged: RaggedShardDTensor) -> None:
    for requires_grad in (True, False):
        parameter = torch.nn.Parameter(ragged, requires_grad=requires_grad)
        assert isinstance(parameter, RaggedShardDTensor)
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad is requires_grad and parameter.is_leaf
        assert parameter.to_local() is ragged.to_local()
        parameter.grad = torch.ones_like(ragged)
        assert isinstance(parameter.grad, RaggedShardDTensor)
        assert isinstance(parameter.data, RaggedShardDTensor)
        assert not parameter.data.requires_grad


def test_replacing_the_data_is_refused(ragged: RaggedShardDTensor) -> None:
    with pytest.raises(RuntimeError, match="use copy_"):
        ragged.data = torch.zeros_like(ragged)


def test_new_ragged_makes_no_copy_and_drops_the_pieces_history(mesh: DeviceMesh) -> None:
    local = torch.randn(4, 3, requires_grad=True)
    placements = (make_placement((0, 12), (4, 3)),)
    tensor = new_ragged(local, mesh, placements, (4, 3), requires_grad=True)
    assert tensor.to_local().data_ptr() == local.data_ptr()
    assert tensor.requires_grad and not tensor.to_local().requires_grad


@pytest.mark.parametrize(
    "change, message",
    [
        ({"local": torch.zeros(12)}, r"a piece of shape \(4, 3\) is needed, got \(12,\)"),
        ({"shape": (3, 3)}, "does not place the 9 elements"),
        ({"stride": (1, 4)}, "only row-major"),
        ({"placements": (Replicate(),)}, "one mesh axis has to be ragged"),
        ({"placements": (Shard(0),)}, "has to be ragged"),
        ({"placements": (FlatRaggedShard((0, 6, 12)),)}, "do not fit the mesh"),
        ({"placements": (Replicate(), FlatRaggedShard((0, 12)))}, "do not fit the mesh"),
        ({"placements": (FlatRaggedShard((0, 12)),) * 2}, "only one mesh axis"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    mesh: DeviceMesh, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "local": torch.zeros(4, 3),
        "mesh": mesh,
        "placements": (make_placement((0, 12), (4, 3)),),
        "shape": (4, 3),
    }
    with pytest.raises(ValueError, match=message):
        new_ragged(**{**arguments, **change})


def test_a_granularity_that_is_none_is_refused(mesh: DeviceMesh) -> None:
    for wrong in ("column", 0):
        with pytest.raises(ValueError, match="granularity is"):
            distribute_ragged(torch.zeros(4, 3), mesh, wrong)  # type: ignore[arg-type]


def test_an_empty_piece_has_an_address_of_its_own_that_lasts(mesh: DeviceMesh) -> None:
    empties = [torch.nn.Parameter(distribute_ragged(torch.zeros(0, 3), mesh)) for _ in range(3)]
    addresses = {empty.data_ptr() for empty in empties}
    assert len(addresses) == 3 and 0 not in addresses
    for parameter in empties:
        assert parameter.data_ptr() == parameter.to_local().data_ptr()
        again = pickle.loads(pickle.dumps(parameter))
        assert again.data_ptr() not in addresses
        parameter._local_tensor = torch.zeros(0, 3)
        assert parameter.data_ptr() not in addresses | {0}


POINTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "add alpha": lambda a, b: torch.add(a, b, alpha=2),
    "radd": lambda a, b: 2 + a,
    "rsub": lambda a, b: 2 - a,
    "mul": lambda a, b: a * 3,
    "mul tensor": lambda a, b: torch.tensor(3.0) * a,
    "mul one element": lambda a, b: a * torch.tensor([3.0]),
    "div": lambda a, b: a / b,
    "rdiv": lambda a, b: 1 / a,
    "div mode": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "pow": lambda a, b: a**2,
    "rpow": lambda a, b: 2**a,
    "neg": lambda a, b: -a,
    "sqrt": lambda a, b: a.sqrt(),
    "rsqrt": lambda a, b: a.rsqrt(),
    "square": lambda a, b: a.square(),
    "exp": lambda a, b: a.exp(),
    "log": lambda a, b: a.log(),
    "abs": lambda a, b: (-a).abs(),
    "sign": lambda a, b: (a - 6).sign(),
    "lerp": lambda a, b: a.lerp(b, 0.3),
    "addcmul": lambda a, b: a.addcmul(b, b, value=0.5),
    "addcdiv": lambda a, b: a.addcdiv(b, b, value=0.5),
    "clamp": lambda a, b: a.clamp(2, 7),
    "clamp tensor": lambda a, b: a.clamp(min=b),
    "maximum": lambda a, b: torch.maximum(a, b),
    "max of two": lambda a, b: torch.max(a, b),
    "where": lambda a, b: torch.where(a > 5, a, b),
    "where scalar": lambda a, b: torch.where(a > 5, 0.0, a),
    "masks": lambda a, b: (a > 2) & ~(a > 7) | (a == 1),
    "masked_fill": lambda a, b: a.masked_fill(a > 5, 0.0),
    "nan_to_num": lambda a, b: (a / 0).nan_to_num(1.0),
    "erfinv": lambda a, b: (a / 20).erfinv(),
    "promotion": lambda a, b: a.to(torch.int32) * 1.5,
    "bfloat16": lambda a, b: a.bfloat16() * b,
    "in place": lambda a, b: a.clone().mul_(b).add_(1).clamp_(max=50).sqrt_(),
    "out": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
    "masked write": lambda a, b: masked_write(a.clone()),
    "detach": lambda a, b: torch.nn.Parameter(a).detach().mul_(2),
    "contiguous": lambda a, b: a.contiguous(),
    "view": lambda a, b: (a.view(-1) * 2).view(2, 6),
    "reshape": lambda a, b: a.reshape(3, -1),
    "flatten": lambda a, b: a.flatten(),
    "zeros_like": lambda a, b: torch.zeros_like(a),
    "ones_like": lambda a, b: torch.ones_like(a, dtype=torch.float64),
    "full_like": lambda a, b: torch.full_like(a, 3),
    "new_zeros": lambda a, b: a.new_zeros(a.shape),
    "new_ones": lambda a, b: a.new_ones((4, 3), dtype=torch.int64),
    "new_full": lambda a, b: a.new_full((4, 3), 2.0),
    "half": lambda a, b: a.half(),
    "double": lambda a, b: a.double(),
    "to": lambda a, b: a.to(torch.bfloat16, copy=True),
}


def masked_write(tensor: torch.Tensor) -> torch.Tensor:
    tensor[tensor.gt(5)] = 0.5
    return tensor


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", POINTWISE)
def test_an_operator_on_every_element_matches_the_plain_one(
    ragged: RaggedShardDTensor, full: torch.Tensor, name: str, inference: bool
) -> None:
    other = full.flip(0).contiguous()
    ragged_other = torch.empty_like(ragged).copy_(other)
    with torch.inference_mode(inference), torch.no_grad():
        expected = POINTWISE[name](full, other)
        actual = POINTWISE[name](ragged, ragged_other)
    assert isinstance(actual, RaggedShardDTensor)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=0, atol=0)


def test_an_in_place_operator_returns_the_tensor_and_writes_the_piece(
    ragged: RaggedShardDTensor,
) -> None:
    piece = ragged.to_local()
    assert ragged.mul_(0).add_(4.0) is ragged
    assert ragged.to_local() is piece and float(piece.min()) == 4.0
    out = torch.empty_like(ragged)
    assert torch.mul(ragged, 2, out=out) is out
    assert float(out.to_local().max()) == 8.0
    with pytest.raises(TypeError, match="is not cut like it"):
        torch.mul(ragged, 2, out=torch.empty(4, 3))


def test_a_list_operator_takes_plain_tensors_too(
    ragged: RaggedShardDTensor, full: torch.Tensor
) -> None:
    plain = torch.ones(2)
    torch._foreach_add_([ragged, plain], [ragged.clone(), plain.clone()])
    assert torch.equal(ragged.full_tensor(), full * 2) and torch.equal(plain, torch.full((2,), 2.0))
    results = torch._foreach_mul([ragged, plain], 0.5)
    assert isinstance(results[0], RaggedShardDTensor) and type(results[1]) is torch.Tensor
    assert torch.equal(results[0].full_tensor(), full)
    torch._foreach_copy_([ragged, plain], [torch.zeros(4, 3), torch.zeros(2)])
    assert float(ragged.abs().max()) == 0 and float(plain.max()) == 0


def test_a_factory_for_another_shape_gives_a_plain_tensor(ragged: RaggedShardDTensor) -> None:
    plain = ragged.new_zeros(4)
    assert type(plain) is torch.Tensor and plain.shape == (4,) and plain.dtype == ragged.dtype


def test_a_view_shares_memory(ragged: RaggedShardDTensor, full: torch.Tensor) -> None:
    ragged.view(6, 2).mul_(2)
    assert torch.equal(ragged.full_tensor(), full * 2)


def test_a_meta_tensor_can_be_made_and_gathered(mesh: DeviceMesh) -> None:
    meta = distribute_ragged(torch.empty(4, 3, device="meta"), mesh)
    assert meta.is_meta and meta.full_tensor().is_meta and meta.full_tensor().shape == (4, 3)
    assert torch.empty_like(meta, device="cpu").device.type == "cpu"


def test_a_copy_has_memory_and_a_gradient_of_its_own(
    ragged: RaggedShardDTensor, full: torch.Tensor
) -> None:
    parameter = torch.nn.Parameter(ragged, requires_grad=False)
    parameter.grad = torch.ones_like(ragged)
    first, second = copy.deepcopy([parameter, parameter])
    assert first is second and isinstance(first, torch.nn.Parameter)
    assert not first.requires_grad
    assert torch.equal(first.grad, parameter.grad) and first.grad is not parameter.grad
    first.zero_()
    assert torch.equal(parameter.full_tensor(), full)


def test_pickle_and_torch_save_keep_what_a_tensor_is(ragged: RaggedShardDTensor) -> None:
    parameter = torch.nn.Parameter(ragged)
    file = io.BytesIO()
    torch.save([ragged, parameter], file)
    file.seek(0)
    for tensors in (
        torch.load(file, weights_only=True),
        pickle.loads(pickle.dumps([ragged, parameter])),
    ):
        for again, original in zip(tensors, (ragged, parameter), strict=True):
            assert type(again) is RaggedShardDTensor
            assert isinstance(again, torch.nn.Parameter) == isinstance(original, torch.nn.Parameter)
            assert again.requires_grad == original.requires_grad
            assert torch.equal(again.to_local(), original.to_local())


def test_the_representation_shows_the_piece_and_the_placement(ragged: RaggedShardDTensor) -> None:
    text = repr(torch.nn.Parameter(ragged))
    assert "12." in text and "shape=(4, 3)" in text and "RaggedShard(" in text
    assert str(ragged).startswith("RaggedShardDTensor(")


def test_an_unknown_operator_is_named_together_with_the_remedy(ragged: RaggedShardDTensor) -> None:
    for call in (
        lambda: ragged @ ragged.view(3, 4),
        lambda: ragged[0],
        lambda: ragged.t(),
        lambda: torch.cat([ragged, ragged]),
        lambda: ragged.cumsum(0),
        lambda: ragged.argmax(),
        lambda: ragged.unbind(),
        lambda: ragged.view(torch.int32),
    ):
        with pytest.raises(NotImplementedError, match=r"aten\..*\.to_local\(\).*\.full_tensor\(\)"):
            call()
    with pytest.raises(NotImplementedError, match="only reductions to one value"):
        ragged.norm(dim=-1)
    with pytest.raises(NotImplementedError, match="keepdim"):
        ragged.sum(dim=(0, 1), keepdim=True)
    with pytest.raises(NotImplementedError, match="one value only"):
        ragged[ragged > 3] = torch.zeros(9)


def test_the_boxes_of_a_checkpoint_are_windows_on_the_piece(ragged: RaggedShardDTensor) -> None:
    (item,) = ragged.__create_write_items__("layer.weight", ragged)
    assert item.index.fqn == "layer.weight" and item.tensor_data.size == (4, 3)
    (chunk,) = ragged.__create_chunk_list__()
    assert chunk.offsets == (0, 0) and chunk.sizes == (4, 3)
    window = ragged.__get_tensor_shard__(item.index)
    window[3, 2] = -1.0
    assert ragged.to_local().reshape(-1)[-1] == -1.0
    wrong = type(item.index)("layer.weight", torch.Size([1, 0]))
    with pytest.raises(ValueError, match="no box at"):
        ragged.__get_tensor_shard__(wrong)


def test_a_tensor_without_elements_is_written_by_someone(mesh: DeviceMesh) -> None:
    empty = distribute_ragged(torch.zeros(0, 3), mesh)
    (item,) = empty.__create_write_items__("weight", empty)
    assert item.tensor_data.size == (0, 3)
    assert empty.__get_tensor_shard__(item.index).shape == (0, 3)


def test_state_of_other_cuts_is_cut_like_its_parameter(
    ragged: RaggedShardDTensor, full: torch.Tensor
) -> None:
    parameter, unused = torch.nn.Parameter(ragged), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter, unused], lr=0.1)
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        "exp_avg": full.clone(),
        "exp_avg_sq": full.double(),
    }
    match_optimizer_state(optimizer)
    state = optimizer.state[parameter]
    assert type(state["step"]) is torch.Tensor and unused not in optimizer.state
    for key in ("exp_avg", "exp_avg_sq"):
        assert isinstance(state[key], RaggedShardDTensor)
        assert torch.equal(state[key].full_tensor().float(), full)
    assert state["exp_avg_sq"].dtype == torch.float64
    assert torch.equal(parameter.detach().full_tensor(), full)
