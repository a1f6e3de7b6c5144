"""How far a bench has come: a bar with the time left on a terminal, a line for each job where there is none."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from .console import escape

if TYPE_CHECKING:
    from ..bench.jobs import Job


class Pace:
    """The time left, by the jobs that were run now: those that were there already took no time."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self._run = total, 0, 0
        self._start = self._latest = time.monotonic()

    def found(self, count: int) -> None:
        """So many were there already. The clock starts when the first jobs do."""
        self.done += count
        if not self._run:
            self._start = self._latest = time.monotonic()

    def finished(self) -> None:
        """One more was run."""
        self.done += 1
        self._run += 1
        self._latest = time.monotonic()

    @property
    def left(self) -> str:
        """Hours, minutes and seconds; unknown until a job was run."""
        if not self._run:
            return "-:--:--"
        each = (self._latest - self._start) / self._run
        seconds = each * (self.total - self.done) - (time.monotonic() - self._latest)
        return str(timedelta(seconds=round(max(seconds, 0))))


class Shown:
    """A progress for `run_all`, and lines of its own for what fails."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._pace = console, Pace(total)
        doing = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._bar = Progress(
            BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[pace].left} left"),
            TextColumn("{task.description}", markup=False, table_column=doing),
            console=console, expand=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._work = self._bar.add_task("", total=total, pace=self._pace)

    def planned(self, waiting: int, done: int) -> None:
        """Told before jobs are run: how many are there already."""
        self._pace.found(done)
        self._bar.update(self._work, completed=self._pace.done)
        if done:
            self._line(f"{done} of {waiting + done} jobs are there already.")

    def finished(self, job: Job, result: Any) -> None:
        """Told after each job, with nothing where it failed."""
        self._pace.finished()
        said = f"{job.name}: failed" if result is None else f"{job.name}: {100 * result.run.average:.1f} %"
        if result is None or not self._console.is_terminal:
            self._line(f"{self._pace.done}/{self._pace.total} {said}")
        self._bar.update(self._work, completed=self._pace.done, description=said)

    def _line(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
