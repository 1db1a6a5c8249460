"""Mixed precision: what the user asks for, and the dtypes that follow from it.

The dtypes of a group are resolved once, by :func:`resolve`; everything after that reads
:class:`ResolvedDtypes` and never falls back from one dtype to another on its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

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
        all_gather_dtype_to_param_cls: For each dtype of the all-gather, the class of the parameters
            gathered in it. For a tensor subclass with an all-gather of its own
            (``fsdp_pre_all_gather``) it is checked against what that sends. Other parameters of the
            class are gathered and computed with in that dtype in place of ``param_dtype`` (fp32
            islands), or with ``torch.float8_e4m3fn`` and ``torch.int8`` as with ``gather_dtype``.
        gather_dtype: ``torch.float8_e4m3fn`` or ``torch.int8``: parameters of two or more
            dimensions are gathered in these 8 bits with one fp32 scale per 256 elements, and
            computed with as what is left of them in ``param_dtype``. The sharded parameters, which
            the optimizer updates, keep every bit. One rank alone, which sends nothing, rounds
            nothing. ``None``: gathered in ``param_dtype``.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, a switch is not a ``bool``, or a class no
            class of tensors.
        ValueError: If a dtype is not floating point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    bit32_acc_for_bit16_reduce_scatter: bool = False
    all_gather_dtype_to_param_cls: Mapping[torch.dtype, type[torch.Tensor]] | None = field(
        default=None, hash=False
    )
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
        _check_classes(self.all_gather_dtype_to_param_cls)

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
        known = {each.name for each in fields(cls)}
        values = {each.name: getattr(policy, each.name) for each in fields(policy)}
        for each in fields(policy):
            if each.name not in known and values[each.name] != each.default:
                raise NotImplementedError(
                    f"MixedPrecisionPolicy.{each.name}={values[each.name]!r} is not supported"
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
    policy: MixedPrecisionPolicy,
    master_dtype: torch.dtype,
    trainable: bool,
    ndim: int = 1,
    kind: type[torch.Tensor] = torch.nn.Parameter,
) -> ResolvedDtypes:
    """Resolves a policy for the parameters of one dtype.

    A frozen group has a reduce dtype too, because its parameters may be unfrozen later.

    Args:
        policy: The policy of the call.
        master_dtype: Dtype of the parameters as the user made them.
        trainable: Whether any of them requires a gradient.
        ndim: Their number of dimensions; those with one are not quantised.
        kind: Their class; what has an all-gather of its own is not quantised either.

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
        if hasattr(kind, "fsdp_pre_all_gather"):
            wire = None
        else:
            for dtype, each in (policy.all_gather_dtype_to_param_cls or {}).items():
                if issubclass(kind, each):
                    wire = dtype if dtype in QUANTISED and ndim > 1 else None
                    compute = compute if dtype in QUANTISED else dtype
        reduce = policy.reduce_dtype or compute
    return ResolvedDtypes(master_dtype, compute, compute, reduce, policy.output_dtype, wire)


def _check_classes(classes: object) -> None:
    if classes is None:
        return
    if not isinstance(classes, Mapping):
        raise TypeError(
            f"all_gather_dtype_to_param_cls maps dtypes to classes of parameters, got {classes!r}"
        )
    for dtype, kind in classes.items():
        if not isinstance(kind, type) or not issubclass(kind, torch.Tensor):
            raise TypeError(f"all_gather_dtype_to_param_cls[{dtype}] is no tensor class: {kind!r}")
        if dtype not in QUANTISED:
            _check_dtype("a key of all_gather_dtype_to_param_cls", dtype)


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype or None, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating-point dtype, got {dtype}")
