"""Exact laws by enumeration: lossless is an equality to 1e-12, and a lossy rule's distances are numbers."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import RecoversFromTarget, StopsAtFirstFailure, TokenResidual, UnscaledBlockResidual

import acceptlib
from acceptlib import exact
from acceptlib.exact import oracle

EXACT = 1e-12
CERTAIN = {(): 1.0}
LOSSLESS = [name for name in acceptlib.available() if acceptlib.create(name).traits.guarantee == "lossless"]
LOSSY = [name for name in acceptlib.available() if acceptlib.create(name).traits.guarantee == "lossy"]


def model(seed: int, vocab_size: int, sharpness: float = 1.5) -> exact.Model:
    """Return a model whose row depends on the whole prefix."""
    rows: dict[tuple[int, ...], torch.Tensor] = {}

    def row(prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in rows:
            generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
            noise = torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            rows[prefix] = torch.softmax(noise * sharpness, -1)
        return rows[prefix]

    return row


def zeroed(base: exact.Model, keep: int) -> exact.Model:
    """Return the model without all but its `keep` likeliest tokens, as top-k makes it."""

    def row(prefix: tuple[int, ...]) -> torch.Tensor:
        probs = base(prefix)
        kept = torch.where(probs >= probs.sort().values[-keep], probs, 0.0)
        return kept / kept.sum()

    return row


PAIRS = {
    "random": (model(1, 4), model(2, 4)),
    "sharp": (model(3, 4, 6.0), model(4, 4, 6.0)),
    "one-hot-target": (zeroed(model(5, 4), 1), model(6, 4)),
    "one-hot-draft": (model(5, 4), zeroed(model(6, 4), 1)),
    "disjoint-supports": (
        lambda _: torch.tensor([0.3, 0.7, 0, 0], dtype=torch.float64),
        lambda _: torch.tensor([0, 0, 0.9, 0.1], dtype=torch.float64),
    ),
    "zeros": (zeroed(model(7, 4), 2), zeroed(model(8, 4), 3)),
    "equal": (model(9, 4), model(9, 4)),
    "rational": (
        lambda prefix: torch.tensor([1, 2, 3, 2 + len(prefix)], dtype=torch.float64) / (8 + len(prefix)),
        lambda prefix: torch.tensor([3, 1, 1 + len(prefix), 3], dtype=torch.float64) / (8 + len(prefix)),
    ),
}


def distance(strategy: acceptlib.AcceptanceStrategy, pair: str, num_draft_tokens: int) -> float:
    target, draft = PAIRS[pair]
    return exact.tv(strategy, target, draft, num_draft_tokens=num_draft_tokens)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_joint_law(name: str, pair: str, num_draft_tokens: int) -> None:
    """The whole emitted sequence, continued by the target, follows the target's joint law."""
    target, draft = PAIRS[pair]
    emitted = exact.law(acceptlib.create(name), target, draft, num_draft_tokens=num_draft_tokens)
    length = num_draft_tokens + 1
    found = exact.complete(emitted, target, length)
    assert float((found - exact.complete(CERTAIN, target, length)).abs().max()) < EXACT
    assert abs(sum(emitted.values()) - 1) < EXACT


@pytest.mark.parametrize("pair", ["random", "zeros", "rational"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_over_two_steps(name: str, pair: str) -> None:
    """A second step that starts wherever the first one ended keeps the joint law."""
    strategy, (target, draft) = acceptlib.create(name), PAIRS[pair]
    both: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for first, chance in exact.law(strategy, target, draft, num_draft_tokens=2).items():
        second = exact.law(
            strategy,
            lambda prefix, first=first: target((*first, *prefix)),
            lambda prefix, first=first: draft((*first, *prefix)),
            num_draft_tokens=2,
        )
        for then, next_chance in second.items():
            both[(*first, *then)[:4]] += chance * next_chance
    found = exact.complete(both, target, 4)
    assert float((found - exact.complete(CERTAIN, target, 4)).abs().max()) < EXACT


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_one_hot_drafts_are_lossless(name: str, pair: str) -> None:
    """Every fixed draft without rows, as n-gram lookup makes it."""
    target, strategy = PAIRS[pair][0], acceptlib.create(name)
    wanted = exact.complete(CERTAIN, target, 3)
    for draft_token_ids in itertools.product(range(4), repeat=2):
        emitted = exact.law(strategy, target, num_draft_tokens=2, draft_token_ids=draft_token_ids)
        assert float((exact.complete(emitted, target, 3) - wanted).abs().max()) < EXACT


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_lossless_on_drawn_rows(vocab_size: int, num_draft_tokens: int, random) -> None:  # noqa: ANN001
    """Rows of small integers over their sum, zeros included."""

    def rows(count: int) -> torch.Tensor:
        weights = [[random.choice((0, 0, 1, 2, 7)) for _ in range(vocab_size)] for _ in range(count)]
        for row in weights:
            row[random.randrange(vocab_size)] += 1
        table = torch.tensor(weights, dtype=torch.float64)
        return table / table.sum(1, keepdim=True)

    p, q = rows(num_draft_tokens + 1), rows(num_draft_tokens)
    for name in LOSSLESS:
        assert exact.tv(acceptlib.create(name), p, q) < EXACT


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


@pytest.mark.parametrize("mutant", [TokenResidual, StopsAtFirstFailure, UnscaledBlockResidual, RecoversFromTarget])
def test_exactness_fails_the_mutants(mutant: type[acceptlib.AcceptanceStrategy]) -> None:
    assert max(distance(mutant(), pair, 2) for pair in PAIRS) > 1e-3


@pytest.mark.parametrize("lenience", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("pair", PAIRS)
def test_lenience_keeps_its_bound(pair: str, lenience: float) -> None:
    """out(x) <= p(x) / lenience at every row."""
    target, draft = PAIRS[pair]
    emitted = exact.law(acceptlib.create("lenience", lenience=lenience), target, draft, num_draft_tokens=1)
    first = exact.complete(emitted, target, 1)
    assert bool((first <= target(()) / lenience + EXACT).all())


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


@pytest.mark.parametrize("name", LOSSY)
def test_a_neutral_setting_equals_the_lossless_rule(name: str) -> None:
    traits = acceptlib.create(name).traits
    if not traits.neutral:
        assert traits.bound == "none"
        return
    neutral, lossless = acceptlib.create(name, **traits.neutral), acceptlib.create(traits.neutral_equals)
    for target, draft in PAIRS.values():
        assert exact.law(neutral, target, draft, num_draft_tokens=3) == exact.law(
            lossless, target, draft, num_draft_tokens=3
        )


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


def test_kl_is_infinite_beyond_the_support_and_zero_for_lossless() -> None:
    target, draft = PAIRS["disjoint-supports"]
    assert exact.kl(acceptlib.create("synthetic"), target, draft, num_draft_tokens=1) == math.inf
    assert abs(exact.kl(acceptlib.create("block"), *PAIRS["random"], num_draft_tokens=2)) < EXACT


def test_too_much_to_enumerate_is_a_clear_error() -> None:
    rows = torch.full((5, 200), 1 / 200)
    with pytest.raises(acceptlib.AcceptlibError, match="drafted sequences"):
        exact.law(acceptlib.create("rejection"), rows, rows[:-1])


def test_a_law_needs_a_draft_and_a_length() -> None:
    rows = torch.full((2, 3), 1 / 3)
    with pytest.raises(acceptlib.AcceptlibError, match="got neither"):
        exact.law(acceptlib.create("rejection"), rows)
    with pytest.raises(acceptlib.AcceptlibError, match="num_draft_tokens"):
        exact.law(acceptlib.create("rejection"), lambda _: rows[0], rows)
