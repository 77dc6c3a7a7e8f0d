"""Cactus for acceptlib: acceptance with a bounded gain per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, ops, rule

if TYPE_CHECKING:
    import torch

    from acceptlib.ops import Value


class Cactus(AcceptanceStrategy):
    """Constrained acceptance: raise the drafted token's target probability as far as a divergence budget allows.

    Guarantee: lossy. No token becomes more likely than t(x), and none with p(x) >= q(x) more likely than p(x).

    Formula: t(x) = min(1, p(x) + sqrt(2 delta p(x) (1 - p(x)))), h_i = min(1, t_i(x_i) / q_i(x_i)). The recovered token
    is drawn from max(g - q_i, 0), normalised, where g has t_i(x_i) at the drafted token and the rest of p_i scaled by
    (1 - t_i(x_i)) / (1 - p_i(x_i)): it depends on the drafted token. With delta = 0 this is `rejection`.

    Source: Hao and Mou 2026, arXiv 2604.04987; to second order KL(g || p) is at most delta, in nats. The default is
    ours.
    """

    name = "cactus"
    interface_version = 1
    traits = Traits(
        guarantee="lossy",
        bound="out(x) <= min(1, p(x) + sqrt(2 delta p(x) (1 - p(x))))",
        neutral={"delta": 0.0},
        neutral_equals="rejection",
    )

    class Options(acceptlib.Options):
        """Options of `cactus`."""

        delta: float = Field(0.1, ge=0, allow_inf_nan=False, description="divergence budget in nats; 0 is lossless")

    options: Options

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:  # noqa: ARG002
        """Return max over x of out(x) - t(x)."""
        return float((out - raised(p, self.options.delta)).max())

    @rule
    def accept(target_prob: Value, draft_prob: Value, delta: Value) -> Value:
        """Return h."""
        return ops.minimum(ops.ratio(raised(target_prob, delta), draft_prob), 1.0)

    @rule
    def residual(p: Value, q: Value, is_drafted: Value, target_prob: Value, delta: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        t = raised(target_prob, delta)
        # Where p(x) = 1 there is no rest to scale, and no rejection.
        scale = ops.ratio(1.0 - t, 1.0 - target_prob)
        return ops.where(is_drafted, t, p * scale) - q


def raised(prob: Value, delta: Value) -> Value:
    """Return t; a probability that rounding has put above 1 has no variance."""
    return ops.minimum(prob + ops.sqrt(ops.maximum(2.0 * delta * prob * (1.0 - prob), 0.0)), 1.0)


@acceptlib.hookimpl
def acceptlib_strategies() -> list[type[AcceptanceStrategy]]:
    """Return this package's strategies."""
    return [Cactus]
