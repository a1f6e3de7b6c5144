"""Reading data: batches as pairs, tuples or dicts, on the model's device, sliced into single examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, IterableDataset

from ..devices import sent
from ..errors import DataError
from .doubts import Doubts

Forward = Callable[[nn.Module, Any], Any]

LABELS = ("labels", "label", "label_ids", "targets", "target", "y")


@dataclass(frozen=True)
class Batch:
    """`content` is what the loader gave; `inputs` and `target` are its parts; every tensor's first axis is `size`.

    `given` are the labels as they came. Where they came from the CPU, to look at them does not wait for a GPU.
    """

    index: int
    content: Any
    inputs: Any
    target: Any
    size: int
    given: Any = None

    def example(self, n: int) -> Batch:
        """Example n as a batch of one."""
        return self.rows([n])

    def rows(self, indices: Sequence[int]) -> Batch:
        """Some of the examples, as a batch of their own."""
        every = (self.content, self.inputs, self.target, self.given)
        content, inputs, target, given = (_rows(part, indices, self.size) for part in every)
        return Batch(self.index, content, inputs, target, len(indices), given)

    @property
    def tensors(self) -> list[Tensor]:
        """All it holds."""
        return [leaf for leaf in tree_leaves(self.content) if isinstance(leaf, Tensor)]

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of its tensors."""
        return tuple(tensor.shape for tensor in self.tensors)


EMPTY = "there are no batches: the loader is empty, or an iterator that was already used up."


def read(batches: Iterable[Any], model: nn.Module, *, empty: bool = False) -> Iterator[Batch]:
    """The batches one after another, checked, on the device of the model's first parameter; none only if `empty`."""
    require_batches(batches)
    device = next(model.parameters()).device
    index = -1
    for index, content in enumerate(batches):
        content = dict(content) if isinstance(content, Mapping) else content
        leaves = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor) and leaf.ndim]
        if not leaves:
            raise DataError(
                f"batch {index} is a {type(content).__name__} without tensors. Give batches of (inputs, targets), "
                "or dicts with the labels under 'labels'."
            )
        if any(leaf.layout != torch.strided for leaf in leaves):
            raise DataError(f"batch {index} has sparse tensors. Give dense ones: tensor.to_dense().")
        sizes = {leaf.shape[0] for leaf in leaves}
        if len(sizes) > 1:
            raise DataError(
                f"batch {index}: the first axes of its tensors disagree ({sorted(sizes)}), so examples cannot be told "
                "apart. A tensor shared by all examples belongs in `forward=`, not in the batch."
            )
        size = sizes.pop()
        if size == 0:
            raise DataError(f"batch {index} is empty.")

        def move(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.is_inference() and not torch.is_inference_mode_enabled():
                leaf = leaf.clone()  # made under inference_mode, it could be in no graph
            return sent(leaf, device) if isinstance(leaf, Tensor) else leaf

        given = _parted(index, content, size).target
        yield replace(_parted(index, tree_map(move, content), size), given=given)
    if index < 0 and not empty:
        raise DataError(EMPTY)


def run(model: nn.Module, batch: Batch, forward: Forward | None) -> Any:
    """The model's output: its logits where it returns an object that has them."""
    if forward is not None:
        return forward(model, batch.content)
    try:
        if isinstance(batch.inputs, Mapping):
            output = model(**batch.inputs)
        elif isinstance(batch.inputs, (tuple, list)) and any(isinstance(part, Tensor) for part in batch.inputs):
            output = model(*batch.inputs)
        else:
            output = model(batch.inputs)
    except TypeError as error:
        form = f"keys {sorted(batch.inputs)}" if isinstance(batch.inputs, Mapping) else "its inputs"
        raise DataError(
            f"batch {batch.index}: the model could not be called with {form} ({error}). Labels are taken from the last "
            f"element of a tuple, or from one of the keys {', '.join(LABELS)}; for other calls give forward=lambda "
            "model, batch: ..."
        ) from error
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return getattr(output, "logits", output)


def require_finite_output(output: Tensor, batch: Batch, doubts: Doubts) -> None:
    """Raise unless an output is finite."""
    wide = torch.promote_types(output.dtype, torch.float32)

    def error(_: list[bool]) -> DataError:
        clean = all(bool(tensor.isfinite().all()) for tensor in batch.tensors if tensor.is_floating_point())
        cause = "though the batch itself is finite" if clean else "because the batch itself is not"
        return DataError(f"batch {batch.index}: the model's output is not finite, {cause}. Nothing was changed.")

    # The sum tells in one pass, and without temporaries.
    doubts.unless(output.detach().sum(dtype=wide).isfinite(), error)


def _rows(value: Any, indices: Sequence[int], size: int) -> Any:
    """Examples of a batch's part: of tensors their rows, of plain lists as long as the batch (texts) their elements."""
    if isinstance(value, Tensor):
        if not value.ndim:
            return value
        return value[indices[0] : indices[0] + 1] if len(indices) == 1 else value[list(indices)]
    if isinstance(value, Mapping):
        return {key: _rows(part, indices, size) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            return type(value)(value[n] for n in indices) if len(value) == size else value
        return tuple(_rows(part, indices, size) for part in value)
    return value


def require_batches(batches: Any) -> None:
    """Raise for what people give instead of an iterable of batches."""
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise DataError(
            f"{type(batches).__name__} holds single examples: wrap it, DataLoader(dataset, batch_size=256)."
        )
    whole = isinstance(batches, tuple) and len(batches) > 1 and all(isinstance(part, Tensor) for part in batches)
    if whole or isinstance(batches, (Tensor, Mapping)):
        raise DataError("an iterable of batches is needed, and this is one batch: give a list, [(inputs, targets)].")
    if not isinstance(batches, Iterable):
        raise DataError(f"an iterable of batches is needed, such as a DataLoader, got {type(batches).__name__}.")


def _parted(index: int, content: Any, size: int) -> Batch:
    if isinstance(content, Mapping):
        label = next((key for key in LABELS if key in content), None)
        inputs: Any = {key: value for key, value in content.items() if key != label}
        return Batch(index, content, inputs, content[label] if label else None, size)
    if isinstance(content, (tuple, list)) and len(content) > 1:
        *front, target = content
        return Batch(index, content, front[0] if len(front) == 1 else tuple(front), target, size)
    inputs = content[0] if isinstance(content, (tuple, list)) else content
    return Batch(index, content, inputs, None, size)
