"""Slow twins: the definitions, one example at a time, with nothing shared with the library but the likelihoods' nll."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import Case
from holdfast.likelihood import Bernoulli, Categorical, Gaussian


def examples(batches: list[Any]) -> list[Any]:
    """Every example as a batch of one."""
    singles = []
    for batch in batches:
        tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
        for n in range(len(tensors[0])):
            if isinstance(batch, dict):
                singles.append({key: value[n : n + 1] for key, value in batch.items()})
            else:
                singles.append(tuple(value[n : n + 1] for value in batch))
    return singles


def call(case: Case, model: nn.Module, example: Any) -> tuple[Tensor, Any]:
    """The output and the label of a batch of one."""
    label = example["labels"] if isinstance(example, dict) else example[-1]
    if case.forward is not None:
        return case.forward(model, example), label
    if isinstance(example, dict):
        return model(**{key: value for key, value in example.items() if key != "labels"}), label
    return model(example[0]), label


def possible_labels(case: Case, output: Tensor) -> list[tuple[Any, Tensor]]:
    """Every label an example can have, with its probability under the model."""
    if isinstance(case.likelihood, Categorical):
        p = output.softmax(-1)[0]
        return [(torch.tensor([c]), p[c]) for c in range(len(p))]
    if isinstance(case.likelihood, Bernoulli):
        p = output.sigmoid()
        combos = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * output.numel()).view(-1, *output.shape)
        return [(y, torch.where(y > 0, p, 1 - p).prod()) for y in combos]
    raise NotImplementedError(case.likelihood.name)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def flat_gradient(loss: Tensor, model: nn.Module) -> Tensor:
    grads = torch.autograd.grad(loss, list(trained(model).values()), retain_graph=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def fisher_loop(case: Case, model: nn.Module, batches: list[Any], targets: str) -> Tensor:
    """Σₙ E_y[∇nll ∇nllᵀ] as a dense matrix, from its definition. `batches` already carry the labels if sampled."""
    model.eval()
    total: Tensor = torch.zeros(())
    for example in examples(batches):
        output, label = call(case, model, example)
        if targets == "expected" and isinstance(case.likelihood, Gaussian):
            # E[(y−f)²] = σ²: the outputs' Fisher is 1/σ², by the Jacobian.
            rows = [flat_gradient(o, model) / case.likelihood.scale for o in output.flatten()]
            total = total + sum(torch.outer(row, row) for row in rows)
        elif targets == "expected":
            for y, probability in possible_labels(case, output.detach()):
                g = flat_gradient(case.likelihood.nll(output, y).sum(), model)
                total = total + probability * torch.outer(g, g)
        else:
            g = flat_gradient(case.likelihood.nll(output, label).sum(), model)
            total = total + torch.outer(g, g)
    return total


def hessian(case: Case, model: nn.Module, batches: list[Any]) -> Tensor:
    """∇² Σ nll over the trained parameters, by torch.func."""
    model.eval()
    named = trained(model)
    rest = {name: p.detach() for name, p in model.named_parameters() if name not in named}
    sizes = [p.numel() for p in named.values()]

    def loss(flat: Tensor) -> Tensor:
        pieces = {n: part.view(p.shape) for (n, p), part in zip(named.items(), flat.split(sizes), strict=True)}
        total = torch.zeros((), dtype=flat.dtype)
        for batch in batches:
            inputs = {k: v for k, v in batch.items() if k != "labels"} if isinstance(batch, dict) else None
            label = batch["labels"] if isinstance(batch, dict) else batch[-1]
            args, kwargs = ((), inputs) if inputs is not None else ((batch[0],), {})
            output = torch.func.functional_call(model, {**pieces, **rest}, args, kwargs)
            total = total + case.likelihood.nll(output, label).sum()
        return total

    return torch.func.hessian(loss)(torch.cat([p.detach().flatten() for p in named.values()]))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def squares_loop(
    model: nn.Module, batch: Any, nll: Any, forward: Any = lambda model, example: model(*example[:-1])
) -> dict[str, Tensor]:
    """Σₙ (∇nllₙ)² with the batch's own labels: a batch of one, a gradient, its square, after another."""
    model.eval()
    total = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for name, p in trained(model).items()
    }
    for example in examples([batch]):
        label = example["labels"] if isinstance(example, dict) else example[-1]
        loss = nll(forward(model, example), label).sum()
        grads = torch.autograd.grad(loss, list(trained(model).values()), materialize_grads=True)
        for entries, grad in zip(total.values(), grads, strict=True):
            entries += grad.to(entries.dtype).square()
    return total


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """‖a − b‖ / ‖b‖ of each tensor; gradients that are zero but for rounding count against the largest."""
    digit = max(torch.finfo(entries.dtype).eps for entries in exact.values())
    floor = (10 * digit) ** 2 * max(float(entries.norm()) for entries in exact.values())
    return {name: float((found[name] - exact[name]).norm() / exact[name].norm().clamp(min=floor)) for name in exact}


LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
Sides = tuple[Tensor, Tensor]  # inputs and output gradients of a layer: (groups, positions, size)


def patches(conv: nn.Module, x: Tensor) -> Tensor:
    """What a convolution's kernel sees at each place, by convolving with an identity: (groups, positions, in · kernel).

    For a transposed one, of its output's gradient: the same kernel moves over it.
    """
    kernel, groups = conv.kernel_size, conv.groups
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]
    if getattr(conv, "padding_mode", "zeros") != "zeros":
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
        padding = 0
    else:
        padding = conv.padding
    found = []
    for part in x.chunk(groups, 1):
        size = part.shape[1] * math.prod(kernel)
        eye = torch.eye(size, dtype=x.dtype).view(size, part.shape[1], *kernel)
        found.append(convolve(part, eye, None, conv.stride, padding, conv.dilation).movedim(1, -1).flatten(0, -2))
    return torch.stack(found)


def channels(x: Tensor, groups: int) -> Tensor:
    return torch.stack([part.movedim(1, -1).flatten(0, -2) for part in x.chunk(groups, 1)])


def sides(module: nn.Module, x: Tensor, grad: Tensor) -> Sides:
    """A layer's inputs and output gradients at every position. A module that is none of torch's says it itself."""
    if hasattr(module, "sides"):
        return module.sides(x, grad)
    if isinstance(module, nn.Linear):
        return x.flatten(0, -2).unsqueeze(0), grad.flatten(0, -2).unsqueeze(0)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return channels(x, module.groups), patches(module, grad)
    return patches(module, x), channels(grad, module.groups)


def kronecker_loop(case: Case, model: nn.Module, batches: list[Any], targets: str) -> dict[str, tuple[Tensor, Tensor]]:
    """G, summed, and A, averaged over examples and positions, of each layer's weight: by hooks, an example at a time.

    A has a 1 for the bias of a layer that has one, but for transposed convolutions.
    """
    model.eval()
    named = {f"{name}.weight".lstrip("."): module for name, module in model.named_modules()}
    found: dict[str, list[Any]] = {}
    for example in examples(batches):
        calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

        def heard(module: nn.Module, args: Any, out: Tensor, name: str, calls: list = calls) -> Tensor:
            calls.append((name, module, args[0], out))
            return out.clone()  # what comes next may write into it

        hooks = [
            module.register_forward_hook(functools.partial(heard, name=name))
            for name, module in named.items()
            if isinstance(module, LAYERS) or hasattr(module, "sides")
        ]
        output, label = call(case, model, example)
        for hook in hooks:
            hook.remove()
        if targets == "expected":
            losses = [(case.likelihood.nll(output, y).sum(), p) for y, p in possible_labels(case, output.detach())]
        else:
            losses = [(case.likelihood.nll(output, label).sum(), torch.ones(()))]
        for column, (loss, weight) in enumerate(losses):
            grads = torch.autograd.grad(loss, [out for *_, out in calls], retain_graph=True, materialize_grads=True)
            for (name, module, x, _), grad in zip(calls, grads, strict=True):
                a, g = sides(module, x.detach(), grad)
                bias = getattr(module, "bias", None)
                if bias is not None and bias.requires_grad and not isinstance(module, nn.modules.conv._ConvTransposeNd):
                    a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
                sums = found.setdefault(name, [0.0, 0.0, 0])
                sums[0] = sums[0] + weight * g.mT @ g
                if column == 0:
                    sums[1], sums[2] = sums[1] + a.mT @ a, sums[2] + a.shape[1]
    return {name: (g, a / places) for name, (g, a, places) in found.items()}
