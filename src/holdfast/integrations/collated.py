"""What a transformers Trainer's loader gives: how much it is, what its labels mean, how the model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import ArgumentError
from ..likelihood import Likelihood, categorical, tokens

_CLASSES = tuple(f"For{kind}Classification" for kind in ("Sequence", "Image", "Audio", "Video"))
_SIDE_BY_SIDE = ("ForMaskedLM", "ForTokenClassification")
_CAUSAL = ("ForCausalLM", "ForConditionalGeneration")


def examples(loader: DataLoader[Any], cure: str) -> int:
    """How many examples a loader's dataset has; raises with the cure where nobody knows."""
    dataset = _whole(loader)
    try:
        return len(dataset)
    except TypeError as error:
        raise ArgumentError(f"{type(dataset).__name__} has no length, so its data cannot be counted. {cure}") from error


def _whole(loader: DataLoader[Any]) -> Any:
    """The dataset that all processes read from: of one that is read in order, each has a share as its loader's."""
    dataset: Any = loader.dataset
    while type(dataset).__name__ == "IterableDatasetShard":  # accelerate's
        dataset = dataset.dataset
    return dataset


def in_order(loader: DataLoader[Any], size: int, limit: int | None = None) -> DataLoader[Any]:
    """Every example once, in the dataset's order (or `limit` at random), in batches as the loader makes them."""
    dataset = _whole(loader)
    if limit is not None:
        if isinstance(dataset, IterableDataset):
            raise ArgumentError(f"{type(dataset).__name__} is read in its order, so none are drawn of it: no limit=.")
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(len(dataset), generator=generator)[:limit]
        dataset = Subset(dataset, chosen.sort().values.tolist())
    return DataLoader(dataset, batch_size=size, collate_fn=loader.collate_fn)


def as_answered(batches: DataLoader[Any], model: nn.Module) -> DataLoader[Any]:
    """The batches with labels as the model answers: those of a regression on one number in a column, (batch, 1).

    Its own loss squeezes both. Left as they are, every example would be compared with every other.
    """
    if getattr(getattr(_adapted(model), "config", None), "num_labels", None) != 1:
        return batches
    collate = batches.collate_fn

    def collated(rows: list[Any]) -> Any:
        batch = collate(rows)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim != 1:
            return batch
        return {**batch, "labels": labels.unsqueeze(1)}

    return DataLoader(batches.dataset, batch_size=batches.batch_size, collate_fn=collated)


def count(loader: DataLoader[Any], model: nn.Module, unit: str, size: int) -> float:
    """How many examples a loader's dataset has, or how many of its tokens are predicted, `size` examples at a time."""
    total = examples(loader, "Give num_data=.")
    if unit != "token":
        return total
    found = 0.0
    with torch.random.fork_rng(devices=[]):  # loaders draw a seed when they start, and collators may mask at random
        for batch in in_order(loader, size):
            likelihood = _told(model, batch)
            if likelihood is None or likelihood.unit != unit:
                raise ArgumentError(
                    f"the memory counts tokens, and those of {type(model).__name__} cannot be counted by "
                    f"{_labels(batch)}. Give num_data=, the number of tokens that are predicted in the new data."
                )
            found += float(likelihood.count(len(batch["labels"]), batch["labels"]))
    return found


def _told(model: nn.Module, batch: Any) -> Likelihood | None:
    """What the model's outputs mean, by its class and its labels; None where these do not say."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    base = _adapted(model)
    config, name = getattr(base, "config", None), type(base).__name__
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    if labels.ndim == 2 and (getattr(config, "is_encoder_decoder", False) or name.endswith(_SIDE_BY_SIDE)):
        return tokens(shift=False)
    if labels.ndim == 2 and is_causal(model):
        return tokens(shift=True)
    single = getattr(config, "problem_type", None) in (None, "single_label_classification")
    if labels.ndim == 1 and name.endswith(_CLASSES) and getattr(config, "num_labels", 1) > 1 and single:
        return categorical
    return None


def is_causal(model: nn.Module) -> bool:
    """Whether it is a language model that says what comes next, by its class."""
    base = _adapted(model)
    name = type(base).__name__
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return False
    return name.endswith(_CAUSAL) or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def known_likelihood(model: nn.Module, batch: Any) -> Likelihood:
    """What the model's outputs mean; raises where its class and labels do not say."""
    found = _told(model, batch)
    if found is None:
        raise ArgumentError(
            f"the likelihood of {type(model).__name__} is not told by its class and {_labels(batch)}: "
            "give likelihood=, such as holdfast.gaussian(scale) for a regression, holdfast.bernoulli for several labels"
            " at once, or holdfast.tokens(shift=...) for a label per position."
        )
    return found


def _labels(batch: Any) -> str:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        return "a batch that has no 'labels'"
    return f"labels of shape {tuple(labels.shape)} ({labels.dtype})"


def logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The outputs without the model's own loss, of which labels are kept from it."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels")}
    base = _adapted(model)
    if "decoder_input_ids" not in inputs and hasattr(base, "prepare_decoder_input_ids_from_labels"):
        inputs["decoder_input_ids"] = base.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    output: Tensor = model(**inputs).logits
    return output


def _adapted(model: Any) -> Any:
    """The model inside an adapter of PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
