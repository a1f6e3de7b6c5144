"""Every step feels the data's gradient and the pull of what was known."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from ..adapters import require_not_adapted
from ..errors import ArgumentError, HoldfastWarning, MismatchError, require_number
from ..penalty import IN_WEIGHT_SPACE, Quadratic, Term
from ..pieces import groups, resharded
from ..posterior import Memory, Posterior, as_posterior
from ..posterior.placed import placed
from ..posterior.product import require_counted_once
from ..precision import Precision
from ..ranks import Ranks
from ..steps import innermost
from .budget import Budget, Space
from .handle import Handle
from .prefetch import offloaded
from .proximal import Proximal
from .reused import Reused
from .rotation import Rotation
from .statistics import Frozen, warn_of_drift

Held = Posterior | Memory | Term


def hold(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    posterior: Held | Sequence[Held],
    *,
    num_data: float,
    strength: float = 1.0,
    unit: str = "example",
    every: int = 1,
    rotate: bool = False,
    proximal: bool | None = None,
    freeze_statistics: bool | None = None,
    budget: float | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    offload: bool = False,
) -> Handle:
    """Hold `model` to `posterior` while `optimizer` trains it, in any loop: nll.mean() + strength · penalty / num_data.

    `num_data` is the number of new examples, `len(loader.dataset)` and not `len(loader)`, or of tokens with
    `unit="token"` if that is what the posterior counts. At strength 1 an old example counts as much as a new one. The
    gradient enters at the optimizer's step, after accumulation and clipping. Several optimizers, and several
    posteriors or terms, are given as lists. Use it as a context manager, or keep the handle and call `remove()`.

    The pull of a Kronecker precision is two matrix products per layer; with `every=k` it is computed at every kth step
    and used again in between. `rotate=True` lets the optimizer step in the eigenvectors of its factors, in which a
    stiff hold is one number per coordinate: Adam then stands larger learning rates. It takes a fresh optimizer, and
    leaves it as one: the moments of held layers are of that basis alone, and are dropped at the end.

    `proximal=True` takes the pull as a step of its own after the optimizer's, with the optimizer's own step size for
    each coordinate: it ends at the same weights, and is stable at any strength where the gradient would diverge. For
    diagonals under SGD, Adam and AdamW, and for Kronecker factors under SGD. Left out, it is what SGD gets wherever
    it can, and other optimizers get the gradient; with False all do, and every step is that of a penalty in the loss.

    BatchNorm's running statistics are no parameters and follow the new data: `freeze_statistics=True` keeps them, and
    normalizes by them in training too; False lets them, without a warning.

    With `budget`, the old loss may rise by at most so many nats per old example: the strength then follows what is
    spent, which a memory with probes and answers tells best, and `finish()` (or the end of the `with` block) brings the
    model inside. Its probes go through `forward(model, inputs)`, or `model(inputs)`.

    `offload=True` leaves a diagonal memory on the CPU, and brings it to the model's device a piece at a time as it
    pulls: for memories that do not fit beside the model. `memory.compact()` is smaller, and there all the time.

        with holdfast.hold(optimizer, model, posterior, num_data=len(dataset)):
            train(model, optimizer, loader)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"hold takes the optimizer, then the model; got {type(model).__name__} as the model.")
    resharded(model)
    given = posterior if isinstance(posterior, Sequence) else [posterior]
    said = {
        "num_data": num_data, "strength": strength, "unit": unit, "every": every, "rotate": rotate,
        "proximal": proximal, "budget": budget,
    }  # fmt: skip
    _require_one_hold(model, [as_posterior(each) for each in given if isinstance(each, (Posterior, Memory))], said)
    count = require_number(num_data, "num_data, the number of new examples (len(loader.dataset)),", positive=True)
    terms = [_as_term(each, model, offload) for each in given]
    _require_unit(terms, unit, count)
    posteriors = [term.posterior for term in terms if isinstance(term, Quadratic)]
    known = [getattr(term, "posterior", None) for term in terms]  # quadratics in other spaces have one too
    require_counted_once([each for each in known if isinstance(each, Posterior)])
    optimizers = [_holdable(each) for each in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    if not optimizers or not terms:
        raise ArgumentError("hold needs at least one optimizer and one posterior.")
    _require_other_than_prior(optimizers, posteriors)
    _require_applicable(every, rotate, bool(proximal), bool(posteriors), optimizers)
    if offload and (every > 1 or not posteriors):
        raise ArgumentError(
            "offload=True brings a posterior to the model at each step: it takes every=1, and a posterior to bring."
        )
    if forward is not None and budget is None:
        raise ArgumentError("forward is how a budget's probes go through the model, and there is no budget here.")
    quadratics = [term for term in terms if isinstance(term, Quadratic) and term.posterior.precision.shapes]
    if every > 1:
        terms = [Reused(term, every) if isinstance(term, Quadratic) else term for term in terms]
    held = [each.precision for each in posteriors if each.precision.shapes]
    # A prior alone has no directions of its own: there is nothing to turn to.
    turn = Rotation(held, optimizers, model.parameters()) if rotate and any(each.num_data for each in held) else None
    allowed = None if budget is None else _allowed(budget, posterior, terms, forward)
    step = None
    if proximal or (proximal is None and every == 1 and not rotate):
        step = (Proximal if proximal else Proximal.by_itself)(quadratics, optimizers, model)
    handle = Handle(optimizers, model, terms, count, strength, turn, allowed, step)
    if freeze_statistics is None and any(each.num_data for each in held):
        warn_of_drift(model, stacklevel=2)
    if allowed is not None:
        allowed.ready(model)
        if caution := allowed.caution(model):
            warnings.warn(caution, HoldfastWarning, stacklevel=2)
    handle._attach()
    if freeze_statistics:
        handle.statistics = Frozen(model)
    return handle


def _require_one_hold(model: nn.Module, posteriors: Sequence[Posterior], said: Mapping[str, Any]) -> None:
    """Raise, on all of them, where the processes that train a model together hold it to different things, or apart."""
    together = Ranks(data=tuple(groups(model)))
    if not together.data:
        return
    numbers = {name: str(value) for name, value in said.items()}
    (place, first, ours), *others = together.gathered(
        (distributed.get_rank(), [each.id for each in posteriors], numbers)
    )
    for rank, ids, theirs in others:
        if ids != first:
            raise MismatchError(
                f"the processes hold to different memories: rank {place} to {', '.join(first) or 'none'}, rank {rank} "
                f"to {', '.join(ids) or 'none'}. Load the same file on all of them."
            )
        for name in (name for name in ours if ours[name] != theirs[name]):
            raise MismatchError(
                f"the processes hold with different numbers: rank {place} with {name}={ours[name]}, rank {rank} with "
                f"{theirs[name]}. Say the same on all of them: num_data is that of all the new data, not of a share."
            )


def _require_unit(terms: Sequence[Term], unit: str, count: float) -> None:
    """Raise where the new data is counted in something else than the old."""
    for term in terms:
        if term.unit and term.unit != unit:
            raise MismatchError(
                f"this memory counts in units of {term.unit!r}, and num_data={count:g} is said to count in "
                f"{unit!r}. Give the number of {term.unit}s in the new data, and unit={term.unit!r}."
            )


def _require_applicable(
    every: int, rotate: bool, proximal: bool, has_posterior: bool, optimizers: Sequence[Optimizer]
) -> None:
    """Raise for ways to step that exclude each other, or that there is nothing for."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ArgumentError(f"every is a number of steps, 1 or more, got {every!r}.")
    if (proximal or every > 1) and not has_posterior:
        raise ArgumentError("proximal and every are about the pull of a posterior, and none is held to here.")
    if rotate and not has_posterior:
        raise ArgumentError("rotate=True turns steps into the eigenvectors of a posterior, and none is held to here.")
    if proximal and (rotate or every > 1):
        raise ArgumentError("proximal=True is a step of its own: neither turned (rotate) nor put off (every).")
    if every > 1 and any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise ArgumentError("LBFGS compares losses within a step, and needs a pull that is up to date: every=1.")


def _require_other_than_prior(optimizers: Sequence[Optimizer], posteriors: Sequence[Posterior]) -> None:
    """Raise where an optimizer (holdfast.IVON) has the posterior as its prior, and pulls to it by itself."""
    priors = {group.get("prior") for optimizer in optimizers for group in optimizer.param_groups} - {None}
    if priors and priors & {each.id for each in posteriors}:
        raise ArgumentError(
            "this optimizer has the posterior as its prior and pulls to it in every step: held to it as well, it would "
            "count twice. Train without a hold, or hold to something else beside it."
        )


def _allowed(
    limit: float,
    given: Held | Sequence[Held],
    terms: Sequence[Term],
    forward: Callable[[nn.Module, Any], Any] | None,
) -> Budget:
    """A budget of the one memory that is held to, by itself or by a term that has weights of its own in mind."""
    every = given if isinstance(given, Sequence) else [given]
    found = [each for each in every if isinstance(each, (Posterior, Memory))]
    spaces = [each for each in every if isinstance(each, Space)]
    if len(found) + len(spaces) != 1:
        raise ArgumentError(
            f"a budget is kept of one memory, got {len(found) + len(spaces)}: hold(optimizer, model, [memory, term], "
            "budget=...)."
        )
    memory = found[0] if found else spaces[0].memory
    return Budget(limit, memory, terms, forward, spaces[0] if spaces else None)


def _as_term(held: Held, model: nn.Module, offload: bool) -> Term:
    """The term for a posterior, on the model's device if it has one device, or left on the CPU; terms as they are."""
    if not isinstance(held, (Posterior, Memory)):
        if not hasattr(held, "add_gradient_"):
            cure = (
                " Make a posterior of it: consolidate(prior(model), model, fisher)."
                if isinstance(held, Precision)
                else " Read it from its file: holdfast.load(path)."
                if isinstance(held, (str, PathLike))
                else ""
            )
            raise ArgumentError(f"a Posterior, a Memory or a term is needed, got {type(held).__name__}.{cure}")
        return held
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
    posterior = as_posterior(held)
    require_not_adapted(model, posterior.precision.shapes, IN_WEIGHT_SPACE)
    if offload:
        return Quadratic(*offloaded(posterior, model))
    return Quadratic(placed(posterior.to(devices.pop()) if len(devices) == 1 else posterior, model))


def _holdable(optimizer: Optimizer) -> Optimizer:
    found = innermost(optimizer, "hold")
    if isinstance(found, torch.optim.SparseAdam):
        raise ArgumentError("SparseAdam takes sparse gradients alone, and a hold pulls at every entry. Use Adam.")
    return found
