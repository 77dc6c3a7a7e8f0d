"""The worked example of `acceptlib show NAME --example`: small rows, and everything that follows from them exactly."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from acceptlib import exact
from acceptlib.cli.format import Column
from acceptlib.exact.enumeration import acceptance, plan_of, verify_exactly

if TYPE_CHECKING:
    from acceptlib.strategy import AcceptanceStrategy

TARGET: Final = ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3), (0.4, 0.4, 0.2))
"""p: what each drafted token is tested against, and the bonus row."""

DRAFT: Final = ((0.3, 0.5, 0.2), (0.5, 0.2, 0.3))
"""q: what the drafted tokens are drawn from."""

TOKENS: Final = "abc"
NUM_DRAFT_TOKENS: Final = len(DRAFT)

ROW_COLUMNS: Final = (Column("row"), *(Column(token, "right") for token in TOKENS))
DRAFT_COLUMNS: Final = (
    Column("drafted"),
    Column("chance", "right"),
    *(Column(f"h{position + 1}", "right") for position in range(NUM_DRAFT_TOKENS)),
    *(Column(f"{count} stand", "right") for count in range(NUM_DRAFT_TOKENS + 1)),
)


@dataclass(frozen=True, slots=True)
class Drafted:
    """One drafted sequence.

    Attributes:
        tokens: As letters.
        chance: The probability that it is drafted.
        acceptance: h of each token.
        stops: The probability that exactly so many of its tokens stand, from 0.
    """

    tokens: str
    chance: float
    acceptance: list[float]
    stops: list[float]


@dataclass(frozen=True, slots=True)
class Example:
    """What a strategy does on the rows.

    Attributes:
        drafted: Every drafted sequence.
        first_token: The law of the first emitted token.
        tv: Total variation between the joint law of three tokens and the target's.
        kl: KL(out || p) of the same, in nats.
        expected_tokens: Expected number of tokens that a step emits.
    """

    drafted: list[Drafted]
    first_token: list[float]
    tv: float
    kl: float
    expected_tokens: float

    def rows(self) -> list[list[str]]:
        """Return the rows of both models, and the law of the first token, as cells."""
        named = [(f"p{index + 1}", row) for index, row in enumerate(TARGET)]
        named += [(f"q{index + 1}", row) for index, row in enumerate(DRAFT)]
        return [[name, *map(_number, row)] for name, row in [*named, ("first token", self.first_token)]]

    def drafts(self) -> list[list[str]]:
        """Return the drafted sequences as cells."""
        return [
            [drafted.tokens, *map(_number, (drafted.chance, *drafted.acceptance, *drafted.stops))]
            for drafted in self.drafted
        ]

    def figures(self) -> dict[str, str]:
        """Return the figures with their names."""
        return {
            "TV of three tokens from the target's": _number(self.tv),
            "KL of the same in nats": _number(self.kl),
            "expected tokens a step": _number(self.expected_tokens),
        }


def work_out(strategy: AcceptanceStrategy) -> Example:
    """Return the example of a strategy.

    Raises:
        InputError: It overrides `verify` whole and has no rules.
    """
    p, q = torch.tensor(TARGET, dtype=torch.float64), torch.tensor(DRAFT, dtype=torch.float64)
    emitted = exact.law(strategy, p, q)
    drafts = list(itertools.product(range(len(TOKENS)), repeat=NUM_DRAFT_TOKENS))
    ids = torch.tensor(drafts)
    every, state = (len(ids), -1, -1), strategy.initial_state(1, "cpu")
    rows = (plan_of(strategy), ids, p.expand(every), q.expand(every), state)
    h, stops = acceptance(*rows).h, verify_exactly(*rows).stops
    return Example(
        drafted=[
            Drafted(
                tokens="".join(TOKENS[token] for token in draft),
                chance=float(q[range(NUM_DRAFT_TOKENS), draft].prod()),
                acceptance=h[index].tolist(),
                stops=stops[index].tolist(),
            )
            for index, draft in enumerate(drafts)
        ],
        first_token=exact.complete(emitted, p, 1).tolist(),
        tv=exact.tv(strategy, p, q),
        kl=exact.kl(strategy, p, q),
        expected_tokens=exact.expected_tokens(strategy, p, q),
    )


def _number(value: float) -> str:
    # Rounding leaves 1e-17 instead of 0, on either side.
    return f"{value if abs(value) > 1e-12 else 0:.4g}"  # noqa: PLR2004
