"""What the pull of a Kronecker precision costs at every step of training, and that it does not grow with tasks.

    python benchmarks/kronecker_pull.py --out benchmarks/results/kronecker-pull-cpu.json          # perceptrons
    python benchmarks/kronecker_pull.py --models gpt-large --out benchmarks/results/kronecker-pull-h200.json

A step is a forward and a backward pass and AdamW; the pull is what a hold adds to it. Interleaved, medians.
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
from pathlib import Path
from typing import Any

import torch
from models import GPT, images, mlp, sequences
from torch import nn

import holdfast


@dataclass(frozen=True)
class Setting:
    """A model, its data, and how many tasks it is held to."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    likelihood: holdfast.Likelihood
    tasks: tuple[int, ...]
    autocast: bool = False


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


SETTINGS = {
    "mlp-small": Setting(small, lambda: images(128, 784), holdfast.categorical, (1, 50)),
    "mlp": Setting(mlp, lambda: images(128, 784), holdfast.categorical, (1, 50)),
    "gpt-large": Setting(
        lambda: GPT(12, 768, 50257, 512), lambda: sequences(16, 512, 50257), holdfast.tokens(shift=True), (1, 3), True
    ),
}


def measured(name: str, rounds: int, device: str) -> dict[str, Any]:
    setting = SETTINGS[name]
    torch.manual_seed(0)
    model = setting.make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device != "cpu", weight_decay=0.0)
    x, y = (part.to(device) for part in setting.batch())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=setting.autocast):
            loss = setting.likelihood.nll(model(x), y).mean()
        loss.backward()
        optimizer.step()

    posterior = holdfast.prior(model)
    terms, kept = {}, {}
    for task in range(1, max(setting.tasks) + 1):
        data = [tuple(part.to(device) for part in setting.batch()) for _ in range(2)]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=setting.autocast):
            fisher = holdfast.kronecker_fisher(model, data, setting.likelihood, targets="sampled")
        posterior = holdfast.consolidate(posterior, model, fisher)
        del fisher
        if task in setting.tasks:
            terms[task] = holdfast.Quadratic(posterior)
            kept[task] = sum(t.numel() * t.element_size() for t in posterior.precision.tensors.values())
    step()
    ours = {id(parameter) for parameter in model.parameters()}
    runs: dict[str, Callable[[], Any]] = {"step": step}
    for task, term in terms.items():
        runs[f"pull, task {task}"] = lambda term=term: term.add_gradient_(model, 1e-12, ours)
    times: dict[str, list[float]] = {each: [] for each in runs}
    for turn in range(rounds + 2):
        for each, run in runs.items():
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                run()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn >= 2:
                times[each].append((time.perf_counter() - start) / 5)
    medians = {each: statistics.median(spent) for each, spent in times.items()}
    return {
        "model": name, "parameters": sum(p.numel() for p in model.parameters()), "batch": len(x), "rounds": rounds,
        "seconds": medians, "ratio_to_step": {each: value / medians["step"] for each, value in medians.items()},
        "precision_bytes": kept,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp-small", "mlp"], choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    results = {
        "device": name, "torch": torch.__version__, "python": platform.python_version(),
        "holdfast": holdfast.__version__, "date": date.today().isoformat(),
        "runs": [measured(model, options.rounds, options.device) for model in options.models],
    }  # fmt: skip
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
