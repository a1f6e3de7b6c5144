"""Jobs that failed: how, in a line and with all that Python says of it, and of which job, as it is kept in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .sound import require_sound_job


@dataclass(frozen=True)
class Failure:
    """How a job failed: in a line, and with all that Python says of it. Nothing but text, so that it always travels."""

    line: str
    traceback: str = ""


@dataclass(frozen=True)
class Failed:
    """A job that failed, and how. `job` is its full configuration, as a result has it."""

    job: Mapping[str, Any]
    how: Failure
    made: Mapping[str, Any]

    @property
    def protocol(self) -> str:
        return str(self.job["protocol"])

    @property
    def method(self) -> str:
        return str(self.job["method"])

    @property
    def strength(self) -> float | None:
        found = self.job["strength"]
        return None if found is None else float(found)

    @property
    def validating(self) -> bool:
        return bool(self.job["validating"])

    @property
    def tasks(self) -> object:
        """How many it was to learn; nothing where the job does not say it."""
        said = self.job.get("numbers")
        return said.get("tasks") if isinstance(said, Mapping) else None

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "job": self.job, "made": self.made, "failed": self.how.line,
            "traceback": self.how.traceback.splitlines(),
        }  # fmt: skip

    @classmethod
    def parsed(cls, found: Mapping[str, Any]) -> Failed:
        """The same again; raises where it is none."""
        require_sound_job(found["job"], found["made"])
        lines = found["traceback"]
        if not isinstance(found["failed"], str) or not isinstance(lines, list):
            raise ValueError("it does not say how it failed")
        return cls(found["job"], Failure(found["failed"], "\n".join(map(str, lines))), found["made"])


def which(job: Mapping[str, Any]) -> tuple[object, ...]:
    """What tells a run of one protocol from the others."""
    return tuple(job.get(name) for name in ("protocol", "method", "strength", "seed", "validating"))


def lasting(failed: Sequence[Failed], done: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Failed]:
    """The newest failure of each job that no run has made up for since; `done` are jobs and how they were made."""
    newest: dict[str, Failed] = {}
    for one in sorted(failed, key=lambda one: str(one.made.get("date", ""))):
        newest[_exactly(one.job, one.made)] = one
    for job, made in done:
        key = _exactly(job, made)
        if key in newest and str(newest[key].made.get("date", "")) <= str(made.get("date", "")):
            del newest[key]
    return list(newest.values())


def _exactly(job: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """The job in all its numbers, and the kind of device that it was made on."""
    on_cpu = str(made.get("device", "")).upper().startswith("CPU")
    return json.dumps([which(job), job.get("numbers"), on_cpu], sort_keys=True, default=str)
