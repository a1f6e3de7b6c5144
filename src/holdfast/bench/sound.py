"""What a result read from a file must be to be shown: every value of its kind, every list of its length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .measures import Run

_LEAST, _MOST = 1e-9, 1e15  # seconds, or bytes
_STEEPEST = 1e100  # nats


def require_sound(job: Mapping[str, Any], made: Mapping[str, Any], run: Run) -> None:
    """Raise a ValueError, or what comes of taking a thing for another, where a table or a picture would fail."""
    stages, tasks = len(run.accuracy), len(run.accuracy[0]) if run.accuracy else 0
    if not tasks:
        raise ValueError("its table of accuracies is empty")
    _require_table("accuracy", run.accuracy, stages, tasks, _is_share)
    if run.nll:
        _require_table("nll", run.nll, stages, tasks, _is_likelihood)
        if any(math.inf in row and -math.inf in row for row in run.nll):
            raise ValueError("its `nll` cannot be inf and -inf after the same stage")
    _require("untrained", run.untrained, tasks, _is_share)
    for name in ("lowest", "settled"):
        _require(name, getattr(run, name), stages, lambda value: value is None or _is_share(value))
    for name in ("learning_seconds", "remembering_seconds"):
        _require(name, getattr(run, name), stages, lambda value: _is_amount(value) and _is_measured(value))
    for name in ("kept_bytes", "learning_bytes", "remembering_bytes"):
        _require(name, getattr(run, name), stages, lambda value: _is_count(value) and _is_measured(value))
    _require("seed", [run.seed], 1, _is_count)
    _require("names", [run.method], 1, lambda value: isinstance(value, str))
    require_sound_job(job, made)


def require_sound_job(job: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """The same of what was run, and of how it was made."""
    _require("strength", [job["strength"]], 1, lambda value: value is None or _is_amount(value))
    _require("seed", [job["seed"]], 1, _is_count)
    _require("validating", [job["validating"]], 1, lambda value: isinstance(value, bool))
    _require("names", [job["protocol"], job["method"]], 2, lambda value: isinstance(value, str))
    if not isinstance(job, Mapping) or not isinstance(made, Mapping):
        raise ValueError("its `job` or its `made` is no table of names")


def _require_table(name: str, rows: object, stages: int, tasks: int, sound: Callable[[Any], bool]) -> None:
    if not isinstance(rows, list) or len(rows) != stages or not all(isinstance(row, list) and row for row in rows):
        raise ValueError(f"its `{name}` is no table with a row for each of {stages} stages")
    for row in rows:
        _require(name, row, tasks, sound)


def _require(name: str, values: object, length: int, sound: Callable[[Any], bool]) -> None:
    """A list of sound values, as many as there should be or, where it was not measured, none."""
    if not isinstance(values, list) or len(values) not in (0, length):
        raise ValueError(f"its `{name}` is no list of {length}")
    for value in values:
        if not sound(value):
            raise ValueError(f"its `{name}` cannot be {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_count(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0.0 <= value <= 1.0


def _is_amount(value: Any) -> bool:
    return _is_number(value) and 0.0 <= value < math.inf


def _is_measured(value: float) -> bool:
    """Nothing at all, or what a clock can tell and a machine can hold: a logarithmic axis has room for it."""
    return value == 0 or _LEAST <= value <= _MOST


def _is_likelihood(value: Any) -> bool:
    """Training that diverges may leave none at all, but what is finite can be summed and squared."""
    return _is_number(value) and (not math.isfinite(value) or abs(value) <= _STEEPEST)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
