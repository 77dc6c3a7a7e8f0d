"""The part of a plan that the kernel is compiled for: its rules as Triton functions, and what they read."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from acceptlib import ops
from acceptlib.engine.plan import Plan
from acceptlib.engine.triton import ops as kernel_ops
from acceptlib.engine.triton.call import Rules
from acceptlib.engine.triton.positions import QUANTITIES
from acceptlib.engine.triton.rules import bind
from acceptlib.ops import Value
from acceptlib.rules import ELEMENTS, Rule, row_sum

TINY = kernel_ops.TINY.value
"""The smallest normal float32: the logarithms of numbers less than it are finite, and do not count in a sum."""

MAX_PLANS = 1024
"""Plans that are remembered: a strategy may be made for every request."""


@row_sum
def target_entropy(p: Value) -> Value:
    """Sum to the entropy of the target's row in bits, for rows whose law comes without it; NaN stays NaN."""
    return -p * ops.log2(p, least=TINY)


def scalars_of(plan: Plan) -> list[str]:
    """Return the names of the scalars [N] float64 that stages find, and mostly leave in the workspace, in order."""
    names = [*_sums(plan)]
    if "target_top_entropy" in plan.reads:
        names.append("target_top_entropy")
    if plan.carry is not None or "next_residual_mass" in plan.reads:
        names += ["carry before", "carry after"]
    if "next_residual_mass" in plan.reads:
        names.append("next_residual_mass")
    if plan.forgive is not None:
        names.append("flags")
    return names


def _sums(plan: Plan) -> dict[str, Rule]:
    """Return row sums by name, with the entropy as the last if it is read."""
    return {**plan.used_row_sums, **({"target_entropy": target_entropy} if "target_entropy" in plan.reads else {})}


@functools.lru_cache(maxsize=MAX_PLANS)
def bound(plan: Plan, device: torch.device) -> tuple[Rules, torch.Tensor]:
    """Return the part of `Call` that follows from a plan, and its per-position constants [n, size] on the device."""
    tuples = _tuples(plan).values()
    size = max(map(len, tuples), default=0) + 1
    table = [[*value, *[0.0] * (size - len(value))] for value in tuples] or [[0.0]]
    return rules_of(plan), torch.tensor(table, dtype=torch.float64, device=device)


def _tuples(plan: Plan) -> dict[str, tuple[float, ...]]:
    return {name: value for name, value in plan.constants.items() if isinstance(value, tuple)}


def rules_of(plan: Plan) -> Rules:
    """Return the part of `Call` that follows from a plan."""
    tables = tuple(_tuples(plan))
    scalars = scalars_of(plan)
    traits = plan.traits

    def names(when: str) -> tuple[str, ...]:
        """Return the names of a position's values, with `carry` as it is before or after the position."""
        return (
            *QUANTITIES,
            *("carry" if name == f"carry {when}" else name for name in scalars),
            *tables,
            *traits.state,
        )

    def bind_if(rule: Rule | None, names: tuple[str, ...]) -> Any:
        return rule and bind(rule, names, plan.constants)

    def at(name: str) -> int:
        return scalars.index(name) if name in scalars else -1

    return _shared(
        accept=bind_if(plan.accept, names("after")),
        carry=bind_if(plan.carry, names("before")),
        forgive=bind_if(plan.forgive, names("after")),
        residual=bind_if(plan.residual, (*ELEMENTS, *names("before"))),
        keeps_target=_keeps_target(plan),
        within_target=_within_target(plan),
        draws=plan.draws,
        sums=tuple(bind_if(rule, (*ELEMENTS, *names("before"))) for rule in _sums(plan).values()),
        vanishing=tuple(_vanishes(rule, plan) for rule in _sums(plan).values()),
        top_k=traits.top_k if "target_top_entropy" in plan.reads else 0,
        window=traits.window,
        stop=traits.stop,
        recovered=traits.recovered,
        bonus=traits.bonus,
        reads_target="target_prob" in plan.reads,
        reads_draft="draft_prob" in plan.reads,
        reads_target_max="target_max_prob" in plan.reads,
        reads_draft_max="draft_max_prob" in plan.reads,
        reads_argmax="is_target_argmax" in plan.reads,
        reads_length=not plan.reads.isdisjoint({"num_draft_tokens", "is_last"}),
        scalars=tuple(scalars),
        tables=tables,
        carry_scalar=at("carry before"),
        mass_scalar=at("next_residual_mass"),
        flags_scalar=at("flags"),
        entropy_scalar=at("target_entropy"),
        top_scalar=at("target_top_entropy"),
    )


class _Number:
    """Stands for a number that is not known: what compares it, or branches on it, is not looked into."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        msg = "whether it is equal is not known"
        raise TypeError(msg)

    def __bool__(self) -> bool:
        msg = "whether it is 0 is not known"
        raise TypeError(msg)


class _Entry(_Number):
    """Stands for an entry of the target's row, of which a rule may take nothing away."""

    def __sub__(self, other: Value) -> Value:
        return self if isinstance(other, int | float) and other == 0 else NotImplemented


def _keeps_target(plan: Plan) -> bool:
    """Return whether the weights after a rejected one-hot draft are the target's row but for the drafted token.

    Where that token has no probability, it has no weight either. Rules that read more are not looked into.
    """
    if plan.residual is None:
        return False
    entry = _Entry()

    def weight(p: Value, *, q: float) -> Value:
        return _returned(plan.residual, {**plan.numbers, "p": p, "q": q, "is_drafted": q > 0})

    return _holds(lambda: weight(entry, q=0.0) is entry and weight(0.0, q=1.0) <= 0)


class _AtMostZero(_Number):
    """Stands for a number of which nothing else is known."""

    def __le__(self, other: Value) -> bool:
        return other >= 0 or NotImplemented


class _AtLeastZero(_Number):
    """Stands for an entry of the draft's row."""

    def __mul__(self, other: Value) -> Value:
        return self if isinstance(other, int | float) and 0 <= other < math.inf else NotImplemented

    __rmul__ = __mul__

    def __rsub__(self, other: Value) -> Value:
        return _AtMostZero() if isinstance(other, int | float) and other <= 0 else NotImplemented


class _Finite(_Number):
    """Stands for a carry, which is taken to be finite: any other leaves the row without a law."""

    def __mul__(self, other: Value) -> Value:
        return 0.0 if isinstance(other, int | float) and other == 0 else NotImplemented

    __rmul__ = __mul__


def _within_target(plan: Plan) -> bool:
    """Return whether an entry without probability under the target has no weight, whatever the draft gives it.

    Rules that read more are not looked into.
    """
    if plan.residual is None:
        return True
    known = {"p": 0.0, "q": _AtLeastZero(), "carry": _Finite()}

    def weight(*, is_drafted: bool) -> Value:
        return _returned(plan.residual, {**plan.numbers, **known, "is_drafted": is_drafted})

    return _holds(lambda: weight(is_drafted=False) <= 0 and weight(is_drafted=True) <= 0)


def _vanishes(term: Rule, plan: Plan) -> bool:
    """Return whether a row sum's term is 0 where the target's probability is 0, as it is beyond the vocabulary.

    In a row without a law all probabilities are NaN, beyond the vocabulary too: there the term has to be 0 or NaN.
    Rules that read more are not looked into: a greedy draft whose rows are wider may have all of its probability there.
    """

    def vanishes() -> bool:
        p = np.array([0, np.nan], np.float32)  # float32, so that numbers act as in the kernels
        beyond, unlawful = np.broadcast_to(_returned(term, {**plan.numbers, "p": p}), 2)
        return bool(beyond == 0 and (unlawful == 0 or np.isnan(unlawful)))

    return _holds(vanishes)


def _returned(rule: Rule, values: Mapping[str, Value]) -> Value:
    """Return what a rule's function returns, which may be no number where it is given what stands for one."""
    return rule.function(*[values[name] for name in rule.names])


def _holds(condition: Callable[[], Value]) -> bool:
    """Return whether a condition on what stands for entries holds; False where it cannot be told."""
    with np.errstate(all="ignore"):
        try:
            return bool(condition())
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            return False


@functools.cache
def _shared(**parts: Any) -> Rules:
    """Return the same rules for equal parts, so that two instances of a strategy run the same kernels."""
    return Rules(**parts)
