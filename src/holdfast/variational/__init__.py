"""Posteriors by variational inference: KL(q ‖ p(θ | data)) made small, by sampling; the last one is the next prior."""

from .divergence import divergence
from .ivon import IVON
from .mean_field import MeanField, mean_field

__all__ = ["IVON", "MeanField", "divergence", "mean_field"]
