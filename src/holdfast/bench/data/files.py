"""Where the files of a dataset are found: a folder of the user's, the cache, else fetched; each one verified."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import os
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DataError, HoldfastWarning
from ...file import replacing
from .sources import Source

_LARGEST = 1 << 28  # bytes that a gzipped file may grow to

Form = tuple[str, ...]  # the files that a dataset is made of, when it comes this way


@dataclass(frozen=True)
class Dataset:
    """What is known of a dataset's files, and where they may be.

    `digests` are of the content after gunzip, so that a file and its gzipped copy have the same one; a name that ends
    in .gz by itself is taken as it is. `sources` give the first form.
    """

    title: str
    folders: tuple[str, ...]  # the names of subfolders it may be in; the first is its own in the cache
    forms: tuple[Form, ...]
    digests: Mapping[str, str]  # by name: "sha256:…" or "md5:…"
    sources: tuple[Source, ...] = ()
    shared: tuple[Path, ...] = field(default=())  # where a system package puts it


@dataclass(frozen=True)
class File:
    """A file that was found: where, for messages, and its verified content, after gunzip."""

    place: str
    content: bytes


def files(dataset: Dataset, folder: str | os.PathLike[str] | None = None) -> dict[str, File]:
    """The files of the first form found, by name.

    Looked for in `folder` alone if it is given; else in $HOLDFAST_DATA, in the cache and where a system package puts
    them; else fetched from the dataset's sources in turn, and kept in the cache.
    """
    places = [(Path(folder), "")] if folder is not None else _places(dataset)
    for place, _ in places:
        if paths := _complete(dataset, place):
            return {name: File(str(path), _read(dataset, name, path)) for name, path in paths.items()}
    reasons = [f"looked in {place}{origin}: {_lack(dataset, place)}" for place, origin in places]
    if folder is None and offline():
        reasons.append("fetched nothing, as HOLDFAST_OFFLINE is set")
    elif folder is None:
        for source in dataset.sources:
            try:
                return _fetched(dataset, source)
            except DataError as error:
                reasons.append(f"tried {source}: {str(error).rstrip('.')}")
    forms = "; or ".join(", ".join(form) for form in dataset.forms)
    way = "in a folder and set HOLDFAST_DATA to it" if folder is None else "there"
    raise DataError(
        f"{dataset.title} was not found: {'; '.join(reasons)}. Put its files ({forms}), gzipped or not, {way}."
    )


def fingerprint(found: Mapping[str, File]) -> str:
    """A digest of what files hold."""
    parts = [hashlib.sha256(found[name].content).digest() for name in sorted(found)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def unverified(dataset: Dataset) -> str | None:
    """A digest of the files that would be read, or "" where they are verified to be what is known under their name.

    None where they are not here: nothing is fetched.
    """
    for place, _ in _places(dataset):
        if paths := _complete(dataset, place):
            if all(name in dataset.digests for name in paths):
                return ""
            with contextlib.suppress(OSError):  # who reads them is told
                states = [(name, path, path.stat()) for name, path in paths.items()]
                known = [(name, path, state.st_size, state.st_mtime_ns) for name, path, state in states]
                return _fingerprint(tuple(known))
            return None
    return None


@functools.lru_cache(maxsize=8)
def _fingerprint(known: tuple[tuple[str, Path, int, int], ...]) -> str:
    """Known by their sizes and times too, so that they are read once, unless they change."""
    return fingerprint({name: File(str(path), path.read_bytes()) for name, path, *_ in known})


def cache() -> Path | None:
    """The folder for what is fetched or decoded; None where there is no home to keep one in."""
    if chosen := os.environ.get("HOLDFAST_CACHE"):
        return Path(chosen)
    if (chosen := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(chosen):
        return Path(chosen, "holdfast")
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache" / "holdfast"
    return None


def offline() -> bool:
    """Whether HOLDFAST_OFFLINE forbids fetching."""
    return os.environ.get("HOLDFAST_OFFLINE", "") not in ("", "0")


def _places(dataset: Dataset) -> list[tuple[Path, str]]:
    """The folders to look in, in order, and what each is there for."""
    found: list[tuple[Path, str]] = []
    if chosen := os.environ.get("HOLDFAST_DATA"):
        found.append((Path(chosen), " (HOLDFAST_DATA)"))
        if not os.path.isdir(chosen):
            warnings.warn(HoldfastWarning(f"HOLDFAST_DATA is {chosen}, which is not a folder."), stacklevel=4)
    if (kept := cache()) is not None:
        found.append((kept, " (the cache)"))
    return [*found, *((place, "") for place in dataset.shared)]


def _complete(dataset: Dataset, place: Path) -> dict[str, Path] | None:
    """The first form that is complete in a folder, subfolders first: two datasets may share their files' names."""
    for folder in (*(place / name for name in dataset.folders), place):
        for form in dataset.forms:
            paths = {name: path for name in form for path in _copies(folder, name)[:1]}
            if len(paths) == len(form):
                return paths
    return None


def _copies(folder: Path, name: str) -> list[Path]:
    return [path for path in (folder / name, folder / f"{name}.gz") if os.path.isfile(path)]


def _lack(dataset: Dataset, place: Path) -> str:
    if not os.path.isdir(place):
        return "no such folder"
    for folder in (*(place / name for name in dataset.folders), place):
        for form in dataset.forms:
            missing = [name for name in form if not _copies(folder, name)]
            if len(missing) < len(form):
                return f"{folder} lacks {', '.join(missing)}"
    return "not there"


def _read(dataset: Dataset, name: str, path: Path) -> bytes:
    try:
        return verified(dataset, name, path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except DataError as error:
        raise DataError(
            f"{error}. Replace it, or delete it to have it fetched; if it belongs to another dataset, move it to a "
            "subfolder of that dataset's name."
        ) from error


def verified(dataset: Dataset, name: str, content: bytes, place: str) -> bytes:
    """The content after gunzip, if it is what is known under this name."""
    if _gzipped(name, content):
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_LARGEST)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{place} is damaged: {error}") from error
    kind, _, known = dataset.digests.get(name, "").partition(":")
    got = hashlib.new(kind, content, usedforsecurity=False).hexdigest() if kind else ""
    if got != known:
        raise DataError(f"{place} is not {dataset.title}'s {name}: its content has {kind} {got}, expected {known}")
    return content


def _fetched(dataset: Dataset, source: Source) -> dict[str, File]:
    """All files from one source, verified before any of them is kept."""
    names = dataset.forms[0]
    fetched = source.fetch(names)
    found = {name: File(f"{name} from {source}", fetched[name]) for name in names}
    found = {name: File(file.place, verified(dataset, name, file.content, file.place)) for name, file in found.items()}
    kept = cache()
    if kept is not None:
        try:
            for name in names:
                suffix = ".gz" if _gzipped(name, fetched[name]) else ""
                _write(kept / dataset.folders[0] / f"{name}{suffix}", fetched[name])
        except OSError as error:
            message = f"{dataset.title} could not be kept in {kept}: {error.strerror or error}. Set HOLDFAST_CACHE."
            warnings.warn(HoldfastWarning(message), stacklevel=4)
    return found


def _gzipped(name: str, content: bytes) -> bool:
    return not name.endswith(".gz") and content[:2] == b"\x1f\x8b"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
