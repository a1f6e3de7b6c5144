"""Jobs: one method, one strength and one seed on one protocol, described so that any machine can run them."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..errors import ArgumentError, DataError, require_number
from . import data, results
from .catalog import JOINT, METHODS, one_of
from .machine import present, usable
from .measures import Run, best
from .protocols import Protocol
from .results import Result
from .runner import run
from .tasks import joined

# What decides a run's numbers; how they are shown does not.
_SHOWN_ONLY = (
    "report/", "cli/", "__main__.py", "bench/demonstration.py", "bench/engines.py", "bench/grid.py",
    "bench/measures.py", "bench/published.py", "bench/results.py", "bench/sound.py",
)  # fmt: skip

# Runs of one process take turns: they share torch's random numbers, its threads and the process's memory, by which
# their models are made and their costs are measured.
_TURN = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A run to be made. `chosen` says that the strength was chosen on validation data and not given."""

    protocol: Protocol
    method: str
    seed: int
    strength: float = 1.0
    validating: bool = False
    chosen: bool = False

    def __post_init__(self) -> None:
        one_of(self.method, METHODS, "method")
        require_number(self.strength, "a strength")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ArgumentError(f"a seed is a whole number from 0 to {2**31 - 1}, got {self.seed!r}.")
        need = METHODS[self.method].need
        if need is not None and not need.met(self.protocol):
            raise ArgumentError(f"{self.method} does not apply to {self.protocol.name}: {need.words}.")
        if self.validating:
            self.protocol.require_validation()

    @property
    def config(self) -> dict[str, Any]:
        """All that decides the outcome, as JSON has it."""
        return {
            "protocol": self.protocol.name,
            "description": self.protocol.about,
            "numbers": numbers_of(self.protocol),
            "method": self.method,
            "strength": float(self.strength) if METHODS[self.method].has_strength else None,
            "seed": self.seed,
            "validating": self.validating,
            "chosen": self.chosen,
            "keeps_data": METHODS[self.method].keeps_data,
            # What a Python installation carries is another text in another version.
            **({"python": platform.python_version()} if self.protocol.stream == "text" else {}),
        }

    @property
    def name(self) -> str:
        """What a line of progress calls it."""
        strength = f" at {self.strength:g}" if METHODS[self.method].has_strength else ""
        validation = ", on validation data" if self.validating else ""
        return f"{self.protocol.name}: {self.method}{strength}, seed {self.seed}{validation}"

    def path(self, folder: Path, device: str = "cpu") -> Path:
        """Where its result is kept, for each kind of device another."""
        return results.path(folder, {**self.config, "device": device.partition(":")[0]}, code_version())

    def error_path(self, folder: Path, device: str = "cpu") -> Path:
        """Where it is written down how it failed, if it did."""
        return self.path(folder, device).with_suffix(".error.json")

    def done(self, folder: Path, device: str = "cpu") -> Result | None:
        """Its result, if there is one. A damaged file raises a DataError, and so does one with another's result."""
        either = ("cuda", "cpu") if device == "auto" else (device,)
        found = next((path for kind in either if (path := self.path(folder, kind)).exists()), None)
        if found is None:
            return None
        result = results.read(found)
        elsewhere = device.partition(":")[0] not in ("cuda" if result.on_gpu else "cpu", "auto")
        if dict(result.job) != self.config or result.made.get("version") != code_version() or elsewhere:
            raise DataError(f"{found} holds another run's result than its name says.")
        here = data.origin(self.protocol.dataset)
        if here is not None and result.made.get("data", "") != here:
            raise DataError(f"{found} was made from other files of {self.protocol.dataset} than are here.")
        return result


def grid(
    protocols: Sequence[Protocol],
    methods: Sequence[str],
    seeds: Sequence[int],
    strengths: Sequence[float] = (1.0,),
    validating: bool = False,
) -> list[Job]:
    """Every combination, seeds outermost, so that the first results come for all. Without a strength, once each."""
    return [
        Job(protocol, method, seed, strength, validating)
        for seed in seeds
        for protocol in protocols
        for method in methods
        for strength in (strengths if one_of(method, METHODS, "method").has_strength else (1.0,))
    ]


def execute(
    job: Job, device: str = "cpu", threads: int | None = None, progress: Callable[[str], None] = lambda learned: None
) -> Result:
    """Make the run. It needs nothing but the job: any process on any machine with the data can do it.

    With the device "auto" it is made on a GPU where the machine that makes it has one.
    """
    device = present(device)
    with _TURN, torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            origin = data.origin(job.protocol.dataset)
            return Result(job.config, _made(job, device, progress), made_on(device, job.chosen, origin))
        finally:
            if device.startswith("cuda"):  # what this process keeps in reserve, the others on the GPU go without
                gc.collect()
                torch.cuda.empty_cache()


def _made(job: Job, device: str, progress: Callable[[str], None]) -> Run:
    method = METHODS[job.method].make(job.strength)
    tasks = job.protocol.sequence(job.seed, validating=job.validating, device=device)
    stages = (lambda tasks: [joined(tasks)]) if job.method == JOINT else None
    own = METHODS[job.method].model

    def model() -> nn.Module:
        return job.protocol.model(tasks) if own is None else own(job.protocol.outputs(tasks))

    return run(
        method, tasks, model, _training(job), name=job.method, seed=job.seed,
        device=device, stages=stages, progress=progress,
    )  # fmt: skip


def save(
    made: Run,
    folder: str | os.PathLike[str],
    *,
    protocol: str,
    strength: float | None = None,
    description: str = "",
    device: str | torch.device = "cpu",
    keeps_data: bool | None = None,
) -> Path:
    """Keep a run of one's own among a folder's results, where `holdfast report` finds it under its protocol.

    Methods are told apart by their names and strengths: another run under the same is not written over. One that
    `keeps_data` looks at old data again, and is no yardstick for those that do not; where that is not said, one whose
    name begins with "joint" does.
    """
    folder, device = Path(folder), usable(device)
    if strength is not None:
        strength = require_number(strength, "a strength")
    config: dict[str, Any] = {
        "protocol": protocol, "description": description, "numbers": {}, "method": made.method, "strength": strength,
        "seed": made.seed, "validating": False, "chosen": False, "keeps_data": keeps_data,
    }  # fmt: skip
    result = Result(config, made, made_on(device))
    try:
        results.require_readable(result)
        folder.mkdir(parents=True, exist_ok=True)
    except (DataError, OSError) as error:
        raise ArgumentError(f"this run cannot be kept in {folder}: {error}") from error
    target = results.path(folder, {**config, "device": device.partition(":")[0]}, code_version())
    if target.exists() and _known(_there(target)) != _known(made):
        raise ArgumentError(
            f"{folder} has a run of {made.method!r} with seed {made.seed} on {protocol!r}, and this is another one. "
            "Give each method a name of its own, run(..., name=...), or a strength; or remove the file "
            f"{target.name}, or save to another folder."
        )
    results.write(target, result)
    return target


def _there(target: Path) -> Run:
    try:
        return results.read(target).run
    except DataError as error:
        raise ArgumentError(f"{error} Remove it, or save to another folder.") from error


def _known(made: Run) -> str:
    """What a run came to, and not how long it took; what is no number is the same as itself."""
    return repr((made.accuracy, made.nll))


def _training(job: Job) -> Any:
    """The protocol's training; joint training has one stage with as many steps as all the tasks have."""
    training = job.protocol.training
    if job.method == JOINT and training.steps is not None:
        return dataclasses.replace(training, steps=training.steps * job.protocol.tasks)
    return training


def made_on(device: str, chosen: bool = False, origin: str | None = None) -> dict[str, Any]:
    """What a run was made with, and from what, where that has no name."""
    where = f"CPU, {platform.machine()}" if device == "cpu" else device
    where = torch.cuda.get_device_name() if device.startswith("cuda") else where
    return {
        "version": code_version(), "device": where, "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "threads": torch.get_num_threads(),
        "strength_chosen_on": "validation" if chosen else None, **({"data": origin} if origin else {}),
    }  # fmt: skip


@functools.cache
def code_version() -> str:
    """The version of the code that runs, down to its last letter: another one's results are not taken for its own."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if not name.startswith(_SHOWN_ONLY):
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()[:8]}"


def chosen(found: Mapping[Job, Run], candidates: Callable[[Job], bool]) -> float:
    """The strength with the best mean accuracy among validation runs; of several such, the smallest."""
    scores: dict[float, list[float]] = {}
    for job, made in found.items():
        if job.validating and candidates(job):
            scores.setdefault(job.strength, []).append(made.average)
    return best({strength: sum(each) / len(each) for strength, each in scores.items()})


def numbers_of(protocol: Protocol) -> dict[str, Any]:
    """A protocol as results tell it."""
    return {key: _plain(value) for key, value in dataclasses.asdict(protocol).items()}


def _plain(value: Any) -> Any:
    """Tuples as lists: what comes back from a file."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
