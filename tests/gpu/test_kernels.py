"""Triton kernels against the torch operators that they stand for."""

from __future__ import annotations

import pytest
import torch

from benchmarks import wire
from ya_fsdp import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or kernels.triton_kernels() is None,
        reason="needs a CUDA device and Triton",
    ),
]


@pytest.fixture(autouse=True)
def with_kernels_for_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YA_FSDP_TRITON_CLIP", "1")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("divisor", [1.0, 3.0, 64.0])
@pytest.mark.parametrize("ranks", [1, 3, 64])
@pytest.mark.parametrize("out_dtype", [None, FP32], ids=["rounded", "fp32"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_the_sum_kernel_adds_like_torch(
    dtype: torch.dtype, out_dtype: torch.dtype | None, ranks: int, divisor: float
) -> None:
    torch.manual_seed(0)
    for numel in (1, 2048, 100_003):
        rows = torch.randn(ranks, numel, device="cuda").to(dtype)
        output = torch.full((numel,), float("nan"), dtype=out_dtype or dtype, device="cuda")
        kernels.sum_rows(output, rows, divisor)
        truth = rows.double().sum(0) / divisor
        size = rows.double().abs().sum(0) / divisor
        rounding = 2.0**-22 if output.dtype == FP32 else torch.finfo(dtype).eps
        smallest = torch.finfo(output.dtype).smallest_normal * torch.finfo(output.dtype).eps
        assert ((output.double() - truth).abs() <= rounding * size + smallest).all()
        by_torch = torch.empty_like(output)
        kernels.sum_rows_torch(by_torch, rows, divisor)
        assert ((output.double() - by_torch.double()).abs() <= 2 * rounding * size + smallest).all()


def test_the_sum_kernel_passes_on_what_is_no_number() -> None:
    rows = torch.zeros(4, 4096, dtype=BF16, device="cuda")
    rows[1, 5], rows[2, 7], rows[3, 4095] = float("inf"), float("nan"), -float("inf")
    output = torch.empty(4096, dtype=BF16, device="cuda")
    kernels.sum_rows(output, rows)
    assert output[5] == float("inf") and output[7].isnan() and output[4095] == -float("inf")
    assert output.isfinite().sum() == 4096 - 3


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_the_dequantise_kernel_gives_the_bits_of_torch(
    dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    for ranks, numel in ((1, 256), (3, 256 * 129), (8, 256 * 4096)):
        output, values, scales = wire.gathered_rows(ranks, numel, dtype, out_dtype)
        assert values.stride(0) > numel, "rows lie apart, as the gathered ones do"
        by_torch = torch.empty_like(output)
        kernels.dequantise_rows(output, values, scales)
        kernels.dequantise_rows_torch(by_torch, values, scales)
        assert torch.equal(output, by_torch)


def test_the_kernels_are_captured_in_a_graph() -> None:
    rows = torch.randn(8, 4096, device="cuda").to(BF16)
    output = torch.empty(4096, device="cuda")
    kernels.sum_rows(output, rows, 8.0)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sum_rows(output, rows, 8.0)
    rows.fill_(2.0)
    graph.replay()
    assert torch.equal(output, torch.full_like(output, 2.0))


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize("sizes", [(), (1,), (4096 * 1024 + 5, 7, 100_003), (3,) * 300], ids=str)
def test_the_clipping_kernels_do_what_torch_does(sizes: tuple[int, ...], max_norm: float) -> None:
    torch.manual_seed(0)
    mine = [torch.randn(size, device="cuda") for size in sizes]
    params = [torch.nn.Parameter(torch.empty_like(t)) for t in mine]
    for param, tensor in zip(params, mine, strict=True):
        param.grad = tensor.clone()
    norm = kernels.scale_to_norm(mine, kernels.square_sums(mine, torch.device("cuda")), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm)
    torch.testing.assert_close(norm, expected.to("cuda"))
    for param, tensor in zip(params, mine, strict=True):
        torch.testing.assert_close(tensor, param.grad)


def test_clipping_makes_no_number_of_what_is_none() -> None:
    mine = [torch.ones(5000, device="cuda"), torch.ones(2, 6, device="cuda").t()]
    mine[1][3, 1] = float("nan")
    norm = kernels.scale_to_norm(mine, kernels.square_sums(mine, torch.device("cuda")), 1.0)
    assert norm.isnan() and all(t.isnan().all() for t in mine)
