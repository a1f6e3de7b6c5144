"""Text that the old model writes itself, in place of the text that it learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DataError, require_number
from ..params import unwrapped
from ..probes import KeptInputs
from ..untouched import evaluating


@torch.no_grad()
def own_text(
    model: nn.Module,
    *,
    count: int,
    length: int,
    num_data: float,
    start: Tensor | int = 0,
    temperature: float = 1.0,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    batch: int = 64,
) -> KeptInputs:
    """`count` sequences of `length` tokens sampled from a causal language model, for `num_data` old tokens.

    Each begins with `start`, a token or a row of them (prompts are drawn from several rows), and goes on token by token
    from softmax(logits / temperature). Take it before the model learns anything new.
    """
    require_number(temperature, "temperature", positive=True)
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (count, length, batch))
    if not whole or min(count, batch) < 1 or length < 2:
        raise ArgumentError(f"own text needs sequences of 2 tokens or more, at least one; got {count!r} of {length!r}.")
    model = unwrapped(model)
    device = next(model.parameters()).device
    prompts = (
        torch.as_tensor(start, device=device).reshape(-1, 1) if not isinstance(start, Tensor) else start.to(device)
    )
    prompts = prompts.unsqueeze(0) if prompts.ndim == 1 else prompts
    if prompts.is_floating_point() or prompts.ndim != 2 or not 0 < prompts.shape[1] < length:
        raise ArgumentError(f"start is a token, or rows of fewer than {length} of them, got {tuple(prompts.shape)}.")
    generator = torch.Generator(device).manual_seed(seed)
    found = []
    with evaluating(model):
        for first in range(0, count, batch):
            rows = torch.randint(len(prompts), (min(batch, count - first),), generator=generator, device=device)
            text = prompts[rows].long()
            while text.shape[1] < length:
                try:
                    logits = forward(model, text) if forward is not None else model(text)
                except (RuntimeError, IndexError) as error:
                    raise ArgumentError(
                        f"the model did not take {text.shape[1]} tokens between {int(text.min())} and "
                        f"{int(text.max())}: is `start` outside its vocabulary, or length={length} more than it can "
                        f"read? It says: {str(error).splitlines()[0]}"
                    ) from error
                if not isinstance(logits, Tensor) or logits.ndim != 3:
                    raise DataError(
                        "a language model's output (batch, positions, vocabulary) is needed: give forward=."
                    )
                p = (logits[:, -1].float() / temperature).softmax(-1)
                text = torch.cat([text, torch.multinomial(p, 1, generator=generator)], 1)
            found.append(text)
    total = require_number(num_data, "num_data, how many old tokens there were,", positive=True)
    weights = torch.full((count,), total / count, dtype=torch.float32, device=device)
    return KeptInputs(torch.cat(found), weights, "token")
