"""Scores: gradients of one example's negative log-likelihood, under labels of one's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..devices import fetched, full, part
from ..errors import ArgumentError, DataError, InertError
from ..identity import digest, fingerprints, row_sums
from ..likelihood import Likelihood
from ..likelihood.base import as_tensor
from ..params import all_parameters, some
from ..precision import Source
from ..ranks import Ranks
from .batches import EMPTY, Batch, Forward, require_finite_output, run
from .doubts import Doubts
from .forms import wide
from .suited import require_separable, require_whole

Targets = Literal["expected", "sampled", "observed"]


def tolerance(like: Tensor) -> float:
    """How far a number computed for a whole batch may be from the same computed for one example."""
    if like.dtype == torch.float32:
        return 1e-2 if like.is_cuda else 1e-3  # tensor cores round float32 factors to ten bits
    return 1e-6 if like.dtype == torch.float64 else 0.1


class Scoring:
    """A model being scored under labels of one's choice; counts the data as it goes by.

    A score is the gradient of a pseudo-loss. With observed or sampled labels there is one per example, its nll. With
    expected ones there are as many as the likelihood's root has columns, and their squares sum to the exact Fisher.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        targets: Targets | None,
        seed: int,
        forward: Forward | None,
        ranks: Ranks | None = None,
    ) -> None:
        if not isinstance(likelihood, Likelihood):
            raise ArgumentError(
                f"a likelihood is needed, got {likelihood!r}. Give holdfast.categorical for cross-entropy, "
                "holdfast.softened() for its softer curvature, holdfast.bernoulli for binary cross-entropy, "
                "holdfast.gaussian(scale) for squared error, "
                "holdfast.tokens(shift=...) for language models, or holdfast.custom(function) for anything else."
            )
        if targets not in (None, "expected", "sampled", "observed"):
            raise ArgumentError(f"targets must be 'expected', 'sampled' or 'observed', got {targets!r}.")
        if not isinstance(seed, int):
            raise ArgumentError(f"a seed is an integer, got {seed!r}.")
        if torch.is_inference_mode_enabled():
            raise ArgumentError("curvature is made of gradients: ask for it outside torch.inference_mode().")
        if ranks is None:
            require_whole(model)
        require_separable(model)
        self.model = model
        self.likelihood = likelihood
        self.targets: str | None = targets
        self.ranks = ranks or Ranks()
        self.doubts = Doubts()
        self._count: float | Tensor = 0.0
        self._forward = forward
        self._generator = torch.Generator().manual_seed(self.ranks.seed(seed))
        self._data: list[Tensor] = []
        self._separate: set[tuple[torch.Size, ...]] = set()

    def output(self, batch: Batch) -> Any:
        """The model's output on a batch."""
        return full(run(self.model, batch, self._forward))

    def counted(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The batch with the labels to score, and its pseudo-losses, (columns, batch). Call it once per batch."""
        self.doubts.turn()
        shapes, index = batch.shapes, batch.index
        given = fetched(batch.given)
        output = self.output(batch)
        batch = replace(batch, given=given())
        if isinstance(output, Tensor):
            require_finite_output(output, batch, self.doubts)
        try:
            self.targets = self.targets or self.likelihood.default_targets(output)
            if self.targets == "observed" and batch.target is None:
                raise DataError("targets='observed' needs labels, and there are none. Give (inputs, targets).")
            if batch.target is not None:
                self.likelihood.require(output, batch.given)
            if self.targets == "sampled":
                batch = self._drawn(batch, output)
            losses = self.losses(output, batch)
        except DataError as error:
            raise DataError(f"batch {index}: {error}") from error
        if not losses.requires_grad:
            raise InertError(
                "the model's output does not depend on its trainable parameters, so the curvature would be zero. Does "
                "its forward run under no_grad, or detach its output?"
            )
        self.doubts.unless(
            losses.isfinite().all(),
            lambda _: DataError(f"batch {index}: {self.likelihood.name} gave a value that is not finite."),
        )
        if any(self.ranks.met(shapes not in self._separate)):  # a forward pass of all ranks, or of none
            self.doubts.settle()
            self._require_separate(batch, output, losses)
            self._separate.add(shapes)
            different = f"batch {index} has different losses"
            self.ranks.require_alike(float(losses.detach().sum()), different, tolerance=tolerance(losses))
        self._count += self.likelihood.count(batch.size, batch.given)
        # Sums over rows, so that the data has one identity however it is cut or shuffled; squares bind what belongs
        # to one example together.
        rows = row_sums(batch.tensors)
        self._data.append(torch.stack([rows.sum(), (rows * rows).sum()]))
        return batch, losses

    def drawn_again(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The same with other labels, of a batch that was counted already."""
        output = self.output(batch)
        batch = self._drawn(batch, output) if self.targets == "sampled" else batch
        return batch, self.losses(output, batch)

    def of_example(self, example: Batch, parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The scores of a batch of one, by plain autograd: one tuple of gradients per column. Right for any model."""
        losses = self.losses(self.output(example), example)
        last = len(losses) - 1
        with backward(losses):
            return [
                differentiated(loss.sum(), parameters, example.index, retain=column < last)
                for column, loss in enumerate(losses)
            ]

    def source(self) -> Source:
        """Where what was computed from the batches counted, at the model's weights, came from."""
        self.doubts.settle()
        own = (float(self._count), *torch.stack(self._data).sum(0).tolist()) if self._data else (0.0, 0, 0)
        shares = [each for each in self.ranks.shares((own, self.targets, bool(self._data))) if each[-1]]
        if not shares:
            raise DataError(EMPTY)
        num_data, *data = (sum(each) for each in zip(*(own for own, _, _ in shares), strict=True))
        if num_data <= 0:
            raise DataError("no label counts: every position of every batch is ignored.")
        chosen = sorted({str(targets) for _, targets, _ in shares})
        if len(chosen) > 1:
            raise DataError(
                f"the outputs of some ranks call for {chosen[0]} labels, and of others for {chosen[1]}. Say which "
                f"all take: targets='{chosen[1]}'."
            )
        weights = fingerprints(all_parameters(self.model))
        return Source(
            id=digest(
                f"{[int(total) % 2**64 for total in data]} {num_data} {self.likelihood.name} {sorted(weights.items())}"
            ),
            size=num_data,
            unit=self.likelihood.unit,
            likelihood=self.likelihood.name,
            targets=chosen[0],
            weights=weights,
        )

    def losses(self, output: Any, batch: Batch) -> Tensor:
        """Pseudo-losses of shape (columns, batch), whose gradients are the scores."""
        if isinstance(output, Tensor) and output.shape[:1] != (batch.size,):
            raise DataError(_not_rows(batch.size, f"an output of shape {tuple(output.shape)}"))
        if self.targets == "expected":
            root = self.likelihood.root(self._detached(output))  # (columns, batch, *outputs)
            scores: Tensor = root * output
            return scores.reshape(*scores.shape[:2], -1).sum(-1)
        losses = self.likelihood.nll(output, batch.target).unsqueeze(0)
        if losses.shape[1] != batch.size:
            raise DataError(_not_rows(batch.size, f"{losses.shape[1]} negative log-likelihoods"))
        return losses

    def _require_separate(self, batch: Batch, output: Any, losses: Tensor) -> None:
        """Raise unless an example alone has the output it has in its batch."""
        n = batch.size - 1
        example = batch.example(n)
        try:
            single = self.output(example)
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"batch {batch.index}: the model takes the batch, and not its last example alone ({error}). Examples "
                "that need each other (batch statistics in training mode) have no gradients of their own."
            ) from error
        alone = self.losses(single, example)[:, 0]  # raises where the batch of one has lost its axis
        pairs = [("output", single[0], output[n], output)] if isinstance(output, Tensor) else []
        if self.targets != "expected":  # whose pseudo-losses are made of the outputs alone
            pairs.append(("loss", alone, losses[:, n], losses))
        for what, apart, together, whole in pairs:
            distance, scale = (apart - together).detach().abs().max(), whole.detach().abs().max()
            if not bool(distance <= tolerance(together) * scale):
                raise DataError(
                    f"batch {batch.index}: example {n} has another {what} alone than in its batch. Either examples see "
                    "each other (batch statistics, attention over the batch, a loss that compares them), or the model "
                    "is random in evaluation mode, or the first axis of the batch is not the examples (a time axis: "
                    "move it with `forward=`)."
                )

    def _drawn(self, batch: Batch, output: Any) -> Batch:
        """The batch with labels drawn from the model. What was given says which count, and is where it came from."""
        drawn = self.likelihood.sampled(self._detached(output), batch.given, self._generator)
        return replace(batch, target=drawn)

    def _detached(self, output: Any) -> Tensor:
        return as_tensor(output, self.likelihood.name).detach()


def differentiated(loss: Tensor, parameters: Sequence[Tensor], index: int, *, retain: bool) -> tuple[Tensor, ...]:
    """Plain gradients, dense, zero where there are none. Every path ends here: what has no gradient here has none."""
    try:
        grads = torch.autograd.grad(loss, parameters, retain_graph=retain, materialize_grads=True)
    except (RuntimeError, NotImplementedError) as error:
        if "out of memory" in str(error):
            raise
        cure = (
            "A reentrant checkpoint works with .backward() alone: use use_reentrant=False, or batch_sum_fisher."
            if "checkpoint" in str(error).lower()
            else "An operation of the model has no gradient: freeze what it is for, or give it one."
        )
        raise DataError(f"batch {index}: the model cannot be differentiated ({error}). {cure}") from error
    return tuple(grad.to_dense() if grad.is_sparse else grad for grad in grads)


def backward(losses: Tensor) -> torch.autocast:
    """Where gradients are taken and summed: outside autocast, which is for the forward and would round these too."""
    return torch.autocast(losses.device.type, enabled=False)


def accumulators(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros to sum into."""
    return {name: torch.zeros_like(p, dtype=wide(p), requires_grad=False) for name, p in named.items()}


def require_finite_scores(total: Mapping[str, Tensor], index: int, doubts: Doubts) -> None:
    """Raise if sums are not finite after the batch of this index, naming it and the parameters."""
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, entries in total.items():
        alike.setdefault((entries.device, entries.dtype), []).append(name)
    for names in alike.values():
        every = [part(total[name]) for name in names]
        # Not finite if an entry is not, and read once; in a few calls for all where there is a GPU.
        sums = torch._foreach_norm(in_pieces(every), 1) if every[0].is_cuda else [entries.sum() for entries in every]

        def broken(fine: list[bool], names: list[str] = names) -> DataError:
            bad = [name for name, each in zip(names, fine, strict=True) if not each]
            return DataError(
                f"batch {index}: the gradients of {some(bad)} are not finite (or overflow when squared). "
                "Nothing was changed."
            )

        doubts.unless(torch.stack(list(sums)).isfinite(), broken)


def in_pieces(tensors: list[Tensor]) -> list[Tensor]:
    """The same with those that are not in one piece copied into one: one by one, each would be a call of its own."""
    loose = [index for index, each in enumerate(tensors) if not each.is_contiguous()]
    if not loose:
        return tensors
    flat = [tensors[index].flatten() if tensors[index].ndim > 1 else tensors[index] for index in loose]
    found = list(tensors)
    for index, piece in zip(loose, torch.split(torch.cat(flat), [len(each) for each in flat]), strict=True):
        found[index] = piece
    return found


def _not_rows(size: int, got: str) -> str:
    return (
        f"a batch of {size} gave {got}: the first axis must be the examples. A squeeze() without an axis drops it in a "
        "batch of one; a time axis in front can be moved with `forward=`."
    )
