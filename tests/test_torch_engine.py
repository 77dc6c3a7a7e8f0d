"""The torch engine against the oracle: the same uniforms must give the same tokens, request by request."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import (
    DEFAULTS,
    KINDS,
    SETTINGS,
    STRIDES,
    Case,
    Request,
    call,
    lay_out,
    logit_requests,
    make_requests,
    rng_of,
    same,
)

import acceptlib
from acceptlib import PLACEHOLDER_TOKEN_ID, SamplingParams, VerifyResult
from acceptlib.exact import oracle


def expected_rows(setting: str, requests: list[Request], uniforms: acceptlib.Uniforms, columns: int) -> list[list[int]]:
    """Return the oracle's padded output rows, one request at a time."""
    name, options = SETTINGS[setting]
    rows = []
    for b, request in enumerate(requests):
        x = request.chain
        p = request.target[: len(x) + 1].float()
        q = None if request.draft is None else request.draft[: len(x)].float()
        u = uniforms.accept[b, : len(x)].tolist()
        tokens, accepted = oracle.verify(name, x, p, q, u, int(uniforms.emit[b]), **options)
        assert len(tokens) == accepted + 1
        rows.append(tokens + [PLACEHOLDER_TOKEN_ID] * (columns - len(tokens)))
    return rows


def check_case(setting: str, case: Case) -> None:
    """Assert exact equality with the oracle, that inputs are left alone, and that streams move on by one."""
    requests = make_requests(case)
    tensors = lay_out(requests, case.layout, ids=case.ids)
    before = {key: value.clone() for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    rng = rng_of(case.B, case.seed)
    offsets = rng.offsets.clone()
    uniforms = rng.uniforms(case.K)
    result = call(setting, tensors, uniforms=uniforms, strides=case.strides)

    columns = result.output_token_ids.shape[1]
    assert columns == max(len(request.ids) for request in requests) + 1
    assert result.output_token_ids.dtype == torch.int32
    assert result.status.tolist() == [0] * case.B
    assert result.output_token_ids.tolist() == expected_rows(setting, requests, uniforms, columns)
    emitted = (result.output_token_ids != PLACEHOLDER_TOKEN_ID).sum(1)
    assert result.num_emitted.tolist() == emitted.tolist()
    assert result.num_accepted.tolist() == (emitted - 1).tolist()

    same(result, call(setting, tensors, rng=rng, strides=case.strides))
    assert torch.equal(rng.offsets, offsets + 1)
    for key, value in before.items():
        torch.testing.assert_close(tensors[key], value, rtol=0, atol=0, equal_nan=True)


# Exact equality from probabilities

RELATIONS = [Case(6, 4, 29, kind=kind, draft=draft, seed=2) for kind in KINDS for draft in (True, False)]

SHAPES = [
    Case(5, 4, 101, "ragged"),
    Case(5, 4, 101, "padded"),
    Case(4, 9, 101, "ragged", ids=torch.int32),
    Case(4, 9, 101, "padded", ids=torch.int32, strides="sliced"),
    Case(2, 33, 101, "ragged", kind="peaked"),
    Case(3, 0, 101, "padded"),
    Case(3, 0, 101, "ragged"),
    Case(3, 1, 101, "ragged", seed=1),
    Case(1, 1, 1, "padded"),
    Case(3, 3, 1, "ragged", draft=False),
    Case(7, 3, 2, "padded"),
    Case(7, 3, 2, "ragged", draft=False),
    Case(7, 5, 3, "ragged"),
    Case(7, 5, 3, "padded", kind="reversed"),
    Case(3, 2, 2048, "ragged"),
    Case(3, 2, 2048, "padded", draft=False),
    Case(3, 3, 4097, "padded", strides="transposed"),
    Case(3, 3, 4097, "ragged", dtype=torch.bfloat16, strides="sliced"),
    Case(6, 4, 101, "padded", dtype=torch.bfloat16),
    Case(6, 4, 101, "padded", dtype=torch.float16, draft=False),
    Case(6, 4, 101, "ragged", dtype=torch.float16, ids=torch.int32),
    Case(6, 4, 101, "padded", kind="equal", dtype=torch.bfloat16),
    Case(8, 6, 101, "padded", placeholders=True),
    Case(8, 6, 101, "ragged", placeholders=True),
    Case(8, 6, 17, "ragged", placeholders=True, draft=False, ids=torch.int32, strides="sliced"),
    Case(8, 6, 101, "padded", placeholders=True, strides="transposed"),
    Case(5, 4, 101, "ragged", draft_vocab=90),
    Case(5, 4, 101, "padded", draft_vocab=1, strides="sliced"),
    Case(5, 4, 101, "padded", draft_vocab=120),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_shapes_and_layouts(setting: str, case: Case) -> None:
    """Layouts, dtypes, strides and sizes: catches rows taken from the wrong place and any unspecified rounding."""
    check_case(setting, case)


@pytest.mark.parametrize("case", RELATIONS, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_relations_of_rows(setting: str, case: Case) -> None:
    """Degenerate p and q: catches a zero residual, q = 0 at the drafted token, ties, and leaks onto masked tokens."""
    check_case(setting, case)


@pytest.mark.parametrize("setting", SETTINGS)
def test_many_requests(setting: str) -> None:
    """A batch wide enough that every position is a stop many times: catches rare branches of the decision."""
    check_case(setting, Case(150, 5, 7, "ragged", seed=5))


@given(data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_random_shapes(data: st.DataObject) -> None:
    """Any combination of the above, drawn by hypothesis, which shrinks what fails."""
    setting = data.draw(st.sampled_from(list(SETTINGS)))
    vocab = data.draw(st.integers(1, 40))
    case = Case(
        B=data.draw(st.integers(1, 5)),
        K=data.draw(st.integers(0, 6)),
        V=vocab,
        layout=data.draw(st.sampled_from(["padded", "ragged"])),
        kind=data.draw(st.sampled_from(KINDS)),
        draft=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        ids=data.draw(st.sampled_from([torch.int32, torch.int64])),
        placeholders=data.draw(st.booleans()),
        strides=data.draw(st.sampled_from(list(STRIDES))),
        seed=data.draw(st.integers(0, 2**16)),
    )
    check_case(setting, case)


@pytest.mark.parametrize("setting", SETTINGS)
def test_extreme_uniforms(setting: str) -> None:
    """u at 0 and 1 - 2^-53, bits all 0 and all 1: catches h = 0 accepted, h = 1 rejected, an id past the last."""
    for kind, draft in itertools.product(KINDS, (True, False)):
        case = Case(4, 3, 11, kind=kind, draft=draft, seed=9)
        requests = make_requests(case)
        tensors = lay_out(requests, "padded")
        for u, bits in itertools.product((0.0, 1 - 2**-53), (0, -1, 2**63 - 1, -(2**63))):
            uniforms = acceptlib.Uniforms(
                accept=torch.full((4, 3), u, dtype=torch.float64), emit=torch.full((4,), bits, dtype=torch.int64)
            )
            result = call(setting, tensors, uniforms=uniforms)
            assert result.output_token_ids.tolist() == expected_rows(setting, requests, uniforms, 4)


@pytest.mark.parametrize("vocab", [2, 3, 101, 4097])
@pytest.mark.parametrize("setting", ["rejection", "block", "lenience", "typical-sample"])
def test_edges_of_the_draw(setting: str, vocab: int) -> None:
    """The last bits before and the first bits after the end of intervals: catches any inexact step of the draw."""
    generator = torch.Generator().manual_seed(vocab)
    name, options = SETTINGS[setting]
    # Token 0 is drafted, and certain to be rejected. The rows have entries from 2^-2 to below 2^-60.
    p = torch.cat((torch.zeros(2, 1), torch.randn(2, vocab - 1, generator=generator).mul(7).softmax(-1)), 1)
    q = torch.cat((torch.full((1, 1), 0.5), torch.randn(1, vocab - 1, generator=generator).softmax(-1) / 2), 1)
    q[:, 1 + vocab // 2 :] = 0
    for drafted in ([0], []):
        n = len(drafted)
        chain = oracle.build(name, drafted, p[: n + 1], q[:n], **options)
        counts = oracle.integers(chain.recovered(0) if n else chain.bonus)
        ends = list(itertools.accumulate(counts))[:-1]
        ends = [*ends[:: max(1, len(ends) // 40)], *ends[2047:2048]]
        ends = [end for end in ends if 0 < end < sum(counts)]
        first = [-(-(end << 64) // sum(counts)) for end in ends]
        bits = [value - 2**64 if value >= 2**63 else value for edge in first for value in (edge - 1, edge)] + [0, -1]
        requests = [Request(drafted, p[: n + 1], q[:n])] * len(bits)
        uniforms = acceptlib.Uniforms(
            accept=torch.full((len(bits), n), 0.5, dtype=torch.float64), emit=torch.tensor(bits, dtype=torch.int64)
        )
        expected = expected_rows(setting, requests, uniforms, n + 1)
        assert all(below != above for below, above in zip(expected[:-2:2], expected[1:-2:2], strict=True))
        assert call(setting, lay_out(requests, "padded"), uniforms=uniforms).output_token_ids.tolist() == expected


def test_typical_threshold_is_strict() -> None:
    """p(x) equal to the threshold is rejected, and just above it accepted: catches `>=` for `>`."""
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.25, 0.5, 0.125, 0.125]])
    above = torch.nextafter(p[0, :1], torch.ones(1))
    uniforms = acceptlib.Uniforms(accept=torch.zeros(2, 1, dtype=torch.float64), emit=torch.tensor([-1, -1]))
    target = torch.stack((p, torch.stack((torch.cat((above, p[0, 1:])), p[1]))))
    strategy = acceptlib.create("typical", posterior_threshold=0.25, posterior_alpha=9.0)
    result = strategy.verify(torch.zeros(2, 1, dtype=torch.int64), target_probs=target, uniforms=uniforms)
    assert result.num_accepted.tolist() == [0, 1]
    for b, accepted in enumerate((0, 1)):
        options = {"posterior_threshold": 0.25, "posterior_alpha": 9.0}
        assert oracle.verify("typical", [0], target[b], None, [0.0], -1, **options)[1] == accepted


@pytest.mark.parametrize("setting", SETTINGS)
def test_nan_in_draft_counts_as_zero(setting: str) -> None:
    """NaN where q was 0, at the drafted token and elsewhere: catches a NaN that re-emits the rejected token."""
    requests = []
    for request in make_requests(Case(12, 3, 11, kind="zero-draft-prob", seed=3)):
        assert request.draft is not None
        requests.append(replace(request, draft=torch.where(request.draft == 0, math.nan, request.draft)))
    uniforms = rng_of(12).uniforms(3)
    result = call(setting, lay_out(requests, "ragged"), uniforms=uniforms)
    assert result.status.tolist() == [0] * 12
    assert result.output_token_ids.tolist() == expected_rows(setting, requests, uniforms, 4)


@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_given_bonus_tokens(setting: str, layout: str) -> None:
    """`bonus_token_ids` stands where every drafted token does, and nowhere else: catches it emitted on rejection.

    In the ragged layout it is the token after the count, and not that of a placeholder before.
    """
    requests = make_requests(Case(9, 3, 13, placeholders=True, seed=4))
    tensors = lay_out(requests, layout)
    uniforms = rng_of(9).uniforms(3)
    bonus = torch.arange(9) % 13
    expected = expected_rows(setting, requests, uniforms, 4)
    for b, (row, request) in enumerate(zip(expected, requests, strict=True)):
        accepted = sum(token != PLACEHOLDER_TOKEN_ID for token in row) - 1
        if accepted == len(request.chain if layout == "padded" else request.ids):
            row[accepted] = int(bonus[b])
    assert call(setting, tensors, uniforms=uniforms, bonus_token_ids=bonus).output_token_ids.tolist() == expected


def test_counts_without_the_leading_zero() -> None:
    """Counts that are as many as the bonus tokens begin with the first request's end, K found or given."""
    first, *rest = sorted(make_requests(Case(7, 4, 13, "ragged", seed=2)), key=lambda request: -len(request.ids))
    requests = [first, *(request for request in rest if len(request.ids) < len(first.ids))]
    assert len(requests) > 3
    tensors = lay_out(requests, "ragged") | {"cu_num_draft_tokens": None, "max_num_draft_tokens": None}
    ends = torch.tensor([*itertools.accumulate(len(request.ids) for request in requests)])
    bonus = torch.arange(len(requests)) % 13
    for most in (None, 5):
        results = [
            call(
                "rejection",
                {**tensors, "cu_num_draft_tokens": counts, "max_num_draft_tokens": most},
                rng=rng_of(len(requests)),
                bonus_token_ids=bonus,
            )
            for counts in (ends, torch.cat((torch.tensor([0]), ends)))
        ]
        same(*results)


def test_ragged_uniforms() -> None:
    """Accept uniforms of the ragged shape [T] mean the same as [B, K]: catches a position counted per batch."""
    requests = make_requests(Case(6, 4, 17, seed=6))
    uniforms = rng_of(6).uniforms(4)
    flat = torch.cat([uniforms.accept[b, : len(request.ids)] for b, request in enumerate(requests)])
    tensors = lay_out(requests, "ragged")
    left = call("rejection", tensors, uniforms=uniforms)
    same(left, call("rejection", tensors, uniforms=acceptlib.Uniforms(accept=flat, emit=uniforms.emit)))


# Equality from logits, up to the rounding of exp and of its sum

ROUNDING = 1e-5
"""How close u must be to h, or r to the end of a token's interval, for another decision to be rounding."""


def plausible_stops(chain: oracle.Chain, u: list[float]) -> set[int]:
    """Return what tau may be when each |u - h| < ROUNDING may go either way."""
    ways = [(True, False) if abs(u_i - h_i) < ROUNDING else (u_i < h_i,) for u_i, h_i in zip(u, chain.h, strict=True)]
    return {chain.stop(accepted) for accepted in itertools.product(*ways)}


def interval_holds(weights: torch.Tensor, p: torch.Tensor, token: int, bits: int) -> bool:
    """Return whether r / total is within ROUNDING of the token's interval of the CDF."""
    counts = oracle.integers(weights)
    if sum(counts) == 0:
        counts = oracle.integers(p)
    low, high = sum(counts[:token]) / sum(counts), sum(counts[: token + 1]) / sum(counts)
    return counts[token] > 0 and low - ROUNDING <= (bits % 2**64) / 2**64 <= high + ROUNDING


def count_mismatches(
    setting: str, requests: list[Request], rows: list[Request], uniforms: acceptlib.Uniforms, result: VerifyResult
) -> int:
    """Return how many requests differ from the oracle on `rows`; fail where rounding does not explain it."""
    name, options = SETTINGS[setting]
    assert result.status.tolist() == [0] * len(requests)
    mismatches = 0
    for b, (request, row) in enumerate(zip(requests, rows, strict=True)):
        x, u, bits = request.chain, uniforms.accept[b, : len(request.chain)].tolist(), int(uniforms.emit[b])
        tau = int(result.num_accepted[b])
        tokens = result.output_token_ids[b, : tau + 1].tolist()
        assert tokens[:-1] == x[:tau]
        chain = oracle.build(name, x, row.target[: len(x) + 1], row.draft, **options)
        if (tokens, tau) == oracle.verify(name, x, row.target[: len(x) + 1], row.draft, u, bits, **options):
            continue
        mismatches += 1
        assert tau in plausible_stops(chain, u)
        weights = chain.bonus if tau == len(x) else chain.recovered(tau)
        assert interval_holds(weights, row.target[tau], tokens[-1], bits)
    return mismatches


def processed(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the float32 probabilities of logits, worked out in float64."""
    if temperature == 0:
        rows = [oracle.one_hot(row) for row in logits.float()]
        return torch.stack(rows) if rows else logits.float()
    return (logits.double() / temperature).softmax(-1).float()


LOGIT_CASES = [
    Case(24, 4, 101, "padded"),
    Case(24, 4, 101, "ragged", draft=False, dtype=torch.bfloat16),
    Case(12, 3, 4097, "ragged", strides="sliced"),
    Case(12, 3, 2048, "padded", dtype=torch.float16, strides="transposed"),
]


@pytest.mark.parametrize("temperature", ["plain", "temperatures"])
@pytest.mark.parametrize("case", LOGIT_CASES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_logits(setting: str, case: Case, temperature: str) -> None:
    """From logits, with and without temperatures: a difference must be rounding, and at most one request has one."""
    requests = logit_requests(case, masked=temperature == "temperatures")
    values = [1.0] * case.B if temperature == "plain" else [(0.7, 1.0, 0.0, 1.9)[b % 4] for b in range(case.B)]
    sampling = None if temperature == "plain" else SamplingParams(temperature=torch.tensor(values))
    rows = [
        Request(
            request.ids, processed(request.target, t), None if request.draft is None else processed(request.draft, t)
        )
        for request, t in zip(requests, values, strict=True)
    ]
    uniforms = rng_of(case.B, case.seed).uniforms(case.K)
    tensors = lay_out(requests, case.layout)
    before = tensors["target"].clone()
    result = call(setting, tensors, form="logits", strides=case.strides, uniforms=uniforms, sampling=sampling)
    assert count_mismatches(setting, requests, rows, uniforms, result) <= 1
    torch.testing.assert_close(tensors["target"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("setting", DEFAULTS)
def test_logits_beside_probabilities(setting: str) -> None:
    """Target logits with draft probabilities, and the other way round: catches one flag for both models."""
    case = Case(16, 4, 101, "padded", seed=8)
    requests = logit_requests(case, masked=False)
    rows = [Request(r.ids, processed(r.target, 1), processed(r.draft, 1)) for r in requests if r.draft is not None]
    uniforms = rng_of(case.B).uniforms(case.K)
    logits, probs = lay_out(requests, "padded"), lay_out(rows, "padded")
    strategy = acceptlib.create(setting)
    for target, draft in (("logits", "probs"), ("probs", "logits")):
        forms = {"logits": logits, "probs": probs}
        given_rows = {f"target_{target}": forms[target]["target"], f"draft_{draft}": forms[draft]["draft"]}
        result = strategy.verify(logits["ids"], uniforms=uniforms, **given_rows)
        assert count_mismatches(setting, requests, rows, uniforms, result) <= 1


@pytest.mark.parametrize("temperature", [0.5, 0.02, 2e-38])
def test_low_temperatures(temperature: float) -> None:
    """Logits near 30 over a low temperature: catches a quotient that overflows, or rounds too early."""
    generator = torch.Generator().manual_seed(0)
    target = 30 + 3 * temperature * torch.randn(50, 1, 101, generator=generator)
    target = target if temperature > 1e-6 else target + torch.randn(50, 1, 101, generator=generator)
    result = acceptlib.create("rejection").verify(
        torch.zeros(50, 0, dtype=torch.int64),
        target_logits=target,
        sampling=SamplingParams(temperature=torch.full((50,), temperature)),
        rng=rng_of(50),
        logprobs=True,
    )
    assert result.status.tolist() == [0] * 50
    assert result.logprobs is not None
    law = (target.double() / torch.tensor(temperature).double()).log_softmax(-1)
    wanted = law[:, 0].gather(1, result.output_token_ids.long())
    torch.testing.assert_close(result.logprobs.double(), wanted, rtol=0, atol=ROUNDING)


def test_tied_logits() -> None:
    """bfloat16 logits with many ties: catches an argmax that does not take the lowest id."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(-2, 3, (40, 4, 101), generator=generator).bfloat16()
    ids = target[:, :3].float().argmax(-1)
    ids[::3, 1] = 100 - target[::3, 1].flip(-1).float().argmax(-1)
    requests = [Request(ids[b].tolist(), target[b], None) for b in range(40)]
    rows = [Request(request.ids, processed(request.target, 1), None) for request in requests]
    uniforms = rng_of(40).uniforms(3)
    result = call("greedy", lay_out(requests, "padded"), form="logits", uniforms=uniforms)
    assert count_mismatches("greedy", requests, rows, uniforms, result) == 0
    assert 0 < (result.num_accepted < 3).sum() < 40
