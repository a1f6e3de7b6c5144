"""What a training step of the bench takes on a GPU: played again from a CUDA graph, and as Python starts its kernels.

    python benchmarks/bench_steps.py --protocols vandeven,cifar10-class,fisher --data FOLDER --out FILE

Milliseconds a step, medians of several fits in turn, and the kernels that a step is made of, those that take longest
first. Elsewhere than on a GPU there is nothing to record, and no kernels are told. `--leave-out` shows what the things
are worth that training does for a GPU's sake:

    timing   convolutions are timed at their first use; without it cuDNN guesses which way is fastest
    layout   pictures have their channels innermost; without it each channel is a picture of its own
    norms    BatchNorm is cuDNN's; without it it is torch's own
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.backends import cudnn
from torch.profiler import ProfilerActivity, profile

import holdfast
from holdfast.bench import training
from holdfast.bench.catalog import METHODS
from holdfast.bench.machine import present, warm
from holdfast.bench.protocols import PROTOCOLS
from holdfast.bench.training import Trainer

_FOR_A_GPU = ("timing", "layout", "norms")
_EXAMPLES = 2000  # that what is held to is taken from
_TOLD = 12  # of the kernels


def of_protocol(name: str, method: str, device: str, steps: int, rounds: int) -> dict[str, Any]:
    """A protocol's step while its second task is learned."""
    protocol = PROTOCOLS[name]
    tasks = protocol.sequence(0, device=device)[:2]
    torch.manual_seed(0)
    model, way = protocol.model(tasks).to(device), METHODS[method].make(1.0)
    few = replace(protocol.training, steps=5, epochs=None)
    first = replace(tasks[0], train=tasks[0].train.first(_EXAMPLES))
    way.learn(model, first, Trainer(few))
    way.remember(model, first, Trainer(few))
    many = replace(protocol.training, steps=steps, epochs=None)
    on_gpu = device.startswith("cuda")
    times: dict[str, list[float]] = {"recorded": [], "as it goes": []} if on_gpu else {"as it goes": []}
    for _ in range(rounds + 1):  # the first sets up
        for how, spent in times.items():
            trainer = Trainer(many, recorded=how == "recorded")
            start = time.perf_counter()
            way.learn(model, tasks[1], trainer)
            spent.append(1e3 * (time.perf_counter() - start) / steps)
    found: dict[str, Any] = {"milliseconds": {how: statistics.median(spent[1:]) for how, spent in times.items()}}
    return {**found, **(_kernels(way, model, tasks[1], many) if on_gpu else {})}


def _kernels(way: Any, model: torch.nn.Module, task: Any, numbers: Any) -> dict[str, Any]:
    """How many a step has, and microseconds a step of those that take longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        way.learn(model, task, Trainer(numbers))
    spent: Counter[str] = Counter()
    count = 0
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            count += 1
            spent[event.name] += event.device_time
    longest = {name[:90]: round(total / numbers.steps, 1) for name, total in spent.most_common(_TOLD)}
    return {"kernels": round(count / numbers.steps, 1), "microseconds": longest}


def leave_out(what: str) -> None:
    """Train without one of the things that are done for a GPU's sake."""
    if what == "timing":
        training._fastest = nullcontext
    elif what == "layout":
        training._laid_out = lambda x: x
    elif what == "norms":
        of_cudnn = F.batch_norm
        F.batch_norm = lambda *args, **numbers: _without_cudnn(of_cudnn, *args, **numbers)
    else:
        raise SystemExit(f"--leave-out takes {', '.join(_FOR_A_GPU)}, got {what!r}.")


def _without_cudnn(norm: Callable[..., Tensor], *args: Any, **numbers: Any) -> Tensor:
    with cudnn.flags(enabled=False, benchmark=cudnn.benchmark, allow_tf32=cudnn.allow_tf32):
        return norm(*args, **numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocols", default="digits")
    parser.add_argument("--methods", default="fine-tuning,ewc")
    parser.add_argument("--data", type=Path, help="the folder of the images, as HOLDFAST_DATA")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leave-out", default="", help="timing, layout or norms, or several of them with commas")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    left_out = [each for each in options.leave_out.split(",") if each]
    for each in left_out:
        leave_out(each)
    if options.data:
        os.environ["HOLDFAST_DATA"] = str(options.data)
    device = present(options.device)
    warm(device)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {platform.machine()}",
        "torch": torch.__version__, "holdfast": holdfast.__version__, "date": date.today().isoformat(),
        "steps": options.steps, "rounds": options.rounds, "left out": left_out,
    }  # fmt: skip
    for protocol in options.protocols.split(","):
        for method in options.methods.split(","):
            found = of_protocol(protocol, method, device, options.steps, options.rounds)
            results[f"{protocol}, {method}"] = found
            print(f"{protocol}, {method}: {json.dumps(found, indent=1)}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
