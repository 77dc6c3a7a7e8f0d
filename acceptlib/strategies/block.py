"""Block verification."""

from __future__ import annotations

from acceptlib import ops
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits


class Block(AcceptanceStrategy):
    """Block verification: decide on the drafted block as a whole, which accepts at least as much as token by token.

    Guarantee: lossless, and no lossless rule that verifies one draft accepts more tokens on average.

    Formula: P_0 = 1, P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1), Z_i = sum_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0).
    h_i = Z_i / (Z_i + 1 - P_i), 1 where that is 0 / 0, and h_K = P_K. The largest accepted i stands, with everything
    before it; the recovered token is drawn from max(P_i p_{i+1} - q_{i+1}, 0), normalised.

    Source: Sun et al. 2024, arXiv 2403.10444 v3, algorithm 2.
    """

    name = "block"
    traits = Traits(guarantee="lossless", stop="last_acceptance")

    @rule
    def carry(carry: Value, target_prob: Value, draft_prob: Value) -> Value:
        """Return P."""
        # The quotient by itself, which no other position has to be known for; 0 times an infinite one is 0.
        grown = carry * ops.ratio(target_prob, draft_prob)
        return ops.minimum(ops.where(carry > 0, grown, 0.0), 1.0)

    @rule
    def accept(carry: Value, next_residual_mass: Value, is_last: Value) -> Value:
        """Return h, from P and Z."""
        mass = ops.minimum(next_residual_mass, carry)  # Z <= P but for rounding
        denominator = mass + (1.0 - carry)
        h = mass / ops.where(denominator > 0, denominator, 1.0)
        return ops.where(is_last, carry, ops.where(denominator > 0, h, 1.0))

    @rule
    def residual(p: Value, q: Value, carry: Value) -> Value:
        """Return the weight of each entry after the block stops."""
        return carry * p - q
