"""A hold must be able to say that it did nothing: what is checked before, during and after the steps."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import part
from ..errors import ArgumentError, HoldfastWarning, InertError
from ..params import all_parameters, require_values

# How many steps may leave every pulled parameter unchanged before it is an error: tiny ones can round to nothing, and
# some optimizers gather gradients over many steps.
_PATIENCE = 100


def parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """All the parameters of all the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def require_something_trains(held: Mapping[str, nn.Parameter]) -> None:
    """Raise where everything that would be held is frozen."""
    if held and not any(parameter.requires_grad for parameter in held.values()):
        raise InertError("every held parameter is frozen, so there is nothing to hold. Unfreeze them, or do not hold.")


def require_finite_values(held: Mapping[str, nn.Parameter]) -> None:
    """Raise where what would be held has no values, or values that are none."""
    require_values(held)
    for name, parameter in held.items():
        if not _is_finite(parameter):
            raise ArgumentError(
                f"`{name}` has values that are not finite, and no pull leads back from there. Put the old weights back "
                "first: holdfast.restore_(model, memory)."
            )


def warn_of_divergence(held: Mapping[str, nn.Parameter], stacklevel: int) -> None:
    """Say that the weights have become values that are none, and what a hold may have to do with it."""
    broken = [name for name, parameter in held.items() if not parameter.is_meta and not _is_finite(parameter)]
    if broken:
        warnings.warn(
            f"`{broken[0]}` is not finite any more ({len(broken)} such parameters): a gradient of the data was not, or "
            "the steps were too long. A pull in the gradients diverges where the learning rate times strength · Λ / "
            "num_data is more than 2: take smaller steps, a lower strength, or proximal=True.",
            HoldfastWarning, stacklevel=stacklevel + 1,
        )  # fmt: skip


def require_weights_in_use(optimizers: Sequence[Optimizer]) -> None:
    """Raise where the model has other weights just now than those it is used with."""
    for optimizer in optimizers:
        if any(group.get("train_mode") is True for group in optimizer.param_groups):  # as schedule-free ones have it
            raise ArgumentError(
                f"{type(optimizer).__name__} trains other weights than are used afterwards, and the budget is about "
                "those. Call its eval() before the budget is finished, which is at the end of the `with` block."
            )


def require_reach(held: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Every held parameter that trains must be in one held optimizer."""
    live = {name: parameter for name, parameter in held.items() if parameter.requires_grad}
    owned = Counter(id(parameter) for optimizer in optimizers for parameter in parameters(optimizer))
    twice = [name for name, parameter in live.items() if owned[id(parameter)] > 1]
    if twice:
        raise ArgumentError(f"`{twice[0]}` is in two of the optimizers given to hold, and would be pulled twice.")
    missed = [name for name, parameter in live.items() if id(parameter) not in owned]
    if missed:
        known = {id(parameter) for parameter in all_parameters(model).values()}
        cause = (
            "Give hold all the optimizers that train the model, as a list; add what was put into the model since they "
            "were made (add_param_group); or freeze what does not train."
            if known & set(owned)
            else "It holds none of the model's: was it made for a copy of the model, or before the parameters were "
            "replaced? Make it anew, and hold that. One that keeps flat copies of the weights (as DeepSpeed's do) "
            "cannot be held: add holdfast.penalty(model, posterior) / num_data to the loss."
        )
        raise InertError(
            f"`{missed[0]}` is held, but no optimizer given to hold has it ({len(missed)} such parameters). {cause}"
        )


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's own classes, which read `.grad` and write the parameters."""
    return type(optimizer).__module__.startswith("torch.optim")


def require_gradient_matters(optimizer: Optimizer) -> None:
    """Raise for an optimizer that takes the same step whatever `.grad` says: the pull could not reach it.

    Optimizers of torch are known to read it. Others are tried on a parameter of their own, once with a gradient and
    once with its opposite; those that cannot be made from their defaults, or do not move at once, are not judged.
    """
    if is_of_torch(optimizer):
        return
    start, ends = torch.full((2, 2), 1e-3), []
    kept_beside = any(hasattr(parameter, "main_grad") for parameter in parameters(optimizer))
    with torch.random.fork_rng(devices=[]):
        for sign in (1.0, -1.0):
            trial = nn.Parameter(start.clone())
            trial.grad = sign * torch.tensor([[0.5, -0.25], [1.0, 2.0]])
            if kept_beside:  # where some trainers add up gradients
                trial.main_grad = torch.ones_like(start)  # type: ignore[attr-defined]
            try:
                type(optimizer)([trial], **_own_options(optimizer)).step()
            except Exception:  # any optimizer may want anything; then nothing is known
                return
            ends.append(trial.detach().clone())
    if torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], start):
        raise InertError(
            f"{type(optimizer).__name__} takes the same step whatever `.grad` says, so a pull added there would do "
            "nothing. Hold an optimizer that reads the gradients, or add holdfast.penalty(model, posterior) / num_data "
            "to the loss."
        )


def _own_options(optimizer: Optimizer) -> dict[str, Any]:
    """Of its defaults those that it is made with: some keep others among them."""
    takes = inspect.signature(type(optimizer)).parameters.values()
    every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes)
    names = {each.name for each in takes}
    return {name: value for name, value in optimizer.defaults.items() if every or name in names}


def warn_of_weight_decay(held: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], stacklevel: int) -> None:
    """Warn where a second prior, at zero, acts on what is held."""
    ids = {id(parameter) for parameter in held.values()}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        decay = group.get("weight_decay", 0.0)
        count = sum(id(parameter) in ids for parameter in group["params"])
        if decay and count:
            warnings.warn(
                f"weight decay {decay} acts on {count} held parameters: a second prior, which pulls them to zero and "
                "away from what was learned. Set weight_decay=0 while holding.",
                HoldfastWarning,
                stacklevel=stacklevel + 1,
            )


class Watch:
    """Sees, once, that a step with a pull moved something that was pulled at. Torch's own optimizers are trusted."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._seen: list[tuple[str, nn.Parameter, int, Tensor]] = []
        self._unmoved = 0
        self.satisfied = is_of_torch(optimizer)

    def before(self, held: Mapping[str, nn.Parameter], ours: Collection[int]) -> None:
        """Remember the held parameters that are about to be updated. The first call of a step counts."""
        if not self._seen:
            self._seen = [
                (name, parameter, parameter._version, _sample(parameter))
                for name, parameter in held.items()
                if id(parameter) in ours and parameter.grad is not None and bool(part(parameter.grad).any())
            ]

    def after(self, optimizer: Optimizer) -> None:
        """Raise when several such steps in a row have left all of them as they were."""
        seen, self._seen = self._seen, []
        if not seen:  # nothing is read off a device where nothing is asked
            return
        skipped = getattr(optimizer, "found_inf", None)  # a gradient scaler's verdict
        idle = all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)
        if idle or (skipped is not None and bool(skipped)):
            return
        self.satisfied = any(
            parameter._version != version or not torch.equal(_sample(parameter), values)
            for _, parameter, version, values in seen
        )
        self._unmoved += 1
        if not self.satisfied and self._unmoved >= _PATIENCE:
            raise InertError(
                f"{_PATIENCE} steps of {type(optimizer).__name__} left `{seen[0][0]}` and every other held parameter "
                "as it was though they had gradients, so the penalty does nothing. Does it keep its own copy of the "
                "weights? Hold the optimizer that updates the model's parameters."
            )


def _is_finite(parameter: Tensor) -> bool:
    return bool(part(parameter.detach()).isfinite().all())


def _sample(parameter: Tensor) -> Tensor:
    return part(parameter.detach()).flatten()[:4096].clone()
