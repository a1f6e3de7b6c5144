"""The methods of the bench by their names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from ..errors import ArgumentError
from .discriminant import Discriminant
from .distilled import Distilled, feature_probes, of_features, own_words, probes, true_inputs
from .heads import ExactHead, Shell
from .methods import (
    FineTuning,
    Held,
    HeldByPath,
    Method,
    batched,
    decayed,
    diagonal,
    evened,
    every_term,
    hessian,
    kronecker,
    lowrank,
    nearest,
    per_task,
    sensitive,
    uniform,
)
from .projection import Projected
from .protocols import Protocol
from .variational import IvonChain, MeanFieldChain

Value = TypeVar("Value")

JOINT = "joint"


@dataclass(frozen=True)
class Need:
    """What a method asks of a protocol, in words and as a question."""

    words: str
    met: Callable[[Protocol], bool]


_SQUARES = Need("it needs --loss squared", lambda protocol: protocol.training.loss == "squared")
_CLASSES = Need("it needs the cross-entropy", lambda protocol: protocol.training.loss == "cross-entropy")
_TEXT = Need("it is for text", lambda protocol: protocol.stream == "text")
_IMAGES = Need("it is not for text", lambda protocol: protocol.stream != "text")
_CONVOLUTIONS = Need(
    "it is for convolutional networks", lambda protocol: protocol.network in ("convolutional", "resnet")
)


@dataclass(frozen=True)
class Entry:
    """A method: how it is made of a strength, and what it is. `model` makes its network where that is its own.

    One that `keeps_data` looks at the old inputs again: a bound for the others, and no rival of theirs.
    """

    make: Callable[[float], Method]
    about: str
    has_strength: bool = True
    model: Callable[[int], nn.Module] | None = None
    need: Need | None = None
    keeps_data: bool = False

    def fits(self, protocol: Protocol) -> bool:
        """Whether it can be run on a protocol."""
        return self.need is None or self.need.met(protocol)


METHODS: dict[str, Entry] = {
    "fine-tuning": Entry(lambda s: FineTuning(), "train on, and hold nothing", False),
    "frozen": Entry(lambda s: FineTuning(tasks=1), "learn the first task and stop", False),
    JOINT: Entry(lambda s: FineTuning(), "all tasks at once: the old data is kept", False, keeps_data=True),
    "l2": Entry(lambda s: Held(uniform(), strength=s), "one number for every weight, as much in all as the Fisher"),
    "ewc": Entry(lambda s: Held(diagonal(), strength=s), "EWC, J: one running penalty; exact diagonal Fisher"),
    "ewc-original": Entry(lambda s: Held(diagonal(), per_task, s), "EWC, J_original: one penalty per task"),
    "ewc-online": Entry(lambda s: Held(diagonal(), decayed(0.9), s), "EWC with a decay of 0.9 a task"),
    "ewc-sampled": Entry(lambda s: Held(diagonal("sampled"), strength=s), "EWC, labels drawn from the model"),
    "ewc-observed": Entry(lambda s: Held(diagonal("observed"), strength=s), "EWC, the data's labels"),
    "ewc-batched": Entry(lambda s: Held(batched(), strength=s), "EWC as often coded: squares of batch gradients"),
    "ewc-hessian": Entry(
        lambda s: Held(hessian(), strength=s), "F′: the Hessian's diagonal, estimated, negatives at zero"
    ),
    "si": Entry(lambda s: HeldByPath(s), "synaptic intelligence: Λ from the path that training took"),
    "mas": Entry(
        lambda s: Held(sensitive, strength=s), "memory-aware synapses: no labels; its scale is its own", need=_IMAGES
    ),
    "mean-field": Entry(
        lambda s: MeanFieldChain(), "variational: a mean and a deviation for every weight; Adam", False
    ),
    "ivon": Entry(
        lambda s: IvonChain(), "variational, by natural gradients (IVON), with a rate of its own, chosen on vcl", False
    ),
    "ivon-laplace": Entry(
        lambda s: IvonChain(diagonal()), "IVON, held by the diagonal Fisher in place of what it learned", False
    ),
    "ivon-laplace-even": Entry(
        lambda s: IvonChain(evened(diagonal())), "the same, with what stays of IVON's start added to the Fisher", False
    ),
    "ewc-even": Entry(
        lambda s: Held(evened(diagonal()), strength=s),
        "EWC, with what stays of IVON's start on vcl added to the Fisher",
    ),
    "low-rank-32": Entry(lambda s: Held(lowrank(32), strength=s), "the diagonal and 32 directions"),
    "kronecker": Entry(lambda s: Held(kronecker(), strength=s), "Kronecker factors, merged: constant memory"),
    "kronecker-sum": Entry(lambda s: Held(kronecker(), every_term, s), "Kronecker factors, a term for every task"),
    "kronecker-nearest": Entry(lambda s: Held(kronecker(), nearest, s), "the Kronecker product nearest to the sum"),
    "kronecker-online": Entry(lambda s: Held(kronecker(), decayed(0.9), s), "Kronecker with a decay of 0.9 a task"),
    "kronecker-trace": Entry(
        lambda s: Held(kronecker(exact_trace=True), strength=s), "Kronecker, each layer with its exact trace"
    ),
    "kronecker-softened": Entry(
        lambda s: Held(kronecker(temperature=4.0), strength=s),
        "Kronecker, its Fisher taken at a quarter of the logits; cross-entropy",
        need=_CLASSES,
    ),
    "kronecker-rotated": Entry(
        lambda s: Held(kronecker(), strength=s, rotate=True), "Kronecker, steps in the factors' eigenvectors"
    ),
    "exact-head": Entry(
        lambda s: ExactHead(),
        "exact recursion on 3000 random features; needs --loss squared",
        False,
        Shell,
        _SQUARES,
    ),
    "lwf": Entry(
        lambda s: Distilled(None, strength=s),
        "learning without forgetting: the answers to the new inputs, at temperature 1",
    ),
    "probes": Entry(
        lambda s: Distilled(probes(), strength=s), "the answers to Gaussian probes of the old inputs", need=_IMAGES
    ),
    "probes-merged": Entry(
        lambda s: Distilled(probes(), strength=s, merge=True),
        "the same, one Gaussian for all tasks that have the same outputs: constant memory there",
        need=_IMAGES,
    ),
    "probes+kronecker": Entry(
        lambda s: Distilled(probes(), kronecker(), strength=s),
        "the answers to probes, and the weights",
        need=_IMAGES,
    ),
    "probes-feature": Entry(
        lambda s: Distilled(feature_probes(), of_features, strength=s),
        "the answers to probes of the first linear layer's inputs, and the weights below; convolutional networks",
        need=_CONVOLUTIONS,
    ),
    "own-text": Entry(
        lambda s: Distilled(own_words(), strength=s, batch=32),
        "the answers to text of the model's own; text protocols",
        need=_TEXT,
    ),
    "discriminant": Entry(
        lambda s: Discriminant(), "a Gaussian of rank 100 for each class, and no network", False, Shell, _IMAGES
    ),
    "true-inputs": Entry(
        lambda s: Distilled(true_inputs, strength=s),
        "the answers to the old inputs themselves, unlabeled: they are kept",
        keeps_data=True,
    ),
    "owm": Entry(lambda s: Projected(s), "orthogonal weight modification (Zeng 2019), with SGD"),
}


def one_of(name: str, known: dict[str, Value], what: str) -> Value:
    """The value under a name, or an error that offers the nearest ones."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    offer = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(known)}."
    raise ArgumentError(f"there is no {what} {name!r}. {offer}")
