"""Two ways to hold a model, side by side: by its weights, ½ δᵀFδ, and by its answers, N · E KL(p_old ‖ p_new).

    python benchmarks/equivalence.py --out benchmarks/results/equivalence.json --figure docs/equivalence.svg

A perceptron learns scikit-learn's digits 0 to 4; δ leads away from it, at random or to where it learns the digits 5 to
9. On the old inputs the ratio of the two goes to 1 as δ goes to 0, F being the exact Fisher on them. On others it goes
elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import holdfast
from holdfast.report.canvas import COLORS, picture, plain

SIZES = [10 ** (-exponent / 2) for exponent in range(8, -1, -1)]  # |δ| / |μ|, from 1e-4 to 1
WAYS = ("at random", "to the new task")


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 300) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()
    return model


def measured(seed: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16), torch.tensor(digits.target)
    old, new = x[y < 5], x[y >= 5]
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).double()
    trained(model, old, y[y < 5])
    fisher = holdfast.dense_fisher(model, [(old, y[y < 5])], holdfast.categorical, targets="expected")
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    probes = {rank: holdfast.gaussian_probes([old], rank=rank) for rank in (30, 1)}
    sources = {"old inputs": old, "new inputs": new, "noise in [0, 1]": torch.rand(len(old), 64, dtype=torch.float64)}
    generator = torch.Generator().manual_seed(seed)
    sources |= {f"probes, rank {rank}": each.draw(5000, generator).double() for rank, each in probes.items()}

    there = trained(copy.deepcopy(model), new, y[y >= 5])
    ways = dict(
        zip(WAYS, ({n: torch.randn_like(m) for n, m in posterior.mean.items()}, posterior.delta(there)), strict=True)
    )
    length = _norm(posterior.mean)
    rows = []
    for way, direction in ways.items():
        for size in SIZES:
            moved = copy.deepcopy(model)
            with torch.no_grad():
                for name, parameter in moved.named_parameters():
                    parameter += size * length / _norm(direction) * direction[name]
                quadratic = float(holdfast.penalty(moved, posterior))
                for source, inputs in sources.items():
                    loss = holdfast.distillation_loss(model(inputs), moved(inputs), holdfast.categorical)
                    ratio = len(old) * float(loss) / quadratic
                    rows.append({"seed": seed, "way": way, "size": size, "source": source, "ratio": ratio})
    return rows


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def mean_ratio(runs: list[dict[str, Any]], way: str, source: str, size: float) -> float:
    """Over seeds, of the logarithm: half and double are equally far from 1."""
    found = [run["ratio"] for run in runs if (run["way"], run["source"], run["size"]) == (way, source, size)]
    return math.exp(statistics.fmean(math.log(ratio) for ratio in found))


def table(runs: list[dict[str, Any]]) -> str:
    sources = list(dict.fromkeys(run["source"] for run in runs))
    lines = [f"| δ, and its length against the weights' | {' | '.join(sources)} |", "|---|" + "---|" * len(sources)]
    for way in WAYS:
        for size in SIZES[::2]:
            cells = [f"{mean_ratio(runs, way, source, size):.4g}" for source in sources]
            lines.append(f"| {way}, {size:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def drawn(runs: list[dict[str, Any]]) -> str:
    sources = list(dict.fromkeys(run["source"] for run in runs))

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, way in zip(axes, WAYS, strict=True):
            for color, source in zip((COLORS[7], *COLORS[1:]), sources, strict=False):
                values = [mean_ratio(runs, way, source, size) for size in SIZES]
                axis.plot(SIZES, values, marker="o", markersize=4, color=color, label=source)
            axis.axhline(1, color=COLORS[0], linewidth=0.8)
            for scale, ticks in ((axis.xaxis, SIZES[::2]), (axis.yaxis, (1, 1.5, 2, 3, 4, 6))):
                getattr(axis, f"set_{scale.axis_name}scale")("log")
                scale.set_ticks(ticks)
                scale.set_ticks([], minor=True)
                scale.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_title(f"δ {way}", loc="left", fontsize=11)
            plain(axis, "|δ| / |μ|", "N · E KL / ½ δᵀFδ")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=5, frameon=False)
        figure.tight_layout(rect=(0, 0.1, 1, 1))

    about = "The ratio of the divergence of answers to the quadratic, by the length of δ, on old, new and drawn inputs"
    return picture(draw, (10, 4.2), about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--figure", type=Path, help="draw them")
    options = parser.parse_args()
    runs = [row for seed in range(options.seeds) for row in measured(seed)]
    print(table(runs))
    results = {
        "torch": torch.__version__, "python": platform.python_version(), "holdfast": holdfast.__version__,
        "date": date.today().isoformat(), "seeds": options.seeds, "runs": runs,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    if options.figure:
        options.figure.write_text(drawn(runs) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
