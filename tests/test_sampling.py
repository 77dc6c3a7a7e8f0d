"""Sampling parameters inside verification: results, masks, log-probabilities, bad input, and the law that comes out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support
import torch
from sampling_cases import VOCAB, named, normal, packed, params
from support import FAITHFUL, Request, layouts, settings

import acceptlib
from acceptlib import LogitBias, SamplingParams, VerifyResult, exact
from acceptlib.engine.process import law
from acceptlib.errors import InputError, StatusError
from acceptlib.exact import oracle
from acceptlib.testing.simulation import FALSE_ALARM_Z, chi_square_z, counts

CPU = torch.device("cpu")
LOSSLESS = [name for name in acceptlib.available() if acceptlib.create(name).traits.guarantee == "lossless"]


def batch(count: int, vocab: int = VOCAB, seed: int = 0) -> list[Request]:
    """Return requests of 0 to 3 drafted tokens, drawn from their own draft."""
    return [support.ordinary(b % 4, vocab, seed=seed + b) for b in range(count)]


def mixture(requests: list[Request], layout: str) -> dict[str, SamplingParams]:
    """Return parameters of every kind, different in each request, for both models."""
    count = len(requests)
    rows = {
        model: [support.generator(b).manual_seed(70 * b + len(model)) for b in range(count)]
        for model in ("target", "draft")
    }
    vocab = requests[0].p.shape[1]
    masks = {}
    for model, extra in (("target", 1), ("draft", 0)):
        per = [torch.rand(r.n + extra, vocab, generator=g) < 0.7 for r, g in zip(requests, rows[model], strict=True)]
        if layout == "ragged":
            masks[model] = packed(torch.cat(per))
        else:
            most = max(r.n for r in requests) + extra
            masks[model] = packed(torch.stack([torch.nn.functional.pad(m, (0, 0, 0, most - len(m))) for m in per]))
    generator = support.generator(8)
    shared: dict[str, Any] = {
        "temperature": torch.linspace(0, 2, count),
        "top_k": torch.arange(count) * 3,
        "top_p": torch.linspace(0.3, 1, count),
        "min_p": torch.linspace(0, 0.2, count),
        "logit_bias": LogitBias(
            torch.randint(-1, vocab, (count, 2), generator=generator).sort(1).values, torch.ones(count, 2)
        ),
    }
    return {
        "sampling": SamplingParams(**shared, allowed_token_bitmask=masks["target"]),
        "draft_sampling": SamplingParams(**shared, allowed_token_bitmask=masks["draft"]),
    }


def processed(requests: list[Request], sampling: dict[str, SamplingParams]) -> list[Request]:
    """Return requests whose rows are the laws, taken one request at a time from ragged parameters."""
    laws, target_row, draft_row = [], 0, 0
    for b, request in enumerate(requests):
        target = law_of(request.p.log(), sampling["sampling"], b, target_row)
        draft = law_of(request.q.log(), sampling["draft_sampling"], b, draft_row) if request.n else request.q
        laws.append(Request(request.ids, target, draft))
        target_row, draft_row = target_row + request.n + 1, draft_row + request.n
    return laws


def law_of(logits: torch.Tensor, sampling: SamplingParams, b: int, row: int) -> torch.Tensor:
    one = {name: getattr(sampling, name)[b : b + 1] for name in ("temperature", "top_k", "top_p", "min_p")}
    bias = LogitBias(sampling.logit_bias.token_ids[b : b + 1], sampling.logit_bias.values[b : b + 1])
    mask = sampling.allowed_token_bitmask[None, row : row + len(logits)]
    return law(logits[None], SamplingParams(**one, logit_bias=bias, allowed_token_bitmask=mask))[0]


# Verification


@layouts
@settings
def test_verification_is_that_of_the_processed_rows(setting: str, layout: str) -> None:
    """From logits with parameters as from the laws themselves, token for token and bit for bit."""
    if setting == "greedy":
        return  # its argmax is that of the logits, filters aside
    requests = batch(16)
    laws = processed(requests, mixture(requests, "ragged"))
    found = support.verify(setting, requests, layout, "logits", **mixture(requests, layout), logprobs=True)
    wanted = support.verify(setting, laws, layout, "probs", logprobs=True)
    for name in ("output_token_ids", "num_accepted", "num_emitted", "status"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=1e-6, atol=1e-6, equal_nan=True)


@settings
def test_ragged_is_padded(setting: str) -> None:
    requests = batch(16)
    support.same(
        support.verify(setting, requests, "ragged", "logits", **mixture(requests, "ragged"), logprobs=True),
        support.verify(setting, requests, "padded", "logits", **mixture(requests, "padded"), logprobs=True),
    )


@pytest.mark.parametrize("setting", ["rejection", "block", "fly"])
def test_memory_does_not_matter(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows processed all at once or a chunk at a time, where they lie or gathered, contiguous or not."""
    requests = batch(16)
    sampling = mixture(requests, "padded")
    wanted = support.verify(setting, requests, "padded", "logits", **sampling, logprobs=True)
    for module in ("rows", "torch_engine"):
        monkeypatch.setattr(f"acceptlib.engine.{module}.KEPT_BYTES", 0)
    monkeypatch.setattr("acceptlib.engine.torch_engine.SCRATCH_BYTES", 3 * 4 * VOCAB)
    support.same(support.verify(setting, requests, "padded", "logits", **sampling, logprobs=True), wanted)
    arguments = support.lay_out(requests, "padded", "logits")
    for name in ("target_logits", "draft_logits"):
        arguments[name] = arguments[name].transpose(0, 2).contiguous().transpose(0, 2)
    result = support.create(setting).verify(**arguments, **sampling, logprobs=True, rng=support.streams(range(16)))
    support.same(result, wanted)


def test_the_draft_shares_the_parameters_but_for_the_mask() -> None:
    requests = batch(16)
    both = mixture(requests, "ragged")
    unmasked = {
        name: getattr(both["sampling"], name) for name in ("temperature", "top_k", "top_p", "min_p", "logit_bias")
    }
    shared = support.verify("rejection", requests, "ragged", "logits", sampling=both["sampling"])
    stated = support.verify(
        "rejection",
        requests,
        "ragged",
        "logits",
        sampling=both["sampling"],
        draft_sampling=SamplingParams(**unmasked),
    )
    support.same(shared, stated)


def test_argmax_is_that_of_the_biased_and_masked_logits() -> None:
    requests = batch(12)
    sampling = mixture(requests, "ragged")["sampling"]
    result = support.verify("greedy", requests, "ragged", "logits", sampling=sampling)
    row = 0
    for b, request in enumerate(requests):
        greedy = SamplingParams(
            temperature=torch.zeros(1), top_k=sampling.top_k[b : b + 1], top_p=sampling.top_p[b : b + 1],
            min_p=sampling.min_p[b : b + 1], allowed_token_bitmask=sampling.allowed_token_bitmask,
            logit_bias=LogitBias(sampling.logit_bias.token_ids[b : b + 1], sampling.logit_bias.values[b : b + 1]),
        )  # fmt: skip
        best = []
        for i in range(request.n + 1):
            mask = sampling.allowed_token_bitmask[row + i][None]
            one = SamplingParams(temperature=0.0, allowed_token_bitmask=mask, logit_bias=greedy.logit_bias)
            best.append(int(law(request.p[i : i + 1].log(), one).argmax()))
        row += request.n + 1
        emitted = support.tokens(result, b)
        assert emitted == best[: len(emitted)]


def test_a_masked_step_without_drafts_reads_no_row_whose_bonus_is_given() -> None:
    mask = torch.zeros(2, 0, 2, dtype=torch.int32)
    found = support.create("greedy").verify(
        torch.zeros(2, 0, dtype=torch.int64),
        target_logits=torch.zeros(2, 0, 40),
        bonus_token_ids=torch.tensor([3, 4]),
        sampling=SamplingParams(allowed_token_bitmask=mask),
        rng=0,
    )
    assert found.output_token_ids.tolist() == [[3], [4]]


def test_argmax_of_long_rows_is_that_of_the_masked_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such rows are gone through one by one where nothing acts on them."""
    requests = batch(12)
    sampling = SamplingParams(allowed_token_bitmask=mixture(requests, "ragged")["sampling"].allowed_token_bitmask)
    wanted = support.verify("typical", requests, "ragged", "logits", sampling=sampling)
    monkeypatch.setattr("acceptlib.engine.rows.LONG_ROW", 0)
    support.same(support.verify("typical", requests, "ragged", "logits", sampling=sampling), wanted)


class LargestLeft(acceptlib.AcceptanceStrategy):
    """Takes the largest entry of the residual, of the target's row where that is empty, and of the bonus row."""

    name = "largest-left"
    traits = acceptlib.Traits(guarantee="lossy", bound="none", recovered="argmax", bonus="argmax")

    @acceptlib.rule
    def accept() -> float:
        """Reject."""
        return 0.0

    @acceptlib.rule
    def residual(p: Any, q: Any) -> Any:
        """Return the weight of each entry."""
        return p - q


@pytest.mark.parametrize("num_draft_tokens", [0, 1])
def test_argmax_beside_a_residual_is_that_of_the_logits(num_draft_tokens: int) -> None:
    """The lowest of equal logits, of which top-p keeps the highest; and what the softmax rounds to one stays two."""
    equal, close = [1.0, 3.0, 3.0, 3.0], [0.0, 2.0, 2.0 + 2**-22, 1.0]
    logits = torch.tensor([equal, close])[:, None].expand(-1, num_draft_tokens + 1, -1)
    ids = torch.zeros(2, num_draft_tokens, dtype=torch.int64)
    sampling = SamplingParams(top_p=torch.tensor([0.3, 1.0]), temperature=torch.tensor([1.0, 50.0]))
    assert law(logits[:, 0], sampling)[0].tolist() == [0, 0, 0, 1]
    result = LargestLeft().verify(
        ids, target_logits=logits, draft_logits=logits[:, :-1] if num_draft_tokens else None, sampling=sampling, rng=0
    )
    assert result.output_token_ids[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("width", [VOCAB - 40, VOCAB + 24])
def test_a_draft_of_another_vocabulary(width: int) -> None:
    """Its rows are processed at their own width, and a bias for what it lacks is passed over."""
    requests = [support.ordinary(2, VOCAB, seed=b) for b in range(8)]
    logits = 3 * normal(8, 2, width)
    sampling = SamplingParams(
        top_k=180, top_p=0.9, logit_bias=LogitBias(torch.tensor([[5, VOCAB - 1]]).repeat(8, 1), torch.ones(8, 2))
    )
    arguments = support.lay_out(requests, "padded", "logits") | {"draft_logits": logits, "sampling": sampling}
    q = law(logits, sampling)
    given = {**arguments, "draft_logits": None, "draft_probs": q}
    results = [
        acceptlib.create("rejection").verify(**each, rng=support.streams(range(8))) for each in (arguments, given)
    ]
    support.same(*results)
    assert not results[0].status.any()


@pytest.mark.parametrize("width", [VOCAB - 40, VOCAB + 24])
def test_a_draft_of_another_vocabulary_is_not_masked(width: int) -> None:
    masks = packed(torch.rand(64, 3, VOCAB, generator=support.generator(3)) < 0.7)
    arguments = support.lay_out([support.ordinary(2, VOCAB, seed=b) for b in range(64)], "padded", "logits")
    arguments |= {
        "draft_logits": 3 * normal(64, 2, width),
        "sampling": SamplingParams(temperature=0.7, allowed_token_bitmask=masks),
    }
    results = [
        acceptlib.create("rejection").verify(**arguments, draft_sampling=draft_sampling, rng=support.streams(range(64)))
        for draft_sampling in (None, SamplingParams(temperature=0.7))
    ]
    support.same(*results)


def test_a_k_between_two_vocabularies_cuts_the_larger() -> None:
    """Of the draft's 12 entries the last is cut, and with no probability there the drafted token stands."""
    target = torch.tensor([0.1] * 9 + [1e-3]).log().expand(1, 2, 10)
    draft = torch.tensor([1.0] * 11 + [0.5])[[*range(9), 11, 9, 10]].log()[None, None]
    arguments = {"target_logits": target, "draft_logits": draft, "sampling": SamplingParams(top_k=11)}
    uniforms = acceptlib.Uniforms(accept=torch.full((1, 1), 0.5, dtype=torch.float64), emit=torch.zeros(1).long())
    result = acceptlib.create("rejection").verify(torch.tensor([[9]]), **arguments, uniforms=uniforms)
    assert result.num_accepted.tolist() == [1]


ADVERSARIAL_VOCAB = 33


def adversarial_masks() -> torch.Tensor:
    """Return masks [n, V] that leave little, or what the target avoids; each leaves something."""
    ids = torch.arange(ADVERSARIAL_VOCAB)
    masks = [ids == 0, ids == ADVERSARIAL_VOCAB - 1, ids == 31, ids % 2 == 0, ids % 2 == 1, ids >= 31]
    masks += [ids < 3, ids != 0, ids != ADVERSARIAL_VOCAB - 1, ids > -1]
    return torch.stack(masks)


@pytest.mark.parametrize("setting", FAITHFUL)
def test_no_draw_returns_a_masked_token(setting: str) -> None:
    """Millions of draws: a leak of any weight onto forbidden tokens, or a draw that takes an empty cell, would show."""
    masks = adversarial_masks()
    generator = support.generator(9)
    count, most = 100_000, 1
    target = torch.randn(count, most + 1, ADVERSARIAL_VOCAB, generator=generator) * 4
    choice = torch.randint(len(masks), (count, most + 1), generator=generator)
    allowed = masks[choice]
    target[: count // 3] = torch.where(allowed[: count // 3], target[: count // 3] - 200, target[: count // 3])
    target[count // 3 : count // 2] = target[count // 3 : count // 2].round()
    draft = target[:, :most] + torch.randn(count, most, ADVERSARIAL_VOCAB, generator=generator)
    ids = torch.randint(ADVERSARIAL_VOCAB, (count, most), generator=generator)
    emitted = 0
    for sampling in (
        SamplingParams(allowed_token_bitmask=packed(allowed)),
        SamplingParams(allowed_token_bitmask=packed(allowed), temperature=0.0),
        SamplingParams(allowed_token_bitmask=packed(allowed), temperature=1.5, top_k=3, top_p=0.9),
        SamplingParams(allowed_token_bitmask=packed(allowed), top_p=0.999999, min_p=1e-6),
    ):
        result = support.create(setting).verify(
            ids, target_logits=target, draft_logits=draft, sampling=sampling, rng=generator
        )
        assert not result.status.any()
        tokens = result.output_token_ids.long()
        stands = allowed.gather(2, tokens.clamp(min=0)[..., None])[..., 0]
        assert bool((stands | (tokens < 0)).all())
        emitted += int(result.num_emitted.sum())
    assert emitted > 4 * count


# Log-probabilities


@layouts
def test_raw_and_processed_logprobs(layout: str) -> None:
    requests = batch(16)
    sampling = mixture(requests, "ragged")
    laws = processed(requests, sampling)
    result = support.verify("rejection", requests, layout, "logits", **mixture(requests, layout), logprobs=True)
    for b, request in enumerate(requests):
        emitted = support.tokens(result, b)
        at = (range(len(emitted)), emitted)
        raw = request.p.log().double().log_softmax(-1)[at]
        torch.testing.assert_close(result.raw_logprobs[b, : len(emitted)].double(), raw, rtol=0, atol=3e-6)
        torch.testing.assert_close(result.logprobs[b, : len(emitted)], laws[b].p[at].log(), rtol=0, atol=1e-6)
        assert result.raw_logprobs[b, len(emitted) :].isnan().all()


@pytest.mark.parametrize("form", ["probs", "logits"])
def test_without_parameters_raw_and_processed_are_one(form: str) -> None:
    result = support.verify("rejection", batch(8), "ragged", form, logprobs=True)
    assert torch.equal(result.logprobs.nan_to_num(), result.raw_logprobs.nan_to_num())


def test_a_raw_logprob_does_not_underflow() -> None:
    """A mask can leave what the raw row all but excludes."""
    logits = torch.tensor([[[0.0, -400.0]]])
    sampling = SamplingParams(allowed_token_bitmask=torch.tensor([[[2]]], dtype=torch.int32))
    ids = torch.empty(1, 0, dtype=torch.int64)
    result = acceptlib.create("rejection").verify(ids, target_logits=logits, sampling=sampling, rng=0, logprobs=True)
    assert (result.logprobs.item(), result.raw_logprobs.item()) == (0.0, -400.0)


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_a_raw_logprob_beside_a_large_logit(size: float) -> None:
    """A logarithm is not added to a maximum next to which it would be lost."""
    logits = torch.tensor([[[size, -size, size]]])
    ids = torch.empty(1, 0, dtype=torch.int64)
    sampling = SamplingParams(top_k=1)
    result = acceptlib.create("rejection").verify(ids, target_logits=logits, sampling=sampling, rng=0, logprobs=True)
    assert result.raw_logprobs.item() == pytest.approx(-math.log(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_softmax_has_no_raw_logprobs(bad: float) -> None:
    logits = torch.tensor([[[0.0, bad, 2.0]]])
    sampling = SamplingParams(allowed_token_bitmask=torch.tensor([[[1]]], dtype=torch.int32))
    ids = torch.empty(1, 0, dtype=torch.int64)
    result = acceptlib.create("rejection").verify(ids, target_logits=logits, sampling=sampling, rng=0, logprobs=True)
    assert result.logprobs.item() == 0
    assert result.raw_logprobs.isnan().all()


# The law


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("values", [(0.7, 3, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.3, 0, 1.0, 0.3), (0.8, 3, 0.7, 0.1)])
def test_lossless_rules_have_exactly_the_law_of_the_processed_target(
    name: str, values: tuple[float, int, float, float]
) -> None:
    for seed, allowed in ((1, None), (2, {0, 1, 3}), (3, {2, 4})):
        target, draft = (3 * normal(3, 5, seed=seed)).round(), (3 * normal(2, 5, seed=seed + 10)).round()
        p = torch.stack([oracle.processed(row.tolist(), **named(values), allowed=allowed) for row in target])
        q = torch.stack([oracle.processed(row.tolist(), **named(values)) for row in draft])
        found = exact.complete(exact.law(acceptlib.create(name), p, q), p, 3)
        wanted = p[0][:, None, None] * p[1][:, None] * p[2]
        assert float((found - wanted).abs().max()) < 1e-12
        assert wanted[wanted > 0].numel() < 125  # something was filtered


@pytest.mark.parametrize("name", LOSSLESS)
def test_emitted_tokens_follow_the_processed_target(name: str) -> None:
    """Chi-square of the engine, joint over a step's tokens and plain samples after it."""
    trials, vocab = 60_000, 6
    target, draft = 2 * normal(3, vocab, seed=31), 2 * normal(2, vocab, seed=32)
    values = (1.4, 5, 0.93, 0.02)
    sampling = params(*values)
    q = law(draft[None], sampling)[0]
    generator = support.generator(33)
    ids = torch.stack([torch.multinomial(row, trials, replacement=True, generator=generator) for row in q], 1)
    result = acceptlib.create(name).verify(
        ids,
        target_logits=target.expand(trials, -1, -1),
        draft_logits=draft.expand(trials, -1, -1),
        sampling=sampling,
        rng=generator,
    )
    tokens = result.output_token_ids.long()
    p = torch.stack([oracle.processed(row.tolist(), **named(values)) for row in target])
    for position in range(3):  # a step that stopped is continued by plain sampling
        fresh = torch.multinomial(p[position], trials, replacement=True, generator=generator)
        tokens[:, position] = torch.where(tokens[:, position] < 0, fresh, tokens[:, position])
    wanted = p[0][:, None, None] * p[1][:, None] * p[2]
    assert chi_square_z(counts(tokens, vocab), wanted) < FALSE_ALARM_Z
    unprocessed = target.double().softmax(-1)
    wrong = unprocessed[0][:, None, None] * unprocessed[1][:, None] * unprocessed[2]
    assert chi_square_z(counts(tokens, vocab), wrong) > FALSE_ALARM_Z


# Bad input


I32, I64 = torch.int32, torch.int64
WRONG = {
    "top_k-shape": (SamplingParams(top_k=torch.ones(3, dtype=I64)), ["sampling.top_k", "[2]", "[3]"]),
    "top_k-dtype": (SamplingParams(top_k=torch.ones(2)), ["sampling.top_k", "int32 or int64", "float32"]),
    "top_p-shape": (SamplingParams(top_p=torch.ones(2, 1)), ["sampling.top_p", "[2]", "[2, 1]"]),
    "min_p-dtype": (SamplingParams(min_p=torch.ones(2, dtype=I64)), ["sampling.min_p", "float32", "int64"]),
    "min_p-device": (SamplingParams(min_p=torch.ones(2, device="meta")), ["sampling.min_p", "cpu", "meta"]),
    "mask-shape": (
        SamplingParams(allowed_token_bitmask=torch.zeros(5, 1, dtype=I32)),
        ["sampling.allowed_token_bitmask", "[5, 2]", "[5, 1]"],
    ),
    "mask-dtype": (
        SamplingParams(allowed_token_bitmask=torch.zeros(5, 2, dtype=torch.bool)),
        ["sampling.allowed_token_bitmask", "int32", "bool"],
    ),
    "bias-ids": (
        SamplingParams(logit_bias=LogitBias(torch.zeros(3, 1, dtype=I64), torch.zeros(3, 1))),
        ["sampling.logit_bias.token_ids", "[2, n]", "[3, 1]"],
    ),
    "bias-values": (
        SamplingParams(logit_bias=LogitBias(torch.zeros(2, 1, dtype=I64), torch.zeros(2, 2))),
        ["sampling.logit_bias.values", "[2, 1]", "[2, 2]"],
    ),
}


@pytest.mark.parametrize(("sampling", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_an_error(sampling: SamplingParams, words: list[str]) -> None:
    requests = [support.ordinary(2, 37, 0), support.ordinary(1, 37, 1)]
    with pytest.raises(InputError) as caught:
        support.verify("rejection", requests, "ragged", "logits", sampling=sampling)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("side", ["sampling", "draft_sampling"])
def test_parameters_beside_probabilities_are_an_error(side: str) -> None:
    requests = [support.ordinary(2, 37, 0)]
    mask = torch.full((3 if side == "sampling" else 2, 2), -1, dtype=I32)
    with pytest.raises(InputError, match=f"{side} acts on"):
        support.verify("rejection", requests, "ragged", **{side: SamplingParams(allowed_token_bitmask=mask)})


BAD_ENTRIES = {
    "top_k": torch.tensor([3, -1, 0, -7]),
    "top_p": torch.tensor([0.5, 0.0, 1.0, math.nan]),
    "top_p-large": torch.tensor([0.5, 1.1, 1.0, -math.inf]),
    "min_p": torch.tensor([0.5, -0.1, 0.0, math.nan]),
    "min_p-large": torch.tensor([0.5, 1.1, 1.0, math.inf]),
    "logit_bias": LogitBias(torch.tensor([[36], [37], [-1], [2**31 - 1]]), torch.ones(4, 1)),
    "logit_bias-one-of-two": LogitBias(torch.tensor([[36, 1], [1, 37], [-1, 2], [2**31 - 1, 3]]), torch.ones(4, 2)),
}


@layouts
@pytest.mark.parametrize("side", ["sampling", "draft_sampling"])
@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_a_bad_entry_marks_its_request(name: str, side: str, layout: str) -> None:
    requests = batch(4, vocab=37)
    bad = BAD_ENTRIES[name]
    result = support.verify(
        "rejection", requests, layout, "logits", **{side: SamplingParams(**{name.split("-", maxsplit=1)[0]: bad})}
    )
    assert result.status.tolist() == [0, 5, 0, 5]
    assert result.num_emitted.tolist()[1::2] == [0, 0]
    with pytest.raises(
        StatusError, match=r"request 1, position 0 and request 3, position 0.*: a sampling parameter is out of range: "
    ):
        result.raise_for_status()
    good = (
        LogitBias(bad.token_ids.clamp(max=36), bad.values) if isinstance(bad, LogitBias) else bad[[0, 0, 2, 2]].clone()
    )
    wanted = support.verify(
        "rejection", requests, layout, "logits", **{side: SamplingParams(**{name.split("-", maxsplit=1)[0]: good})}
    )
    support.same(result, wanted, rows=[0, 2], to=[0, 2])


@pytest.mark.parametrize("setting", ["greedy", "synthetic", "typical"])
def test_parameters_of_rows_that_are_never_read_are_not_checked(setting: str) -> None:
    """Whatever is said of the draft, a strategy that has no use for its rows does not look at it."""
    requests = batch(4, vocab=37)
    bad = SamplingParams(top_k=torch.tensor([3, -1, 0, -7]))
    found = support.verify(setting, requests, "ragged", "logits", draft_sampling=bad)
    support.same(found, support.verify(setting, requests, "ragged", "logits"))


@layouts
@settings
def test_an_all_masked_row_marks_its_request(setting: str, layout: str) -> None:
    requests = [support.standing(2, 37, seed=b) for b in range(3)]
    allowed = torch.ones(3, 3, 37, dtype=torch.bool)
    allowed[1, 1] = False
    mask = packed(allowed)
    mask = mask if layout == "padded" else mask.flatten(0, 1)
    for filters in ({}, {"top_k": 5}, {"top_p": 0.9}):
        sampling = SamplingParams(allowed_token_bitmask=mask, **filters)
        result = support.verify(setting, requests, layout, "logits", sampling=sampling, uniforms=support.fixed(3, 2))
        unread = setting == "synthetic"  # rows that a rule never reads are not checked
        assert result.status.tolist() == [0, 0 if unread else 1, 0], filters
        assert result.num_accepted.tolist() == [2, 2 if unread else 1, 2]
        assert result.num_emitted.tolist() == [3, 3 if unread else 1, 3]


def test_out_needs_both_kinds_of_logprobs() -> None:
    out = VerifyResult.empty(1, 2, CPU, logprobs=True)
    lacking = VerifyResult(out.output_token_ids, out.num_accepted, out.num_emitted, out.status, out.logprobs)
    with pytest.raises(InputError, match=r"out\.raw_logprobs: expected a tensor"):
        support.verify("rejection", [support.ordinary(2, 37, 0)], logprobs=True, out=lacking)
