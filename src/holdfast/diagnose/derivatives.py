"""The first and second derivatives of the old loss at the model's weights, summed over the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..curvature.batches import read
from ..curvature.hessian import require_twice
from ..curvature.scores import backward, require_finite_scores
from ..errors import DataError
from .task import Task, confidence, joined

# Products that are taken at once share a pass over the graph; so many numbers of gradients at most.
_AT_ONCE = 1 << 18
# Below this there is no estimate of anything.
FEWEST = 8
_ONCE = "the model cannot be differentiated twice"
_CURE = "Freeze what the operation without a second derivative is for, or write it in operations that have one."


@dataclass(frozen=True)
class Start:
    """The loss and its gradient at μ, and what was met on the way over the data."""

    gradient: Tensor  # Σ ∇nll, (entries,)
    nll: float
    num_data: float
    unit: str
    examples: int
    targets: str  # whose labels the likelihood's Fisher takes by default
    unused: tuple[str, ...]
    confidence: Tensor | None  # (examples,)
    data: str


def start(task: Task) -> Start:
    """One pass over the data: Σ nll, Σ ∇nll, which parameters the loss depends on, and how confident the model is."""
    scoring = task.scoring()
    parameters = list(task.named.values())
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in task.named.items()}
    used: set[str] = set()
    targets, nll, examples = "", 0.0, 0
    sure: list[Tensor] = []
    for batch in read(task.batches, task.model):
        batch, losses = scoring.counted(batch)
        with backward(losses):
            grads = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        for name, grad in zip(task.named, grads, strict=True):
            if grad is not None:
                used.add(name)
                total[name] += grad.to_dense() if grad.is_sparse else grad
        require_finite_scores(total, batch.index, scoring.doubts)
        with torch.no_grad():
            output = scoring.output(batch)
            targets = targets or task.likelihood.default_targets(output)
            found = confidence(task, batch, output)
        sure += [] if found is None else [found.detach().cpu()]
        nll += float(losses.detach().double().sum())
        examples += batch.size
    source = scoring.source()
    if examples < FEWEST:
        raise DataError(f"{examples} examples are too few to diagnose anything: give {FEWEST} at least, or hundreds.")
    unused = tuple(name for name in task.named if name not in used)
    told = torch.cat(sure) if sure else None
    return Start(joined(total), nll, source.size, source.unit, examples, targets, unused, told, source.id)


def products(task: Task, vectors: Tensor, seen: Callable[[int, float, Tensor], None] | None = None) -> Tensor:
    """Hv for each row v, H = Σ ∇²nll: (vectors, entries). With all rows of the identity it is H itself.

    `seen(batches, num_data, products so far)` is called after every batch.
    """
    parameters = list(task.named.values())
    scoring = task.scoring()
    total = torch.zeros_like(vectors)
    step = max(1, _AT_ONCE // task.entries)
    num_data = 0.0
    # The fused attention kernels have no second derivative; the plain one has.
    with sdpa_kernel(SDPBackend.MATH):
        for batch in read(task.batches, task.model):
            losses = scoring.losses(scoring.output(batch), batch)
            with backward(losses):
                gradients = torch.autograd.grad(losses.sum(), parameters, create_graph=True, materialize_grads=True)
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                if not batch.index:
                    require_twice([flat])
                for first in range(0, len(vectors) if flat.requires_grad else 0, step):
                    rows = vectors[first : first + step].to(flat)
                    total[first : first + step] += _rows(flat, parameters, rows, batch.index).to(total.dtype)
            del losses, gradients, flat
            num_data += float(task.likelihood.count(batch.size, batch.given))
            if not bool(total.sum().isfinite()):
                raise DataError(f"batch {batch.index}: the second derivatives of the loss are not finite.")
            if seen is not None:
                seen(batch.index + 1, num_data, total)
    return total


def _rows(gradient: Tensor, parameters: Sequence[Tensor], vectors: Tensor, index: int) -> Tensor:
    """∇(gᵀv) for each v, together where the operations can be batched, else one by one."""
    try:
        if len(vectors) > 1:
            try:
                found = torch.autograd.grad(
                    gradient, parameters, vectors, retain_graph=True, is_grads_batched=True, allow_unused=True
                )
                rows = len(vectors)
                pairs = zip(found, parameters, strict=True)
                return torch.cat(
                    [p.new_zeros(rows, p.numel()) if g is None else g.reshape(rows, -1) for g, p in pairs], 1
                )
            except RuntimeError as error:
                if "out of memory" in str(error):
                    raise
        each = [
            torch.autograd.grad(gradient, parameters, vector, retain_graph=True, materialize_grads=True)
            for vector in vectors
        ]
    except (RuntimeError, NotImplementedError) as error:
        if "out of memory" in str(error):
            raise
        raise DataError(f"batch {index}: {_ONCE} ({error}). {_CURE}") from error
    return torch.stack([torch.cat([part.flatten() for part in parts]) for parts in each])
