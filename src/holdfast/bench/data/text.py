"""Two kinds of text that a Python installation carries: its source, and the prose that documents it."""

from __future__ import annotations

import ast
import codecs
import functools
import hashlib
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DataError, HoldfastWarning

SIZE = 400_000  # bytes of each domain
_MODULES = (
    "abc", "base64", "bz2", "cProfile", "calendar", "cmd", "code", "codeop", "colorsys", "compileall", "copy",
    "copyreg", "csv", "filecmp", "fileinput", "fnmatch", "genericpath", "getopt", "getpass", "gettext", "glob",
    "graphlib", "gzip", "hashlib", "heapq", "hmac", "io", "linecache", "lzma", "mimetypes", "modulefinder", "netrc",
    "numbers", "opcode", "operator", "pkgutil", "poplib", "posixpath", "pprint", "pty", "py_compile", "pyclbr",
    "queue", "quopri", "reprlib", "rlcompleter", "runpy", "sched", "selectors", "shelve", "shlex", "stat", "string",
    "stringprep", "symtable", "tabnanny", "textwrap", "timeit", "tracemalloc", "types", "weakref", "zipapp",
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """Domains of text as bytes: a vocabulary of 256, and no tokenizer."""

    name: str
    domains: dict[str, Tensor]  # uint8, 1-D, all of one length

    @property
    def digest(self) -> str:
        """SHA-256 of all domains: what is learned from depends on the installation of Python, and a result says so."""
        total = hashlib.sha256()
        for name, text in sorted(self.domains.items()):
            total.update(f"{name} {len(text)} ".encode())
            total.update(text.numpy().tobytes())
        return total.hexdigest()


def text_domains() -> Text:
    """`code`, the standard library's own source, and `prose`, the language reference behind `help()` and the license.

    400,000 bytes of each; where this Python has less of one, both are cut to that, with a warning.
    """
    domains = {"code": _code(), "prose": _prose()}
    size = min(SIZE, *map(len, domains.values()))
    if not size:
        empty = " and ".join(name for name, text in domains.items() if not text)
        raise DataError(f"This Python carries no {empty} to make a text of. Use one with its standard library in .py.")
    if size < SIZE:
        warnings.warn(HoldfastWarning(f"This Python carries {size} bytes of each domain, not {SIZE}."), stacklevel=2)
    return Text("python", {name: torch.tensor(list(text[:size]), dtype=torch.uint8) for name, text in domains.items()})


@functools.cache
def text_digest() -> str:
    """Of the text that this Python carries: its version does not say all, for parts of it may be missing."""
    return text_domains().digest[:12]


def _code() -> bytes:
    """The modules in sorted order, comments and all, each from its file: importing one might run something else."""
    return "\n".join(filter(None, (_read(f"{name}.py") for name in sorted(_MODULES)))).encode()


def _prose() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "This Python was stripped of pydoc_data, the text behind help(). Use a complete installation."
        ) from error
    pages = [_zen(), _read("LICENSE.txt"), *(text for _, text in sorted(topics.items()))]
    return "\n".join(filter(None, pages)).encode()


def _zen() -> str:
    """The poem that `import this` prints, from its source: it is kept there in ROT13."""
    for node in ast.parse(_read("this.py")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return codecs.decode(str(node.value.value), "rot13")
    return ""


def _read(name: str) -> str:
    """A file beside the standard library, its line ends made plain; empty if it is not there."""
    path = Path(sysconfig.get_paths()["stdlib"], name)
    return path.read_text(encoding="utf-8") if path.is_file() else ""
