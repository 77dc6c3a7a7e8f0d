"""Exact laws by enumeration: lossless is an equality to 1e-12, and a lossy rule's distances are numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, Uniforms, exact, ops, row_sum, rule
from acceptlib.engine.constants import ROW_SUM_LIMIT
from acceptlib.errors import EnumerationError, InputError, StrategyDefinitionError
from acceptlib.exact import enumeration, figures, oracle
from acceptlib.testing.checks.law import PAIRS

EXACT = 1e-12
LOSSLESS = [name for name in acceptlib.available() if acceptlib.create(name).traits.guarantee == "lossless"]


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return target and draft, rows of small integers over their sum, zeros included."""
    vocab_size, length = draw(st.integers(2, 4)), draw(st.integers(0, 3))
    weights = st.lists(st.sampled_from((0, 0, 1, 2, 7)), min_size=vocab_size, max_size=vocab_size).filter(any)
    tables = [
        torch.tensor(draw(st.lists(weights, min_size=count, max_size=count)), dtype=torch.float64).view(-1, vocab_size)
        for count in (length + 1, length)
    ]
    return tables[0] / tables[0].sum(1, keepdim=True), tables[1] / tables[1].sum(1, keepdim=True)


drawn = settings(max_examples=40, deadline=None, derandomize=True)


@drawn
@given(rows())
def test_lossless_on_drawn_rows(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name in LOSSLESS:
        assert exact.tv(acceptlib.create(name), *pair) < EXACT


def test_residual_may_be_a_number_or_a_scalar() -> None:
    """As in the engines, where such a weight stands for every entry."""

    class Flat(AcceptanceStrategy):
        name = "flat"
        traits = Traits(guarantee="lossy", bound="none")

        @rule
        def accept(target_prob: Any) -> Any:
            return 0.0 * target_prob

        @rule
        def residual() -> Any:
            return 1.0

    class Even(Flat):
        name = "even"

        @rule
        def residual(target_prob: Any) -> Any:
            return target_prob

    p = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]], dtype=torch.float64)
    for strategy in (Flat(), Even()):
        emitted = exact.law(strategy, p, draft_token_ids=(0,))
        assert emitted == pytest.approx({(token,): 1 / 3 for token in range(3)})
        figures = exact.step_figures(strategy, torch.tensor([0]), p, p[:1], num_visited=1)
        assert figures.tv == pytest.approx(0.5 - 1 / 3)


@pytest.mark.parametrize("number", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25)])
@pytest.mark.parametrize("count", [1, 2])
def test_a_rule_may_return_a_number_of_numpy_or_torch(number: Any, count: int) -> None:
    """Whichever of the two its engine computes in."""

    class Quarter(AcceptanceStrategy):
        name = "quarter"
        traits = Traits(guarantee="lossy", bound="none")

        @row_sum
        def total() -> Any:
            return number

        @rule
        def accept(total: Any) -> Any:
            return ops.where(total == 1, 0.25, 0.0)

        @rule
        def residual() -> Any:
            return number

    p, strategy = torch.full((2, 4), 0.25), Quarter(backend="torch")
    emitted = exact.law(strategy, p, draft_token_ids=(0,))
    assert sum(emitted[token,] for token in range(4)) == pytest.approx(0.75)
    ids, uniforms = torch.zeros(count, 1, dtype=torch.int64), torch.tensor([[0.24], [0.26]], dtype=torch.float64)
    numbers = Uniforms(accept=uniforms[-count:], emit=torch.zeros(count, dtype=torch.int64))
    result = strategy.verify(ids, target_probs=p.expand(count, 2, 4), uniforms=numbers)
    assert result.to_lists() == [[0, 0], [0]][-count:]


@drawn
@given(rows(), st.sampled_from(acceptlib.available()))
def test_figures_are_what_such_figures_can_be(pair: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    """A law sums to 1, TV is at most 1, KL at least 0 and Pinsker's inequality holds; K+1 tokens are the most."""
    strategy, length = acceptlib.create(name), len(pair[1])
    emitted = exact.law(strategy, *pair)
    assert sum(emitted.values()) == pytest.approx(1, abs=EXACT)
    assert all(1 <= len(sequence) <= length + 1 for sequence in emitted)
    tv, kl = exact.tv(strategy, *pair), exact.kl(strategy, *pair)
    assert -EXACT <= tv <= 1 + EXACT
    assert kl >= -EXACT
    assert tv <= math.sqrt(max(kl, 0) / 2) + 1e-6
    assert 1 - EXACT <= exact.expected_tokens(strategy, *pair) <= length + 1 + EXACT


def test_a_strategy_may_be_given_by_its_name() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]] * 2), torch.tensor([[0.2, 0.3, 0.5]])
    strategy = acceptlib.create("lenience")
    assert exact.law("lenience", p, q) == exact.law(strategy, p, q)
    assert exact.tv("lenience", p, q) == exact.tv(strategy, p, q)
    ids = torch.tensor([0])
    assert exact.step_figures("lenience", ids, p, q[:1], 2) == exact.step_figures(strategy, ids, p, q[:1], 2)


@drawn
@given(rows())
def test_rejection_accepts_the_overlap(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """alpha = sum min(p, q) a row, so that 1 + a1 + a1 a2 + ... tokens are expected. arXiv 2211.17192, theorem 3.5."""
    p, q = pair
    alpha = torch.minimum(p[:-1], q).sum(1)
    expected = 1 + float(alpha.cumprod(0).sum())
    assert exact.expected_tokens(acceptlib.create("rejection"), p, q) == pytest.approx(expected, abs=EXACT)


@drawn
@given(rows(), st.integers(0, 10**6))
def test_a_fixed_draft_is_a_one_hot_draft(pair: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
    p, q = pair
    ids = tuple(number // 7**position % p.shape[1] for position in range(len(q)))
    one_hot = torch.nn.functional.one_hot(torch.tensor(ids, dtype=torch.int64), p.shape[1]).double()
    for name in acceptlib.available():
        strategy = acceptlib.create(name)
        assert exact.law(strategy, p, draft_token_ids=ids) == exact.law(strategy, p, one_hot)
        assert exact.tv(strategy, p, draft_token_ids=ids) == exact.tv(strategy, p, one_hot)


@pytest.mark.parametrize("name", LOSSLESS)
def test_rows_of_float32_show_no_distance(name: str) -> None:
    p, q = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
    assert exact.tv(acceptlib.create(name), p, q[:3]) < EXACT


@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_emits_the_argmax_sequence(pair: str) -> None:
    target, draft = PAIRS[pair]
    best: tuple[int, ...] = ()
    for _ in range(4):
        best += (int(target(best).argmax()),)
    for sequence in exact.law(acceptlib.create("greedy"), target, draft, num_draft_tokens=3):
        assert sequence == best[: len(sequence)]


def test_worked_example_of_block() -> None:
    """arXiv 2403.10444, section 2: expected accepted 10/9 token by token, 11/9 as a block."""
    p = torch.tensor([[1 / 3, 2 / 3]] * 3, dtype=torch.float64)
    q = torch.tensor([[2 / 3, 1 / 3]] * 2, dtype=torch.float64)
    assert exact.expected_tokens(acceptlib.create("rejection"), p, q) - 1 == pytest.approx(10 / 9, abs=EXACT)
    assert exact.expected_tokens(acceptlib.create("block"), p, q) - 1 == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("pair", PAIRS)
def test_block_accepts_no_less_than_rejection(pair: str) -> None:
    target, draft = PAIRS[pair]
    tokens = {
        name: exact.expected_tokens(acceptlib.create(name), target, draft, num_draft_tokens=3)
        for name in ("rejection", "block")
    }
    assert tokens["block"] >= tokens["rejection"] - EXACT


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.8, 1.0])
@pytest.mark.parametrize("pair", PAIRS)
def test_mixture_is_as_far_as_it_says(pair: str, weight: float) -> None:
    """TV(out, p) = (1 - w) TV(p, q) exactly, or less where the draft leaves the target's support."""
    target, draft = PAIRS[pair]
    emitted = exact.law(acceptlib.create("mixture", weight=weight), target, draft, num_draft_tokens=1)
    first = exact.complete(emitted, target, 1)
    apart = float((target(()) - draft(())).abs().sum() / 2)
    found = float((first - target(())).abs().sum() / 2)
    if bool(((target(()) == 0) & (draft(()) > 0)).any()):
        assert found < (1 - weight) * apart + EXACT
        assert bool((first[target(()) == 0] == 0).all())
    else:
        assert found == pytest.approx((1 - weight) * apart, abs=EXACT)


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("pair", PAIRS)
def test_tv_budget_is_spent_and_no_more(pair: str, epsilon: float) -> None:
    """TV(out, p) = min(epsilon, TV(p, q)), and all that it is worth in acceptance; less outside the support."""
    target, draft = PAIRS[pair]
    strategy = acceptlib.create("tv-budget", epsilon=epsilon)
    first = exact.complete(exact.law(strategy, target, draft, num_draft_tokens=1), target, 1)
    apart = float((target(()) - draft(())).abs().sum() / 2)
    found = float((first - target(())).abs().sum() / 2)
    if bool(((target(()) == 0) & (draft(()) > 0)).any()):
        assert found < min(epsilon, apart) + EXACT
        assert bool((first[target(()) == 0] == 0).all())
    else:
        assert found == pytest.approx(min(epsilon, apart), abs=EXACT)
        accepted = exact.expected_tokens(strategy, target, draft, num_draft_tokens=1) - 1
        assert accepted == pytest.approx(1 - apart + found, abs=EXACT)


@pytest.mark.parametrize("pair", PAIRS)
def test_target_only_accepts_what_two_samples_agree_on(pair: str) -> None:
    """With probability sum p q: as often as a token of the target's would have been the drafted one."""
    target, draft = PAIRS[pair]
    accepted = exact.expected_tokens("target-only", target, draft, num_draft_tokens=1) - 1
    assert accepted == pytest.approx(float((target(()) * draft(())).sum()), abs=EXACT)


@pytest.mark.parametrize("name", acceptlib.available())
def test_figures_of_a_step_agree_with_the_law_and_the_oracle(name: str) -> None:
    """Expected tokens given the draft against the oracle's loops; TV of one row against the joint law's."""
    strategy = acceptlib.create(name)
    generator = torch.Generator().manual_seed(3)
    p = torch.softmax(torch.randn(5, 6, generator=generator, dtype=torch.float64) * 2, -1)
    q = torch.softmax(p[:-1].log() + torch.randn(4, 6, generator=generator, dtype=torch.float64), -1)
    ids = torch.multinomial(q, 1, generator=generator)[:, 0]
    figures = exact.step_figures(strategy, ids, p, q, 5)
    assert figures.expected_tokens == pytest.approx(
        oracle.expected_tokens(name, ids.tolist(), p.float(), q.float()), abs=1e-6
    )
    if strategy.traits.stop == "first_rejection":
        one = exact.step_figures(strategy, ids[:1], p[:2], q[:1], 1)
        first = exact.complete(exact.law(strategy, p[:2], q[:1]), p[:2], 1)
        assert one.tv == pytest.approx(float((first - p[0]).abs().sum() / 2), abs=EXACT)


class TakesTheDraft(AcceptanceStrategy):
    """Every drafted token stands, and the target's best token follows."""

    name = "takes-the-draft"
    traits = Traits(guarantee="lossy", bound="none", bonus="argmax")

    @rule
    def accept(target_prob: Any) -> Any:
        return 1.0 + 0.0 * target_prob


def sharp_rows(count: int, vocab_size: int, seed: int) -> torch.Tensor:
    noise = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.softmax(2 * noise, -1)


def first_token(strategy: AcceptanceStrategy, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the law of a step's first token."""
    return exact.complete(exact.law(strategy, p, q), p, 1)


@pytest.mark.parametrize("num_visited", [1, 2, 3, 4])
def test_figures_of_a_step_are_means_over_the_rows_it_reached(num_visited: int) -> None:
    """Distances of the draft from the target, and of the bonus token where it was reached."""
    p, q = sharp_rows(4, 6, 1), sharp_rows(3, 6, 2)
    out = torch.cat((q, torch.nn.functional.one_hot(p[3:].argmax(-1), 6)))[:num_visited]
    found = exact.step_figures(TakesTheDraft(), q.argmax(-1), p, q, num_visited)
    assert found.tv == pytest.approx(float((out - p[:num_visited]).abs().sum(1).mean()) / 2, abs=EXACT)
    divergence = torch.xlogy(out, out) - torch.xlogy(out, p[:num_visited])
    assert found.kl == pytest.approx(float(divergence.sum(1).mean()), abs=EXACT)
    assert found.expected_tokens == 4


def test_figures_of_few_rows_that_look_ahead_are_of_whole_rows() -> None:
    p, q = sharp_rows(3, 3, 3), sharp_rows(2, 3, 4)
    strategy = acceptlib.create("fly", fly_window=1, fly_entropy_threshold=0.0)
    found = exact.step_figures(strategy, q.argmax(-1), p, q, 1)
    assert found.tv == pytest.approx(float((first_token(strategy, p, q) - p[0]).abs().sum()) / 2, abs=EXACT)
    assert found.tv > 0.01


def test_figures_of_many_rows_that_look_ahead_are_of_their_likeliest_entries() -> None:
    """Four of each row by either model, of three positions and the row behind."""
    p, q = sharp_rows(6, 9, 5), sharp_rows(5, 9, 6)
    strategy = acceptlib.create("fly", fly_window=2, fly_entropy_threshold=0.0)
    kept = torch.cat((p[:3] + q[:3], p[3:4])).topk(4).indices
    assert not torch.equal(kept[:3].sort().values, p[:3].topk(4).indices.sort().values)
    cut, cut_draft = p[:4].gather(1, kept), q[:3].gather(1, kept[:3])
    cut, cut_draft = (rows / rows.sum(1, keepdim=True) for rows in (cut, cut_draft))
    found = exact.step_figures(strategy, q.argmax(-1), p, q, 1)
    assert found.tv == pytest.approx(float((first_token(strategy, cut, cut_draft) - cut[0]).abs().sum()) / 2, abs=EXACT)
    assert found.tv > 0.01


def test_figures_of_a_step_cut_a_wider_draft_and_take_ids_of_either_width() -> None:
    p, q = sharp_rows(3, 5, 7), sharp_rows(2, 7, 8)
    wanted = exact.step_figures("lenience", torch.tensor([1, 2]), p, q[:, :5], 2)
    assert exact.step_figures("lenience", torch.tensor([1, 2]), p, q, 2) == wanted
    assert exact.step_figures("lenience", torch.tensor([1, 2], dtype=torch.int32), p, q, 2) == wanted


def test_no_default_device_matters() -> None:
    p, q = sharp_rows(3, 4, 9), sharp_rows(2, 4, 10)
    ids = q.argmax(-1)

    def found() -> list[Any]:
        laws = [figure("lenience", p, q) for figure in (exact.law, exact.tv, exact.kl, exact.expected_tokens)]
        return [*laws, *(exact.step_figures(name, ids, p, q, 3) for name in ("lenience", "block"))]

    wanted = found()
    with torch.device("meta"):
        assert found() == wanted


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_step_without_drafted_tokens_has_the_targets_law(name: str) -> None:
    p = torch.tensor([[0.25, 0.75]])
    figures = exact.step_figures(acceptlib.create(name), torch.zeros(0, dtype=torch.int64), p, p[:0], 1)
    assert (figures.tv, figures.kl, figures.expected_tokens) == (0, 0, 1)


@pytest.mark.parametrize("name", LOSSLESS)
def test_figures_of_a_step_from_rows_of_float32_show_no_distance(name: str) -> None:
    """Nor where every likely entry is one model's alone, so that the other's truncated rows would be empty."""
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.randn(count, 40, generator=generator).softmax(-1) for count in (4, 3))
    one, other = torch.zeros(3, 12), torch.zeros(3, 12)
    one[:, :4], other[:, 4:] = 1 / 4, 1 / 8
    strategy = acceptlib.create(name)
    for target, draft in ((p, q), (one, other[:2]), (other, one[:2])):
        figures = exact.step_figures(strategy, draft.argmax(-1), target, draft, len(target))
        assert abs(figures.tv) < EXACT
        assert abs(figures.kl) < EXACT


def test_kl_is_infinite_beyond_the_support_and_zero_for_lossless() -> None:
    target, draft = PAIRS["disjoint supports"]
    assert exact.kl(acceptlib.create("synthetic"), target, draft, num_draft_tokens=1) == math.inf
    assert abs(exact.kl(acceptlib.create("block"), *PAIRS["random"], num_draft_tokens=2)) < EXACT


def test_kl_is_finite_where_only_rounding_leaves_the_support() -> None:
    class Rounding(AcceptanceStrategy):
        name = "rounding"
        traits = Traits(guarantee="lossy", bound="none")

        @rule
        def accept(target_prob: Any) -> Any:
            return 0.0 * target_prob

        @rule
        def residual(p: Any) -> Any:
            return p + (0.1 + 0.2 - 0.3)  # 6e-17

    target = torch.tensor([[0.4, 0.6, 0.0]] * 2, dtype=torch.float64)
    assert abs(exact.kl(Rounding(), target, draft_token_ids=(2,))) < EXACT


def test_kl_is_infinite_where_next_to_nothing_leaves_the_support() -> None:
    """If it is more than rounding."""

    class Leaks(AcceptanceStrategy):
        name = "leaks"
        traits = Traits(guarantee="lossy", bound="none")

        @rule
        def accept(target_prob: Any) -> Any:
            return 1e-12 + 0.0 * target_prob

    target = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64)
    assert exact.kl(Leaks(), target, draft_token_ids=(2,)) == math.inf


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_draft_may_have_fewer_entries(name: str) -> None:
    target, draft = torch.tensor([[0.2, 0.3, 0.5]] * 3), torch.tensor([[0.6, 0.4]] * 2)
    wide = torch.cat((draft, torch.zeros(2, 1)), 1)
    strategy = acceptlib.create(name)
    assert exact.law(strategy, target, draft) == exact.law(strategy, target, wide)
    assert exact.tv(strategy, target, draft) < 1e-12


def test_too_much_to_enumerate_is_a_clear_error() -> None:
    rejection, rows = acceptlib.create("rejection"), torch.full((5, 200), 1 / 200)
    with pytest.raises(EnumerationError, match="1600000000 drafted sequences, 16 acceptance patterns and 200 tokens"):
        exact.law(rejection, rows, rows[:-1])
    with pytest.raises(EnumerationError, match="a joint law of 5 tokens has 320000000000 entries"):
        exact.tv(rejection, rows, draft_token_ids=(1, 2, 3, 4))


def test_as_much_is_enumerated_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafted tokens in two patterns and two last tokens are 8 outcomes, and two tokens 4 sequences."""
    calls = {8: lambda: exact.law("rejection", HALF, HALF[:1]), 4: lambda: exact.complete({(): 1.0}, HALF, 2)}
    for most, call in calls.items():
        monkeypatch.setattr(enumeration, "MAX_OUTCOMES", most)
        call()
        monkeypatch.setattr(enumeration, "MAX_OUTCOMES", most - 1)
        with pytest.raises(EnumerationError, match=f"{most}.*, above {most - 1}: use a smaller vocabulary"):
            call()


def test_rows_beyond_a_given_length_are_left_out() -> None:
    rows = sharp_rows(3, 3, 11)
    found = exact.law("rejection", rows, rows.flip(1), num_draft_tokens=1)
    assert found == exact.law("rejection", rows[:2], rows[:1].flip(1))


@pytest.mark.parametrize(
    ("length", "message"), [(3, r"target: expected at least \[3, V\]"), (-1, "got -1"), (2.0, "2.0")]
)
def test_a_joint_law_of_what_does_not_fit_is_a_clear_error(length: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        exact.complete({(): 1.0}, HALF, length)


def test_a_fixed_draft_may_be_a_list_or_a_tensor() -> None:
    strategy = acceptlib.create("rejection")
    law = exact.law(strategy, HALF, draft_token_ids=(1,))
    for ids in ([1], torch.tensor([1])):
        assert exact.law(strategy, HALF, draft_token_ids=ids) == law  # type: ignore[arg-type]


HALF = torch.full((2, 2), 0.5)
BAD_LAWS: dict[str, tuple[dict[str, Any], str]] = {
    "no-draft": ({"target": HALF}, "got neither"),
    "no-length": ({"target": lambda _: HALF[0], "draft": HALF}, "num_draft_tokens: expected an int"),
    "flag-as-length": ({"target": HALF, "draft": HALF, "num_draft_tokens": True}, "num_draft_tokens: .* got True"),
    "length-no-int": ({"target": HALF, "draft": HALF, "num_draft_tokens": 1.0}, r"num_draft_tokens: .* got 1\.0"),
    "length-below-0": ({"target": lambda _: HALF[0], "num_draft_tokens": -1}, "num_draft_tokens: .* got -1"),
    "too-few-target-rows": (
        {"target": HALF, "draft": HALF, "num_draft_tokens": 2},
        r"target: expected at least \[3, V\] for 2 drafted tokens, got",
    ),
    "too-few-draft-rows": ({"target": HALF, "draft": HALF[:0]}, r"draft: expected \[K, V\] = \[1, 2\], got \[0, 2\]"),
    "one-row": ({"target": HALF[0], "draft": HALF}, r"target: expected \[K\+1, V\]"),
    "another-vocabulary": (
        {"target": HALF, "draft": torch.full((1, 3), 1 / 3)},
        r"draft, after tokens \(\): expected \[2, as the target's",
    ),
    "lists": ({"target": HALF.tolist(), "draft": HALF}, r"expected a torch\.Tensor or a function .* got list"),
    "too-many-draft-rows": ({"target": HALF, "draft": torch.full((3, 2), 0.5)}, r"draft: expected \[K, V\] = \[1, 2\]"),
    "no-law": ({"target": HALF, "draft": HALF[:1] + 0.1}, r"draft, after .* that sum to 1 \(.*, got"),
    "nan": ({"target": HALF * math.nan, "draft": HALF}, r"target, after .* that sum to 1 \(.*, got"),
    "negative": (
        {"target": torch.tensor([[1.5, -0.5]] * 2), "draft": HALF},
        r"target, after .* that sum to 1 \(.*, got",
    ),
    "id-outside": ({"target": HALF, "draft_token_ids": (2,)}, r"expected 1 ids in \[0, 2\), got \(2,\)"),
    "id-no-int": ({"target": HALF, "draft_token_ids": (0.5,)}, r"expected 1 ids in \[0, 2\), got \(0\.5,\)"),
    "no-ids": ({"target": HALF, "draft_token_ids": 1}, r"expected 1 ids in \[0, 2\), got 1"),
    "no-names": ({"target": HALF, "draft": HALF[:1], "state": {1: 1}}, "state: expected none, got 1"),
    "id-below-0": ({"target": HALF, "draft_token_ids": (-1,)}, r"expected 1 ids in \[0, 2\), got \(-1,\)"),
    "id-of-a-tensor": ({"target": HALF, "draft_token_ids": torch.tensor([2])}, r"in \[0, 2\), got \(2,\)"),
    "no-rows": ({"target": HALF[:0], "draft": HALF}, r"target: expected \[K\+1, V\], got \[0, 2\]"),
    "two-rows-at-once": (
        {"target": lambda _: HALF / 2, "draft": HALF[:1], "num_draft_tokens": 1},
        r"target, after tokens \(\): expected \[V\] .*, got \[2, 2\]",
    ),
    "not-quite-a-law": ({"target": HALF * (1 + 1.01 / 64), "draft": HALF[:1]}, r"target, after .* that sum to 1 \("),
    "too-many-ids": ({"target": HALF, "draft_token_ids": (0, 1)}, "expected 1 ids"),
}


@pytest.mark.parametrize("case", BAD_LAWS)
def test_a_law_of_what_does_not_fit_is_a_clear_error(case: str) -> None:
    arguments, message = BAD_LAWS[case]
    with pytest.raises(InputError, match=message):
        exact.law(acceptlib.create("rejection"), **arguments)


def test_rows_that_nearly_sum_to_1_are_normalised() -> None:
    assert exact.law("rejection", HALF * (1 - 0.99 / 64), HALF[:1] * (1 + 0.99 / 64)) == exact.law(
        "rejection", HALF, HALF[:1]
    )


def test_rows_may_require_gradients() -> None:
    p, q = sharp_rows(2, 3, 12), sharp_rows(1, 3, 13)
    wanted = exact.tv("lenience", p, q)
    assert exact.tv("lenience", p.requires_grad_(), q.requires_grad_()) == wanted


def test_a_model_is_asked_once_for_each_row() -> None:
    asked: list[tuple[int, ...]] = []

    def target(prefix: tuple[int, ...]) -> torch.Tensor:
        asked.append(prefix)
        return HALF[0]

    exact.law("rejection", target, HALF, num_draft_tokens=2)
    assert len(asked) == len({*asked}) == 1 + 2 + 4


def test_a_length_of_numpy_is_an_int() -> None:
    """Powers of it would overflow where there is too much to enumerate."""
    for target, length in ((lambda _: HALF[0], np.int64(3)), (HALF, np.int64(1))):
        found = enumeration.length_of(target, length)
        assert (type(found), found) == (int, length)


def test_ids_that_a_rule_reads_are_numbers_of_64_bits() -> None:
    """torch alone would divide them in float32."""

    class Sevenths(AcceptanceStrategy):
        name = "sevenths"
        traits = Traits(guarantee="lossy", bound="none", stop="last_acceptance")

        @rule
        def accept(draft_token_id: Any) -> Any:
            return draft_token_id / 7

    p = torch.full((2, 7), 1 / 7, dtype=torch.float64)
    assert exact.law(Sevenths(), p, draft_token_ids=(3,))[3, 0] == pytest.approx(3 / 7 / 7, abs=1e-15)
    found = exact.step_figures(Sevenths(), torch.tensor([3]), p, p[:1], 1)
    assert found.expected_tokens == pytest.approx(1 + 3 / 7, abs=1e-15)
    cut = torch.full((4,), 1 / 4, dtype=torch.float64)  # of which the first four entries are left
    stands = torch.arange(4, dtype=torch.float64) / 7
    out = cut * stands + cut * float((cut * (1 - stands)).sum())
    assert found.tv == pytest.approx(float((out - cut).abs().sum()) / 2, abs=1e-15)


@pytest.mark.parametrize(
    "strategy",
    [
        *map(acceptlib.create, acceptlib.available()),
        acceptlib.create("fly", fly_window=1, fly_entropy_threshold=0.0),  # which lets rejected tokens stand
    ],
    ids=repr,
)
def test_a_law_is_the_mean_of_those_of_each_draft(strategy: AcceptanceStrategy) -> None:
    p, q = sharp_rows(4, 3, 14), sharp_rows(3, 3, 15)
    p[:, 1] = 0  # where no rejected token may stand
    p /= p.sum(1, keepdim=True)
    mean: dict[tuple[int, ...], float] = {}
    for ids in itertools.product(range(3), repeat=3):
        weight = float(q[torch.arange(3), list(ids)].prod())
        for tokens, chance in exact.law(strategy, p, q, draft_token_ids=ids).items():
            mean[tokens] = mean.get(tokens, 0.0) + weight * chance
    assert exact.law(strategy, p, q) == pytest.approx(mean, abs=EXACT)


def test_a_top_entropy_is_of_the_entries_it_names_alone() -> None:
    class TopEntropy(AcceptanceStrategy):
        name = "top-entropy"
        traits = Traits(guarantee="lossy", bound="none", top_k=2)

        @rule
        def accept(target_top_entropy: Any) -> Any:
            return target_top_entropy

    p = torch.tensor([[0.5, 0.25, 0.25]] * 2)
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert exact.expected_tokens(TopEntropy(), p, draft_token_ids=(0,)) == pytest.approx(1 + entropy, abs=EXACT)


def test_a_row_sum_of_too_large_terms_is_no_number() -> None:
    """Even if they balance each other; those below the limit are."""

    class Balance(AcceptanceStrategy):
        name = "balance"
        traits = Traits(guarantee="lossy", bound="none")

        class Options(acceptlib.Options):
            size: float

        @row_sum
        def balance(is_drafted: Any, size: Any) -> Any:
            return ops.where(is_drafted, size, -size)

        @rule
        def accept(balance: Any) -> Any:
            return 0.5 + balance

    half = ROW_SUM_LIMIT / 2
    assert exact.expected_tokens(Balance(size=0.999 * half), HALF, draft_token_ids=(0,)) == 1.5
    with pytest.raises(StrategyDefinitionError, match="'accept' returned NaN"):
        exact.law(Balance(size=half), HALF, draft_token_ids=(0,))


@pytest.mark.parametrize("count", [0, -1, 1.0, True])
def test_figures_of_no_row_are_a_clear_error(count: Any) -> None:
    with pytest.raises(InputError, match=rf"num_visited: expected an int >= 1, got {count}"):
        exact.step_figures("rejection", torch.tensor([0]), HALF, HALF[:1], count)


@pytest.mark.parametrize("strategy", [3, type(acceptlib.create("rejection")), None])
def test_a_law_of_no_strategy_is_a_clear_error(strategy: Any) -> None:
    with pytest.raises(InputError, match=r"strategy: expected a name or what acceptlib\.create returns, got"):
        exact.law(strategy, HALF, HALF[:1])


class ZeroByZero(AcceptanceStrategy):
    name = "zero-by-zero"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(target_prob: Any, draft_prob: Any) -> Any:
        return ops.minimum(target_prob / draft_prob, 1.0)


class NoWeights(ZeroByZero):
    name = "no-weights"

    @rule
    def accept(target_prob: Any) -> Any:
        return target_prob

    @rule
    def residual(p: Any, q: Any, position: Any) -> Any:
        return ops.where(position > 0, (p - p) / 0.0, p - q)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (ZeroByZero(), "strategy 'zero-by-zero': rule 'accept' returned NaN at position 1, for token 2 drafted after"),
        (NoWeights(), "strategy 'no-weights': rule 'residual' returned NaN at position 1, for token 0 drafted after"),
    ],
    ids=["accept", "residual"],
)
def test_a_rule_that_returns_nan_has_no_law(strategy: AcceptanceStrategy, message: str) -> None:
    target = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    draft = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.75, 0.0]])
    for function in (exact.law, exact.tv, exact.expected_tokens):
        with pytest.raises(StrategyDefinitionError) as caught:
            function(strategy, target, draft)
        assert str(caught.value).startswith(f"{message} [0], where p = [0.5, 0.5, 0.0] and q = [0.25, 0.75, 0.0]")


class OfToken(AcceptanceStrategy):
    """Whose residual, and in one of two ways whose acceptance, depends on which token was drafted."""

    name = "of-token"
    traits = Traits(guarantee="lossy", bound="none")

    @row_sum
    def others(p: Any, is_drafted: Any) -> Any:
        return ops.where(is_drafted, 0.0, p)

    @rule
    def accept(others: Any) -> Any:
        return 0.9 * others

    @rule
    def residual(p: Any, q: Any, is_drafted: Any) -> Any:
        return ops.where(is_drafted, 0.0, p + q)


@pytest.mark.parametrize("pieces", [1, 7, 1 << 20])
def test_figures_are_the_same_however_many_tokens_are_taken_at_a_time(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of V rows of V numbers would not fit memory."""
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.softmax(torch.randn(n, 5, generator=generator), -1).double() for n in (2, 1))
    monkeypatch.setattr(figures, "MAX_NUMBERS", pieces)
    found = exact.step_figures(OfToken(), torch.tensor([1]), target, draft, 1)
    law = exact.law(OfToken(), target, draft)
    first = torch.zeros(5, dtype=torch.float64)
    for tokens, chance in law.items():
        first[tokens[0]] += chance
    p = target[0] / target[0].sum()
    assert found.tv == pytest.approx(float((first - p).abs().sum()) / 2, abs=1e-12)


@pytest.mark.parametrize("stop", ["first_rejection", "last_acceptance"])
def test_a_rule_beyond_certainty_accepts_as_engines_do(stop: Literal["first_rejection", "last_acceptance"]) -> None:
    """They compare u with what it returns. Figures are looked for in both ways: of whole sequences, and row by row."""

    class Bounded(AcceptanceStrategy):
        name = "bounded"
        traits = Traits(guarantee="lossy", bound="none", stop=stop)

        @rule
        def accept(target_prob: Any, draft_prob: Any) -> Any:
            return ops.maximum(ops.minimum(3 * target_prob - draft_prob, 1.0), 0.0)

    class Unbounded(Bounded):
        name = "unbounded"

        @rule
        def accept(target_prob: Any, draft_prob: Any) -> Any:
            return 3 * target_prob - draft_prob

    target = torch.tensor([[0.9, 0.05, 0.05], [0.1, 0.8, 0.1], [0.2, 0.3, 0.5]])
    draft = torch.tensor([[0.3, 0.4, 0.3], [0.5, 0.25, 0.25]])
    for figure in (exact.law, exact.tv, exact.kl, exact.expected_tokens):
        assert figure(Unbounded(), target, draft) == figure(Bounded(), target, draft)
    one, other = (
        exact.step_figures(strategy, torch.tensor([0, 1]), target, draft, 3) for strategy in (Unbounded(), Bounded())
    )
    assert one == other


def test_what_rounding_leaves_of_equal_rows_is_no_residual() -> None:
    """As in the engines, which draw from the target's row there."""

    class Recover(AcceptanceStrategy):
        name = "recover"
        traits = Traits(guarantee="lossy", bound="none")

        @rule
        def accept(target_prob: Any) -> Any:
            return 0.0 * target_prob

        @rule
        def residual(p: Any, q: Any) -> Any:
            return p - q

    p = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]], dtype=torch.float64)
    q = p[:1].clone()
    q[0, 0] = torch.nextafter(q[0, 0], torch.zeros((), dtype=torch.float64))
    emitted = exact.law(Recover(), p, q)
    assert emitted == pytest.approx({(0,): 0.1, (1,): 0.2, (2,): 0.7}, abs=EXACT)
    q[0, 0] -= 1e-9  # which is more than rounding
    assert exact.law(Recover(), p, q) == pytest.approx({(0,): 1.0}, abs=EXACT)


def test_a_strategy_without_rules_has_no_law() -> None:
    class Own(acceptlib.AcceptanceStrategy):
        name = "own"
        traits = acceptlib.Traits(guarantee="lossless")

        def verify(self, *_: Any, **__: Any) -> acceptlib.VerifyResult:
            raise NotImplementedError  # refused before it is called

    for figure in (exact.law, exact.tv, exact.kl, exact.expected_tokens):
        with pytest.raises(InputError, match="overrides verify whole"):
            figure(Own(), HALF, HALF)
