"""Results as a page to look at: one HTML file with its pictures inside, readable without a network."""

from .figures import forgetting
from .page import page

__all__ = ["forgetting", "page"]
