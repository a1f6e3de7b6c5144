"""What the pull of a diagonal Λ on every parameter costs, against reading and writing those bytes at all.

    python benchmarks/pull.py          # 163 million parameters on a GPU

The floor is 20 bytes a float32 parameter: θ, μ, Λ and the gradient read, the gradient written. It is measured as a
copy of as many bytes (half read, half written), in the same run. Smaller memories move fewer bytes, and each is given
as a ratio to the floor of its own; the same for the pull as a step of its own, which reads θ, μ and Λ and writes θ.
These are of a few large tensors, so that Python, which a training step hides, is not what is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import GPT

import holdfast
from holdfast.kernels import Codes, add_pull_, shrink_
from holdfast.kernels.pull import plain_pull, pull_in_pieces

_IN_A_ROW = 10  # so that the queue is kept full, as it is in training
# Bytes of θ and its gradient, of μ, of Λ; of 8 bits, the tops are 2 in 256.
_STORAGES = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "bfloat16": (torch.float32, torch.bfloat16, torch.bfloat16),
    "float32 mean, 8 bits": (torch.float32, torch.float32, torch.uint8),
    "bfloat16 mean, 8 bits": (torch.float32, torch.bfloat16, torch.uint8),
    "weights too in bfloat16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "weights too in bfloat16, 8 bits": (torch.bfloat16, torch.bfloat16, torch.uint8),
}


def measured(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median milliseconds of each, one after another in every round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 3):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_IN_A_ROW):
                run()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end) / _IN_A_ROW)
    return {name: statistics.median(each) for name, each in times.items()}


def of_storage(
    params: list[torch.Tensor], weight: torch.dtype, mean: torch.dtype, entry: torch.dtype, rounds: int
) -> dict[str, Any]:
    """The pull and the step by a memory of these dtypes, against copies of the bytes that each must move."""
    thetas, grads = ([p.to(weight) for p in params], [torch.rand_like(p).to(weight) for p in params])
    means = [p.to(mean, copy=True) for p in params]  # memory of its own: what is read twice in one place comes faster
    entries: list[torch.Tensor | Codes] = []
    for p in params:
        diagonal = holdfast.Diagonal({"w": torch.rand_like(p)})
        coded = holdfast.Logarithmic.of(diagonal).coded("w")
        entries.append(coded if entry == torch.uint8 else diagonal.entries["w"].to(entry))
    size, tops = sum(p.numel() for p in params), 2 / 256 if entry == torch.uint8 else 0.0
    kept = mean.itemsize + entry.itemsize + tops
    moved = {"pull": 3 * weight.itemsize + kept, "step": 2 * weight.itemsize + kept}
    floors = {}
    for name, each in moved.items():
        source, target = (torch.empty(int(each * size / 2), dtype=torch.uint8, device="cuda") for _ in range(2))
        floors[f"{name} floor"] = partial(target.copy_, source)
    found = measured(
        {
            "pull": lambda: add_pull_(grads, thetas, means, entries, 1e-9),
            "step": lambda: shrink_(thetas, means, entries, [1e-9] * len(thetas)),
            **floors,
        },
        rounds,
    )
    found |= measured({"in pieces": lambda: pull_in_pieces(grads, thetas, means, entries, 1e-9)}, 1 + rounds // 10)
    return {
        "bytes": moved, "milliseconds": found, "bytes_kept": kept,
        "ratio_to_floor": {
            "pull": found["pull"] / found["pull floor"], "step": found["step"] / found["step floor"],
            "in pieces": found["in pieces"] / found["pull floor"],
        },
    }  # fmt: skip


def from_the_cpu(size: int = 2**28) -> float:
    """Bytes a second of a copy from pinned memory."""
    source, target = (
        torch.empty(size, dtype=torch.uint8).pin_memory(),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    spent = measured({"copy": lambda: target.copy_(source, non_blocking=True)}, 3)
    return size / spent["copy"] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(12, 768, 50257, 512).cuda()
    params = [p.detach() for p in model.parameters()]
    means, entries, grads, plain = ([torch.rand_like(p) for p in params] for _ in range(4))
    for a, b in zip(plain, grads, strict=True):
        a.copy_(b)
    size = sum(p.numel() for p in params)
    source = torch.empty(10 * size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    value = add_pull_(grads, params, means, entries, 0.1)
    twin = plain_pull(plain, params, means, entries, 0.1)
    error = max(float((a - b).abs().max()) for a, b in zip(grads, plain, strict=True))
    thetas = [p.clone().requires_grad_() for p in params]

    def by_autograd() -> torch.Tensor:
        return sum((0.5 * e * (p - m).square()).sum() for p, m, e in zip(thetas, means, entries, strict=True))

    runs = {
        "floor": lambda: target.copy_(source),
        "fused": lambda: add_pull_(grads, params, means, entries, 1e-9),
        "foreach": lambda: plain_pull(grads, params, means, entries, 1e-9),
        "autograd": lambda: torch.autograd.grad(by_autograd(), thetas),
    }
    medians = measured(runs, options.rounds)
    ratios = {name: median / medians["floor"] for name, median in medians.items()}
    large = [torch.randn(2**24, device="cuda") for _ in range(10)]
    stored = {name: of_storage(large, *dtypes, options.rounds) for name, dtypes in _STORAGES.items()}
    results = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "holdfast": holdfast.__version__, "date": date.today().isoformat(), "parameters": size,
        "rounds": options.rounds,
        "milliseconds": medians, "ratio_to_floor": ratios, "floor_bytes_per_second": 20 * size / medians["floor"] * 1e3,
        "largest_difference_from_plain": error, "value": float(value), "value_plain": float(twin),
        "storages": stored, "pinned_bytes_per_second": from_the_cpu(),
    }  # fmt: skip
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
