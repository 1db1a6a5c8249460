"""The options of every integration in one dataclass, and the places they are read from."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ya_fsdp import MixedPrecisionPolicy, fully_shard
from ya_fsdp.collectives import (
    C10dCollectives,
    Collectives,
    NcclBufferCollectives,
    SymmetricMemoryCollectives,
)

WrapPolicy = Callable[[str, nn.Module], bool]
ENV_PREFIX = "YA_FSDP_"
CONFIG_FILE_ENV = "YA_FSDP_CONFIG_FILE"

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_COLLECTIVES: dict[str, Callable[[], Any]] = {
    "c10d": C10dCollectives,
    "symmetric_memory": SymmetricMemoryCollectives,
    "nccl_buffers": NcclBufferCollectives,
}
# Keys of a YAML `fsdp_config` that carry no prefix of ours: the names of the original YaFSDP.
_UNPREFIXED = ("num_layers_to_checkpoint",)
_PREFIXES = ("fsdp_ya_fsdp_", "ya_fsdp_", "fsdp_")
# What `fully_shard` takes and this class has a field for, or decides by itself.
_OWN_KEYWORDS = frozenset(
    {"module", "mesh", "reshard_after_forward", "mp_policy", "ignored_params"}
    | {"shard_alignment", "granularity", "fused_weight_gradients", "collectives"}
    | {"sync_replicas", "shard_optimizer_over_replicas"}
)


@dataclass
class YaFSDPConfig:
    """How an integration shards a model.

    Every field can be given in Python, as ``YA_FSDP_<FIELD>`` in the environment, or as
    ``ya_fsdp_<field>`` under ``fsdp_config`` in accelerate's YAML, in falling order of rank.

    Attributes:
        enabled: ``False`` leaves the work to the library's own FSDP2.
        wrap: Which modules become units of their own: class names, or a function of
            (name, module). ``None``: what the library was told, else the model's
            ``_no_split_modules``, else the entries of its outermost ``nn.ModuleList``.
        reshard_after_forward: See :func:`ya_fsdp.fully_shard`. ``None``: what the library was
            told, else the engine's default.
        param_dtype: Dtype of compute, such as ``"bf16"``. ``None``: what the library's mixed
            precision says.
        reduce_dtype: Dtype of the gradient reduction. ``None``: float32 under mixed precision.
        output_dtype: Dtype that outputs are cast to. ``None``: left alone.
        gather_dtype: Dtype that weights travel in: ``"fp8"`` or ``"int8"``. ``None``: the one they
            are computed in.
        bit32_acc_for_bit16_reduce_scatter: See :class:`ya_fsdp.MixedPrecisionPolicy`.
        cast_forward_inputs: Whether floating-point inputs are cast to ``param_dtype``.
        master_dtype: Dtype that trainable parameters are kept in under mixed precision; ``None``
            leaves them in the dtype they were loaded in.
        ignored: Names of modules or parameters to leave alone, exact or as a prefix.
        shard_alignment: See :func:`ya_fsdp.fully_shard`.
        granularity: See :func:`ya_fsdp.fully_shard`. Rows by default here, because Hugging
            Face's loaders of whole state dicts need them.
        fused_weight_gradients: See :func:`ya_fsdp.fully_shard`.
        collectives: See :func:`ya_fsdp.fully_shard`; also by name: ``"c10d"``,
            ``"symmetric_memory"`` or ``"nccl_buffers"``.
        sync_replicas: See :func:`ya_fsdp.fully_shard`.
        shard_optimizer_over_replicas: See :func:`ya_fsdp.fully_shard`.
        num_layers_to_checkpoint: Recompute the activations of this many layers, counted from the
            first; -1 is all of them.
        cpu_ram_efficient_loading: Take weights from rank 0 and broadcast them unit by unit.
            ``None``: what the library was told.
        num_gather_buffers: See :meth:`ya_fsdp.YaFSDPModule.set_num_gather_buffers`.
        num_gradient_buffers: See :meth:`ya_fsdp.YaFSDPModule.set_num_gradient_buffers`.
        resident_budget: Bytes for units that stay gathered from forward to backward, or
            ``"auto"``; see :func:`ya_fsdp.set_resident_budget`.
        communication_sms: Multiprocessors for communication, or ``"auto"``; see
            :func:`ya_fsdp.set_communication_sms`.
        graph: Always ``False``: a library's loop reads values on the host in every step, so it can
            not be captured. :func:`ya_fsdp.graph.capture_step` is for loops of one's own.
        options: Further keywords of :func:`ya_fsdp.fully_shard`.

    Raises:
        ValueError: If a dtype, a count or a keyword in ``options`` is not known.
    """

    enabled: bool = True
    wrap: Sequence[str] | WrapPolicy | None = None
    reshard_after_forward: bool | int | None = None
    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    output_dtype: torch.dtype | str | None = None
    gather_dtype: torch.dtype | str | None = None
    bit32_acc_for_bit16_reduce_scatter: bool = False
    cast_forward_inputs: bool = True
    master_dtype: torch.dtype | str | None = torch.float32
    ignored: Sequence[str] = ()
    shard_alignment: int | None = None
    granularity: Literal["auto", "row", "element"] | int = "row"
    fused_weight_gradients: bool = False
    collectives: str | Collectives | None = None
    sync_replicas: bool = True
    shard_optimizer_over_replicas: bool = False
    num_layers_to_checkpoint: int = 0
    cpu_ram_efficient_loading: bool | None = None
    num_gather_buffers: int | None = None
    num_gradient_buffers: int | None = None
    resident_budget: int | Literal["auto"] | None = None
    communication_sms: int | Literal["auto"] | None = None
    graph: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtypes = ("param_dtype", "reduce_dtype", "output_dtype", "gather_dtype", "master_dtype")
        for name in dtypes:
            setattr(self, name, as_dtype(name, getattr(self, name)))
        self._check_values()
        if isinstance(self.wrap, str):
            self.wrap = _names(self.wrap)
        if self.num_layers_to_checkpoint < -1:
            raise ValueError(
                "num_layers_to_checkpoint must be -1 (all), 0 or a count, got "
                f"{self.num_layers_to_checkpoint}"
            )
        self._check_options()

    def _check_values(self) -> None:
        for name in ("resident_budget", "communication_sms"):
            value = getattr(self, name)
            if value not in (None, "auto") and type(value) is not int:
                raise ValueError(f"{name} must be an integer or 'auto', got {value!r}")
        if isinstance(self.collectives, str) and self.collectives not in _COLLECTIVES:
            raise ValueError(
                f"collectives must be one of {', '.join(_COLLECTIVES)} or an object of one's own, "
                f"got {self.collectives!r}"
            )
        if self.graph:
            raise ValueError(
                "graph must be false: the loop of a training library reads values on the host in "
                "every step and can not be captured. For a loop of your own there is "
                "ya_fsdp.graph.capture_step"
            )

    def _check_options(self) -> None:
        known = set(inspect.signature(fully_shard).parameters) - _OWN_KEYWORDS
        unknown = sorted(set(self.options) - known)
        if unknown:
            raise ValueError(
                f"fully_shard of this version has no keyword {', '.join(unknown)}; "
                f"options may have {', '.join(sorted(known)) or 'none'}"
            )

    def mp_policy(self, mixed: Any = None) -> MixedPrecisionPolicy:
        """The policy of these dtypes over the library's.

        Args:
            mixed: The library's torch ``MixedPrecisionPolicy``, or ``None``.

        Returns:
            The policy: these dtypes where given, else the library's, else float32 to reduce in
            if there is a dtype to compute in.
        """
        param = self.param_dtype or getattr(mixed, "param_dtype", None)
        reduce = self.reduce_dtype or getattr(mixed, "reduce_dtype", None)
        output = self.output_dtype or getattr(mixed, "output_dtype", None)
        if reduce is None and param is not None:
            reduce = torch.float32
        return MixedPrecisionPolicy(
            param_dtype=as_dtype("param_dtype", param),
            reduce_dtype=as_dtype("reduce_dtype", reduce),
            output_dtype=as_dtype("output_dtype", output),
            cast_forward_inputs=self.cast_forward_inputs,
            gather_dtype=as_dtype("gather_dtype", self.gather_dtype),
            bit32_acc_for_bit16_reduce_scatter=self.bit32_acc_for_bit16_reduce_scatter,
        )

    def keywords(self) -> dict[str, Any]:
        """What every :func:`ya_fsdp.fully_shard` of a model gets, but mesh, policy and the like."""
        named = self.collectives
        return {
            "shard_alignment": self.shard_alignment,
            "granularity": self.granularity,
            "fused_weight_gradients": self.fused_weight_gradients,
            "collectives": _COLLECTIVES[named]() if isinstance(named, str) else named,
            "sync_replicas": self.sync_replicas,
            "shard_optimizer_over_replicas": self.shard_optimizer_over_replicas,
            **self.options,
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], **overrides: Any) -> YaFSDPConfig:
        """Reads the keys of an ``fsdp_config``; those of the library itself are passed over.

        Args:
            values: Keys ``ya_fsdp_<field>``, ``fsdp_ya_fsdp_<field>``, a nested ``ya_fsdp``
                mapping of fields, or the original's ``fsdp_num_layers_to_checkpoint``.
            overrides: Fields that win.

        Raises:
            ValueError: If a key of ours names no field.
        """
        return cls(**{**_mapping_fields(values), **overrides})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> YaFSDPConfig:
        """Reads ``YA_FSDP_<FIELD>`` variables.

        Args:
            environ: Variables; those of the process by default.
            overrides: Fields that win.

        Raises:
            ValueError: If a value can not be read.
        """
        return cls(**{**_env_fields(os.environ if environ is None else environ), **overrides})

    @classmethod
    def from_accelerate_yaml(cls, path: str | Path, **overrides: Any) -> YaFSDPConfig:
        """Reads the ``fsdp_config`` of a file made by ``accelerate config``."""
        import yaml  # accelerate brings it along

        content = yaml.safe_load(Path(path).read_text()) or {}
        return cls.from_mapping(content.get("fsdp_config") or {}, **overrides)

    @classmethod
    def discover(
        cls, fsdp_config: Mapping[str, Any] | None = None, **overrides: Any
    ) -> YaFSDPConfig:
        """Reads the YAML of ``accelerate launch``, the environment, what is given; the last wins.

        The YAML is the file named by ``YA_FSDP_CONFIG_FILE``; else the ``--config_file`` of the
        ``accelerate launch`` that started this process, where the system tells (Linux).

        Args:
            fsdp_config: Keys as in :meth:`from_mapping`.
            overrides: Fields that win over all else.
        """
        given = _mapping_fields(fsdp_config or {})
        merged = {**_env_fields(os.environ), **given, **overrides}
        path = accelerate_config_file()
        return cls(**merged) if path is None else cls.from_accelerate_yaml(path, **merged)


def accelerate_config_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """The YAML that this process was launched with, if that can be known."""
    named = (os.environ if environ is None else environ).get(CONFIG_FILE_ENV)
    if named:
        return Path(named)
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return None
    words = raw.decode(errors="replace").split("\0")
    if not all(any(part in word for word in words) for part in ("accelerate", "launch")):
        return None
    for index, word in enumerate(words):
        if word == "--config_file" and index + 1 < len(words):
            return Path(words[index + 1])
        if word.startswith("--config_file="):
            return Path(word.partition("=")[2])
    return None


def as_dtype(name: str, value: Any) -> torch.dtype | None:
    """A ``torch.dtype`` from itself or from its name."""
    if value is None or isinstance(value, torch.dtype):
        return value
    text = str(value).removeprefix("torch.").lower()
    if text in ("", "none", "null"):
        return None
    if text not in _DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(_DTYPES)}, got {value!r}")
    return _DTYPES[text]


def _mapping_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields among the keys of an ``fsdp_config``."""
    found: dict[str, Any] = dict(values.get("ya_fsdp") or {})
    for key, value in values.items():
        prefix = next((p for p in _PREFIXES if key.startswith(p)), "")
        name = key[len(prefix) :]
        if prefix in _PREFIXES[:2] or name in _UNPREFIXED:
            found[name] = value
    return _parse(found, "fsdp_config")


def _env_fields(environ: Mapping[str, str]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(YaFSDPConfig) if f.name != "options"]
    found = {n: environ[ENV_PREFIX + n.upper()] for n in names if ENV_PREFIX + n.upper() in environ}
    return _parse(found, "the environment")


def _parse(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Turns strings into what the fields hold."""
    kinds = {f.name: str(f.type) for f in dataclasses.fields(YaFSDPConfig)}
    parsed = {}
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(
                f"{where} has the YaFSDP option {name!r}; there are {', '.join(sorted(kinds))}"
            )
        parsed[name] = _parse_one(name, kinds[name], value)
    return parsed


def _parse_one(name: str, kind: str, value: Any) -> Any:
    if not isinstance(value, str) or "dtype" in kind:
        return value
    text = value.strip().lower()
    if text in ("none", "null", ""):
        return () if name == "ignored" else None
    if kind.startswith("bool | int") and text.isdigit() and int(text) > 1:
        return int(text)
    if kind.startswith("bool"):
        if text not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return text in ("1", "true", "yes", "on")
    if name in ("wrap", "ignored"):
        return _names(value)
    if text.removeprefix("-").isdigit():
        return int(text)
    if kind.startswith("int") and not (text == "auto" and "auto" in kind):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
