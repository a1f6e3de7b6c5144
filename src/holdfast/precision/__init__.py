"""What Λ is: one file per structure, the same few methods."""

from .base import Precision, Source
from .dense import Dense
from .diagonal import Diagonal, SignedDiagonal
from .sum import Sum

__all__ = ["Dense", "Diagonal", "Precision", "SignedDiagonal", "Source", "Sum"]
