"""What every command uses: the terminal, the application, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeVar

from .. import __version__
from ..errors import HoldfastError

try:
    import typer
    from rich.console import Console
except ImportError as missing:  # the core installs without them
    sys.exit(f"The holdfast command needs {missing.name}: install holdfast with its `cli` extra.")

Result = TypeVar("Result")
console = Console(highlight=False)

app = typer.Typer(
    help="Teach a trained PyTorch model something new without letting it forget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Teach a trained PyTorch model something new without letting it forget."""
    if version:
        console.print(f"holdfast {__version__}")
        raise typer.Exit


def or_exit(work: Callable[[], Result]) -> Result:
    """What `work` gives, or its error as one line and exit status 1."""
    try:
        return work()
    except HoldfastError as error:
        sys.exit(str(error))


def need(what: str, packages: dict[str, str]) -> None:
    """Exit where a package is not installed, and say which extra brings it."""
    for name, extra in packages.items():
        if find_spec(name) is None:
            sys.exit(f"{what} needs {name}: install holdfast with its `{extra}` extra.")


def write(path: Path, text: str) -> None:
    """Write a text, or exit saying why not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.exit(f"{path} could not be written: {error}")
