"""Learn a sequence of tasks with a method, and measure what is kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HoldfastError
from .machine import Meter, in_use, usable, warm
from .measures import Run
from .methods import Method
from .tasks import UNCOUNTED, Split, Task
from .training import Trainer, Training

_BATCH = 5000  # of a test
_TRAINED: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # by all runs of this process, by id
_GLANCE = 1000  # test examples of each task that are looked at while the next one is learned


def run(
    method: Method,
    tasks: Sequence[Task],
    make_model: Callable[[], nn.Module],
    training: Training,
    *,
    name: str = "",
    seed: int = 0,
    device: str | torch.device = "cpu",
    stages: Callable[[Sequence[Task]], Sequence[Task]] | None = None,
    progress: Callable[[str], None] = lambda learned: None,
) -> Run:
    """Learn the tasks in turn from a model made with `seed`, testing on all of them after each, all on `device`.

    All that is drawn on the way follows from the seed, and torch's own random numbers are left as they were. `stages`
    makes of the tasks what is learned where that is not the tasks themselves: all of them joined, for joint training.
    `progress` is called after each with its name.
    """
    tasks = list(tasks)
    one = not isinstance(method, type) and all(hasattr(method, each) for each in ("learn", "remember", "kept"))
    if not tasks or isinstance(make_model, nn.Module) or not callable(make_model) or not one:
        raise ArgumentError("run takes a method, at least one task, and a function that makes a model: lambda: net().")
    if not all(isinstance(task, Task) for task in tasks) or not isinstance(training, Training):
        raise ArgumentError("run takes tasks, each a Task(name, train, test), and how to train: Training(epochs=10).")
    if not hasattr(seed, "__index__") or not 0 <= seed < 2**31:
        raise ArgumentError(f"a seed is a whole number from 0 to {2**31 - 1}, got {seed!r}.")
    seed = int(seed)  # of NumPy's too, which no file takes
    if stages is not None and not callable(stages):
        raise ArgumentError("stages makes of the tasks what is learned, such as lambda tasks: [joined(tasks)].")
    if not isinstance(method.kept, Sequence):  # of a function, which is never empty, the next line would say otherwise
        raise ArgumentError(
            f"a method's `kept` is a list of the tensors it carries on, [] for none, got {type(method.kept).__name__}: "
            "as a function it has @property above it."
        )
    if method.kept:
        raise ArgumentError("this method has learned already, and would be held to that: make a new one for each run.")
    device = usable(device)
    warm(device)
    tasks = [task.to(device) for task in tasks]
    accuracy, nll, lowest, settled, kept = [], [], [], [], []
    learning: list[Meter] = []
    remembering: list[Meter] = []
    with _drawn_from(seed, device):
        start = in_use(device)
        learned = tasks if stages is None else list(stages(tasks))
        if not learned:
            raise ArgumentError("stages makes nothing of the tasks, so that nothing would be learned.")
        model = _fresh(make_model()).to(device)
        model.eval()
        _require_answers(model, tasks, training)
        _TRAINED.update({id(parameter): parameter for parameter in model.parameters()})
        untrained = [_judged(model, task.judged_after(task), training)[0] for task in tasks]
        trainer = Trainer(training, seed)
        for stage, task in enumerate(learned):
            seen: list[float] = []
            learning.append(Meter(device))
            earlier = tasks[:stage] if len(learned) == len(tasks) else []
            trainer.watch = _glance(model, earlier, task, training, learning[-1], seen)
            with learning[-1].running():
                method.learn(model, task, trainer)
            remembering.append(Meter(device))
            with remembering[-1].running():
                method.remember(model, task, trainer)
            found = [_judged(model, other.judged_after(task), training) for other in tasks]
            accuracy.append([right for right, _ in found])
            nll.append([loss for _, loss in found])
            lowest.append(min(seen) if seen else None)
            settled.append(seen[-1] if seen else None)
            kept.append(sum(tensor.numel() * tensor.element_size() for tensor in method.kept))
            progress(task.name)
    return Run(
        name or type(method).__name__, seed, accuracy, nll, untrained, lowest, settled,
        [meter.seconds for meter in learning], [meter.seconds for meter in remembering], kept,
        [max(0, meter.most - start) for meter in learning], [max(0, meter.most - start) for meter in remembering],
    )  # fmt: skip


def _fresh(model: nn.Module) -> nn.Module:
    """A model that no run has trained yet."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a run's function makes a model, a torch module, got {type(model).__name__}.")
    if any(_TRAINED.get(id(parameter)) is parameter for parameter in model.parameters()):
        raise ArgumentError(
            "this run's function gave a model that a run before has trained: make a new one at every call, such as "
            "lambda: copy.deepcopy(net)."
        )
    return model


@contextmanager
def _drawn_from(seed: int, device: str) -> Iterator[None]:
    """All random numbers of torch's from a seed, and its own as they were afterwards."""
    seeded = device.startswith("cuda") or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(torch.cuda.device_count()) if seeded else []):  # all are seeded by one call
        torch.manual_seed(seed)
        yield


def _require_answers(model: nn.Module, tasks: Sequence[Task], training: Training) -> None:
    """Raise where a task's labels have no output that could answer."""
    for task in tasks:
        _tried(model, task, task.train)
        answers = _tried(model, task, task.test)
        labels = [split.y for split in (task.train, task.test)]
        _require_one_each(task, labels, answers, training)
        if training.loss == "tokens":
            labels = [y[y != UNCOUNTED] for y in labels]
            if not all(map(len, labels)):
                raise ArgumentError(f"`{task.name}` has no token that counts: every label is {UNCOUNTED}.")
        if any(y.is_floating_point() or int(y.min()) < 0 for y in labels):
            raise ArgumentError(f"`{task.name}` has labels that are no whole numbers from 0.")
        width, largest = answers.shape[-1], int(max(y.max() for y in labels))
        if largest >= width or (task.outputs and width < len(task.outputs)):
            asked = f"is answered by outputs {task.outputs[0]} to {task.outputs[-1]}" if task.outputs else ""
            raise ArgumentError(
                f"`{task.name}` {f'{asked} and ' if asked else ''}has labels up to {largest}, and {width} of the "
                "model's outputs to answer."
            )


@torch.no_grad()
def _tried(model: nn.Module, task: Task, data: Split) -> Tensor:
    """What the model says of one input; an error that tells what it was given, where it cannot say anything."""
    x = data.first(1).x
    try:
        return task.logits(model, x)
    except HoldfastError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        what = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(
            f"the model cannot answer an input of `{task.name}`, {what}: {error}. It is given inputs as a Split has "
            "them: make them what it takes, such as x.float() / 255 of bytes."
        ) from error


def _require_one_each(task: Task, labels: Sequence[Tensor], answers: Tensor, training: Training) -> None:
    """Raise where labels do not stand one to one with answers: compared, each would be laid against all the others."""
    for y in labels:
        if training.loss != "tokens" and y.ndim != 1:
            raise ArgumentError(
                f"`{task.name}` has labels of shape {tuple(y.shape)}, and the loss {training.loss!r} takes one for an "
                f"example, ({len(y)},): y.squeeze(1) takes away a second side of 1, and where every position has a "
                "label the loss is 'tokens'."
            )
        if y.shape[1:] != answers.shape[1:-1]:
            raise ArgumentError(
                f"`{task.name}` has labels of shape {tuple(y.shape)}, and the model's answers to as many inputs are of "
                f"shape {(len(y), *answers.shape[1:])}: outputs stand last, and before them one place for each label."
            )


@torch.no_grad()
def _judged(model: nn.Module, task: Task, training: Training, count: int | None = None) -> tuple[float, float]:
    """The share of answers that are right on the test data, and the negative log-likelihood of the labels; no numbers
    where none of it counts."""
    data = task.test if count is None else task.test.spread(count)
    right = torch.zeros((), dtype=torch.float64, device=data.y.device)
    loss, answers = torch.zeros_like(right), 0
    for x, y in data.batches(_BATCH if training.loss != "tokens" else 100):
        logits = task.logits(model, x)
        right += (logits.argmax(-1) == y).sum()
        loss += training.losses(logits, y).sum()
        answers += training.count(y)
    return (float(right) / answers, float(loss) / answers) if answers else (math.nan, math.nan)


def _glance(
    model: nn.Module, earlier: Sequence[Task], task: Task, training: Training, meter: Meter, seen: list[float]
) -> Callable[[int], None] | None:
    """Notes the mean accuracy on the earlier tasks when called, on a part of their test data; that is no part of what
    learning costs."""
    if not earlier:
        return None

    def look(steps: int) -> None:
        with meter.paused():
            found = [_judged(model, other.judged_after(task), training, _GLANCE)[0] for other in earlier]
        if told := [each for each in found if not math.isnan(each)]:
            seen.append(statistics.fmean(told))

    return look
