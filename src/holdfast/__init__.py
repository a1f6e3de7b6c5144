"""Teach a trained PyTorch model something new without letting it forget, and without the old data."""

from .curvature import (
    Coverage,
    Estimate,
    batch_sum_fisher,
    coverage,
    dense_fisher,
    diagonal_fisher,
    diagonal_hessian,
    hutchinson_hessian,
    lowrank_fisher,
)
from .errors import (
    ArgumentError,
    CheckError,
    DataError,
    HoldfastError,
    HoldfastWarning,
    InertError,
    MemoryFileError,
    MismatchError,
    SingularError,
)
from .hold import Handle, hold
from .likelihood import Likelihood, bernoulli, categorical, custom, gaussian, tokens
from .penalty import Quadratic, Term, penalty, penalty_gradient
from .posterior import Memory, Posterior, consolidate, consolidate_, merge, prior, restore_
from .precision import Dense, Diagonal, LowRank, Precision, SignedDiagonal, Source, Sum
from .storage import inspect, load, save

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CheckError",
    "Coverage",
    "DataError",
    "Dense",
    "Diagonal",
    "Estimate",
    "Handle",
    "HoldfastError",
    "HoldfastWarning",
    "InertError",
    "Likelihood",
    "LowRank",
    "Memory",
    "MemoryFileError",
    "MismatchError",
    "Posterior",
    "Precision",
    "Quadratic",
    "SignedDiagonal",
    "SingularError",
    "Source",
    "Sum",
    "Term",
    "batch_sum_fisher",
    "bernoulli",
    "categorical",
    "consolidate",
    "consolidate_",
    "coverage",
    "custom",
    "dense_fisher",
    "diagonal_fisher",
    "diagonal_hessian",
    "gaussian",
    "hold",
    "hutchinson_hessian",
    "inspect",
    "load",
    "lowrank_fisher",
    "merge",
    "penalty",
    "penalty_gradient",
    "prior",
    "restore_",
    "save",
    "tokens",
]
