"""How far a long wait has come: a bar where rich is installed and somebody is looking, nothing otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A function to call with each amount done; a `total` that is not known shows movement alone."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda amount: None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)
