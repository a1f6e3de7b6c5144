"""The two inner loops that a GPU needs in one pass: each with its plain form, which is its twin and its fallback."""

from .products import add_squared_products_
from .pull import add_pull_, in_one_pass

__all__ = ["add_pull_", "add_squared_products_", "in_one_pass"]
