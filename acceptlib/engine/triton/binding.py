"""Rules in kernels: a rule becomes a Triton function of the kernel's tuple of values.

    RULE = bind(plan.accept, ("target_prob", "draft_prob"), plan.constants)

and, inside a kernel that takes it as a `tl.constexpr`:

    h = evaluate(RULE, (target_prob, draft_prob), tl.float64)

Numbers are not passed: they are written into the function, see `source`.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

import functools
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from acceptlib.engine.plan import Constant
from acceptlib.engine.triton.source import compile_rule, define
from acceptlib.errors import StrategyDefinitionError
from acceptlib.rules import Rule


def bind(rule: Rule, names: tuple[str, ...], constants: Mapping[str, Constant]) -> Any:
    """Make a Triton function of a rule.

    Args:
        rule: The rule.
        names: What the kernel's tuple of values holds, in order. Per-position constants belong here.
        constants: Numbers for the parameters that are not in `names`; others are ignored.

    Returns:
        A `triton.JITFunction` of the tuple, the same one for equal arguments.

    Raises:
        StrategyDefinitionError: The rule has no source, or reads what is neither in `names` nor a number.
    """
    numbers: dict[str, float] = {}
    for name in rule.names:
        if name in names:
            continue
        value = constants.get(name)
        if not isinstance(value, int | float):
            msg = f"{rule!r} reads {name!r}: expected one of {', '.join(names)} or a number, got {value!r}"
            raise StrategyDefinitionError(msg)
        numbers[name] = value
    function = compile_rule(rule.function, numbers)
    return _of_tuple(function, tuple(names.index(name) for name in rule.names if name not in numbers))


@functools.cache
def _of_tuple(function: Any, index: tuple[int, ...]) -> Any:
    """Return a Triton function that calls `function` with some values of a tuple."""
    name = "_".join((function.__name__, "of", *(str(i) for i in index)))
    source = f"def {name}(values):\n    return rule({', '.join(f'values[{i}]' for i in index)})\n"
    return define(name, source, {"__name__": function.__module__, "rule": function})


@triton.jit
def evaluate(RULE: tl.constexpr, values, DTYPE: tl.constexpr):
    """Evaluate a rule inside a kernel.

    Args:
        RULE: The function that `bind` returned.
        values: Tuple of tensors, float64 scalars for decisions and float32 for rows; those not read may be None.
        DTYPE: Of the result; `tl.int1` for `forgive`.
    """
    result = RULE(values)
    return result != 0 if tl.int1 == DTYPE else result.to(DTYPE)
