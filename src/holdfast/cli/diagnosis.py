"""holdfast diagnose: check on one's own model and data what a penalty takes for granted."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn

from .. import __version__
from ..diagnose import Diagnosis
from ..diagnose import diagnose as diagnosed
from ..likelihood import Likelihood
from .console import app, console, escape, interruptible, need, or_exit, plain_warnings, write

_WANTED = "(model, batches, likelihood), and a fine-tuned model or state dict as a fourth if there is one"


@app.command()
def diagnose(
    file: Annotated[
        str, typer.Argument(metavar="FILE.py[:FUNCTION]", help=f"Its function (`task`) returns {_WANTED}.")
    ],
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("holdfast-diagnosis.html"),
    seed: Annotated[int, typer.Option(help="Of random directions, probes and drawn labels.")] = 0,
    probes: Annotated[int, typer.Option(help="Random sign vectors, where the Hessian is too large.")] = 16,
    exact_up_to: Annotated[int, typer.Option(help="Compute the Hessian whole up to so many entries.")] = 2000,
) -> None:
    """Run a Python file that gives a model and its old data, and tell which assumptions hold."""
    need("The page of a diagnosis", {"jinja2": "report", "matplotlib": "report"})
    from ..report import diagnosis_page

    if not out.resolve().parent.is_dir():  # before the work, not after it
        sys.exit(f"{out} could not be written: its folder does not exist.")
    path, function = _parted(file)
    with interruptible("Stopped: nothing was written."), plain_warnings():
        model, batches, likelihood, moved = _given(path, function)
        start = time.perf_counter()
        with console.status("Reading the data, several times …"), _of_the_users(path):
            found = or_exit(
                lambda: diagnosed(
                    model, batches, likelihood, moved=moved, seed=seed, probes=probes, exact_up_to=exact_up_to
                )
            )
    seconds = time.perf_counter() - start
    _print(found)
    facts = (
        ("command", f"holdfast diagnose {path.name}:{function} --seed {seed}"),
        ("versions", f"holdfast {__version__}, torch {torch.__version__}"),
        ("time", f"{seconds:.0f} s"),
    )
    write(out, diagnosis_page(found, facts=facts))
    console.print(
        f"{seconds:.0f} s. The page with the curves: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True
    )


def _print(found: Diagnosis) -> None:
    console.print(escape(found.title), soft_wrap=True)
    for each in found.tables:
        table = Table(title=escape(each.title), title_justify="left", box=SIMPLE_HEAD)
        for column, heading in enumerate(each.headings):
            table.add_column(escape(heading), justify="right" if column else "left", no_wrap=not column)
        for row in each.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print(f"[dim]{escape(each.note)}[/dim]\n", soft_wrap=True)
    for heading, lines in (("What to do", found.advice), ("Doubts", found.doubts)):
        if lines:
            console.print(f"[bold]{heading}[/bold]")
        for line in lines:
            console.print(f"• {escape(line)}", soft_wrap=True)
    console.print()


def _parted(file: str) -> tuple[Path, str]:
    """The file and the function's name; a colon can be a part of the path."""
    front, colon, name = file.rpartition(":")
    if colon and name.isidentifier() and not Path(file).exists():
        return Path(front), name
    return Path(file), "task"


def _given(path: Path, function: str) -> tuple[nn.Module, Any, Likelihood, nn.Module | Mapping[str, Any] | None]:
    """What the user's function returns, checked."""
    if not path.is_file():
        sys.exit(f"{path} does not exist. Give a Python file whose function `{function}` returns {_WANTED}.")
    if path.suffix != ".py":
        sys.exit(f"{path} is not a Python file: its name must end in .py.")
    made = _run(path, function)
    if not isinstance(made, (tuple, list)) or len(made) not in (3, 4):
        got = f"{len(made)} things" if isinstance(made, (tuple, list)) else type(made).__name__
        sys.exit(f"`{function}` of {path} must return {_WANTED}; it returned {got}.")
    model, batches, likelihood, *rest = made
    if not isinstance(model, nn.Module):
        sys.exit(f"`{function}` of {path} must return a model (nn.Module) first, not {type(model).__name__}.")
    if not isinstance(likelihood, Likelihood):
        sys.exit(
            f"`{function}` of {path} must return a likelihood third, such as holdfast.categorical, not "
            f"{type(likelihood).__name__}."
        )
    return model, batches, likelihood, rest[0] if rest else None


def _run(path: Path, function: str) -> Any:
    """Run the file and call its function. Its own errors are one line, with the place in the file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} could not be read as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` would: it can import its neighbors
    sys.modules[path.stem], known = module, sys.modules.get(path.stem)
    try:
        spec.loader.exec_module(module)
        found = getattr(module, function, None)
        if not callable(found):
            sys.exit(_missing(path, function, module))
        return found()
    except Exception as error:
        lines = _lines(path, error)
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        _stop(path, line, error)
    finally:
        sys.path.remove(str(path.resolve().parent))
        if known is None:
            sys.modules.pop(path.stem, None)
        else:
            sys.modules[path.stem] = known


@contextmanager
def _of_the_users(path: Path) -> Iterator[None]:
    """What the user's model or data raises as they are run is one line too; an error of our own shows where it is."""
    try:
        yield
    except Exception as error:
        lines, frames = _lines(path, error), traceback.extract_tb(error.__traceback__)
        if not lines and not any(frame.name == "_call_impl" for frame in frames):  # every module is called through it
            raise
        _stop(path, lines[-1] if lines else None, error, " as the model was run on the batches")


def _lines(path: Path, error: Exception) -> list[int]:
    """The lines of the user's file that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return [each.lineno for each in frames if each.lineno and Path(each.filename).resolve() == path.resolve()]


def _stop(path: Path, line: int | None, error: Exception, when: str = "") -> NoReturn:
    where = f", line {line}" if line else ""
    sys.exit(f"{path}{where}{when}: {type(error).__name__}: {error}")


def _missing(path: Path, function: str, module: Any) -> str:
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    own = [name for name in names if getattr(module, name).__module__ == module.__name__]
    near = difflib.get_close_matches(function, own, n=3, cutoff=0.5) or own[:6]
    told = f"It has {', '.join(f'`{name}`' for name in near)}: {path}:{near[0]}" if near else "It has no functions"
    return f"{path} has no function `{function}`. {told}."
