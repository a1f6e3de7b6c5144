"""accelerate: the optimizer is held after `prepare` (or before it), accumulation and all."""

import copy

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def task(first: int, seed: int) -> TensorDataset:
    """Which of three numbers is the largest, starting at place `first`; the others are noise."""
    x = torch.randn(1000, 6, generator=torch.Generator().manual_seed(seed))
    x[:, first : first + 3] *= 3
    return TensorDataset(x, x[:, first : first + 3].argmax(1))


def trained(model: nn.Module, data: TensorDataset, memory: holdfast.Posterior, epochs: int = 20) -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=25, shuffle=True))
    with holdfast.hold(optimizer, prepared, memory, num_data=len(data)):
        for x, y in (batch for _ in range(epochs) for batch in loader):
            with accelerator.accumulate(prepared):
                accelerator.backward(nn.functional.cross_entropy(prepared(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(prepared)


def percent(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    return 100 * (model(x).argmax(1) == y).double().mean().item()


torch.manual_seed(0)
old, new = task(0, seed=1), task(3, seed=2)
model = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3))
nothing = holdfast.prior(model)  # a flat prior holds nothing
trained(model, old, nothing)

fisher = holdfast.kronecker_fisher(model, DataLoader(old, batch_size=100), holdfast.softened())
memory = holdfast.consolidate(nothing, model, fisher)

free, held = trained(copy.deepcopy(model), new, nothing), trained(model, new, memory)
print(f"free: old task {percent(free, old):.0f} %, new task {percent(free, new):.0f} %")
print(f"held: old task {percent(held, old):.0f} %, new task {percent(held, new):.0f} %")
