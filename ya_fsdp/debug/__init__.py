"""What to call when a loss looks odd: comparisons, non-finite gradients, memory by unit.

Everything here is for looking, not for training: it waits for the device and mostly communicates.
All ranks have to call the same function.
"""

from .finite import non_finite_gradients
from .memory import GroupMemory, MemoryReport, memory_report
from .plain import Comparison, check_against_plain
from .replicas import check_replicas

__all__ = [
    "Comparison",
    "GroupMemory",
    "MemoryReport",
    "check_against_plain",
    "check_replicas",
    "memory_report",
    "non_finite_gradients",
]
