"""Rejection sampling towards a mixture of target and draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from acceptlib import ops, strategy
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits

if TYPE_CHECKING:
    import torch


class Mixture(AcceptanceStrategy):
    """Rejection sampling whose target is a weighted mean of the target's and the draft's rows.

    Guarantee: lossy. A row's law is v = w p + (1 - w) q, at distance TV(v, p) = (1 - w) TV(p, q), wherever the target
    gives every token of the draft some probability. A token with no target probability (a constraint, say) is never
    accepted, and the distance is smaller.

    Formula: h_i = min(1, v_i(x_i) / q_i(x_i)), 0 where p_i(x_i) = 0; recovered token from max(p_i - q_i, 0), normalised
    (max(v - q, 0) is the same up to the factor w). With w = 1 this is `rejection`.

    Source: arXiv 2604.07622; transformers calls the weight `assistant_ensemble_weight`. The default is acceptlib's.
    """

    name = "mixture"
    aliases = ("ensemble",)
    traits = Traits(
        guarantee="lossy",
        bound="TV(out, p) <= (1 - weight) TV(p, q)",
        neutral={"weight": 1.0},
        neutral_equals="rejection",
    )

    class Options(strategy.Options):
        """Options of `mixture`."""

        weight: float = Field(0.8, ge=0, le=1, description="weight w of the target's row; 1 is lossless")

    options: Options

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:
        """Return TV(out, p) - (1 - weight) TV(p, q)."""
        return float((out - p).abs().sum() - (1 - self.options.weight) * (p - q).abs().sum()) / 2

    @rule
    def accept(target_prob: Value, draft_prob: Value, weight: Value) -> Value:
        """Return h."""
        mixed = weight * target_prob + (1.0 - weight) * draft_prob
        return ops.where(target_prob > 0, ops.minimum(ops.ratio(mixed, draft_prob), 1.0), 0.0)

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        return p - q
