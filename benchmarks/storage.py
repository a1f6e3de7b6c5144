"""What a memory costs in each storage: bytes a parameter, time of a held step, and what is kept of the old task.

    python benchmarks/storage.py --threads 1 --out benchmarks/results/storage-cpu.json
    python benchmarks/storage.py --model gpt-large --optimizers Adam --rounds 4 --seeds 0 \\
        --out benchmarks/results/storage-h200.json
    python benchmarks/storage.py --plan        # bytes and seconds for models of 7 and 70 billion, by arithmetic

The time is of a step of a 2×1000 perceptron on a batch of 128, or on a GPU of a GPT of 163 million parameters, as a
ratio to the plain step: all run interleaved in one process, and a ratio is the median over rounds of (time / the plain
step's time in that round). What is kept is measured on scikit-learn's digits with their pixels in another order as the
second task, and two classes after two others with outputs of their own; the exact diagonal Fisher, SGD with momentum,
strength 100.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from hold import SETTINGS, Setting
from models import wait
from torch import nn

import holdfast
from holdfast.bench.protocols import PROTOCOLS
from holdfast.bench.tasks import Task
from holdfast.kernels.codes import BLOCK

STORED: dict[str, Callable[[holdfast.Posterior], holdfast.Posterior]] = {
    "float32": lambda known: known,
    "bfloat16": lambda known: known.to(dtype=torch.bfloat16),
    "float32 mean, 8 bits": lambda known: known.compact(),
    "bfloat16 mean, 8 bits": lambda known: known.compact().to(dtype=torch.bfloat16),
}
OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "Adam": lambda params, fused: torch.optim.Adam(params, lr=1e-6, fused=fused),
    "SGD": lambda params, fused: torch.optim.SGD(params, lr=1e-6, momentum=0.9, fused=fused),
}
STRENGTH, EPOCHS = 100.0, 10


def bytes_each(known: holdfast.Posterior) -> float:
    """What a posterior keeps, for each parameter."""
    return sum(tensor.nbytes for tensor in known.tensors.values()) / sum(value.numel() for value in known.mean.values())


def timed(setting: Setting, names: list[str], rounds: int, device: str) -> dict[str, Any]:
    """Held steps of each storage and optimizer, on the device and from the CPU, against plain ones."""
    torch.manual_seed(0)
    model = setting.make().to(device)
    x, y = (part.to(device) for part in setting.batch())
    start = holdfast.prior(model)
    known = holdfast.Posterior(
        start.mean, holdfast.Diagonal({name: torch.rand_like(value) for name, value in start.mean.items()})
    )
    ways: dict[tuple[str, str, bool], holdfast.Posterior | None] = {}
    for name in names:
        ways[name, "", False] = None
        for stored, change in STORED.items():
            ways[name, stored, False] = change(known)
            if device != "cpu":
                ways[name, stored, True] = change(known).to("cpu")
    optimizers = {name: OPTIMIZERS[name](model.parameters(), device != "cpu") for name in names}
    times: dict[tuple[str, str, bool], list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 2):
        for way, posterior in ways.items():
            optimizer = optimizers[way[0]]
            held: AbstractContextManager[Any] = nullcontext()
            if posterior is not None:
                held = holdfast.hold(optimizer, model, posterior, num_data=512, offload=way[2])
            with held:
                for step in range(setting.steps + 1):
                    if step == 1:
                        wait(device)
                        begun = time.perf_counter()
                    optimizer.zero_grad()
                    with torch.autocast(device, torch.bfloat16) if setting.autocast else nullcontext():
                        out = model(x)
                    nn.functional.cross_entropy(out.flatten(0, -2).float(), y.flatten()).backward()
                    optimizer.step()
                wait(device)
                if turn >= 2:
                    times[way].append((time.perf_counter() - begun) / setting.steps)
    rows = []
    for (name, stored, offload), spent in times.items():
        ratios = [mine / plain for mine, plain in zip(spent, times[name, "", False], strict=True)]
        rows.append({
            "optimizer": name, "stored": stored or "nothing held", "offload": offload,
            "seconds": statistics.median(spent), "ratio": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4)[::2],
        })  # fmt: skip
    sizes = {stored: bytes_each(change(known)) for stored, change in STORED.items()}
    return {"parameters": sum(p.numel() for p in model.parameters()), "bytes": sizes, "steps": rows}


def learned(protocol: str, seed: int) -> Iterator[dict[str, Any]]:
    """Two tasks in turn, the second held to a memory of the first in each storage."""
    torch.manual_seed(seed)
    setting = PROTOCOLS[protocol]
    old, new = setting.sequence(seed)[:2]
    first = setting.model([old, new])
    _train(first, old, _sgd(first), seed)
    data = [(old.train.x, old.train.y)]
    fisher = holdfast.diagonal_fisher(first, data, holdfast.categorical, forward=old.forward)
    known = holdfast.consolidate(holdfast.prior(first), first, fisher)
    for stored, change in STORED.items():
        model, small = copy.deepcopy(first), change(known)
        begun = float(holdfast.penalty(model, small).detach()) / small.num_data
        optimizer = _sgd(model)
        with holdfast.hold(optimizer, model, small, num_data=len(new.train), strength=STRENGTH):
            _train(model, new, optimizer, seed + 1)
        yield {
            "protocol": protocol, "seed": seed, "stored": stored, "old_before": _right(first, old),
            "old": _right(model, old), "new": _right(model, new), "nats_at_the_start": begun,
        }  # fmt: skip


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _train(model: nn.Module, task: Task, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(task.train), generator=generator).split(64):
            optimizer.zero_grad()
            answers = task.logits(model, task.train.x[rows])
            nn.functional.cross_entropy(answers, task.train.y[rows], label_smoothing=0.1).backward()
            optimizer.step()


@torch.no_grad()
def _right(model: nn.Module, task: Task) -> float:
    return float((task.logits(model, task.test.x).argmax(1) == task.test.y).float().mean())


def table(found: dict[str, Any]) -> str:
    """A row for each storage."""
    protocols = list(dict.fromkeys(run["protocol"] for run in found["runs"]))
    ways = list(dict.fromkeys((row["optimizer"], row["offload"]) for row in found["timed"]["steps"]))
    heads = [f"a step of {name}{', from the CPU' if offload else ''}" for name, offload in ways]
    heads += [f"{each}: old task, new task, %" for each in protocols]
    if protocols:
        heads += ["old task, against float32, points", "pull before the first step, nats an example"]
    lines = [f"| memory | bytes a parameter | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for stored, size in found["timed"]["bytes"].items():
        cells = [f"{size:.2f}"]
        for way in ways:
            mine = [r for r in found["timed"]["steps"] if (r["optimizer"], r["offload"], r["stored"]) == (*way, stored)]
            cells += [f"{row['ratio']:.2f} ({row['quartiles'][0]:.2f}–{row['quartiles'][1]:.2f})" for row in mine]
        for protocol in protocols:
            runs = [run for run in found["runs"] if (run["protocol"], run["stored"]) == (protocol, stored)]
            cells.append(", ".join(_spread([100 * run[each] for run in runs]) for each in ("old", "new")))
        mine = [run for run in found["runs"] if run["stored"] == stored]
        whole = [run for run in found["runs"] if run["stored"] == "float32"]
        if protocols:
            cells.append(_spread([100 * (a["old"] - b["old"]) for a, b in zip(mine, whole, strict=True)], sign="+"))
            cells.append(f"{max(run['nats_at_the_start'] for run in mine):.0e}".replace("0e+00", "0"))
        lines.append(f"| {stored} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float], sign: str = "") -> str:
    about = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else " (1 seed)"
    return f"{statistics.fmean(values):{sign}.1f}{about}"


# The plan on paper.

RESULTS = Path(__file__).parent / "results"
FLOPS = 0.4 * 989e12  # of a GPU in training, in bfloat16: assumed, 40 % of what an H200 is said to do
TOKENS = 16_384  # a GPU and step: assumed
WEIGHT = GRADIENT = 4  # bytes of each where the step is made: the shards of FSDP2's mixed precision are in float32
# Bytes of the mean and of the entries.
STORAGES = {
    "float32": (4, 4),
    "bfloat16": (2, 2),
    "float32 mean, 8 bits": (4, 1),
    "bfloat16 mean, 8 bits": (2, 1),
}


def of_a_copy(measured: dict[str, Any]) -> dict[str, float]:
    """What the pull in each storage took of a copy of as many bytes."""
    return {stored: each["ratio_to_floor"]["pull"] for stored, each in measured["storages"].items()}


def planned(parameters: float, gpus: int) -> list[dict[str, Any]]:
    """Bytes on each GPU, and seconds of a step, of the hold on a model in pieces."""
    measured = json.loads((RESULTS / "pull-h200.json").read_text(encoding="utf-8"))
    speed, share, rows = measured["floor_bytes_per_second"], parameters / gpus, []
    ratios = of_a_copy(measured)
    for stored, (mean, entry) in STORAGES.items():
        tops = 2 * parameters / BLOCK if entry == 1 else 0.0  # all of them on each
        moved = WEIGHT + 2 * GRADIENT + mean + entry
        rows.append({
            "parameters": parameters, "gpus": gpus, "stored": stored,
            "bytes": share * (mean + entry) + tops,
            "pull": share * moved / speed * ratios[stored],
            "step": 6 * parameters * TOKENS / FLOPS,
            "from_cpu": share * (mean + entry) / measured["pinned_bytes_per_second"],
        })  # fmt: skip
    return rows


def plan() -> str:
    """The table of `planned`, and one of a model on one GPU whose memory is on the CPU."""
    measured = json.loads((RESULTS / "pull-h200.json").read_text(encoding="utf-8"))
    ratios, link = of_a_copy(measured), measured["pinned_bytes_per_second"] / 1e9
    lines = [
        f"{measured['floor_bytes_per_second'] / 1e12:.2f} TB/s measured ({measured['device']}, {measured['date']}), "
        f"and what the pull takes of a copy of its bytes, {link:.0f} GB/s from the CPU; assumed: {TOKENS:,} tokens a "
        f"GPU and step at {FLOPS / 1e12:.0f} TFLOP/s.",
        "",
        "| memory | time of the pull, of a plain copy of as many bytes |",
        "|---|---|",
        *(f"| {stored} | {ratio:.2f} |" for stored, ratio in ratios.items()),
    ]
    lines += [
        "",
        "| model | GPUs | memory | on each GPU, GB | pull, ms | of a step, % |",
        "|---|---|---|---|---|---|",
    ]
    for parameters in (7e9, 70e9):
        for gpus in (8, 64):
            for row in planned(parameters, gpus):
                lines.append(
                    f"| {parameters / 1e9:.0f} B | {gpus} | {row['stored']} | {row['bytes'] / 1e9:.2f} "
                    f"| {1e3 * row['pull']:.2f} | {100 * row['pull'] / row['step']:.2f} |"
                )
    lines += ["", "| 7 B on one GPU | memory on it, GB | pull, ms | memory on the CPU: on the GPU, GB | pull, ms |"]
    lines += ["|---|---|---|---|---|"]
    for row in planned(7e9, 1):
        mean, entry = STORAGES[row["stored"]]
        lines.append(
            f"| {row['stored']} | {row['bytes'] / 1e9:.1f} | {1e3 * row['pull']:.0f} "
            f"| {2 * 2**23 * (mean + entry) / 1e9:.2f} | {1e3 * max(row['from_cpu'], row['pull']):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print the plan on paper, and measure nothing")
    parser.add_argument("--model", default="mlp", choices=list(SETTINGS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3, help="for what is kept; 0 for the time alone")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: quartiles are of several")
    if options.plan:
        print(plan())
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {threads} thread{'s' * (threads > 1)}"
    found = {
        "device": name, "torch": torch.__version__, "python": platform.python_version(),
        "holdfast": holdfast.__version__, "date": date.today().isoformat(), "rounds": options.rounds,
        "model": options.model,
        "timed": timed(SETTINGS[options.model], options.optimizers, options.rounds, options.device),
        "runs": [
            run for protocol in ("digits", "digits-task") for seed in range(options.seeds)
            for run in learned(protocol, seed)
        ],
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
