"""Token-by-token rejection sampling."""

from __future__ import annotations

from acceptlib import ops
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits


class Rejection(AcceptanceStrategy):
    """Speculative sampling: accept with probability min(1, p(x) / q(x)), recover from (p - q)+.

    Guarantee: lossless. The emitted tokens follow the target's law, whatever the draft.

    Formula: h_i = min(1, p_i(x_i) / q_i(x_i)). The first rejection stops; the recovered token is drawn from
    max(p_i - q_i, 0), normalised. A row accepts with probability alpha = sum_x min(p(x), q(x)) = 1 - TV(p, q).

    Source: Leviathan et al. 2022, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318.
    """

    name = "rejection"
    aliases = ("speculative", "standard")
    traits = Traits(guarantee="lossless")

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        """Return h."""
        return ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        return p - q
