"""What sampling the weights buys: accuracy, likelihood, calibration, and entropy on inputs from elsewhere.

    python benchmarks/predictive.py --out benchmarks/results/predictive.json      # scikit-learn's digits
    python benchmarks/predictive.py --data --out ...                              # MNIST, against Fashion-MNIST
    python benchmarks/predictive.py --data FOLDER                                 # the same from a folder

One perceptron, 2×100, is trained to the maximum of the posterior under N(0, 1/PRIOR). It is then asked alone, and at
draws from Laplace posteriors of three structures, each under the prior of most evidence: as they are, and at the
temperature that is best on validation data. The control is the mean alone with its logits divided by a number chosen
on the same data. Variational posteriors are trained for as many epochs (`VARIATIONAL`). Outside are the test images
turned by a right angle, with their pixels shuffled, and two classes held out of training (a second network).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast.bench.data import digits, fashion_mnist, mnist
from holdfast.bench.networks import perceptron

PRIOR = 1.0  # the precision of the prior that is trained with
KNOWN = 8  # classes, where the last two are held out
SAMPLES = 32
TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4)  # of the covariance
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8)  # that logits are divided by
HELD_OUT = 1 / 6  # of what there is to train on, for validation
STRUCTURES: dict[str, Callable[..., holdfast.Precision]] = {
    "diagonal": holdfast.diagonal_fisher,
    "Kronecker": holdfast.kronecker_fisher,
    "low rank, 32": partial(holdfast.lowrank_fisher, rank=32),
}


@dataclass(frozen=True)
class Data:
    """Images in rows, to train on and to be judged by, and some that are of neither."""

    name: str
    epochs: int
    batch: int
    x: Tensor
    y: Tensor
    valid_x: Tensor
    valid_y: Tensor
    test_x: Tensor
    test_y: Tensor
    outside: dict[str, Tensor]

    def batches(self, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        rows = torch.randperm(len(self.y), generator=generator).to(self.y.device).split(self.batch)
        return [(self.x[each], self.y[each]) for each in rows]

    def known(self) -> Data:
        """The first classes alone, and the others as what is outside."""
        parts = ((self.x, self.y), (self.valid_x, self.valid_y), (self.test_x, self.test_y))
        inside = [part for x, y in parts for part in (x[y < KNOWN], y[y < KNOWN])]
        return Data(
            self.name, self.epochs, self.batch, *inside, {"classes held out": self.test_x[self.test_y >= KNOWN]}
        )


def flat(x: Tensor) -> Tensor:
    return x.flatten(1).float() / 255


def data(folder: str | None, seed: int, device: str) -> Data:
    """Two thirds of the digits, drawn anew for each seed; of MNIST its own two parts."""
    generator = torch.Generator().manual_seed(seed)
    if folder is None:
        images = digits()
        x, y = torch.cat([images.train_x, images.test_x]), torch.cat([images.train_y, images.test_y])
        rows = torch.randperm(len(y), generator=generator)
        train, test = rows.split([2 * len(y) // 3, len(y) - 2 * len(y) // 3])
        parts, epochs, batch = (x[train], y[train], x[test], y[test]), 100, 64
    else:
        images = mnist(folder or None)
        parts, epochs, batch = (images.train_x, images.train_y, images.test_x, images.test_y), 10, 128
    shuffled = torch.stack([row[torch.randperm(len(row), generator=generator)] for row in flat(parts[2])])
    outside = {"turned by 90°": flat(parts[2].rot90(1, (2, 3))), "pixels shuffled": shuffled}
    if folder is not None:
        outside["Fashion-MNIST"] = flat(fashion_mnist(folder or None).test_x)
    rows = torch.randperm(len(parts[1]), generator=generator)
    valid, train = rows.split([round(HELD_OUT * len(rows)), len(rows) - round(HELD_OUT * len(rows))])
    x, y = flat(parts[0]), parts[1]
    tensors = (x[train], y[train], x[valid], y[valid], flat(parts[2]), parts[3])
    there = {name: each.to(device) for name, each in outside.items()}
    return Data(images.name, epochs, batch, *(each.to(device) for each in tensors), there)


def network(given: Data, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return perceptron(given.x.shape[1], (100, 100), int(given.y.max()) + 1).to(given.x.device)


def trained(given: Data, seed: int) -> nn.Module:
    """The maximum of the posterior: mean nll + ½ PRIOR |θ|² / N, by Adam."""
    model, generator = network(given, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs)
    for _ in range(given.epochs):
        for x, y in given.batches(generator):
            optimizer.zero_grad()
            squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            (F.cross_entropy(model(x), y) + 0.5 * PRIOR * squares / len(given.y)).backward()
            optimizer.step()
        schedule.step()
    return model


def mean_field(given: Data, seed: int) -> tuple[nn.Module, holdfast.Posterior]:
    """Bayes by backprop under the same prior, by Adam for as many epochs."""
    model, generator = network(given, seed), torch.Generator().manual_seed(seed)
    before = holdfast.prior(model, precision=PRIOR, mean=0.0)
    q = holdfast.mean_field(model, before, holdfast.categorical, num_data=len(given.y), seed=seed)
    optimizer = torch.optim.Adam(q.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs)
    for _ in range(given.epochs):
        for batch in given.batches(generator):
            optimizer.zero_grad()
            q(batch).backward()
            optimizer.step()
        schedule.step()
    return model, q.posterior()


def ivon(given: Data, seed: int) -> tuple[nn.Module, holdfast.Posterior]:
    """Natural gradients under the same prior, for as many epochs, with the settings it has by itself."""
    model, generator = network(given, seed), torch.Generator().manual_seed(seed)
    optimizer = holdfast.IVON(
        model, holdfast.prior(model, precision=PRIOR, mean=0.0), holdfast.categorical, num_data=len(given.y),
        seed=seed,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs)
    for _ in range(given.epochs):
        for x, y in given.batches(generator):
            optimizer.zero_grad()
            with optimizer.sampled():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    return model, optimizer.posterior()


# Further ways to a posterior, a pair of rows each.
VARIATIONAL: dict[str, Callable[[Data, int], tuple[nn.Module, holdfast.Posterior]]] = {
    "mean field": mean_field,
    "IVON": ivon,
}

Asked = Callable[[list[Any]], holdfast.Predictive]


def ways(given: Data, seed: int) -> list[tuple[str, dict[str, float], Asked]]:
    """What is compared: a name, the numbers that were chosen for it, and its answers to batches."""
    model = trained(given, seed)
    whole = list(zip(given.x.split(1000), given.y.split(1000), strict=True))
    with torch.no_grad():
        nll = float(F.cross_entropy(model(given.x), given.y, reduction="sum"))
    scale = best(given, {each: scaled(model, each) for each in SCALES})
    found = [
        ("the mean alone", {}, scaled(model, 1.0)),
        ("the mean alone, logits scaled", {"scale": scale}, scaled(model, scale)),
    ]
    for name, fisher in STRUCTURES.items():
        curvature = fisher(model, whole, holdfast.categorical)
        precision = holdfast.prior_precision(model, curvature, nll)
        before = holdfast.prior(model, precision=precision, mean=0.0)
        found += both(given, f"Laplace, {name}", model, holdfast.consolidate(before, model, curvature), precision)
    for name, way in VARIATIONAL.items():
        found += both(given, name, *way(given, seed), PRIOR)
    return found


def both(
    given: Data, name: str, model: nn.Module, posterior: holdfast.Posterior, precision: float
) -> list[tuple[str, dict[str, float], Asked]]:
    """Draws from the posterior, and from a colder one."""
    cold = best(given, {each: asked(model, posterior, temperature=each) for each in TEMPERATURES})
    return [
        (name, {"prior": precision}, asked(model, posterior)),
        (f"{name}, colder", {"prior": precision, "temperature": cold}, asked(model, posterior, temperature=cold)),
    ]


def best(given: Data, ways: dict[float, Asked]) -> float:
    """The one with the smallest loss on validation data."""
    return min(ways, key=lambda each: float(ways[each]([(given.valid_x, given.valid_y)]).nll().mean()))


def asked(model: nn.Module, posterior: holdfast.Posterior, **how: Any) -> Asked:
    how = {"samples": SAMPLES, **how}
    return lambda batches: holdfast.predictive(model, posterior, batches, holdfast.categorical, **how)


def scaled(model: nn.Module, scale: float) -> Asked:
    """The model at the mean, its logits divided by a number."""
    point = holdfast.prior(model, precision=1.0)

    def forward(run: nn.Module, batch: Any) -> Tensor:
        return run(batch[0] if isinstance(batch, (tuple, list)) else batch) / scale

    return asked(model, point, samples=1, temperature=1e-12, forward=forward)


def measured(folder: str | None, seed: int, device: str) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    whole = data(folder, seed, device)
    for given in (whole, whole.known()):
        for name, chosen, answer in ways(given, seed):
            inside = answer([(given.test_x, given.test_y)])
            row = found.setdefault(name, {"seed": seed, "way": name, "auroc": {}})
            if given is whole:
                told = holdfast.calibration(inside.probabilities, given.test_y)
                row |= {"accuracy": told.accuracy, "nll": told.nll, "error": told.error, **chosen}
            for where, x in given.outside.items():
                outside = answer([x])
                row["auroc"][where] = holdfast.auroc(inside.entropy(), outside.entropy())
    return list(found.values())


def table(runs: list[dict[str, Any]]) -> str:
    places = list(runs[0]["auroc"])
    lines = [
        f"| | chosen | accuracy, % | nats | ECE, % | {' | '.join(f'AUROC, {where}' for where in places)} |",
        "|---|---|---|---|---|" + "---|" * len(places),
    ]
    for way in dict.fromkeys(run["way"] for run in runs):
        mine = [run for run in runs if run["way"] == way]
        chosen = [key for key in ("scale", "prior", "temperature") if key in mine[0]]
        cells = [
            ", ".join(f"{key} {statistics.median(run[key] for run in mine):.2g}" for key in chosen),
            said([100 * run["accuracy"] for run in mine], 2),
            said([run["nll"] for run in mine], 3),
            said([100 * run["error"] for run in mine], 2),
            *(said([run["auroc"][where] for run in mine], 3) for where in places),
        ]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def said(values: list[float], digits: int) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {spread:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--data", nargs="?", const="", help="MNIST and Fashion-MNIST, from a folder if one is given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    start = time.perf_counter()
    for seed in range(options.seeds):
        print(f"seed {seed}", flush=True)
        runs += measured(options.data, seed, options.device)
    found = {
        "date": date.today().isoformat(), "torch": torch.__version__,
        "device": f"{platform.machine()} CPU" if options.device == "cpu" else torch.cuda.get_device_name(),
        "holdfast": holdfast.__version__, "data": "digits" if options.data is None else "mnist",
        "seconds": time.perf_counter() - start, "samples": SAMPLES, "prior": PRIOR, "runs": runs,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(
        f"{found['data']}, {options.seeds} seeds, {found['seconds']:.0f} s ({found['date']}):", table(runs), sep="\n\n"
    )


if __name__ == "__main__":
    main()
