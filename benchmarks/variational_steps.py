"""What a step of variational learning costs, as a ratio to a step of AdamW on the same model and batches.

    python benchmarks/variational_steps.py                      # a perceptron, on this machine
    python benchmarks/variational_steps.py --models gpt-large   # on a GPU: bf16 autocast, 163 million parameters

Everything runs interleaved in one process; a ratio is the median over rounds of (time / AdamW's time in that round).
"Optimizer alone" leaves the forward and backward passes out: drawing, bending and stepping beside AdamW's step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from models import GPT, images, mlp, sequences
from torch import nn

import holdfast


@dataclass(frozen=True)
class Setting:
    """A model, a batch of its data, and how many steps a round has."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    steps: int
    likelihood: holdfast.Likelihood
    autocast: bool = False


SETTINGS = {
    "mlp": Setting(mlp, lambda: images(128, 784), 30, holdfast.categorical),
    "gpt-large": Setting(
        lambda: GPT(12, 768, 50257, 512), lambda: sequences(16, 512, 50257), 10, holdfast.tokens(shift=True), True
    ),
}
BASE = "AdamW"


class Way:
    """A way to train: its optimizer, what the passes happen in, and the loss of a batch."""

    def __init__(self, name: str, setting: Setting, device: str) -> None:
        torch.manual_seed(0)
        self.model = setting.make().to(device)
        self.setting, self.within = setting, contextlib.nullcontext
        if name == "IVON":
            self.optimizer: torch.optim.Optimizer = holdfast.IVON(
                self.model, holdfast.prior(self.model, 1.0, mean=0.0), setting.likelihood, num_data=1e6, lr=1e-3
            )
            self.within = self.optimizer.sampled
        else:
            fused = {"AdamW": {"fused": True}, "AdamW, foreach": {"foreach": True}}[name]
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with self.within():
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.setting.autocast):
                output = self.model(x)
                loss = self.setting.likelihood.nll(output, y).sum() / self.setting.likelihood.count(len(x), y)
            loss.backward()
        self.optimizer.step()

    def alone(self) -> None:
        """The optimizer's part of a step, on the gradients that the last one left."""
        grads = [(p, p.grad) for p in self.model.parameters()]

        def again() -> None:  # which IVON runs at a draw
            for p, grad in grads:
                p.grad = None if grad is None else grad.detach()

        self.optimizer.step(again)


def measured(name: str, rounds: int, device: str) -> dict[str, Any]:
    setting = SETTINGS[name]
    ways = {each: Way(each, setting, device) for each in (BASE, "AdamW, foreach", "IVON")}
    torch.manual_seed(0)
    x, y = (each.to(device) for each in setting.batch())
    whole: dict[str, list[float]] = {each: [] for each in ways}
    alone: dict[str, list[float]] = {each: [] for each in ways}
    for turn in range(rounds + 1):  # the first warms up
        for each, way in ways.items():
            with timed(device) as took:
                for _ in range(setting.steps):
                    way.step(x, y)
            with timed(device) as took_alone:
                for _ in range(setting.steps):
                    way.alone()
            if turn:
                whole[each].append(took[0] / setting.steps)
                alone[each].append(took_alone[0] / setting.steps)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in ways[BASE].model.parameters()),
        "rows": [
            {
                "optimizer": each,
                "step_ms": 1e3 * statistics.median(whole[each]),
                "step_ratio": ratio(whole[each], whole[BASE]),
                "alone_ms": 1e3 * statistics.median(alone[each]),
                "alone_ratio": ratio(alone[each], alone[BASE]),
                "state_bytes_a_parameter": state_bytes(ways[each]),
            }
            for each in ways
        ],
    }


def table(models: list[dict[str, Any]]) -> str:
    lines = [
        "| | step, ms | × AdamW | optimizer alone, ms | × AdamW | its bytes a weight |",
        "|---|---|---|---|---|---|",
    ]
    for each in models:
        for row in each["rows"]:
            cells = [row["step_ms"], row["step_ratio"], row["alone_ms"], row["alone_ratio"]]
            lines.append(
                f"| {each['model']}, {each['parameters'] / 1e6:.1f} M, {row['optimizer']} "
                f"| {' | '.join(f'{cell:.2f}' for cell in cells)} | {row['state_bytes_a_parameter']:.0f} |"
            )
    return "\n".join(lines)


def ratio(times: list[float], base: list[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))


def state_bytes(way: Way) -> float:
    """What the optimizer keeps, for each of the model's parameters."""
    kept = [each for state in way.optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    if isinstance(way.optimizer, holdfast.IVON):
        kept += [*way.optimizer._priors.values(), *way.optimizer._centers.values()]
    return sum(each.numel() * each.element_size() for each in kept) / sum(p.numel() for p in way.model.parameters())


@contextlib.contextmanager
def timed(device: str) -> Iterator[list[float]]:
    took: list[float] = []
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    yield took
    if device != "cpu":
        torch.cuda.synchronize()
    took.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=["mlp"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = [measured(name, options.rounds, device) for name in options.models]
    print(table(found))
    if options.out:
        machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
        about = {"device": machine, "torch": torch.__version__, "date": date.today().isoformat(), "models": found}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
