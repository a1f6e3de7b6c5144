"""Where Λ comes from: (model, batches, likelihood) → Precision."""

from .fisher import dense_fisher, diagonal_fisher
from .hessian import diagonal_hessian, hutchinson_hessian

__all__ = ["dense_fisher", "diagonal_fisher", "diagonal_hessian", "hutchinson_hessian"]
