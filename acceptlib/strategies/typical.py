"""Typical acceptance."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import Field

from acceptlib import ops, strategy
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits


class Typical(AcceptanceStrategy):
    """Accept a drafted token that the target finds typical: p(x) above an entropy-dependent threshold.

    Guarantee: lossy, without a bound. The draft's rows are not read.

    Formula: h_i = 1 if p_i(x_i) > min(posterior_threshold, posterior_alpha * exp(-H_i)), else 0, with
    H_i = -sum_x p_i(x) log p_i(x). The first rejection stops, and the recovered token is argmax p_i, or with
    `recovery="sample"` a sample of p_i.

    Source: Cai et al. 2024 (Medusa), arXiv 2401.10774, section 3.3. The defaults and the argmax are those of vLLM's
    TypicalAcceptanceSampler; Medusa's own code swaps the two numbers, 0.3 and 0.09. Both guard the logarithm by 1e-5,
    and so find up to log(1 + V / 1e5) less entropy than the paper's H, which this strategy uses.
    """

    name = "typical"
    traits = Traits(guarantee="lossy", bound="none")

    class Options(strategy.Options):
        """Options of `typical`."""

        posterior_threshold: float = Field(
            0.09, ge=0, le=1, description="probability that always suffices (vLLM 0.09, Medusa 0.3)"
        )
        posterior_alpha: float = Field(
            0.3, ge=0, description="factor of exp(-entropy) that suffices as well (vLLM 0.3, Medusa 0.09)"
        )
        recovery: Literal["argmax", "sample"] = Field(
            "argmax", description="recovered token: the target's argmax (vLLM) or a sample of the target's row"
        )

    options: Options

    def resolve_traits(self) -> Traits:
        """Recover as the option says."""
        return dataclasses.replace(self.traits, recovered=self.options.recovery)

    @rule
    def accept(target_prob: Value, target_entropy: Value, posterior_threshold: Value, posterior_alpha: Value) -> Value:
        """Return h."""
        threshold = ops.minimum(posterior_alpha * ops.exp(-target_entropy), posterior_threshold)
        return ops.where(target_prob > threshold, 1.0, 0.0)
