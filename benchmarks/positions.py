"""Is G ⊗ A the right size where a layer is used at many positions? Against the exact Fisher, along a task's move.

    python benchmarks/positions.py --out benchmarks/results/positions-cpu.json

For each model: δᵀ(G ⊗ A)δ / δᵀFδ, layer by layer, F exact and δ what training on another task changes; over the layers
with positions, the least, the geometric mean and the largest ratio. "Expand" takes each position for an input of its
own, "reduce" averages inputs and sums gradients over positions first; the third is expand with the exact trace.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import holdfast

LENGTH, CLASSES = 32, 10


class Encoder(nn.Module):
    """Attention over the eight rows of a digit, averaged."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, width), nn.Parameter(0.1 * torch.randn(8, width))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[:, 0]) + self.position
        z = self.before(x)
        x = x + self.out(F.scaled_dot_product_attention(self.query(z), self.key(z), self.value(z)))
        return self.head((x + self.narrow(F.gelu(self.widen(self.between(x))))).mean(1))


def convolutions(*end: nn.Module) -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *end)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions, averaged over the image": lambda: convolutions(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)
    ),
    "convolutions, flattened": lambda: convolutions(
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    ),
    "attention, averaged": Encoder,
    "GPT, a loss for each token": lambda: GPT(2, 64, 128, LENGTH),
}


def digits() -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Batches of digits, and of digits upside down."""
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, len(y), (size,))
        return x[rows], y[rows]

    def other(size: int) -> tuple[Tensor, Tensor]:
        found, labels = batch(size)
        return found.flip(2), labels

    return batch, other


def text() -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Batches of this library's source, and of the same read backwards."""
    source = "".join(path.read_text() for path in sorted(Path(holdfast.__file__).parent.rglob("*.py")))
    ids = torch.tensor([min(ord(letter), 127) for letter in source])

    def batch(size: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, len(ids) - LENGTH, (size,))
        rows = torch.stack([ids[start : start + LENGTH] for start in starts])
        return rows, rows

    return batch, lambda size: tuple(part.flip(1) for part in batch(size))


def trained(model: nn.Module, batch: Callable[[int], Any], likelihood: Any, lr: float, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        x, y = batch(64)
        optimizer.zero_grad()
        likelihood.nll(model(x), y).mean().backward()
        optimizer.step()
    return model


def exact_quadratic(model: nn.Module, delta: dict[str, Tensor], x: Tensor, tokens: bool) -> float:
    """δᵀFδ = Σ uᵀ(diag p − ppᵀ)u, u the outputs' change along δ, over all labels that are scored."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    tangent = {name: delta.get(name, torch.zeros_like(p)) for name, p in params.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no forward mode
        output, u = torch.func.jvp(lambda p: torch.func.functional_call(model, p, (x,)), (params,), (tangent,))
    if tokens:
        output, u = output[:, :-1], u[:, :-1]
    p = output.softmax(-1)
    return float(((p * u.square()).sum(-1) - (p * u).sum(-1).square()).sum())


def reduced(model: nn.Module, layers: list[str], x: Tensor, draw: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """G and A with inputs averaged and gradients summed over positions first, by hooks, labels drawn from the model."""
    inputs: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    hooks = []
    for name in layers:

        def hook(_: Any, given: Any, output: Tensor, name: str = name) -> None:
            inputs[name] = given[0].detach()
            output.register_hook(lambda grad: grads.__setitem__(name, grad.detach()))

        hooks.append(model.get_submodule(name).register_forward_hook(hook))
    draw(model(x)).backward()
    for each in hooks:
        each.remove()
    found = {}
    for name in layers:
        module, a, g = model.get_submodule(name), inputs[name], grads[name]
        if isinstance(module, nn.Conv2d):
            a, g = F.unfold(a, 3, padding=1).mT, g.flatten(2).mT
        a, g = torch.cat([a, torch.ones_like(a[..., :1])], -1).mean(1), g.sum(1)
        found[name] = (g.T @ g, a.T @ a / len(a))
    return found


def study(name: str, make: Callable[[], nn.Module], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    tokens = name.startswith("GPT")
    likelihood = holdfast.tokens(shift=True) if tokens else holdfast.categorical
    batch, other = text() if tokens else digits()
    model = trained(make(), batch, likelihood, 3e-3, 400)
    moved = trained(copy.deepcopy(model), other, likelihood, 1e-3, 50)
    x, y = batch(1000 if not tokens else 256)
    data = list(zip(x.split(64), y.split(64), strict=True))
    targets = "sampled" if tokens else "expected"
    ways = {
        way: holdfast.kronecker_fisher(model, data, likelihood, targets=targets, exact_trace=way == "exact trace")
        for way in ("expand", "exact trace")
    }
    params, after = dict(model.named_parameters()), dict(moved.named_parameters())
    layers = [
        layer for layer, module in model.named_modules()
        if isinstance(module, nn.Conv2d) or (isinstance(module, nn.Linear) and (tokens or name.startswith("att")))
        if layer != "head" or tokens
    ]  # fmt: skip

    def draw(output: Tensor) -> Tensor:
        drawn = torch.distributions.Categorical(logits=output.detach()).sample()
        if tokens:
            output, drawn = output[:, :-1], drawn[:, :-1]
        return F.cross_entropy(output.flatten(0, -2), drawn.flatten(), reduction="sum")

    factors = [reduced(model, layers, x, draw) for _ in range(5)]
    ratios: dict[str, dict[str, float]] = {way: {} for way in ("expand", "reduce", "exact trace")}
    for layer in layers:
        mine = [key for key in params if key.startswith(f"{layer}.")]
        delta = {key: (after[key] - params[key]).detach() for key in mine}
        exact = exact_quadratic(model, delta, x, tokens)
        everywhere = {key: delta.get(key, torch.zeros_like(p)) for key, p in params.items()}
        for way, fisher in ways.items():
            ratios[way][layer] = float(fisher.quadratic(everywhere)) / exact
        matrix = torch.cat([delta[key].flatten(1) if delta[key].ndim > 1 else delta[key][:, None] for key in mine], 1)
        if f"{layer}.bias" not in delta:
            matrix = torch.cat([matrix, torch.zeros_like(matrix[:, :1])], 1)
        values = [float(((g @ matrix) * (matrix @ a)).sum()) for g, a in (each[layer] for each in factors)]
        ratios["reduce"][layer] = sum(values) / len(values) / exact
    return {"model": name, "seed": seed, "ratios": ratios}


def table(results: list[dict[str, Any]]) -> str:
    """The least, the geometric mean and the largest ratio, over layers and seeds."""
    lines = ["| model | expand | reduce | expand, exact trace |", "|---|---|---|---|"]
    for name in dict.fromkeys(one["model"] for one in results):
        cells = [name]
        for way in ("expand", "reduce", "exact trace"):
            values = [v for one in results if one["model"] == name for v in one["ratios"][way].values()]
            middle = math.exp(sum(math.log(max(value, 1e-12)) for value in values) / len(values))
            cells.append(f"{middle:.2f} ({min(values):.2f} to {max(values):.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    results = [study(name, make, seed) for name, make in MODELS.items() for seed in range(options.seeds)]
    described = {"torch": torch.__version__, "date": date.today().isoformat(), "runs": results}
    if options.out:
        options.out.write_text(json.dumps(described, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
