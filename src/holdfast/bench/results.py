"""Results as files: a small JSON file for each run, keyed by all that decides its outcome; or many runs in a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, DataError, HoldfastWarning
from ..file import replacing
from .failures import Failed, lasting
from .measures import Run
from .sound import require_sound

FORMAT = 1
_FILE, _BUNDLE = ".json", ".jsonl"
_NAME = 160  # bytes of a file's name that tell what it is

# What of a job is its own beside the protocol's numbers, or words about them.
OWN = ("protocol", "method", "strength", "seed", "validating", "chosen", "keeps_data", "description")


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
    def date(self) -> datetime:
        """When it was made; long ago where that is not told."""
        try:
            found = datetime.fromisoformat(str(self.made["date"]))
        except (LookupError, ValueError):
            return datetime.min.replace(tzinfo=UTC)
        return found if found.tzinfo else found.replace(tzinfo=UTC)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU made it."""
        return not str(self.made.get("device", "")).startswith("CPU")

    @property
    def validating(self) -> bool:
        """Whether it was judged on held-out training data, to choose a strength, and not on the test data."""
        return bool(self.job["validating"])

    @property
    def chosen(self) -> bool:
        """Whether its strength was chosen among several. Before jobs said so themselves, what was made of them did."""
        return bool(self.job.get("chosen") or self.made.get("strength_chosen_on"))


def key(job: Mapping[str, Any], version: str) -> str:
    """The name of a job's file: a digest of its configuration and of the code's version."""
    return hashlib.sha256(_canonical({"job": job, "version": version}).encode()).hexdigest()[:24]


def path(folder: Path, job: Mapping[str, Any], version: str) -> Path:
    """Where a job's result is, or will be: the protocol, the method and the seed are told by the name too."""
    words = f"{job['protocol']}-{job['method']}-{job['seed']}"
    readable = "".join(letter if letter.isalnum() or letter in "-.×" else "_" for letter in words)
    whole = readable.encode()[:_NAME].decode(errors="ignore")  # a file system counts bytes
    return folder / f"{whole}-{key(job, version)}.json"


def write(target: Path, result: Result | Failed) -> None:
    """Write a result whole or not at all."""
    text = json.dumps(_plain(result), indent=1, allow_nan=False) + "\n"
    try:
        write_whole(target, text)
    except OSError as error:
        raise DataError(
            f"{target} could not be written: {error}. This run is lost, and what was finished before it is kept: make "
            "room, and start the same again."
        ) from error


def require_readable(result: Result) -> None:
    """Raise a DataError that says why, where a result would not be read again."""
    try:
        text = json.dumps(_plain(result), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"it could not be written: {error}.") from error
    _parsed(text, "it")


def bundle(results: Iterable[Result | Failed], target: Path) -> None:
    """Write many results as one file, a line of JSON for each. The same results make the same file, in any order."""
    if target.suffix != _BUNDLE:
        raise ArgumentError(f"a bundle is known by its name, which ends in {_BUNDLE}: got {target}.")
    lines = {_canonical(plain): json.dumps(plain, allow_nan=False) for plain in map(_plain, results)}
    try:
        write_whole(target, "".join(f"{lines[each]}\n" for each in sorted(lines)))
    except OSError as error:
        raise DataError(f"{target} could not be written: {error}.") from error


def write_whole(target: Path, text: str) -> None:
    """Write a text so that no reader ever sees half of it, and nothing is left of it if it fails."""
    if target.parts[:2] in (("/", "dev"), ("/", "proc")) or (target.exists() and not target.is_file()):
        target.write_text(text, encoding="utf-8", newline="")  # /dev/stdout, a pipe
        return
    target = target.resolve()  # what a link stands for is written, and the link stays
    with replacing(target) as temporary:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))


def read(source: Path) -> Result:
    """A result from its file; raises a DataError that says what is wrong with it."""
    found = _parsed(_content(source), str(source))
    if isinstance(found, Failed):
        raise DataError(f"{source} is no result: it tells of a job that failed.")
    return found


def collected(source: Path) -> list[Result]:
    """The results in a folder and the folders in it, or in one file, once each. Damaged ones are told and left out."""
    return with_failures(source)[0]


def with_failures(source: Path) -> tuple[list[Result], list[Failed]]:
    """The same, and the jobs that failed and were not made up for since."""
    if source.is_dir():
        files = sorted(file for file in source.rglob("*") if file.suffix in (_FILE, _BUNDLE))
    elif source.is_file() and source.suffix in (_FILE, _BUNDLE):
        files = [source]
    else:
        raise ArgumentError(
            f"{source} is not a folder of results, nor a file of them ({_FILE}, {_BUNDLE}). Make a folder: holdfast "
            f"bench --out {source}."
        )
    there: dict[str, Result | Failed] = {}
    for file in files:
        for one in _readable(file):
            there.setdefault(_canonical(_plain(one)), one)
    found = [one for one in there.values() if isinstance(one, Result)]
    failed = lasting([one for one in there.values() if isinstance(one, Failed)], [(one.job, one.made) for one in found])
    if found:
        return found, failed
    if failed:
        how = failed[0].how.line
        raise DataError(f"{source} has no results: every job failed ({len(failed)}), the first with: {how}")
    which = "no results that can be read" if files else "no results"
    raise DataError(f"{source} has {which}. Make some: holdfast bench --out {source}.")


def grouped(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    """The results judged on test data, protocol by protocol, in the order in which the protocols first appear."""
    final = [one for one in results if not one.validating]
    for protocol in dict.fromkeys(one.protocol for one in final):
        yield protocol, [one for one in final if one.protocol == protocol]


def differing(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of what differs. What an older version had no number for yet was off, so it is told as off here."""
    told = [numbers(job) for job in jobs]
    names = sorted({name for each in told for name in each})
    return [name for name in names if any((each.get(name) or None) != (told[0].get(name) or None) for each in told)]


def numbers(job: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a run, the numbers of its protocol and its training one by one; words about it do not."""
    found: dict[str, Any] = {}
    for name, value in job.items():
        if isinstance(value, Mapping):
            found |= numbers(value)
        elif name not in (*OWN, "name", "about"):
            found[name] = value
    return found


def _readable(file: Path) -> Iterator[Result | Failed]:
    """The results of a file: one, or in a bundle one for each line."""
    try:
        content = _content(file)
    except DataError as error:
        _left_out(error)
        return
    lines = enumerate(content.split(b"\n"), 1)
    parts = [(f"{file}, line {number}", line) for number, line in lines if line.strip()]
    for where, part in parts if file.suffix == _BUNDLE else [(str(file), content)]:
        try:
            yield _parsed(part, where)
        except DataError as error:
            _left_out(error)


def _left_out(error: DataError) -> None:
    warnings.warn(f"left out: {error}", HoldfastWarning, stacklevel=4)


def _content(file: Path) -> bytes:
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise OSError("it is no regular file")  # a pipe that nobody writes to is waited for without end
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} could not be read: {error}.") from error


def _parsed(content: bytes, where: str) -> Result | Failed:
    try:
        found = json.loads(content.decode("utf-8"))
        if found["format"] != FORMAT:
            raise DataError(
                f"{where} has format {found['format']!r}, and this version of holdfast reads {FORMAT}. Run the bench "
                "again into another folder, or read it with the version that wrote it."
            )
        if "failed" in found:
            failed = Failed.parsed(found)
            _canonical(_plain(failed)).encode()
            return failed
        known = {each.name for each in dataclasses.fields(Run)}
        run = {name: value for name, value in found["run"].items() if name in known}
        run["nll"] = [[_number(value) for value in row] for row in run.get("nll", [])]
        result = Result(found["job"], Run(**run), found["made"])
        require_sound(result.job, result.made, result.run)
        _canonical(_plain(result)).encode()  # half a pair of characters could not be written again
    except DataError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        said = str(error) if isinstance(error, ValueError) else repr(error)
        raise DataError(f"{where} is not a result of the bench, or is damaged: {said}.") from error
    return result


def _plain(result: Result | Failed) -> dict[str, Any]:
    """A result as JSON has it. Training that diverges has likelihoods that JSON has no numbers for."""
    if isinstance(result, Failed):
        return {"format": FORMAT, **result.plain}
    run = dataclasses.asdict(result.run)
    run["nll"] = [[_written(value) for value in row] for row in run["nll"]]
    return {"format": FORMAT, "job": result.job, "made": result.made, "run": run}


def _written(value: float) -> float | str | None:
    return None if math.isnan(value) else str(value) if math.isinf(value) else value


def _number(value: Any) -> Any:
    return math.nan if value is None else float(value) if value in ("inf", "-inf") else value


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
