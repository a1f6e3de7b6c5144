"""What Λ is: one file per structure, the same few methods."""

from .base import Precision, Source
from .dense import Dense
from .diagonal import Diagonal, SignedDiagonal
from .kinds import KINDS
from .sum import Sum

KINDS.update(diagonal=Diagonal, dense=Dense, sum=Sum)

__all__ = ["KINDS", "Dense", "Diagonal", "Precision", "SignedDiagonal", "Source", "Sum"]
