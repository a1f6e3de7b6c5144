"""What a hold adds to a step of training, as a ratio to the plain step: by the weights, by the answers to probes.

    python benchmarks/hold.py --threads 1 --out benchmarks/results/hold-cpu.json
    python benchmarks/hold.py --models gpt-large mlp --rounds 10 --out benchmarks/results/hold-h200.json      # on a GPU

A step is a forward and a backward pass on a batch and Adam or SGD (on a GPU: fused); the others are that step, held.
"in the loss" is the control, the penalty as a term to differentiate; a copy of the bytes that the pull of a diagonal
must move is its floor. The term of answers runs the model forward twice and backward once on 128 probes of rank 100:
about one more step. All run interleaved in one process; a ratio is the median over rounds of (time / the plain step's
time in that round).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from models import GPT, cnn, images, mlp, sequences, wait
from torch import Tensor, nn

import holdfast


@dataclass(frozen=True)
class Setting:
    """A model, a batch of its data, how many steps a round has, and whether all ways to hold are for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    batch_size: str = "128"
    steps: int = 5
    by_answers: bool = True
    autocast: bool = False


COPY = "a copy of as many bytes as a diagonal moves"
SETTINGS = {
    "mlp": Setting(mlp, lambda: images(128, 784)),
    "cnn": Setting(cnn, lambda: images(128, 3, 32, 32)),
    "gpt-large": Setting(
        lambda: GPT(12, 768, 50257, 512), lambda: sequences(16, 512, 50257), "16×512", by_answers=False, autocast=True
    ),
}


def measured(name: str, rounds: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    setting = SETTINGS[name]
    model = setting.make().to(device)
    data = [tuple(part.to(device) for part in setting.batch()) for _ in range(4)]
    x, y = data[0]
    fused = device != "cpu"
    optimizers = {
        "Adam": torch.optim.Adam(model.parameters(), lr=1e-6, fused=fused),
        "SGD": torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, fused=fused),
    }
    start = holdfast.prior(model)
    entries = {name: torch.rand_like(parameter) for name, parameter in model.named_parameters()}
    diagonal = holdfast.consolidate(start, model, holdfast.Diagonal(entries))
    ways: dict[str, dict[str, Any]] = {
        "Adam": {}, COPY: {}, "diagonal": {"posterior": diagonal}, "diagonal, in the loss": {},
        "diagonal, a step of its own": {"posterior": diagonal, "proximal": True},
        "SGD": {}, "diagonal, under SGD": {"posterior": diagonal, "proximal": False},
        "diagonal, under SGD, a step of its own": {"posterior": diagonal, "proximal": True},
    }  # fmt: skip
    if setting.by_answers:
        fisher = holdfast.kronecker_fisher(model, data, holdfast.categorical, targets="sampled")
        kronecker = holdfast.consolidate(start, model, fisher)
        answers = holdfast.distill(model, start, holdfast.gaussian_probes(data), holdfast.categorical)
        ways["Kronecker"] = {"posterior": kronecker}
        ways["Kronecker, every 10th"] = {"posterior": kronecker, "every": 10}
        ways["answers to probes"] = {"posterior": answers}
        ways["Kronecker and answers"] = {"posterior": [kronecker, answers]}

    # What a diagonal's pull has to move: θ, μ, Λ and the gradient read, the gradient written.
    source = torch.empty(10 * sum(p.numel() for p in model.parameters()), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def step(way: str) -> None:
        optimizer = optimizers[_base(way)]
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16) if setting.autocast else nullcontext():
            out = model(x)
        loss = nn.functional.cross_entropy(out.flatten(0, -2).float(), y.flatten())
        if way == "diagonal, in the loss":
            loss = loss + holdfast.penalty(model, diagonal) / 512
        loss.backward()
        if way == COPY:
            target.copy_(source)
        optimizer.step()

    times: dict[str, list[float]] = {each: [] for each in ways}
    for turn in range(rounds + 2):
        for each, how in ways.items():
            every = how.get("every", 0)
            held: AbstractContextManager[Any] = (
                holdfast.hold(optimizers[_base(each)], model, num_data=512, **how) if how else nullcontext()
            )
            with held:
                if not every:
                    step(each)
                wait(device)
                begun = time.perf_counter()
                for _ in range(every or setting.steps):
                    step(each)
                wait(device)
                if turn >= 2:
                    times[each].append((time.perf_counter() - begun) / (every or setting.steps))
    ratios = {
        each: [mine / plain for mine, plain in zip(spent, times[_base(each)], strict=True)]
        for each, spent in times.items()
    }
    return {
        "model": name, "parameters": sum(p.numel() for p in model.parameters()), "batch": setting.batch_size,
        "rounds": rounds, "seconds": {each: statistics.median(spent) for each, spent in times.items()},
        "ratio_to_step": {each: statistics.median(found) for each, found in ratios.items()},
        "quartiles": {each: statistics.quantiles(found, n=4)[::2] for each, found in ratios.items()},
    }  # fmt: skip


def _base(way: str) -> str:
    """The plain step that a way is a ratio to."""
    return "SGD" if "SGD" in way else "Adam"


def table(runs: list[dict[str, Any]], device: str) -> str:
    columns = [f"{run['model']}, {run['parameters'] / 1e6:.1f} M, batch {run['batch']}" for run in runs]
    lines = [f"| a held step, of a plain one ({device}) | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for way in dict.fromkeys(each for run in runs for each in run["ratio_to_step"] if each != _base(each)):
        lines.append(f"| {way} | {' | '.join(_cell(run, way) for run in runs)} |")
    return "\n".join(lines)


def _cell(run: dict[str, Any], way: str) -> str:
    """The median, and in brackets the quartiles."""
    if way not in run["ratio_to_step"]:
        return "–"
    low, high = run["quartiles"][way]
    return f"{run['ratio_to_step'][way]:.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp"], choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {threads} thread{'s' * (threads > 1)}"
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
