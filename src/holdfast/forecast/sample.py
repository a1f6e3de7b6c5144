"""A sample of what the model answers on its data, to be kept in the data's place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..curvature.batches import read, run
from ..errors import ArgumentError, DataError
from ..likelihood import Likelihood
from ..params import unwrapped
from ..probes import Answers
from ..untouched import untouched

COUNT = 2000
_ENTRIES = 2**24  # of all outputs kept: of a vocabulary of 50,000 words, no more than some hundred answers


def kept_answers(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    count: int = COUNT,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Answers:
    """Outputs and labels of `count` examples (or tokens) at random, from one pass in evaluation mode: no inputs.

    A forecast adds to them how the model's answers to probes have changed since. Outputs of many classes are kept
    for fewer examples. `forward(model, batch)` gets the whole batch, as a Fisher's does.

        answers = holdfast.kept_answers(model, loader, holdfast.categorical)
        memory = holdfast.Memory.of(posterior, model, probes, answers)
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ArgumentError(f"count is how many answers to keep, 1 or more, got {count!r}.")
    if not isinstance(likelihood, Likelihood):
        raise ArgumentError(f"a likelihood is needed, such as holdfast.categorical, got {type(likelihood).__name__}.")
    generator = torch.Generator().manual_seed(seed)
    model, seen = unwrapped(model), 0.0
    outputs, labels, keys = torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.float64)
    kind = likelihood.name
    with untouched(model), torch.no_grad():
        for batch in read(batches, model):
            output = run(model, batch, forward)
            if batch.target is None:
                raise DataError(f"batch {batch.index} has no labels: what the loss was on them cannot be known.")
            likelihood.require(output, batch.target)
            rows, targets, single = likelihood.each(output, batch.target)
            kind = single.name
            if not bool(rows.isfinite().all()):
                raise DataError(f"batch {batch.index}: the model's output is not finite.")
            # A random number for each, the largest are kept: a sample of all that comes, in random order.
            mine = torch.rand(len(rows), generator=generator, dtype=torch.float64)
            most = max(1, min(count, _ENTRIES // max(1, rows[0].numel()))) if len(rows) else count
            joined = torch.cat([keys, mine])
            first = joined.argsort(descending=True)[:most]
            outputs = rows.float() if not seen else torch.cat([outputs, rows.float()])
            labels = targets if not seen else torch.cat([labels, targets])
            outputs, labels, keys = outputs[first.to(outputs.device)], labels[first.to(labels.device)], joined[first]
            seen += float(likelihood.count(batch.size, batch.target))
    return Answers(outputs.clone(), labels.clone(), kind, seen, likelihood.unit)
