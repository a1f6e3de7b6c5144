"""Small models in pieces on several processes, and a loop that gives every process its share of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import holdfast
from holdfast.devices import full
from holdfast.params import all_parameters
from holdfast.pieces import resharded

BATCH, STEPS = 16, 6
FISHERS: dict[str, Callable[..., holdfast.Precision]] = {
    "diagonal": holdfast.diagonal_fisher,
    "kronecker": holdfast.kronecker_fisher,
    "low rank": lambda *args: holdfast.lowrank_fisher(*args, rank=4),
}


class Scaled(nn.Module):
    """Parameters that no number of ranks divides, and one of a single entry."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.body(x))


class Normed(nn.Module):
    """What tensor and sequence parallelism cut in pieces, with positions as the second axis of x."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(5), nn.Linear(5, 8), nn.Linear(8, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(self.norm(x)))).mean(1))


def kind_of(how: str) -> type[nn.Module]:
    return Normed if "tensor" in how else Scaled


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def examples(kind: type[nn.Module], count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 5) if kind is Scaled else (count, 8, 5)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=generator)


def memory(kind: type[nn.Module], structure: str = "diagonal") -> holdfast.Posterior:
    """Of an old task, from one process."""
    model, (x, y) = made(kind), examples(kind, 24, seed=9)
    fisher = FISHERS[structure](model, [(x[:10], y[:10]), (x[10:], y[10:])], holdfast.categorical)
    return holdfast.consolidate(holdfast.prior(model), model, fisher)


def kept(kind: type[nn.Module]) -> holdfast.Memory:
    """The same with probes and answers."""
    model, (x, y) = made(kind), examples(kind, 24, seed=9)
    answers = holdfast.kept_answers(model, [(x, y)], holdfast.categorical)
    return holdfast.Memory.of(memory(kind), model, holdfast.gaussian_probes([(x, y)]), answers)


def wrapped(how: str, world: int) -> tuple[nn.Module, int]:
    """A model, and how many processes see the same examples; one process alone where there is but one."""
    model = made(kind_of(how))
    if how == "alone":
        return model, 1
    if how == "replicas":
        return nn.parallel.DistributedDataParallel(model), 1
    if how in ("shards", "shards, offloaded"):
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if "offloaded" in how else {}
        fully_shard(model.body, **options)
        return fully_shard(model, **options), 1
    if how == "shards of replicas":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
        fully_shard(model.body, mesh=mesh)
        return fully_shard(model, mesh=mesh), 1
    if how == "tensor parallel":
        return _tensor_parallel(model, init_device_mesh("cpu", (world,))), world
    assert how == "shards, tensor parallel"
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    return fully_shard(_tensor_parallel(model, mesh["tensor"]), mesh=mesh["data"]), world // 2


def _tensor_parallel(model: nn.Module, mesh) -> nn.Module:
    prepare = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
    parallelize_module(model, mesh, prepare)
    plan = {
        "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }  # fmt: skip
    return parallelize_module(model, mesh, plan)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
}


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    how: str,
    rank: int,
    ranks: int,
    accumulate: int = 1,
    steps=STEPS,
) -> None:
    """Each step is on a batch of 16, of which a rank sees its share; the shares may come in parts."""
    x, y = examples(kind_of(how), BATCH * steps)
    share = BATCH // ranks
    part = share // accumulate
    for step in range(steps):
        first = BATCH * step + rank * share
        for turn in range(accumulate):
            rows = slice(first + turn * part, first + (turn + 1) * part)
            with _synchronized(model, turn == accumulate - 1):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def _synchronized(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged after the last part alone."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    with model.no_sync() if hasattr(model, "no_sync") and not last else contextlib.nullcontext():
        yield


def weights(model: nn.Module) -> dict[str, Tensor]:
    resharded(model)
    return {name: full(parameter.detach()).clone() for name, parameter in all_parameters(model).items()}
