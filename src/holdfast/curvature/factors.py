"""The sums that Kronecker factors are made of, as the taps bring a layer's inputs and its outputs' gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import DataError
from ..kernels import add_grams_, add_squares_, mirrored
from ..precision.factors import diagonal
from ..precision.layers import Layer
from ..ranks import Ranks
from .forms import CACHED, Form, Limit, Products, Shifted, wide
from .graph import Graph
from .known import Known, turned
from .plan import Plan, Site
from .squares import Squares


@dataclass
class Sums:
    """What one layer's factors are made of."""

    outputs: Tensor  # Σ g gᵀ: (groups, outputs, outputs), or its diagonal
    inputs: Tensor  # Σ a aᵀ, without the bias's 1
    ones: Tensor | None  # Σ a, where there is a bias: (groups, inputs)
    places: int | Tensor = 0  # how many a there were; a tensor where a GPU counted them, not waited for

    def factors(self) -> tuple[Tensor, Tensor]:
        """G, summed, and A, the mean."""
        outputs, inputs = (mirrored(each) if each.ndim == 3 else each for each in (self.outputs, self.inputs))
        places = max(1, int(self.places))
        if self.ones is None:
            return outputs, inputs / places
        size, matrix = inputs.shape[-1], inputs.ndim == 3
        mean = inputs.new_ones(len(inputs), *[size + 1] * (1 + matrix))
        torch.div(inputs, places, out=mean[:, :size, :size] if matrix else mean[:, :size])
        if matrix:
            mean[:, size, :size] = mean[:, :size, size] = self.ones / places
        return outputs, mean


class Factors:
    """Takes the forms of batch after batch: those of layers into their factors, the others into a diagonal."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        total: Mapping[str, Tensor],
        limit: Limit,
        widest: int,
        *,
        exact_trace: bool,
        tokens: bool,
    ) -> None:
        self.total = total
        self.exact_trace = exact_trace  # whether the squares of the layers' gradients are summed too
        self.layers: dict[Layer, Sums] = {}
        self._named = named
        self._squares = Squares(named, total, limit)
        self._limit = limit
        self._widest = widest
        self._tokens = tokens  # whether positions have losses of their own, one a site too: those without do not count
        self._plan: Plan | None = None
        self._known = Known(named)
        self._layer_of: dict[str, Layer] = {}  # by weight, once its first form was seen
        self._served: dict[Site, str] = {}  # weights' sites
        self._left: Plan = Plan({}, {}, ())
        self._heard: set[Site] = set()
        self._columns = 1
        self._waiting: dict[Site, tuple[str, Products, Tensor]] = {}  # inputs, and where a column had a gradient

    @property
    def why(self) -> Mapping[str, str]:
        """Reasons for which parameters are kept as a diagonal."""
        return self._known.why

    @property
    def sums(self) -> dict[str, Tensor]:
        """Everything that must stay finite."""
        folded = {name for layer in self.layers for name in layer.shapes}
        found = {name: entries for name, entries in self.total.items() if name not in folded}
        for layer, sums in self.layers.items():  # a square on the diagonal is not finite where its factor is not
            found[f"{layer.weight} (outputs)"], found[f"{layer.weight} (inputs)"] = map(
                diagonal, (sums.outputs, sums.inputs)
            )
        return found

    def serves(self, site: Site) -> bool:
        return site in self._served or self._squares.serves(site)

    def begin(self, plan: Plan, graph: Graph, examples: int, columns: int) -> None:
        if plan is not self._plan:
            self._known.meet(plan, graph)
            self._plan = plan
            self._serve(plan)
        self._heard.clear()
        self._waiting.clear()
        self._columns = columns
        self._squares.begin(self._left, graph)

    def take(self, site: Site, form: Form) -> None:
        name = self._served.get(site)
        if name is not None:
            with torch.no_grad():
                self._add(name, site, form)
        if name is None or self.exact_trace:
            self._squares.take(site, form)

    def done(self) -> None:
        self._squares.done()

    @torch.no_grad()
    def finish(self) -> None:
        for name, parts, mask in self._waiting.values():
            self._add_inputs(name, parts, parts, mask)
        self._waiting.clear()
        self._squares.finish()

    def score(self, name: str, scores: Tensor) -> None:
        self._squares.score(name, scores)

    def meet(self, ranks: Ranks) -> None:
        """Add up the layers that any rank has met: one may have had no batch that reaches a layer, or none at all."""
        if not ranks.apart:
            return
        folded = {name for pair in self._known.biases.items() for name in pair}
        said = ranks.gathered((list(self.layers), {name: why for name, why in self.why.items() if name not in folded}))
        every = {layer.weight: layer for layers, _ in said for layer in layers}
        for layer in (layer for layers, _ in said for layer in layers):
            others = [why for _, why in said for name in layer.shapes if name in why]
            if others or every[layer.weight] != layer:
                raise DataError(
                    f"`{layer.weight}` is a layer on one rank, and used in another way on a different one, so that its "
                    "factors would be of two things. Give all ranks batches that the model treats alike, leave it out "
                    "with `only=`, or use diagonal_fisher."
                )
        self._known.why |= {name: why for _, each in said for name, why in each.items()}
        for _, layer in sorted(every.items()):
            sums = self.layers.setdefault(layer, self._empty(layer))
            places = torch.as_tensor(sums.places, dtype=torch.long, device=sums.outputs.device)
            ranks.add_(sums.outputs, sums.inputs, places, *([] if sums.ones is None else [sums.ones]))
            sums.places = places
        kept = {name for layer in every.values() for name in layer.shapes} if not self.exact_trace else set()
        ranks.add_(*(entries for name, entries in self.total.items() if name not in kept))

    def _serve(self, plan: Plan) -> None:
        self._served = {site: name for name in self._known.biases for site in plan.sites.get(name, ())}
        folded = {name for pair in self._known.biases.items() for name in pair}
        self._left = (
            plan
            if self.exact_trace
            else replace(plan, sites={name: sites for name, sites in plan.sites.items() if name not in folded})
        )

    def _add(self, name: str, site: Site, form: Form) -> None:
        parts = form.whole() if isinstance(form, Shifted) else form
        if not isinstance(parts, Products):
            raise DataError(
                f"the rule for {site.operation} gave no product for `{name}`. diagonal_fisher takes any form."
            )
        layer = self._layer_of.get(name)
        if layer is None:
            layer = self._layer_of[name] = self._made(name, site, parts)
        sums = self.layers[layer]
        new = site not in self._heard  # the columns of an exact Fisher share their inputs
        self._heard.add(site)
        # Positions of a sequence may be padding; the places of a convolution's kernel all count.
        counts = site.operation != "ConvolutionBackward0" and (self._tokens or parts.positions > 1)
        self._add_side(name, form, parts, sums.outputs, inputs=False)
        if counts and self._columns > 1:  # one that has a gradient in any column counts
            mask = _counted(parts)
            before = self._waiting.get(site)
            self._waiting[site] = (name, parts, mask if before is None else torch.maximum(mask, before[2]))
        elif new:
            self._add_inputs(name, form, parts, _counted(parts) if counts else None)

    def _add_inputs(self, name: str, form: Form, parts: Products, mask: Tensor | None) -> None:
        sums = self.layers[self._layer_of[name]]
        sums.places = sums.places + (parts.examples * parts.positions if mask is None else mask.sum(dtype=torch.long))
        self._add_side(name, form, parts, sums.inputs, inputs=True, mask=mask, ones=sums.ones)

    def _add_side(
        self, name: str, form: Form, parts: Products, total: Tensor, *, inputs: bool, mask: Tensor | None = None,
        ones: Tensor | None = None,
    ) -> None:  # fmt: skip
        if parts.inputs_left == inputs:
            rows = parts.left(0, parts.examples)
            _add_(total, rows if mask is None else rows * mask, ones)
            return
        step = self._limit.examples(max(1, parts.share), f"what the kernel of `{name}` saw")
        if isinstance(form, Shifted) and form.patches and total.ndim == 3:
            for each in form.patches:
                each.add_grams_(total, step)
                if ones is not None:
                    ones += each.sums(ones.dtype)
            return
        if parts.share and total.device.type == "cpu":
            step = max(1, min(step, CACHED // parts.share))
        for start in range(0, parts.examples, step):
            stop = min(start + step, parts.examples)
            rows = parts.right(start, stop)
            _add_(total, rows if mask is None else rows * mask[start:stop], ones)

    def _made(self, name: str, site: Site, parts: Products) -> Layer:
        parameter = self._named[name]
        seen_turned = bool(turned(site, parameter))
        rows = parts.columns if seen_turned else parts.rows
        layer = Layer(
            name, self._known.biases[name], parameter.shape, parts.groups, rows, parts.inputs_left != seen_turned
        )
        self.layers[layer] = self._empty(layer)
        return layer

    def _empty(self, layer: Layer) -> Sums:
        parameter = self._named[layer.weight]
        outputs, inputs = (
            torch.zeros(
                layer.groups, *[size] * (1 + (size <= self._widest)), dtype=wide(parameter), device=parameter.device
            )
            for size in (layer.outputs, layer.inputs - (layer.bias is not None))
        )
        ones = None if layer.bias is None else inputs.new_zeros(layer.groups, inputs.shape[-1])
        return Sums(outputs, inputs, ones)


def _add_(total: Tensor, sides: Tensor, ones: Tensor | None = None) -> None:
    """Add Σ x xᵀ, or its diagonal, and Σ x to ones, for sides of (examples, groups, positions, size)."""
    if ones is not None:
        ones += sides.sum((0, 2), dtype=ones.dtype)
    add = add_grams_ if total.ndim == 3 else add_squares_
    for group, rows in enumerate(sides.unbind(1)):
        add(total[group], rows)


def _counted(parts: Products) -> Tensor:
    """1 for positions with a gradient: padding and ends have none, and are no inputs. (examples, 1, positions, 1)."""
    grads = (parts.right if parts.inputs_left else parts.left)(0, parts.examples)
    longest: Tensor = torch.linalg.vector_norm(grads, torch.inf, dim=(1, 3), keepdim=True)  # reads once, writes little
    return longest.sign_()  # of the dtype of what it multiplies: the quick kernels take no two
