"""The q contract: honest drafts pass, and each way in which engines have broken it is seen."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import support
import torch

from acceptlib import SamplingParams
from acceptlib.engine.process import law
from acceptlib.errors import ConformanceError, InputError
from acceptlib.testing import q_contract
from acceptlib.testing.q_contract import FALSE_ALARM_RATE, _Bets, check_draft_contract

VOCAB = 60


def rows(count: int, seed: int = 0, vocab: int = VOCAB, sharpness: float = 2.0) -> torch.Tensor:
    return sharpness * torch.randn(count, vocab, generator=support.generator(seed))


def sample(probs: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return torch.multinomial(probs, 1, generator=support.generator(seed))[:, 0]


PARAMS = {
    "plain": None,
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(top_k=8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "min-p": SamplingParams(min_p=0.1),
    "greedy": SamplingParams(temperature=0.0),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_honest_drafts_pass(params: SamplingParams | None) -> None:
    for seed in range(12):
        logits = rows(2000, seed)
        probs = law(logits, params)
        ids = sample(probs, seed + 100)
        check_draft_contract(ids, draft_logits=logits, sampling=params)
        check_draft_contract(ids.view(500, 4), draft_probs=probs.view(500, 4, VOCAB))


def test_expectation_under_honest_drafts_is_1() -> None:
    """What the false-alarm rate rests on, exactly: the sum of g over a row is 1, for each bet and after any past."""
    from acceptlib.testing.q_contract import _Bets  # noqa: PLC0415 - the part with a contract of its own

    q = rows(1, 3, vocab=7).double().softmax(-1)
    past = sample(rows(50, 4, vocab=7).softmax(-1))
    sums: dict[str, float] = {}
    for x in range(7):
        bets = _Bets(7)
        bets.place(rows(50, 4, vocab=7).softmax(-1).double(), past)
        for name, g_x in bets._laws(q, torch.tensor([x])):
            sums[name] = sums.get(name, 0.0) + float(g_x)
    assert len(sums) == 19
    assert sums == pytest.approx(dict.fromkeys(sums, 1.0), abs=1e-12)


SHARED = rows(400)

VIOLATIONS = {
    "raw-rows-colder-draft": (lambda: sample(law(SHARED, SamplingParams(temperature=0.6))), "lower temperature"),
    "raw-rows-hotter-draft": (lambda: sample(law(SHARED, SamplingParams(temperature=1.7))), "higher temperature"),
    "raw-rows-top-k": (lambda: sample(law(SHARED, SamplingParams(top_k=5))), "top-k 5"),
    "raw-rows-top-p": (lambda: sample(law(SHARED, SamplingParams(top_p=0.8))), "top-p 0.8"),
    "greedy-with-softmax": (lambda: SHARED.argmax(-1), "greedy"),
    "uniform": (lambda: torch.randint(VOCAB, (400,), generator=support.generator(2)), "rank|temperature"),
    "next-row": (lambda: sample(SHARED.roll(1, 0).softmax(-1)), "rank|temperature"),
    "low-ids": (lambda: sample(SHARED.softmax(-1) * torch.linspace(3, 0.1, VOCAB)), "id"),
}


@pytest.mark.parametrize(("draft", "named"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_broken_contract_is_seen(draft, named: str) -> None:  # noqa: ANN001
    """By 400 tokens, and by its name."""
    with pytest.raises(ConformanceError, match=f"What fits them best: .*({named})"):
        check_draft_contract(draft(), draft_probs=SHARED.softmax(-1))


FLAT = torch.full((1000, 61), 1 / 61)
FILTERED = {
    "top-k 2": 2,
    "top-k 5": 5,
    "top-k 20": 20,
    "top-k 50": 50,
    "top-p 0.8": 49,
    "top-p 0.9": 55,
    "top-p 0.95": 58,
}


@pytest.mark.parametrize(("named", "kept"), FILTERED.items())
def test_each_usual_filter_is_bet_on(named: str, kept: int) -> None:
    ids = torch.randint(kept, (1000,), generator=support.generator(11))
    with pytest.raises(ConformanceError, match=f"What fits them best: tokens drawn after {named}"):
        check_draft_contract(ids, draft_probs=FLAT)


def test_one_exception_does_not_lose_the_bet() -> None:
    ids = SHARED.argmax(-1)
    ids[3] = SHARED[3].topk(2).indices[1]
    with pytest.raises(ConformanceError, match="What fits them best: greedy tokens"):
        check_draft_contract(ids, draft_probs=SHARED.softmax(-1))


def test_a_few_ids_that_are_never_drafted_are_seen() -> None:
    probs = rows(3000, 12, vocab=64, sharpness=1.0).softmax(-1)
    ids = sample(probs * (torch.arange(64) >= 4))
    with pytest.raises(ConformanceError, match="What fits them best: frequencies off by id"):
        check_draft_contract(ids, draft_probs=probs)


def test_rows_need_not_add_up_to_1() -> None:
    probs = SHARED.softmax(-1)
    check_draft_contract(sample(probs), draft_probs=0.9 * probs)


def test_processed_rows_of_a_raw_draw() -> None:
    """The other way round: a token that the filters exclude settles it alone."""
    ids = sample(SHARED.softmax(-1))
    with pytest.raises(ConformanceError, match="no probability in its declared row"):
        check_draft_contract(ids, draft_logits=SHARED, sampling=SamplingParams(top_k=5))


def test_tokens_are_numbered_through_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(q_contract, "CHUNK_ENTRIES", 5 * VOCAB)
    probs = SHARED.softmax(-1)
    ids = sample(probs)
    ids[7] = VOCAB
    with pytest.raises(ConformanceError, match=f"token {VOCAB}, drafted as number 7, has no probability"):
        check_draft_contract(ids, draft_probs=probs)


def test_a_token_beyond_the_declared_rows() -> None:
    ids = sample(SHARED.softmax(-1))
    ids[7] = VOCAB
    with pytest.raises(ConformanceError, match=f"token {VOCAB}, drafted as number 7, has no probability"):
        check_draft_contract(ids, draft_logits=SHARED)


def test_sampled_drafts_taken_for_one_hot() -> None:
    probs = rows(3, 5).softmax(-1)
    repeats = torch.stack([sample(probs, seed) for seed in range(20)])
    with pytest.raises(ConformanceError, match="3 of 3 positions differ"):
        check_draft_contract(repeats)
    check_draft_contract(probs.argmax(-1).expand(20, -1))
    one_hot = torch.nn.functional.one_hot(probs.argmax(-1), VOCAB).float().expand(20, -1, -1)
    with pytest.raises(ConformanceError, match="no probability"):
        check_draft_contract(repeats, draft_probs=one_hot)


def test_a_cdf_in_bfloat16_is_seen() -> None:
    """Behind half of the mass its steps are 2^-8 wide: of a thousand entries most are never drawn, others too often."""
    probs = rows(600, 6, vocab=1000, sharpness=1.0).softmax(-1)
    u = torch.rand(600, 1, generator=support.generator(7))
    edges = probs.cumsum(1).bfloat16()
    ids = torch.searchsorted(edges.float(), u * edges[:, -1:].float()).clamp(max=999)[:, 0]
    with pytest.raises(ConformanceError, match="inverse CDF in bfloat16"):
        check_draft_contract(ids, draft_probs=probs)


def test_rounded_rows_are_declared_as_they_are() -> None:
    """bfloat16 rows are fine if they are what tokens were drawn from."""
    probs = rows(3000, 8).softmax(-1).bfloat16()
    check_draft_contract(sample(probs.float()), draft_probs=probs)


def test_chunks_and_placeholders_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = sample(law(SHARED, SamplingParams(temperature=0.8)))
    ids[::7] = -1
    messages = []
    for entries in (1 << 22, 3 * VOCAB):
        monkeypatch.setattr("acceptlib.testing.q_contract.CHUNK_ENTRIES", entries)
        monkeypatch.setattr("acceptlib.testing.q_contract.FALSE_ALARM_RATE", 1.0)
        with pytest.raises(ConformanceError) as caught:
            check_draft_contract(ids, draft_probs=SHARED.softmax(-1))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{int((ids >= 0).sum())} drafted tokens")
    assert FALSE_ALARM_RATE == 1e-9


def test_what_is_learned_goes_on_from_chunk_to_chunk() -> None:
    q = SHARED[:40].double().softmax(-1)
    ids = sample(SHARED[:40].mul(0.5).softmax(-1))
    whole, parts = _Bets(VOCAB), _Bets(VOCAB)
    whole.place(q, ids)
    for some in (slice(0, 15), slice(15, 16), slice(16, 40)):
        parts.place(q[some], ids[some])
    assert parts.gains == pytest.approx(whole.gains)


@pytest.mark.parametrize("entries", [2 * VOCAB, 1], ids=["two-rows", "less-than-a-row"])
def test_a_row_of_nan_is_numbered_through_all_chunks(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(q_contract, "CHUNK_ENTRIES", entries)
    probs = SHARED[:8].softmax(-1)
    ids = probs.argmax(-1)
    probs[5] = torch.nan
    with pytest.raises(InputError, match="the token drafted as number 5: expected probabilities, got NaN"):
        check_draft_contract(ids, draft_probs=probs)


def test_rows_of_more_entries_than_cells_double_to() -> None:
    check_draft_contract(torch.tensor([5]), draft_probs=torch.full((1, 1 << 16), 2.0**-16))


def test_the_factor_between_temperatures_is_named() -> None:
    ids = sample((SHARED / 0.5).softmax(-1))
    with pytest.raises(ConformanceError, match=r"a lower temperature .*, by a factor of about 0\.5"):
        check_draft_contract(ids, draft_logits=SHARED)


def test_rows_that_require_grad() -> None:
    logits = SHARED[:5].clone().requires_grad_()
    check_draft_contract(SHARED[:5].argmax(-1)[:, None], draft_logits=logits[:, None], sampling=SamplingParams(top_k=1))


def test_one_token_is_no_repeated_drafting() -> None:
    with pytest.raises(InputError, match=r"expected \[R, ...\], R times the same drafting"):
        check_draft_contract(torch.tensor(3))


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (torch.empty(0, 4, dtype=torch.int64), None),
        (torch.empty(4, 0, dtype=torch.int64), None),
        (torch.empty(1, 0, dtype=torch.int64), None),
        (torch.full((4, 2), -1), None),
        (torch.empty(0, dtype=torch.int64), torch.empty(0, VOCAB)),
        (torch.full((3,), -1), SHARED[:3].softmax(-1)),
    ],
    ids=["no-repeats", "no-positions", "one-repeat-of-none", "placeholders", "no-rows", "placeholders-with-rows"],
)
def test_nothing_drafted_proves_nothing(ids: torch.Tensor, rows: torch.Tensor | None) -> None:
    with pytest.raises(InputError, match="expected at least one id >= 0"):
        check_draft_contract(ids, draft_probs=rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_probs": SHARED, "draft_logits": SHARED}, "at most one"),
        ({"draft_probs": SHARED, "sampling": SamplingParams(top_k=3)}, "draft_logits"),
        ({"draft_probs": SHARED}, "draft_probs: expected probabilities, got -"),
        ({"draft_probs": -SHARED.softmax(-1)}, "draft_probs: expected probabilities, got -"),
        ({"draft_logits": SHARED * float("nan")}, "the token drafted as number 0: expected probabilities, got NaN"),
        ({"draft_probs": SHARED.tolist()}, "draft_probs: expected a torch.Tensor, got list"),
        ({"draft_token_ids": [1], "draft_probs": SHARED}, "draft_token_ids: expected a torch.Tensor, got list"),
        ({"draft_token_ids": SHARED.argmax(-1) * 1.0, "draft_probs": SHARED}, "expected integers, got torch.float32"),
        ({"draft_token_ids": SHARED.argmax(-1) > 3, "draft_probs": SHARED}, "expected integers, got torch.bool"),
        ({"draft_logits": SHARED.double()}, "draft_logits: expected dtype float32"),
        ({"draft_logits": SHARED[0]}, r"draft_logits: expected \[B, V\] or \[B, n, V\] with V >= 1, got"),
        ({"draft_logits": SHARED[:, :0]}, r"draft_logits: .* with V >= 1, got \[400, 0\]"),
        ({"draft_probs": torch.tensor(1.0)}, r"draft_probs: expected \[\.\.\., V\] with V >= 1, got \[\]"),
        ({"draft_logits": SHARED, "sampling": 5}, r"sampling: expected an acceptlib\.SamplingParams, got int"),
        ({"draft_probs": SHARED[:5]}, r"expected \[5\], a token a row, got \[400\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_draft_contract(**{"draft_token_ids": SHARED.argmax(-1), **arguments})  # type: ignore[arg-type]


def test_one_run_shows_nothing() -> None:
    with pytest.raises(InputError, match="expected at least 2 repeats of the same drafting, got 1"):
        check_draft_contract(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize(("factor", "passes"), [(0.99, True), (1.01, False)])
def test_the_mean_of_all_bets_counts(factor: float, *, passes: bool) -> None:
    """Not their sum, which honest tokens may let grow with the number of bets."""
    bets = _Bets(VOCAB)
    bets.place(torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64), torch.tensor([3]))
    bets.gains = dict.fromkeys(bets.gains, math.log(factor / FALSE_ALARM_RATE))
    with nullcontext() if passes else pytest.raises(ConformanceError, match="1 drafted tokens did not come from"):
        bets.settle()
