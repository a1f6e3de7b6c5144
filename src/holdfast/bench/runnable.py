"""What can be run: the method, the tasks and the model of a run are looked at before anything is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DataError, HoldfastError
from .methods import Method
from .tasks import UNCOUNTED, Split, Task
from .training import Training

_TRAINED: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # by all runs of this process, by id


def listed(tasks: Iterable[Task]) -> list[Task]:
    """The tasks, which may come one by one."""
    if not isinstance(tasks, Iterable):
        raise ArgumentError(f"run takes its tasks in a list, [first, second], got {type(tasks).__name__}.")
    return list(tasks)


def require_runnable(
    method: Method,
    tasks: Sequence[Task],
    make_model: Callable[[], nn.Module],
    training: Training,
    seed: int,
    stages: Callable[[Sequence[Task]], Sequence[Task]] | None,
) -> None:
    """Raise where what a run is given makes no run."""
    one = not isinstance(method, type) and all(hasattr(method, each) for each in ("learn", "remember", "kept"))
    if not tasks or isinstance(make_model, nn.Module) or not callable(make_model) or not one:
        raise ArgumentError("run takes a method, at least one task, and a function that makes a model: lambda: net().")
    if not all(isinstance(task, Task) for task in tasks) or not isinstance(training, Training):
        raise ArgumentError("run takes tasks, each a Task(name, train, test), and how to train: Training(epochs=10).")
    if not hasattr(seed, "__index__") or not 0 <= seed < 2**31:
        raise ArgumentError(f"a seed is a whole number from 0 to {2**31 - 1}, got {seed!r}.")
    if stages is not None and not callable(stages):
        raise ArgumentError("stages makes of the tasks what is learned, such as lambda tasks: [joined(tasks)].")
    if not isinstance(method.kept, Sequence):  # of a function, which is never empty, the next line would say otherwise
        raise ArgumentError(
            f"a method's `kept` is a list of the tensors it carries on, [] for none, got {type(method.kept).__name__}: "
            "as a function it has @property above it."
        )
    if method.kept:
        raise ArgumentError("this method has learned already, and would be held to that: make a new one for each run.")


def fresh(model: nn.Module) -> nn.Module:
    """A model that no run has trained yet."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a run's function makes a model, a torch module, got {type(model).__name__}.")
    if any(_TRAINED.get(id(parameter)) is parameter for parameter in model.parameters()):
        raise ArgumentError(
            "this run's function gave a model that a run before has trained: make a new one at every call, such as "
            "lambda: copy.deepcopy(net)."
        )
    return model


def begun(model: nn.Module) -> None:
    """From now on the model is one that a run trains."""
    _TRAINED.update({id(parameter): parameter for parameter in model.parameters()})


def require_answers(model: nn.Module, tasks: Sequence[Task], training: Training) -> None:
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
                "model's outputs to answer. Labels count from 0 within the outputs of their task, without a gap: such "
                "as torch.unique(y, return_inverse=True)[1]."
            )


def require_learned(model: nn.Module, task: Task, training: Training) -> None:
    """Raise where training left weights that are no numbers: such a network says the first class, whatever is asked."""
    broken = [name for name, each in model.named_parameters() if not bool(each.isfinite().all())]
    if broken:
        x = task.train.stored
        why = _NOT_FINITE if _unsound(x) else _diverged(training)
        raise DataError(f"training on `{task.name}` left `{broken[0]}` with values that are not finite: {why}")


def require_said(losses: Tensor, x: Tensor, task: Task, training: Training) -> None:
    """Raise where what a model says of a task's test data is no number, though its weights are."""
    if bool(losses.isnan().any()):
        why = _NOT_FINITE if _unsound(x) else _diverged(training)
        raise DataError(f"the model's answers to test data of `{task.name}` are no numbers: {why}")


_NOT_FINITE = "its inputs have values that are not finite. Take those examples out."


def _diverged(training: Training) -> str:
    return f"it diverged. Lower its learning rate, {training.lr:g}, or the strength of what holds it."


def _unsound(x: Tensor) -> bool:
    return x.is_floating_point() and not bool(x.isfinite().all())


@torch.no_grad()
def _tried(model: nn.Module, task: Task, data: Split) -> Tensor:
    """What the model says of one input; an error that tells what it was given, where it cannot say anything."""
    x = data.first(1).x
    try:
        return task.logits(model, x)
    except (HoldfastError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        what = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(
            f"the model cannot answer an input of `{task.name}`, {what}: {error}. It is given inputs as a Split has "
            "them: make them what it takes, such as x.float() / 255 of bytes."
        ) from error


def _require_one_each(task: Task, labels: Sequence[Tensor], answers: Tensor, training: Training) -> None:
    """Raise where labels do not stand one to one with answers: compared, each would be laid against all the others."""
    if answers.ndim < 2 or len(answers) != 1:
        raise ArgumentError(
            f"the model's answer to one input of `{task.name}`, a batch of 1, is of shape {tuple(answers.shape)}: the "
            "batch stands first, and the outputs last."
        )
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
