"""Σ a aᵀ over all that a convolution's kernel saw, made in several ways: A of its Kronecker factors.

    python benchmarks/grams.py --out benchmarks/results/grams-cpu.json

By differences of the kernel's entries (`Patches`, what the library does on a CPU), so many places at a time or all at
once; and unfolded: by torch's own function or by stacking views, in one product, a product for each example in one
call (stacked so, what the library does on a GPU), or a call for each. Milliseconds for a batch, medians of several
rounds in turn, and the largest error against float64, as a share of the largest entry. The layers are those of
`cifar10-class`, and of the reduced ResNet of `fisher`.
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
import torch.nn.functional as F
from models import wait
from torch import Tensor

import holdfast
from holdfast.curvature import autocorrelation
from holdfast.curvature.autocorrelation import Patches
from holdfast.kernels import add_gram_, add_grams_, mirrored

LAYERS = {  # channels and side, with padding 1
    "32 channels, 32×32": (32, 32), "32 channels, 16×16": (32, 16), "64 channels, 16×16": (64, 16),
    "20 channels, 32×32": (20, 32), "40 channels, 16×16": (40, 16), "80 channels, 8×8": (80, 8),
}  # fmt: skip
AT_ONCE = 1 << 62


def by_differences(patches: Patches, places: int) -> Tensor:
    size = patches.under.shape[2] * 9
    total = patches.under.new_zeros(1, size, size)
    usual, autocorrelation._PLACES = autocorrelation._PLACES, places
    try:
        patches.add_grams_(total, len(patches.under))
    finally:
        autocorrelation._PLACES = usual
    return total[0]


def unfolded(patches: Patches) -> Tensor:
    columns = F.unfold(patches.under[:, 0], patches.kernel)  # (examples, channels · kernel, places)
    total = columns.new_zeros(columns.shape[1], columns.shape[1])
    add_gram_(total, columns.transpose(1, 2).reshape(-1, columns.shape[1]))
    return mirrored(total)


def unfolded_by_examples(patches: Patches) -> Tensor:
    columns = F.unfold(patches.under[:, 0], patches.kernel)
    return torch.bmm(columns, columns.mT).sum(0)


def unfolded_one_by_one(patches: Patches) -> Tensor:
    columns = F.unfold(patches.under[:, 0], patches.kernel)
    total = columns.new_zeros(columns.shape[1], columns.shape[1])
    for each in columns:
        add_gram_(total, each.T)
    return mirrored(total)


def stacked(patches: Patches) -> Tensor:
    (rows, columns), (high, wide) = patches.places, patches.kernel
    views = [patches.under[:, 0, :, i : i + rows, j : j + columns] for i in range(high) for j in range(wide)]
    seen = torch.stack(views, 2).flatten(1, 2).flatten(2)  # (examples, channels · kernel, places)
    total = seen.new_zeros(seen.shape[1], seen.shape[1])
    add_grams_(total, seen.mT)
    return mirrored(total)


WAYS: dict[str, Callable[[Patches], Tensor]] = {
    "differences": lambda patches: by_differences(patches, autocorrelation._PLACES),
    "differences, all at once": lambda patches: by_differences(patches, AT_ONCE),
    "unfolded": unfolded,
    "unfolded, by examples": unfolded_by_examples,
    "unfolded, one by one": unfolded_one_by_one,
    "stacked": stacked,
}


def measured(channels: int, side: int, examples: int, rounds: int, device: str) -> dict[str, Any]:
    """Milliseconds and errors of every way, for one layer."""
    torch.manual_seed(0)
    seen = F.pad(torch.randn(examples, 1, channels, side, side), 4 * (1,)).relu()
    patches = Patches(seen.to(device), (3, 3), (1, 1), (side, side))
    right = unfolded_by_examples(replace(patches, under=patches.under.double())).cpu()
    errors = {}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds + 1):  # the first warms up
        for name, way in WAYS.items():
            wait(device)
            start = time.perf_counter()
            found = way(patches)
            wait(device)
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
            errors[name] = float((found.cpu().double() - right).abs().max() / right.abs().max())
    return {name: {"ms": statistics.median(times[name]), "error": errors[name]} for name in WAYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "holdfast": holdfast.__version__,
        "date": date.today().isoformat(), "examples": options.examples, "rounds": options.rounds, "layers": {},
    }  # fmt: skip
    for layer, (channels, side) in LAYERS.items():
        found = measured(channels, side, options.examples, options.rounds, options.device)
        results["layers"][layer] = found
        usual = found["differences"]["ms"]
        told = (f"{name} {each['ms'] / usual:.2f} (error {each['error']:.0e})" for name, each in found.items())
        print(f"{layer}: differences take {usual:.1f} ms; as shares of that: {', '.join(told)}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
