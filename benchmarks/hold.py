"""What a hold adds to a step of training: by the weights, by the answers to probes, and both.

    python benchmarks/hold.py --out benchmarks/results/hold-cpu.json

A step is a forward and a backward pass on a batch of 128 and Adam; the others are that step, held. The term of answers
runs the model forward twice and backward once on 128 probes of rank 100, so about one more step is its price. All in
one run, interleaved; medians, as ratios to the plain step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from models import cnn, images, mlp

import holdfast

MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "cnn": (cnn, (3, 32, 32)),
}
STEPS = 5


def measured(name: str, rounds: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().to(device)
    data = [tuple(part.to(device) for part in images(128, *shape)) for _ in range(4)]
    x, y = data[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    start = holdfast.prior(model)
    diagonal = holdfast.consolidate(
        start, model, holdfast.diagonal_fisher(model, data, holdfast.categorical, targets="sampled")
    )
    kronecker = holdfast.consolidate(
        start, model, holdfast.kronecker_fisher(model, data, holdfast.categorical, targets="sampled")
    )
    probes = holdfast.gaussian_probes(data)
    ways: dict[str, list[Any]] = {
        "plain": [],
        "diagonal": [diagonal],
        "Kronecker": [kronecker],
        "answers to probes": [holdfast.distill(model, start, probes, holdfast.categorical)],
        "Kronecker and answers": [kronecker, holdfast.distill(model, start, probes, holdfast.categorical)],
    }

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    times: dict[str, list[float]] = {each: [] for each in ways}
    for turn in range(rounds + 2):
        for each, terms in ways.items():
            held: AbstractContextManager[Any] = (
                holdfast.hold(optimizer, model, terms, num_data=512) if terms else nullcontext()
            )
            with held:
                step()
                _wait(device)
                begun = time.perf_counter()
                for _ in range(STEPS):
                    step()
                _wait(device)
                if turn >= 2:
                    times[each].append((time.perf_counter() - begun) / STEPS)
    medians = {each: statistics.median(spent) for each, spent in times.items()}
    return {
        "model": name, "parameters": sum(p.numel() for p in model.parameters()), "batch": len(x), "rounds": rounds,
        "seconds": medians, "ratio_to_step": {each: value / medians["plain"] for each, value in medians.items()},
    }  # fmt: skip


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def table(runs: list[dict[str, Any]], device: str) -> str:
    columns = [each for each in runs[0]["ratio_to_step"] if each != "plain"]
    lines = [f"| a held step, of a plain one ({device}) | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for run in runs:
        title = f"{run['model']}, {run['parameters'] / 1e6:.2f} M, batch {run['batch']}"
        cells = [f"{run['ratio_to_step'][each]:.2f}" for each in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    runs = [measured(model, options.rounds, options.device) for model in options.models]
    print(table(runs, name))
    results = {
        "device": name, "torch": torch.__version__, "python": platform.python_version(),
        "holdfast": holdfast.__version__, "date": date.today().isoformat(), "runs": runs,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
