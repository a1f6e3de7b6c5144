"""Natural-gradient variational learning at about the cost of Adam, with a prior for every weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import part
from ..errors import ArgumentError, InertError, MismatchError, require_number
from ..kernels.natural import Natural, bend_, natural_step_, shake_
from ..likelihood import Likelihood
from ..params import matched, shapes, unwrapped
from ..pieces import gradient, placed
from ..posterior import Memory, Posterior, as_posterior
from .given import fitting, require_distribution, require_same
from .options import checked_options, grouped
from .outcome import found_posterior
from .parts import bundled, seed_of
from .pending import Pending

_WATCHED = 3  # steps in which gradients that were scaled in between are looked for
_GONE = 0.01  # a share of the start that need not be mentioned


class IVON(Optimizer):
    """Learns q(θ) = N(m, (N h + Λ₀)⁻¹): the mean by natural gradients, the curvature h by how gradients bend.

    The update of the improved variational online Newton method (Shen et al. 2024; Lin et al. 2020), around a prior
    N(μ₀, Λ₀⁻¹) with a mean and a precision for every weight, so that one task's posterior is the next task's prior:

        θ ~ N(m, 1/(N(h + s))),  ĝ = ∇ mean loss at θ,  ĥ = ĝ (θ − m) N (h + s),  s = Λ₀/N
        g ← β₁g + (1 − β₁)ĝ,  h ← β₂h + (1 − β₂)ĥ + ½(1 − β₂)²(h − ĥ)²/(h + s)
        m ← m − lr (g/(1 − β₁ᵗ) + s(m − μ₀)) / (h + s), what lr multiplies being no longer than `radius`

        optimizer = holdfast.IVON(model, prior, holdfast.categorical, num_data=len(data), lr=...)
        for x, y in loader:
            optimizer.zero_grad()
            with optimizer.sampled():
                loss(model(x), y).backward()
            optimizer.step()
        posterior = optimizer.posterior()
    """

    closure_at_a_draw = True  # a hold's pull, which is added to a closure's gradients, would be taken for curvature

    def __init__(
        self,
        model: nn.Module,
        prior: Posterior | Memory,
        likelihood: Likelihood,
        *,
        num_data: float,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        start: float = 0.03,
        radius: float = 1.0,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
    ) -> None:
        require_distribution(likelihood)
        count = require_number(num_data, "num_data, the number of examples (or tokens),", positive=True)
        self._given, self._model = model, unwrapped(model)
        self._likelihood, self._num_data, self._seed = likelihood, count, seed
        self._prior = fitting(self._model, as_posterior(prior), likelihood.unit)
        entries = self._prior.precision.entrywise()
        if entries is None:
            raise MismatchError(
                "IVON's prior has one precision for each weight, and this one is "
                f"{type(self._prior.precision).__name__}. Train by holdfast.mean_field, which takes every structure."
            )
        named = self._params()
        narrow = [name for name, p in named.items() if p.dtype not in (torch.float32, torch.float64)]
        if narrow:
            raise ArgumentError(
                f"`{narrow[0]}` is {named[narrow[0]].dtype}, whose digits cannot show a small deviation. Keep weights "
                "in float32, and let torch.autocast compute in half precision."
            )
        self._names = {parameter: name for name, parameter in named.items()}
        self._pending = Pending()
        self._inside = self._made = False
        defaults = checked_options({"lr": lr, "betas": betas, "start": start, "radius": radius})
        defaults |= {"prior": self._prior.id, "num_data": count, "noise": 0}
        super().__init__(grouped(named, options or {}), defaults)
        self._made = True
        self._priors = {name: placed(entries[name] / count, p) for name, p in named.items()}  # s = Λ₀/N
        self._centers = {name: placed(self._prior.mean[name], p) for name, p in named.items()}  # μ₀
        self._every()  # a checkpoint is loaded into a state that is there

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: it has all that the prior has. `options` makes groups."""
        if self._made:
            raise ArgumentError(
                "IVON has all parameters of its prior: make a new one for others, and give options={'head.*': {'lr': "
                "0.1}} for some to have their own settings."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise ArgumentError("IVON is of one model, and not copied: save its state_dict(), or make another for a copy.")

    @contextmanager
    def sampled(self, loss_scale: float | Tensor = 1.0) -> Iterator[None]:
        """Inside, the weights are a draw from q: run the loss forward and backward there; afterwards they are the mean.

        Used twice within a step, the second draw is the first one's mirror image; a loss is then divided by the number
        of draws, as in accumulation. Backward passes that DistributedDataParallel does not synchronize (`no_sync`)
        belong into one draw with the one that it does. A GradScaler's factor is given as
        `loss_scale=scaler.get_scale()`. Under `torch.no_grad()` it only draws, to look at.
        """
        if not torch.is_grad_enabled():
            with self._drawn():
                yield
            return
        params = self._every()
        if not self._pending.kept(params):
            self._forget()
        self._pending.begin(params)
        with self._drawn() as back:
            yield
            back += self._learned(params, loss_scale)

    @contextmanager
    def _drawn(self) -> Iterator[list[nn.Parameter]]:
        """The weights at a draw; those that are given are at their mean already when it ends."""
        if self._inside:
            raise ArgumentError("sampled() within sampled(): draw once for each backward pass.")
        params, back = self._every(), list[nn.Parameter]()
        self._shake(bundled(params))
        self._inside = True
        try:
            yield back
        finally:
            self._inside = False
            done = set(back)
            with torch.no_grad():
                for p in params:
                    if p not in done:
                        part(p.data).copy_(part(self.state[p]["mean"]))

    @torch.no_grad()
    def _shake(self, bundles: list[list[nn.Parameter]]) -> None:
        mirrored = self._pending.draws % 2 == 1
        self.param_groups[0]["noise"] += not mirrored
        for params in bundles:
            seed = seed_of(params[0], self._seed, self.param_groups[0]["noise"])
            values, means, curvatures, priors = self._roles(params, "mean", "curvature")
            shake_(values, means, curvatures, priors, self._num_data, seed, -1.0 if mirrored else 1.0)

    @torch.no_grad()
    def _learned(self, params: list[nn.Parameter], loss_scale: float | Tensor) -> list[nn.Parameter]:
        """Learn how gradients bend; the parameters that this was learned of are at their mean again."""
        self._pending.require_gradients(params)
        if getattr(self._given, "require_backward_grad_sync", True) is False:
            raise ArgumentError(
                "DistributedDataParallel did not synchronize this backward pass (no_sync), and every process would "
                "learn a curvature of its own. Run all passes of a step inside one sampled(), the synchronized one "
                "last."
            )
        learned = [p for p in params if p.grad is not None]
        if any(p.grad is not None and p.grad.is_sparse for p in learned):
            raise ArgumentError("IVON needs dense gradients: make the embedding with sparse=False.")
        found = {p: gradient(p) for p in learned}
        for bundle in bundled(learned):
            grads = [self._pending.new_part(p, found[p]) for p in bundle]
            if isinstance(loss_scale, Tensor) or loss_scale != 1:
                grads = [grad / loss_scale for grad in grads]
            values, means, curvatures, bends, priors = self._roles(bundle, "mean", "curvature", "bend")
            bend_(values, means, curvatures, priors, grads, bends, self._num_data)
        unscaled = not isinstance(loss_scale, Tensor) and loss_scale == 1
        self._pending.end(params, watched=unscaled and self.param_groups[0].get("steps", 0) < _WATCHED)
        return learned

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the mean and of the curvature, from what was drawn since the last one.

        A closure, which zeroes the gradients and goes backward, is run at a draw of its own.
        """
        loss = None
        if closure is not None:
            self._forget()
            with torch.enable_grad(), self.sampled():
                loss = closure()
        if self._inside:
            raise ArgumentError("step() inside sampled(): leave the `with` block first, and step at the mean.")
        if not self._pending.draws:
            raise InertError(
                "IVON learns from gradients at drawn weights, and nothing was drawn: run the loss forward and backward "
                "inside `with optimizer.sampled():`, or give step a closure."
            )
        self._pending.require_scale(self._every())
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            momentum, memory = group["betas"]
            numbers = Natural(
                float(group["lr"]), momentum, memory, 1 - momentum ** group["steps"], float(group["radius"])
            )
            for params in bundled(p for p in group["params"] if p.requires_grad):
                values, momenta, curvatures, bends, priors = self._roles(params, "momentum", "curvature", "bend")
                centers = [part(self._centers[self._names[p]]) for p in params]
                roles = (values, [gradient(p) for p in params], momenta, curvatures, bends, priors, centers)
                natural_step_(roles, numbers)
        self._pending = Pending()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are forgotten, and what was learned from them of the curvature."""
        super().zero_grad(set_to_none)
        self._forget()

    @property
    def start_left(self) -> float:
        """The share β₂ᵗ of the start that is still in h: curvature that no data gave, and that holds all the same."""
        return max(float(group["betas"][1] ** group.get("steps", 0)) for group in self.param_groups)

    @torch.no_grad()
    def posterior(self) -> Posterior:
        """q as the Gaussian that everything else takes: to hold to, to keep, to be the next prior. Λ = N h + Λ₀."""
        if self._inside:
            raise ArgumentError("posterior() inside sampled(): the weights are a draw there, and not the mean.")
        if not any(group.get("steps") for group in self.param_groups):
            raise InertError("no step was made: there is nothing but the prior.")
        self._every()
        params = self._params()
        entries = {
            name: self._num_data * (self.state[p]["curvature"] + self._priors[name]) for name, p in params.items()
        }
        left = self.start_left
        how = "IVON" + (f", start {self.param_groups[0]['start']:g} at {left:.2g}" if left > _GONE else "")
        return found_posterior(self._model, params, entries, self._prior, self._likelihood, self._num_data, how)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, under the same prior and the same `num_data`."""
        for group in state_dict["param_groups"]:
            require_same(group, prior=self._prior.id, num_data=self._num_data)
        super().load_state_dict(state_dict)
        self._pending.draws = 1  # what was drawn for a step that was not made
        self._forget()

    def _params(self) -> dict[str, nn.Parameter]:
        return matched(self._model, shapes(self._prior.mean), ties=self._prior.ties)

    def _every(self) -> list[nn.Parameter]:
        """All parameters, each with its state."""
        found: list[nn.Parameter] = []
        for group in self.param_groups:
            for p in group["params"]:
                found.append(p)
                state, name = self.state[p], self._names[p]
                if not state:
                    zero = torch.zeros_like(p, requires_grad=False, memory_format=torch.contiguous_format)
                    state |= {"momentum": zero, "bend": zero.clone(), "mean": zero.clone()}
                    state["curvature"] = zero + group["start"]
                if self._priors[name].device != p.device:  # a trainer has moved the model since
                    state |= {key: each.to(p.device) for key, each in state.items()}
                    for kept in (self._priors, self._centers):
                        kept[name] = placed(kept[name], p)
        return found

    def _forget(self) -> None:
        """What was drawn for a step that was not made (a GradScaler's overflow) leaves nothing behind."""
        if self._pending.draws:
            torch._foreach_zero_([part(state["bend"]) for state in self.state.values()])
        self._pending = Pending()

    def _roles(self, params: list[nn.Parameter], *keys: str) -> list[list[Tensor]]:
        """What this process has of the parameters, of parts of their state, and of s."""
        states = [[part(self.state[p][key]) for p in params] for key in keys]
        return [[part(p.data) for p in params], *states, [part(self._priors[self._names[p]]) for p in params]]
