"""Where memory goes, by group of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..build import schedule_of, state_of
from .units import units_of


@dataclass(frozen=True)
class GroupMemory:
    """Bytes of one group of parameters on this rank.

    Attributes:
        unit: FQN of the unit.
        parameters: How many parameters the group has.
        elements: Their elements, all ranks together.
        padding: Elements of the flat layout that belong to no parameter.
        dtypes: Master, gather and reduce dtype.
        shard: Bytes of this rank's weights in the master dtype.
        gathered: Bytes of the whole group while it is gathered.
        gradients: Bytes of the whole group's gradients in the reduce dtype.
    """

    unit: str
    parameters: int
    elements: int
    padding: int
    dtypes: str
    shard: int
    gathered: int
    gradients: int


@dataclass(frozen=True)
class MemoryReport:
    """What :func:`memory_report` found; ``print`` it for a table.

    Attributes:
        groups: One row per group.
        gather_slots: Bytes of every gather buffer that exists now.
        gradient_slots: Bytes of every gradient buffer that exists now.
        secondary: Bytes of second shards, see ``reshard_after_forward=int``.
    """

    groups: tuple[GroupMemory, ...]
    gather_slots: tuple[int, ...]
    gradient_slots: tuple[int, ...]
    secondary: int = 0

    @property
    def shards(self) -> int:
        """Bytes of all weights on this rank."""
        return sum(group.shard for group in self.groups)

    def __str__(self) -> str:
        width = max(len("unit"), *(len(group.unit) for group in self.groups))
        kinds = "master/gather/reduce"
        dtypes = max(len(kinds), *(len(group.dtypes) for group in self.groups))
        head = f"{'unit':<{width}}  params     elements  padding  {kinds:<{dtypes}}"
        lines = [f"{head}  shard MiB  gathered MiB  gradients MiB"]
        for g in self.groups:
            share = 100 * g.padding / max(1, g.elements + g.padding)
            lines.append(
                f"{g.unit:<{width}}  {g.parameters:>6}  {g.elements:>11}  {share:>5.1f} %  "
                f"{g.dtypes:<{dtypes}}  {_mib(g.shard):>9}  {_mib(g.gathered):>12}  "
                f"{_mib(g.gradients):>13}"
            )
        lines.append(f"weights on this rank: {_mib(self.shards)} MiB")
        lines.append(f"buffers that gathered units take turns in: {_sum(self.gather_slots)}")
        lines.append(f"buffers that gradients are reduced from: {_sum(self.gradient_slots)}")
        if self.secondary:
            lines.append(f"second shards: {_mib(self.secondary)} MiB")
        return "\n".join(lines)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"


def _sum(slots: tuple[int, ...]) -> str:
    return " + ".join(map(_mib, slots)) + " MiB" if slots else "none yet"


def memory_report(model: nn.Module) -> MemoryReport:
    """Where this rank's memory goes, by group of parameters; communicates nothing.

    Args:
        model: A sharded model.

    Returns:
        Numbers in bytes; as text, a table in MiB.

    Raises:
        ValueError: If the model is not sharded.
    """
    units = units_of(model)
    rows = []
    for unit in units:
        for group in unit.groups:
            dtypes = (group.dtypes.master, group.dtypes.gather, group.dtypes.reduce)
            elements = sum(param.shape.numel() for param in group.params)
            rows.append(
                GroupMemory(
                    unit=unit.fqn,
                    parameters=len(group.params),
                    elements=elements,
                    padding=group.layout.total_numel - elements,
                    dtypes="/".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
                    shard=group.master_shard.numel() * group.master_shard.itemsize,
                    gathered=group.gather_bytes,
                    gradients=group.reduce_bytes,
                )
            )
    schedules = {
        id(s): s for m in model.modules() if state_of(m) is not None for s in [schedule_of(m)]
    }
    return MemoryReport(
        groups=tuple(rows),
        gather_slots=tuple(
            slot.resident_bytes for s in schedules.values() for slot in s.pool.slots
        ),
        gradient_slots=tuple(
            slot.resident_bytes for s in schedules.values() for slot in s.reducer.slots
        ),
        secondary=sum(
            buffer.numel() * buffer.itemsize
            for unit in units
            if unit.secondary is not None
            for buffer in unit.secondary.buffers()
        ),
    )
