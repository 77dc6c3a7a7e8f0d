"""Rules in kernels: a rule becomes two constants, a Triton function and the positions of its arguments.

    RULE, INDEX = bind(plan.accept, ("target_prob", "draft_prob"), plan.constants)

and, inside a kernel that takes both as `tl.constexpr`:

    h = call(RULE, INDEX, (target_prob, draft_prob), tl.float64)

Numbers do not travel with them: they are in the function, as `source` says.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from acceptlib.engine.plan import Constant
from acceptlib.engine.triton.source import compile_rule
from acceptlib.errors import StrategyDefinitionError
from acceptlib.rules import Rule


def bind(rule: Rule, names: tuple[str, ...], constants: Mapping[str, Constant]) -> tuple[Any, tuple[int, ...]]:
    """Make a Triton function of a rule.

    Args:
        rule: The rule.
        names: What the kernel's tuple of values holds, in order. Per-position constants belong here.
        constants: Numbers for the parameters that are not in `names`; others are ignored.

    Returns:
        A `triton.JITFunction`, the same one for equal arguments, and the positions in `names` of its arguments.

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
    function = compile_rule(rule.function, tuple(numbers.items()))
    return function, tuple(names.index(name) for name in rule.names if name not in numbers)


@triton.jit
def call(RULE: tl.constexpr, INDEX: tl.constexpr, values, DTYPE: tl.constexpr):
    """Evaluate a rule inside a kernel.

    Args:
        RULE: The function that `bind` returned.
        INDEX: The positions that `bind` returned.
        values: Tuple of tensors, float64 scalars for decisions and float32 for rows; those not in INDEX may be None.
        DTYPE: Of the result; `tl.int1` for `forgive`.
    """
    result = RULE(*_pick(values, INDEX))
    return result != 0 if tl.int1 == DTYPE else result.to(DTYPE)


@triton.jit
def _pick(values, INDEX: tl.constexpr):
    """Return the values at INDEX, as a tuple."""
    picked = ()
    for i in tl.static_range(len(INDEX)):
        picked = picked + (values[INDEX[i]],)  # noqa: RUF005 - what Triton compiles
    return picked
