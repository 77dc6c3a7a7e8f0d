"""The oracle itself: against results worked out by hand, by enumeration, and by rules that must agree."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from oracle_cases import SETTINGS, Case, make_request, make_requests, rng_of

import acceptlib
from acceptlib.exact import oracle


def test_oracle_knows_every_builtin() -> None:
    """A built-in without a reference would go unchecked."""
    strategies = {acceptlib.create(name).name for name in acceptlib.available()}
    assert {name for name, _ in SETTINGS.values()} == set(oracle.RULES)
    assert set(oracle.RULES) <= strategies


@pytest.mark.parametrize(
    ("weights", "bits", "token"),
    [
        ([0.0, 0.5, 0.5], 0, 1),
        ([0.0, 0.5, 0.5], 2**63 - 1, 1),
        ([0.0, 0.5, 0.5], 2**63, 2),
        ([0.0, 0.5, 0.5], -(2**63), 2),
        ([0.5, 0.5, 0.0], -1, 1),
        ([2**-60, 0.0, 2**-61], -1, 0),
        ([0.0, 2**-61, 0.0], 0, 0),
        ([0.0, 0.0, 0.0], -1, 2),
    ],
)
def test_oracle_draw(weights: list[float], bits: int, token: int) -> None:
    """The draw by hand: edges of intervals, truncation below 2^-60, and the fall-back to p."""
    p = torch.tensor([0.25, 0.25, 0.5])
    assert oracle.draw(torch.tensor(weights), p, bits) == token


def test_oracle_expected_tokens_of_the_block_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), K = 2: 10/9 accepted with token rejection, 11/9 with block."""
    p = torch.tensor([[1 / 3, 2 / 3]] * 3)
    q = torch.tensor([[2 / 3, 1 / 3]] * 2)
    for name, accepted in (("rejection", 10 / 9), ("block", 11 / 9)):
        mean = sum(
            q[0, x_1].item() * q[1, x_2].item() * oracle.expected_tokens(name, [x_1, x_2], p, q)
            for x_1, x_2 in itertools.product(range(2), repeat=2)
        )
        assert mean == pytest.approx(accepted + 1, abs=1e-6)


def test_oracle_expected_tokens_is_the_mean() -> None:
    """The expectation against the mean of `verify` over a grid of uniforms: catches h and 1 - h swapped."""
    request = make_request(Case(1, 2, 5), 2, torch.Generator().manual_seed(3))
    grid = [(i + 0.5) / 40 for i in range(40)]
    for name, options in SETTINGS.values():
        counts = [
            len(oracle.verify(name, request.ids, request.target, request.draft, u, 0, **options)[0])
            for u in itertools.product(grid, repeat=2)
        ]
        expected = oracle.expected_tokens(name, request.ids, request.target, request.draft, **options)
        # Each of two thresholds is off by half a cell at most, and moves at most two tokens.
        assert abs(sum(counts) / len(counts) - expected) <= 2 * 2 * 0.5 / 40


def law(name: str, p: torch.Tensor, q: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Return the law of the first n+1 tokens, those after the emitted ones drawn from the target."""
    n, vocab = len(q), p.shape[1]
    joint: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(vocab), repeat=n + 1), 0.0)
    for x in itertools.product(range(vocab), repeat=n):
        chain = oracle.build(name, x, p, q)
        drafted = math.prod(q[i, x_i].item() for i, x_i in enumerate(x))
        for accepted in itertools.product((True, False), repeat=n):
            ways = math.prod(h_i if a_i else 1 - h_i for a_i, h_i in zip(accepted, chain.h, strict=True))
            tau = chain.stop(accepted)
            weights = chain.bonus if tau == n else chain.recovered(tau)
            if drafted * ways == 0:
                continue
            for tokens in itertools.product(range(vocab), repeat=n + 1):
                if tokens[:tau] == x[:tau]:
                    tail = math.prod(p[i, tokens[i]].item() for i in range(tau + 1, n + 1))
                    drawn = (weights[tokens[tau]] / weights.sum()).item()
                    joint[tokens] += drafted * ways * drawn * tail
    return joint


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_oracle_is_lossless(name: str, n: int) -> None:
    """The joint law by enumeration is the target's, up to float32 rows: catches an error shared with the engine."""
    generator = torch.Generator().manual_seed(n)
    p = torch.randn(n + 1, 3, generator=generator).mul(1.5).softmax(-1)
    q = torch.randn(n, 3, generator=generator).mul(1.5).softmax(-1)
    for tokens, probability in law(name, p, q).items():
        assert probability == pytest.approx(math.prod(p[i, t].item() for i, t in enumerate(tokens)), abs=2e-6)


def test_oracle_neutral_settings() -> None:
    """Lossy rules at their neutral setting are `rejection`, as block is for one token: catches a wrong residual."""
    source = rng_of(40, 3).uniforms(3)
    requests = make_requests(Case(40, 3, 9, seed=21))
    for b, request in enumerate(requests):
        u, bits = source.accept[b, : len(request.ids)].tolist(), int(source.emit[b])
        arguments = (request.ids, request.target, request.draft, u, bits)
        expected = oracle.verify("rejection", *arguments)
        assert oracle.verify("lenience", *arguments, lenience=1.0) == expected
        assert oracle.verify("mixture", *arguments, weight=1.0) == expected
        assert oracle.verify("fly", *arguments, fly_entropy_threshold=math.inf) == expected
        if len(request.ids) <= 1:
            assert oracle.verify("block", *arguments) == expected


def test_oracle_block_is_certain_at_the_cap() -> None:
    """P = 1 makes h = 1 to the bit, for any Z: catches a sum that is rounded on its way."""
    p = torch.tensor([[0.5, 0.5], [0.5 + 2e-9, 0.5 - 2e-9], [0.5, 0.5]], dtype=torch.float64)
    q = torch.full((2, 2), 0.5, dtype=torch.float64)
    assert oracle.build("block", [0, 1], p, q).h[0] == 1


def test_oracle_one_hot_block_is_rejection() -> None:
    """For one-hot drafts block accepts as much as token rejection: catches Z taken from the wrong row."""
    request = make_request(Case(1, 4, 6, draft=False), 4, torch.Generator().manual_seed(2))
    arguments = (request.ids, request.target, None)
    assert oracle.expected_tokens("block", *arguments) == pytest.approx(
        oracle.expected_tokens("rejection", *arguments), abs=1e-6
    )
    h = [request.target[i, x_i].item() for i, x_i in enumerate(request.ids)]
    products = itertools.accumulate(h, lambda product, h_i: product * h_i)
    assert oracle.expected_tokens("rejection", *arguments) == pytest.approx(1 + sum(products), abs=1e-12)


def test_oracle_fly_window() -> None:
    """By hand, n = 4 and W = 2: a rejection is forgiven with both followers accepted, and not within 2 of the end."""
    p = torch.full((5, 4), 0.25)
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0]] * 4)
    x = [0, 0, 0, 0]
    yes, no = 0.0, 0.9
    for u, accepted in (
        ([yes, no, yes, yes], 4),
        ([no, yes, yes, no], 3),
        ([no, yes, no, yes], 0),
        ([yes, yes, no, yes], 2),
        ([yes, yes, yes, no], 3),
        ([no, no, yes, yes], 0),
    ):
        assert oracle.verify("fly", x, p, q, u, 0, fly_window=2)[1] == accepted
    assert oracle.verify("fly", [0], p[:2], q[:1], [no], 0, fly_entropy_threshold=0.0)[1] == 0
