"""Rejection sampling towards the mixture that a distance allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from acceptlib import ops, strategy
from acceptlib.ops import Value
from acceptlib.rules import row_sum, rule
from acceptlib.strategy import AcceptanceStrategy, Traits

if TYPE_CHECKING:
    import torch


class TVBudget(AcceptanceStrategy):
    """Rejection sampling that gives each row's draft as much weight as a total variation allows.

    Guarantee: lossy. No row's law is further than epsilon from the target's, in total variation; rows on which the
    models differ by no more have the draft's law, and no rejections. A token with no target probability (a constraint,
    say) is never accepted.

    Formula: v_i = (1 - s) p_i + s q_i with s = min(1, epsilon / TV(p_i, q_i)); h_i = min(1, v_i(x_i) / q_i(x_i)), 0
    where p_i(x_i) = 0; recovered token from max(p_i - q_i, 0), normalised. With epsilon = 0 this is `rejection`.

    Source: acceptlib. It is `mixture` with the weight that each row affords; of all rules within the same distance none
    accepts more, for no rule accepts more than 1 - TV(p, q) + TV(out, p). So is the default.
    """

    name = "tv-budget"
    traits = Traits(
        guarantee="lossy", bound="TV(out, p) <= epsilon", neutral={"epsilon": 0.0}, neutral_equals="rejection"
    )

    class Options(strategy.Options):
        """Options of `tv-budget`."""

        epsilon: float = Field(0.05, ge=0, le=1, description="largest total variation of a row; 0 is lossless")

    options: Options

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:  # noqa: ARG002
        """Return TV(out, p) - epsilon."""
        return float((out - p).abs().sum()) / 2 - self.options.epsilon

    @row_sum
    def total_variation(p: Value, q: Value) -> Value:
        """Return a term of TV(p, q)."""
        return ops.maximum(p - q, 0.0)

    @rule
    def accept(target_prob: Value, draft_prob: Value, total_variation: Value, epsilon: Value) -> Value:
        """Return h."""
        share = ops.minimum(ops.ratio(epsilon, total_variation), 1.0)
        mixed = (1.0 - share) * target_prob + share * draft_prob
        return ops.where(target_prob > 0, ops.minimum(ops.ratio(mixed, draft_prob), 1.0), 0.0)

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        return p - q
