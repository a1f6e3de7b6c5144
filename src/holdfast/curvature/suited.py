"""Which models have gradients of single examples, here and in one piece."""

from __future__ import annotations

from torch import nn

from ..errors import ArgumentError, DataError
from ..params import require_values


def require_whole(model: nn.Module) -> None:
    """Raise for a model in pieces on several processes."""
    sharding = any(base.__name__ == "FSDPModule" for module in model.modules() for base in type(module).__mro__)
    for name, parameter in model.named_parameters():
        if sharding or type(parameter.data).__name__ == "DTensor":
            raise ArgumentError(
                f"`{name}` is sharded over processes (a DTensor), and batch_sum_fisher alone takes such models. Other "
                "Fishers and Hessians are taken before a model is sharded, or on a copy of it with full weights."
            )


def require_separable(model: nn.Module) -> None:
    """Raise for a model whose examples see each other, or whose parameters are not its own, or have no values."""
    require_values({name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad})
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ArgumentError(
                f"`{name or 'the model'}` is a FullyShardedDataParallel, whose parameters are pieces of a flat tensor. "
                "Shard the model with torch.distributed.fsdp.fully_shard instead, and use batch_sum_fisher."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise DataError(
                f"`{name}` normalizes by the statistics of the batch even in evaluation mode (track_running_stats="
                "False), so an example has no gradient of its own. Track running statistics, or use GroupNorm."
            )
