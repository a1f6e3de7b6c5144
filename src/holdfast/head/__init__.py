"""A linear head on frozen features, learned exactly: nothing is forgotten, whatever the order of the data."""

from .features import RandomFeatures, random_features
from .linear import LinearHead, linear_head

__all__ = ["LinearHead", "RandomFeatures", "linear_head", "random_features"]
