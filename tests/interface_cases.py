"""A strategy of one's own, and traits for more of them, that several test files about the interface share."""

from __future__ import annotations

from typing import Any

from acceptlib import AcceptanceStrategy, Options, Traits, ops, rule

LOSSY = Traits(guarantee="lossy", bound="none")


class Lenient(AcceptanceStrategy):
    """Rejection sampling with a bonus for the draft: what a newcomer writes first."""

    name = "lenient"
    traits = LOSSY

    class Options(Options):
        bonus: float = 1.5

    @rule
    def accept(target_prob: Any, draft_prob: Any, bonus: Any) -> Any:
        return ops.minimum(bonus * ops.ratio(target_prob, draft_prob), 1.0)

    @rule
    def residual(p: Any, q: Any) -> Any:
        return p - q
