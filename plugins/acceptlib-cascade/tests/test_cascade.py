"""What every acceptance strategy must hold, and what this one adds."""

from __future__ import annotations

import pytest
import torch
from acceptlib_cascade import Cascade

from acceptlib import exact
from acceptlib.testing import StrategyConformance


class TestConformance(StrategyConformance):
    strategy = Cascade()


class TestCostlyDeferral(StrategyConformance):
    strategy = Cascade(alpha=1.0)


# TV = 0.3, and the target's largest probability is 0.2 above the draft's: it defers below alpha = 2 / 3.
P, Q = [0.7, 0.1, 0.2], [0.4, 0.1, 0.5]


@pytest.mark.parametrize(("alpha", "law"), [(0.0, P), (0.66, P), (0.67, Q), (5.0, Q)])
def test_a_row_has_the_law_of_the_model_it_follows(alpha: float, law: list[float]) -> None:
    target, draft = torch.tensor([P, P], dtype=torch.float64), torch.tensor([Q], dtype=torch.float64)
    emitted = exact.law(Cascade(alpha=alpha), target, draft)
    found = [sum(chance for sequence, chance in emitted.items() if sequence[0] == y) for y in range(3)]
    assert found == pytest.approx(law, abs=1e-12)
