"""What others have reported on the protocols, to lay beside what is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A published average accuracy after the last task, in percent.

    `ours` are the bench's methods that do the same. `chosen_on_test` says that the strength (or another setting) was
    the best of several on the data it is judged by.
    """

    protocol: str
    method: str
    accuracy: float
    source: str
    ours: tuple[str, ...]
    chosen_on_test: bool = False
    note: str = ""


_NGUYEN = "Nguyen et al. 2018, Variational continual learning"
_SWAROOP = "Swaroop et al. 2019, Improving and understanding variational continual learning"
_VEN = "van de Ven & Tolias 2019, Three scenarios for continual learning"
_ZENKE = "Zenke, Poole & Ganguli 2017, Continual learning through synaptic intelligence"
_RITTER = "Ritter, Botev & Barber 2018, Online structured Laplace approximations"
_HSU = "Hsu et al. 2018, Re-evaluating continual learning scenarios, or van de Ven & Tolias 2019, Three scenarios"
_FISHER = "van de Ven 2025, On the computation of the Fisher information in continual learning"
_AVALANCHE = "Avalanche's continual-learning-baselines, the number it checks against"
_PER_TASK = "one penalty per task, as ewc-original"

# Where a paper does not say which of two it ran, or both would be called so, each is laid beside its number.
_EWC = ("ewc-original", "ewc")  # one penalty per task; one running penalty
_RUNNING = ("ewc", "ewc-online")  # with nothing decayed, as Hsu's code and van de Ven's; with a decay, as Schwarz's
_VARIATIONAL = ("mean-field", "ivon")
_KRONECKER = ("kronecker", "kronecker-rotated")  # one posterior, and steps as they are or in its eigenvectors

PUBLISHED: tuple[Published, ...] = (
    Published("vcl", "EWC", 84.0, _NGUYEN, _EWC, chosen_on_test=True),
    Published("vcl", "SI", 86.0, _NGUYEN, ("si",), chosen_on_test=True),
    Published("vcl", "VCL", 90.0, _NGUYEN, _VARIATIONAL),
    Published("vcl", "improved VCL", 93.0, _SWAROOP, _VARIATIONAL, note="800 epochs a task"),
    Published("vandeven", "EWC", 94.3, _VEN, _EWC, chosen_on_test=True, note=_PER_TASK),
    Published("vandeven", "online EWC", 94.4, _VEN, _RUNNING, chosen_on_test=True),
    Published("vandeven", "SI", 95.3, _VEN, ("si",), chosen_on_test=True),
    Published("vandeven", "joint", 97.6, _VEN, ("joint",)),
    Published("zenke", "SI", 96.9, _ZENKE, ("si",), chosen_on_test=True),
    Published("zenke", "joint", 98.3, _ZENKE, ("joint",)),
    Published("ritter", "Kronecker Laplace", 90.0, _RITTER, _KRONECKER, note="read off a figure: over 90"),
    Published("hsu-task", "EWC", 98.6, _HSU, _EWC, chosen_on_test=True),
    Published("hsu-task", "online EWC", 99.1, _HSU, _RUNNING, chosen_on_test=True),
    Published("hsu-task", "LwF", 99.6, _HSU, ("lwf",), chosen_on_test=True),
    Published("hsu-task", "MAS", 99.2, _HSU, ("mas",), chosen_on_test=True),
    Published("hsu-task", "joint", 99.7, _HSU, ("joint",)),
    Published("hsu-domain", "EWC", 58.9, _HSU, _EWC, chosen_on_test=True),
    Published("hsu-domain", "online EWC", 57.0, _HSU, _RUNNING, chosen_on_test=True),
    Published("hsu-domain", "LwF", 71.0, _HSU, ("lwf",), chosen_on_test=True),
    Published("hsu-domain", "MAS", 69.0, _HSU, ("mas",), chosen_on_test=True),
    Published("hsu-domain", "joint", 98.4, _HSU, ("joint",)),
    Published("hsu-class", "EWC", 19.8, _HSU, _EWC, chosen_on_test=True),
    Published("hsu-class", "online EWC", 20.0, _HSU, _RUNNING, chosen_on_test=True),
    Published("hsu-class", "LwF", 24.0, _HSU, ("lwf",), chosen_on_test=True),
    Published("hsu-class", "MAS", 20.0, _HSU, ("mas",), chosen_on_test=True),
    Published("hsu-class", "joint", 97.9, _HSU, ("joint",)),
    Published("fisher", "EWC, exact Fisher", 84.9, _FISHER, _EWC, chosen_on_test=True, note=_PER_TASK),
    Published("fisher", "EWC, sampled Fisher", 83.8, _FISHER, ("ewc-sampled",), chosen_on_test=True, note=_PER_TASK),
    Published("fisher", "EWC, observed Fisher", 83.3, _FISHER, ("ewc-observed",), chosen_on_test=True, note=_PER_TASK),
    Published(
        "fisher", "EWC, squares of batches of 128", 83.4, _FISHER, ("ewc-batched",), chosen_on_test=True, note=_PER_TASK
    ),
    Published("fisher", "fine-tuning", 69.5, _FISHER, ("fine-tuning",)),
    Published("avalanche-ewc", "EWC", 94.0, _AVALANCHE, _EWC, note=f"{_PER_TASK}; Avalanche itself reaches 83"),
    Published("avalanche-ewc-sgd", "EWC", 94.0, _AVALANCHE, _EWC, note=f"{_PER_TASK}; Avalanche itself reaches 83"),
    Published("avalanche-si", "SI", 95.0, _AVALANCHE, ("si",), note="Avalanche itself reaches 83"),
)  # fmt: skip


def published(protocol: str) -> list[Published]:
    """What others have reported on a protocol."""
    return [each for each in PUBLISHED if each.protocol == protocol]
