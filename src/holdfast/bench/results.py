"""Results as files: one small JSON file for each run, keyed by all that decides its outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, DataError, HoldfastWarning
from .measures import Run

FORMAT = 1


@dataclass(frozen=True)
class Result:
    """A run with what it was a run of, and on what.

    `job` is the full configuration: the protocol by name and in all its numbers, the method, the strength, the seed.
    `made` tells the code's version, the device, torch's version, the date and whatever else is worth knowing.
    """

    job: Mapping[str, Any]
    run: Run
    made: Mapping[str, Any]

    @property
    def protocol(self) -> str:
        return str(self.job["protocol"])

    @property
    def strength(self) -> float | None:
        """How much an old example counted; nothing for methods that hold nothing."""
        found = self.job["strength"]
        return None if found is None else float(found)

    @property
    def validating(self) -> bool:
        """Whether it was judged on held-out training data, to choose a strength, and not on the test data."""
        return bool(self.job["validating"])


def key(job: Mapping[str, Any], version: str) -> str:
    """The name of a job's file: a digest of its configuration and of the code's version."""
    return hashlib.sha256(_canonical({"job": job, "version": version}).encode()).hexdigest()[:24]


def path(folder: Path, job: Mapping[str, Any], version: str) -> Path:
    """Where a job's result is, or will be: the protocol, the method and the seed are told by the name too."""
    words = f"{job['protocol']}-{job['method']}-{job['seed']}"
    readable = "".join(letter if letter.isalnum() or letter in "-.×" else "_" for letter in words)
    return folder / f"{readable[:80]}-{key(job, version)}.json"


def write(target: Path, result: Result) -> None:
    """Write a result whole or not at all."""
    text = json.dumps(
        {"format": FORMAT, "job": result.job, "made": result.made, "run": dataclasses.asdict(result.run)}, indent=1
    )
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise DataError(f"{target} could not be written: {error}. The run was made, and is lost.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read(source: Path) -> Result:
    """A result from its file; raises a DataError that says what is wrong with it."""
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise DataError(
                f"{source} has format {found['format']!r}, and this version of holdfast reads {FORMAT}. Run the bench "
                "again into another folder, or read it with the version that wrote it."
            )
        known = {each.name for each in dataclasses.fields(Run)}
        result = Result(found["job"], Run(**{k: v for k, v in found["run"].items() if k in known}), found["made"])
        _require_sound(result)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{source} is not a result of the bench, or is damaged: {error!r}.") from error
    return result


def collected(folder: Path) -> list[Result]:
    """All the results in a folder and the folders in it. Damaged files are told of and left out."""
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder of results. Make one: holdfast bench --out {folder}.")
    results = []
    for each in sorted(folder.rglob("*.json")):
        try:
            results.append(read(each))
        except DataError as error:
            warnings.warn(f"left out: {error}", HoldfastWarning, stacklevel=2)
    if not results:
        raise DataError(f"{folder} has no results. Make some: holdfast bench --out {folder}.")
    return results


def grouped(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    """The results judged on test data, protocol by protocol, in the order in which the protocols first appear."""
    final = [one for one in results if not one.validating]
    for protocol in dict.fromkeys(one.protocol for one in final):
        yield protocol, [one for one in final if one.protocol == protocol]


def _require_sound(result: Result) -> None:
    run = result.run
    if not run.accuracy or any(len(row) != len(run.accuracy[0]) for row in run.accuracy):
        raise DataError("its table of accuracies is empty or ragged.")
    if not all(0.0 <= value <= 1.0 for row in run.accuracy for value in row):
        raise DataError("its accuracies are not between 0 and 1.")
    for name in ("protocol", "method", "seed", "strength", "validating"):
        result.job[name]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
