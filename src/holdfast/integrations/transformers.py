"""Hold a model while a Trainer of transformers or TRL trains it, and keep a memory of what one was trained on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from ..curvature import kronecker_fisher
from ..errors import ArgumentError, HoldfastWarning, MismatchError
from ..forecast import forecast, kept_answers
from ..hold import Handle, hold
from ..likelihood import Likelihood
from ..params import unwrapped
from ..penalty import Term
from ..posterior import Memory, Posterior, as_posterior, consolidate, prior
from ..precision import Precision
from ..probes import Probes
from .collated import as_answered, count, examples, in_order, known_likelihood, logits
from .replicas import agreed, same_
from .stand_ins import stand_ins

if TYPE_CHECKING:
    from transformers import Trainer

_RECORD = "holdfast"  # under this name in a checkpoint's trainer_state.json
_FILE = "holdfast.pt"  # in a checkpoint's folder: tensors that terms go on with


class HoldCallback(TrainerCallback):
    """Holds the model to `memory` while a Trainer, or TRL's SFTTrainer, trains it.

        trainer = Trainer(model, args, train_dataset=new, callbacks=[HoldCallback(memory)])
        trainer.train()

    `num_data` is how much new data there is, in the memory's unit: left out, the training set's examples, or its
    tokens that are predicted, counted once through the collator. `terms` are held to beside the memory, which may be
    a term itself. The other arguments are those of `holdfast.hold`.

    The numbers of `Handle.metrics` stand in the trainer's log, once a step, and at evaluations and at the end the
    `forecast`. A budget is finished before the last checkpoint; of weights that `load_best_model_at_end` puts back it
    is finished again, in the model and not on disk. A run is resumed with the memory it began with, and then goes on
    to the bit; what terms need for that is in a file of its own in the checkpoint, holdfast.pt.
    """

    def __init__(
        self,
        memory: Posterior | Memory | Term,
        *,
        num_data: float | None = None,
        strength: float = 1.0,
        terms: Sequence[Posterior | Memory | Term] = (),
        every: int = 1,
        rotate: bool = False,
        proximal: bool | None = None,
        freeze_statistics: bool | None = None,
        budget: float | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        forecast: bool = True,
    ) -> None:
        if not hasattr(memory, "add_gradient_"):
            as_posterior(memory)  # raises for what is neither
        self.held, self.num_data = [memory, *terms], num_data
        self.handle: Handle | None = None  # of this training, or of the last one
        self._budget, self._forward = budget, forward
        self._known = memory if forecast and isinstance(memory, (Posterior, Memory)) and memory.num_data else None
        self._options: dict[str, Any] = {
            "strength": strength, "every": every, "rotate": rotate, "proximal": proximal, "budget": budget,
            "freeze_statistics": freeze_statistics, "forward": None if budget is None else forward,
        }  # fmt: skip
        self._training = self._ended = False  # ended: resumed at its last step
        self._logged = self._saved = -1  # the steps at which that was last done

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training and self.handle is not None:
            self.handle.detach()  # the last run was left by an error
        self._training, self._logged, self._saved = False, -1, -1
        self._step_forward(sys._getframe(1).f_locals.get("self"))
        unit = next((each.unit for each in self.held if each.unit), "example")
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        num_data = count(loader, model, unit, args.train_batch_size) if self.num_data is None else self.num_data
        self.handle = hold(kwargs["optimizer"], model, self.held, num_data=num_data, unit=unit, **self._options)
        self._ended = state.global_step >= state.max_steps
        before = _records(state).get(_RECORD)
        if before is not None:
            self._resume({**before, **_tensors(before, sys._getframe(1))})
        self._training = True
        self._note(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training and self.handle is not None and self._budget is not None and _replicated():
            self.handle.strength = agreed(self.handle.strength, args.device)
        if state.global_step >= state.max_steps or control.should_training_stop:
            self._finish(kwargs["model"])
        self._note(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved = state.global_step
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if self._training and self.handle is not None and args.should_save and not args.save_only_model:
            terms = self.handle.state_dict().get("terms")
            if terms and folder.is_dir():
                torch.save({"terms": terms}, folder / _FILE)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        # Where an evaluation or another callback stopped the training, its last checkpoint may be written already.
        if control.should_training_stop and self._finish(kwargs["model"]) and self._saved == state.global_step:
            control.should_save = True
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._training or self.handle is None:
            return
        # On every process, for sharded weights are summed over all of them; written by one.
        logs: dict[str, float] = kwargs["logs"]
        found = self.handle.metrics() if self._logged != state.global_step else {}
        self._logged = state.global_step
        if self._known is not None and ("train_runtime" in logs or any(key.startswith("eval_") for key in logs)):
            told = forecast(kwargs["model"], self._known, forward=self._forward)
            found["holdfast/forecast"] = told.rise
            if told.probes is not None:
                found["holdfast/forecast_safe"] = told.safe
        if state.is_world_process_zero:
            logs.update(found)
            state.log_history[-1].update(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._training or self.handle is None:
            return
        self._training = False
        if self._ended and not self.handle.steps:
            return self.handle.detach()  # nothing was left to train, and nothing to hold
        best = args.load_best_model_at_end  # other weights than those that were finished
        if self._budget is not None and self.handle.steps and (best or self.handle.spent is None):
            self._bring_inside(kwargs["model"])
        self.handle.remove()

    def _finish(self, model: nn.Module) -> bool:
        """Bring the model inside its budget, if there is one and it is not there yet."""
        if not self._training or self.handle is None or self._budget is None or self.handle.spent is not None:
            return False
        self._bring_inside(model)
        return True

    def _bring_inside(self, model: nn.Module) -> None:
        if self.handle is not None:
            self.handle.finish()
            if _replicated():
                same_(model)

    def _resume(self, before: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written; a strength that follows no budget is the one given now."""
        if self.handle is None:
            return
        given = self.handle.strength
        try:
            self.handle.load_state_dict(before)
        except MismatchError:
            self.handle.detach()
            raise
        if self._budget is None:
            self.handle.strength = given

    def _note(self, state: TrainerState) -> None:
        """What a checkpoint tells of the hold.

        Not as an ExportableState: a callback made anew from a file would be without its memory.
        """
        if self._training and self.handle is not None:
            found = self.handle.state_dict()
            beside = {"file": _FILE} if found.pop("terms", None) else {}
            _records(state)[_RECORD] = {**found, **beside}

    def _step_forward(self, handler: Any) -> None:
        """To the front of the trainer's callbacks: TensorBoard's and others stand before those that a user gives, and
        would have logged before there is anything of ours in the log."""
        if isinstance(handler, CallbackHandler) and self in handler.callbacks:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)


def _replicated() -> bool:
    """Whether the model is one of several replicas (DistributedDataParallel), and no part of a sharded one."""
    return str(AcceleratorState().distributed_type.name).startswith("MULTI_")


def _records(state: TrainerState) -> dict[str, Any]:
    """What a checkpoint keeps of callbacks, by name."""
    return cast("dict[str, Any]", state.stateful_callbacks)


def _tensors(record: Mapping[str, Any], frame: FrameType | None) -> dict[str, Any]:
    """What lies beside a record of the checkpoint that is resumed from; the trainer that called knows which it is."""
    if "file" not in record:
        return {}
    while frame is not None and not isinstance(frame.f_locals.get("resume_from_checkpoint"), (str, PathLike)):
        frame = frame.f_back
    path = None if frame is None else Path(frame.f_locals["resume_from_checkpoint"]) / str(record["file"])
    if path is None or not path.is_file():
        warnings.warn(
            f"the checkpoint has lost its {record['file']}, with the pulls that were in use and the draws that came "
            "next: training goes on with others, and not to the bit.", HoldfastWarning, stacklevel=3,
        )  # fmt: skip
        return {}
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def _identities(held: Sequence[Posterior | Memory | Term]) -> list[str]:
    """Of the posteriors among what is held to, and of those inside memories and terms."""
    found = (getattr(each, "posterior", each) for each in held)
    return [each.id for each in found if isinstance(each, Posterior)]


def memory_from(
    trainer: Trainer,
    posterior: Posterior | Memory | None = None,
    *,
    likelihood: Likelihood | None = None,
    fisher: Callable[..., Precision] = kronecker_fisher,
    limit: int | None = None,
    probes: bool | Probes = False,
) -> Memory:
    """A memory of what a Trainer's model knows of its training set, added to `posterior` if there was one before.

    One pass in the set's own order, by the trainer's collator, without the columns that the model does not take. The
    `likelihood` is told from the model: `tokens` for language models (their ignored labels do not count),
    `categorical` for classifiers; for a regression give one, `gaussian(scale)`. `fisher` is `kronecker_fisher`,
    `diagonal_fisher` or the like, with more arguments by functools.partial; by a `forward` of its own the model is
    asked, and its labels are as the collator gives them. With `limit`, so many examples drawn at random stand for all
    of them. On several processes each goes through all of the set, and has the same memory.

    With `probes`, the memory has what a budget and a forecast are told by: a sample of the model's answers, and what
    stands for the inputs: two moments of numbers such as pixels, text that a causal language model writes itself. For
    other models give some of the inputs themselves in True's place, `holdfast.kept_inputs(...)`.

        trainer.train()
        memory = memory_from(trainer)
        holdfast.save(memory, "memory.safetensors")
    """
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ArgumentError(f"limit is how many examples to go through, 1 or more, got {limit!r}.")
    if not isinstance(probes, (bool, Probes)):
        raise ArgumentError(f"probes is True, or probes such as kept_inputs(...) gives, got {type(probes).__name__}.")
    _warn_of_what_was_held(trainer, posterior)
    own = fisher.keywords.get("forward") if isinstance(fisher, partial) else None
    forward = own or logits
    model = unwrapped(cast("nn.Module", trainer.model))
    with torch.random.fork_rng(devices=[]):
        loader = trainer.get_train_dataloader()
        size = examples(loader, "Take the Fisher of batches of yours, and holdfast.consolidate it.")
        part = size if limit is None else min(limit, size)
        batches = in_order(loader, trainer.args.train_batch_size, None if part == size else part)
        if likelihood is None:
            likelihood = known_likelihood(model, next(iter(batches)))
        batches = batches if own else as_answered(batches, model)
        memory = posterior if isinstance(posterior, Memory) else None
        known = None if memory is None else memory.probes
        memory = memory or Memory(prior(model) if posterior is None else as_posterior(posterior))
        if probes is not False:  # first: what cannot be kept is said before the longer pass
            answers = kept_answers(model, batches, likelihood, forward=forward).thinned(size / part)
            kept = stand_ins(model, batches, likelihood, answers.num_data, known) if probes is True else probes
            memory = memory.with_probes(kept).with_answers(answers)
        found = (size / part) * fisher(model, batches, likelihood, forward=forward)
    return consolidate(memory, model, found)


def _warn_of_what_was_held(trainer: Trainer, posterior: Posterior | Memory | None) -> None:
    """A memory that leaves out what the model was held to would let it be forgotten at the next task."""
    known = [] if posterior is None else _identities([posterior])
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, HoldCallback) and set(_identities(callback.held)) - set(known):
            warnings.warn(
                "this trainer was held to a memory that is not given, and what it knows will not be in the new one: "
                "memory_from(trainer, memory).", HoldfastWarning, stacklevel=3,
            )  # fmt: skip
