"""Lenient rejection sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from acceptlib import ops, strategy
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits

if TYPE_CHECKING:
    import torch


class Lenience(AcceptanceStrategy):
    """Rejection sampling against a draft scaled down by the lenience.

    Guarantee: lossy. No token becomes more likely than p(x) / lenience.

    Formula: h_i = min(1, p_i(x_i) / (l q_i(x_i))); recovered token from max(p_i - l q_i, 0), normalised. With l = 1
    this is `rejection`.

    Source: Leviathan et al. 2022, arXiv 2211.17192, appendix A.5. The paper has no single default; 0.8 lies within
    the range it reports.
    """

    name = "lenience"
    traits = Traits(
        guarantee="lossy", bound="out(x) <= p(x) / lenience", neutral={"lenience": 1.0}, neutral_equals="rejection"
    )

    class Options(strategy.Options):
        """Options of `lenience`."""

        lenience: float = Field(0.8, gt=0, le=1, description="factor on the draft's probabilities; 1 is lossless")

    options: Options

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:  # noqa: ARG002
        """Return max over x of out(x) - p(x) / lenience."""
        return float((out - p / self.options.lenience).max())

    @rule
    def accept(target_prob: Value, draft_prob: Value, lenience: Value) -> Value:
        """Return h."""
        return ops.minimum(ops.ratio(target_prob, lenience * draft_prob), 1.0)

    @rule
    def residual(p: Value, q: Value, lenience: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        return p - lenience * q
