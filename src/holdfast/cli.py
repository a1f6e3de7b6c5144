"""The command line: holdfast demo | inspect | merge."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch

from . import __version__
from .errors import HoldfastError
from .file import HEAD
from .posterior import Memory
from .posterior import merge as merged
from .storage import inspect as inspected
from .storage import load, save

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.columns import Columns
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as missing:  # the core installs without them
    sys.exit(f"The holdfast command needs {missing.name}: install holdfast with its `cli` extra.")

if TYPE_CHECKING:
    from .bench.digits import Digits
    from .bench.runner import Run

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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("holdfast-demo.html"),
    figure: Annotated[Path | None, typer.Option(help="Also write the picture, as SVG.")] = None,
    tasks: Annotated[int, typer.Option(min=2, max=50, help="How many tasks to learn in turn.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, max=50, help="How many times to repeat everything.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Passes over each task's data.")] = 15,
) -> None:
    """Learn conflicting tasks in turn, with and without a hold, and show what is forgotten."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as missing:
        sys.exit(f"The demo needs {missing.name}: install holdfast with its `cli`, `bench` and `report` extras.")

    from .bench.digits import STRENGTHS, Digits
    from .bench.methods import Training
    from .report import forgetting

    for path in (out, figure):  # before the work, not after it
        if path is not None and not path.resolve().parent.is_dir():
            sys.exit(f"{path} could not be written: its folder does not exist.")
    experiment = Digits(tasks=tasks, seeds=seeds, training=Training(epochs=epochs))
    start = time.perf_counter()
    columns = (TextColumn("{task.description:<52}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        work = bar.add_task("digits", total=experiment.rounds)
        strength, runs = experiment.run(lambda doing: bar.update(work, advance=1, description=doing))
    seconds = time.perf_counter() - start

    _print_results(runs)
    chosen = (
        f"strength {strength:g} was chosen among {', '.join(f'{s:g}' for s in STRENGTHS)} on validation splits of the "
        "first two tasks; the test splits were not used for it"
    )
    console.print(f"[dim]{chosen.capitalize()}.[/dim]")
    _write(out, _demo_page(experiment, runs, chosen, seconds))
    if figure is not None:
        _write(figure, forgetting(runs))
    console.print(
        f"{seconds:.0f} s. The page with the curves: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True
    )


@app.command()
def inspect(file: Annotated[Path, typer.Argument(help="A memory file, or a linear head's.")]) -> None:
    """Say what a file holds, without loading its tensors."""
    facts = _or_exit(lambda: inspected(file))
    rows = _of_head(facts) if facts.get("kind") == HEAD else _of_memory(facts)
    table = Table(show_header=False, box=None)
    for name, value in [*rows, ("bytes", f"{file.stat().st_size:,}")]:
        table.add_row(f"[dim]{name}[/dim]", escape(str(value)))
    console.print(table)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Two or more memory files of one model.")],
    out: Annotated[Path, typer.Option(help="Where to write the merged memory.")],
    base: Annotated[Path | None, typer.Option(help="The memory they all started from, counted once.")] = None,
) -> None:
    """Multiply memories of one model, made apart, into one."""

    if out.resolve() in {file.resolve() for file in (*files, *([base] if base else []))}:
        sys.exit(f"{out} is one of the files to read. Write to another.")

    def work() -> list[Memory]:
        parts = [load(file) for file in files]
        save(merged(*parts, base=None if base is None else load(base)), out)
        return parts

    parts = _or_exit(work)
    console.print(f"Wrote [bold]{escape(str(out))}[/bold].", soft_wrap=True)
    if any(part.buffers for part in parts):
        console.print("Buffers (BatchNorm statistics) have no product and were left out: recompute them.")


def main() -> None:
    """The entry point of the `holdfast` command."""
    app()


def _of_memory(facts: dict[str, Any]) -> list[tuple[str, object]]:
    shapes = facts["shapes"]
    entries = sum(_size(shape) for name, shape in shapes.items() if name.startswith("mean."))
    return [
        ("format", facts["format"]),
        ("stands for", f"{facts['num_data']:g} {facts['unit']}s" if facts["unit"] else "nothing yet: a prior"),
        ("learned from", "\n".join(map(str, facts["tasks"])) or "nothing"),
        ("targets", ", ".join(map(str, facts["targets"])) or "none"),
        ("structure", facts["precision"].get("kind", "unknown")),
        ("parameters", f"{entries:,} in {sum(name.startswith('mean.') for name in shapes)} tensors"),
        ("buffers", sum(name.startswith("buffers.") for name in shapes)),
        ("id", facts["id"]),
        ("parents", ", ".join(map(str, facts["parents"])) or "none"),
    ]


def _of_head(facts: dict[str, Any]) -> list[tuple[str, object]]:
    random = f"{facts['features']:,} random ones of " if "random.weight" in facts["shapes"] else ""
    return [
        ("format", facts["format"]),
        ("holds", f"a {facts['kind']}: holdfast.LinearHead.load opens it"),
        ("learned from", f"{facts['num_data']:,} examples in {len(facts['sources'])} part(s)"),
        ("features", f"{random}{facts['inputs']:,} inputs"),
        ("outputs", f"{facts['columns']:,} {'classes' if facts.get('outputs') is None else 'numbers'}"),
        ("prior", f"precision {facts['prior']:g}, noise variance {facts['noise']:g}"),
    ]


def _print_results(runs: list[Run]) -> None:
    from .bench.runner import by_method, spread

    count = len(runs[0].accuracy)
    table = Table(title="At the end, mean ± standard deviation over seeds", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    measures = {"average, %": "average", "forgotten, points": "forgetting", "each when new, %": "newest"}
    for heading in measures:
        table.add_column(heading, justify="right", no_wrap=True)
    grids = []
    for name, group in by_method(runs).items():
        table.add_row(name, *(_percent([getattr(run, key) for run in group]) for key in measures.values()))
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


def _demo_page(experiment: Digits, runs: list[Run], chosen: str, seconds: float) -> str:
    """The page of the demo: what was done, and what came of it."""
    import sklearn

    from .report import page

    tasks, seeds, training = experiment.tasks, experiment.seeds, experiment.training
    return page(
        runs,
        title="Forgetting, with and without holdfast",
        about=[
            f"One small network learns {tasks} tasks in turn: handwritten digits whose pixels come in a new order each "
            "time. The labels stay the same and the inputs conflict, so learning one task overwrites the last. No "
            "method but joint training may look at old data.",
            "Elastic weight consolidation keeps, instead of the data, how much each weight mattered (its Fisher "
            "information), and holds the weights that did. At strength 1 an old example counts as much as a new one. "
            "A diagonal leaves out what weights know together, and a stronger hold can make up for part of that: "
            f"{chosen}.",
        ],
        facts=[
            ("command", f"holdfast demo --tasks {tasks} --seeds {seeds} --epochs {training.epochs}"),
            ("data", "scikit-learn's digits: 1,797 images of 8×8, split 60/15/25 into training, validation and test"),
            ("model", f"perceptron 64-{experiment.width}-{experiment.width}-10, ReLU"),
            (
                "training",
                f"Adam, learning rate {training.lr:g}, batch {training.batch_size}, label "
                f"smoothing {training.label_smoothing:g} for every method (without it the network grows so "
                "certain that its Fisher information vanishes)",
            ),
            ("Fisher", "diagonal, exact (expected over the model's own labels), per example"),
            ("seeds", ", ".join(str(seed) for seed in range(seeds))),
            ("versions", f"holdfast {__version__}, torch {torch.__version__}, scikit-learn {sklearn.__version__}"),
            ("machine", f"{platform.machine()}, Python {platform.python_version()}, {seconds:.0f} s"),
        ],
    )


def _percent(values: list[float]) -> str:
    from .bench.runner import spread

    mean, deviation = spread([100 * value for value in values])
    return f"{mean:.1f} ± {deviation:.1f}"


def _size(shape: list[int]) -> int:
    return torch.Size(shape).numel()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.exit(f"{path} could not be written: {error}")


def _or_exit(work: Callable[[], Result]) -> Result:
    """What `work` gives, or its error as one line and exit status 1."""
    try:
        return work()
    except HoldfastError as error:
        sys.exit(str(error))
