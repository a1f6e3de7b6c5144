"""A loop of one's own: learn one task, remember it in a file, learn another held to it."""

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def task(first: int, seed: int) -> TensorDataset:
    """Which of three numbers is the largest, starting at place `first`; the others are noise."""
    x = torch.randn(1000, 6, generator=torch.Generator().manual_seed(seed))
    x[:, first : first + 3] *= 3
    return TensorDataset(x, x[:, first : first + 3].argmax(1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, epochs: int = 10) -> None:
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def percent(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    return 100 * (model(x).argmax(1) == y).double().mean().item()


torch.manual_seed(0)
old, new = task(0, seed=1), task(3, seed=2)
model = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3))
train(model, torch.optim.Adam(model.parameters(), lr=0.01), old)

fisher = holdfast.kronecker_fisher(model, DataLoader(old, batch_size=100), holdfast.softened())
memory = holdfast.Memory.of(holdfast.consolidate(holdfast.prior(model), model, fisher), model)
path = Path(tempfile.mkdtemp()) / "memory.safetensors"
holdfast.save(memory, path)  # share this, not the data

free, held = copy.deepcopy(model), model
train(free, torch.optim.Adam(free.parameters(), lr=0.01), new)

optimizer = torch.optim.Adam(held.parameters(), lr=0.01)
with holdfast.hold(optimizer, held, holdfast.load(path), num_data=len(new)) as handle:
    train(held, optimizer, new)
    print({name: round(value, 3) for name, value in handle.metrics().items()})

print(f"free: old task {percent(free, old):.0f} %, new task {percent(free, new):.0f} %")
print(f"held: old task {percent(held, old):.0f} %, new task {percent(held, new):.0f} %")
