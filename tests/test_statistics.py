"""Chi-square of what lossless strategies emit over two steps, for every way drafted tokens may be made and declared."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

import acceptlib
from acceptlib.testing import Subject
from acceptlib.testing.simulation import (
    FALSE_ALARM_Z,
    MIN_EXPECTED,
    Drafting,
    chi_square_z,
    counts,
    simulate,
    world,
)

TRIALS = 60_000
# Long enough that with K = 2 every sequence takes at least two steps.
LENGTH = 4
LOSSLESS = [name for name in acceptlib.available() if acceptlib.create(name).traits.guarantee == "lossless"]

CONTRACTS = {
    "sampled": Drafting(),
    "sampled-colder-draft": Drafting(temperature=0.5),
    "greedy-one-hot": Drafting(greedy=True),
    "greedy-without-rows": Drafting(greedy=True, declare="none"),
    "sampled-without-rows": Drafting(declare="none"),
    "bfloat16-rows": Drafting(dtype=torch.bfloat16),
}

VIOLATIONS = {
    "raw-instead-of-processed": Drafting(temperature=0.5, declare="raw"),
    "greedy-with-softmax": Drafting(greedy=True, declare="softmax"),
}


def z_score(name: str, drafting: Drafting) -> float:
    where = world(1)
    tokens = simulate(
        Subject(acceptlib.create(name)), where, length=LENGTH, num_draft_tokens=2, trials=TRIALS, drafting=drafting
    )
    return chi_square_z(counts(tokens, where.vocab_size), where.joint(LENGTH))


@pytest.mark.parametrize("drafting", CONTRACTS.values(), ids=CONTRACTS.keys())
@pytest.mark.parametrize("name", LOSSLESS)
def test_every_honest_draft_is_lossless(name: str, drafting: Drafting) -> None:
    """Whatever way the drafted tokens were made, as long as the declared rows are those they came from."""
    assert z_score(name, drafting) < FALSE_ALARM_Z


@pytest.mark.parametrize("drafting", VIOLATIONS.values(), ids=VIOLATIONS.keys())
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_broken_q_contract_is_seen_unless_draft_rows_are_not_read(name: str, drafting: Drafting) -> None:
    """transformers#47932 and #32867: rows declared that the tokens did not come from."""
    assert (z_score(name, drafting) > FALSE_ALARM_Z) == acceptlib.create(name).plan.reads_draft


def test_chi_square_is_as_defined() -> None:
    """With one degree of freedom, whether or not there are cells that are too rare to count, even together."""
    scale = math.sqrt(2 / 9)
    z = chi_square_z(torch.tensor([60, 40]), torch.tensor([0.5, 0.5]))
    assert z == pytest.approx((4 ** (1 / 3) - (1 - 2 / 9)) / scale)
    z = chi_square_z(torch.tensor([520, 480, 0, 0]), torch.tensor([0.496, 0.496, 0.004, 0.004]))
    statistic = (24**2 + 16**2) / 496
    assert z == pytest.approx((statistic ** (1 / 3) - (1 - 2 / 9)) / scale, rel=1e-5)


def test_rare_cells_count_together() -> None:
    z = chi_square_z(torch.tensor([500, 484, 4, 12]), torch.tensor([0.494, 0.494, 0.006, 0.006]))
    statistic = (6**2 + 10**2) / 494 + 4**2 / 12
    assert z == pytest.approx(((statistic / 2) ** (1 / 3) - (1 - 1 / 9)) / math.sqrt(1 / 9), rel=1e-5)


def test_a_cell_that_is_expected_often_enough_counts_by_itself() -> None:
    """Ten times, as often as two of these three are."""
    z = chi_square_z(torch.tensor([15, 5, 80]), torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64))
    statistic = 5**2 / MIN_EXPECTED + 5**2 / MIN_EXPECTED
    assert z == pytest.approx(((statistic / 2) ** (1 / 3) - (1 - 1 / 9)) / math.sqrt(1 / 9), rel=1e-5)


def test_a_single_cell_says_nothing() -> None:
    assert chi_square_z(torch.tensor([100]), torch.tensor([1.0])) == 0


def test_a_false_alarm_is_as_rare_as_it_says() -> None:
    assert NormalDist().cdf(-FALSE_ALARM_Z) == pytest.approx(1e-9, rel=0.1)


def test_one_impossible_sequence_is_enough() -> None:
    law = torch.tensor([0.5, 0.5, 0.0])
    assert chi_square_z(torch.tensor([500, 499, 1]), law) == math.inf
    assert chi_square_z(torch.tensor([500, 500, 0]), law) < 0
