"""The pull in the gradients against the pull as a step of its own: what is kept, over six orders of strength.

    python benchmarks/proximal.py --out benchmarks/results/proximal.json

Five permutations of scikit-learn's digits, and its classes two at a time with outputs of their own; a 2×100 perceptron,
the exact diagonal Fisher (Adam, SGD with momentum) and Kronecker factors (SGD). Percent right over all tasks at the
end; "not finite" where training ended in numbers that are none.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.bench import Held, diagonal, kronecker, run
from holdfast.bench.protocols import PROTOCOLS

STRENGTHS = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)
TRAINING: dict[str, dict[str, Any]] = {
    "Adam 1e-3": {},
    "SGD 0.05, momentum 0.9": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9},
}
CURVATURES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "diagonal": (diagonal, tuple(TRAINING)),
    "Kronecker": (kronecker, ("SGD 0.05, momentum 0.9",)),
}


def measured(protocol: str, seed: int) -> list[dict[str, Any]]:
    found = []
    setting = PROTOCOLS[protocol]
    tasks = setting.sequence(seed)
    for curvature, (make, optimizers) in CURVATURES.items():
        for optimizer in optimizers:
            training = replace(setting.training, **TRAINING[optimizer])
            for strength in STRENGTHS:
                for proximal in (False, True):
                    method = Held(make(), strength=strength, proximal=proximal)
                    row = {
                        "protocol": protocol, "seed": seed, "curvature": curvature, "optimizer": optimizer,
                        "strength": strength, "proximal": proximal,
                    }  # fmt: skip
                    try:
                        made = run(method, tasks, lambda: setting.model(tasks), training, seed=seed)
                        row |= {"average": made.average, "newest": made.newest}
                    except holdfast.HoldfastError as error:
                        row["failed"] = f"{type(error).__name__}: {error}"
                    found.append(row)
    return found


def table(runs: list[dict[str, Any]]) -> str:
    lines = [f"| | {' | '.join(f'{each:g}' for each in STRENGTHS)} |", "|---|" + "---|" * len(STRENGTHS)]
    keys = ("protocol", "curvature", "optimizer", "proximal")
    for protocol, curvature, optimizer, proximal in dict.fromkeys(tuple(each[key] for key in keys) for each in runs):
        mine = [one for one in runs if tuple(one[key] for key in keys) == (protocol, curvature, optimizer, proximal)]
        cells = [said([one for one in mine if one["strength"] == strength]) for strength in STRENGTHS]
        way = "proximal" if proximal else "gradient"
        lines.append(f"| {protocol}, {curvature}, {optimizer}, {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def said(runs: list[dict[str, Any]]) -> str:
    lost = sum("failed" in one for one in runs)
    if lost:
        return f"not finite ({lost} of {len(runs)})"
    values = [100 * one["average"] for one in runs]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--protocols", nargs="+", default=["digits", "digits-task"])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    runs = [row for protocol in options.protocols for seed in range(options.seeds) for row in measured(protocol, seed)]
    print(table(runs))
    if options.out:
        found = {
            "date": date.today().isoformat(), "device": f"CPU, {platform.machine()}", "torch": torch.__version__,
            "holdfast": holdfast.__version__, "seconds": time.perf_counter() - start, "runs": runs,
        }  # fmt: skip
        options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
