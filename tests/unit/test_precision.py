"""The mixed precision policy and the dtypes that follow from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

from ya_fsdp.precision import MixedPrecisionPolicy, ResolvedDtypes, resolve

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "policy, master, expected",
    [
        ({}, FP32, (FP32, FP32, FP32, FP32, None)),
        ({"param_dtype": BF16}, FP32, (FP32, BF16, BF16, BF16, None)),
        ({"param_dtype": BF16, "reduce_dtype": FP32}, FP32, (FP32, BF16, BF16, FP32, None)),
        ({"reduce_dtype": FP32}, BF16, (BF16, BF16, BF16, FP32, None)),
        ({"param_dtype": FP16, "output_dtype": FP32}, BF16, (BF16, FP16, FP16, FP16, FP32)),
    ],
)
@pytest.mark.parametrize("trainable", [True, False])
def test_dtypes_fall_back_as_in_fsdp2(
    policy: dict[str, torch.dtype],
    master: torch.dtype,
    expected: tuple[Any, ...],
    trainable: bool,
) -> None:
    resolved = resolve(MixedPrecisionPolicy(**policy), master, trainable)
    assert resolved == ResolvedDtypes(*expected)


@pytest.mark.parametrize("master", [torch.uint8, torch.int64, torch.bool])
def test_parameters_that_are_not_floating_point_keep_their_dtype(master: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    assert resolve(policy, master, False) == ResolvedDtypes(master, master, master, master, None)
    with pytest.raises(TypeError, match=str(master)):
        resolve(policy, master, True)


def test_complex_parameters_are_trained_in_their_own_dtype() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    dtype = torch.complex64
    assert resolve(policy, dtype, True) == ResolvedDtypes(dtype, dtype, dtype, dtype, None)


def test_the_defaults_are_those_of_torch() -> None:
    ours, theirs = MixedPrecisionPolicy(), fsdp.MixedPrecisionPolicy()
    for field in dataclasses.fields(theirs):
        assert getattr(ours, field.name) == getattr(theirs, field.name)


def test_positional_arguments_have_the_order_of_torch() -> None:
    ours = MixedPrecisionPolicy(BF16, FP32, FP16, False)
    theirs = fsdp.MixedPrecisionPolicy(BF16, FP32, FP16, False)
    for field in dataclasses.fields(theirs):
        assert getattr(ours, field.name) == getattr(theirs, field.name)


def test_code_that_asks_for_the_policy_of_torch_takes_ours() -> None:
    assert isinstance(MixedPrecisionPolicy(), fsdp.MixedPrecisionPolicy)


def test_the_policy_of_torch_is_taken_over_field_by_field() -> None:
    theirs = fsdp.MixedPrecisionPolicy(BF16, FP32, FP16, cast_forward_inputs=False)
    assert MixedPrecisionPolicy.from_torch(theirs) == MixedPrecisionPolicy(BF16, FP32, FP16, False)
    ours = MixedPrecisionPolicy(param_dtype=BF16)
    assert MixedPrecisionPolicy.from_torch(ours) is ours


def test_a_field_that_only_a_later_torch_has_is_refused_unless_at_its_default() -> None:
    @dataclasses.dataclass(frozen=True)
    class LaterPolicy(fsdp.MixedPrecisionPolicy):
        stochastic_rounding: bool = False

    assert MixedPrecisionPolicy.from_torch(LaterPolicy(BF16)) == MixedPrecisionPolicy(BF16)
    with pytest.raises(NotImplementedError, match="stochastic_rounding=True"):
        MixedPrecisionPolicy.from_torch(LaterPolicy(stochastic_rounding=True))


def test_the_policy_cannot_be_changed_after_it_was_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedPrecisionPolicy().param_dtype = BF16  # type: ignore[misc]


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"param_dtype": "bfloat16"}, TypeError, "param_dtype must be .* got 'bfloat16'"),
        ({"reduce_dtype": torch.int32}, ValueError, "reduce_dtype must be .* got torch.int32"),
        ({"output_dtype": torch.complex64}, ValueError, "output_dtype must be .* torch.complex64"),
        ({"cast_forward_inputs": 1}, TypeError, "cast_forward_inputs must be a bool, got 1"),
        ({"bit32_acc_for_bit16_reduce_scatter": 1}, TypeError, "must be a bool, got 1"),
        (
            {"all_gather_dtype_to_param_cls": torch.nn.Parameter},
            TypeError,
            "all_gather_dtype_to_param_cls maps dtypes to classes",
        ),
        (
            {"all_gather_dtype_to_param_cls": {BF16: int}},
            TypeError,
            r"all_gather_dtype_to_param_cls\[torch.bfloat16\] is no tensor class: <class 'int'>",
        ),
        (
            {"all_gather_dtype_to_param_cls": {"bf16": torch.nn.Parameter}},
            TypeError,
            "a key of all_gather_dtype_to_param_cls must be .* got 'bf16'",
        ),
    ],
)
def test_a_wrong_field_is_refused_with_its_name_and_value(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MixedPrecisionPolicy(**fields)


def test_something_else_than_a_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="MixedPrecisionPolicy, got 'bf16'"):
        MixedPrecisionPolicy.from_torch("bf16")  # type: ignore[arg-type]
