"""Mixed precision: what the user asks for, and the dtypes that follow from it.

The dtypes of a group are resolved once, by :func:`resolve`; everything after that reads
:class:`ResolvedDtypes` and never falls back from one dtype to another on its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch.distributed import fsdp

QUANTISED = (torch.float8_e4m3fn, torch.int8)
"""Dtypes in which parameters travel with scales."""


@dataclass(frozen=True)
class MixedPrecisionPolicy(fsdp.MixedPrecisionPolicy):
    """The dtypes of computation, communication and outputs of the modules of a call.

    It is also a torch ``MixedPrecisionPolicy``, with the same meaning of the same fields, so that
    code which asks for an instance of that takes this one.

    Attributes:
        param_dtype: Dtype of the unsharded parameters, hence of the all-gather, of forward and of
            backward. ``None``: the parameter's own. Parameters that are not floating point keep
            theirs.
        reduce_dtype: Dtype of the gradient reduction. ``None``: the dtype of computation.
        output_dtype: Floating-point outputs of forward are cast to it. ``None``: left alone.
        cast_forward_inputs: Whether floating-point inputs of forward are cast to ``param_dtype``.
        bit32_acc_for_bit16_reduce_scatter: Sum a 16-bit reduce-scatter in fp32: ranks exchange
            unsummed 16-bit gradients, as many bytes as before, and add them up in fp32. Changes
            nothing where the reduce dtype has other than 16 bits.
        all_gather_dtype_to_param_cls: For each dtype of the all-gather, the tensor subclass of the
            parameters gathered in it. Not available yet: only ``None`` is accepted.

        gather_dtype: ``torch.float8_e4m3fn`` or ``torch.int8``: parameters of two or more
            dimensions are gathered in these 8 bits with one fp32 scale per 256 elements, and
            computed with as what is left of them in ``param_dtype``. The sharded parameters, which
            the optimizer updates, keep every bit. One rank alone, which sends nothing, rounds
            nothing. ``None``: gathered in ``param_dtype``.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, or a switch is not a ``bool``.
        ValueError: If a dtype is not floating point.
        NotImplementedError: If a field that is not available yet has a value of its own.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    bit32_acc_for_bit16_reduce_scatter: bool = False
    all_gather_dtype_to_param_cls: Mapping[torch.dtype, type[torch.Tensor]] | None = None
    gather_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.gather_dtype not in (None, *QUANTISED):
            raise ValueError(
                "gather_dtype must be torch.float8_e4m3fn, torch.int8 or None, "
                f"got {self.gather_dtype!r}; param_dtype is what others are gathered in"
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            _check_dtype(name, getattr(self, name))
        for name in ("cast_forward_inputs", "bit32_acc_for_bit16_reduce_scatter"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.all_gather_dtype_to_param_cls is not None:
            raise NotImplementedError(
                "all_gather_dtype_to_param_cls is not available yet; it must be None, "
                f"got {self.all_gather_dtype_to_param_cls!r}"
            )

    @classmethod
    def from_torch(cls, policy: fsdp.MixedPrecisionPolicy) -> "MixedPrecisionPolicy":
        """Takes over torch's policy.

        Args:
            policy: A torch ``MixedPrecisionPolicy``; one of this class is returned as it is.

        Returns:
            The policy with the same fields.

        Raises:
            TypeError: If ``policy`` is not a ``MixedPrecisionPolicy``.
            NotImplementedError: If it sets a field that this class does not have.
        """
        if isinstance(policy, cls):
            return policy
        if not isinstance(policy, fsdp.MixedPrecisionPolicy):
            raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {policy!r}")
        known = {field.name for field in fields(cls)}
        values = {field.name: getattr(policy, field.name) for field in fields(policy)}
        for field in fields(policy):
            if field.name not in known and values[field.name] != field.default:
                raise NotImplementedError(
                    f"MixedPrecisionPolicy.{field.name}={values[field.name]!r} is not supported"
                )
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, slots=True)
class ResolvedDtypes:
    """The dtypes of one group.

    Attributes:
        master: Dtype of the sharded parameters and of their gradients and optimizer state.
        compute: Dtype of the unsharded parameters.
        gather: Dtype of the gathered group.
        reduce: Dtype of the elements on the wire in the gradient reduction.
        output: Dtype to which floating-point outputs are cast, ``None`` to leave them alone.
        wire: Dtype of quantised elements in the all-gather, ``None`` where they are sent as they
            are gathered.
    """

    master: torch.dtype
    compute: torch.dtype
    gather: torch.dtype
    reduce: torch.dtype
    output: torch.dtype | None
    wire: torch.dtype | None = None


def resolve(
    policy: MixedPrecisionPolicy, master_dtype: torch.dtype, trainable: bool, ndim: int = 1
) -> ResolvedDtypes:
    """Resolves a policy for the parameters of one dtype.

    A frozen group has a reduce dtype too, because its parameters may be unfrozen later.

    Args:
        policy: The policy of the call.
        master_dtype: Dtype of the parameters as the user made them.
        trainable: Whether any of them requires a gradient.
        ndim: Their number of dimensions; those with one are not quantised.

    Returns:
        The dtypes, all present except possibly ``output`` and ``wire``.

    Raises:
        TypeError: If ``trainable`` parameters have a dtype without gradients.
    """
    if trainable and not (master_dtype.is_floating_point or master_dtype.is_complex):
        raise TypeError(f"parameters of dtype {master_dtype} cannot require gradients")
    compute = reduce = master_dtype
    wire = None
    if master_dtype.is_floating_point:
        wire = policy.gather_dtype if ndim > 1 else None
        compute = policy.param_dtype or master_dtype
        reduce = policy.reduce_dtype or compute
    return ResolvedDtypes(master_dtype, compute, compute, reduce, policy.output_dtype, wire)


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype or None, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating-point dtype, got {dtype}")
