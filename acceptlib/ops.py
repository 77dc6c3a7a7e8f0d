"""The operations a rule may use, in torch and NumPy: the vocabulary that both share with Triton.

Arithmetic and comparison operators come from the values themselves. `acceptlib.engine.triton.ops` holds the
same names for Triton; a rule written with `ops` runs under all of them.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from acceptlib import arrays

Value: TypeAlias = Any
"""A number, or a tensor or an array of them: what a rule takes and returns (float64 scalars, float32 rows)."""

LN_2: Final = math.log(2)


def minimum(a: Value, b: Value) -> Value:
    """Return the elementwise smaller of `a` and `b`."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    if not isinstance(b, torch.Tensor):
        return torch.clamp(a, max=b) if isinstance(a, torch.Tensor) else min(a, b)
    return torch.minimum(a, b) if isinstance(a, torch.Tensor) else torch.clamp(b, max=a)


def maximum(a: Value, b: Value) -> Value:
    """Return the elementwise larger of `a` and `b`."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    if not isinstance(b, torch.Tensor):
        return torch.clamp(a, min=b) if isinstance(a, torch.Tensor) else max(a, b)
    return torch.maximum(a, b) if isinstance(a, torch.Tensor) else torch.clamp(b, min=a)


def where(condition: Value, a: Value, b: Value) -> Value:
    """Return `a` where `condition` holds, `b` elsewhere."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, a, b)
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        # Two plain numbers would become float32, not the rule's float64. Filled, since a copy to a device waits.
        a, b = (torch.full((), number, dtype=torch.float64, device=condition.device) for number in (a, b))
    return torch.where(condition, a, b)


def exp(a: Value) -> Value:
    """Return e to the power of `a`."""
    return _function("exp", a)


def log(a: Value) -> Value:
    """Return the natural logarithm of `a`."""
    if isinstance(a, torch.Tensor) and a.is_cpu and a.dtype == torch.float32:
        # torch's own is MKL's, which is several times slower on an AMD EPYC than on Intel's.
        return arrays.log2(a).mul_(LN_2)
    return _function("log", a)


def log2(a: Value, guard: float = 0.0, least: float = 0.0) -> Value:
    """Return the base-2 logarithm of `a + guard`, or of `least` where that is larger; both keep that of 0 finite.

    On a CPU the result overwrites this number, so that neither needs another temporary tensor.
    """
    total = a + guard if guard else a
    total = maximum(total, least) if least else total
    own = bool(guard or least)
    return arrays.log2(total, in_place=own) if isinstance(a, torch.Tensor) else _function("log2", total)


def sqrt(a: Value) -> Value:
    """Return the square root of `a`, correctly rounded; NaN below 0."""
    if not isinstance(a, torch.Tensor) or not a.is_cpu:
        return _function("sqrt", a)
    # torch's own is an ulp off for many numbers on a CPU, and a token must not depend on the device.
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(a.detach().numpy())))


def abs(a: Value) -> Value:  # noqa: A001 - the name that torch and triton.language use
    """Return the absolute value of `a`."""
    return operator.abs(a)


def ratio(a: Value, b: Value) -> Value:
    """Return `a / b` for a, b >= 0, where x / 0 is infinite and 0 / 0 is 0. NaN stays, but over NaN everything is 0.

    These are the limits that make min(1, p / q) accept a token of zero draft probability iff the target gives
    it any (Leviathan et al. 2022, arXiv 2211.17192, section 2.3).
    """
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a / b if b else math.inf if a > 0 else 0.0
    if isinstance(b, torch.Tensor) and not isinstance(a, torch.Tensor):
        # Of a plain number over a tensor, torch takes the product with the reciprocal, which is rounded twice.
        a = torch.full((), a, dtype=torch.float64, device=b.device)
    quotient = a / b
    return where((quotient == quotient) | (b > 0), quotient, 0.0)  # noqa: PLR0124 - NaN alone is not itself


def _function(name: str, a: Value) -> Value:
    """Return a function's value. A plain number gives a plain number, with infinities and NaN as an array has them."""
    if isinstance(a, torch.Tensor):
        return getattr(torch, name)(a)
    with np.errstate(all="ignore"):
        found = getattr(np, name)(a if isinstance(a, np.ndarray) else float(a))
    return found if isinstance(a, np.ndarray) else float(found)
