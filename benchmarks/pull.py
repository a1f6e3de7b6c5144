"""What the pull of a diagonal Λ on every parameter costs, against reading and writing those bytes at all.

    python benchmarks/pull.py          # 163 million parameters on a GPU

The floor is 20 bytes a float32 parameter: θ, μ, Λ and the gradient read, the gradient written. It is measured as a
copy of as many bytes (half read, half written), in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from datetime import date
from pathlib import Path

import torch
from models import GPT

import holdfast
from holdfast.kernels import add_pull_
from holdfast.kernels.pull import plain_pull

_IN_A_ROW = 10  # so that the queue is kept full, as it is in training


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
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds + 3):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_IN_A_ROW):
                run()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end) / _IN_A_ROW)
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratios = {name: median / medians["floor"] for name, median in medians.items()}
    results = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "holdfast": holdfast.__version__, "date": date.today().isoformat(), "parameters": size,
        "rounds": options.rounds,
        "milliseconds": medians, "ratio_to_floor": ratios, "floor_bytes_per_second": 20 * size / medians["floor"] * 1e3,
        "largest_difference_from_plain": error, "value": float(value), "value_plain": float(twin),
    }  # fmt: skip
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
