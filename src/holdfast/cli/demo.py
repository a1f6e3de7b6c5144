"""holdfast demo: what is forgotten, with and without a hold."""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import __version__
from .console import app, console, escape, interruptible, need, or_exit, write

if TYPE_CHECKING:
    from ..bench.demonstration import Digits
    from ..bench.measures import Run

_MOST_WORKERS = 4


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("holdfast-demo.html"),
    figure: Annotated[Path | None, typer.Option(help="Also write the picture, as SVG.")] = None,
    tasks: Annotated[int, typer.Option(min=2, max=50, help="How many tasks to learn in turn.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, max=50, help="How many times to repeat everything.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Passes over each task's data.")] = 10,
) -> None:
    """Learn conflicting tasks in turn, with and without a hold, and show what is forgotten."""
    need("The demo", {"jinja2": "report", "matplotlib": "report", "sklearn": "bench"})
    from ..bench.demonstration import STRENGTHS, Digits
    from ..bench.grid import processes
    from ..report import forgetting

    for path in (out, figure):  # before the work, not after it
        if path is not None and not path.resolve().parent.is_dir():
            sys.exit(f"{path} could not be written: its folder does not exist.")
    experiment = Digits(tasks=tasks, seeds=seeds, epochs=epochs)
    start = time.perf_counter()
    # A process for each core: on two the table is there in half the time.
    workers = min(os.cpu_count() or 1, _MOST_WORKERS)
    engine = processes(workers) if workers > 1 else nullcontext()
    columns = (TextColumn("{task.description:<52}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    stopped = interruptible("Stopped: nothing was written.")
    with stopped, engine as executor, Progress(*columns, transient=True) as bar:
        work = bar.add_task("digits", total=experiment.rounds)

        def told(made: str) -> None:
            bar.update(work, advance=1, description=made)

        strength, runs = or_exit(lambda: experiment.run(told, executor))
    seconds = time.perf_counter() - start

    _print_results(runs)
    chosen = (
        f"strength {strength:g} was chosen for the diagonal among {', '.join(f'{s:g}' for s in STRENGTHS)} on "
        "validation data of tasks that the table does not have; the test data was not used for it"
    )
    console.print(f"[dim]{chosen.capitalize()}.[/dim]")
    write(out, _page(experiment, runs, chosen, seconds))
    if figure is not None:
        write(figure, forgetting(runs))
    console.print(
        f"{seconds:.0f} s. The page with the curves: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True
    )


def _print_results(runs: list[Run]) -> None:
    from ..bench.measures import by_method, percent, spread

    table = Table(title="At the end, mean ± standard deviation over seeds", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    measures = {"average, %": "average", "forgotten, points": "forgetting", "each when new, %": "newest"}
    for heading in measures:
        table.add_column(heading, justify="right", no_wrap=True)
    grids = []
    for name, group in by_method(runs).items():
        table.add_row(name, *(percent([getattr(run, key) for run in group]) for key in measures.values()))
        if not group[0].in_turn:
            continue
        count = len(group[0].accuracy)
        grid = Table(title=name, box=None, show_header=False, padding=(0, 1), min_width=len(name))
        for _ in range(count):
            grid.add_column(justify="right")
        for after in range(count):
            row = [100 * spread([run.accuracy[after][task] for run in group])[0] for task in range(count)]
            grid.add_row(*(f"[{'bold' if task <= after else 'dim'}]{value:.0f}[/]" for task, value in enumerate(row)))
        grids.append(grid)
    console.print(table)
    console.print("Percent right: a row after each task learned, a column for each task tested.\n")
    console.print(Columns(grids, padding=(1, 3)))
    console.print()


def _page(experiment: Digits, runs: list[Run], chosen: str, seconds: float) -> str:
    """The page of the demo: what was done, and what came of it."""
    import sklearn

    from ..report import page

    tasks, seeds, protocol = experiment.tasks, experiment.seeds, experiment.protocol
    training = protocol.training
    return page(
        runs,
        title="Forgetting, with and without holdfast",
        about=[
            f"One small network learns {tasks} tasks in turn: handwritten digits whose pixels come in a new order each "
            "time. The labels stay the same and the inputs conflict, so learning one task overwrites the last. No "
            "method but joint training may look at old data.",
            "Elastic weight consolidation keeps, instead of the data, how much each weight mattered (its Fisher "
            "information), and holds the weights that did. At strength 1 an old example counts as much as a new one. "
            "A diagonal leaves out what weights know together. A stronger hold can make up for part of that: "
            f"{chosen}. Kronecker factors keep it, and need no strength to be chosen. A network that is "
            "sure of its answers has little Fisher information; taken of softer answers (holdfast.softened) it holds "
            "more. Steps in the factors' eigenvectors (rotate=True) find better weights under so stiff a hold.",
        ],
        facts=[
            ("command", f"holdfast demo --tasks {tasks} --seeds {seeds} --epochs {experiment.epochs}"),
            ("data", "scikit-learn's digits: 1,797 images of 8×8, 1,348 for training and 449 for testing"),
            ("model", f"perceptron 64-{'-'.join(map(str, protocol.hidden))}-10, ReLU"),
            (
                "training",
                f"Adam, learning rate {training.lr:g}, batch {training.batch_size}, label "
                f"smoothing {training.label_smoothing:g} for every method (without it the network grows so "
                "certain that its Fisher information vanishes)",
            ),
            ("Fisher", "exact (expected over the model's own labels), per example"),
            ("seeds", ", ".join(str(seed) for seed in range(seeds))),
            ("versions", f"holdfast {__version__}, torch {torch.__version__}, scikit-learn {sklearn.__version__}"),
            ("machine", f"{platform.machine()}, Python {platform.python_version()}, {seconds:.0f} s"),
        ],
    )
