"""Protocols: which data, cut into which tasks, learned by which network, trained how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from torch import nn

from ..errors import ArgumentError
from . import data
from .data import Images
from .networks import Gpt, convolutional, perceptron, resnet
from .streams import held_out, permuted, rotated, split, texts
from .tasks import Task
from .training import Training

_IMAGES: dict[str, Callable[[], Images]] = {
    "digits": data.digits, "mnist": data.mnist, "fashion-mnist": data.fashion_mnist, "cifar10": data.cifar10,
}  # fmt: skip

# Where that is not what the papers did.
SHARED = (
    "In all of them every task has a fresh optimizer, where van de Ven's experiments go on with the last one. "
    "Pixels are from 0 to 1 where nothing else is said; those of convolutional networks are shifted and scaled to "
    "mean 0 and deviation 1."
)

Stream = Literal["permuted", "rotated", "task", "domain", "class", "text"]


@dataclass(frozen=True)
class Protocol:
    """Everything that decides a run but the method, its strength and the seed. All of it is in a result's key."""

    name: str
    about: str
    dataset: str
    stream: Stream
    tasks: int
    network: Literal["perceptron", "convolutional", "resnet", "gpt"] = "perceptron"
    hidden: tuple[int, ...] = (100, 100)
    margin: int = 0
    scaled: bool = False  # permuted pixels to mean 0 and deviation 1
    turn: float | None = None  # degrees from one rotated task to the next; else half a turn in all
    training: Training = field(default_factory=lambda: Training(epochs=10))

    def sequence(self, seed: int, *, validating: bool = False, device: str = "cpu") -> list[Task]:
        """The tasks in their order. With `validating`, judged on held-out training data instead of the test data."""
        if validating:
            self.require_validation()
        if self.stream == "text":
            found = texts(data.text_domains(), self.hidden[0])[: self.tasks]
            return [task.to(device) for task in found]
        images = _IMAGES[self.dataset]()
        if validating:
            images = held_out(images, len(images.train_y) // 6)
        images = _on(images, device)  # before the tasks are made, so that they share one copy
        if self.stream == "permuted":
            return permuted(images, self.tasks, seed, self.margin, self.scaled)
        if self.stream == "rotated":
            return rotated(images, [index * self.angle for index in range(self.tasks)])
        return split(images, self.stream, flat=self.network == "perceptron")[: self.tasks]

    def require_validation(self) -> None:
        """Raise where there is no held-out training data to be judged on."""
        if self.stream == "text":
            raise ArgumentError(f"{self.name} has no validation data to choose a strength on.")

    @property
    def angle(self) -> float:
        """Degrees from one rotated task to the next."""
        return 180 / self.tasks if self.turn is None else self.turn

    def outputs(self, tasks: list[Task]) -> int:
        """How many outputs a network for these tasks has."""
        return 1 + max(task.outputs[-1] if task.outputs else int(task.train.y.max()) for task in tasks)

    def model(self, tasks: list[Task]) -> nn.Module:
        """A fresh network, of torch's current seed."""
        if self.network == "gpt":
            length, width, depth, heads = self.hidden
            return Gpt(256, length, width, depth, heads)
        outputs = self.outputs(tasks)
        shape = tasks[0].train.first(1).x.shape[1:]
        if self.network == "perceptron":
            return perceptron(shape.numel(), self.hidden, outputs)
        if self.network == "resnet":
            return resnet(shape[0], outputs, self.hidden[0])
        return convolutional(shape[0], shape[1], outputs, self.hidden[0])

    def changed(self, **numbers: Any) -> Protocol:
        """The protocol with other numbers, of its own or of its training, and a name that tells them."""
        given = {key: value for key, value in numbers.items() if value is not None and value != self._number(key)}
        if not given:
            return self
        mine = {each.name for each in fields(self)} - {"name", "about", "training"}
        theirs = {key: value for key, value in given.items() if key not in mine}
        unknown = set(theirs) - {each.name for each in fields(Training)}
        if unknown:
            raise ArgumentError(f"a protocol has no {', '.join(sorted(unknown))}.")
        if "epochs" in theirs or "steps" in theirs:  # one says for how long instead of the other
            theirs = {"epochs": None, "steps": None, **theirs}
        if theirs.get("loss") == "squared":  # its labels are not smoothed
            theirs.setdefault("label_smoothing", 0.0)
        said = ", ".join(f"{key} {value}" for key, value in sorted(given.items()))
        own = {key: value for key, value in given.items() if key in mine}
        self._require_applicable(numbers)
        about = f"{self.about}; changed: {said}"
        return replace(
            self, name=f"{self.name} ({said})", about=about, training=replace(self.training, **theirs), **own
        )  # fmt: skip

    def _number(self, key: str) -> Any:
        return getattr(self, key) if hasattr(self, key) else getattr(self.training, key, None)

    def _require_applicable(self, given: dict[str, Any]) -> None:
        """Whether changes make sense here, where that is not for each number alone to say."""
        tasks, loss = given.get("tasks"), given.get("loss")
        if given.get("turn") is not None and self.stream != "rotated":
            raise ArgumentError(f"{self.name} turns no images.")
        if (given.get("margin") or given.get("scaled")) and self.stream != "permuted":
            raise ArgumentError(f"{self.name} takes its pixels as they are: margin and scaled are for permuted ones.")
        if tasks is not None and tasks < 2:
            raise ArgumentError(f"{self.name} with {tasks} tasks has nothing to forget: it takes 2 or more.")
        if tasks is not None and tasks > self.tasks and self.stream not in ("permuted", "rotated"):
            raise ArgumentError(f"{self.name} has no more than {self.tasks} tasks, got {tasks}.")
        if loss is not None and (loss == "tokens") != (self.stream == "text"):
            raise ArgumentError(f"the loss {loss!r} does not apply to {self.name}: tokens are for text alone.")
        if (loss or self.training.loss) == "squared" and given.get("label_smoothing"):
            raise ArgumentError("label smoothing does not apply to the squared loss.")


def _on(images: Images, device: str) -> Images:
    return replace(images, **{
        name: getattr(images, name).to(device) for name in ("train_x", "train_y", "test_x", "test_y")
    })  # fmt: skip


_DIGITS = Training(epochs=10, batch_size=64, label_smoothing=0.1)
_COSINE = Training(epochs=10, batch_size=256, schedule="cosine")
_HSU = Training(epochs=4, batch_size=128)
_CIFAR = Training(steps=2000, batch_size=256)
_FORMS: tuple[tuple[Stream, str], ...] = (
    ("task", "the task is told, and has outputs of its own"),
    ("domain", "the same two outputs in every task"),
    ("class", "which of all the classes so far?"),
)


def _all() -> list[Protocol]:
    protocols = [
        Protocol(
            "digits", "scikit-learn's digits, 5 orders of their pixels: a quick look", "digits", "permuted", 5,
            hidden=(128, 128), training=_DIGITS,
        ),
        Protocol(
            "vcl", "Nguyen et al. 2018: permuted MNIST, 10 tasks, 2×100; here 10 epochs with Adam 1e-3, cosine, batch "
            "256", "mnist", "permuted", 10, hidden=(100, 100), training=_COSINE,
        ),
        Protocol(
            "vandeven", "van de Ven & Tolias 2019: permuted MNIST padded to 32×32, 10 tasks, 2×1000, Adam 1e-4, 5000 "
            "steps of 128", "mnist", "permuted", 10, hidden=(1000, 1000), margin=2,
            training=Training(steps=5000, batch_size=128, lr=1e-4),
        ),
        Protocol(
            "zenke", "Zenke et al. 2017: permuted MNIST, 10 tasks, 2×2000, Adam 1e-3, batch 256, 20 epochs",
            "mnist", "permuted", 10, hidden=(2000, 2000), training=Training(epochs=20, batch_size=256),
        ),
        Protocol(
            "ritter", "Ritter et al. 2018: permuted MNIST, 50 tasks, 2×100; here 10 epochs with Adam 1e-3, cosine, "
            "batch 250", "mnist", "permuted", 50, hidden=(100, 100), training=replace(_COSINE, batch_size=250),
        ),
        Protocol(
            "fisher", "van de Ven 2025: split CIFAR-10, task-incremental, reduced ResNet-18, Adam 1e-3, 2000 steps of "
            "256", "cifar10", "task", 5, network="resnet", hidden=(20,), training=_CIFAR,
        ),
        Protocol(
            "fisher-mnist", "van de Ven 2025: split MNIST, task-incremental, 2×400, Adam 1e-3, 2000 steps of 128",
            "mnist", "task", 5, hidden=(400, 400), training=Training(steps=2000),
        ),
        Protocol(
            "avalanche-ewc", "Avalanche's check of EWC: permuted MNIST, 10 tasks, 1×512, 10 epochs of batch 256; Adam "
            "1e-3 in place of its SGD 1e-3, pixels from 0 to 1 in place of scaled ones", "mnist", "permuted", 10,
            hidden=(512,), training=Training(epochs=10, batch_size=256),
        ),
        Protocol(
            "avalanche-ewc-sgd", "Avalanche's check of EWC to the letter: permuted MNIST, pixels scaled to mean 0 and "
            "deviation 1, 10 tasks, 1×512, SGD 1e-3, 10 epochs of batch 256", "mnist", "permuted", 10, hidden=(512,),
            scaled=True, training=Training(epochs=10, batch_size=256, optimizer="sgd"),
        ),
        Protocol(
            "avalanche-si", "Avalanche's check of SI: permuted MNIST, 10 tasks, 1×1000, Adam 1e-3, 10 epochs of batch "
            "256; pixels from 0 to 1 in place of scaled ones", "mnist", "permuted", 10, hidden=(1000,),
            training=Training(epochs=10, batch_size=256),
        ),
        Protocol(
            "text", "bytes of Python's own source code, then of its documentation: a GPT of 2 layers, 128 wide",
            "text", "text", 2, network="gpt", hidden=(128, 128, 2, 4),
            training=Training(epochs=4, batch_size=32, schedule="cosine", loss="tokens"),
        ),
    ]  # fmt: skip
    for form, said in _FORMS:
        protocols += [
            Protocol(f"hsu-{form}", "Hsu et al. 2018: split MNIST, 2×400, Adam 1e-3, 4 epochs of batch 128, pixels as "
                     f"they are in place of padded and scaled ones; {said}",
                     "mnist", form, 5, hidden=(400, 400), training=_HSU),
            Protocol(f"digits-{form}", f"scikit-learn's digits, two classes at a time; {said}", "digits", form, 5,
                     hidden=(128, 128), training=_DIGITS),
            Protocol(f"fashion-{form}", f"Fashion-MNIST, two classes at a time, 2×400; {said}", "fashion-mnist", form,
                     5, hidden=(400, 400), training=_HSU),
            Protocol(f"fashion-conv-{form}", f"Fashion-MNIST, two classes at a time, 4 convolutions, 2 linear; {said}",
                     "fashion-mnist", form, 5, network="convolutional", hidden=(16,), training=_HSU),
            Protocol(f"cifar10-{form}", f"CIFAR-10, two classes at a time, 4 convolutions and 2 linear layers; {said}",
                     "cifar10", form, 5, network="convolutional", hidden=(32,), training=_CIFAR),
        ]  # fmt: skip
    protocols.append(replace(
        protocols[1], name="fashion-permuted", about="Fashion-MNIST, 10 orders of the pixels, 2×100, as vcl",
        dataset="fashion-mnist",
    ))  # fmt: skip
    for dataset, name, title in (
        ("mnist", "mnist-rotated", "MNIST"), ("fashion-mnist", "fashion-rotated", "Fashion-MNIST"),
    ):  # fmt: skip
        protocols.append(replace(
            protocols[1], name=name, about=f"{title} images, half a turn in as many steps as there are tasks, 2×100, "
            "as vcl", dataset=dataset, stream="rotated", tasks=5,
        ))  # fmt: skip
    return protocols


PROTOCOLS: dict[str, Protocol] = {each.name: each for each in _all()}
