"""Do the assumptions behind the quadratic hold? The optimum, Taylor, the diagonal, F against F′, and advice."""

from .diagnosis import Diagnosis, diagnose
from .fishers import Compared, Fishers, Group
from .optimum import Optimum
from .structure import Held, Recovery, Share, Structure
from .tables import Table
from .taylor import Curve, Radius, Taylor

__all__ = [
    "Compared",
    "Curve",
    "Diagnosis",
    "Fishers",
    "Group",
    "Held",
    "Optimum",
    "Radius",
    "Recovery",
    "Share",
    "Structure",
    "Table",
    "Taylor",
    "diagnose",
]
