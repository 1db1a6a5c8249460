"""Names of what is measured: an implementation and the options it is given.

`ours@flat+bf16reduce+set_communication_sms=8` is the implementation `ours` with two options and one
call of a setter. Options that every sharded implementation knows:

    noreshard      keep gathered parameters after the forward
    noprefetch     no explicit prefetch in the forward (FSDP2 has to be asked for it)
    bf16reduce     reduce gradients in bf16
    fused          backward products write weight gradients into the buffer (ours only)
    flat           the optimizer gets `ya_fsdp.flat_parameters(model)` (ours only)
    early          the optimizer steps in the backward (ours only)
    clip           clip the gradient norm at 1 before the optimizer
    graph          the whole step as one CUDA graph, captured by hand
    capture        the whole step through `ya_fsdp.graph.capture_step` (ours only)
    hsdp           two replicas of half the ranks each
    hpz            backward gathers from a second shard over half the ranks
    symmetric      gathers by copy engines over symmetric memory (ours only)
    ncclbuffers    slots in NCCL's registered memory (ours only)
    carve=N        matrix products leave N multiprocessors free (cuBLASLt)
    NAME=VALUE     a setter: a method of the root module, else a function of `ya_fsdp` that takes
                   the model first; VALUE is JSON, a list is the argument list
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

FLAGS = frozenset(
    {
        "noreshard", "noprefetch", "bf16reduce", "fused", "flat", "clip", "graph", "capture",
        "early", "hsdp", "hpz", "symmetric", "ncclbuffers",
    }
)  # fmt: skip
IMPLEMENTATIONS = ("plain", "fsdp2", "ours", "ddp", "megatron")


class UnavailableError(RuntimeError):
    """The implementation cannot run here; the message says why."""


@dataclass(frozen=True)
class Variant:
    """One implementation with its options.

    Attributes:
        label: The text that it was read from, used in tables.
        carve: Multiprocessors that matrix products leave free; 0 is torch's default.
        setters: Setter names with their arguments, called in this order after sharding.
    """

    label: str
    implementation: str
    flags: frozenset[str] = frozenset()
    carve: int = 0
    setters: tuple[tuple[str, tuple[Any, ...]], ...] = field(default=())

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read the form that the module's docstring describes."""
        implementation, _, rest = text.partition("@")
        if implementation not in IMPLEMENTATIONS:
            known = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"no implementation {implementation!r} in {text!r}; there are {known}")
        flags, carve, setters = set(), 0, []
        for token in filter(None, rest.split("+")):
            name, given, value = token.partition("=")
            if not given:
                if name not in FLAGS:
                    raise ValueError(f"no option {name!r} in {text!r}; a setter needs NAME=VALUE")
                flags.add(name)
            elif name == "carve":
                carve = int(value)
            else:
                arguments = json.loads(value)
                setters.append(
                    (name, tuple(arguments if isinstance(arguments, list) else [arguments]))
                )
        return cls(text, implementation, frozenset(flags), carve, tuple(setters))

    def has(self, flag: str) -> bool:
        return flag in self.flags
