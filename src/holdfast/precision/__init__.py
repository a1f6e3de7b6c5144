"""What Λ is: one file per structure, the same few methods."""

from .base import Precision
from .dense import Dense
from .diagonal import Diagonal, SignedDiagonal
from .kinds import KINDS
from .kronecker import Kronecker
from .rotated import Rotated
from .source import Source
from .sum import Sum

KINDS.update(diagonal=Diagonal, dense=Dense, kronecker=Kronecker, rotated=Rotated, sum=Sum)

__all__ = ["KINDS", "Dense", "Diagonal", "Kronecker", "Precision", "Rotated", "SignedDiagonal", "Source", "Sum"]
