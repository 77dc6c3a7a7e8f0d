"""Greedy matching."""

from __future__ import annotations

from acceptlib import ops
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits


class Greedy(AcceptanceStrategy):
    """Accept a drafted token iff it is the target's argmax; emit the argmax otherwise.

    Guarantee: greedy. The emitted tokens are the target's own greedy sequence, whatever the draft and the temperature.

    Formula: h_i = 1 if x_i = argmax p_i, else 0; ties go to the lowest id. The recovered and the bonus token are the
    argmax of their row. Nothing is random, and the draft's rows are not read.

    Source: Stern et al. 2018, arXiv 1811.03115, section 3; Leviathan et al. 2022, arXiv 2211.17192, at temperature 0.
    """

    name = "greedy"
    traits = Traits(guarantee="greedy", recovered="argmax", bonus="argmax")

    @rule
    def accept(is_target_argmax: Value) -> Value:
        """Return h."""
        return ops.where(is_target_argmax, 1.0, 0.0)
