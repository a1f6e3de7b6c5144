"""Models × likelihoods × data, as values: what the tests run over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast.likelihood import Likelihood


@dataclass(frozen=True)
class Case:
    """A model factory, its likelihood, and a function that makes n examples as one batch."""

    name: str
    make: Callable[[], nn.Module]
    likelihood: Likelihood
    data: Callable[[int], Any]
    forward: Callable[[nn.Module, Any], Any] | None = None
    targets: tuple[str, ...] = ("expected", "sampled", "observed")

    def __str__(self) -> str:
        return self.name

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make().double()

    def batches(self, cuts: tuple[int, ...] = (7,)) -> list[Any]:
        """The same examples every time, cut into batches of the sizes given."""
        torch.manual_seed(2)
        whole = self.data(sum(cuts))
        starts = [sum(cuts[:i]) for i in range(len(cuts))]
        return [_rows(whole, start, start + size) for start, size in zip(starts, cuts, strict=True)]


def _rows(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[start:stop]
    if isinstance(batch, dict):
        return {key: _rows(value, start, stop) for key, value in batch.items()}
    return tuple(_rows(value, start, stop) for value in batch)


def vectors(features: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, features, dtype=torch.float64), torch.randint(0, classes, (n,)))


def regression(features: int, outputs: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (
        torch.randn(n, features, dtype=torch.float64),
        torch.randn(n, outputs, dtype=torch.float64),
    )


def images(channels: int, size: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (
        torch.randn(n, channels, size, size, dtype=torch.float64),
        torch.randint(0, classes, (n,)),
    )


def relu_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


class DataParallel(nn.Module):
    """As torch's, which would move the model to a GPU where there is one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Shared(nn.Module):
    """One layer used twice: per-example gradients must be summed before they are squared."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Outside(nn.Module):
    """A parameter of its own, and a layer's weight used a second time outside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x) * self.scale)
        return self.head(hidden + F.linear(hidden, self.body.weight))


class Tied(nn.Module):
    """A small language model whose output layer is its embedding, with positions looked up once for all examples."""

    def __init__(self, vocabulary: int = 9, width: int = 6, length: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        places = self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        return self.head(self.norm(torch.tanh(self.mix(self.embed(input_ids) + places))))


class PositionsLookLikeExamples(nn.Module):
    """A Linear layer over positions, as many as there are examples in a batch of five: its first axis is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 4))
        self.lift = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.tanh(self.lift(self.places))  # (5, 4)
        return self.head(torch.tanh(x @ table.T) @ table)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def batchnorm_cnn() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * 9, 3)
    )
    torch.manual_seed(3)
    model(torch.randn(16, 2, 5, 5))  # statistics that are not 0 and 1
    return model


def student(output: Tensor, target: Tensor) -> Tensor:
    """A heavy-tailed negative log-likelihood that the library has no name for."""
    return -torch.distributions.StudentT(3.0, output, 1.0).log_prob(target).sum(-1)


def token_rows(n: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 9, (n, 5))
    labels = ids.clone()
    labels[::3, 3:] = -100
    return {"input_ids": ids, "labels": labels}


CASES = [
    Case("relu-mlp", relu_mlp, holdfast.categorical, vectors(5, 3)),
    Case("binary", lambda: nn.Linear(4, 1), holdfast.bernoulli, lambda n: (
        torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 2, (n, 1)).double())),
    Case("multilabel", lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), holdfast.bernoulli,
         lambda n: (torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 2, (n, 3)).double())),
    Case("regression", lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)), holdfast.gaussian(0.5),
         regression(4, 2)),
    Case("custom", lambda: nn.Linear(4, 2), holdfast.custom(student), regression(4, 2), targets=("observed",)),
    Case("shared-layer", Shared, holdfast.categorical, vectors(4, 3)),
    Case("parameters-outside", Outside, holdfast.categorical, vectors(4, 3)),
    Case("batchnorm-cnn", batchnorm_cnn, holdfast.categorical, images(2, 5, 3)),
    Case("lstm", Recurrent, holdfast.categorical, lambda n: (
        torch.randn(n, 4, 3, dtype=torch.float64), torch.randint(0, 3, (n,)))),
    Case("tied-tokens", Tied, holdfast.tokens(shift=True), token_rows, targets=("sampled", "observed")),
    Case("frozen-body", lambda: _frozen(relu_mlp()), holdfast.categorical, vectors(5, 3)),
    Case("unusual-call", lambda: nn.Bilinear(3, 3, 2), holdfast.gaussian(), lambda n: {
        "left": torch.randn(n, 3, dtype=torch.float64), "right": torch.randn(n, 3, dtype=torch.float64),
        "labels": torch.randn(n, 2, dtype=torch.float64)},
        forward=lambda model, batch: model(batch["left"], batch["right"])),
]  # fmt: skip


def _frozen(model: nn.Module) -> nn.Module:
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    return model
