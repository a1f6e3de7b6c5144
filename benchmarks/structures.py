"""What the structure of Λ is worth: permuted MNIST, one task after another, each structure at strength 1 and its best.

    python benchmarks/structures.py --data FOLDER --out benchmarks/results/structures-h200.json

FOLDER has the four MNIST files, gzipped (or is named by $HOLDFAST_DATA). A perceptron with two hidden layers of 100 is
trained with Adam, a cosine schedule and cross-entropy, the same for all. The best strength is the one with the highest
mean accuracy on validation data, over the first tasks of a sequence that is not used again, with the last 10,000
training images held out. Fine-tuning, frozen after the first task, and joint training are the controls.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn

import holdfast
from holdfast.bench.data import mnist
from holdfast.bench.networks import perceptron
from holdfast.bench.streams import held_out, permuted
from holdfast.bench.tasks import Task, joined
from holdfast.bench.training import Trainer, Training

WIDTH, BATCH = 100, 256
STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True)
class Job:
    """One run: a method at a strength, on a seed's sequence of tasks."""

    method: str
    strength: float
    seed: int
    tasks: int
    epochs: int
    validating: bool
    lr: float = 1e-3
    every: int = 1
    rotate: bool = False


class Tasks:
    """Permuted MNIST: the pixels in a new order for every task."""

    def __init__(self, folder: str, device: str, seed: int, validating: bool, count: int) -> None:
        images = mnist(folder)
        images = held_out(images, 10000) if validating else images
        parts = {name: getattr(images, name).to(device) for name in ("train_x", "train_y", "test_x", "test_y")}
        self.tasks = permuted(replace(images, **parts), count, seed)

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        return self.tasks[task].train.x, self.tasks[task].train.y

    def accuracy(self, model: nn.Module, task: int) -> float:
        test = self.tasks[task].test
        with torch.no_grad():
            right = model(test.x).argmax(1) == test.y
        return 100 * float(right.float().mean())


def train(model: nn.Module, task: Task, job: Job, posterior: Any, trainer: Trainer) -> float:
    """Train on one task, held to the posterior; returns the seconds."""
    start = time.perf_counter()
    rotate = job.rotate and bool(posterior.precision.shapes)
    trainer.fit(model, task, lambda optimizer: holdfast.hold(
        optimizer, model, posterior, num_data=len(task.train), strength=job.strength, every=job.every, rotate=rotate
    ))  # fmt: skip
    return time.perf_counter() - start


def objective(model: nn.Module, x: Tensor, y: Tensor, posterior: Any, strength: float) -> float:
    """What was minimized, over all of the task's data: nll.mean() + strength · penalty / N."""
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
        return float(loss + strength * holdfast.penalty(model, posterior) / len(y))


def batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return list(zip(x.split(1000), y.split(1000), strict=True))  # type: ignore[return-value]


# A method's way from a posterior, a model and its last task's data to the next posterior.
Step = Callable[[Any, nn.Module, Any], Any]


def held(fisher: Callable[..., holdfast.Precision], exact: bool = False) -> Step:
    def step(posterior: Any, model: nn.Module, data: Any) -> Any:
        found = fisher(model, data, holdfast.categorical, targets="expected")
        return holdfast.consolidate(posterior, model, found, exact=exact)

    return step


def nearest(posterior: Any, model: nn.Module, data: Any) -> Any:
    """Kronecker, one term: the product nearest to the sum."""
    after = held(holdfast.kronecker_fisher, exact=True)(posterior, model, data)
    return replace(after, precision=after.precision.nearest())


def projected(posterior: Any, model: nn.Module, data: Any) -> Any:
    """The sum's own diagonal in the eigenvectors of the merged factors."""
    kronecker = holdfast.kronecker_fisher(model, data, holdfast.categorical, targets="expected")
    return _corrected(posterior, model, kronecker, kronecker.rotated())


def corrected(posterior: Any, model: nn.Module, data: Any) -> Any:
    """The same with the eigenvalues corrected: the data's own diagonal in that basis (EKFAC)."""
    kronecker = holdfast.kronecker_fisher(model, data, holdfast.categorical, targets="expected")
    return _corrected(posterior, model, kronecker, None, data)


_bases: dict[int, Any] = {}  # the merged factors that bases come from, by the process's one posterior


def _corrected(posterior: Any, model: nn.Module, new: Any, entries: Any, data: Any = None) -> Any:
    known = posterior.precision
    factors = new if not known.shapes else (_bases[0] + new).merged()
    _bases[0] = factors
    bases = {layer: basis for layer, (basis, _) in factors.rotated().layers.items()}
    if entries is None:
        turned = nn.Sequential(*(
            Turned(part, basis) if isinstance(part, nn.Linear) else part for part, basis in _along(model, bases)
        ))  # fmt: skip
        found = holdfast.diagonal_fisher(turned, data, holdfast.categorical, targets="expected")
        mine = [value for name, value in found.entries.items()]
        layers = {
            layer: (basis, value.double().unsqueeze(0))
            for (layer, basis), value in zip(bases.items(), mine, strict=True)
        }
        entries = holdfast.Rotated(layers, new.sources)
    entries = entries.turned(bases)
    if known.shapes:
        old = known.turned(bases)
        layers = {layer: (basis, entries.layers[layer][1] + old.layers[layer][1]) for layer, basis in bases.items()}
        entries = holdfast.Rotated(layers, known.sources + new.sources)
    mean = {name: value.detach().clone() for name, value in model.named_parameters()}
    return holdfast.Posterior(mean, entries.to(dtype=torch.float32))


def _along(model: nn.Module, bases: Any) -> Iterator[tuple[nn.Module, Any]]:
    each = iter(bases.values())
    return ((part, next(each) if isinstance(part, nn.Linear) else None) for part in model)


class Turned(nn.Module):
    """A linear layer by its matrix in another basis, so that a diagonal Fisher is the diagonal there."""

    def __init__(self, linear: nn.Linear, basis: Any) -> None:
        super().__init__()
        matrix = torch.cat([linear.weight, linear.bias.unsqueeze(1)], 1).detach()
        self.outputs, self.inputs = basis.outputs[0].to(matrix), basis.inputs[0].to(matrix)
        self.turned = nn.Parameter(self.outputs.T @ matrix @ self.inputs)

    def forward(self, x: Tensor) -> Tensor:
        with_one = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        return F.linear(with_one @ self.inputs, self.turned) @ self.outputs.T


def _lowrank(*arguments: Any, **options: Any) -> holdfast.Precision:
    return holdfast.lowrank_fisher(*arguments, **options)


METHODS: dict[str, Step | None] = {
    "fine-tuning": None,
    "frozen after task 1": None,
    "joint, all data kept": None,
    "diagonal": held(holdfast.diagonal_fisher),
    **{
        f"low rank, {rank}": held(functools.partial(_lowrank, rank=rank)) for rank in (8, 32, 128)
    },
    "low rank, 32, of 32 sums a batch": held(functools.partial(_lowrank, rank=32, rows=32)),
    "Kronecker, exact sum": held(holdfast.kronecker_fisher, exact=True),
    "Kronecker, merged": held(holdfast.kronecker_fisher),
    "Kronecker, nearest": nearest,
    "Kronecker, the sum's diagonal in the merged basis": projected,
    "Kronecker, eigenvalues corrected": corrected,
    "dense but the first layer, Kronecker there": held(
        functools.partial(
            holdfast.mixed_fisher,
            structures={"0.*": holdfast.kronecker_fisher, "*": holdfast.dense_fisher},
        )
    ),
}  # fmt: skip


def run(job: Job, folder: str, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    _bases.clear()
    tasks = Tasks(folder, device, job.seed, job.validating, job.tasks)
    model = perceptron(784, (WIDTH, WIDTH), 10).to(device)
    training = Training(epochs=job.epochs, batch_size=BATCH, lr=job.lr, schedule="cosine")
    trainer = Trainer(training, job.seed, recorded=job.every == 1)  # a pull used again is not the same at every step
    posterior = holdfast.prior(model)
    step = METHODS[job.method]
    table, objectives, seconds, estimating = [], [], 0.0, 0.0
    if job.method.startswith("joint"):
        seconds = train(model, joined(tasks.tasks), job, posterior, trainer)
        table = [[tasks.accuracy(model, task) for task in range(job.tasks)]]
    else:
        for task in range(job.tasks):
            x, y = tasks.train(task)
            if task == 0 or not job.method.startswith("frozen"):
                seconds += train(model, tasks.tasks[task], job, posterior, trainer)
                objectives.append(objective(model, x, y, posterior, job.strength))
            if step is not None and task + 1 < job.tasks:
                start = time.perf_counter()
                posterior = step(posterior, model, batches(x, y))
                estimating += time.perf_counter() - start
            table.append([tasks.accuracy(model, other) for other in range(task + 1)])
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    kept = sum(tensor.numel() * tensor.element_size() for tensor in posterior.precision.tensors.values())
    return {
        "method": job.method, "strength": job.strength, "seed": job.seed, "tasks": job.tasks, "epochs": job.epochs,
        "device": where,
        "lr": job.lr, "every": job.every, "rotate": job.rotate, "objectives": objectives,
        "validating": job.validating, "accuracy": sum(table[-1]) / len(table[-1]), "table": table,
        "precision_bytes": kept, "training_seconds": seconds, "fisher_seconds": estimating,
    }  # fmt: skip


def _run(arguments: tuple[Job, str, str]) -> dict[str, Any]:
    try:
        return run(*arguments)
    except Exception as error:  # one run's failure is a line of the result, not the end of all
        job = arguments[0]
        return {"method": job.method, "strength": job.strength, "seed": job.seed, "error": f"{error!r}"}


def is_held(method: str) -> bool:
    return METHODS[method] is not None


def best(results: list[dict[str, Any]], method: str) -> float:
    """The strength with the best accuracy on validation data; 1 where none was tried."""
    tried = [one for one in results if one["method"] == method and one.get("validating") and "accuracy" in one]
    return max(tried, key=lambda one: one["accuracy"], default={"strength": 1.0})["strength"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("HOLDFAST_DATA"), help="the folder with the MNIST files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=["sweep", "final", "both", "steps"], default="both")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweep-tasks", type=int, default=5)
    options = parser.parse_args()
    if not options.data:
        parser.error("give --data, a folder with the four MNIST files, or set HOLDFAST_DATA")
    results = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers) as pool:

        def done(jobs: list[Job]) -> None:
            start = time.perf_counter()
            arguments = [(job, options.data, options.device) for job in jobs]
            for count, one in enumerate(pool.imap_unordered(_run, arguments, chunksize=1), 1):
                results.append(one)
                said = one.get("error") or f"{one['accuracy']:.2f}"
                at = f"[{count}/{len(jobs)}, {time.perf_counter() - start:.0f} s]"
                print(f"{at} {one['method']}, strength {one['strength']:g}, seed {one['seed']}: {said}", flush=True)
                options.out.write_text(json.dumps(_described(options, results), indent=1) + "\n")

        if options.stage == "steps":
            ways = [(lr, 1, rotate) for lr in (1e-4, 3e-4, 1e-3, 3e-3) for rotate in (False, True)]
            ways += [(1e-3, every, False) for every in (2, 4, 8, 16)]
            done([
                Job("Kronecker, merged", 1.0, seed, options.tasks, options.epochs, False, *way)
                for seed in range(options.seeds) for way in ways
            ])  # fmt: skip
            print(steps_table(results))
            return
        if options.stage != "final":
            done([
                Job(method, strength, 100, options.sweep_tasks, options.epochs, True)
                for strength in STRENGTHS for method in options.methods if is_held(method)
            ])  # fmt: skip
        if options.stage != "sweep":
            done([
                Job(method, strength, seed, options.tasks, options.epochs, False)
                for method in options.methods for seed in range(options.seeds)
                for strength in (sorted({1.0, best(results, method)}) if is_held(method) else [0.0])
            ])  # fmt: skip
    print(table(results))


def _described(options: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return {
        "device": device, "torch": torch.__version__, "date": date.today().isoformat(),
        "protocol": f"permuted MNIST, 784-{WIDTH}-{WIDTH}-10, Adam 1e-3 cosine, batch {BATCH}", "runs": results,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds, at strength 1 and at the best strength."""
    lines = [
        "| Λ | strength 1 | best strength | which | kept, MB | Fisher, s a task |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    final = [one for one in results if "accuracy" in one and not one["validating"]]
    for method in (method for method in METHODS if any(one["method"] == method for one in final)):
        mine = [one for one in final if one["method"] == method]
        chosen = best(results, method) if is_held(method) else 0.0
        cells = [method]
        for strength in (1.0, chosen):
            values = [one["accuracy"] for one in mine if one["strength"] == strength]
            cells.append(_spread(values) if values else "")
        kept = mine[0]["precision_bytes"] / 1e6
        seconds = mine[0]["fisher_seconds"] / max(1, mine[0]["tasks"] - 1)
        held_cells = [f"{chosen:g}", f"{kept:.2f}", f"{seconds:.1f}"] if is_held(method) else ["", "", ""]
        lines.append("| " + " | ".join([*cells, *held_cells]) + " |")
    return "\n".join(lines)


def sweep_table(results: list[dict[str, Any]]) -> str:
    """Accuracy on validation data over the first tasks of one sequence, for each strength tried."""
    tried = [one for one in results if "accuracy" in one and one["validating"]]
    strengths = sorted({one["strength"] for one in tried})
    lines = ["| Λ | " + " | ".join(f"{each:g}" for each in strengths) + " |", "|---|" + "---|" * len(strengths)]
    for method in METHODS:
        mine = {one["strength"]: one["accuracy"] for one in tried if one["method"] == method}
        cells = [f"{mine[each]:.2f}" if each in mine else "" for each in strengths]
        lines += [f"| {method} | {' | '.join(cells)} |"] if mine else []
    return "\n".join(lines)


def steps_table(results: list[dict[str, Any]]) -> str:
    """What ways to step end at: the objective of the later tasks, and the accuracy."""
    lines = [
        "| steps | learning rate | pull computed every | objective at the end | accuracy | s a task |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    ways = {(one["rotate"], one["lr"], one["every"]) for one in results if "accuracy" in one}
    for way in sorted(ways, key=lambda way: (way[2], way[1], way[0])):
        mine = [one for one in results if "accuracy" in one and (one["rotate"], one["lr"], one["every"]) == way]
        ends = [sum(one["objectives"][1:]) / len(one["objectives"][1:]) for one in mine]
        seconds = sum(one["training_seconds"] / one["tasks"] for one in mine) / len(mine)
        lines.append(
            f"| {'rotated' if way[0] else 'plain'} | {way[1]:g} | {way[2]} | {_spread(ends, 4)} "
            f"| {_spread([one['accuracy'] for one in mine])} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def _spread(values: list[float], digits: int = 2) -> str:
    found = torch.tensor(values)
    spread = f" ± {found.std():.{digits}f}" if len(values) > 1 else ""
    fewer = f" ({len(values)} seeds)" if len(values) == 2 and digits == 2 else " (1 seed)" if len(values) == 1 else ""
    return f"{found.mean():.{digits}f}{spread}{fewer}"


if __name__ == "__main__":
    main()
