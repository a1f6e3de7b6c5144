"""The first batch of a form: settle where each output holds the examples, and check it all on an example done alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import CheckError
from .batches import Batch
from .forms import Form, Limit
from .graph import Graph, tapped
from .plan import Plan, Site, planned
from .rules import RULES
from .scores import Scoring, accumulators, backward, require_finite_scores, tolerance
from .squares import Squares


def tried(
    scoring: Scoring, named: Mapping[str, Tensor], batch: Batch, losses: Tensor, graph: Graph, limit: Limit
) -> tuple[Plan, bool]:
    """The plan for batches of this form, and whether it may be kept for others.

    A few examples are run apart from their batch. The axes that differ are the examples'; where that leaves two
    readings (rows by position, then example, or the other way round), the gradients tell. Then one example's squares
    are compared with those of plain autograd.
    """
    # The examples with most to say; one of them twice where two are the whole batch.
    most = losses.detach().abs().sum(0).topk(2).indices.tolist()
    few = [*most, most[0]] if batch.size == 2 else most
    probe = batch.rows(few)
    probe_losses = scoring.losses(scoring.output(probe), probe)
    probe_graph = Graph(probe_losses, named)
    plan, twins = planned(graph, probe_graph, named, batch.size, len(few))

    # Unequal weights: the columns of an exact Fisher can add up to zero.
    weights = torch.arange(1, len(losses) + 1, dtype=losses.dtype, device=losses.device)
    apart: dict[int, Tensor] = {}
    settled: dict[Site, Site | str] = {}
    forms: dict[Site, Form] = {}
    places = plan.places
    loosest = [tolerance(losses), torch.finfo(losses.dtype).eps]  # of the precisions that gradients pass through

    def heard(place: int, grad: Tensor) -> None:
        loosest[:] = max(loosest[0], tolerance(grad)), max(loosest[1], torch.finfo(grad.dtype).eps)
        for site in places[place]:
            found = settled[site] = _settled(site, grad, apart.get(twins[site]), few, loosest[0])
            if isinstance(found, Site):
                call = found.call(graph)
                form = RULES[site.operation](call, call.rows(grad))
                if form is None:
                    settled[site] = f"the rule for {site.operation} does not cover this use"
                else:
                    forms[found] = form.only(most[0])

    if places:
        with backward(losses):
            few_loss, loss = ((weights.unsqueeze(1) * each).sum() for each in (probe_losses, losses))
            tapped(few_loss, probe_graph, set(twins.values()), apart.__setitem__, retain=False)
            tapped(loss, graph, set(places), heard, retain=True)

    # A site that no gradient reached: zero for every example, in whichever layout.
    for site in (site for sites in places.values() for site in sites if site not in settled):
        settled[site] = site if len(site.splits) == 1 else _unsettled(site)
    reasons, sites = {}, {}
    for name, each in plan.sites.items():
        known = [settled[site] for site in each]
        said = [found for found in known if isinstance(found, str)]
        if said:
            reasons[name] = said[0]
        sites[name] = tuple(found for found in known if isinstance(found, Site))
    plan = replace(plan, sites=sites).without(reasons)
    keep = not any(isinstance(found, str) for found in settled.values())

    columns = scoring.of_example(batch.example(most[0]), list(named.values()))
    with torch.no_grad(), backward(losses):
        alone = {name: torch.stack(parts) for name, parts in zip(named, zip(*columns, strict=True), strict=True)}
        require_finite_scores(alone, batch)
        plain = {name: torch.tensordot(weights.to(parts), parts, 1) for name, parts in alone.items()}
        # What the graph does not show and yet has a gradient (a reentrant checkpoint) is left to the general path.
        hidden = [name for name in plan.unused if plain[name].any()]
        plan = plan.without(dict.fromkeys(hidden, "it is used where the graph does not show it"))
        total = accumulators({name: plain[name] for name in plan.sites})
        served = {site for sites in plan.sites.values() for site in sites}
        squares = Squares(plan, graph, named, total, limit)
        for site, form in forms.items():
            if site in served:
                squares.take(site, form)
        squares.done()
        squares.finish()
        # Gradients that are zero but for rounding (of an attention's key bias) agree in nothing else.
        noise = 10 * loosest[1] * max(float(gradient.norm()) for gradient in plain.values())
        for name, found in total.items():
            exact = plain[name].to(found.dtype).square()
            error, size = float((found - exact).norm()), float(exact.norm())
            if not error <= 2 * loosest[0] * size + noise**2:
                raise CheckError(_disagreement(name, plan.sites[name], error, size))
    return plan, keep


def _settled(site: Site, grad: Tensor, apart: Tensor | None, few: list[int], within: float) -> Site | str:
    """The site with the one layout under which examples have, in the batch, the gradients that they have apart."""
    apart = torch.zeros(()) if apart is None else apart
    fits = []
    for split in site.splits:
        here = split.rows(grad)[few]
        there = replace(split, examples=len(few)).rows(apart) if apart.ndim else torch.zeros_like(here)
        if bool((here - there).norm() <= within * there.norm()):
            fits.append(split)
    return replace(site, splits=tuple(fits)) if len(fits) == 1 else _unsettled(site)


def _unsettled(site: Site) -> str:
    return f"the examples cannot be told apart in the output of {site.operation}"


def _disagreement(name: str, sites: tuple[Site, ...], error: float, size: float) -> str:
    operations = ", ".join(sorted({site.operation for site in sites}))
    return (
        f"the taps and plain autograd disagree on `{name}` for one example: the squares of its gradient differ by "
        f"{error:.2e}, of {size:.2e} (operations: {operations}). Is there a rule of your own in holdfast.RULES, or an "
        "operation that treats a batch unlike its examples? taps=False does without taps."
    )
