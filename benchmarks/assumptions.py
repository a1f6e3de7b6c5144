"""The optimization view's own experiments on its assumptions (Yang 2022, §3.1 and §3.2), and as they should have been.

    python benchmarks/assumptions.py --out benchmarks/results/assumptions.json

1. Taylor: a model learns task A, then task B with another true θ. The rise of A's loss against gᵀδ + ½δᵀHδ, and
   against the diagonal alone: linear regression, as he did it (float32), then logistic regression and a perceptron,
   where Taylor can fail.
2. The Hessian's ratio Σ|H_ii| / Σ|H_ij| of linear regression against n / dim, H taken on a test split of 20 %, as he
   did it, and on the data that the model was trained on.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import platform
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast
from holdfast.diagnose.taylor import SECOND_ORDER

DIMS, RATIOS = (10, 50, 100), (1, 3, 10, 30, 100, 300, 1000)
DIM = 10


def fitted(model: nn.Module, likelihood: holdfast.Likelihood, x: Tensor, y: Tensor) -> nn.Module:
    """To the optimum, with a weak ℓ₂ (1e-4) for the perceptron, which has many."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, line_search_fn="strong_wolfe")
    decay = 0.0 if isinstance(model, nn.Linear) else 1e-4

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = likelihood.nll(model(x), y).mean() + decay * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def taylor(kind: str, seed: int) -> dict[str, Any]:
    """Relative errors of the two forecasts of what learning B did to A."""
    torch.manual_seed(seed)
    linear = kind == "linear regression"
    dtype = torch.float32 if linear else torch.float64
    n = 10_000 if linear else 2_000
    likelihood = holdfast.gaussian(1.0) if linear else holdfast.bernoulli
    model = (
        nn.Linear(DIM, 1, bias=False)
        if kind != "perceptron"
        else nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, 1))
    ).to(dtype)

    def task() -> tuple[Tensor, Tensor]:
        x, truth = torch.randn(n, DIM, dtype=dtype), torch.randn(DIM, 1, dtype=dtype)
        score = x @ truth
        if linear:
            return x, score + 0.1 * torch.randn(n, 1, dtype=dtype)
        return x, torch.bernoulli(score.sigmoid())

    (x, y), (x2, y2) = task(), task()
    fitted(model, likelihood, x, y)
    moved = fitted(copy.deepcopy(model), likelihood, x2, y2)
    batches = list(zip(x.split(1000), y.split(1000), strict=True))
    (curve,) = holdfast.diagnose(model, batches, likelihood, moved=moved, directions=1).taylor.along("moved")
    true = curve.rises[-1]
    off = {name: abs(values[-1] - true) / abs(true) for name, values in curve.forecasts.items()}
    return {
        "kind": kind,
        "seed": seed,
        "rise": true,
        "taylor": off[SECOND_ORDER],
        "diagonal": off["½δᵀFδ, diagonal"],
        "believed": curve.radius("½δᵀHδ").distance,
    }


def ratio(dim: int, times: int, seed: int) -> dict[str, Any]:
    """Σ|H_ii| / Σ|H_ij| for H = XᵀX, on the 20 % split and on the 80 % that were trained on."""
    torch.manual_seed(seed)
    x = torch.randn(dim * times, dim, dtype=torch.float64)
    cut = max(1, len(x) // 5)

    def share(rows: Tensor) -> float:
        gram = (rows.T @ rows).abs()
        return float(gram.diagonal().sum() / gram.sum())

    return {"dim": dim, "times": times, "seed": seed, "split": share(x[:cut]), "training": share(x[cut:])}


def tables(found: dict[str, Any]) -> list[str]:
    """Two tables, as in docs/diagnosis.md."""
    lines = [
        f"What learning B did to A's loss, relative error of the forecast, {found['seeds']} seeds, medians "
        f"({found['date']}):",
        "",
        "| | rise, nats | gᵀδ + ½δᵀHδ | diagonal | ½δᵀHδ is believed up to, of the move |",
        "|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(run["kind"] for run in found["taylor"]):
        runs = [run for run in found["taylor"] if run["kind"] == kind]
        middle = {
            key: statistics.median(run[key] for run in runs) for key in ("rise", "taylor", "diagonal", "believed")
        }
        cells = [f"{middle['rise']:.3g}", f"{middle['taylor']:.1e}", f"{middle['diagonal']:.1e}"]
        lines.append(f"| {kind} | {' | '.join(cells)} | {middle['believed']:.3g} |")
    lines += [
        "",
        "Σ\\|H_ii\\|/Σ\\|H_ij\\| of linear regression, by n / dim; on the 20 % split, then on the data trained on:",
        "",
        f"| n / dim | {' | '.join(map(str, RATIOS))} | slope by log(n/dim), from → to |",
        "|---|" + "---|" * (len(RATIOS) + 1),
    ]
    for where, said in (("split", "20 % split"), ("training", "trained on")):
        for dim in DIMS:
            means = [
                statistics.fmean(run[where] for run in found["ratio"] if (run["dim"], run["times"]) == (dim, times))
                for times in RATIOS
            ]
            steps = [
                (b - a) / math.log(RATIOS[i + 1] / RATIOS[i]) for i, (a, b) in enumerate(itertools.pairwise(means))
            ]
            cells = " | ".join(f"{mean:.2f}" for mean in means)
            lines.append(f"| dim {dim}, {said} | {cells} | {min(steps):.3f} → {max(steps):.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.seeds)
    found = {
        "date": date.today().isoformat(),
        "device": f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "seeds": options.seeds,
        "taylor": [
            taylor(kind, seed) for kind in ("linear regression", "logistic regression", "perceptron") for seed in seeds
        ],
        "ratio": [ratio(dim, times, seed) for dim in DIMS for times in RATIOS for seed in seeds],
    }
    print("\n".join(tables(found)))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
