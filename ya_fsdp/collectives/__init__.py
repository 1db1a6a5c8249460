"""The seam to communication libraries: one small protocol and its implementations."""

from .base import Collectives, DivideFactors, divide_factors
from .c10d import C10dCollectives

__all__ = ["C10dCollectives", "Collectives", "DivideFactors", "divide_factors"]
