"""The inner loops that a machine needs done its own way: each with its plain form, its twin and its fallback."""

from .blocks import block_sums, sums_in_one_pass
from .codes import Codes
from .grams import add_gram_, add_grams_, add_squares_, mirrored
from .products import add_squared_products_
from .pull import add_pull_, half_squares, in_one_pass, in_runs, pieces
from .shrink import FIRM, shrink_

__all__ = [
    "FIRM", "Codes", "add_gram_", "add_grams_", "add_pull_", "add_squared_products_", "add_squares_", "block_sums",
    "half_squares", "in_one_pass", "in_runs", "mirrored", "pieces", "shrink_", "sums_in_one_pass",
]  # fmt: skip
