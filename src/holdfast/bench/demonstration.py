"""The demonstration: five tasks that conflict, learned in turn with and without a hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import HoldfastError
from .grid import SWEEP_SEED, run_all
from .jobs import Job, chosen
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
        """How many runs there are, for a progress bar; one for each seed less where strength 1 is chosen."""
        return len(STRENGTHS) + 9 * self.seeds

    def run(
        self, progress: Callable[[str], None] = lambda made: None, executor: Executor | None = None
    ) -> tuple[float, list[Run]]:
        """The strength chosen for the diagonal on validation data, and all runs. `progress` is told of each run.

        They are made here one after another, or where the executor makes them.
        """
        tried = [Job(self._few, "ewc", SWEEP_SEED, each, validating=True) for each in STRENGTHS]
        strength = chosen(_made(tried, executor, progress), lambda job: True)
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
        jobs = [
            (name, Job(self.protocol, method, seed, each))
            for seed in range(self.seeds)
            for name, (method, each) in compared.items()
        ]
        found = _made([job for _, job in jobs], executor, progress)
        return strength, [replace(found[job], method=name) for name, job in jobs]


def _made(jobs: Sequence[Job], executor: Executor | None, progress: Callable[[str], None]) -> dict[Job, Run]:
    with TemporaryDirectory() as folder:
        # One thread: so small a network only waits for a second one.
        outcome = run_all(jobs, Path(folder), executor, threads=1, progress=lambda job, result: progress(job.name))
    if outcome.failed:
        raise HoldfastError("; ".join(f"{job.name}: {said}" for job, said in outcome.failed.items()))
    return {job: result.run for job, result in outcome.found.items()}
