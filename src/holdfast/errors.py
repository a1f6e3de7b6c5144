"""What can go wrong, by kind: every error of the library is a `HoldfastError` and says what to do."""

import math
from numbers import Real


class HoldfastError(Exception):
    """The root of every error raised on purpose."""


class ArgumentError(HoldfastError, ValueError):
    """An argument outside its range, or two that exclude each other."""


class MismatchError(HoldfastError, ValueError):
    """Two things that must agree do not: names, shapes, units, structures or weights."""


class DataError(HoldfastError, ValueError):
    """The batches cannot be used: empty, of the wrong form, or not finite."""


class SingularError(HoldfastError, ArithmeticError):
    """A precision without an inverse was asked for a density, a sample or a determinant."""


class InertError(HoldfastError, RuntimeError):
    """A penalty that would do nothing, or did nothing."""


class BudgetError(HoldfastError, RuntimeError):
    """A budget that cannot be kept together with any learning."""


class VarianceError(HoldfastError, ArithmeticError):
    """Deviations of a variational posterior that collapsed or exploded."""


class CheckError(HoldfastError, RuntimeError):
    """A fast path and the plain one disagree: nothing is returned rather than something wrong."""


class MemoryFileError(HoldfastError, OSError):
    """A memory file that is damaged, foreign, or newer than this version."""


class HoldfastWarning(UserWarning):
    """Something that is allowed, and probably not meant."""


def require_number(value: object, what: str, *, positive: bool = False) -> float:
    """`value` as a finite float, zero or more (or more than zero); raises, saying what it should have been."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        got = repr(value) if isinstance(value, (Real, str)) else type(value).__name__
        raise ArgumentError(f"{what} must be a finite number {'> 0' if positive else '≥ 0'}, got {got}.")
    return number
