"""What a Fisher costs, of any structure, as a ratio to a plain forward and backward pass over the same batches.

    python benchmarks/curvature.py                      # this machine, and every peer that is installed
    python benchmarks/curvature.py --models gpt-large   # on a GPU: bf16 autocast, 163 million parameters

Everything runs interleaved in one process; a ratio is the median over rounds of (time / plain time in that round).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from models import GPT, cnn, images, mlp, sequences
from torch import nn

import holdfast

# They have no cost that a longer run would spread, and some take a hundred times as long: timed on two batches.
SLOW = ("loop", "torch.func", "opacus")

RANK = 32  # of the low-rank Fisher

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Setting:
    """A model, one batch of its data, and how many there are in a pass."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    batches: int
    likelihood: holdfast.Likelihood
    targets: tuple[str, ...]
    peers: tuple[str, ...]
    autocast: bool = False


SETTINGS = {
    "mlp": Setting(
        mlp, lambda: images(128, 784), 50, holdfast.categorical, ("observed", "sampled", "expected"),
        ("loop", "torch.func", "BackPACK", "opacus"),
    ),
    "cnn": Setting(
        cnn, lambda: images(64, 3, 32, 32), 16, holdfast.categorical, ("observed", "sampled", "expected"),
        ("loop", "torch.func", "BackPACK", "opacus"),
    ),
    "gpt": Setting(
        lambda: GPT(4, 256, 1024, 128), lambda: sequences(16, 128, 1024), 16, holdfast.tokens(shift=True),
        ("observed", "sampled"), ("loop", "torch.func"),
    ),
    "gpt-large": Setting(
        lambda: GPT(12, 768, 50257, 512), lambda: sequences(16, 512, 50257), 60, holdfast.tokens(shift=True),
        ("observed", "sampled"), ("loop", "torch.func"), autocast=True,
    ),
}  # fmt: skip


def plain(setting: Setting, model: nn.Module, batches: Batches) -> None:
    """What training does: one forward and one backward pass a batch."""
    for x, y in _on(batches, model):
        model.zero_grad()
        with _autocast(setting, x):
            loss = setting.likelihood.nll(model(x), y).sum()
        loss.backward()


def ours(targets: str) -> Callable[[Setting, nn.Module, Batches], Any]:
    def run(setting: Setting, model: nn.Module, batches: Batches) -> Any:
        with _autocast(setting, next(model.parameters())):
            return holdfast.diagonal_fisher(model, batches, setting.likelihood, targets=targets).entries

    return run


def lowrank(targets: str) -> Callable[[Setting, nn.Module, Batches], Any]:
    def run(setting: Setting, model: nn.Module, batches: Batches) -> Any:
        with _autocast(setting, next(model.parameters())), warnings.catch_warnings():
            warnings.simplefilter("ignore", holdfast.HoldfastWarning)  # a single batch may not fill it
            return holdfast.lowrank_fisher(model, batches, setting.likelihood, rank=RANK, targets=targets).diagonal()

    return run


def kronecker(targets: str) -> Callable[[Setting, nn.Module, Batches], Any]:
    def run(setting: Setting, model: nn.Module, batches: Batches) -> Any:
        with _autocast(setting, next(model.parameters())):
            holdfast.kronecker_fisher(model, batches, setting.likelihood, targets=targets)

    return run


def loop(setting: Setting, model: nn.Module, batches: Batches) -> Any:
    """A batch of one after another."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in _on(batches, model):
        for n in range(len(x)):
            with _autocast(setting, x):
                loss = setting.likelihood.nll(model(x[n : n + 1]), y[n : n + 1]).sum()
            for entries, grad in zip(total.values(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                entries += grad.square()
    return total


def by_torch_func(setting: Setting, model: nn.Module, batches: Batches) -> Any:
    params = {name: p.detach() for name, p in model.named_parameters()}
    total = {name: torch.zeros_like(p) for name, p in params.items()}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with _autocast(setting, x):
            output = torch.func.functional_call(model, params, (x.unsqueeze(0),))
            return setting.likelihood.nll(output, y.unsqueeze(0)).sum()

    chunk = 4 if setting.autocast else None
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), chunk_size=chunk)
    for x, y in _on(batches, model):
        for start in range(0, len(x), chunk or len(x)):
            part = slice(start, start + (chunk or len(x)))
            for name, grads in each(params, x[part], y[part]).items():
                total[name] += grads.square().sum(0)
    return total


def by_backpack(setting: Setting, model: nn.Module, batches: Batches) -> Any:
    from backpack import backpack
    from backpack.extensions import SumGradSquared

    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in batches:
        model.zero_grad()
        with backpack(SumGradSquared()):
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        for name, parameter in model.named_parameters():
            total[name] += parameter.sum_grad_squared
    return total


def by_opacus(setting: Setting, model: nn.Module, batches: Batches) -> Any:
    total = {name: torch.zeros_like(p) for name, p in model._module.named_parameters()}
    for x, y in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        for name, parameter in model._module.named_parameters():
            total[name] += parameter.grad_sample.square().sum(0)
    return total


def contenders(setting: Setting, model: nn.Module) -> dict[str, tuple[Callable[..., Any], nn.Module]]:
    """What is timed, each with the model it needs: peers mark theirs."""
    found: dict[str, tuple[Callable[..., Any], nn.Module]] = {"plain": (plain, model)}
    found |= {f"holdfast, {targets}": (ours(targets), model) for targets in setting.targets}
    found |= {f"holdfast, Kronecker, {targets}": (kronecker(targets), model) for targets in ("observed", "sampled")}
    found[f"holdfast, rank {RANK}, sampled"] = (lowrank("sampled"), model)
    peers = {"loop": (loop, model), "torch.func": (by_torch_func, model)}
    twin = setting.make().to(next(model.parameters()).device).eval()
    twin.load_state_dict(model.state_dict())
    with contextlib.suppress(ImportError):
        from backpack import extend

        peers["BackPACK"] = (by_backpack, extend(twin))
    with contextlib.suppress(ImportError):
        from opacus import GradSampleModule

        other = setting.make().to(next(model.parameters()).device)
        other.load_state_dict(model.state_dict())
        peers["opacus"] = (by_opacus, GradSampleModule(other, loss_reduction="sum"))
    return found | {name: peers[name] for name in setting.peers if name in peers}


def measured(name: str, rounds: int, device: str, slow_peers: bool) -> dict[str, Any]:
    setting = SETTINGS[name]
    torch.manual_seed(0)
    model = setting.make().to(device).eval()
    batches = [setting.batch() for _ in range(setting.batches)]
    entries = sum(p.numel() for p in model.parameters())
    runs = contenders(setting, model)
    times: dict[str, list[float]] = {each: [] for each in runs}
    peaks: dict[str, int] = {}
    exact = loop(setting, model, batches[:1]) if device == "cpu" else None
    agreement = {}
    for turn in range(rounds + 1):  # the first warms up
        for each, (run, its_model) in runs.items():
            slow = each in SLOW
            if slow and (not slow_peers or (turn > 2 and times[each][0] > 5 * times["plain"][0])):
                continue
            used = batches[:2] if slow else batches
            model.zero_grad()
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            start = _now(device)
            found = run(setting, its_model, used)
            spent = (_now(device) - start) * len(batches) / len(used)
            if device != "cpu":
                peaks[each] = torch.cuda.max_memory_allocated()
            if turn:
                times[each].append(spent)
            elif exact is not None and found is not None and "observed" in each + "observed" * (each in setting.peers):
                one = run(setting, its_model, batches[:1])
                agreement[each] = max(float((one[key] - exact[key]).norm() / exact[key].norm()) for key in exact)
            del found
    ratios = {
        each: statistics.median(t / p for t, p in zip(spent, times["plain"], strict=False))
        for each, spent in times.items()
        if spent
    }
    return {
        "model": name, "parameters": entries, "batches": len(batches), "batch": len(batches[0][0]), "rounds": rounds,
        "plain_seconds": statistics.median(times["plain"]), "ratio": ratios,
        "seconds": {each: statistics.median(spent) for each, spent in times.items() if spent},
        "error_against_loop": agreement,
        "peak_bytes": peaks,
    }  # fmt: skip


def _on(batches: Batches, model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches where the model is, one after another, as a training loop has them."""
    device = next(model.parameters()).device
    return ((x.to(device), y.to(device)) for x, y in batches)


def _now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def _autocast(setting: Setting, like: torch.Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, dtype=torch.bfloat16, enabled=setting.autocast)


def main() -> None:
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # opacus and BackPACK
    warnings.filterwarnings("ignore", message="There is a performance drop")  # torch.func
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "gpt"], choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-slow-peers", action="store_true", help="leave out the slowest ones")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    results = {
        "device": name, "machine": platform.machine(), "torch": torch.__version__, "python": platform.python_version(),
        "holdfast": holdfast.__version__, "date": date.today().isoformat(), "runs": [],
    }  # fmt: skip
    for model in options.models:
        found = measured(model, options.rounds, options.device, not options.no_slow_peers)
        results["runs"].append(found)
        print(f"\n{model}: {found['parameters']:,} parameters, {found['batches']} batches of {found['batch']}, {name}")
        for each, ratio in found["ratio"].items():
            error = found["error_against_loop"].get(each)
            peak = found["peak_bytes"].get(each)
            print(
                f"  {each:28s} {ratio:7.2f} ×"
                + (f"   error {error:.1e}" if error is not None else "")
                + (f"   peak {peak / 2**30:.2f} GiB" if peak else "")
            )
        if options.out:  # as far as it has come
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
