"""The skeleton of every chain rule, given its scalars: carry, acceptance and stopping, in float64.

Shared by the torch engine and the exact law, which differ in where scalars come from and in what they do with the
probabilities: one compares them with uniforms, the other enumerates. Tensors give tensors, and arrays give arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np
import torch

from acceptlib import ops
from acceptlib.arrays import Array, all_so_far, arange, as_array, as_tensor, float64, full, library
from acceptlib.engine.plan import Plan, evaluate
from acceptlib.errors import StrategyDefinitionError

Values: TypeAlias = dict[str, Array]

OF_POSITIONS: Final = frozenset({"position", "num_draft_tokens", "is_last"})
"""Quantities that follow from where a position is."""


def positional(plan: Plan, num_draft_tokens: Array, max_num_draft_tokens: int, state: Mapping[str, Array]) -> Values:
    """Return the quantities that do not depend on rows, and the constants that depend on positions.

    Args:
        plan: The strategy.
        num_draft_tokens: [B] int64.
        max_num_draft_tokens: K.
        state: [B] or [1] tensors by name.

    Returns:
        [B, K] arrays by name.
    """
    values: Values = {}
    if not state and len(plan.numbers) == len(plan.constants) and plan.reads.isdisjoint(OF_POSITIONS):
        return values
    position = arange(max_num_draft_tokens, num_draft_tokens)
    length = num_draft_tokens[:, None] + 0 * position
    if "position" in plan.reads:
        values["position"] = float64(position + 0 * length)
    if "num_draft_tokens" in plan.reads:
        values["num_draft_tokens"] = float64(length)
    if "is_last" in plan.reads:
        values["is_last"] = position == length - 1
    for name, value in state.items():
        scalar = value if value.dtype in {torch.bool, np.dtype(bool)} else float64(value)
        values[name] = broadcast(scalar[:, None], length)
    for name, constant in plan.constants.items():
        if isinstance(constant, tuple):
            # Filled entry by entry, since a copy to a device waits.
            table = [*constant, *[0.0] * max_num_draft_tokens][:max_num_draft_tokens]
            entries = [full(length.shape[:1], number, length) for number in table]
            values[name] = library(length).stack(entries, 1) if entries else float64(length)
    return values


def run_carry(plan: Plan, values: Values, like: Array) -> Array:
    """Return the running scalar before each position of `like`, [B, K], and after the last: [B, K+1] float64."""
    carry = full((len(like), like.shape[1] + 1), 1.0, like)
    if plan.carry is not None:
        columns = {name: value.swapaxes(0, 1) for name, value in values.items() if name in plan.carry.names}
        for position in range(like.shape[1]):
            here = {name: column[position] for name, column in columns.items()}
            carry[:, position + 1] = evaluate(plan.carry, {**here, "carry": carry[:, position]}, plan.numbers)
    return carry


def acceptance(
    plan: Plan,
    values: Values,
    carry: Array,
    next_residual_mass: Callable[[], Array],
) -> Array:
    """Return h, the probability that each drafted token is accepted: [B, K] float64."""
    values = {**values, "carry": carry[:, 1:]}
    if "next_residual_mass" in plan.accept.names:
        values["next_residual_mass"] = next_residual_mass()
    return broadcast(evaluate(plan.accept, values, plan.numbers), values["carry"])


def forgiven(plan: Plan, values: Values, carry: Array) -> Array | None:
    """Return which tokens may stand although rejected, [B, K] bool; None where the strategy has no such rule."""
    if plan.forgive is None:
        return None
    return broadcast(evaluate(plan.forgive, {**values, "carry": carry[:, 1:]}, plan.numbers), carry[:, 1:]) != 0


def stop_position(plan: Plan, accepted: Array, may_stand: Array | None, num_draft_tokens: Array) -> Array:
    """Return how many drafted tokens stand.

    Args:
        plan: The strategy; its `Traits.stop` decides.
        accepted: [B, K] bool, False at and beyond each request's end.
        may_stand: [B, K] bool for `window`, else None.
        num_draft_tokens: [B] int64.

    Returns:
        [B] int64 in 0..n_b.
    """
    most = accepted.shape[1]
    position = arange(most, accepted)
    if plan.traits.stop == "last_acceptance":
        return library(accepted).amax(accepted * (position + 1), 1) if most else num_draft_tokens
    if may_stand is not None:
        # Tokens accepted up to each position. A window is full where this count grows by the window's length.
        count = accepted.cumsum(1)
        window = ops.minimum(num_draft_tokens[:, None] - 1, plan.traits.window)
        end = position + window
        row = arange(len(accepted), accepted)[:, None]
        full_window = count[row, ops.minimum(end, most - 1)] - count == window
        fits = (window > 0) & (end < num_draft_tokens[:, None])
        accepted = accepted | (may_stand & full_window & fits)
    return all_so_far(accepted).sum(1)


def broadcast(value: Array | float, like: Array) -> Array:
    """Return what a rule returned, possibly a plain number, in the shape of `like`, and of its kind.

    Raises:
        StrategyDefinitionError: It has another shape.
    """
    if isinstance(value, int | float | np.generic):
        value = full((), float(value), like)
    elif isinstance(value, torch.Tensor) != isinstance(like, torch.Tensor):
        # A constant of the rule's own, which an engine may not write into.
        value = as_tensor(value.copy()) if isinstance(like, torch.Tensor) else as_array(value)
    if value.shape == like.shape:
        return value
    try:
        return library(like).broadcast_to(value, like.shape)
    except (RuntimeError, ValueError):
        msg = f"rules are elementwise: expected a value for {list(like.shape)}, got {list(value.shape)}"
        raise StrategyDefinitionError(msg) from None
