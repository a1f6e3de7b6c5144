"""holdfast bench and holdfast report: protocols run over methods and seeds, and a page of what came of it."""

from __future__ import annotations

import math
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import ArgumentError, DataError, HoldfastWarning
from .console import app, console, escape, interruptible, need, or_exit, plain_warnings
from .progress import Shown

if TYPE_CHECKING:
    from ..bench.grid import Outcome
    from ..bench.jobs import Job
    from ..bench.protocols import Protocol

_MOST_SEEDS = 1000
_SWEPT = 5  # tasks that a strength is chosen on
_NAMED = 3  # of the jobs that failed alike
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
    looked = (sweep_tasks or _SWEPT) if sweep else None
    with interruptible("Stopped. What was finished is kept: the same command goes on from there."), plain_warnings():
        asked = or_exit(lambda: _Asked.of(protocols or ["digits"], methods, seeds, strengths, sweep, changes))
        if commands:
            or_exit(lambda: _print_commands(asked, out, device, threads, looked, changes))
            return
        from ..bench.machine import present

        outcome = or_exit(lambda: _run(asked, out, workers, dask, device, threads, looked))
        _print_outcome(outcome, out, device if dask else present(device))
    if outcome.failed:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Asked:
    """What is to be run, every word of it understood."""

    protocols: list[Protocol]
    methods: list[str]
    seeds: list[int]
    strengths: list[float]

    @classmethod
    def of(
        cls, protocols: list[str], methods: str, seeds: str, strengths: str | None, sweep: bool, changes: dict[str, Any]
    ) -> _Asked:
        from ..bench.catalog import METHODS, one_of
        from ..bench.grid import STRENGTHS, SWEEP_SEED
        from ..bench.protocols import PROTOCOLS

        chosen = [one_of(name, PROTOCOLS, "protocol").changed(**changes) for name in protocols]
        names = [name.strip() for name in methods.split(",") if name.strip()]
        for name in names:
            if name != "all":
                one_of(name, METHODS, "method")
        if "all" in names:  # that apply
            names = [name for name, entry in METHODS.items() if all(map(entry.fits, chosen))]
            some = [name for name, entry in METHODS.items() if any(map(entry.fits, chosen)) and name not in names]
            if some:
                warnings.warn(
                    f"left out, as not all of these protocols can have it: {', '.join(some)}. Run the protocols one by "
                    "one to have all that each can.", HoldfastWarning, stacklevel=2,
                )  # fmt: skip
        if not names:
            raise ArgumentError("--methods names no method; `holdfast bench --list` shows them.")
        numbers = _numbers(seeds, "seeds", int)
        if "," not in seeds and not 1 <= numbers[0] <= _MOST_SEEDS:
            raise ArgumentError(
                f"--seeds {numbers[0]} is how many, from 1 to {_MOST_SEEDS}; to say which, write a comma after it: "
                f"--seeds {numbers[0]},"
            )
        which = numbers
        if "," not in seeds:  # the one that strengths are chosen on is passed over
            which = [seed for seed in range(numbers[0] + 1) if seed != SWEEP_SEED][: numbers[0]]
        found = (
            _numbers(strengths, "strengths", float) if strengths is not None else list(STRENGTHS) if sweep else [1.0]
        )
        if sweep and not any(METHODS[name].has_strength for name in names):
            raise ArgumentError(f"--sweep chooses strengths, and of these methods none has one: {', '.join(names)}.")
        if sweep and len(set(found)) < 2:
            raise ArgumentError("--sweep chooses among strengths: give two or more, with commas.")
        if SWEEP_SEED in which:
            raise ArgumentError(f"seed {SWEEP_SEED} is the one that strengths are chosen on: take others.")
        return cls(chosen, names, which, found)

    @property
    def jobs(self) -> list[Job]:
        from ..bench.jobs import grid

        return list(dict.fromkeys(grid(self.protocols, self.methods, self.seeds, self.strengths)))

    def sweep(self, tasks: int) -> tuple[list[Job], list[Job]]:
        """The jobs of a sweep's two stages; those of the second before their strengths are known."""
        from ..bench.grid import trials
        from ..bench.jobs import grid

        first = trials(self.protocols, self.methods, self.strengths, tasks)
        return list(dict.fromkeys(first)), list(dict.fromkeys(grid(self.protocols, self.methods, self.seeds)))


def _run(
    asked: _Asked, out: Path, workers: int, address: str | None, device: str, threads: int, sweep: int | None
) -> Outcome:
    from ..bench.grid import dask, others, processes, run_all, swept
    from ..bench.machine import present

    if workers and address:
        raise ArgumentError("jobs run in --workers or on --dask, not both.")
    if not address:  # another machine's devices are its own
        device = present(device)
    for version, count in others(out).items():
        said = f"{out} has {count} results of holdfast {version}: they stay, and are not used."
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
) -> None:
    """Make one page of a bench's results: leaderboards beside published numbers, curves, costs."""
    need("The report", {"jinja2": "report", "matplotlib": "report"})
    from ..report import report_command

    or_exit(lambda: report_command(results, out, markdown, csv, bundle))
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


def _numbers(text: str, what: str, kind: type) -> list[Any]:
    try:
        found = [kind(each) for each in text.split(",") if each.strip()]
        if not found or not all(0 <= each < math.inf for each in found):
            raise ValueError
    except ValueError:
        raise ArgumentError(f"--{what} takes numbers with commas between them, 0 or more, got {text!r}.") from None
    return found


def _print_commands(
    asked: _Asked, out: Path, device: str, threads: int | None, sweep: int | None, changes: dict[str, Any]
) -> None:
    """A line for each job; of a sweep, whose second stage waits for its first, one for each method."""
    shared = {"out": out, "device": device, "threads": threads, **changes}
    if sweep is None:
        for job in asked.jobs:
            _print_command(job.protocol.name, job.method, [job.seed], [job.strength], [], shared)
        return
    print(
        "A sweep has two stages: strengths are chosen on validation data, then run. Each command does both for one "
        "method, for all seeds.",
        file=sys.stderr,
    )
    from ..bench.catalog import METHODS

    for protocol in asked.protocols:
        for method in asked.methods:
            tuned = METHODS[method].has_strength
            how = ["--sweep", "--sweep-tasks", str(sweep)] if tuned else []
            _print_command(protocol.name, method, asked.seeds, asked.strengths if tuned else [1.0], how, shared)


def _print_command(
    protocol: str, method: str, seeds: list[int], strengths: list[float], how: list[str], shared: dict[str, Any]
) -> None:
    words = ["holdfast", "bench", protocol.split(" (")[0], "--methods", method]
    words += ["--seeds", "".join(f"{seed}," for seed in seeds), "--strengths", ",".join(map(repr, strengths)), *how]
    for name, value in shared.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    print(shlex.join(words))


def _ends(outcome: Outcome) -> list[str]:
    """Where a sweep's best strength is the last one it was offered."""
    from ..bench.measures import at_an_end, best

    tried: dict[tuple[str, str], dict[float, float]] = {}
    failed = {(job.protocol.name, job.method) for job in outcome.failed if job.validating}
    for job, result in outcome.found.items():
        if job.validating and (job.protocol.name, job.method) not in failed:
            tried.setdefault((job.protocol.name, job.method), {})[job.strength] = result.run.average
    return [
        f"{protocol}: {method} did best at {best(scores):g}, the {end} strength that was tried. Beyond it may be "
        "better ones: give --strengths more."
        for (protocol, method), scores in tried.items()
        if len(scores) > 1 and (end := at_an_end(scores))
    ]


def _print_outcome(outcome: Outcome, out: Path, device: str) -> None:
    from ..bench.measures import percent
    from ..bench.results import grouped

    for protocol, results in grouped(list(outcome.found.values())):
        table = Table(title=protocol, title_justify="left", box=SIMPLE_HEAD)
        for heading in ("method", "strength", "average, %", "forgotten,\npoints", "each when\nnew, %", "seeds"):
            table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
        for method, strength in dict.fromkeys((one.run.method, one.strength) for one in results):
            runs = [one.run for one in results if (one.run.method, one.strength) == (method, strength)]
            cells = [percent([getattr(run, each) for run in runs]) for each in ("average", "forgetting", "newest")]
            table.add_row(method, "" if strength is None else f"{strength:g}", *cells, str(len(runs)))
        console.print(table)
    for line in _ends(outcome):
        console.print(escape(line), soft_wrap=True)
    for error in dict.fromkeys(outcome.failed.values()):  # what befell many is told once
        jobs = [job for job, said in outcome.failed.items() if said == error]
        names = "; ".join(job.name for job in jobs[:_NAMED])
        rest = f"; and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else ""
        which = names if len(jobs) == 1 else f"{len(jobs)} jobs ({names}{rest})"
        written = next((path for job in jobs if (path := job.error_path(out, device)).exists()), None)
        more = f" All of it: {written}" if written else ""
        console.print(f"[red]failed[/red] {escape(f'{which}: {error}{more}')}", soft_wrap=True)
    if outcome.found:
        console.print(
            f"The page of all this: [bold]holdfast report {escape(shlex.quote(str(out)))}[/bold]", soft_wrap=True
        )
