"""A large GPT on one GPU, from its Fisher to a held step: what each part takes in time, and at its peak in memory.

    python benchmarks/large.py --batch 8 --folder /dev/shm --out benchmarks/results/large-h200.json   # 1.6 billion
    python benchmarks/large.py --batch 8 --folder /dev/shm --layers 40 --width 4608 \\
        --out benchmarks/results/large-h200-11b.json                                                  # 10.7 billion

Weights, gradients and AdamW's state in bfloat16, weights drawn at random and tokens too: the costs are those of a real
model, and what is learned is not looked at. The memory: the diagonal Fisher by `batch_sum_fisher`, consolidated in
place, its entries in 8 bits and its mean in bfloat16; saved, loaded again and compared; then held by the one that was
loaded. A held step is given as a ratio to a plain one, interleaved in rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from models import GPT, sequences
from torch import nn

import holdfast

VOCABULARY, LENGTH = 50257, 512


class Parts:
    """Seconds of each part of the work, and the most memory that was taken on the GPU in it."""

    def __init__(self, device: str) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self._gpu = device != "cpu"

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        yield
        if self._gpu:
            torch.cuda.synchronize()
        self.found[name] = {"seconds": time.perf_counter() - begun}
        if self._gpu:
            self.found[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            self.found[name]["after_gib"] = torch.cuda.memory_allocated() / 2**30
        print(name, {key: round(value, 2) for key, value in self.found[name].items()}, flush=True)


def measured(layers: int, width: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device, parts = options.device, Parts(options.device)
    with parts.part("the model"):
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            model = GPT(layers, width, options.vocabulary, LENGTH)
        torch.set_default_dtype(torch.float32)
    batches = [
        tuple(each.to(device) for each in sequences(options.batch, LENGTH, options.vocabulary))
        for _ in range(options.batches)
    ]
    with parts.part("a plain pass"):  # forward and backward over the same batches, for comparison
        for ids, labels in batches:
            loss(model, ids, labels).backward()
            model.zero_grad()
    with parts.part("the prior"):
        known = holdfast.prior(model).to(dtype=torch.bfloat16)
    with parts.part("the Fisher"):
        estimate = holdfast.batch_sum_fisher(model, batches, holdfast.tokens(shift=True))
    errors, fisher = estimate.relative_error, estimate.fisher
    del estimate
    with parts.part("consolidate_"):
        known = holdfast.consolidate_(known, model, fisher)
    with parts.part("compact"):
        small = known.compact()
    del known, fisher
    kept = sum(each.nbytes for each in small.tensors.values())
    identity = small.id
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "memory.safetensors"
        with parts.part("to the CPU"):
            small = small.to("cpu")
        with parts.part("save"):
            holdfast.save(small, path)
        del small
        size = path.stat().st_size
        with parts.part("load"):
            loaded = holdfast.load(path)
        with parts.part("to the GPU"):
            loaded = loaded.to(device)
    if loaded.posterior.id != identity:
        raise SystemExit("what was loaded is not what was saved")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=device != "cpu")
    with parts.part("steps"):
        steps = timed(model, optimizer, loaded, batches, options.rounds)
    return {
        "layers": layers, "width": width, "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_a_batch": options.batch * LENGTH, "batches": options.batches, "fisher_relative_error": errors,
        "memory_bytes": kept, "file_bytes": size, "parts": parts.found, "step": steps,
    }  # fmt: skip


def timed(
    model: nn.Module, optimizer: torch.optim.Optimizer, known: Any, batches: list[Any], rounds: int
) -> dict[str, Any]:
    """Plain and held steps of AdamW, by turns."""
    times: dict[str, list[float]] = {"plain": [], "held": []}
    penalty, some = 0.0, batches[:4]
    for turn in range(rounds + 1):
        for way, spent in times.items():
            num_data = len(batches) * batches[0][0].numel()
            held: AbstractContextManager[Any] = (
                holdfast.hold(optimizer, model, known, num_data=num_data, unit="token")
                if way == "held"
                else nullcontext()
            )
            with held as handle:
                for step, (ids, labels) in enumerate(some):
                    if step == 1:
                        _wait(ids)
                        begun = time.perf_counter()
                    optimizer.zero_grad()
                    loss(model, ids, labels).backward()
                    optimizer.step()
                _wait(ids)
                if turn:
                    spent.append((time.perf_counter() - begun) / (len(some) - 1))
                if handle is not None:
                    penalty = handle.penalty
    ratios = [held / plain for held, plain in zip(times["held"], times["plain"], strict=True)]
    return {
        "plain_seconds": statistics.median(times["plain"]), "held_seconds": statistics.median(times["held"]),
        "ratio": statistics.median(ratios), "rounds": rounds, "penalty_nats": penalty,
    }  # fmt: skip


def loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


def _wait(like: torch.Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()


def table(results: list[dict[str, Any]]) -> str:
    """A column for each model."""
    sizes = [f"{each['parameters'] / 1e9:.2f} B: s | peak, GiB" for each in results]
    lines = ["| | " + " | ".join(sizes) + " |", "|---|" + "---|---|" * len(results)]
    for name in results[0]["parts"]:
        cells = [each["parts"][name] for each in results]
        shown = [f"{cell['seconds']:.1f} | {cell.get('peak_gib', float('nan')):.1f}" for cell in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    for said, cell in (
        ("the memory", lambda each: f"{each['memory_bytes'] / 1e9:.1f} GB | "),
        ("a plain step", lambda each: f"{each['step']['plain_seconds']:.3f} | "),
        ("a held one", lambda each: f"{each['step']['held_seconds']:.3f}, ratio {each['step']['ratio']:.2f} | "),
    ):
        lines.append(f"| {said} | " + " | ".join(cell(each) for each in results) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--batch", type=int, default=2, help="sequences of 512 tokens")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the memory is saved for a while; else where temporary files are")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.width < 64 or options.width % 64:
        parser.error("--width must be a multiple of 64: a head is as wide")
    if options.batches < 2:
        parser.error("--batches must be 2 or more: the first step is not timed")
    run = measured(options.layers, options.width, options)
    results = {
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "CPU", "torch": torch.__version__,
        "python": platform.python_version(), "holdfast": holdfast.__version__, "date": date.today().isoformat(), **run,
    }  # fmt: skip
    print(table([results]))
    print(json.dumps({key: value for key, value in results.items() if key != "parts"}))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
