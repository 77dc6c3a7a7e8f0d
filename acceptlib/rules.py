"""The rule language: plain functions whose parameter names say what they read.

A rule is written once and runs in torch and inside the Triton kernels. Its parameters are looked up by name, among
the quantities below and the strategy's own row sums, state (`Traits.state`) and options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np
import torch

from acceptlib import ops
from acceptlib.errors import AcceptlibError, StrategyDefinitionError, short_repr, suggest
from acceptlib.ops import Value

NUMBERS: Final = (int, float, np.ndarray, np.generic, torch.Tensor)
"""What a rule may return."""

SCALARS: Final[dict[str, str]] = {
    "draft_token_id": "x, the drafted token's id",
    "target_prob": "p(x), the target's probability of the drafted token",
    "draft_prob": "q(x), the draft's probability of it; 1 for a one-hot draft",
    "target_max_prob": "the largest entry of the target's row",
    "draft_max_prob": "the largest entry of the draft's row",
    "is_target_argmax": "whether the drafted token is the target's argmax (lowest id among ties)",
    "target_entropy": "entropy in nats of the target's row",
    "target_top_entropy": "entropy in nats of the target row's `Traits.top_k` largest entries, renormalised",
    "position": "0-based position in the draft",
    "num_draft_tokens": "drafted tokens of this request, n_b",
    "is_last": "whether this is the request's last drafted token",
    "carry": "the running scalar; `carry` and `residual` see it before this position, `accept` and `forgive` after it",
    "next_residual_mass": "for `accept` alone: sum of max(residual, 0) over the next row; 0 at the last drafted token; "
    "`accept` must not fall as it grows, so that it is found only where it decides",
}
"""Per drafted position, float64 (booleans where named `is_`); of rows after sampling parameters."""

ELEMENTS: Final[dict[str, str]] = {
    "p": "the target's row",
    "q": "the draft's row; one-hot at the drafted token where there is no draft row",
    "is_drafted": "whether the entry is the drafted token",
}
"""Per vocabulary entry, float32. `residual` reads them along with scalars, a row sum along with `target_prob`,
`draft_prob` and `position`."""


class Rule:
    """A rule function with the names it reads.

    Attributes:
        function: The plain function, for backends to bind to their own `ops`.
        names: Its parameters, in order.
    """

    decorator: ClassVar[str] = "rule"

    def __init__(self, function: Callable[..., Value]) -> None:
        """Wrap `function`, whose parameters must be plain positional names without defaults."""
        if not inspect.isfunction(function):
            expected = "expected a plain function, as `def` makes it, without @staticmethod or @classmethod"
            msg = f"acceptlib.{self.decorator}: {expected}, got {short_repr(function)}"
            raise StrategyDefinitionError(msg)
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
            if not plain or parameter.name == "self":
                msg = (
                    f"rule {function.__qualname__!r}: expected plain parameters without defaults, "
                    f"got {str(parameter)!r}. A rule reads quantities and options by name and takes no self."
                )
                raise StrategyDefinitionError(msg)
        self.names = tuple(parameter.name for parameter in parameters)
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def __reduce__(self) -> str:
        """Pickle by qualified name, as a function is: in the class, that name is the rule's."""
        return self.function.__qualname__

    def __call__(self, *args: Value) -> Value:
        """Evaluate in torch or NumPy.

        Raises:
            StrategyDefinitionError: The function cannot take what it reads, or returned neither a number nor an array;
                NumPy would take None for NaN.
        """
        try:
            value = self.function(*args)
        except (ArithmeticError, AttributeError, IndexError, NameError, TypeError, ValueError) as error:
            if isinstance(error, AcceptlibError):
                raise
            why = str(error).partition(", but expected one of:\n")[0].partition("\n")[0] or type(error).__name__
            msg = f"rule {self.function.__qualname__!r}: {why}.{_advice(error)}"
            raise StrategyDefinitionError(msg) from error
        if not isinstance(value, NUMBERS):
            expected = "expected a number or an array of what it reads; is a `return` missing?"
            msg = f"rule {self.function.__qualname__!r} returned {short_repr(value)}: {expected}"
            raise StrategyDefinitionError(msg)
        return value

    def __repr__(self) -> str:
        """Show the rule as it is written."""
        return f"<{type(self).__name__} {self.function.__qualname__}({', '.join(self.names)})>"


def fails_on_any_values(error: BaseException | None) -> bool:
    """Return whether a rule raised what it would raise on any rows, not only on those that it is tried on.

    An ArithmeticError is of that kind: arrays hold infinities, and only plain numbers, which are those of options and
    constants, make Python raise.
    """
    return isinstance(error, NameError | ArithmeticError) or _lacks_op(error)


def _lacks_op(error: BaseException | None) -> bool:
    return isinstance(error, AttributeError) and error.obj is ops


def _advice(error: Exception) -> str:
    """Return what to do about an error in a rule, as sentences."""
    if isinstance(error, NameError):
        return ""
    if isinstance(error, IndexError):
        return " What a rule reads has no entries to pick: a tuple of constants is its value at the position already."
    if isinstance(error, ArithmeticError):
        instead = ", or divide with acceptlib.ops.ratio" if isinstance(error, ZeroDivisionError) else ""
        return f" Numbers of options and constants alone gave this: change one of them{instead}."
    if isinstance(error, AttributeError) and _lacks_op(error):
        known = sorted(name for name, value in vars(ops).items() if inspect.isfunction(value) and name[0] != "_")
        return f"{suggest(error.name, known)} Available: {', '.join(known)}."
    return " Rules take numbers, arrays and tensors: use acceptlib.ops."


class RowSum(Rule):
    """An elementwise function of a row, summed over the vocabulary; its name becomes a scalar for the rules.

    The magnitudes of a row's terms must sum to less than 2^18; a larger sum is NaN.
    """

    decorator = "row_sum"


def rule(function: Callable[..., Value]) -> Rule:
    """Mark a strategy's `accept`, `carry`, `forgive` or `residual`."""
    return Rule(function)


def row_sum(function: Callable[..., Value]) -> RowSum:
    """Mark an elementwise function of `p` and `q`: rules may read its sum over the row under its name.

    Terms are float32, added up in fours of neighbours, (a + b) + (c + d), and these in steps of 2^-44. The magnitudes
    of a row's terms must sum to less than 2^18, those of four rounded to 1/4; a larger sum is NaN.
    """
    return RowSum(function)
