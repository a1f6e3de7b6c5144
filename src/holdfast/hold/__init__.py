"""The attachment to an optimizer, the guard that says when it would do nothing, and the budget it may keep."""

from .attachment import Handle, hold
from .budget import Spent

__all__ = ["Handle", "Spent", "hold"]
