"""The skeleton of every chain rule, given its scalars: carry, acceptance and stopping, in float64.

Shared by the torch engine and the exact law, which differ in where scalars come from and in what they do with the
probabilities: one compares them with uniforms, the other enumerates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from acceptlib.arrays import as_tensor, as_words
from acceptlib.engine.plan import Plan, call

Values = dict[str, torch.Tensor]


def positional(
    plan: Plan, num_draft_tokens: torch.Tensor, max_num_draft_tokens: int, state: Mapping[str, torch.Tensor]
) -> tuple[Values, Mapping[str, float]]:
    """Return the quantities that no row has a say in, and the constants that do not depend on positions.

    Args:
        plan: The strategy.
        num_draft_tokens: [B] int64.
        max_num_draft_tokens: K.
        state: [B] or [1] tensors by name.

    Returns:
        [B, K] tensors by name, and numbers by name.
    """
    device = num_draft_tokens.device
    position = torch.arange(max_num_draft_tokens, device=device).expand(len(num_draft_tokens), -1)
    values: Values = {}
    if "position" in plan.reads:
        values["position"] = position.to(torch.float64)
    if "num_draft_tokens" in plan.reads:
        values["num_draft_tokens"] = num_draft_tokens[:, None].to(torch.float64).expand_as(position)
    if "is_last" in plan.reads:
        values["is_last"] = position == num_draft_tokens[:, None] - 1
    for name, value in state.items():
        scalar = value if value.dtype == torch.bool else value.to(torch.float64)
        values[name] = scalar[:, None].expand_as(position)
    numbers: dict[str, float] = {}
    for name, constant in plan.constants.items():
        if isinstance(constant, tuple):
            # Filled entry by entry, for a copy to a device waits.
            entries = [torch.full((), number, dtype=torch.float64, device=device) for number in (*constant, 0.0)]
            table = torch.stack(entries)
            values[name] = table[position.clamp(max=len(constant))]
        else:
            numbers[name] = constant
    return values, numbers


def run_carry(plan: Plan, values: Values, numbers: Mapping[str, float], like: torch.Tensor) -> torch.Tensor:
    """Return the running scalar before each position of `like`, [B, K], and after the last: [B, K+1] float64."""
    carry = torch.ones(len(like), like.shape[1] + 1, dtype=torch.float64, device=like.device)
    if plan.carry is not None:
        columns = {name: value.unbind(1) for name, value in values.items() if name in plan.carry.names}
        for position in range(like.shape[1]):
            here = {name: column[position] for name, column in columns.items()}
            carry[:, position + 1] = call(plan.carry, {**here, "carry": carry[:, position]}, numbers)
    return carry


def acceptance(
    plan: Plan,
    values: Values,
    numbers: Mapping[str, float],
    carry: torch.Tensor,
    next_residual_mass: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Return h, the probability that each drafted token is accepted: [B, K] float64."""
    values = {**values, "carry": carry[:, 1:]}
    if "next_residual_mass" in plan.accept.names:
        values["next_residual_mass"] = next_residual_mass()
    return broadcast(call(plan.accept, values, numbers), values["carry"])


def forgiven(plan: Plan, values: Values, numbers: Mapping[str, float], carry: torch.Tensor) -> torch.Tensor | None:
    """Return which tokens may stand although rejected, [B, K] bool; None where the strategy has no such rule."""
    if plan.forgive is None:
        return None
    return broadcast(call(plan.forgive, {**values, "carry": carry[:, 1:]}, numbers), carry[:, 1:]) != 0


def stop_position(
    plan: Plan, accepted: torch.Tensor, may_stand: torch.Tensor | None, num_draft_tokens: torch.Tensor
) -> torch.Tensor:
    """Return how many drafted tokens stand.

    Args:
        plan: The strategy; its `Traits.stop` decides.
        accepted: [B, K] bool, False at and beyond each request's end.
        may_stand: [B, K] bool for `window`, else None.
        num_draft_tokens: [B] int64.

    Returns:
        [B] int64 in 0..n_b.
    """
    position = torch.arange(accepted.shape[1], device=accepted.device)
    if plan.traits.stop == "last_acceptance":
        return torch.where(accepted, position + 1, 0).amax(1) if accepted.shape[1] else num_draft_tokens
    if may_stand is not None:
        # Accepted among the first i tokens, for i in 0..K; a window is full where its ends differ by its length.
        count = torch.nn.functional.pad(accepted.cumsum(1), (1, 0))
        window = (num_draft_tokens[:, None] - 1).clamp(max=plan.traits.window)
        end = position + 1 + window
        full = count.gather(1, end.clamp(0, accepted.shape[1])) - count[:, 1:] == window
        fits = (window > 0) & (end <= num_draft_tokens[:, None])
        accepted = accepted | (may_stand & full & fits)
    return as_tensor(as_words(accepted).cumprod(1).sum(1))


def broadcast(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """Return what a rule returned, possibly a plain number, in the shape of `like`."""
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=torch.float64, device=like.device)
    return value.expand_as(like)
