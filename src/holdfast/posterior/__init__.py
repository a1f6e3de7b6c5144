"""What a model knew, as a Gaussian over its parameters: the value, the recursion over tasks, the product, the model
as it was."""

from .evidence import evidence, prior_precision
from .gaussian import Memory, Posterior, as_posterior, prior, restore_
from .product import merge
from .recalled import recalled
from .recursion import consolidate, consolidate_

__all__ = [
    "Memory", "Posterior", "as_posterior", "consolidate", "consolidate_", "evidence", "merge", "prior",
    "prior_precision", "recalled", "restore_",
]  # fmt: skip
