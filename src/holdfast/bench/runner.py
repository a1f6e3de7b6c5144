"""Run methods over tasks and seeds, and measure what is kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from .methods import Method, Training
from .tasks import Split, Task


@dataclass(frozen=True)
class Run:
    """One method, one seed: `accuracy[i][j]` is the share right on task j after learning task i."""

    method: str
    seed: int
    accuracy: list[list[float]]

    @property
    def average(self) -> float:
        """The mean accuracy over all tasks after the last."""
        return statistics.fmean(self.accuracy[-1])

    @property
    def forgetting(self) -> float:
        """How far the earlier tasks fell, on average, from their best to the end."""
        last = len(self.accuracy) - 1
        drops = [max(row[task] for row in self.accuracy[task:last]) - self.accuracy[-1][task] for task in range(last)]
        return statistics.fmean(drops) if drops else 0.0

    @property
    def newest(self) -> float:
        """The mean accuracy on each task right after learning it: how well it still learns."""
        return statistics.fmean(row[task] for task, row in enumerate(self.accuracy))


def run(
    method: Method,
    tasks: Sequence[Task],
    make_model: Callable[[], nn.Module],
    training: Training,
    seed: int,
    progress: Callable[[str], None] = lambda learned: None,
) -> Run:
    """Learn the tasks in turn from a model made with `seed`; after each, test on all of them and call `progress`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
    table = []
    for index, task in enumerate(tasks):
        method.learn(model, task, training, seed=seed * 1000 + index)
        table.append([accuracy(model, other.test) for other in tasks])
        progress(f"{method.name}: {task.name}")
    return Run(method.name, seed, table)


def accuracy(model: nn.Module, data: Split) -> float:
    """The share of examples whose most likely class is right."""
    with torch.no_grad():
        return float((model(data.x).argmax(-1) == data.y).float().mean())


def chosen_strength(
    candidates: Sequence[float],
    make_method: Callable[[float], Method],
    sequences: Sequence[Sequence[Task]],
    make_model: Callable[[], nn.Module],
    training: Training,
    progress: Callable[[str], None] = lambda learned: None,
) -> float:
    """The strength with the best mean accuracy on the validation splits of the first two tasks of all sequences.

    The sequence's place is its seed. The test splits are not looked at.
    """

    def score(strength: float) -> float:
        averages = []
        for seed, tasks in enumerate(sequences):
            judged = [replace(task, test=task.validation) for task in tasks[:2]]
            averages.append(run(make_method(strength), judged, make_model, training, seed, progress).average)
        return statistics.fmean(averages)

    return max(candidates, key=score)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each method, in the order the methods first appear."""
    groups: dict[str, list[Run]] = {}
    for one in runs:
        groups.setdefault(one.method, []).append(one)
    return groups
