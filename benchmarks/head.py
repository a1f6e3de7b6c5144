"""Split MNIST with a linear head on random features: five tasks of two digits in turn, against all data at once.

    python benchmarks/head.py --data FOLDER --out benchmarks/results/head-cpu.json

FOLDER, or $HOLDFAST_DATA, has the four gzipped IDX files of MNIST. Pixels are divided by 255. Prior and noise are
chosen by the evidence of the training data; the test images serve for the accuracies alone. A seed draws the features.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import holdfast

TASKS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
# Class-incremental: which of the ten digits? Domain-incremental: the first or the second of its task's two?
SCENARIOS: dict[str, Callable[[Tensor], Tensor]] = {"class": lambda digit: digit, "domain": lambda digit: digit % 2}


def mnist(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images (N, 784) between 0 and 1, and the digits they show."""

    def read(name: str, header: int) -> Tensor:
        with gzip.open(folder / f"{part}-{name}-ubyte.gz") as file:
            return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)

    return read("images-idx3", 16).view(-1, 784).float() / 255, read("labels-idx1", 8).long()


def measured(scenario: str, seed: int, features: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Any:
    label = SCENARIOS[scenario]
    empty = holdfast.linear_head(holdfast.random_features(784, features, seed=seed))
    (images, digits), (test_images, test_digits) = train, test

    def accuracy(head: holdfast.LinearHead) -> float:
        return 100 * float((head.classify(test_images) == label(test_digits)).double().mean())

    start = time.perf_counter()
    head, after = empty, []
    for task in TASKS:
        mine = torch.isin(digits, torch.tensor(task))
        head = head.updated([(images[mine], label(digits[mine]))])
        after.append(head)
    sums = time.perf_counter() - start
    by_evidence = head.tuned()
    tuned = time.perf_counter() - start - sums
    joint = empty.updated([(images, label(digits))])
    ridge = by_evidence.prior, by_evidence.noise  # what float32 has the digits for
    half = empty.to(dtype=torch.float32).updated([(images, label(digits))]).with_prior(*ridge)
    with tempfile.TemporaryDirectory() as folder:
        head.save(Path(folder) / "head.safetensors")
        size = (Path(folder) / "head.safetensors").stat().st_size

    def apart(head: holdfast.LinearHead, other: holdfast.LinearHead) -> float:
        return float((head.mean - other.mean).norm() / other.mean.norm())

    return {
        "scenario": scenario, "seed": seed, "features": features, "ridge": head.prior * head.noise,
        "ridge_by_evidence": by_evidence.prior * by_evidence.noise,
        "accuracy": {
            "frozen after the first task": accuracy(after[0]),
            "in turn": accuracy(head),
            "joint": accuracy(joint),
            "in turn, ridge by the evidence": accuracy(by_evidence),
        },
        "weights_apart": apart(head, joint),
        "evidence_apart": float((head.log_evidence() - joint.log_evidence()).abs() / joint.log_evidence().abs()),
        "weights_apart_float32": apart(half, joint.with_prior(*ridge)),
        "bytes": size, "seconds": sums, "seconds_tuned": tuned,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HOLDFAST_DATA"), help="the folder with MNIST")
    parser.add_argument("--features", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.data is None:
        parser.error("say where MNIST is: --data FOLDER, or $HOLDFAST_DATA")
    train, test = mnist(Path(options.data), "train"), mnist(Path(options.data), "t10k")
    results = {
        "device": f"CPU, {torch.get_num_threads()} threads", "machine": platform.machine(), "torch": torch.__version__,
        "python": platform.python_version(), "holdfast": holdfast.__version__, "date": date.today().isoformat(),
        "runs": [],
    }  # fmt: skip
    for scenario in SCENARIOS:
        for seed in range(options.seeds):
            found = measured(scenario, seed, options.features, train, test)
            results["runs"].append(found)
            shown = ", ".join(f"{name} {value:.2f}" for name, value in found["accuracy"].items())
            print(
                f"{scenario}-incremental, seed {seed}: {shown}; weights apart {found['weights_apart']:.1e} "
                f"(float32 {found['weights_apart_float32']:.1e}), {found['seconds']:.0f} s",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
