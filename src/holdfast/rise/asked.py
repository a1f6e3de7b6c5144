"""The model asked about probes, now and as it was: what the rise of the old loss is told from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HoldfastError
from ..likelihood import Likelihood, tokens
from ..posterior import Memory, Posterior
from ..posterior.recalled import Forward, Recalled, asking
from ..probes import Answers
from ..untouched import untouched
from .paired import Paired

_BATCH = 250
_TEXTS = 64


def asked(
    model: nn.Module,
    memory: Memory,
    draws: int,
    seed: int,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    old: Callable[[nn.Module, Forward], Callable[[Any], Any]] | None = None,
) -> tuple[Paired, Callable[[], Tensor]]:
    """The kept answers beside probes, and a way to ask the model about these at its present weights.

    `old` gives the old function where it is not the model at the memory's mean.
    """
    if memory.probes is None or memory.answers is None:
        raise ArgumentError(f"no estimate by probes: {missing(memory)}.")
    if not isinstance(draws, int) or isinstance(draws, bool) or draws < 1:
        raise ArgumentError(f"draws is a number of probes, 1 or more, got {draws!r}.")
    device = next(model.parameters()).device
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    generator = torch.Generator(device).manual_seed(seed)
    probes, plain = memory.probes.to(device), _plain(forward)
    # Of texts every position is an answer: so many fewer of them, and not too few.
    count = draws if probes.unit == "example" else max(_TEXTS, -(-draws // max(1, probes.shape.numel())))
    inputs = [probes.draw(min(_BATCH, count - start), generator) for start in range(0, count, _BATCH)]
    inputs = [each.to(dtype) if each.is_floating_point() else each for each in inputs]
    single = _each(memory.answers)
    before = asking(Recalled(memory, model), model, plain) if old is None else old(model, plain)
    try:
        then = torch.cat([single.each(before(each))[0].float() for each in inputs])
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, (HoldfastError, torch.OutOfMemoryError)):
            raise
        raise ArgumentError(
            "the probes do not go through the model as model(inputs): "
            f"{f'{type(error).__name__}: {error}'.splitlines()[0]}. Say how they do: forward=lambda model, inputs: ..."
        ) from error

    def now() -> Tensor:
        with untouched(model), torch.no_grad():
            return torch.cat([single.each(plain(model, each))[0].float() for each in inputs])

    if then.ndim > 1:  # a head that grew answers with more now; then it knew these
        then = then[..., : memory.answers.outputs.shape[-1]]
    return Paired(memory.answers.to(device), then), now


def _each(answers: Answers) -> Likelihood:
    """How a model's output is cut into single answers: of texts, every position is one."""
    return tokens(shift=False) if answers.unit == "token" else answers.likelihood


def missing(memory: Posterior | Memory) -> str:
    """Why there is no estimate by probes; nothing if there is one."""
    if not isinstance(memory, Memory):
        return "a posterior alone has no probes"
    if memory.probes is None or memory.answers is None:
        lacks = " nor ".join(what for what in ("probes", "answers") if getattr(memory, what) is None)
        return f"the memory has no {lacks}"
    if memory.probes.layer:
        return f"probes at `{memory.probes.layer}` see nothing of what changed below it"
    if memory.probes.unit != memory.answers.unit:
        return f"the probes count {memory.probes.unit}s and the answers {memory.answers.unit}s"
    return ""


def _plain(forward: Callable[[nn.Module, Any], Any] | None) -> Forward:
    def called(model: nn.Module, inputs: Any) -> Any:
        output = forward(model, inputs) if forward is not None else model(inputs)
        return getattr(output, "logits", output)

    return called
