"""Sequences of tasks made from one dataset: pixels permuted, images rotated, classes split; and text in two domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError
from .data import Images
from .data.text import Text
from .tasks import Split, Task


@dataclass(frozen=True)
class Pixels:
    """Images in [0, 1], flat, with a margin of black pixels, in an order of one's own; or shifted and scaled."""

    order: Tensor | None = None
    margin: int = 0
    mean: float = 0.0
    deviation: float = 1.0

    def __call__(self, images: Tensor) -> Tensor:
        if self.margin:
            images = F.pad(images, (self.margin,) * 4)
        flat = images.flatten(1)
        if self.order is not None:
            flat = flat[:, self.order.to(flat.device)]
        flat = flat.float() / 255
        return flat if (self.mean, self.deviation) == (0.0, 1.0) else (flat - self.mean) / self.deviation


@dataclass(frozen=True)
class Turned:
    """Images in [0, 1], turned by an angle in degrees about their middle, flat."""

    degrees: float

    def __call__(self, images: Tensor) -> Tensor:
        angle = torch.deg2rad(torch.tensor(self.degrees))
        cos, sin = torch.cos(angle), torch.sin(angle)
        matrix = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], device=images.device)
        shape = list(images.shape)
        grid = F.affine_grid(matrix.expand(len(images), 2, 3), shape, align_corners=False)
        return (F.grid_sample(images.float() / 255, grid, align_corners=False)).flatten(1)


@dataclass(frozen=True)
class Colors:
    """Images with each channel shifted and scaled to mean 0 and deviation 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        mean, deviation = (
            torch.tensor(each, device=images.device).view(1, -1, 1, 1) for each in (self.mean, self.deviation)
        )
        return (images.float() / 255 - mean) / deviation


def held_out(images: Images, count: int) -> Images:
    """The images with the last `count` for training as the ones to be judged by, and the test images left alone."""
    if not 0 < count < len(images.train_y):
        raise ArgumentError(f"{count} of {len(images.train_y)} training images cannot be held out.")
    return replace(
        images,
        train_x=images.train_x[:-count], train_y=images.train_y[:-count],
        test_x=images.train_x[-count:], test_y=images.train_y[-count:],
    )  # fmt: skip


def permuted(images: Images, count: int, seed: int, margin: int = 0, scaled: bool = False) -> list[Task]:
    """The pixels in a new order for every task, the first included: the same labels, from inputs that conflict.

    With `scaled` they are shifted and scaled to mean 0 and deviation 1, the margin left out.
    """
    channels, height, width = images.train_x.shape[1:]
    size = channels * (height + 2 * margin) * (width + 2 * margin)
    generator = torch.Generator().manual_seed(seed)
    mean, deviation = map(float, _moments(images, (0, 1, 2, 3))) if scaled else (0.0, 1.0)
    views = [Pixels(torch.randperm(size, generator=generator), margin, mean, deviation) for _ in range(count)]
    return [
        Task(f"order {index}", Split(images.train_x, images.train_y, view), Split(images.test_x, images.test_y, view))
        for index, view in enumerate(views, 1)
    ]


def rotated(images: Images, degrees: Sequence[float]) -> list[Task]:
    """The images turned by each angle in turn."""
    return [
        Task(
            f"{each:g}°", Split(images.train_x, images.train_y, Turned(each)),
            Split(images.test_x, images.test_y, Turned(each)),
        )
        for each in degrees
    ]  # fmt: skip


def split(images: Images, form: str, classes: int = 2, flat: bool = True) -> list[Task]:
    """A few classes at a time.

    Task-incremental: each task is told and has outputs of its own. Domain-incremental: every task's classes share the
    same outputs (odd or even, for digits). Class-incremental: which of all the classes so far?
    """
    if form not in ("task", "domain", "class"):
        raise ArgumentError(
            f"a split is task-, domain- or class-incremental: 'task', 'domain' or 'class', got {form!r}."
        )
    view = Pixels() if flat else _standardized(images)
    tasks = []
    for first in range(0, images.classes - classes + 1, classes):
        mine = range(first, first + classes)
        parts = []
        for x, y in ((images.train_x, images.train_y), (images.test_x, images.test_y)):
            rows = (y >= first) & (y < first + classes)
            parts.append(Split(x[rows], y[rows] - (0 if form == "class" else first), view))
        outputs = {"task": tuple(mine), "domain": None, "class": tuple(range(first + classes))}[form]
        tasks.append(Task(f"{mine[0]}–{mine[-1]}", parts[0], parts[1], outputs, grows=form == "class"))
    return tasks


def texts(text: Text, length: int, part: float = 0.1) -> list[Task]:
    """Each domain cut into sequences, whose next bytes are the labels; the last part of each is to be judged by."""
    tasks = []
    for name, data in text.domains.items():
        rows = (len(data) - 1) // length
        x = data[: rows * length].view(rows, length)
        y = data[1 : rows * length + 1].view(rows, length).long()
        last = max(1, round(rows * part))
        tasks.append(Task(name, Split(x[:-last], y[:-last], _whole), Split(x[-last:], y[-last:], _whole)))
    return tasks


def _whole(codes: Tensor) -> Tensor:
    return codes.long()


def _standardized(images: Images) -> Colors:
    mean, deviation = _moments(images, (0, 2, 3))
    return Colors(tuple(mean.tolist()), tuple(deviation.tolist()))


def _moments(images: Images, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The mean and the deviation of the first 10,000 training images, which do for all."""
    part = images.train_x[:10000].float() / 255
    return part.mean(over), part.std(over).clamp(min=1e-3)
