"""The demonstration: five tasks that conflict, learned in turn with and without a hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .grid import SWEEP_SEED
from .jobs import Job, chosen, execute
from .measures import Run
from .protocols import PROTOCOLS, Protocol

STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
CHOSEN_ON = 3  # tasks


@dataclass(frozen=True)
class Digits:
    """Permuted digits, an MLP, and the methods to compare."""

    tasks: int = 5
    seeds: int = 3
    epochs: int = 10

    @property
    def protocol(self) -> Protocol:
        """What is learned, and how."""
        return PROTOCOLS["digits"].changed(tasks=self.tasks, epochs=self.epochs)

    @property
    def _few(self) -> Protocol:
        """The first tasks, on which a strength is chosen."""
        return self.protocol.changed(tasks=min(CHOSEN_ON, self.tasks))

    @property
    def rounds(self) -> int:
        """How many stages are learned in all, for a progress bar."""
        return (
            len(STRENGTHS) * self._few.tasks + (8 * self.tasks + 1) * self.seeds
        )  # one method less where strength 1 is chosen

    def run(self, progress: Callable[[str], None] = lambda learned: None) -> tuple[float, list[Run]]:
        """The strength chosen for the diagonal on validation data, and all runs. `progress` is told of each stage."""
        seeds = range(self.seeds)
        tried = [Job(self._few, "ewc", SWEEP_SEED, each, validating=True) for each in STRENGTHS]
        strength = chosen({job: self._made("choosing", job, progress) for job in tried}, lambda job: True)
        compared = {
            "fine-tuning": ("fine-tuning", 1.0),
            "frozen after task 1": ("frozen", 1.0),
            "EWC, J, strength 1": ("ewc", 1.0),
            f"EWC, J, strength {strength:g}": ("ewc", strength),
            f"EWC, J_original, {strength:g}": ("ewc-original", strength),
            "Kronecker, strength 1": ("kronecker", 1.0),
            "Kronecker, softened": ("kronecker-softened", 1.0),
            "Kronecker, rotated steps": ("kronecker-rotated", 1.0),
            "joint, all data kept": ("joint", 1.0),
        }
        return strength, [
            self._made(name, Job(self.protocol, method, seed, each), progress)
            for seed in seeds
            for name, (method, each) in compared.items()
        ]

    def _made(self, name: str, job: Job, progress: Callable[[str], None]) -> Run:
        # One thread: so small a network only waits for a second one.
        made = execute(job, threads=1, progress=lambda learned: progress(f"{name}: {learned}")).run
        return replace(made, method=name)
