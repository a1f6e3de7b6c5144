"""F′: the diagonal of the Hessian of the negative log-likelihood, exact or estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..devices import sent
from ..errors import ArgumentError, DataError
from ..likelihood import Likelihood
from ..params import trainable, unwrapped
from ..precision import SignedDiagonal
from .batches import Forward, read
from .replicas import alike, replicas_of
from .scores import Scoring, accumulators, backward, require_finite_scores

_ROWS_AT_ONCE = 64


def diagonal_hessian(
    model: nn.Module, batches: Iterable[Any], likelihood: Likelihood, *, forward: Forward | None = None
) -> SignedDiagonal:
    """F′ᵢ = Σₙ ∂²(−log p(yₙ | xₙ))/∂θᵢ², exact, with the data's labels (Yang 2022).

    It takes a second-order pass per parameter entry and batch: for models of some ten thousand entries. Larger ones:
    `hutchinson_hessian`. Away from a minimum entries can be negative; `.clamped()` sets those to zero.
    """

    def diagonal(gradients: Sequence[Tensor], parameters: Sequence[Tensor], coins: torch.Generator) -> list[Tensor]:
        return [_exact_diagonal(gradient, p) for gradient, p in zip(gradients, parameters, strict=True)]

    return _summed(model, batches, likelihood, forward, diagonal)


def hutchinson_hessian(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    probes: int = 32,
    seed: int = 0,
    forward: Forward | None = None,
) -> SignedDiagonal:
    """An unbiased estimate of F′ from Hessian-vector products: E[v ∘ Hv] with random signs v (Bekas 2007).

    Signs are new for every batch b: the variance of an entry is Σ_b Σ_{j≠i} (H_b)_ij² / probes, less in small batches
    than in large ones. A probe costs about two gradient passes. Where noise is as large as the entries, clamping keeps
    its positive half. For perceptrons of ReLUs `diagonal_fisher` with expected labels is F′ itself, without noise.
    """
    if not isinstance(probes, int) or probes < 1:
        raise ArgumentError(f"an estimate needs at least one probe, got probes={probes!r}.")

    def diagonal(gradients: Sequence[Tensor], parameters: Sequence[Tensor], coins: torch.Generator) -> list[Tensor]:
        estimates = [torch.zeros_like(p) for p in parameters]
        for _ in range(probes):
            signs = [random_signs(p, coins) for p in parameters]
            along: Tensor = sum((g * v).sum() for g, v in zip(gradients, signs, strict=True))  # type: ignore[assignment]
            if not along.requires_grad:
                break
            products = torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)
            for estimate, v, product in zip(estimates, signs, products, strict=True):
                estimate += v * product / probes
        return estimates

    return _summed(model, batches, likelihood, forward, diagonal, seed)


def _summed(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    forward: Forward | None,
    diagonal: Callable[[Sequence[Tensor], Sequence[Tensor], torch.Generator], list[Tensor]],
    seed: int = 0,
) -> SignedDiagonal:
    """Sum over the batches what `diagonal` makes of a batch's differentiable gradient, with coins to draw by."""
    with replicas_of(model) as ranks:
        model = unwrapped(model)
        named = trainable(model)
        parameters = list(named.values())
        total = accumulators(named)
        scoring = Scoring(model, likelihood, "observed", 0, forward, ranks)
        coins = torch.Generator().manual_seed(ranks.seed(seed) % 2**63)
        # The fused attention kernels have no second derivative; the plain one has.
        with alike(model, ranks), sdpa_kernel(SDPBackend.MATH):
            for batch in read(batches, model, empty=ranks.apart):
                batch, losses = scoring.counted(batch)
                with backward(losses), _named(batch.index):
                    gradients = torch.autograd.grad(losses.sum(), parameters, create_graph=True, materialize_grads=True)
                    require_twice(gradients)
                    for name, entries in zip(named, diagonal(gradients, parameters, coins), strict=True):
                        total[name] += entries.detach().to(total[name].dtype)
                del losses, gradients
                require_finite_scores(total, batch.index, scoring.doubts)
        source = scoring.source()
        ranks.add_(*total.values())
    return SignedDiagonal(total, (source,))


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Say at which batch, and the way out, where an operation raises for want of a second derivative."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "out of memory" in str(error):
            raise
        raise DataError(
            f"batch {index}: the model cannot be differentiated twice ({error}). Freeze what the operation is for, or "
            "write it in operations that have a second derivative."
        ) from error


def require_twice(gradients: Sequence[Tensor]) -> None:
    """Raise where an operation gives no second derivative: torch leaves its part out without a word."""
    seen, ahead = set(), [gradient.grad_fn for gradient in gradients]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            if node.name() == "torch::autograd::Error":
                raise DataError(
                    "the model cannot be differentiated twice: an operation of it is marked once_differentiable. "
                    "Freeze what it is for, or write it in operations that have a second derivative."
                )
            seen.add(node)
            ahead += [each for each, _ in node.next_functions]


def _exact_diagonal(gradient: Tensor, parameter: Tensor) -> Tensor:
    """∂gᵢ/∂θᵢ for every entry, some rows of the Hessian at a time."""
    size = parameter.numel()
    if not gradient.requires_grad or not size:
        return torch.zeros_like(parameter)
    found = []
    for start in range(0, size, _ROWS_AT_ONCE):
        rows = torch.arange(start, min(start + _ROWS_AT_ONCE, size), device=parameter.device)
        picks = torch.zeros(len(rows), size, dtype=gradient.dtype, device=gradient.device)
        picks[torch.arange(len(rows)), rows] = 1
        hessian_rows = _rows(gradient, parameter, picks.view(-1, *parameter.shape))
        found.append(hessian_rows.reshape(len(rows), size)[torch.arange(len(rows)), rows])
    return torch.cat(found).view(parameter.shape)


def _rows(gradient: Tensor, parameter: Tensor, picks: Tensor) -> Tensor:
    rows: Tensor | None
    try:
        (rows,) = torch.autograd.grad(
            gradient, parameter, picks, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
    except RuntimeError:
        # An operation without a batching rule: the same rows, one by one.
        rows = torch.stack(
            [
                torch.autograd.grad(gradient, parameter, pick, retain_graph=True, materialize_grads=True)[0]
                for pick in picks
            ]
        )
    # Nothing where the gradient does not depend on the parameter itself: its loss is linear in it.
    return torch.zeros_like(picks) if rows is None else rows


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """−1 or 1 for every entry. Drawn on the CPU, so that they are the same everywhere, as the bits of few numbers."""
    words = torch.randint(-(2**63), 2**63 - 1, (math.ceil(like.numel() / 64),), generator=generator)
    octets = sent(words, like.device).view(torch.uint8)
    bits = octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=like.device) & 1
    return bits.flatten()[: like.numel()].to(like.dtype).mul_(2).sub_(1).view(like.shape)
