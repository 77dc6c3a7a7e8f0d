"""Entropy-scaled rejection for acceptlib: more lenient where the target is undecided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, ops, rule

if TYPE_CHECKING:
    from acceptlib.ops import Value


class EntropyScaled(AcceptanceStrategy):
    """Rejection sampling whose threshold falls with the entropy of the target's row.

    Guarantee: lossy. No token becomes more likely than p(x) / s.

    Formula: s_i = min(exp(-posterior_alpha H_i), posterior_threshold) with H_i = -sum_x p_i(x) log p_i(x), and
    h_i = min(1, p_i(x_i) / (s_i q_i(x_i))). The recovered token is drawn from max(p_i - q_i, 0), normalised. With
    posterior_alpha = 0 and posterior_threshold = 1 this is `rejection`.

    Source: vllm-ascend's `enable_entropy_verify`, whose options and defaults these are. Medusa's typical acceptance has
    options of the same names and is another rule: see `typical`.
    """

    name = "entropy-scaled"
    interface_version = 1
    traits = Traits(
        guarantee="lossy",
        bound="out(x) <= p(x) / min(exp(-posterior_alpha H(p)), posterior_threshold)",
        neutral={"posterior_alpha": 0.0, "posterior_threshold": 1.0},
        neutral_equals="rejection",
    )

    class Options(acceptlib.Options):
        """Options of `entropy-scaled`."""

        posterior_threshold: float = Field(0.95, gt=0, le=1, description="largest s, however sure the target is")
        posterior_alpha: float = Field(0.4, ge=0, allow_inf_nan=False, description="how fast s falls with entropy")

    options: Options

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:  # noqa: ARG002
        """Return max over x of out(x) - p(x) / s."""
        entropy = -torch.xlogy(p, p).sum()
        s = (-self.options.posterior_alpha * entropy).exp().clamp(max=self.options.posterior_threshold)
        return float((out - p / s).max())

    @rule
    def accept(
        target_prob: Value,
        draft_prob: Value,
        target_entropy: Value,
        posterior_threshold: Value,
        posterior_alpha: Value,
    ) -> Value:
        """Return h."""
        s = ops.minimum(ops.exp(-posterior_alpha * target_entropy), posterior_threshold)
        return ops.minimum(ops.ratio(target_prob, s * draft_prob), 1.0)

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        return p - q


@acceptlib.hookimpl
def acceptlib_strategies() -> list[type[AcceptanceStrategy]]:
    """Return this package's strategies."""
    return [EntropyScaled]
