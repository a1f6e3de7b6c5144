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
from .diagnose import Diagnosis, diagnose
from .distill import Distillation, distill, distillation_loss, new_inputs, own_text
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
from .probes import GaussianProbes, KeptInputs, Probes, gaussian_probes, kept_inputs
from .storage import inspect, load, save

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CheckError",
    "Coverage",
    "DataError",
    "Dense",
    "Diagnosis",
    "Diagonal",
    "Distillation",
    "Estimate",
    "GaussianProbes",
    "Handle",
    "HoldfastError",
    "HoldfastWarning",
    "InertError",
    "KeptInputs",
    "Kronecker",
    "Likelihood",
    "LinearHead",
    "LowRank",
    "Memory",
    "MemoryFileError",
    "MismatchError",
    "Posterior",
    "Precision",
    "Probes",
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
    "diagnose",
    "diagonal_fisher",
    "diagonal_hessian",
    "distill",
    "distillation_loss",
    "gaussian",
    "gaussian_probes",
    "hold",
    "hutchinson_hessian",
    "inspect",
    "kept_inputs",
    "kronecker_fisher",
    "linear_head",
    "load",
    "lowrank_fisher",
    "merge",
    "mixed_fisher",
    "new_inputs",
    "own_text",
    "penalty",
    "penalty_gradient",
    "prior",
    "random_features",
    "restore_",
    "save",
    "tokens",
]
