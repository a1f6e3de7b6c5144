"""Holding a model by what it answers: N · E KL(p_old ‖ p_new) over inputs in place of the old ones."""

from .loss import distillation_loss
from .new import NewInputs, new_inputs
from .teacher import Teacher
from .term import Distillation, distill
from .text import own_text

__all__ = ["Distillation", "NewInputs", "Teacher", "distill", "distillation_loss", "new_inputs", "own_text"]
