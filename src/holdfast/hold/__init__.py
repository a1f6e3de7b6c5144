"""The attachment to an optimizer, the guard that says when it would do nothing, and the budget it may keep."""

from .attachment import hold
from .budget import Spent
from .handle import Handle

__all__ = ["Handle", "Spent", "hold"]
