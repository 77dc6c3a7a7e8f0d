"""Acceptance by the target's probability alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pydantic import Field

from acceptlib import ops, strategy
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits

if TYPE_CHECKING:
    import torch


class TargetOnly(AcceptanceStrategy):
    """Accept with the target's probability p(x), or more under thresholds; recover from the target without x.

    Guarantee: lossless with both thresholds 1, the default. With smaller ones lossy: a token whose probability is below
    threshold_single becomes no more likely than p(x) / threshold_acc. The draft's rows are not read.

    Formula: h_i = 1 if p_i(x_i) >= threshold_single, else min(1, p_i(x_i) / threshold_acc). The first rejection stops;
    the recovered token is drawn from p_i without x_i, normalised. With both thresholds 1 this is `rejection` with
    one-hot drafts, whatever the draft: a row accepts with probability sum_x p(x) q(x).

    Source: SGLang's `tree_speculative_sampling_target_only`, on a chain, with its names and defaults. It has the law of
    the rule that draws a token from each of the target's rows and goes on while that is the drafted one.
    """

    name = "target-only"
    traits = Traits(guarantee="lossless")

    class Options(strategy.Options):
        """Options of `target-only`."""

        threshold_single: float = Field(
            1.0, gt=0, le=1, description="probability that always suffices; 1 is lossless (SGLang 1)"
        )
        threshold_acc: float = Field(
            1.0, gt=0, le=1, description="what other probabilities are divided by; 1 is lossless (SGLang 1)"
        )

    options: Options

    def resolve_traits(self) -> Traits:
        """Promise the target's law only where the thresholds are 1."""
        lossless = {"threshold_single": 1.0, "threshold_acc": 1.0}
        if self.options.model_dump() == lossless:
            return self.traits
        bound = "out(x) <= p(x) / threshold_acc where p(x) < threshold_single"
        return dataclasses.replace(
            self.traits, guarantee="lossy", bound=bound, neutral=lossless, neutral_equals=self.name
        )

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:  # noqa: ARG002
        """Return max over x of out(x) - p(x) / threshold_acc where p(x) < threshold_single."""
        excess = out - p / self.options.threshold_acc
        return float(excess.where(p < self.options.threshold_single, -1.0).max())

    @rule
    def accept(target_prob: Value, threshold_single: Value, threshold_acc: Value) -> Value:
        """Return h."""
        shared = ops.minimum(ops.ratio(target_prob, threshold_acc), 1.0)
        return ops.where(target_prob >= threshold_single, 1.0, shared)

    @rule
    def residual(p: Value, is_drafted: Value) -> Value:
        """Return the weight of each entry after a rejection."""
        return ops.where(is_drafted, 0.0, p)
