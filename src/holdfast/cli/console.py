"""What every command uses: the terminal, the application, and errors as one line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

from .. import __version__
from ..errors import HoldfastError, HoldfastWarning

try:
    import typer
    from rich import markup
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


def printable(text: str) -> str:
    """A text of anyone's, with nothing in it that a terminal would obey."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def escape(text: str) -> str:
    """The same for a line of rich's, whose own marks it does not use either."""
    return markup.escape(printable(text))


def or_exit(work: Callable[[], Result]) -> Result:
    """What `work` gives, or its error as one line and exit status 1."""
    try:
        return work()
    except HoldfastError as error:
        sys.exit(printable(str(error)))


@contextmanager
def interruptible(said: str) -> Iterator[None]:
    """Ctrl-C in here says so in one line, and exits with the status that shells give it."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(escape(said), soft_wrap=True)
        raise typer.Exit(130) from None


@contextmanager
def plain_warnings() -> Iterator[None]:
    """The library's own warnings as lines to read, without the place in the code that they come from."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, HoldfastWarning):
            console.print(escape(str(message)), soft_wrap=True)
        else:
            usual(message, category, *where, **more)

    with warnings.catch_warnings():
        usual, warnings.showwarning = warnings.showwarning, show
        warnings.simplefilter("default", HoldfastWarning)
        yield


def need(what: str, packages: dict[str, str]) -> None:
    """Exit where a package is not installed, and say which extra brings it."""
    for name, extra in packages.items():
        if find_spec(name) is None:
            sys.exit(f"{what} needs {name}: install holdfast with its `{extra}` extra.")


def write(path: Path, text: str) -> None:
    """Write a text, or exit saying why not."""
    from ..bench.results import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        sys.exit(f"{path} could not be written: {error}")
