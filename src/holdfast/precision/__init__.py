"""What Λ is: one file per structure, the same few methods."""

from .base import Precision
from .dense import Dense
from .diagonal import Diagonal, SignedDiagonal
from .kinds import KINDS
from .lowrank import LowRank
from .source import Source
from .sum import Sum

KINDS.update(diagonal=Diagonal, dense=Dense, lowrank=LowRank, sum=Sum)

__all__ = ["KINDS", "Dense", "Diagonal", "LowRank", "Precision", "SignedDiagonal", "Source", "Sum"]
