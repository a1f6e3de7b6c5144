"""What the model's output means: the negative log-likelihood of one example, in nats, and its Fisher."""

from .base import EXPECTED_UP_TO, Likelihood
from .categorical import Categorical, categorical, softened
from .custom import Custom, custom
from .outputs import Bernoulli, Gaussian, bernoulli, gaussian
from .tokens import Tokens, tokens

__all__ = [
    "EXPECTED_UP_TO",
    "Bernoulli",
    "Categorical",
    "Custom",
    "Gaussian",
    "Likelihood",
    "Tokens",
    "bernoulli",
    "categorical",
    "custom",
    "gaussian",
    "softened",
    "tokens",
]
