"""Weights removed by what a posterior says of them: accuracy against the fraction that is gone, without training on.

    python benchmarks/pruning.py --out benchmarks/results/pruning.json            # scikit-learn's digits
    python benchmarks/pruning.py --data --out ...                                 # MNIST, from a folder if one is given

One perceptron, 2×100, as in benchmarks/predictive.py, with its diagonal Laplace posterior under the prior of most
evidence, and others with variational posteriors. Weights, and no biases, go by |μ|/σ, by the density at zero, by their
size, and at random. Published, of variational posteriors on MNIST: no loss at 75 % and little at 95 % by |μ|/σ
(Blundell et al. 2015), and 97 % to 95 % with 90 % removed by the density at zero (Romijnders).
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from predictive import VARIATIONAL, Data, data, said, trained
from torch import Tensor, nn

import holdfast

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)


def by_size(posterior: holdfast.Posterior) -> dict[str, Tensor]:
    return {name: mean.abs() for name, mean in posterior.mean.items()}


def at_random(posterior: holdfast.Posterior) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(mean.shape, generator=generator) for name, mean in posterior.mean.items()}


SCORES: dict[str, Callable[[holdfast.Posterior], dict[str, Tensor]]] = {
    "|μ|/σ": holdfast.signal_to_noise,
    "density at zero": holdfast.density_at_zero,
    "|μ|": by_size,
    "at random": at_random,
}


def laplace(given: Data, seed: int) -> tuple[nn.Module, holdfast.Posterior]:
    model = trained(given, seed)
    batches = list(zip(given.x.split(1000), given.y.split(1000), strict=True))
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical)
    with torch.no_grad():
        nll = float(F.cross_entropy(model(given.x), given.y, reduction="sum"))
    before = holdfast.prior(model, precision=holdfast.prior_precision(model, fisher, nll), mean=0.0)
    return model, holdfast.consolidate(before, model, fisher)


# Ways to a posterior, four rows each; the published numbers are of variational ones.
POSTERIORS: dict[str, Callable[[Data, int], tuple[nn.Module, holdfast.Posterior]]] = {
    "Laplace": laplace,
    **VARIATIONAL,
}


def measured(folder: str | None, seed: int, ways: list[str]) -> list[dict[str, Any]]:
    given, found = data(folder, seed), []
    for way in ways:
        model, posterior = POSTERIORS[way](given, seed)
        holdfast.restore_(model, posterior)
        for kind, scores in SCORES.items():
            worth = scores(posterior)
            for fraction in FRACTIONS:
                less = copy.deepcopy(model).eval()
                holdfast.pruned_(less, worth, fraction=fraction, only="*.weight")
                with torch.no_grad():
                    right = float((less(given.test_x).argmax(-1) == given.test_y).double().mean())
                found.append({"seed": seed, "posterior": way, "scores": kind, "fraction": fraction, "accuracy": right})
    return found


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        f"| removed | {' | '.join(f'{100 * fraction:g} %' for fraction in FRACTIONS)} |",
        "|---|" + "---|" * len(FRACTIONS),
    ]
    for way, kind in dict.fromkeys((run["posterior"], run["scores"]) for run in runs):
        mine = [run for run in runs if (run["posterior"], run["scores"]) == (way, kind)]
        cells = [
            said([100 * run["accuracy"] for run in mine if run["fraction"] == fraction], 1) for fraction in FRACTIONS
        ]
        lines.append(f"| {way}, {kind.replace('|', chr(92) + '|')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--data", nargs="?", const="", help="MNIST, from a folder if one is given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--posteriors", nargs="+", choices=POSTERIORS, default=list(POSTERIORS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    runs = [run for seed in range(options.seeds) for run in measured(options.data, seed, options.posteriors)]
    found = {
        "date": date.today().isoformat(), "device": f"{platform.machine()} CPU", "torch": torch.__version__,
        "holdfast": holdfast.__version__, "data": "digits" if options.data is None else "mnist",
        "seconds": time.perf_counter() - start, "runs": runs,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(f"{found['data']}, accuracy in %, {options.seeds} seeds, {found['seconds']:.0f} s ({found['date']}):")
    print("", table(runs), sep="\n")


if __name__ == "__main__":
    main()
