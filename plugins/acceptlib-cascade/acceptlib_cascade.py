"""Speculative cascades for acceptlib: the draft's law where it is good enough, the target's elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pydantic import Field

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, ops, row_sum, rule

if TYPE_CHECKING:
    import torch

    from acceptlib.ops import Value

ROUNDING: Final = 1e-9
"""Of both sides of the deferral rule, which are equal in many a short row where alpha = 1."""


class Cascade(AcceptanceStrategy):
    """Speculative cascade with the OPT rule: follow the draft's row unless the target is surer by enough.

    Guarantee: lossy. A row that defers has the target's law exactly; one that does not has the draft's, at distance
    TV(p, q) from the target's, except that a token which the target gives no probability is never accepted.

    Formula: a row defers iff max_v q_i(v) < max_v p_i(v) - alpha TV(p_i, q_i). With pi = p_i if it defers and pi = q_i
    if not, h_i = min(1, pi(x_i) / q_i(x_i)), 0 where p_i(x_i) = 0. The recovered token is drawn from max(p_i - q_i, 0),
    normalised; a row that does not defer comes to that after an impossible token only. With alpha = -inf every row
    defers, and this is `rejection`.

    Source: Narasimhan et al. 2024, arXiv 2405.19261, the plug-in estimate of the optimal deferral rule. The default of
    alpha is ours.

    The bonus token is the target's, for no draft row goes with it. A one-hot draft is sure of its token, so that no row
    defers to the target under alpha >= 0: give draft rows.
    """

    name = "cascade"
    interface_version = 1
    traits = Traits(
        guarantee="lossy",
        bound="TV(out, p) <= TV(p, q), and 0 in a row that defers",
        neutral={"alpha": -math.inf},
        neutral_equals="rejection",
    )

    class Options(acceptlib.Options):
        """Options of `cascade`."""

        alpha: float = Field(
            0.1, ge=-math.inf, description="what deferring costs per unit of TV(p, q); -inf always defers (lossless)"
        )

    options: Options

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:
        """Return by how much TV(out, p) exceeds TV(p, q), or 0 in a row that defers by more than rounding."""
        tv = float((p - q).abs().sum()) / 2
        defers = not (q.max() >= p.max() - self.options.alpha * tv - ROUNDING)
        return float((out - p).abs().sum()) / 2 - (0.0 if defers else tv)

    @row_sum
    def total_variation(p: Value, q: Value) -> Value:
        """Sum to TV(p, q)."""
        return 0.5 * ops.abs(p - q)

    @rule
    def accept(
        target_prob: Value,
        draft_prob: Value,
        target_max_prob: Value,
        draft_max_prob: Value,
        total_variation: Value,
        alpha: Value,
    ) -> Value:
        """Return h."""
        # Written so that alpha * TV = -inf * 0, which is no number, defers.
        keeps = draft_max_prob >= target_max_prob - alpha * total_variation
        h = ops.minimum(ops.ratio(ops.where(keeps, draft_prob, target_prob), draft_prob), 1.0)
        return ops.where(target_prob > 0, h, 0.0)

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        return p - q


@acceptlib.hookimpl
def acceptlib_strategies() -> list[type[AcceptanceStrategy]]:
    """Return this package's strategies."""
    return [Cascade]
