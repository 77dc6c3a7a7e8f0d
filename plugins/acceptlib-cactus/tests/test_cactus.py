"""What every acceptance strategy must hold, and what this one adds."""

from __future__ import annotations

import math

import pytest
import torch
from acceptlib_cactus import Cactus

from acceptlib import exact
from acceptlib.testing import StrategyConformance


class TestConformance(StrategyConformance):
    strategy = Cactus()


class TestWideBudget(StrategyConformance):
    strategy = Cactus(delta=2.0)


@pytest.mark.parametrize("x", range(4))
def test_law_is_the_papers(x: int) -> None:
    """Given the drafted token: the formula in plain numbers."""
    p, q, delta = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], 0.05
    t = min(1.0, p[x] + math.sqrt(2 * delta * p[x] * (1 - p[x])))
    h = min(1.0, t / q[x])
    raised = [t if y == x else p[y] * (1 - t) / (1 - p[x]) for y in range(4)]
    rest = [max(g - q_y, 0.0) for g, q_y in zip(raised, q, strict=True)]
    wanted = [(1 - h) * weight / sum(rest) for weight in rest]
    wanted[x] += h
    target, draft = torch.tensor([p, p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)
    law = exact.law(Cactus(delta=delta), target, draft, draft_token_ids=(x,))
    found = [sum(chance for sequence, chance in law.items() if sequence[0] == y) for y in range(4)]
    assert found == pytest.approx(wanted, abs=1e-12)
