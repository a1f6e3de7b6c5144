"""The processes that work together: which have examples of their own, and which parts of one model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from .errors import ArgumentError, DataError, MismatchError
from .identity import digest, fingerprints, row_sums
from .params import all_parameters, some, unwrapped
from .pieces import groups_of, in_pieces, resharded, sharded

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Batch(Protocol):
    """What is asked of a batch."""

    @property
    def index(self) -> int: ...

    @property
    def tensors(self) -> Sequence[Tensor]: ...


B = TypeVar("B", bound=Batch)


class _Stopped(DataError):
    """Another rank stopped, and every rank has been told."""


@dataclass(frozen=True)
class _Failure:
    """What a rank sends in place of a value when it stops."""

    message: str


@dataclass(frozen=True)
class Ranks:
    """The processes that a model's wrappers made one of, or this one alone.

    Data-parallel ranks have examples of their own; tensor-parallel ones hold parts of one model and see the same
    examples. `fully_shard` averages gradients over the data-parallel ranks, so that all go in step. Those of
    DistributedDataParallel go `apart`: each has gradients of its own, and what they find is added at the end.
    """

    data: tuple[ProcessGroup, ...] = ()
    tensor: tuple[ProcessGroup, ...] = ()
    apart: bool = False

    @property
    def averaged(self) -> int:
        """Over how many ranks a gradient is averaged."""
        return 1 if self.apart else prod(group.size() for group in self.data)

    @property
    def count(self) -> int:
        """How many there are."""
        return prod(group.size() for group in (*self.tensor, *self.data))

    @property
    def place(self) -> int:
        """Where this rank is among those that `gathered` lists."""
        place = 0
        for group in reversed((*self.tensor, *self.data)):
            place = place * group.size() + group.rank()
        return place

    def seed(self, seed: int) -> int:
        """A seed for each share of the data: draws that two shares had in common would not average out."""
        place = [group.rank() for group in self.data]
        return int(digest(f"{seed} {place}")[:15], 16) if any(place) else seed

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, those of tensor-parallel ranks side by side. Raises if a rank has stopped."""
        every: list[Any] = [value]
        for group in (*self.tensor, *self.data):
            parts: list[Any] = [None] * group.size()
            distributed.all_gather_object(parts, every, group=group)
            every = [item for part in parts for item in part]
        for rank, item in enumerate(every):
            if isinstance(item, _Failure):
                raise _Stopped(f"rank {rank} of {len(every)} has stopped: {item.message}")
        return every

    def met(self, value: T) -> list[T]:
        """`gathered`, where ranks go in step; where they go apart, this one's value."""
        return [value] if self.apart else self.gathered(value)

    def shares(self, value: T) -> list[T]:
        """The value that each share of the data has."""
        return self.gathered(value)[:: self._width]

    def require_alike(self, value: float, what: str, *, tolerance: float = 0.0) -> None:
        """Raise unless a number is the same for all tensor-parallel ranks of each share of the data."""
        every = self.met(value)
        for rank, item in enumerate(every):
            first = every[rank - rank % self._width]
            if not abs(item - first) <= tolerance * abs(first):
                raise DataError(
                    f"{what} on tensor-parallel ranks, which compute one model together. Give them the same batches, "
                    "and let the model return whole outputs (output_layouts=Replicate())."
                )

    def in_step(self, batches: Iterator[B]) -> Iterator[B]:
        """The batches, each after every rank has one."""
        while True:
            batch = next(batches, None)
            have = self.met(batch is not None)
            if batch is None or not all(have):
                break
            if self.tensor:
                self.require_alike(int(row_sums(batch.tensors).sum()), f"batch {batch.index} differs")
            yield batch
        if any(have):
            raise DataError(
                f"{sum(have)} of {len(have)} ranks have a batch more than the others, and all must have as many: a "
                "sharded model runs on all ranks at once. Use a DistributedSampler with drop_last=True."
            )

    def add_(self, *tensors: Tensor) -> None:
        """Sum over ranks that went apart what each has found."""
        for group in self.data if self.apart else ():
            for tensor in tensors:
                whole = tensor.contiguous()  # a parameter's strides, which only tensors in one piece may have here
                distributed.all_reduce(whole, group=group)
                if whole is not tensor:
                    tensor.copy_(whole)

    def share_(self, *tensors: Tensor, place: int = 0) -> None:
        """Let ranks that went apart have what the one at a place among them has."""
        for group in self.data if self.apart else ():
            source = distributed.get_global_rank(group, place)
            for tensor in tensors:
                bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # not every backend sends every dtype
                distributed.broadcast(bits, source, group=group)
                tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where one rank raises, let the others raise when they next meet it, and not wait forever."""
        try:
            yield
        except _Stopped:
            raise
        except Exception as error:
            with suppress(_Stopped):  # which this rank's own failure raises here too
                self.gathered(_Failure(str(error)))
            raise

    @property
    def _width(self) -> int:
        return prod(group.size() for group in self.tensor)


def require_one(tensors: Mapping[str, Tensor], like: Iterable[Tensor], what: str) -> None:
    """Raise, on all of them, where the processes that hold pieces of `like` bring different whole tensors to them.

    Each would cut its own pieces from its own, and together they would have a mixture.
    """
    together = Ranks(data=tuple(groups_of(like)))
    whole = {name: tensor for name, tensor in tensors.items() if not in_pieces(tensor)}
    if not together.data or not whole:
        return
    every = together.gathered((distributed.get_rank(), fingerprints(whole)))
    for rank, theirs in every:
        differ = [name for name in whole if theirs.get(name) != every[0][1].get(name)]
        if differ or set(theirs) != set(every[0][1]):
            raise MismatchError(
                f"the processes have different {what}: rank {rank} differs from rank {every[0][0]} in {some(differ)}. "
                "Load one file on all of them, or compute it on all of them from the same numbers."
            )


def everyone() -> Ranks:
    """All the processes there are, each with something of its own."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return Ranks()
    data = _several(cast("ProcessGroup", distributed.group.WORLD))
    return Ranks(data, apart=bool(data))


@contextmanager
def ranks_of(model: nn.Module) -> Iterator[Ranks]:
    """The ranks of a model. Inside, `fully_shard`'s parameters are sharded, and their gradients averaged over ranks."""
    if not (isinstance(model, nn.Module) and distributed.is_available() and distributed.is_initialized()):
        yield Ranks()
        return
    from torch.distributed._composable.contract import _get_registry

    resharded(model)  # after a forward alone, the root's parameters are whole
    shards = sharded(model)
    states = [module._get_fsdp_state() for module in shards]
    groups = [group for state in states for group in _parameter_groups(state)]
    # A divisor of the user's own, by the names it has had in torch. None is the number of ranks.
    saved = [
        (group, name, getattr(group, name))
        for group in groups
        for name in ("gradient_divide_factor", "reduce_scatter_reduce_op")
        if hasattr(group, name)
    ]
    if any("replicate" in (_get_registry(module) or ()) and module not in shards for module in model.modules()):
        raise ArgumentError(
            "the model is replicated by a hook that averages gradients (torch.distributed._composable.replicate). Wrap "
            "it in DistributedDataParallel instead."
        )
    data, apart = _data_parallel(model, groups)
    ranks = Ranks(data, _tensor_parallel(model, data, apart), apart)
    try:
        for group, name, _ in saved:
            setattr(group, name, None)
        yield ranks
    finally:
        for group, name, value in saved:
            setattr(group, name, value)
        resharded(model)


def _parameter_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # older versions of torch have one at most
    return [group for group in (several or [state._fsdp_param_group]) if group is not None]


def _data_parallel(model: nn.Module, groups: list[Any]) -> tuple[tuple[ProcessGroup, ...], bool]:
    """The process groups of data-parallel ranks, and whether these go apart."""
    replicas = [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
    if replicas:
        if groups or len(replicas) > 1 or unwrapped(replicas[0]) is not unwrapped(model):
            raise ArgumentError(
                "a part of the model is wrapped in DistributedDataParallel, so that some gradients are averaged over "
                "ranks and others are not. Wrap the whole model, and once."
            )
        data = _several(replicas[0].process_group)
        return data, bool(data)
    found = {tuple(map(_members, data)): data for data in map(_groups_of, groups)}
    if len(found) > 1:
        raise ArgumentError(
            "parts of the model are sharded over different ranks, so that there is no batch that all gradients are "
            "of. Use one mesh in all calls of fully_shard."
        )
    data = next(iter(found.values()), ())
    hooked = any(getattr(group, "_all_reduce_hook", None) for group in groups)
    if hooked or not all(group.reduce_grads and group.all_reduce_grads for group in groups):
        raise ArgumentError(
            "fully_shard was told not to reduce gradients, or to do it in a way of one's own, so that their scale is "
            "not known. Call model.set_requires_gradient_sync(True), and take all-reduce hooks away."
        )
    if data:
        infos = [parameter._module_info for group in groups for parameter in group.fsdp_params]
        managed = {id(getattr(info.module, info.param_name)) for info in infos}
        for name, parameter in all_parameters(model).items():
            if parameter.requires_grad and id(parameter) not in managed:
                raise ArgumentError(
                    f"`{name}` is not in fully_shard's hands, so that every rank has another gradient of it. Call "
                    "fully_shard on the whole model too, or freeze the parameter."
                )
    return data, False


def _groups_of(group: Any) -> tuple[ProcessGroup, ...]:
    info = group.mesh_info
    kinds = [kind for kind in ("shard", "replicate") if getattr(info, f"{kind}_mesh_dim") is not None]
    return _several(*(getattr(info, f"{kind}_process_group") for kind in kinds))


def _tensor_parallel(model: nn.Module, data: tuple[ProcessGroup, ...], apart: bool) -> tuple[ProcessGroup, ...]:
    """The other process groups over which parameters are distributed."""
    found: dict[frozenset[int], ProcessGroup] = {}
    for name, parameter in all_parameters(model).items():
        mesh = getattr(parameter, "device_mesh", None)
        for group in () if mesh is None else _several(*mesh.get_all_groups()):
            members = _members(group)
            if members in found or any(members <= _members(known) for known in data):
                continue
            if apart or any(len(members & _members(known)) > 1 for known in (*data, *found.values())):
                raise ArgumentError(
                    f"`{name}` is distributed over ranks in a way that cannot be told from data parallelism. Use "
                    "fully_shard for data-parallel ranks, on a mesh whose other axes are tensor-parallel."
                )
            found[members] = group
    return tuple(found.values())


def _several(*groups: ProcessGroup) -> tuple[ProcessGroup, ...]:
    return tuple(group for group in groups if group.size() > 1)


def _members(group: ProcessGroup) -> frozenset[int]:
    return frozenset(distributed.get_process_group_ranks(group))
