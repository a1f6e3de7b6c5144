"""holdfast bench and holdfast report: protocols run over methods and seeds, and a page of what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..errors import ArgumentError, DataError
from .asked import Asked, print_commands
from .console import app, console, escape, interruptible, need, or_exit, plain_warnings
from .outcome import print_outcome
from .progress import Shown

if TYPE_CHECKING:
    from ..bench.grid import Outcome
    from ..bench.jobs import Job

_SWEPT = 5  # tasks that a strength is chosen on
_DEFAULTS = "fine-tuning,frozen,joint,ewc,kronecker"


@app.command()
def bench(
    protocols: Annotated[list[str] | None, typer.Argument(help="Which protocols (see --list).")] = None,
    methods: Annotated[str, typer.Option(help="Which methods, with commas between them, or `all`.")] = _DEFAULTS,
    seeds: Annotated[str, typer.Option(help="How many seeds, from 0; or which, with commas: 3,4,5.")] = "3",
    strengths: Annotated[str | None, typer.Option(help="The strengths to run at, or to choose among; else 1.")] = None,
    sweep: Annotated[bool, typer.Option(help="Choose each strength on validation data, of --strengths.")] = False,
    sweep_tasks: Annotated[
        int | None, typer.Option(min=2, help="How many tasks a strength is chosen on; 5 if not given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of results; what is there is not run again.")] = Path("results"),
    besides: Annotated[
        Path | None, typer.Option(help="Leave out what these results have, of whatever version: a bundle or a folder.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes to run jobs in; 0 is this one.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads of each job; another number rounds differently.")
    ] = 1,
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
    if show:
        _list()
        return
    changes: dict[str, Any] = {
        "tasks": tasks, "epochs": epochs, "steps": steps, "loss": loss, "label_smoothing": label_smoothing,
    }  # fmt: skip
    if sweep_tasks is not None and not sweep:
        sys.exit("--sweep-tasks is how many tasks --sweep chooses strengths on: give both.")
    if besides is not None and sweep:
        sys.exit("--besides goes by strengths that are given, and --sweep has yet to choose them: give one of the two.")
    looked = (sweep_tasks or _SWEPT) if sweep else None
    with interruptible("Stopped. What was finished is kept: the same command goes on from there."), plain_warnings():
        asked = or_exit(lambda: Asked.of(protocols or ["digits"], methods, seeds, strengths, sweep, changes))
        if besides is not None:
            asked = _without(asked, besides, device, elsewhere=commands or dask is not None)
        if commands:
            or_exit(lambda: print_commands(asked, out, device, threads, looked, changes))
            return
        from ..bench.machine import present

        outcome = or_exit(lambda: _run(asked, out, workers, dask, device, threads, looked))
        print_outcome(outcome, out, device if dask else present(device))
    if outcome.failed:
        raise typer.Exit(1)


def _without(asked: Asked, besides: Path, device: str, *, elsewhere: bool) -> Asked:
    """What is asked, less what other results have. Those of a GPU and those of a CPU do not stand for each other."""
    from ..bench.machine import present

    if elsewhere and device == "auto":
        sys.exit("--besides must know what the jobs will run on, and auto is another machine's to say: give --device.")
    left = or_exit(lambda: asked.besides(besides, device if elsewhere else present(device)))
    said = f"{besides} has {len(left.left_out)} of {len(asked.jobs)} runs."
    print(said, file=sys.stderr)
    return left


def _run(
    asked: Asked, out: Path, workers: int, address: str | None, device: str, threads: int, sweep: int | None
) -> Outcome:
    from ..bench.grid import dask, others, processes, run_all, swept
    from ..bench.machine import present

    if workers and address:
        raise ArgumentError("jobs run in --workers or on --dask, not both.")
    if not address:  # another machine's devices are its own
        device = present(device)
    for version, count in others(out).items():
        number = "1 result" if count == 1 else f"{count} results"
        said = f"{out} has {number} of holdfast {version}, kept and not used."
        console.print(f"[dim]{escape(said)}[/dim]", soft_wrap=True)
    total = len(asked.jobs) if sweep is None else sum(map(len, asked.sweep(sweep)))
    engine = dask(address) if address else processes(workers) if workers else nullcontext()
    with engine as executor, Shown(console, total) as shown:

        def runner(jobs: Sequence[Job]) -> Outcome:
            if not address:
                _prepare([job for job in jobs if not job.path(out, device).exists()])
            return run_all(
                jobs, out, executor, device=device, threads=threads, planned=shown.planned, progress=shown.finished
            )

        if sweep is None:
            return runner(asked.jobs)
        return swept(asked.protocols, asked.methods, asked.seeds, asked.strengths, sweep, runner)


def _prepare(jobs: Sequence[Job]) -> None:
    """Have the data here before many processes ask for it. That none can be had is said at once."""
    from ..bench.data import prepare

    datasets, errors = dict.fromkeys(job.protocol.dataset for job in jobs), []
    for dataset in datasets:
        try:
            prepare(dataset)
        except DataError as error:
            errors.append(error)
    if errors and len(errors) == len(datasets):
        raise errors[0]


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A folder of results, as holdfast bench writes it, or a bundle.")],
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("holdfast-report.html"),
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables, as Markdown.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write every run's numbers, as CSV.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Also write all the results into one file, .jsonl.")] = None,
    across_versions: Annotated[
        bool, typer.Option("--across-versions", help="Let runs of several versions of the code stand together.")
    ] = False,
    across_devices: Annotated[
        bool, typer.Option("--across-devices", help="Let runs on several devices stand together.")
    ] = False,
) -> None:
    """Make one page of a bench's results: leaderboards beside published numbers, curves, costs."""
    need("The report", {"jinja2": "report", "matplotlib": "report"})
    from ..report import report_command

    across = [name for name, asked in (("version", across_versions), ("device", across_devices)) if asked]
    or_exit(lambda: report_command(results, out, markdown, csv, bundle, across=across))
    console.print(f"The page: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)


def _list() -> None:
    from ..bench.catalog import METHODS
    from ..bench.protocols import PROTOCOLS, SHARED

    for title, known in (("protocols", PROTOCOLS), ("methods", METHODS)):
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        for name, each in known.items():
            table.add_row(f"[bold]{name}[/bold]", escape(each.about))
        console.print(table)
        if known is PROTOCOLS:
            console.print(f"\n{escape(SHARED)}", soft_wrap=True)
        console.print()
