"""PEFT: a memory of the base weights holds W + s·BA while LoRA trains, and after the merge holds the next adapter."""

import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.integrations.peft import weight_space


def task(first: int, seed: int) -> TensorDataset:
    """Which of three numbers is the largest, starting at place `first`; the others are noise."""
    x = torch.randn(1000, 9, generator=torch.Generator().manual_seed(seed))
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


def adapted(model: nn.Module) -> tuple[PeftModel, torch.optim.Optimizer]:
    model = get_peft_model(model, LoraConfig(r=6, target_modules=["0", "2"]))
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


torch.manual_seed(0)
old, *new = task(0, seed=1), task(3, seed=2), task(6, seed=3)
base = nn.Sequential(nn.Linear(9, 50), nn.ReLU(), nn.Linear(50, 3))
train(base, torch.optim.Adam(base.parameters(), lr=0.01), old)

fisher = holdfast.kronecker_fisher(base, DataLoader(old, batch_size=100), holdfast.softened())
memory = holdfast.consolidate(holdfast.prior(base), base, fisher)  # of the plain model, before it is adapted

free, held = copy.deepcopy(base), base
for data in new:  # one adapter after another, each merged when it is done
    model, optimizer = adapted(free)
    train(model, optimizer, data)
    free = model.merge_and_unload()

    model, optimizer = adapted(held)
    with holdfast.hold(optimizer, model, weight_space(model, memory), num_data=len(data)):
        train(model, optimizer, data)
    held = model.merge_and_unload()

print(f"free: old task {percent(free, old):.0f} %, last task {percent(free, new[-1]):.0f} %")
print(f"held: old task {percent(held, old):.0f} %, last task {percent(held, new[-1]):.0f} %")
