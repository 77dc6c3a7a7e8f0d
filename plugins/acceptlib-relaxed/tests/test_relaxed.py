"""What every acceptance strategy must hold, and what this one adds: a phase that the caller carries."""

from __future__ import annotations

import pytest
import torch
from acceptlib_relaxed import Relaxed

import acceptlib
from acceptlib.testing import StrategyConformance

BEGIN, END, NEAR, BEST, FAR = 3, 4, 1, 0, 2
STRATEGY = Relaxed(relaxed_topk=2, relaxed_delta=0.3, begin_thinking_phase_token=BEGIN, end_thinking_phase_token=END)
PLAIN = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0])
"""BEST is the argmax, NEAR the runner-up, within the distance; FAR is third."""


class TestConformance(StrategyConformance):
    strategy = Relaxed()


class TestNarrow(StrategyConformance):
    strategy = Relaxed(relaxed_topk=2, relaxed_delta=0.2, begin_thinking_phase_token=2, end_thinking_phase_token=1)


def verify(drafts: list[list[int]], thinking: list[bool]) -> tuple[list[list[int]], list[bool]]:
    """Return emitted tokens and the phase behind them; a drafted phase token is its row's argmax."""
    ids = torch.tensor(drafts)
    rows = PLAIN.repeat(*ids.shape, 1)
    phase_token = (ids == BEGIN) | (ids == END)
    rows[phase_token] = torch.nn.functional.one_hot(ids[phase_token], 5).float()
    rows = torch.cat((rows, PLAIN.expand(len(ids), 1, -1)), 1)
    state = {"thinking": torch.tensor(thinking)}
    result = STRATEGY.verify(ids, target_probs=rows, state=state)
    STRATEGY.update_state(state, result)
    emitted = [row[:count] for row, count in zip(result.output_token_ids.tolist(), result.num_emitted, strict=True)]
    return emitted, state["thinking"].tolist()


@pytest.mark.parametrize(
    ("draft", "thinking", "emitted", "after"),
    [
        ([NEAR, NEAR, BEST], True, [NEAR, NEAR, BEST, BEST], True),
        ([NEAR, NEAR, BEST], False, [BEST], False),
        ([BEST, FAR, BEST], True, [BEST, BEST], True),
        ([NEAR, END, NEAR], True, [NEAR, END, BEST], False),
        ([NEAR, END, BEST], True, [NEAR, END, BEST, BEST], False),
        ([BEST, BEGIN, NEAR], False, [BEST, BEGIN, NEAR, BEST], True),
        ([END, BEGIN, NEAR], True, [END, BEGIN, NEAR, BEST], True),
        ([BEGIN, END, NEAR], False, [BEGIN, END, BEST], False),
        ([BEGIN, NEAR, END], False, [BEGIN, NEAR, END, BEST], False),
    ],
)
def test_phase_changes_within_a_step(draft: list[int], thinking: bool, emitted: list[int], after: bool) -> None:  # noqa: FBT001
    """Positions behind a phase token are tested under the new phase, and the last one emitted is the caller's."""
    assert verify([draft], [thinking]) == ([emitted], [after])


def test_each_request_has_its_own_phase() -> None:
    assert verify([[NEAR, BEST], [NEAR, BEST]], [True, False]) == ([[NEAR, BEST, BEST], [BEST]], [True, False])


def test_phase_token_that_does_not_stand_changes_nothing() -> None:
    """The draft ends the phase behind a rejection."""
    assert verify([[FAR, END, BEST]], [True]) == ([[BEST]], [True])


def test_outside_the_phase_it_is_greedy() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(64, 5, 11, generator=generator).softmax(-1)
    ids = torch.where(torch.rand(64, 4, generator=generator) < 0.7, p[:, :-1].argmax(-1), 5)  # noqa: PLR2004
    state = {"thinking": torch.zeros(64, dtype=torch.bool)}
    found = Relaxed().verify(ids, target_probs=p, state=state).output_token_ids
    assert torch.equal(found, acceptlib.create("greedy").verify(ids, target_probs=p).output_token_ids)


def test_a_phase_has_two_tokens() -> None:
    """One token for its begin and its end would leave open which it is."""
    with pytest.raises(acceptlib.AcceptlibError, match="expected two tokens, got 7 for begin and end"):
        Relaxed(begin_thinking_phase_token=7, end_thinking_phase_token=7)
