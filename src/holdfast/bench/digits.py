"""The demonstration: five tasks that conflict, learned in turn with and without a hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from .methods import FineTuning, Frozen, Joint, Method, PerTaskEwc, RunningEwc, Training
from .runner import Run, chosen_strength, run
from .tasks import permuted_digits

STRENGTHS = (1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Digits:
    """Permuted digits, an MLP, and the methods to compare."""

    tasks: int = 5
    seeds: int = 3
    width: int = 128
    training: Training = field(default_factory=Training)

    def model(self) -> nn.Module:
        """A perceptron with two hidden layers."""
        w = self.width
        return nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 10))

    @property
    def rounds(self) -> int:
        """How many tasks are learned in all, for a progress bar."""
        return (2 * len(STRENGTHS) + 6 * self.tasks) * self.seeds  # one method less where strength 1 is chosen

    def run(self, progress: Callable[[str], None] = lambda learned: None) -> tuple[float, list[Run]]:
        """The strength chosen on validation data, and all runs. `progress` is called after each task learned."""
        sequences = [permuted_digits(self.tasks, seed) for seed in range(self.seeds)]
        strength = chosen_strength(STRENGTHS, RunningEwc, sequences, self.model, self.training, progress)
        methods: list[Callable[[], Method]] = [
            FineTuning,
            Frozen,
            lambda: RunningEwc(1.0),
            lambda: RunningEwc(strength),
            lambda: PerTaskEwc(strength),
            Joint,
        ]
        if strength == 1.0:
            del methods[2]
        return strength, [
            run(make(), tasks, self.model, self.training, seed, progress)
            for seed, tasks in enumerate(sequences)
            for make in methods
        ]
