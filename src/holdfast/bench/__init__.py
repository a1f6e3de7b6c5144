"""Continual-learning experiments: tasks, methods and protocols, run fairly, and what is kept measured.

A sequence of one's own needs a few lines; a method is anything with `learn`, `remember` and `kept`.

>>> import torch
>>> from torch import nn
>>> from holdfast.bench import Held, Split, Task, Training, kronecker, run
>>> def task(name):  # inputs and labels to train on, and others to be judged by
...     x, w = torch.randn(60, 4), torch.randn(4, 3)
...     y = (x @ w).argmax(1)
...     return Task(name, Split(x[:40], y[:40]), Split(x[40:], y[40:]))
>>> made = run(Held(kronecker()), [task("one"), task("two")], lambda: nn.Linear(4, 3), Training(epochs=2))
>>> len(made.accuracy), len(made.accuracy[-1]), 0 <= made.average <= 1
(2, 2, True)
"""

from .heads import ExactHead
from .jobs import save
from .measures import Paired, Run, paired
from .methods import (
    Batches,
    FineTuning,
    Held,
    Method,
    batched,
    decayed,
    diagonal,
    every_term,
    hessian,
    kronecker,
    lowrank,
    nearest,
    per_task,
    uniform,
)
from .projection import Projected
from .runner import run
from .tasks import Split, Task, joined
from .training import Trainer, Training

__all__ = [
    "Batches",
    "ExactHead",
    "FineTuning",
    "Held",
    "Method",
    "Paired",
    "Projected",
    "Run",
    "Split",
    "Task",
    "Trainer",
    "Training",
    "batched",
    "decayed",
    "diagonal",
    "every_term",
    "hessian",
    "joined",
    "kronecker",
    "lowrank",
    "nearest",
    "paired",
    "per_task",
    "run",
    "save",
    "uniform",
]
