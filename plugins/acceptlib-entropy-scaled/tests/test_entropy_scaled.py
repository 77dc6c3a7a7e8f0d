"""What every acceptance strategy must hold, and what this one adds."""

from __future__ import annotations

import math

import pytest
import torch
from acceptlib_entropy_scaled import EntropyScaled

from acceptlib import exact
from acceptlib.testing import StrategyConformance


class TestConformance(StrategyConformance):
    strategy = EntropyScaled()


@pytest.mark.parametrize("p", [[0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
def test_acceptance_is_the_formula(p: list[float]) -> None:
    """An undecided row scales by its entropy, a certain one by the threshold."""
    q = [0.4, 0.3, 0.2, 0.1]
    s = min(math.exp(0.4 * sum(v * math.log(v) for v in p if v > 0)), 0.95)
    target, draft = torch.tensor([p, p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)
    for x in range(4):
        law = exact.law(EntropyScaled(), target, draft, draft_token_ids=(x,))
        stands = sum(chance for sequence, chance in law.items() if len(sequence) > 1)
        assert stands == pytest.approx(min(1.0, p[x] / (s * q[x])), abs=1e-9)
