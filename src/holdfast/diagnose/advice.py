"""What to do about it, in plain words: each sentence follows from the numbers by a threshold that it states."""

from __future__ import annotations

from .fishers import LITERAL, Fishers
from .optimum import AS_MUCH, NOTHING, Optimum
from .structure import Structure
from .taylor import FACTOR, NEGLIGIBLE, Taylor, forecast_by

# A cheaper structure will do if its hold leaves up to so many times what the best one leaves, or a hundredth more;
# where holds are too large to compute, a diagonal if it has so much of H.
TWICE, HUNDREDTH, MOSTLY = 2.0, 0.01, 0.9
# The observed Fisher is told to be too small under this part of the best one; orders agree above this correlation.
FADED, SAME_ORDER = 0.5, 0.9
# A fine-tune that went this many times farther than the quadratic is believed is no matter of a hold any more.
FAR = 4.0
# A mean confidence from which a vanishing Fisher is the confidence's doing.
SURE = 0.999

_CALLS = {
    "diagonal Fisher": "diagonal_fisher",
    "low-rank Fisher": "lowrank_fisher",
    "Kronecker Fisher": "kronecker_fisher",
    "dense Fisher": "dense_fisher",
}


def advice(optimum: Optimum, taylor: Taylor, structure: Structure, fishers: Fishers, unit: str) -> tuple[str, ...]:
    """Sentences: the optimum, which structure, which Fisher, how far, hold or retrain."""
    if not fishers.of(fishers.best).total > 0:
        sure = fishers.confidence is not None and fishers.confidence > SURE
        why = (
            "The model is certain to the last digit: take the Fisher of softer answers (softened), train with label "
            "smoothing, or hold it by its answers (distill)."
            if sure
            else "Its outputs do not depend on its parameters here: are units dead, or is a part detached?"
        )
        return (f"The {fishers.best} Fisher is zero: a penalty would hold nothing. {why}",)
    chosen = recommended(structure)
    return (
        *_optimum(optimum),
        _structure(taylor, structure, chosen),
        *_fisher(fishers),
        _far(taylor, chosen, unit),
        _hold(taylor, chosen, unit),
    )


def recommended(structure: Structure) -> str:
    """The cheapest structure whose hold costs up to TWICE the best one's; where that is too large to compute, Kronecker
    factors unless the diagonal is nearly all of H."""
    if structure.held:
        least = min(each.cost for each in structure.held)
        return next(each.structure for each in structure.held if each.cost <= TWICE * least + HUNDREDTH)
    if structure.all.squares >= MOSTLY:
        return "diagonal Fisher"
    return "Kronecker Fisher" if structure.factored else "low-rank Fisher"


def _optimum(optimum: Optimum) -> tuple[str, ...]:
    if optimum.part <= NOTHING:
        return (optimum.verdict,)
    if optimum.part <= AS_MUCH and optimum.aligned <= 2:
        return (
            optimum.verdict,
            "The gradients of single examples cancel about as well as chance would have it: on data that the model was "
            "not trained on, one cannot expect more.",
        )
    return (
        optimum.verdict,
        "Train on with a falling learning rate before the Fisher is taken, or expect the old loss to change by gᵀδ.",
    )


def _structure(taylor: Taylor, structure: Structure, chosen: str) -> str:
    share = structure.all
    held = f"{_percent(share.squares)} of H's squares"
    if share.absolute is None:
        held += f" (± {100 * share.error:.1f}, by {structure.probes} probes)"
    else:
        held += f" and {_percent(share.absolute)} of Σ|H_ij|"
    if structure.held:
        where = "the fine-tune" if taylor.along("moved") else "a random move"
        listed = ", ".join(f"{_short(each.structure)} {_percent(each.cost)}" for each in structure.held)
        why = f"A hold that leaves half of {where} leaves of its cost: {listed}"
        rule = f"the cheapest structure within {TWICE:g} times the best, or 1 % more"
    else:
        why = (
            "Kronecker factors hold what layers know together"
            if structure.factored
            else "No layer could be factored, and directions hold some of what the diagonal leaves"
        )
        rule = f"the diagonal is enough from {100 * MOSTLY:.0f} % on"
    return f"Use {_CALLS[chosen]}. The diagonal holds {held}. {why} ({rule})."


def _fisher(fishers: Fishers) -> tuple[str, ...]:
    best, observed, literal = fishers.of(fishers.best), fishers.of("observed"), fishers.of(LITERAL)
    said = []
    if fishers.best != "observed" and best.total > 0:
        part = observed.total / best.total
        sure = "" if fishers.confidence is None else f" at a mean confidence of {fishers.confidence:.3f}"
        if part < FADED:
            said.append(
                f"Do not use observed labels: their Fisher has {part:.2g} of the mass of the {fishers.best} one{sure}, "
                "and loses it faster as the model grows sure. targets='expected' or 'sampled' keeps it."
            )
        else:
            said.append(f"The observed Fisher has {part:.2g} times the mass of the {fishers.best} one{sure}.")
    if fishers.exact_hessian:
        order = "as" if best.rank >= SAME_ORDER else "otherwise than"
        said.append(
            f"The {fishers.best} Fisher orders the entries {order} the Hessian's diagonal does (rank correlation "
            f"{best.rank:.2f}) and has {best.scale:.2g} times its sum."
        )
    said.append(
        f"The square of the total gradient is no Fisher: it has {literal.scale:.2g} times the Hessian's sum here, and "
        f"would have none at the optimum; its rank correlation with the {fishers.best} Fisher is "
        f"{literal.rank_fisher:.2f}."
    )
    return tuple(said)


def _far(taylor: Taylor, chosen: str, unit: str) -> str:
    where = "the fine-tune" if taylor.along("moved") else "random directions"
    hessian, own = taylor.nearest("½δᵀHδ"), taylor.nearest(forecast_by(chosen))
    rule = f"within a factor of {FACTOR:g}, or {NEGLIGIBLE:g} nats"
    if not hessian.distance:
        return f"Along {where}, ½δᵀHδ is believed nowhere ({rule}): trust no forecast by a quadratic here."
    least = "at least " if hessian.beyond else ""
    return (
        f"Along {where}, ½δᵀHδ is believed up to {least}‖δ‖ = {hessian.length:.2g}, {hessian.relative:.2g} of the "
        f"weights' norm, where the old loss has {_moved(hessian.rise)} nats per {unit} ({rule}); that of the "
        f"recommended Fisher up to {own.relative:.2g}."
    )


def _moved(rise: float) -> str:
    return f"risen by {rise:.2g}" if rise >= 0 else f"fallen by {-rise:.2g}"


def _hold(taylor: Taylor, chosen: str, unit: str) -> str:
    radius = taylor.nearest("½δᵀHδ")
    if not taylor.along("moved"):
        if radius.beyond:
            return "Hold: as far as was looked, the quadratic prices what a move does to the old data."
        return (
            f"Hold while new training stays within {radius.relative:.2g} of the weights' norm; if the new task must go "
            "farther, train again on everything. Give moved= to see how far a fine-tune goes."
        )
    (curve,) = taylor.along("moved")
    said, true = curve.forecasts[forecast_by(chosen)][-1], curve.rises[-1]
    priced = (
        f"the fine-tune raised the old loss by {true:.3g} nats per {unit}; the recommended Fisher forecast {said:.3g}"
    )
    if true < -NEGLIGIBLE:
        return (
            f"No hold is needed: the fine-tune lowered the old loss by {-true:.3g} nats per {unit}. The model was not "
            "at its optimum, and Λ belongs there: train on before the Fisher is taken."
        )
    if abs(true) <= NEGLIGIBLE:
        return f"No hold is needed: {priced}."
    if radius.distance >= 1:
        return f"Hold: {priced}, and the whole way is where the quadratic is believed."
    times = f"It went {1 / radius.distance:.2g} times as far as the quadratic is believed" if radius.distance else ""
    if radius.distance * FAR >= 1:
        return f"Hold: {priced}. {times}, and a hold keeps it nearer."
    return (
        f"Train again on everything if you can: {priced}. {times or 'Nowhere on its way is the quadratic believed'}. A "
        "hold ranks the directions out there and does not price them; holding by answers (distill) needs no quadratic."
    )


def _short(name: str) -> str:
    return name.removesuffix(" Fisher")


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %"
