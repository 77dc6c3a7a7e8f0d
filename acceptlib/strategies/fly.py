"""Training-free loose verification with a deferred window."""

from __future__ import annotations

import dataclasses

from pydantic import Field

from acceptlib import ops, strategy
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits


class Fly(AcceptanceStrategy):
    """FLy: let a rejected token stand where the target is undecided and the tokens that follow are accepted.

    Guarantee: lossy, without a bound. With an infinite `fly_entropy_threshold` it is `rejection`.

    Formula: h_i = min(1, p_i(x_i) / q_i(x_i)). A rejected token still stands if p_i(x_i) > 0, the entropy of the
    row's `fly_entropy_top_k` largest probabilities, renormalised, is at least `fly_entropy_threshold`, and the next
    W = min(fly_window, n_b - 1) >= 1 drafted tokens exist and are accepted by h. The first token that does not stand
    stops; the recovered token is drawn from max(p_i - q_i, 0), normalised.

    Source: arXiv 2511.22972; defaults of vLLM's `fly` method.
    """

    name = "fly"
    traits = Traits(
        guarantee="lossy",
        bound="none",
        stop="window",
        neutral={"fly_entropy_threshold": float("inf")},
        neutral_equals="rejection",
    )

    class Options(strategy.Options):
        """Options of `fly`."""

        fly_entropy_threshold: float = Field(
            0.3, ge=0, description="entropy in nats from which the target counts as undecided (vLLM 0.3)"
        )
        fly_entropy_top_k: int = Field(
            3, ge=1, le=1_000_000, description="number of probabilities in that entropy (vLLM 3)"
        )
        fly_window: int = Field(
            6, ge=1, le=1_000_000, description="followers that must be accepted, at most n_b - 1 (vLLM 6)"
        )

    options: Options

    def resolve_traits(self) -> Traits:
        """Take the window and the number of probabilities from the options."""
        return dataclasses.replace(self.traits, window=self.options.fly_window, top_k=self.options.fly_entropy_top_k)

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        """Return h."""
        return ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)

    @rule
    def forgive(target_prob: Value, target_top_entropy: Value, fly_entropy_threshold: Value) -> Value:
        """Return whether a rejected token may stand."""
        return (target_prob > 0) & (target_top_entropy >= fly_entropy_threshold)

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        return p - q
