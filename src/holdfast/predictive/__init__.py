"""What a model answers when its weights are known as a Gaussian only, and how far such answers can be trusted."""

from .calibration import Bin, Calibration, auroc, calibration
from .distribution import Classes, Predictive, Regression, YesNo
from .sampling import predictive

__all__ = [
    "Bin", "Calibration", "Classes", "Predictive", "Regression", "YesNo", "auroc", "calibration", "predictive",
]  # fmt: skip
