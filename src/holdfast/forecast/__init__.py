"""What will be forgotten, before it is: the rise of the old loss, from what a memory holds."""

from ..rise import ByProbes
from .forecast import Forecast, forecast
from .sample import kept_answers

__all__ = ["ByProbes", "Forecast", "forecast", "kept_answers"]
