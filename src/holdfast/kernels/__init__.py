"""The inner loops that a machine needs done its own way: each with its plain form, its twin and its fallback."""

from .blocks import block_sums, sums_in_one_pass
from .grams import add_gram_, add_squares_, mirrored
from .products import add_squared_products_
from .pull import add_pull_, in_one_pass

__all__ = [
    "add_gram_", "add_pull_", "add_squared_products_", "add_squares_", "block_sums", "in_one_pass", "mirrored",
    "sums_in_one_pass",
]  # fmt: skip
