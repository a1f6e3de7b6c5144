"""Pictures and their labels, as one value: MNIST, Fashion-MNIST, CIFAR-10, and the digits of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DataError, HoldfastError
from .catalog import (
    ARCHIVE,
    CIFAR10,
    FASHION_MNIST,
    MNIST,
    TEST_BATCH,
    TEST_IMAGES,
    TEST_LABELS,
    TEST_PACKED,
    TRAIN_BATCHES,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    TRAIN_PACKED,
)  # fmt: skip
from .decoded import decoded
from .files import Dataset, File, files, unverified
from .readers import batch, idx, packed
from .sources import members
from .text import text_digest

Folder = str | Path | None


@dataclass(frozen=True)
class Images:
    """Pictures to learn from and to be judged on. Pixels are bytes; scaling them is up to the task.

    >>> digits().train_x.shape, digits().classes
    (torch.Size([1348, 1, 8, 8]), 10)
    """

    name: str
    train_x: Tensor  # uint8 (N, C, H, W)
    train_y: Tensor  # int64 (N,)
    test_x: Tensor
    test_y: Tensor
    classes: int

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if x.dtype != torch.uint8 or x.ndim != 4 or y.dtype != torch.int64 or y.shape != x.shape[:1]:
                raise DataError(
                    f"{self.name}: {part} has pictures {tuple(x.shape)} of {x.dtype} and labels {tuple(y.shape)} of "
                    f"{y.dtype}; expected uint8 (N, C, H, W) and int64 (N,)."
                )
            if not len(y) or int(y.min()) < 0 or int(y.max()) >= self.classes:
                found = f"labels from {int(y.min())} to {int(y.max())}" if len(y) else "no pictures"
                raise DataError(f"{self.name}: {part} has {found}; expected labels from 0 to {self.classes - 1}.")
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            shapes = f"{tuple(self.train_x.shape[1:])} to train on and {tuple(self.test_x.shape[1:])} to test on"
            raise DataError(f"{self.name} has pictures of {shapes}; expected one shape.")


def mnist(folder: Folder = None) -> Images:
    """Handwritten digits, 28×28, 60,000 and 10,000 (LeCun 1998).

    From `folder` alone if one is given; else from $HOLDFAST_DATA or the cache; else fetched, unless HOLDFAST_OFFLINE.
    """
    return _from_idx("mnist", MNIST, folder)


def fashion_mnist(folder: Folder = None) -> Images:
    """Articles of clothing in MNIST's form (Xiao 2017); found as `mnist` is."""
    return _from_idx("fashion-mnist", FASHION_MNIST, folder)


def cifar10(folder: Folder = None) -> Images:
    """Ten kinds of things in color, 32×32, 50,000 and 10,000 (Krizhevsky 2009); found as `mnist` is.

    From its archive, the archive's extracted batches, or `train.npz` and `test.npz`, which hold JPEGs: those are
    decoded once, and the pixels kept in the cache.
    """
    found = files(CIFAR10, folder)
    if ARCHIVE in found:
        archive = found[ARCHIVE]
        parts = members(archive.content, (*TRAIN_BATCHES, TEST_BATCH))
        found = {name: File(f"{archive.place}/{name}", content) for name, content in parts.items()}
    tensors = _from_batches(found) if TEST_BATCH in found else decoded("cifar10", found, lambda: _from_packed(found))
    return Images("cifar10", **tensors, classes=10)


def prepare(name: str) -> None:
    """Find or fetch the files of a dataset, once, before many processes look for them."""
    if (dataset := _dataset(name)) is not None:
        files(dataset)


def origin(name: str) -> str | None:
    """What it would be read from: a digest of packed pictures or of a text, "" where its name says it all; None if not
    here."""
    if name == "text":
        try:
            return text_digest()
        except DataError:
            return None
    dataset = _dataset(name)
    return "" if dataset is None else unverified(dataset)


def digits() -> Images:
    """scikit-learn's 8×8 digits: 1348 and 449, always the same ones; from 0..16 to 0..255, rounded."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise HoldfastError("The digits ship with scikit-learn. Install holdfast[bench].") from error
    bunch = load_digits()
    x = (torch.tensor(bunch.images, dtype=torch.float64) * 255 / 16).round().to(torch.uint8).unsqueeze(1)
    y = torch.tensor(bunch.target, dtype=torch.int64)
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = rows[:1348], rows[1348:]
    return Images("digits", x[train], y[train], x[test], y[test], classes=10)


def _dataset(name: str) -> Dataset | None:
    """What is known of a dataset's files, where it has any."""
    return {"mnist": MNIST, "fashion-mnist": FASHION_MNIST, "cifar10": CIFAR10}.get(name)


def _from_idx(name: str, dataset: Dataset, folder: Folder) -> Images:
    found = files(dataset, folder)
    train_x, test_x = (idx(found[part], 3).unsqueeze(1) for part in (TRAIN_IMAGES, TEST_IMAGES))
    train_y, test_y = (idx(found[part], 1).long() for part in (TRAIN_LABELS, TEST_LABELS))
    return Images(name, train_x, train_y, test_x, test_y, classes=10)


def _from_batches(found: Mapping[str, File]) -> dict[str, Tensor]:
    pictures, labels = zip(*(batch(found[name]) for name in TRAIN_BATCHES), strict=True)
    test_x, test_y = batch(found[TEST_BATCH])
    return {"train_x": torch.cat(pictures), "train_y": torch.cat(labels), "test_x": test_x, "test_y": test_y}


def _from_packed(found: Mapping[str, File]) -> dict[str, Tensor]:
    (train_x, train_y), (test_x, test_y) = packed(found[TRAIN_PACKED]), packed(found[TEST_PACKED])
    return {"train_x": train_x, "train_y": train_y, "test_x": test_x, "test_y": test_y}
