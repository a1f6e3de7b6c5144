"""What a model knew, as a Gaussian over its parameters: the value, the recursion over tasks, the product."""

from .gaussian import Memory, Posterior, as_posterior, prior, restore_
from .product import merge
from .recursion import consolidate, consolidate_

__all__ = ["Memory", "Posterior", "as_posterior", "consolidate", "consolidate_", "merge", "prior", "restore_"]
