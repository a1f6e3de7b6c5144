"""What stands for the inputs that a Trainer's model was trained on, and what it answered to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..distill import own_text
from ..errors import ArgumentError
from ..likelihood import Likelihood, Tokens
from ..probes import KeptInputs, Probes, gaussian_probes
from .collated import is_causal

_TEXTS = 128
_LONGEST = 64  # tokens of a text that the model writes


def stand_ins(
    model: nn.Module, batches: Iterable[Any], likelihood: Likelihood, num_data: float, before: Probes | None
) -> Probes:
    """Probes for inputs that nobody keeps: moments of numbers, or text that a causal model writes itself.

    Text begins as that of the batches does, with its first token, and is as long as theirs, or as that of `before`.
    """
    name = str(getattr(model, "main_input_name", "input_ids"))
    first = next(iter(batches))
    inputs = first.get(name)
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return gaussian_probes((batch[name] for batch in batches), num_data=num_data)
    if not isinstance(inputs, Tensor) or not isinstance(likelihood, Tokens) or not is_causal(model):
        raise ArgumentError(
            f"nothing stands for the inputs (`{name}`) of {type(model).__name__}: moments are kept of numbers, and "
            "text is written by causal language models. Keep some of the inputs themselves, "
            "probes=holdfast.kept_inputs(tensor), or leave probes out."
        )
    starts, longest = [], 2
    for batch in batches:
        ids = batch[name]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        starts.append(ids.gather(1, mask.to(ids).argmax(1, keepdim=True)))  # the first that is no padding
        longest = max(longest, ids.shape[1])
    length = before.shape[0] if isinstance(before, KeptInputs) else min(longest, _LONGEST)
    return own_text(
        model, count=_TEXTS, length=length, num_data=num_data, start=torch.cat(starts), forward=_read
    )  # fmt: skip


def _read(model: nn.Module, text: Tensor) -> Tensor:
    output: Tensor = model(input_ids=text).logits
    return output
