"""The network that a collective would run on, as arithmetic, and counters of what it carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_MICRO = 1_000


@dataclass
class Network:
    """What a collective costs.

    Attributes:
        bandwidth: GB/s that one rank receives at; `None` is a network that costs nothing.
        latency: Microseconds per collective.
        blocks: Thread blocks (of 512 threads) that a collective occupies.
        node_size: Ranks per node, for the two-level network; `None` is one level.
        node_bandwidth: GB/s that a whole node receives at; shared by the ranks of the node that
            are in the collective's group.
        fill: What a gather over a free network writes. `"own"`: this rank's shard. `"once"`: the
            whole output the first time that an address is seen, so that persistent buffers hold
            plausible weights (matrix products run faster on zeros). `"all"`: always everything.
    """

    bandwidth: float | None = None
    latency: float = 20.0
    blocks: int = 16
    node_size: int | None = None
    node_bandwidth: float | None = None
    fill: Literal["own", "once", "all"] = "once"

    @classmethod
    def parse(cls, text: str, **options: Any) -> Network:
        """Read `free`, `300` or `450/400@8` (inside a node / of a node of 8 ranks), in GB/s."""
        if text == "free":
            return cls(**options)
        inside, _, across = text.partition("/")
        if not across:
            return cls(bandwidth=float(inside), **options)
        node, _, size = across.partition("@")
        return cls(
            bandwidth=float(inside), node_bandwidth=float(node), node_size=int(size), **options
        )

    def link(self, ranks: Sequence[int]) -> tuple[str, float | None]:
        """Name and bandwidth per rank of the slowest link that a group's ring passes."""
        if self.node_size is None or self.node_bandwidth is None or self.bandwidth is None:
            return "flat", self.bandwidth
        nodes = {rank // self.node_size for rank in ranks}
        if len(nodes) == 1:
            return "inside", self.bandwidth
        # Every byte that a node receives enters it once, through the adapters of its members.
        members = len(ranks) / len(nodes)
        entering = self.node_bandwidth * members / self.node_size
        return "across", min(self.bandwidth, entering)

    def nanoseconds(self, wire_bytes: float, ranks: Sequence[int]) -> int:
        """Time of a collective in which every rank receives `wire_bytes`; 0 when free."""
        _, bandwidth = self.link(ranks)
        if bandwidth is None:
            return 0
        return int(self.latency * _MICRO + wire_bytes / bandwidth)


@dataclass
class Traffic:
    """Calls and bytes received by one rank, by kind of collective."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, size: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + size

    def reset(self) -> None:
        self.calls.clear()
        self.bytes.clear()
