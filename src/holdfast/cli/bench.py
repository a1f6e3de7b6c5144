"""holdfast bench and holdfast report: protocols run over methods and seeds, and a page of what came of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .console import app, console, need, or_exit

if TYPE_CHECKING:
    from ..bench.grid import Outcome
    from ..bench.jobs import Job
    from ..bench.protocols import Protocol

_DEFAULTS = "fine-tuning,frozen,joint,ewc,kronecker"


@app.command()
def bench(
    protocols: Annotated[list[str] | None, typer.Argument(help="Which protocols (see --list).")] = None,
    methods: Annotated[str, typer.Option(help="Which methods, with commas between them, or `all`.")] = _DEFAULTS,
    seeds: Annotated[str, typer.Option(help="How many seeds, from 0; or which, with commas: 3,4,5.")] = "3",
    strengths: Annotated[str, typer.Option(help="The strengths to run each method at, with commas.")] = "1",
    sweep: Annotated[bool, typer.Option(help="Choose each strength on validation data, of --strengths.")] = False,
    sweep_tasks: Annotated[int, typer.Option(min=2, help="How many tasks a strength is chosen on.")] = 5,
    out: Annotated[Path, typer.Option(help="The folder of results; what is there is not run again.")] = Path("results"),
    workers: Annotated[int, typer.Option(min=0, help="Processes to run jobs in; 0 is this one.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each job.")] = None,
    dask: Annotated[str | None, typer.Option(help="Run the jobs on a dask cluster: its scheduler's address.")] = None,
    commands: Annotated[bool, typer.Option(help="Print a command for each job instead, for any scheduler.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the protocols and the methods.")] = False,
    tasks: Annotated[int | None, typer.Option(min=1, help="Another number of tasks.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Another number of epochs.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Another number of steps.")] = None,
    loss: Annotated[str | None, typer.Option(help="Another loss, for every method: squared, cross-entropy.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Label smoothing, for every method.")] = None,
) -> None:
    """Run continual-learning protocols, fairly and reproducibly. Started again, it goes on where it stopped."""
    need("The bench", {"sklearn": "bench"})
    from ..bench.catalog import METHODS, one_of
    from ..bench.grid import others, run_all, swept
    from ..bench.jobs import grid
    from ..bench.protocols import PROTOCOLS

    if show:
        _list()
        return
    changes: dict[str, Any] = {
        "tasks": tasks, "epochs": epochs, "steps": steps, "loss": loss, "label_smoothing": label_smoothing,
    }  # fmt: skip
    chosen: list[Protocol] = or_exit(
        lambda: [one_of(name, PROTOCOLS, "protocol").changed(**changes) for name in protocols or ["digits"]]
    )
    names = list(METHODS) if methods == "all" else [name.strip() for name in methods.split(",") if name.strip()]
    or_exit(lambda: [one_of(name, METHODS, "method") for name in names])
    numbers = _numbers(seeds, "seeds", int)
    wanted = numbers if "," in seeds else list(range(numbers[0]))
    tried = _numbers(strengths, "strengths", float)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if commands:
        _print_commands(grid(chosen, names, wanted, tried), out, where, changes)
        return
    for version, count in others(out).items():
        console.print(f"[dim]{out} has {count} results of holdfast {version}: they stay, and are not used.[/dim]")
    total = len(grid(chosen, names, wanted, tried if not sweep else (1.0,)))
    total += len([n for n in names if METHODS[n].has_strength]) * len(tried) * len(chosen) if sweep else 0
    try:
        with _engine(workers, dask) as executor, _Shown(total) as shown:

            def runner(jobs: Sequence[Job]) -> Outcome:
                return run_all(jobs, out, executor, device=where, threads=threads, progress=shown.finished)

            outcome = or_exit(
                lambda: (
                    swept(chosen, names, wanted, tried, sweep_tasks, runner)
                    if sweep
                    else runner(grid(chosen, names, wanted, tried))
                )
            )
    except KeyboardInterrupt:
        console.print("Stopped. What was finished is kept: the same command goes on from there.")
        raise typer.Exit(130) from None
    _print_outcome(outcome, out)
    if outcome.failed:
        raise typer.Exit(1)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A folder of results, as holdfast bench writes them.")],
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("holdfast-report.html"),
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables, as Markdown.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write every run's numbers, as CSV.")] = None,
) -> None:
    """Make one page of a bench's results: leaderboards beside published numbers, curves, costs."""
    need("The report", {"jinja2": "report", "matplotlib": "report"})
    from ..report import report_command

    or_exit(lambda: report_command(results, out, markdown, csv))
    console.print(f"The page: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)


class _Shown:
    """A bar with the time left; lines of its own for what fails."""

    def __init__(self, total: int) -> None:
        columns = (
            TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, speed_estimate_period=3600)
        self._work = self._bar.add_task("running", total=total)

    def finished(self, job: Job, result: Any) -> None:
        if result is None:
            self._bar.console.print(f"[red]failed[/red] {escape(job.name)}")
        else:
            job_said = f"{job.name}: {100 * result.run.average:.1f} %"
            if not self._bar.console.is_terminal:
                self._bar.console.print(escape(job_said))
            self._bar.update(self._work, description=job_said[-48:])
        self._bar.advance(self._work)

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


@contextmanager
def _engine(workers: int, address: str | None) -> Iterator[Any]:
    from ..bench import grid

    if workers and address:
        sys.exit("Jobs run in --workers or on --dask, not both.")
    chosen = grid.dask(address) if address else grid.processes(workers) if workers else nullcontext()
    with chosen as executor:
        yield executor


def _list() -> None:
    from ..bench.catalog import METHODS
    from ..bench.protocols import PROTOCOLS

    for title, known in (("protocols", PROTOCOLS), ("methods", METHODS)):
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        for name, each in known.items():
            table.add_row(f"[bold]{name}[/bold]", escape(each.about))
        console.print(table)
        console.print()


def _numbers(text: str, what: str, kind: type) -> list[Any]:
    try:
        found = [kind(each) for each in text.split(",") if each.strip()]
        if not found or min(found) < 0:
            raise ValueError
    except ValueError:
        sys.exit(f"--{what} takes numbers with commas between them, 0 or more, got {text!r}.")
    return found


def _print_commands(jobs: Sequence[Job], out: Path, device: str, changes: dict[str, Any]) -> None:
    given = [
        part for name, value in changes.items() if value is not None for part in (f"--{name.replace('_', '-')}", value)
    ]
    for job in jobs:
        words = ["holdfast", "bench", job.protocol.name.split(" (")[0], "--methods", job.method]
        words += ["--seeds", f"{job.seed},", "--strengths", f"{job.strength:g}", "--out", str(out), "--device", device]
        print(shlex.join(str(word) for word in [*words, *given]))


def _print_outcome(outcome: Outcome, out: Path) -> None:
    from ..bench.measures import percent
    from ..bench.results import grouped

    for protocol, results in grouped(list(outcome.found.values())):
        table = Table(title=protocol, title_justify="left", box=SIMPLE_HEAD)
        for heading in ("method", "strength", "average, %", "forgotten, points", "each when new, %", "seeds"):
            table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
        for method, strength in dict.fromkeys((one.run.method, one.strength) for one in results):
            runs = [one.run for one in results if (one.run.method, one.strength) == (method, strength)]
            cells = [percent([getattr(run, each) for run in runs]) for each in ("average", "forgetting", "newest")]
            table.add_row(method, "" if strength is None else f"{strength:g}", *cells, str(len(runs)))
        console.print(table)
    for job, error in outcome.failed.items():
        console.print(f"[red]failed[/red] {escape(job.name)}: {escape(error.strip().splitlines()[-1])}")
    console.print(f"The page of all this: [bold]holdfast report {escape(shlex.quote(str(out)))}[/bold]", soft_wrap=True)
