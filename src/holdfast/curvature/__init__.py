"""Where Λ comes from: (model, batches, likelihood) → Precision."""

from . import convolution  # noqa: F401  # its rule enters the table
from .batch_sums import Estimate, batch_sum_fisher
from .calls import Call
from .coverage import Coverage, coverage
from .dense import dense_fisher
from .diagonal import diagonal_fisher
from .forms import Form, Lookup, Products, Rows
from .hessian import diagonal_hessian, hutchinson_hessian
from .kronecker import kronecker_fisher
from .lowrank import lowrank_fisher
from .mixed import mixed_fisher
from .path import RecordedPath, recorded_path
from .rules import RULES, rule
from .sensitivity import sensitivity

__all__ = [
    "RULES",
    "Call",
    "Coverage",
    "Estimate",
    "Form",
    "Lookup",
    "Products",
    "RecordedPath",
    "Rows",
    "batch_sum_fisher",
    "coverage",
    "dense_fisher",
    "diagonal_fisher",
    "diagonal_hessian",
    "hutchinson_hessian",
    "kronecker_fisher",
    "lowrank_fisher",
    "mixed_fisher",
    "recorded_path",
    "rule",
    "sensitivity",
]
