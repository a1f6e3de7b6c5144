"""Replicas of one model, each with batches of its own: what they find is of all the data, and all of them get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import MismatchError
from ..identity import fingerprint, fingerprints
from ..params import all_parameters
from ..ranks import Ranks, ranks_of
from ..untouched import untouched
from .suited import require_whole


@contextmanager
def replicas_of(model: nn.Module) -> Iterator[Ranks]:
    """The ranks that have a replica of a model in DistributedDataParallel, or this process alone.

    Where one raises inside, the others raise when they next meet it.
    """
    if isinstance(model, nn.Module):
        require_whole(model)
    with ranks_of(model) as ranks, ranks.together():
        yield ranks


@contextmanager
def alike(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """`untouched`, and where there are replicas they are one model: with the buffers that the first of them has.

    BatchNorm's statistics are each rank's own between two passes; DistributedDataParallel, too, takes the first's when
    it runs the model.
    """
    with untouched(model):
        if ranks.apart:
            buffers = dict(model.named_buffers())
            said = ranks.gathered((fingerprint(all_parameters(model)), fingerprints(buffers)))
            first = (said[0][0], said[0][1].keys())
            others = [rank for rank, (weights, each) in enumerate(said) if (weights, each.keys()) != first]
            if others:
                raise MismatchError(
                    f"the replicas are not one model: rank {others[0]} has other weights or buffers than "
                    "rank 0. Were they loaded, or changed, on some ranks alone? Load the same weights on all of them."
                )
            with torch.no_grad():
                ranks.share_(*(buffers[name] for name in buffers if len({each[name] for _, each in said}) > 1))
        yield
