"""The demonstration: five tasks that conflict, learned in turn with and without a hold."""

from __future__ import annotations

from dataclasses import dataclass

from .protocols import PROTOCOLS, Protocol

STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
_COMPARED = ("fine-tuning", "frozen", "ewc", "ewc-original", "kronecker", "joint")
_NAMES = {
    "frozen": "frozen after task 1", "ewc": "EWC, J", "ewc-original": "EWC, J_original", "kronecker": "Kronecker",
    "joint": "joint, all data kept",
}  # fmt: skip


@dataclass(frozen=True)
class Digits:
    """Permuted digits, an MLP, and the methods to compare."""

    tasks: int = 5
    seeds: int = 3
    epochs: int = 15

    @property
    def protocol(self) -> Protocol:
        return PROTOCOLS["digits"].changed(tasks=self.tasks, epochs=self.epochs)
