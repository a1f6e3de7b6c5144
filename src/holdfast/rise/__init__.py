"""How much the old loss has risen: kept answers, moved as the model's answers to probes have moved."""

from .asked import asked, missing
from .paired import ByProbes, Paired

__all__ = ["ByProbes", "Paired", "asked", "missing"]
