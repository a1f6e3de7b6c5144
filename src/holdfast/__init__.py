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
    kronecker_fisher,
    lowrank_fisher,
    mixed_fisher,
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
from .head import LinearHead, RandomFeatures, linear_head, random_features
from .hold import Handle, hold
from .likelihood import Likelihood, bernoulli, categorical, custom, gaussian, tokens
from .penalty import Quadratic, Term, penalty, penalty_gradient
from .posterior import Memory, Posterior, consolidate, consolidate_, merge, prior, restore_
from .precision import Dense, Diagonal, Kronecker, LowRank, Precision, Rotated, SignedDiagonal, Source, Sum
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
    "Kronecker",
    "Likelihood",
    "LinearHead",
    "LowRank",
    "Memory",
    "MemoryFileError",
    "MismatchError",
    "Posterior",
    "Precision",
    "Quadratic",
    "RandomFeatures",
    "Rotated",
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
    "kronecker_fisher",
    "linear_head",
    "load",
    "lowrank_fisher",
    "merge",
    "mixed_fisher",
    "penalty",
    "penalty_gradient",
    "prior",
    "random_features",
    "restore_",
    "save",
    "tokens",
]
