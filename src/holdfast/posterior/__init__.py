"""What a model knew, as a Gaussian over its parameters: the value, the recursion over tasks, the product, the model
as it was."""

from .covered import Covered
from .evidence import evidence, prior_precision
from .gaussian import Posterior, prior
from .memory import Memory, as_posterior, restore_
from .product import merge
from .recalled import recalled
from .recursion import consolidate, consolidate_

__all__ = [
    "Covered", "Memory", "Posterior", "as_posterior", "consolidate", "consolidate_", "evidence", "merge", "prior",
    "prior_precision", "recalled", "restore_",
]  # fmt: skip
