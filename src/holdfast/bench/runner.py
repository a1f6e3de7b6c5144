"""Learn a sequence of tasks with a method, and measure what is kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import ArgumentError
from .machine import Meter, in_use, usable, warm
from .measures import Run
from .methods import Method
from .runnable import begun, fresh, listed, require_answers, require_learned, require_runnable, require_said
from .tasks import Task
from .training import Trainer, Training

_BATCH = 5000  # of a test
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
    tasks = listed(tasks)
    require_runnable(method, tasks, make_model, training, seed, stages)
    seed = int(seed)  # of NumPy's too, which no file takes
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
        model = fresh(make_model()).to(device)
        model.eval()
        require_answers(model, tasks, training)
        begun(model)
        untrained = [_judged(model, task.judged_after(task), training)[0] for task in tasks]
        trainer = Trainer(training, seed)
        for stage, task in enumerate(learned):
            seen: list[float] = []
            learning.append(Meter(device))
            earlier = tasks[:stage] if len(learned) == len(tasks) else []
            trainer.watch = _glance(model, earlier, task, training, learning[-1], seen)
            with learning[-1].running():
                method.learn(model, task, trainer)
            require_learned(model, task, training)
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


@contextmanager
def _drawn_from(seed: int, device: str) -> Iterator[None]:
    """All random numbers of torch's from a seed, and its own as they were afterwards."""
    seeded = device.startswith("cuda") or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(torch.cuda.device_count()) if seeded else []):  # all are seeded by one call
        torch.manual_seed(seed)
        yield


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
        losses = training.losses(logits, y)
        require_said(losses, x, task, training)
        loss += losses.sum()
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
            require_learned(model, task, training)
            found = [_judged(model, other.judged_after(task), training, _GLANCE)[0] for other in earlier]
        if told := [each for each in found if not math.isnan(each)]:
            seen.append(statistics.fmean(told))

    return look
