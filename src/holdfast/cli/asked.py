"""What holdfast bench is asked to run: its words understood, before anything runs; and a command for each job."""

from __future__ import annotations

import math
import shlex
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, HoldfastWarning

if TYPE_CHECKING:
    from ..bench.jobs import Job
    from ..bench.protocols import Protocol

_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Asked:
    """What is to be run, every word of it understood."""

    protocols: list[Protocol]
    methods: list[str]
    seeds: list[int]
    strengths: list[float]
    left_out: frozenset[Job] = frozenset()

    @classmethod
    def of(
        cls, protocols: list[str], methods: str, seeds: str, strengths: str | None, sweep: bool, changes: dict[str, Any]
    ) -> Asked:
        from ..bench.catalog import METHODS, one_of
        from ..bench.grid import STRENGTHS, SWEEP_SEED
        from ..bench.protocols import PROTOCOLS

        chosen = [one_of(name, PROTOCOLS, "protocol").changed(**changes) for name in protocols]
        names = [name.strip() for name in methods.split(",") if name.strip()]
        for name in names:
            if name != "all":
                one_of(name, METHODS, "method")
        if "all" in names:  # that apply
            names = [name for name, entry in METHODS.items() if all(map(entry.fits, chosen))]
            some = [name for name, entry in METHODS.items() if any(map(entry.fits, chosen)) and name not in names]
            if some:
                warnings.warn(
                    f"left out, as not all of these protocols can have it: {', '.join(some)}. Run the protocols one by "
                    "one to have all that each can.", HoldfastWarning, stacklevel=2,
                )  # fmt: skip
        if not names:
            raise ArgumentError("--methods names no method; `holdfast bench --list` shows them.")
        numbers = _numbers(seeds, "seeds", int)
        if "," not in seeds and not 1 <= numbers[0] <= _MOST_SEEDS:
            raise ArgumentError(
                f"--seeds {numbers[0]} is how many, from 1 to {_MOST_SEEDS}; to say which, write a comma after it: "
                f"--seeds {numbers[0]},"
            )
        which = numbers
        if "," not in seeds:  # the one that strengths are chosen on is passed over
            which = [seed for seed in range(numbers[0] + 1) if seed != SWEEP_SEED][: numbers[0]]
        found = (
            _numbers(strengths, "strengths", float) if strengths is not None else list(STRENGTHS) if sweep else [1.0]
        )
        if sweep and not any(METHODS[name].has_strength for name in names):
            raise ArgumentError(f"--sweep chooses strengths, and of these methods none has one: {', '.join(names)}.")
        if sweep and len(set(found)) < 2:
            raise ArgumentError("--sweep chooses among strengths: give two or more, with commas.")
        if SWEEP_SEED in which:
            raise ArgumentError(f"seed {SWEEP_SEED} is the one that strengths are chosen on: take others.")
        return cls(chosen, names, which, found)

    @property
    def jobs(self) -> list[Job]:
        from ..bench.jobs import grid

        every = dict.fromkeys(grid(self.protocols, self.methods, self.seeds, self.strengths))
        return [job for job in every if job not in self.left_out]

    def besides(self, source: Path, device: str) -> Asked:
        """The same without what these results have of this kind of device, whatever version of the code made it."""
        from ..bench.grid import missing
        from ..bench.results import collected

        return replace(self, left_out=frozenset(self.jobs) - frozenset(missing(self.jobs, collected(source), device)))

    def sweep(self, tasks: int) -> tuple[list[Job], list[Job]]:
        """The jobs of a sweep's two stages; those of the second before their strengths are known."""
        from ..bench.grid import trials
        from ..bench.jobs import grid

        first = trials(self.protocols, self.methods, self.strengths, tasks)
        return list(dict.fromkeys(first)), list(dict.fromkeys(grid(self.protocols, self.methods, self.seeds)))


def print_commands(
    asked: Asked, out: Path, device: str, threads: int | None, sweep: int | None, changes: dict[str, Any]
) -> None:
    """A line for each job; of a sweep, whose second stage waits for its first, one for each method."""
    shared = {"out": out, "device": device, "threads": threads, **changes}
    if sweep is None:
        for job in asked.jobs:
            _print_command(job.protocol.name, job.method, [job.seed], [job.strength], [], shared)
        return
    print(
        "A sweep has two stages: strengths are chosen on validation data, then run. Each command does both for one "
        "method, for all seeds.",
        file=sys.stderr,
    )
    from ..bench.catalog import METHODS

    for protocol in asked.protocols:
        for method in asked.methods:
            tuned = METHODS[method].has_strength
            how = ["--sweep", "--sweep-tasks", str(sweep)] if tuned else []
            _print_command(protocol.name, method, asked.seeds, asked.strengths if tuned else [1.0], how, shared)


def _print_command(
    protocol: str, method: str, seeds: list[int], strengths: list[float], how: list[str], shared: dict[str, Any]
) -> None:
    words = ["holdfast", "bench", protocol.split(" (")[0], "--methods", method]
    words += ["--seeds", "".join(f"{seed}," for seed in seeds), "--strengths", ",".join(map(repr, strengths)), *how]
    for name, value in shared.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    print(shlex.join(words))


def _numbers(text: str, what: str, kind: type) -> list[Any]:
    try:
        found = [kind(each) for each in text.split(",") if each.strip()]
        if not found or not all(0 <= each < math.inf for each in found):
            raise ValueError
    except ValueError:
        raise ArgumentError(f"--{what} takes numbers with commas between them, 0 or more, got {text!r}.") from None
    return found
