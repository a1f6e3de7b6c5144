"""What the experiments learn from: pictures found on disk or fetched, and text that every Python carries."""

from .images import Images, cifar10, digits, fashion_mnist, mnist, origin, prepare
from .text import text_domains

__all__ = ["Images", "cifar10", "digits", "fashion_mnist", "mnist", "origin", "prepare", "text_domains"]
