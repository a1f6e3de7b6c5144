"""Run a model and leave it as it was found: modes, buffers, gradients and random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .pieces import resharded


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Its LSTM is one operation that shows nothing of its inside; the native one is made of matrix products."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside: evaluation mode, gradients on. Afterwards: the model and the random generators as before.

    Evaluation mode makes an example's output a function of that example alone: dropout is off and BatchNorm
    uses its running statistics, which is what the deployed model does.
    """
    modes = [(module, module.training) for module in model.modules()]
    grads = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    buffers = [
        (module, key, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
    ]
    # An embedding with max_norm rescales its own rows when they are looked up.
    rescaled = [
        (module.weight, module.weight.detach().clone())
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            # cuDNN's recurrent kernels cannot differentiate in evaluation mode; the native ones can.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(_without_onednn())
        if any(
            module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            for module in model.modules()
        ):
            # Compiled code shows no graph of its operations, and may have been traced in training mode.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            model.eval()
            for parameter, _, _ in grads:
                parameter.grad = None  # what a backward pass adds up inside stays inside
            yield
        finally:
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for module, key, buffer, saved in buffers:
                    # Written only where it changed: a write would spoil graphs made before.
                    if buffer is not None and saved is not None and not torch.equal(buffer, saved):
                        buffer.copy_(saved)
                    module._buffers[key] = buffer
                for weight, saved in rescaled:
                    if not torch.equal(weight, saved):
                        weight.copy_(saved)
            for parameter, grad, required in grads:
                parameter.requires_grad_(required)
                parameter.grad = grad
            resharded(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside: evaluation mode, and nothing else. For passes within a training step, where `untouched` costs too much.

    Dropout is off, and BatchNorm learns nothing of inputs that were only drawn.
    """
    modes = [(module, module.training) for module in model.modules() if module.training]
    with ExitStack() as stack:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # it cannot differentiate in this mode
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training
