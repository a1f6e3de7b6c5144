"""Where Λ comes from: (model, batches, likelihood) → Precision."""

from . import convolution  # noqa: F401  # its rule enters the table
from .batch_sums import Estimate, batch_sum_fisher
from .calls import Call
from .coverage import Coverage, coverage
from .fisher import dense_fisher, diagonal_fisher
from .forms import Form, Lookup, Products, Rows
from .hessian import diagonal_hessian, hutchinson_hessian
from .lowrank import lowrank_fisher
from .rules import RULES, rule

__all__ = [
    "RULES",
    "Call",
    "Coverage",
    "Estimate",
    "Form",
    "Lookup",
    "Products",
    "Rows",
    "batch_sum_fisher",
    "coverage",
    "dense_fisher",
    "diagonal_fisher",
    "diagonal_hessian",
    "hutchinson_hessian",
    "lowrank_fisher",
    "rule",
]
