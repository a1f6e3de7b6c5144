"""Which parameters of a model are held, and which are free: something to print."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..devices import full
from ..params import contains, told_apart, unlike


@dataclass(frozen=True)
class Covered:
    """How many entries of each parameter have a precision; the others are free, and learn as if nothing were held.

    `sizes` are of all the model's parameters. What is `frozen` needs no hold; what is `new`, the memory does not know:
    a new head. `unfit` says what does not fit, and for what `hold` would be refused.
    """

    sizes: Mapping[str, int]
    held: Mapping[str, int]
    frozen: frozenset[str]
    new: frozenset[str]
    unfit: Mapping[str, str]

    @property
    def free(self) -> tuple[str, ...]:
        """The parameters that train and of which nothing is held."""
        return tuple(name for name in self.sizes if name not in self.frozen and not self.held.get(name))

    @property
    def fraction(self) -> float:
        """The part of all entries that train which is held."""
        return sum(self.held.get(name, 0) for name in self._training) / max(1, sum(self._training.values()))

    @property
    def _training(self) -> dict[str, int]:
        return {name: size for name, size in self.sizes.items() if name not in self.frozen}

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.sizes, *self.unfit))
        sizes = {name: f"{size:,}" for name, size in self.sizes.items()}
        sizes |= {name: "" for name in self.unfit if name not in sizes}
        lines = [f"{name:{width}}  {size:>12}  {self._said(name)}" for name, size in sizes.items()]
        total = sum(self._training.values())
        rest = sum(self.sizes.values()) - total
        end = f"{100 * self.fraction:.1f} % of {total:,} entries that train are held"
        return "\n".join([*lines, end + (f"; {rest:,} are frozen" if rest else "")])

    def _said(self, name: str) -> str:
        if name in self.unfit:
            return self.unfit[name]
        if name in self.frozen:
            return "frozen"
        free = self.sizes[name] - self.held.get(name, 0)
        if not free:
            return "held"
        if free < self.sizes[name]:
            return f"held, but for {free:,} free entries"
        return "new, free" if name in self.new else "free"


def covered(
    model: nn.Module, held: Mapping[int, int], known: Collection[int], unfit: Mapping[str, str] | None = None
) -> Covered:
    """From how many entries are held of parameters, by their ids, and which of them are known."""
    uses = told_apart(model)
    sizes = {name: parameter.numel() for name, parameter in uses.items()}
    frozen = frozenset(name for name, parameter in uses.items() if not parameter.requires_grad)
    new = frozenset(name for name, parameter in uses.items() if id(parameter) not in known)
    found = {name: held[id(parameter)] for name, parameter in uses.items() if id(parameter) in held}
    return Covered(sizes, found, frozen, new, unfit or {})


def with_precision(entries: Tensor) -> int:
    """How many entries of a diagonal are not zero."""
    return int(full((entries != 0).sum()))


def misfits(mean: Mapping[str, Tensor], named: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """What of a memory is not as it is in a model, in words."""
    found = {}
    for name, value in mean.items():
        if name not in named:
            found[name] = "in the memory, not in the model"
        elif named[name].shape != value.shape:
            grew = contains(named[name].shape, value.shape)
            found[name] = unlike(named[name].shape, value.shape) + (": posterior.expanded(model)" if grew else "")
    return found
