"""holdfast inspect, merge and forecast: memory files without a line of Python."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from safetensors.torch import load_file

from ..errors import ArgumentError, HoldfastWarning, MemoryFileError
from ..file import HEAD, MEMORY, believed
from ..forecast import Forecast
from ..forecast import forecast as foretold
from ..forecast.checkpoint import in_checkpoint
from ..head import LinearHead
from ..posterior import Memory
from ..posterior import merge as merged
from ..storage import inspect as inspected
from ..storage import load, save
from .console import app, console, escape, or_exit


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A memory's file or folder, or a linear head's file.")],
    verify: Annotated[bool, typer.Option(help="Read all of it, and compare it with its checksum.")] = False,
) -> None:
    """Say what a file says of itself, without loading its tensors."""
    facts = or_exit(lambda: inspected(file))
    is_head = facts.get("kind") == HEAD
    if verify:
        or_exit(lambda: LinearHead.load(file) if is_head else load(file))
    checked = "right" if verify else "not looked at: --verify reads the whole of it"
    rows = [*or_exit(lambda: _rows(file, facts)), ("checksum", checked)]
    table = Table(show_header=False, box=None)
    files = [each for each in file.rglob("*") if each.is_file()] if file.is_dir() else [file]
    for name, value in [*rows, ("bytes", f"{sum(each.stat().st_size for each in files):,}")]:
        table.add_row(f"[dim]{name}[/dim]", escape(str(value)))
    console.print(table)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Two or more memories of one model, files or folders.")],
    out: Annotated[Path, typer.Option(help="Where to write the merged memory.")],
    base: Annotated[Path | None, typer.Option(help="The memory they all started from, counted once.")] = None,
) -> None:
    """Multiply memories of one model, made apart, into one."""

    if len(files) < 2:
        sys.exit("merging takes two memory files or more, got one.")
    if os.path.realpath(out) in map(os.path.realpath, (*files, *([base] if base else []))):  # of a loop of links too
        sys.exit(f"{out} is one of the files to read. Write to another.")

    def work() -> list[Memory]:
        parts = [load(file) for file in files]
        with warnings.catch_warnings():  # said below, in other words
            warnings.simplefilter("ignore", HoldfastWarning)
            save(merged(*parts, base=None if base is None else load(base)), out)
        return parts

    parts = or_exit(work)
    console.print(f"Wrote [bold]{escape(str(out))}[/bold].", soft_wrap=True)
    if any(part.buffers for part in parts):
        console.print("Buffers (BatchNorm statistics) have no product and were left out: recompute them.")
    if any(part.probes is not None for part in parts):
        console.print("Probes were left out: in Python, memory.with_probes(other.probes) keeps both.")
    if any(part.answers is not None for part in parts):
        console.print("Answers were left out: in Python, memory.with_answers(other.answers) keeps both.")


@app.command()
def forecast(
    memory: Annotated[Path, typer.Argument(help="A memory's file or folder.")],
    checkpoint: Annotated[
        Path, typer.Argument(help="Weights of the same model: .safetensors, what torch.save wrote, or a memory.")
    ],
    inside: Annotated[
        str | None, typer.Option(help="What stands before the names there, such as `student.`; else it is looked for.")
    ] = None,
) -> None:
    """Say how much of what a memory knows a checkpoint has lost: a local estimate, which ranks checkpoints."""

    def work() -> Forecast:
        known = load(memory)
        return foretold(in_checkpoint(_opened(checkpoint), known.posterior, inside, where=str(checkpoint)), known)

    said = or_exit(work)
    console.print(f"[bold]{said.rise:.4g}[/bold] nats per old {escape(said.unit)}, by the quadratic:")
    table = Table(box=None)
    table.add_column("layer")
    table.add_column("nats", justify="right")
    for layer, value in sorted(said.by_layer.items(), key=lambda each: -each[1]):
        table.add_row(escape(layer), f"{value:.4g}")
    console.print(table)
    for doubt in said.doubts:
        console.print(escape(doubt))
    console.print(
        "In Python, holdfast.forecast(model, memory) asks the model itself, if the memory has probes and answers."
    )


def _opened(file: Path) -> object:
    """What a checkpoint holds; nothing in it is executed."""
    try:
        found = _mean(file)
        if found:
            return found
        return load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ArgumentError(
            f"{file} holds more than named tensors, a whole model perhaps, and such files can run code: it is not "
            "opened. Save model.state_dict()."
        ) from error
    except Exception as error:  # a file of anything: every reader fails in its own way
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArgumentError(f"{file} could not be read as weights: {said}") from error


def _mean(file: Path) -> dict[str, torch.Tensor]:
    """The weights of another memory, where the file is one."""
    try:
        inspected(file)
    except MemoryFileError:
        return {}
    found = load(file)
    return {**found.posterior.mean, **found.buffers}


def _rows(file: Path, facts: dict[str, Any]) -> list[tuple[str, object]]:
    """What a description says, which nobody has compared with anything yet: its numbers may be none."""
    kind = HEAD if facts.get("kind") == HEAD else MEMORY
    with believed(file, kind):
        return _of_head(facts) if kind == HEAD else _of_memory(facts)


def _of_memory(facts: dict[str, Any]) -> list[tuple[str, object]]:
    shapes = facts["shapes"]
    entries = sum(_size(shape) for name, shape in shapes.items() if name.startswith("mean."))
    return [
        ("format", facts["format"]),
        ("stands for", f"{facts['num_data']:g} {facts['unit']}s" if facts["unit"] else "nothing yet: a prior"),
        ("learned from", "\n".join(map(str, facts["tasks"])) or "nothing"),
        ("targets", ", ".join(map(str, facts["targets"])) or "none"),
        ("structure", _structure(facts["precision"])),
        ("parameters", f"{entries:,} in {sum(name.startswith('mean.') for name in shapes)} tensors"),
        ("buffers", sum(name.startswith("buffers.") for name in shapes)),
        *([("probes", _probes(facts["probes"], shapes))] if isinstance(facts.get("probes"), dict) else []),
        *([("answers", _answers(facts["answers"], shapes))] if isinstance(facts.get("answers"), dict) else []),
        ("id", facts["id"]),
        ("parents", ", ".join(map(str, facts["parents"])) or "none"),
    ]


def _structure(said: dict[str, Any]) -> str:
    """The kind of a precision, and of each of its terms."""
    terms = said.get("terms")
    kinds = [each.get("kind", "unknown") for each in terms if isinstance(each, dict)] if isinstance(terms, list) else []
    return " + ".join(map(str, kinds)) or str(said.get("kind", "unknown"))


def _probes(said: dict[str, Any], shapes: dict[str, list[int]]) -> str:
    """What stands for the old inputs, and how much of the file it is."""
    mine = {name: shape for name, shape in shapes.items() if name.startswith("probes.")}
    entries = f"{sum(_size(shape) for shape in mine.values()):,} numbers"
    if said.get("kind") == "gaussian":
        ranks = ", ".join(str(shape[0]) for name, shape in sorted(mine.items()) if name.endswith(".factors"))
        where = f"outputs of `{said.get('layer')}`" if said.get("layer") else "inputs"
        return f"gaussian: {where} of shape {_by(said.get('shape'))}, rank {ranks}, {entries}"
    return f"{said.get('kind')}: inputs of shape {_by(mine.get('probes.inputs'))} as they are, {entries}"


def _answers(said: dict[str, Any], shapes: dict[str, list[int]]) -> str:
    return f"{_by(shapes.get('answers.outputs'))} outputs, with labels, {said.get('kind')}"


def _by(shape: object) -> str:
    return "×".join(map(str, shape)) if isinstance(shape, list) else "unknown"


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


def _size(shape: list[int]) -> int:
    return torch.Size(shape).numel()
