"""The sums that Kronecker factors are made of, as the taps bring a layer's inputs and its outputs' gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import DataError
from ..kernels import add_gram_, add_squares_, mirrored
from ..precision.factors import diagonal
from ..precision.layers import Layer
from .forms import CACHED, Form, Limit, Products, Shifted, wide
from .graph import Graph
from .plan import Plan, Site
from .squares import Squares

# The operations that multiply by a weight, and the inputs at which the weight and the bias enter.
_WEIGHTS = {
    "AddmmBackward0": (1, 2), "MmBackward0": (0, 1), "BmmBackward0": (0, 1), "ConvolutionBackward0": (1,),
}  # fmt: skip
_BIASES = {"AddmmBackward0": 0, "ConvolutionBackward0": 2}


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
        self.why: dict[str, str] = {}  # reasons for which a parameter is kept as a diagonal
        self._named = named
        self._squares = Squares(named, total, limit)
        self._limit = limit
        self._widest = widest
        self._tokens = tokens  # whether positions have losses of their own, or none: those do not count
        self._plan: Plan | None = None
        self._layer_of: dict[str, Layer | None] = {}  # by weight; None until its first form is seen
        self._biases: dict[str, str] = {}  # by weight
        self._served: dict[Site, str] = {}  # weights' sites
        self._left: Plan = Plan({}, {}, ())
        self._heard: set[Site] = set()
        self._seen: dict[str, set[tuple[int, bool | None]]] = {}  # how each layer's weight is used

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
            self._sort(plan, graph)
            self._plan = plan
            self._serve(plan)
        self._heard.clear()
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

    def finish(self) -> None:
        self._squares.finish()

    def score(self, name: str, scores: Tensor) -> None:
        self._squares.score(name, scores)

    def _sort(self, plan: Plan, graph: Graph) -> None:
        """Which parameters are layers, as the first batch that uses them does."""
        uses = _uses(plan)
        fresh = {name: sites for name, sites in plan.sites.items() if not self._known(name)}
        for name, sites in fresh.items():
            why = _unfit(sites, uses, self._named[name])
            if why:
                self.why[name] = why
            else:
                self._layer_of[name] = None
        self.why |= {name: why for name, why in plan.general.items() if not self._known(name)}
        at: dict[int, list[str]] = {site.place: [] for sites in fresh.values() for site in sites}
        for weight in (name for name in fresh if name in self._layer_of):
            for site in fresh[weight][:1]:
                at[site.place].append(weight)
        for name, sites in fresh.items():
            for weight in {weight: None for site in sites for weight in at[site.place]}:
                if _is_bias(sites, fresh[weight], self._named[name], graph):
                    self._biases[weight] = name

    def _known(self, name: str) -> bool:
        return name in self._layer_of or name in self.why

    def _serve(self, plan: Plan) -> None:
        lost = [name for name in self._layer_of if name not in plan.sites and name not in plan.unused]
        if lost:
            raise DataError(
                f"`{lost[0]}` was tapped as a layer in the first batch, and cannot be in this one: "
                f"{plan.general.get(lost[0], 'it is used differently')}. Give batches that the model treats alike, or "
                "use diagonal_fisher."
            )
        uses = _uses(plan)
        weights: dict[str, list[str]] = {}
        for weight, bias in self._biases.items():
            weights.setdefault(bias, []).append(weight)
        for name in self._layer_of:
            self._require_alike(name, plan, uses, weights.get(self._biases.get(name, ""), []))
        self._served = {site: name for name in self._layer_of for site in plan.sites.get(name, ())}
        folded = {*self._layer_of, *self._biases.values()}
        self._left = (
            plan
            if self.exact_trace
            else replace(plan, sites={name: sites for name, sites in plan.sites.items() if name not in folded})
        )

    def _require_alike(self, name: str, plan: Plan, uses: Counter[Site], weights: list[str]) -> None:
        """Raise where a batch uses a layer in another way than the batch that made it one; `weights` share its bias."""
        sites, bias = plan.sites.get(name, ()), self._biases.get(name)
        places = {site.place for weight in weights for site in plan.sites.get(weight, ())}
        apart = bias is not None and {site.place for site in plan.sites.get(bias, ())} != places
        another = bool(sites) and bool(_unfit(sites, uses, self._named[name]))
        ways = {(site.slot, _turned(site, self._named[name])) for site in sites}
        turned = bool(ways) and self._seen.setdefault(name, ways) != ways
        if apart or another or turned:
            raise DataError(
                f"`{name}` is a layer{f' with `{bias}`' if bias else ''} in one batch, and used in another way in a "
                "later one, so that its factors would be of two things. Give batches that the model treats alike, "
                "leave it out with `only=`, or use diagonal_fisher."
            )

    def _add(self, name: str, site: Site, form: Form) -> None:
        parts = form.whole() if isinstance(form, Shifted) else form
        if not isinstance(parts, Products):
            raise DataError(
                f"the rule for {site.operation} gave no product for `{name}`. diagonal_fisher takes any form."
            )
        layer = self._layer_of[name]
        if layer is None:
            layer = self._layer_of[name] = self._made(name, site, parts)
        sums = self.layers[layer]
        new = site not in self._heard  # the columns of an exact Fisher share their inputs
        self._heard.add(site)
        left, right = (sums.inputs, sums.outputs) if parts.inputs_left else (sums.outputs, sums.inputs)
        mask = _counted(parts) if new and self._tokens and parts.positions > 1 and parts is form else None
        if new:
            sums.places = sums.places + (
                parts.examples * parts.positions if mask is None else mask.sum(dtype=torch.long)
            )
        if new or not parts.inputs_left:
            ones = sums.ones if parts.inputs_left else None
            rows = parts.left(0, parts.examples)
            _add_(left, rows if mask is None or not parts.inputs_left else rows * mask, ones)
        if new or parts.inputs_left:
            ones = None if parts.inputs_left else sums.ones
            step = self._limit.examples(max(1, parts.share), f"what the kernel of `{name}` saw")
            if isinstance(form, Shifted) and form.patches and right.ndim == 3:
                for each in form.patches:
                    each.add_grams_(right, step)
                    if ones is not None:
                        ones += each.sums(ones.dtype)
                return
            if parts.share and right.device.type == "cpu":
                step = max(1, min(step, CACHED // parts.share))
            for start in range(0, parts.examples, step):
                stop = min(start + step, parts.examples)
                rows = parts.right(start, stop)
                _add_(right, rows if mask is None or parts.inputs_left else rows * mask[start:stop], ones)

    def _made(self, name: str, site: Site, parts: Products) -> Layer:
        parameter = self._named[name]
        seen_turned = bool(_turned(site, parameter))
        rows = parts.columns if seen_turned else parts.rows
        layer = Layer(
            name, self._biases.get(name), parameter.shape, parts.groups, rows, parts.inputs_left != seen_turned
        )
        outputs, inputs = (
            torch.zeros(
                layer.groups, *[size] * (1 + (size <= self._widest)), dtype=wide(parameter), device=parameter.device
            )
            for size in (layer.outputs, layer.inputs - (layer.bias is not None))
        )
        ones = None if layer.bias is None else inputs.new_zeros(layer.groups, inputs.shape[-1])
        self.layers[layer] = Sums(outputs, inputs, ones)
        return layer


def _add_(total: Tensor, sides: Tensor, ones: Tensor | None = None) -> None:
    """Add Σ x xᵀ, or its diagonal, and Σ x to ones, for sides of (examples, groups, positions, size)."""
    if ones is not None:
        ones += sides.sum((0, 2), dtype=ones.dtype)
    add = add_gram_ if total.ndim == 3 else add_squares_
    for group, rows in enumerate(sides.unbind(1)):
        if rows.mT.is_contiguous() and len(rows) > 1 and not rows.is_contiguous():  # as a convolution unfolds them
            for each in rows:
                add(total[group], each)
        else:
            add(total[group], rows.reshape(-1, rows.shape[-1]))


def _counted(parts: Products) -> Tensor:
    """1 for positions with a gradient: padding and ends have none, and are no inputs. (examples, 1, positions, 1)."""
    grads = (parts.right if parts.inputs_left else parts.left)(0, parts.examples)
    longest: Tensor = torch.linalg.vector_norm(grads, torch.inf, dim=(1, 3), keepdim=True)  # reads once, writes little
    return longest.sign_()  # of the dtype of what it multiplies: the quick kernels take no two


def _uses(plan: Plan) -> Counter[Site]:
    """How many parameters meet the examples at each site."""
    return Counter(site for sites in plan.sites.values() for site in sites)


def _unfit(sites: tuple[Site, ...], uses: Counter[Site], parameter: Tensor) -> str:
    """Why a parameter is no layer's weight; nothing if it is."""
    for site in sites:
        if site.slot not in _WEIGHTS.get(site.operation, ()):
            return f"it is used in {site.operation}"
        if uses[site] > 1 or site.route.steps is None:
            return "it is computed with before it is used"
        if _turned(site, parameter) is None:
            return "a part of it is used, or in another order"
    if len({(_turned(site, parameter), site.weight, site.slot) for site in sites}) > 1:
        return "it is used in two ways"
    return ""


def _is_bias(sites: tuple[Site, ...], weights: tuple[Site, ...], bias: Tensor, graph: Graph) -> bool:
    """Whether a parameter is added to each output of a weight, wherever the weight is used, and nowhere else."""
    by_place = {site.place: site for site in weights}
    if {site.place for site in sites} != set(by_place) or len(sites) != len(weights):
        return False
    for site in sites:
        weight = by_place[site.place]
        call = weight.call(graph)
        if site.slot != _BIASES.get(site.operation) or site.route.steps is None:
            return False
        if site.operation == "ConvolutionBackward0":
            # Transposed, an input's outputs are a whole kernel's, and the bias is one of each place.
            if call.saved("transposed"):
                return False
            outputs, seen = weight.weight[0], site.weight
        else:
            last = weight.slot == 2
            outputs = weight.weight[1 if last else 0]
            seen = torch.Size([outputs] if last else [outputs, 1])
            if call.saved("alpha") != call.saved("beta"):
                return False
        if bias.shape != (outputs,) or site.weight != seen:
            return False
    return True


def _turned(site: Site, parameter: Tensor) -> bool | None:
    """Whether a weight is seen transposed; None where it is not its whole parameter, in one of the two orders."""
    seen = site.route.view(torch.empty(1, *parameter.shape, device="meta"))[0]
    if seen.numel() != parameter.numel() or seen.ndim < 2:
        return None
    plain, turned = seen.is_contiguous(), seen.mT.is_contiguous() and site.operation != "ConvolutionBackward0"
    if plain and turned:  # a single row or column, which is either
        return seen.shape[-2:] != parameter.shape[-2:]
    return turned if plain or turned else None
