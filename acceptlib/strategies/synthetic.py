"""Acceptance at given rates, for load tests."""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Final

from pydantic import Field, model_validator

from acceptlib import strategy
from acceptlib.engine.plan import Constant
from acceptlib.errors import short_repr
from acceptlib.ops import Value
from acceptlib.rules import rule
from acceptlib.strategy import AcceptanceStrategy, Traits

DEFAULT_LENGTH: Final = 3.0


class Synthetic(AcceptanceStrategy):
    """Accept drafted tokens at given rates, whatever the models say: for load tests.

    Guarantee: lossy, without a bound. The draft's rows are not read.

    Formula: h_i = rate_i / rate_{i-1} with rate_0 = 1, so that position i stands with probability rate_i; positions
    beyond the list are never accepted. `synthetic_acceptance_length` L, the mean number of emitted tokens, means the
    rates min(max(L - i, 0), 1): the mean is exactly L wherever n_b >= L - 1. The recovered token is a sample of the
    target's row.

    Source: vLLM's `synthetic` method and its `synthetic_acceptance_rates`. The default length is acceptlib's.
    """

    name = "synthetic"
    traits = Traits(guarantee="lossy", bound="none")

    class Options(strategy.Options):
        """Options of `synthetic`."""

        synthetic_acceptance_rates: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(
            None, description="probability that each position stands, non-increasing"
        )
        synthetic_acceptance_length: float | None = Field(
            None,
            ge=1,
            le=1025,
            allow_inf_nan=False,
            description="mean number of emitted tokens instead (3 if neither is given)",
        )

        @model_validator(mode="after")
        def _consistent(self) -> Synthetic.Options:
            rates = self.synthetic_acceptance_rates
            if rates is not None and self.synthetic_acceptance_length is not None:
                msg = "synthetic_acceptance_rates and synthetic_acceptance_length exclude each other: give one"
                raise ValueError(msg)
            if rates is not None and any(later > earlier for earlier, later in itertools.pairwise(rates)):
                msg = f"synthetic_acceptance_rates must not increase, got {short_repr(list(rates))}"
                raise ValueError(msg)
            return self

    options: Options

    def constants(self) -> dict[str, Constant]:
        """Turn unconditional rates into conditional ones, one a position."""
        rates = self.options.synthetic_acceptance_rates
        if rates is None:
            length = self.options.synthetic_acceptance_length or DEFAULT_LENGTH
            rates = tuple(min(length - position, 1.0) for position in range(1, math.ceil(length)))
        previous = (1.0, *rates)
        return {"rate": tuple(rate / before if before else 0.0 for rate, before in zip(rates, previous, strict=False))}

    @rule
    def accept(rate: Value) -> Value:
        """Return h."""
        return rate
