"""F against F′ on permuted MNIST: the optimization view's third experiment (Yang 2022, §3.3), and as it should be.

    python benchmarks/second_derivatives.py --out benchmarks/results/second-derivatives.json

A perceptron learns three orders of the pixels in turn under ½ Σ λ Λᵢ δᵢ², for Λ the square of the total gradient (F,
to the letter), squares of the gradients of batches (F, as commonly coded), the observed and the exact Fisher, the
absolute row sums |H·1| that his program has in place of the second derivatives, and the second derivatives themselves,
exact, negative ones at zero. Each at every strength; the best one is chosen on 10,000 training images held out. Piece-
wise linear networks have the exact Fisher for F′, so a tanh network shows what is different.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast
from holdfast.bench import Task, Trainer, Training, batched, diagonal
from holdfast.bench.data import mnist
from holdfast.bench.streams import held_out, permuted
from holdfast.bench.training import Attach

TASKS, HELD_OUT = 3, 10_000
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
NETWORKS: dict[str, type[nn.Module]] = {"ReLU": nn.ReLU, "tanh": nn.Tanh}
TRAINING = Training(epochs=3, batch_size=256, schedule="cosine")

Rule = Callable[[nn.Module, Task, Trainer], holdfast.Precision]


def network(name: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    act = NETWORKS[name]
    return nn.Sequential(nn.Linear(784, 100), act(), nn.Linear(100, 100), act(), nn.Linear(100, 10))


def second_derivatives(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """∂²L/∂θᵢ² of the summed cross-entropy of a perceptron, exact.

    A weight meets its output hᵢ = Σⱼ Wᵢⱼ aⱼ + bᵢ in a straight line, so it is aⱼ² ∂²L/∂hᵢ². The Hessian in h goes down
    from layer to layer, example by example: through W, and through the activation φ as φ′Hφ′ + diag(φ″ ∂L/∂a).
    """
    layers = [(name, module) for name, module in model.named_children() if isinstance(module, nn.Linear)]
    acts = [module for module in model if not isinstance(module, nn.Linear)]
    inputs, found = [x], {}
    for (_, layer), act in zip(layers, acts, strict=False):
        inputs.append(act(layer(inputs[-1])))
    p = layers[-1][1](inputs[-1]).softmax(-1)
    hessian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    gradient = p - nn.functional.one_hot(y, p.shape[-1]).to(p.dtype)
    for depth in reversed(range(len(layers))):
        name, layer = layers[depth]
        curvature = hessian.diagonal(dim1=1, dim2=2)
        found[f"{name}.weight"], found[f"{name}.bias"] = curvature.T @ inputs[depth].square(), curvature.sum(0)
        if depth:
            a = inputs[depth]
            tanh = isinstance(acts[depth - 1], nn.Tanh)
            slope = 1 - a.square() if tanh else (a > 0).to(a.dtype)
            below = gradient @ layer.weight
            hessian = layer.weight.T @ hessian @ layer.weight
            hessian = slope.unsqueeze(2) * hessian * slope.unsqueeze(1)
            if tanh:
                hessian = hessian + torch.diag_embed(-2 * a * slope * below)
            gradient = below * slope
    return found


def require_exact() -> None:
    """Raise unless the recursion gives what differentiating twice does, on networks small enough for that."""
    for act in NETWORKS.values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), act(), nn.Linear(5, 4), act(), nn.Linear(4, 3)).double()
        x, y = torch.randn(30, 6, dtype=torch.float64), torch.randint(0, 3, (30,))
        slow = holdfast.diagonal_hessian(model, [(x, y)], holdfast.categorical).entries
        for name, found in second_derivatives(model, x, y).items():
            torch.testing.assert_close(found, slow[name])


def summed(model: nn.Module, task: Task, of_batch: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in task.train.batches(1000):
        for name, each in of_batch(x, y).items():
            total[name] += each.detach()
    return total


def as_diagonal(entries: dict[str, Tensor], task: Task, what: str) -> holdfast.Diagonal:
    source = holdfast.Source(f"{what}, {task.name}", float(len(task.train)), "example", "categorical", what)
    return holdfast.Diagonal(entries, (source,))


def total_gradient(model: nn.Module, task: Task, trainer: Trainer) -> holdfast.Precision:
    """(∂L/∂θᵢ)² of the whole data's loss: zero at an optimum."""
    params = dict(model.named_parameters())

    def gradient(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    found = summed(model, task, gradient)
    return as_diagonal({name: each.square() for name, each in found.items()}, task, "the square of the total gradient")


def row_sums(model: nn.Module, task: Task, trainer: Trainer) -> holdfast.Precision:
    """|Σⱼ H_ij|: what differentiating the gradient's sum gives, where the diagonal was meant."""
    params = dict(model.named_parameters())

    def product(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        total = torch.stack([grad.sum() for grad in grads]).sum()
        return dict(zip(params, torch.autograd.grad(total, list(params.values())), strict=True))

    found = summed(model, task, product)
    return as_diagonal({name: each.abs() for name, each in found.items()}, task, "absolute row sums of the Hessian")


@torch.no_grad()
def clamped(model: nn.Module, task: Task, trainer: Trainer) -> holdfast.Precision:
    """F′, with negative entries at zero."""
    assert isinstance(model, nn.Sequential)
    found = summed(model, task, lambda x, y: second_derivatives(model, x, y))
    return as_diagonal({name: each.clamp(min=0) for name, each in found.items()}, task, "the Hessian's diagonal")


RULES: dict[str, Rule] = {
    "(∂L/∂θ)²": total_gradient,
    "squares of batches": batched(),
    "observed Fisher": diagonal("observed"),
    "exact Fisher": diagonal("expected"),
    "\\|H·1\\|": row_sums,
    "F′, exact": clamped,
}


def measured(name: str, seed: int) -> list[dict[str, Any]]:
    """All rules at all strengths from one first task, and no hold at all."""
    images = mnist()
    tasks = permuted(held_out(images, HELD_OUT), TASKS, seed)
    tests = [task.test for task in permuted(images, TASKS, seed)]
    start = network(name, seed)
    Trainer(TRAINING, seed).fit(start, tasks[0])
    found = []

    def learned(rule: Rule | None, first: holdfast.Precision | None, strength: float) -> dict[str, Any]:
        model, trainer = copy.deepcopy(start), Trainer(TRAINING, seed)
        trainer.fits = 1
        known = None if first is None else holdfast.consolidate(holdfast.prior(model), model, first)
        for task in tasks[1:]:
            trainer.fit(model, task, held(model, known, len(task.train), strength))
            if rule is not None and known is not None and task is not tasks[-1]:
                known = holdfast.consolidate(known, model, rule(model, task, trainer))
        validation = [right(model, task.test.x, task.test.y) for task in tasks]
        return {
            "network": name, "seed": seed, "strength": strength, "validation": statistics.fmean(validation),
            "test": [right(model, test.x, test.y) for test in tests],
        }  # fmt: skip

    found.append({"rule": "none", **learned(None, None, 0.0)})
    for kind, rule in RULES.items():
        first = rule(start, tasks[0], Trainer(TRAINING, seed))
        mass = sum(float(each.double().sum()) for each in first.diagonal().values())
        for strength in STRENGTHS:
            found.append({"rule": kind, "mass": mass, **learned(rule, first, strength)})
            print(name, seed, kind, f"{mass:.3g}", strength, f"{statistics.fmean(found[-1]['test']):.2f}", flush=True)
    return found


def held(model: nn.Module, known: holdfast.Posterior | None, count: int, strength: float) -> Attach | None:
    if known is None:
        return None
    return lambda optimizer: holdfast.hold(optimizer, model, known, num_data=count, strength=strength)


@torch.no_grad()
def right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * float((model(x).argmax(-1) == y).double().mean())


def tables(found: dict[str, Any]) -> list[str]:
    """As in docs/diagnosis.md."""
    runs, lines = found["runs"], []
    seeds = len({run["seed"] for run in runs})
    lines += [
        f"Permuted MNIST, {TASKS} tasks, 784-100-100-10, 3 epochs each; accuracy over the tasks in %, {seeds} seeds, "
        f"mean ± standard deviation ({found['date']}):",
        "",
        f"| | mass, of the exact Fisher's | {' | '.join(f'{each:g}' for each in STRENGTHS)} | best on validation |",
        "|---|---|" + "---|" * (len(STRENGTHS) + 1),
    ]
    for name in NETWORKS:
        mine = [run for run in runs if run["network"] == name]
        if not mine:
            continue
        lines.append(f"| {name}, no hold | | {' | '.join('' for _ in STRENGTHS)} | {_said(_of(mine, 'none', 0.0))} |")
        exact = {run["seed"]: run["mass"] for run in mine if run["rule"] == "exact Fisher"}
        for rule in RULES:
            share = [run["mass"] / exact[run["seed"]] for run in mine if run["rule"] == rule]
            cells = [f"{statistics.fmean(_of(mine, rule, strength)):.1f}" for strength in STRENGTHS]
            best = [
                max((run for run in mine if (run["rule"], run["seed"]) == (rule, seed)), key=lambda r: r["validation"])
                for seed in sorted(exact)
            ]
            chosen = ", ".join(f"{each:g}" for each in sorted({run["strength"] for run in best}))
            cells.append(f"{_said([statistics.fmean(run['test']) for run in best])} (at {chosen})")
            lines.append(f"| {name}, {rule} | {statistics.median(share):.2g} | {' | '.join(cells)} |")
    return lines


def _of(runs: list[dict[str, Any]], rule: str, strength: float) -> list[float]:
    return [statistics.fmean(run["test"]) for run in runs if (run["rule"], run["strength"]) == (rule, strength)]


def _said(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON; networks and seeds there are kept")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    require_exact()
    kept: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        kept = json.loads(options.out.read_text(encoding="utf-8"))["runs"]
    found: dict[str, Any] = {"runs": kept}
    for seed in range(options.seeds):
        for name in NETWORKS:
            if not any((run["network"], run["seed"]) == (name, seed) for run in kept):
                kept += measured(name, seed)
            found = {
                "date": date.today().isoformat(), "device": f"{platform.machine()} CPU", "torch": torch.__version__,
                "holdfast": holdfast.__version__, "runs": kept,
            }  # fmt: skip
            if options.out:
                options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print("\n".join(tables(found)))


if __name__ == "__main__":
    main()
