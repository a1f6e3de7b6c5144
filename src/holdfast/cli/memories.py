"""holdfast inspect and holdfast merge: memory files without a line of Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from ..file import HEAD
from ..posterior import Memory
from ..posterior import merge as merged
from ..storage import inspect as inspected
from ..storage import load, save
from .console import app, console, or_exit


@app.command()
def inspect(file: Annotated[Path, typer.Argument(help="A memory file, or a linear head's.")]) -> None:
    """Say what a file holds, without loading its tensors."""
    facts = or_exit(lambda: inspected(file))
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

    parts = or_exit(work)
    console.print(f"Wrote [bold]{escape(str(out))}[/bold].", soft_wrap=True)
    if any(part.buffers for part in parts):
        console.print("Buffers (BatchNorm statistics) have no product and were left out: recompute them.")
    if any(part.probes is not None for part in parts):
        console.print("Probes were left out: in Python, memory.with_probes(other.probes) keeps both.")


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
        *([("probes", _probes(facts["probes"], shapes))] if isinstance(facts.get("probes"), dict) else []),
        ("id", facts["id"]),
        ("parents", ", ".join(map(str, facts["parents"])) or "none"),
    ]


def _probes(said: dict[str, Any], shapes: dict[str, list[int]]) -> str:
    """What stands for the old inputs, and how much of the file it is."""
    mine = {name: shape for name, shape in shapes.items() if name.startswith("probes.")}
    entries = f"{sum(_size(shape) for shape in mine.values()):,} numbers"
    if said.get("kind") == "gaussian":
        ranks = ", ".join(str(shape[0]) for name, shape in sorted(mine.items()) if name.endswith(".factors"))
        where = f"outputs of `{said.get('layer')}`" if said.get("layer") else "inputs"
        return f"gaussian: {where} of shape {_by(said.get('shape'))}, rank {ranks}, {entries}"
    return f"{said.get('kind')}: inputs of shape {_by(mine.get('probes.inputs'))} as they are, {entries}"


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
