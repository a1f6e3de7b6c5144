"""Does a forecast come true? Models learn one task, then another in some way; the old loss rises, and was it foretold?

    python benchmarks/forecast.py --out benchmarks/results/forecast.json --figure docs/forecast.svg

The cases were written down before any of them was run. The forecast was designed on others (MNIST, seeds from 500 on),
and changed once after a first list, which is kept as such (`FIRST`); `SCENES` are those that it is judged by. A rise is
that of the loss on the old data; that on held-out data of the old task stands beside it. Where the images come from:
see `holdfast bench`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast
from holdfast.bench import data
from holdfast.bench.networks import Gpt
from holdfast.bench.streams import permuted, rotated, split, texts
from holdfast.bench.tasks import Task
from holdfast.report.canvas import COLORS, picture, plain

SMALL = 0.01  # nats: rises below are scored by how far off the forecast is


@dataclass(frozen=True)
class Scene:
    """A model that learned one task, and the task that comes next."""

    dataset: str
    switch: str
    network: str
    seed: int
    first: int = 0  # which tasks of a split: this one, and the next


FIRST = [
    Scene("fashion", "permuted", "relu", 1),
    Scene("fashion", "rotated", "relu", 2),
    Scene("fashion", "domain", "relu", 3),
    Scene("fashion", "class", "relu", 4),
    Scene("fashion", "rotated", "conv", 5),
    Scene("fashion", "domain", "conv", 6),
    Scene("fashion", "class", "conv", 7),
    Scene("fashion", "permuted", "gelu", 8),
    Scene("mnist", "rotated", "deep", 9),
    Scene("mnist", "class", "conv", 10),
    Scene("mnist", "domain", "gelu", 11),
    Scene("digits", "permuted", "tanh", 12),
    Scene("digits", "class", "relu", 13),
    Scene("digits", "domain", "relu", 14),
    Scene("text", "code to prose", "gpt", 15),
    Scene("text", "prose to code", "gpt", 16),
]
SCENES = [
    Scene("fashion", "permuted", "deep", 101),
    Scene("fashion", "rotated", "tanh", 102),
    Scene("fashion", "domain", "relu", 103, 2),
    Scene("fashion", "class", "gelu", 104, 2),
    Scene("fashion", "rotated", "conv", 105),
    Scene("fashion", "domain", "conv", 106, 1),
    Scene("fashion", "class", "conv", 107, 3),
    Scene("fashion", "domain", "deep", 108, 3),
    Scene("mnist", "rotated", "relu", 109),
    Scene("mnist", "class", "conv", 110, 2),
    Scene("mnist", "domain", "tanh", 111, 3),
    Scene("mnist", "permuted", "conv", 112),
    Scene("digits", "permuted", "gelu", 113),
    Scene("digits", "class", "tanh", 114, 2),
    Scene("text", "code to prose", "gpt", 115),
    Scene("text", "prose to code", "gpt", 116),
]
# How the next task is learned: held how, and for which part of the epochs.
WAYS = {
    "fine-tuning": (None, 1.0), "briefly": (None, 0.2), "EWC, 1": ("diagonal", 1.0), "Kronecker, 1": ("kronecker", 1.0),
    "answers, 1": ("answers", 1.0),
}  # fmt: skip
EPOCHS = {"digits": 20, "text": 30, "mnist": 3, "fashion": 3}


def tasks(scene: Scene) -> list[Task]:
    if scene.dataset == "text":
        found = [_shortened(task, 900) for task in texts(data.text_domains(), 64)]
        return found if scene.switch == "code to prose" else found[::-1]
    images = {"digits": data.digits, "mnist": data.mnist, "fashion": data.fashion_mnist}[scene.dataset]()
    generator = torch.Generator().manual_seed(scene.seed)
    rows = [
        torch.randperm(len(y), generator=generator)[:most]
        for y, most in ((images.train_y, 8000), (images.test_y, 2500))
    ]
    images = replace(
        images, train_x=images.train_x[rows[0]], train_y=images.train_y[rows[0]],
        test_x=images.test_x[rows[1]], test_y=images.test_y[rows[1]],
    )  # fmt: skip
    if scene.switch == "permuted":
        return permuted(images, 2, scene.seed)
    if scene.switch == "rotated":
        return rotated(images, [0.0, 30.0 if scene.seed > 100 else 60.0])
    return split(images, scene.switch, flat=scene.network != "conv")[scene.first : scene.first + 2]


def _shortened(task: Task, most: int) -> Task:
    return replace(task, train=task.train.first(most), test=task.test.first(most // 4))


def network(scene: Scene, x: Tensor, outputs: int) -> nn.Module:
    torch.manual_seed(scene.seed)
    if scene.network == "gpt":
        return Gpt(256, 64, 64, 2, 4)
    if scene.network == "conv":
        side = 28 // 4
        return nn.Sequential(
            nn.Unflatten(-1, (1, 28, 28)) if x.ndim == 2 else nn.Identity(),
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * side**2, 64), nn.ReLU(), nn.Linear(64, outputs),
        )  # fmt: skip
    bend = {"relu": nn.ReLU, "deep": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}[scene.network]
    widths = [x[0].numel(), *[100] * (4 if scene.network == "deep" else 2)]
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), bend())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], outputs))


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, likelihood: Any, seed: int, held: Any = None) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    model.train()
    with nullcontext() if held is None else held(optimizer, model):
        for _, rows in zip(range(steps), _batches(len(x), generator), strict=False):
            optimizer.zero_grad()
            (likelihood.nll(model(x[rows]), y[rows]).sum() / y[rows].numel()).backward()
            optimizer.step()
    model.eval()


def _batches(size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(size, generator=generator).split(64)


@torch.no_grad()
def loss(model: nn.Module, x: Tensor, y: Tensor, likelihood: Any) -> float:
    return (
        sum(float(likelihood.nll(model(a), b).sum()) for a, b in zip(x.split(250), y.split(250), strict=True))
        / y.numel()
    )


@dataclass(frozen=True)
class Made:
    """A scene whose first task is learned and remembered."""

    model: nn.Module
    memory: holdfast.Memory
    diagonal: holdfast.Posterior
    old: Task
    new: Task
    steps: int
    likelihood: Any

    @property
    def count(self) -> int:
        return self.new.train.y.numel()


def made(scene: Scene, apart: float = 0.0) -> Made:
    """With `apart`, such a part of the old data is not trained on, and it is its answers that are kept."""
    old, new = tasks(scene)
    likelihood = holdfast.tokens(shift=False) if scene.dataset == "text" else holdfast.categorical
    outputs = 256 if scene.dataset == "text" else 10
    cut = round(len(old.train) * (1 - apart))
    x, y = old.train.x[:cut], old.train.y[:cut]
    model = network(scene, x, outputs)
    steps = EPOCHS[scene.dataset] * -(-len(x) // 64)
    train(model, x, y, steps, likelihood, scene.seed)
    batches = list(zip(x.split(250), y.split(250), strict=True))
    posterior, diagonal = (
        holdfast.consolidate(holdfast.prior(model), model, fisher(model, batches, likelihood, targets="sampled"))
        for fisher in (holdfast.kronecker_fisher, holdfast.diagonal_fisher)
    )
    probes: holdfast.Probes = (
        holdfast.own_text(model, count=300, length=64, num_data=y.numel(), start=x[:300, :1])
        if scene.dataset == "text"
        else holdfast.gaussian_probes(batches)
    )
    aside = list(zip(old.train.x[cut:].split(250), old.train.y[cut:].split(250), strict=True))
    answers = holdfast.kept_answers(model, aside or batches, likelihood)
    memory = holdfast.Memory.of(posterior, model, probes, answers)
    return Made(model, memory, diagonal, old, new, steps, likelihood)


def learned(scene: Scene, start: Made, way: str) -> nn.Module:
    """The model after the next task."""
    kind, part = WAYS[way]
    model = copy.deepcopy(start.model)
    held: Callable[..., Any] | None = None
    if kind is not None:
        term = {
            "diagonal": lambda: start.diagonal, "kronecker": lambda: start.memory.posterior,
            "answers": lambda: holdfast.distill(model, start.memory, likelihood=start.likelihood, batch=64),
        }[kind]()  # fmt: skip
        unit = start.likelihood.unit
        held = lambda optimizer, run: holdfast.hold(optimizer, run, term, num_data=start.count, unit=unit)  # noqa: E731
    x, y = start.new.train.x, start.new.train.y
    train(model, x, y, max(1, round(part * start.steps)), start.likelihood, scene.seed + 1000, held)
    return model


def measured(scene: Scene) -> list[dict[str, Any]]:
    start = made(scene)
    parts, found = (start.old.train, start.old.test), []
    before = [loss(start.model, part.x, part.y, start.likelihood) for part in parts]
    for way in WAYS:
        model = learned(scene, start, way)
        said = holdfast.forecast(model, start.memory)
        after = [loss(model, part.x, part.y, start.likelihood) for part in parts]
        found.append({
            "dataset": scene.dataset, "switch": scene.switch, "network": scene.network, "seed": scene.seed, "way": way,
            "before": before, "rise": after[0] - before[0], "rise_held_out": after[1] - before[1],
            "forecast": said.rise,
            "safe": said.safe, "by_outputs": said.by_probes.by_outputs, "quadratic": said.quadratic,
            "by_probabilities": said.by_probes.by_probabilities, "moved": said.by_probes.moved,
            "doubts": list(said.doubts),
        })  # fmt: skip
        print(
            f"{scene.dataset}, {scene.switch}, {scene.network}, {way}: {found[-1]['rise']:.4f}, held out "
            f"{found[-1]['rise_held_out']:.4f}, foretold {said.rise:.4f}, below {said.safe:.4f}, quadratic "
            f"{said.quadratic:.4f}", flush=True,
        )  # fmt: skip
    return found


def right(run: dict[str, Any], by: str = "forecast", rise_of: str = "rise") -> bool:
    """Within a factor of two; of a small rise, within so many nats."""
    rise, said = run[rise_of], run[by]
    return abs(rise - said) <= SMALL if rise < SMALL else said / 2 <= rise <= 2 * said


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| switch | network | " + " | ".join(WAYS) + " |", "|---|---|" + "---|" * len(WAYS),
    ]  # fmt: skip
    scenes = list(dict.fromkeys((run["dataset"], run["switch"], run["network"]) for run in runs))
    for dataset, switch, name in scenes:
        mine = {
            run["way"]: run
            for run in runs
            if (run["dataset"], run["switch"], run["network"]) == (dataset, switch, name)
        }
        cells = [
            f"{mine[way]['rise']:.3f} / {mine[way]['forecast']:.3f}{'' if right(mine[way]) else ' ✗'}" for way in WAYS
        ]
        lines.append(f"| {dataset}, {switch} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(runs: list[dict[str, Any]]) -> str:
    lines = ["| forecast | of the loss on | within 2× (or 0.01) | not above the safe bound |", "|---|---|---|---|"]
    for title, by in (("by probes", "forecast"), ("the quadratic, Kronecker", "quadratic")):
        for where, rise in (("the old data", "rise"), ("held-out data of the old task", "rise_held_out")):
            mine = [run for run in runs if rise in run]
            if not mine:
                continue
            hits = sum(right(run, by, rise) for run in mine)
            under = f"{sum(run[rise] <= run['safe'] for run in mine)} of {len(mine)}" if by == "forecast" else "–"
            lines.append(f"| {title} | {where} | {hits} of {len(mine)} ({100 * hits / len(mine):.0f} %) | {under} |")
    return "\n".join(lines)


def drawn(runs: list[dict[str, Any]]) -> str:
    """Rise against forecast, each case a point."""

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, by, title in zip(axes, ("forecast", "quadratic"), ("by probes", "the quadratic alone"), strict=True):
            for color, name in zip(COLORS[1:], dict.fromkeys(run["network"] for run in runs), strict=False):
                mine = [run for run in runs if run["network"] == name]
                x, y = ([max(run[each], 1e-3) for run in mine] for each in (by, "rise"))
                axis.scatter(x, y, s=18, color=color, label=name)
            ends = [1e-3, 20]
            for factor, style in ((1, "-"), (2, ":"), (0.5, ":")):
                axis.plot(ends, [factor * end for end in ends], style, color=COLORS[0], linewidth=0.8)
            for scale in (axis.xaxis, axis.yaxis):
                getattr(axis, f"set_{scale.axis_name}scale")("log")
                scale.set_ticks((0.001, 0.01, 0.1, 1, 10))
                scale.set_ticks([], minor=True)
                scale.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_title(title, loc="left", fontsize=11)
            plain(axis, "foretold, nats per old example", "the rise")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=6, frameon=False)
        figure.tight_layout(rect=(0, 0.1, 1, 1))

    return picture(
        draw, (10, 4.6), "The rise of the old loss against its forecast, by probes and by the quadratic alone"
    )


def made_anew(
    out: Path | None, scenes: list[Scene], measure: Callable[[Scene], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The runs of scenes, kept in a file as they come; those that are there are not run again."""
    torch.set_num_threads(1)
    kept: list[dict[str, Any]] = (
        json.loads(out.read_text(encoding="utf-8"))["runs"] if out is not None and out.exists() else []
    )
    for scene in scenes:
        if any(run["seed"] == scene.seed for run in kept):
            continue
        kept += measure(scene)
        if out is not None:
            results = {
                "torch": torch.__version__, "python": platform.python_version(), "holdfast": holdfast.__version__,
                "date": date.today().isoformat(), "runs": kept,
            }  # fmt: skip
            out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, nargs="*", help="the seeds of some scenes, else all")
    parser.add_argument("--out", type=Path, help="write the results as JSON; scenes that are there are not run again")
    parser.add_argument("--figure", type=Path, help="draw them")
    options = parser.parse_args()
    kept = made_anew(
        options.out, [each for each in SCENES if not options.scenes or each.seed in options.scenes], measured
    )
    print(table(kept), summary(kept), sep="\n\n")
    if options.figure:
        options.figure.write_text(drawn(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
