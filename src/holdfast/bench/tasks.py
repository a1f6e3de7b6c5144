"""Sequences of tasks to learn one after another, from data that ships with a package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Inputs and labels, side by side."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of `size`, shuffled if a generator is given."""
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        for rows in torch.split(order, size):
            yield self.x[rows], self.y[rows]


@dataclass(frozen=True)
class Task:
    """One thing to learn: what to train on, what to choose settings on, what to be judged on."""

    name: str
    train: Split
    validation: Split
    test: Split


def permuted_digits(count: int, seed: int = 0) -> list[Task]:
    """scikit-learn's 8×8 digits, the pixels in a new order for every task: the same labels, from conflicting inputs.

    1797 images, split 60/15/25 into training, validation and test, the same images in every task.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(y), generator=generator)
    train, validation, test = rows[:1078], rows[1078:1348], rows[1348:]
    tasks = []
    for index in range(count):
        pixels = torch.arange(64) if index == 0 else torch.randperm(64, generator=generator)
        parts = (Split(x[part][:, pixels], y[part]) for part in (train, validation, test))
        tasks.append(Task(f"order {index + 1}", *parts))
    return tasks
