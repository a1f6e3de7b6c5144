"""Lightning: one callback holds a LightningModule while a Trainer fits it."""

import copy

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.integrations.lightning import HoldCallback


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def task(first: int, seed: int) -> TensorDataset:
    """Which of three numbers is the largest, starting at place `first`; the others are noise."""
    x = torch.randn(1000, 6, generator=torch.Generator().manual_seed(seed))
    x[:, first : first + 3] *= 3
    return TensorDataset(x, x[:, first : first + 3].argmax(1))


def fit(module: Classifier, data: TensorDataset, *callbacks: HoldCallback) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=10, accelerator="cpu", logger=False, callbacks=list(callbacks), **quiet)
    trainer.fit(module, DataLoader(data, batch_size=50, shuffle=True))


def percent(module: Classifier, data: TensorDataset) -> float:
    x, y = data.tensors
    return 100 * (module.net(x).argmax(1) == y).double().mean().item()


torch.manual_seed(0)
old, new = task(0, seed=1), task(3, seed=2)
held = Classifier()
fit(held, old)

fisher = holdfast.kronecker_fisher(held.net, DataLoader(old, batch_size=100), holdfast.softened())
memory = holdfast.consolidate(holdfast.prior(held.net), held.net, fisher)

free = copy.deepcopy(held)
fit(free, new)
fit(held, new, HoldCallback(memory, model=lambda module: module.net))
print(f"free: old task {percent(free, old):.0f} %, new task {percent(free, new):.0f} %")
print(f"held: old task {percent(held, old):.0f} %, new task {percent(held, new):.0f} %")
