"""What Λ is: one file per structure, the same few methods."""

from .base import Precision
from .dense import Dense
from .diagonal import Diagonal, SignedDiagonal
from .kinds import KINDS
from .kronecker import Kronecker
from .logarithmic import Logarithmic
from .lowrank import LowRank
from .rotated import Rotated
from .source import Source
from .sum import Sum

KINDS.update(
    diagonal=Diagonal, dense=Dense, kronecker=Kronecker, lowrank=LowRank, rotated=Rotated, sum=Sum,
    logarithmic=Logarithmic,
)  # fmt: skip

__all__ = [
    "KINDS",
    "Dense",
    "Diagonal",
    "Kronecker",
    "Logarithmic",
    "LowRank",
    "Precision",
    "Rotated",
    "SignedDiagonal",
    "Source",
    "Sum",
]
