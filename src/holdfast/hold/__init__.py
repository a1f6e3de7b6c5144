"""The attachment to an optimizer, and the guard that says when it would do nothing."""

from .attachment import Handle, hold

__all__ = ["Handle", "hold"]
