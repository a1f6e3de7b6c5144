"""A memory in pieces: a folder of safetensors that several processes write and read, with a manifest put last."""

from .folder import described, everywhere, read, write

__all__ = ["described", "everywhere", "read", "write"]
