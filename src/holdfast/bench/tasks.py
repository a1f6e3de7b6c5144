"""Tasks to learn one after another: data to train on, data to be judged by, and the outputs that may answer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError

View = Callable[[Tensor], Tensor]

UNCOUNTED = -100  # the label of a token that is not to be answered

# Instead of −∞, whose products with zero are not numbers: its exponential is zero all the same.
_IMPOSSIBLE = -1e4


@dataclass(frozen=True)
class Split:
    """Inputs and labels, side by side. `view` makes inputs of what is stored, when they are asked for.

    Tasks that show the same images in their own ways share one copy of them. `allowed` says which outputs may answer,
    example by example (examples × outputs), where the examples are of several tasks.
    """

    stored: Tensor
    y: Tensor
    view: View | None = None
    allowed: Tensor | None = None

    def __post_init__(self) -> None:
        for each in (self.stored, self.y):
            if not isinstance(each, Tensor):
                raise ArgumentError(
                    f"a split is made of tensors, got {type(each).__name__}: torch.as_tensor makes one of an array or "
                    "a list, and Split.of(dataset) a split of a dataset."
                )
        if len(self.stored) != len(self.y) or not len(self.y):
            raise ArgumentError(f"a split has one label for each input and at least one of both, got {self.sizes}.")
        if not self.y.is_floating_point():  # whole numbers of any kind, of which losses take only this one
            object.__setattr__(self, "y", self.y.long())

    def __len__(self) -> int:
        return len(self.y)

    @property
    def sizes(self) -> str:
        """How many inputs and labels there are, in words."""
        return f"{len(self.stored)} inputs and {len(self.y)} labels"

    @property
    def x(self) -> Tensor:
        """The inputs as the model sees them."""
        return self.stored if self.view is None else self.view(self.stored)

    def to(self, device: str | torch.device) -> Split:
        """The same on a device."""
        allowed = None if self.allowed is None else self.allowed.to(device)
        return replace(self, stored=self.stored.to(device), y=self.y.to(device), allowed=allowed)

    @classmethod
    def of(cls, dataset: Sequence[tuple[Any, Any]] | Any) -> Split:
        """A dataset of (input, label) pairs, such as torch's, read whole."""
        try:
            pairs = [dataset[index] for index in range(len(dataset))]
            x, y = ([torch.as_tensor(pair[side]) for pair in pairs] for side in (0, 1))
            if pairs:
                return cls(torch.stack(x), torch.stack(y))
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"this {type(dataset).__name__} does not give (input, label) pairs by their number, of tensors of one "
                f"shape: {type(error).__name__}: {error}. Pictures need a transform that makes tensors of one size of "
                "them, and a loader gives its loader.dataset."
            ) from error
        raise ArgumentError("a split has at least one example, and this dataset has none.")

    def first(self, count: int) -> Split:
        """No more than `count` examples, from the start."""
        allowed = None if self.allowed is None else self.allowed[:count]
        return replace(self, stored=self.stored[:count], y=self.y[:count], allowed=allowed)

    def spread(self, count: int) -> Split:
        """No more than `count` examples, at even distances over all: the first ones of a folder may be of one class."""
        if len(self) <= count:
            return self
        rows = torch.arange(count, device=self.stored.device) * len(self) // count
        allowed = None if self.allowed is None else self.allowed[rows]
        return replace(self, stored=self.stored[rows], y=self.y[rows], allowed=allowed)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of `size`, in order."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            x = self.stored[rows]
            yield x if self.view is None else self.view(x), self.y[rows]


@dataclass(frozen=True)
class Task:
    """One thing to learn. Labels count from 0 within `outputs`, the model's outputs that may answer: all, if None.

    In a task-incremental sequence each task has outputs of its own; in a class-incremental one a task's outputs are all
    those of the tasks until then (`grows`), and earlier tasks are judged among them too.
    """

    name: str
    train: Split
    test: Split
    outputs: tuple[int, ...] | None = None
    grows: bool = False

    def __post_init__(self) -> None:
        for what, each in (("train", self.train), ("test", self.test)):
            if not isinstance(each, Split):
                raise ArgumentError(
                    f"`{self.name}` has a {type(each).__name__} for its `{what}`, where a task has a Split: "
                    "Split.of(dataset), or Split(inputs, labels)."
                )
        if self.outputs is None:
            return
        try:
            outputs = tuple(map(operator.index, self.outputs))
        except TypeError:
            outputs = ()
        if not outputs or outputs[0] < 0 or outputs != tuple(range(outputs[0], outputs[-1] + 1)):
            raise ArgumentError(
                f"a task's outputs stand side by side and count from 0, such as (2, 3), got {self.outputs}."
            )
        object.__setattr__(self, "outputs", outputs)

    def logits(self, model: nn.Module, x: Tensor) -> Tensor:
        """What the model says, of the outputs that may answer."""
        found: Tensor = model(x)
        if not isinstance(found, Tensor):
            raise ArgumentError(
                f"the model answers `{self.name}` with a {type(found).__name__}, and not with a tensor of outputs: "
                "wrap it in a module that takes them out."
            )
        return self.own(found)

    def own(self, found: Tensor) -> Tensor:
        """Of all that the model says, the outputs that may answer."""
        if self.outputs is None or (self.outputs[0], len(self.outputs)) == (0, found.shape[-1]):
            return found
        first, last = self.outputs[0], self.outputs[-1]
        return found[..., first : last + 1]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The same for a batch, as the curvature functions ask for it."""
        return self.logits(model, batch[0])

    def judged_after(self, latest: Task) -> Task:
        """This task as it is judged once `latest` is learned."""
        return replace(self, outputs=latest.outputs) if latest.grows and _more(latest, self) else self

    def to(self, device: str | torch.device) -> Task:
        """The same on a device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def joined(tasks: Sequence[Task]) -> Task:
    """All the tasks as one, each example answered by the outputs of its own task."""
    if not tasks or any(task.train.allowed is not None for task in tasks):  # which outputs those were would be lost
        raise ArgumentError(
            "joined takes one task or more, of which none is joined already: give it all of them at once."
        )
    inputs = [task.train.x for task in tasks]
    for task, other in zip(tasks, inputs, strict=True):
        if other.shape[1:] != inputs[0].shape[1:]:
            raise ArgumentError(
                f"`{tasks[0].name}` has inputs of shape {tuple(inputs[0].shape[1:])} and `{task.name}` of "
                f"{tuple(other.shape[1:])}: what is joined is of one shape."
            )
    x = torch.cat(inputs)
    if all(task.outputs is None or task.grows for task in tasks):
        y = torch.cat([task.train.y for task in tasks])
        return Task("all tasks", Split(x, y), tasks[-1].test, tasks[-1].outputs, tasks[-1].grows)
    width = max(task.outputs[-1] for task in tasks if task.outputs) + 1
    labels, allowed = [], []
    for task in tasks:
        if task.outputs is None:
            raise ArgumentError(f"`{task.name}` is answered by all outputs, and other tasks by their own: which is it?")
        may = torch.zeros(width, dtype=torch.bool)
        may[list(task.outputs)] = True
        y = task.train.y
        labels.append(torch.where(y == UNCOUNTED, y, y + task.outputs[0]))
        allowed.append(may.expand(len(task.train), width))
    return Task("all tasks", Split(x, torch.cat(labels), None, torch.cat(allowed).to(x.device)), tasks[-1].test)


def masked(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Logits with all but the allowed outputs ruled out, and those left out that no task uses."""
    return logits if allowed is None else logits[..., : allowed.shape[-1]].masked_fill(~allowed, _IMPOSSIBLE)


def _more(one: Task, other: Task) -> bool:
    return len(one.outputs or ()) > len(other.outputs or ())
