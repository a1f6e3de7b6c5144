"""Hold a LightningModule while a Trainer fits it, by one callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ..errors import (
    ArgumentError,
    BudgetError,
    HoldfastError,
    HoldfastWarning,
    InertError,
    MismatchError,
    require_number,
)
from ..forecast import forecast as foretold
from ..hold import Handle, hold
from ..likelihood import Tokens, tokens
from ..params import matched, shapes
from ..penalty import Term
from ..posterior import Memory, Posterior, as_posterior
from .replicas import same_

# Those that end with an average of the weights; not every version of Lightning has them all.
_AVERAGING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)


class HoldCallback(Callback):
    """`holdfast.hold` for a Trainer: attached when training starts, let go when it ends.

        fisher = holdfast.diagonal_fisher(module.net, old_loader, holdfast.categorical)
        memory = holdfast.consolidate(holdfast.prior(module.net), module.net, fisher)

        trainer = Trainer(callbacks=[HoldCallback(memory, model=lambda module: module.net)])
        trainer.fit(module, new_loader)

    Automatic and manual optimization, accumulation, clipping, mixed precision, several optimizers and DDP are as
    without it; the loss of a step must be a mean over its examples. `model` says of which module the memory was made,
    where that is not the LightningModule itself. The other arguments are those of `holdfast.hold`, and `terms` what to
    hold to beside the memory, which may be a term itself.

    `num_data` is by default the length of the training dataset, with what a sampler or `limit_train_batches` leaves out
    of it. For a memory that counts tokens, the labels that count are counted in one pass over the dataset, if its
    batches are dicts with `labels`; else it must be given.

    `handle.metrics()` go to the module's log as often as the trainer logs, and at the last step; the forecast wherever
    the model is validated, unless `forecast=False`. A budget is finished after the last step, before validation and the
    last checkpoint. Checkpoints have the memory's identity: training goes on from one with the same memory alone.
    """

    def __init__(
        self,
        memory: Posterior | Memory | Term,
        *,
        num_data: float | None = None,
        strength: float = 1.0,
        budget: float | None = None,
        every: int = 1,
        rotate: bool = False,
        proximal: bool | None = None,
        freeze_statistics: bool | None = None,
        terms: Sequence[Term] = (),
        model: Callable[[LightningModule], nn.Module] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        forecast: bool = True,
    ) -> None:
        self._memory = memory
        # A term may have a posterior, in weights of its own (holdfast.integrations.peft.weight_space).
        self._known: Posterior | None = (
            None if hasattr(memory, "add_gradient_") else as_posterior(cast("Memory", memory))
        )
        self._posterior = getattr(memory, "posterior", None) if self._known is None else self._known
        self._num_data = None if num_data is None else require_number(num_data, "num_data", positive=True)
        self._strength = require_number(strength, "strength")
        self._budget = budget
        self._every = every
        self._rotate = rotate
        self._proximal = proximal
        self._freeze_statistics = freeze_statistics
        self._terms = tuple(terms)
        self._model = model
        self._forward = forward
        self._forecast = forecast and isinstance(memory, (Posterior, Memory)) and bool(memory.num_data)
        self._resumed: Mapping[str, Any] = {}
        self._before_saving: RemovableHandle | None = None
        self.handle: Handle | None = None  # of this fit, or of the last one

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.handle = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = pl_module if self._model is None else self._model(pl_module)
        averaging = [each for each in trainer.callbacks if isinstance(each, _AVERAGING)]  # type: ignore[attr-defined]
        if self._budget is not None and averaging:
            raise ArgumentError(
                f"{type(averaging[0]).__name__} puts other weights into the model when training is over, and the "
                "budget was of those before. Leave one of the two out."
            )
        if self._known is not None:
            self._require_fit(model, self._known)
        unit = next((each.unit for each in (self._memory, *self._terms) if each.unit), "example")
        self.handle = hold(
            trainer.optimizers,
            model,
            [self._memory, *self._terms],
            num_data=self._new_data(trainer, unit) if self._num_data is None else self._num_data,
            strength=self._strength,
            unit=unit,
            every=self._every,
            rotate=self._rotate,
            proximal=self._proximal,
            freeze_statistics=self._freeze_statistics,
            budget=self._budget,
            forward=self._forward,
        )
        if self._resumed:
            given = self.handle.strength
            try:
                self.handle.load_state_dict(self._resumed)
            except MismatchError:
                self.handle.detach()
                raise
            if self._budget is None:  # then it is the one given now
                self.handle.strength = given
        self._resumed = {}
        if self._budget is not None:
            # Early stopping decides right before a checkpoint is saved, and of weights alone callbacks are not told.
            hooked: Any = pl_module
            self._before_saving = hooked.register_state_dict_pre_hook(lambda *_: self._finish_if_over(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.handle is None:
            return
        if self._budget is not None and trainer.world_size > 1:
            # Replicas may have statistics of their own (BatchNorm), and see another rise: they go on with one strength.
            self.handle.strength = trainer.strategy.broadcast(self.handle.strength)
        # The earliest that a last checkpoint can be saved is in this hook; those callbacks come after all others.
        self._finish_if_over(trainer)
        self._as_one(trainer)
        if _is_over(trainer) or trainer._logger_connector.should_update_logs:
            pl_module.log_dict(self.handle.metrics(), on_step=True, on_epoch=False)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.handle is None or not self._forecast or trainer.sanity_checking:
            return
        model = pl_module if self._model is None else self._model(pl_module)
        told = foretold(model, cast("Memory", self._memory), forward=self._forward)
        safe = {} if told.probes is None else {"holdfast/forecast_safe": told.safe}
        pl_module.log_dict({"holdfast/forecast": told.rise, **safe}, on_step=False, on_epoch=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_if_over(trainer)  # the epoch was left before its last batch
        self._as_one(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.handle is None:
            return
        late = self._budget is not None and self.handle.spent is None
        self._stop_looking()
        self.handle.remove()
        self._as_one(trainer)
        if late and self.handle.spent is not None and self.handle.spent.kept < 1 and trainer.checkpoint_callbacks:
            warnings.warn(
                "training was stopped after its last checkpoint was saved, and the budget was finished after it: that "
                "file has spent more. Save the model again: trainer.save_checkpoint(path).", HoldfastWarning,
                stacklevel=2,
            )  # fmt: skip

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.handle is None:
            raise InertError(
                f"the trainer made no step (max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}, "
                f"{trainer.num_training_batches} batches, at step {trainer.global_step}), so nothing was held. Give it "
                "something to train, or leave the callback out."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_looking()
        if self.handle is None:
            return
        with warnings.catch_warnings():
            if isinstance(exception, BudgetError):
                warnings.simplefilter("ignore", HoldfastWarning)  # that there is a budget to finish
            self.handle.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._resumed) if self.handle is None else self.handle.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def _require_fit(self, model: nn.Module, posterior: Posterior) -> None:
        """Raise for a memory of another model, and say which part of this one it is of, if it is."""
        wanted, ties = shapes(posterior.mean), posterior.ties
        try:
            matched(model, wanted, ties=ties)
        except HoldfastError as error:
            for name, child in model.named_children():
                try:
                    matched(child, wanted, ties=ties)
                except HoldfastError:
                    continue
                raise MismatchError(
                    f"the memory is of `{name}`, and this is a {type(model).__name__} with a `{name}` in it. Say so: "
                    f"HoldCallback(memory, model=lambda module: module.{name})."
                ) from error
            raise

    def _new_data(self, trainer: Trainer, unit: str) -> float:
        """How much new data there is, in the memory's unit."""
        loader = trainer.train_dataloader
        dataset = getattr(loader, "dataset", None)
        if dataset is None or not hasattr(dataset, "__len__"):
            what = type(loader).__name__ if dataset is None else type(dataset).__name__
            raise ArgumentError(
                f"a {what} does not tell how many {unit}s there are to train on. Give their number: "
                "HoldCallback(memory, num_data=...)."
            )
        if unit == "example":
            return len(dataset)
        known = {tokens(shift=shift).name: tokens(shift=shift) for shift in (True, False)}
        sources = self._posterior.sources if isinstance(self._posterior, Posterior) else ()
        names = {source.likelihood for source in sources if source.unit == unit}
        if unit != "token" or len(names) != 1 or not names <= set(known) or not isinstance(loader, DataLoader):
            raise ArgumentError(
                f"this memory counts {unit}s, and how many the {len(dataset)} new examples have is not known. Give "
                "their number: HoldCallback(memory, num_data=...)."
            )
        return _labels(loader, known[names.pop()])

    def _finish_if_over(self, trainer: Trainer) -> None:
        """Bring the model inside its budget when no step follows, if it is not there yet."""
        handle = self.handle
        if self._budget is None or handle is None or not handle.steps or not _is_over(trainer):
            return
        if handle.spent is None:
            handle.finish()

    def _as_one(self, trainer: Trainer) -> None:
        """Replicas that finished by statistics of their own (BatchNorm) take what the first has come to."""
        if self.handle is not None and self.handle.spent is not None and isinstance(trainer.strategy, DDPStrategy):
            same_(trainer.lightning_module)

    def _stop_looking(self) -> None:
        if self._before_saving is not None:
            self._before_saving.remove()
        self._before_saving = None


def _is_over(trainer: Trainer) -> bool:
    """Whether no step follows the last one, in the hooks after a batch and after an epoch."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    if epochs != -1 and trainer.is_last_batch and trainer.current_epoch + 1 >= epochs:
        return True
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def _labels(loader: DataLoader[Any], likelihood: Tokens) -> float:
    """The labels that count, in the whole dataset: in no order, and without a draw from the random generators."""
    size = None if loader.batch_sampler is None else 8
    total = 0
    with isolate_rng():
        for batch in DataLoader(loader.dataset, batch_size=size, collate_fn=loader.collate_fn):
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if not isinstance(labels, Tensor) or labels.ndim != 2:
                raise ArgumentError(
                    f"this memory counts tokens, and the batches ({type(batch).__name__}) have no `labels` of shape "
                    "(batch, positions) to count them by. Give their number: HoldCallback(memory, num_data=...)."
                )
            total += int(likelihood.count(len(labels), labels))
    return total
