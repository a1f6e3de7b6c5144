"""How a protocol trains: the same for every method, in steps that a GPU can take without waiting for Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn
from torch.optim import SGD, Adam, Optimizer

from ..devices import sent
from ..errors import ArgumentError, require_number
from ..hold import Handle
from ..likelihood import Likelihood, categorical, gaussian, tokens
from .tasks import UNCOUNTED, Task, masked

Attach = Callable[[Optimizer], AbstractContextManager[Any]]
Loss = Literal["cross-entropy", "squared", "tokens"]


@dataclass(frozen=True)
class Training:
    """The numbers of a training run. `epochs` or `steps` says for how long; a fresh optimizer starts every task.

    With `loss="squared"` the model's outputs are pulled to one-hot labels instead: half the squared distance, the
    negative log-likelihood of a Gaussian with variance 1. With "tokens" a label stands at every position.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 128
    lr: float = 1e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    label_smoothing: float = 0.0
    loss: Loss = "cross-entropy"

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ArgumentError("a training run lasts for `epochs` or for `steps`: give one of them.")
        for name in ("epochs", "steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(f"{name} is a whole number, 1 or more, got {value!r}.")
        if self.loss not in get_args(Loss):
            raise ArgumentError(f"a loss is one of {', '.join(get_args(Loss))}, got {self.loss!r}.")
        for name, known in (("optimizer", ("adam", "sgd")), ("schedule", ("constant", "cosine"))):
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name} is {' or '.join(known)}, got {getattr(self, name)!r}.")
        require_number(self.lr, "a learning rate", positive=True)
        require_number(self.momentum, "momentum")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ArgumentError(f"label_smoothing is 0 or more and less than 1, got {self.label_smoothing!r}.")
        # Rather than that nothing comes of them.
        if self.momentum and self.optimizer != "sgd":
            raise ArgumentError(f"momentum {self.momentum:g} is for optimizer='sgd': {self.optimizer} takes none.")
        if self.label_smoothing and self.loss == "squared":
            raise ArgumentError(f"label_smoothing {self.label_smoothing:g} does not apply to the squared loss.")

    @property
    def likelihood(self) -> Likelihood:
        """What the loss is the negative logarithm of."""
        return {"cross-entropy": categorical, "squared": gaussian(1.0), "tokens": tokens(shift=False)}[self.loss]

    @property
    def unit(self) -> str:
        """What the data is counted in."""
        return "token" if self.loss == "tokens" else "example"

    def count(self, y: Tensor) -> int:
        """How much data has these labels."""
        return int((y != UNCOUNTED).sum()) if self.loss == "tokens" else len(y)

    def targets(self, y: Tensor, width: int) -> Tensor:
        """The labels as the likelihood takes them."""
        return F.one_hot(y, width).float() if self.loss == "squared" else y

    def losses(self, logits: Tensor, y: Tensor, smoothing: float = 0.0, allowed: Tensor | None = None) -> Tensor:
        """The negative log-likelihood of every example or token, in nats; smoothed over the outputs that may answer."""
        if self.loss == "squared":
            apart = logits - self.targets(y, logits.shape[-1])
            return 0.5 * (apart if allowed is None else apart * allowed).square().sum(-1)
        if allowed is not None:
            logs = masked(logits, allowed).log_softmax(-1)
            even = (logs * allowed).sum(-1) / allowed.sum(-1)
            said = logs.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return torch.where(y == UNCOUNTED, 0.0, -(1 - smoothing) * said - smoothing * even)
        flat, labels = logits.flatten(0, -2), y.flatten()
        return F.cross_entropy(flat, labels, reduction="none", label_smoothing=smoothing)

    def mean(self, losses: Tensor, y: Tensor) -> Tensor:
        """Their mean over what counts."""
        return losses.sum() / (y != UNCOUNTED).sum() if self.loss == "tokens" else losses.mean()

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step."""
        return self.lr * (0.5 * (1 + math.cos(math.pi * step / steps)) if self.schedule == "cosine" else 1.0)


@dataclass(frozen=True)
class Way:
    """Another way to train than by the loss at the weights themselves: an optimizer of one's own, the loss of a batch
    where that is another, and what to do it within. Its steps are not recorded: they draw numbers as they go."""

    optimizer: Optimizer
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass
class Trainer:
    """A training run's numbers with the chance in it, for one model and its tasks.

    `watch` is called with the number of steps made, at moments that grow rarer: 1, 2, 4, 8 … and at the end. On a GPU
    the steps are `recorded` and played again, which is right if Python does the same at every step.
    """

    training: Training
    seed: int = 0
    watch: Callable[[int], None] | None = None
    recorded: bool = True
    fits: int = field(default=0, init=False)  # how many there were
    _stream: Any = field(default=None, init=False, repr=False)

    def fit(
        self,
        model: nn.Module,
        task: Task,
        attach: Attach | None = None,
        training: Training | None = None,
        way: Way | None = None,
    ) -> None:
        """Train on a task with a fresh optimizer, to which `attach` may attach a hold (or a hook of its own).

        `training` replaces the protocol's numbers, and `way` what is done in a step, for methods that need their own.
        """
        numbers = training or self.training
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ArgumentError("the model has no weights that train: were all frozen with requires_grad_(False)?")
        data, device = task.train, next(model.parameters()).device
        generator = torch.Generator().manual_seed(1000 * self.seed + self.fits)
        self.fits += 1
        orders = _orders(len(data), numbers, generator, device)
        total = numbers.steps or (numbers.epochs or 0) * math.ceil(len(data) / numbers.batch_size)
        rate = torch.tensor(numbers.lr, device=device) if device.type == "cuda" else numbers.lr
        optimizer = _optimizer(model, numbers, rate) if way is None else way.optimizer
        model.train()
        with ExitStack() as stack:
            if device.type == "cuda":
                if self._stream is None:  # one for all tasks: libraries keep room of their own for every stream
                    self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._stream.wait_stream(torch.cuda.current_stream())
                stack.enter_context(torch.cuda.stream(self._stream))
            held = stack.enter_context(attach(optimizer) if attach else nullcontext())
            steps = _Steps(model, task, data.x, optimizer, numbers, self.recorded, held, way)
            set_to = None
            for made, rows in enumerate(orders):
                if set_to != (now := numbers.rate(made, total)):
                    _set_rate(optimizer, now)
                    set_to = now
                try:
                    steps.take(rows)
                except ValueError as error:
                    if len(rows) > 1 or "more than 1 value per channel" not in str(error):
                        raise
                    raise ArgumentError(
                        f"the last of {len(data)} examples in batches of {numbers.batch_size} stands alone, and "
                        "BatchNorm takes no batch of one: take another batch_size, or steps= in place of epochs."
                    ) from error
                if self.watch is not None and _telling(made + 1, total):
                    self._look(self.watch, model, made + 1)
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        model.eval()

    def _look(self, watch: Callable[[int], None], model: nn.Module, made: int) -> None:
        if next(model.parameters()).is_cuda:
            torch.cuda.current_stream().synchronize()
        model.eval()
        watch(made)
        model.train()


class _Steps:
    """Training steps; on a GPU they are recorded once, as a CUDA graph, and played again for every batch of that size.

    A small network's step is a hundred kernels of microseconds, and Python needs a hundred times as long to start them.
    """

    _EAGER = 3  # steps made as usual before recording: they set up what libraries set up at first use

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        x: Tensor,
        optimizer: Optimizer,
        numbers: Training,
        recorded: bool,
        held: object = None,
        way: Way | None = None,
    ) -> None:
        self._held, self._way = held, way or Way(optimizer)
        self._model, self._task, self._optimizer, self._numbers = model, task, optimizer, numbers
        self._x, self._y, self._allowed = x, task.train.y, task.train.allowed
        self._eager = self._EAGER if recorded and x.is_cuda and way is None else math.inf
        self._made = 0
        self._rows: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def take(self, rows: Tensor) -> None:
        """One step on the examples in these rows."""
        if self._made < self._eager or (self._rows is not None and len(rows) != len(self._rows)):
            self._step(rows)
        else:
            if self._graph is None or self._rows is None:
                self._rows = rows.clone()
                self._graph = self._recorded(self._rows)
            self._rows.copy_(rows)
            self._graph.replay()
        self._made += 1

    def _recorded(self, rows: Tensor) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._held.generators if isinstance(self._held, Handle) else ():
            graph.register_generator_state(generator)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self._step(rows)
        return graph

    def _step(self, rows: Tensor) -> None:
        with _fastest():
            self._on(rows)

    def _on(self, rows: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        x, y = _laid_out(self._x[rows]), self._y[rows]
        with self._way.within():
            torch.autograd.backward(self._loss(x, y, rows) if self._way.loss is None else self._way.loss(x, y))
        self._optimizer.step()

    def _loss(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        logits = self._task.logits(self._model, x)
        allowed = None if self._allowed is None else self._allowed[rows]
        if allowed is not None:
            logits = logits[..., : allowed.shape[-1]]
            allowed = allowed.view(len(allowed), *(1,) * (logits.ndim - 2), -1)  # the same at every position
        return self._numbers.mean(self._numbers.losses(logits, y, self._numbers.label_smoothing, allowed), y)


@contextmanager
def _fastest() -> Iterator[None]:
    """Convolutions are timed at their first use, instead of guessed at."""
    before = cudnn.benchmark
    cudnn.benchmark = True
    try:
        yield
    finally:
        cudnn.benchmark = before


def _laid_out(x: Tensor) -> Tensor:
    """Pictures with their channels innermost, where a GPU's convolutions are fastest; all else as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and x.dim() == 4 else x


def _optimizer(model: nn.Module, numbers: Training, rate: float | Tensor) -> Optimizer:
    on_gpu = isinstance(rate, Tensor)
    # Fused there: a step takes as long as it has kernels, and of the SGDs no other takes its rate from a GPU.
    how: dict[str, Any] = {"fused": True} if on_gpu else {"foreach": True}
    if numbers.optimizer == "adam":
        return Adam(model.parameters(), lr=rate, capturable=on_gpu, **how)
    return SGD(model.parameters(), lr=rate, momentum=numbers.momentum, **how)


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _orders(count: int, numbers: Training, generator: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """The rows of each batch. Counted in steps, all batches are full; counted in epochs, an epoch's last may not be.

    Drawn on the CPU, so that they are the same everywhere, and brought to the device an epoch at a time.
    """
    size = min(numbers.batch_size, count)
    made = 0
    for _ in range(numbers.epochs or numbers.steps or 0):
        for rows in torch.split(sent(torch.randperm(count, generator=generator), device), size):
            if numbers.steps is not None and (made == numbers.steps or len(rows) < size):
                break
            made += 1
            yield rows
        if made == numbers.steps:
            return


def _telling(made: int, total: int) -> bool:
    return made & (made - 1) == 0 or made == total
