"""Tensors in pieces on several processes (DTensor): cut as a model's parameters are, and read whole."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from .devices import full, part


def gradient(parameter: nn.Parameter) -> Tensor:
    """What this process holds of a gradient, laid out as the parameter is; zeros where there is none."""
    grad: Any = parameter.grad
    if grad is None:  # the loss does not depend on it
        return torch.zeros_like(part(parameter.data))
    layout = getattr(parameter, "placements", None)
    if layout is not None and grad.placements != layout:
        grad = grad.redistribute(placements=layout)  # a sum over processes that is yet to be made
    return part(grad).contiguous()


def cut(value: Tensor, like: Any) -> Tensor:
    """A tensor in pieces as another one is; each process takes its own of a whole one, and none sends any."""
    found: Any = value
    if not hasattr(like, "placements"):
        found = full(found)
    elif hasattr(found, "placements"):
        found = found.redistribute(like.device_mesh, like.placements)
    else:
        from torch.distributed.tensor import DTensor, Replicate

        # Not sent by the first process: that would hide that the others have something else.
        whole = DTensor.from_local(found, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
        found = whole.redistribute(placements=like.placements)
    settled: Tensor = found
    return settled


class Box(NamedTuple):
    """What a process has of a tensor, and where in it: all of it, if the tensor is not in pieces."""

    whole: tuple[int, ...]
    corner: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many entries the whole tensor has."""
        return prod(self.whole)

    @property
    def start(self) -> int | None:
        """The number of its first entry in the whole one, if all of its entries follow each other there."""
        if not prod(self.shape):
            return 0
        inner = next((axis + 1 for axis, size in enumerate(self.shape) if size > 1), len(self.shape))
        if self.shape[inner:] != self.whole[inner:]:
            return None
        return int(sum(at * step for at, step in zip(self.corner, self._strides, strict=True)))

    def places(self, first: int, last: int, device: torch.device) -> Tensor:
        """The numbers that some of its entries have in the whole tensor."""
        rest = torch.arange(first, last, device=device)
        if self.start is not None:
            return rest + self.start
        found = torch.zeros_like(rest)
        for size, at, step in reversed(list(zip(self.shape, self.corner, self._strides, strict=True))):
            found += (rest % size + at) * step
            rest //= size
        return found

    @property
    def _strides(self) -> list[int]:
        return [prod(self.whole[axis + 1 :]) for axis in range(len(self.whole))]


def box(tensor: Any) -> Box:
    """Which part of a tensor this process has."""
    whole = tuple(tensor.shape)
    if not in_pieces(tensor):
        return Box(whole, (0,) * len(whole), whole)
    (chunk,) = tensor.__create_chunk_list__()
    return Box(whole, tuple(chunk.offsets), tuple(part(tensor).shape))


def spread(value: Tensor, like: Any) -> Tensor:
    """What this process has of a tensor in pieces as another one is, as that tensor."""
    if not in_pieces(like):
        return value
    from torch.distributed.tensor import DTensor

    found: Tensor = DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found


def largest(value: Tensor, like: Any) -> Tensor:
    """Entry by entry the largest that any of the processes has that hold pieces of `like`."""
    if not in_pieces(like):
        return value
    found = value.clone()
    for group in like.device_mesh.get_all_groups():
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=group)
    return found


def summed(value: Tensor, like: Any) -> Tensor:
    """The sum of what the processes have that hold different pieces of `like`; copies count once."""
    if not in_pieces(like):
        return value
    found = value.clone()
    for group, placement in zip(like.device_mesh.get_all_groups(), like.placements, strict=True):
        if not placement.is_replicate():
            distributed.all_reduce(found, group=group)
    return found


def settled(tensor: Any) -> Tensor:
    """A tensor without sums over processes that are yet to be made."""
    if in_pieces(tensor) and any(each.is_partial() for each in tensor.placements):
        from torch.distributed.tensor import Replicate

        tensor = tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    found: Tensor = tensor
    return found


def layout(tensor: Any) -> Any:
    """How a tensor is spread over processes: the same for those that are spread alike; None for a whole one."""
    return (tensor.device_mesh, tuple(tensor.placements)) if in_pieces(tensor) else None


def placed(value: Tensor, parameter: Any) -> Tensor:
    """A tensor where a parameter is: on its device, in its dtype, and in pieces as it is."""
    return cut(value.to(device=parameter.device, dtype=parameter.dtype).contiguous(), parameter)


def number(tensor: Any) -> float:
    """A scalar as a number: of one that is spread over processes, the whole sum, and not this process's share."""
    return float(full(tensor))


def in_pieces(tensor: Any) -> bool:
    """Whether a tensor is spread over processes."""
    return hasattr(tensor, "placements")


def sharded(model: nn.Module) -> list[Any]:
    """The modules of a model that `fully_shard` has cut."""
    return [module for module in model.modules() if hasattr(module, "reshard") and hasattr(module, "unshard")]


def resharded(model: nn.Module) -> None:
    """Let `fully_shard` give up what a forward pass of ours gathered: else the next one sees weights of before."""
    for module in sharded(model):
        module.reshard()


def groups(model: nn.Module) -> list[Any]:
    """The groups of several processes that hold copies or pieces of a model; none where it is alone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    every: list[Any] = list(model.modules())
    found = [module.process_group for module in every if hasattr(module, "require_backward_grad_sync")]
    return [*(group for group in found if group.size() > 1), *groups_of(model.parameters())]


def groups_of(tensors: Iterable[Any]) -> list[Any]:
    """The groups of several processes that hold pieces of tensors."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if in_pieces(tensor))
    return [group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1]


def averaged(tensor: Tensor, model: nn.Module) -> Tensor:
    """The mean of what the processes of a model have, each its own."""
    for group in groups(model):
        tensor = tensor.clone()
        distributed.all_reduce(tensor, group=group)
        tensor /= group.size()
    return tensor


class _Laid(torch.autograd.Function):
    """A parameter as it is, whose gradient comes back in pieces as it is itself."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Any:
        ctx.layout = parameter.device_mesh, parameter.placements
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].redistribute(*ctx.layout)


def laid_out(parameter: Tensor) -> Tensor:
    """A parameter to differentiate by: `fully_shard` adds gradients piece by piece, and must find them cut alike."""
    found: Tensor = _Laid.apply(parameter) if in_pieces(parameter) else parameter  # type: ignore[no-untyped-call]
    return found
