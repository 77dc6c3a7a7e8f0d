"""Empty residuals, vocabularies of two sizes, masked tokens, garbage: no token comes out that must not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support import ALMOST_ONE, FAITHFUL, SETTINGS, Request, forms, layouts, settings

from acceptlib import Rng, SamplingParams, Uniforms
from acceptlib.errors import StatusError
from acceptlib.result import Status

pytestmark = pytest.mark.usefixtures("remembered")

# Nothing left, nothing drafted


@pytest.mark.parametrize("setting", ["block", "fly", "mixture", "rejection"])
def test_zero_residual_draws_from_the_target(setting: str) -> None:
    """p == q, and a drafted token that neither gives any probability: the draw is the one of a bonus row."""
    p = torch.tensor([[0.0, 0.1, 0.2, 0.1, 0.0, 0.2, 0.1, 0.3, 0.0]])  # none at both ends, where a failed search ends
    drafted = Request(torch.tensor([4]), p.expand(2, -1), p)
    bits = [0, -1, 2**63 - 1, -(2**63), *range(-(2**63), 2**63, 2**63 // 500)]
    emit = torch.tensor(bits)
    uniforms = Uniforms(accept=torch.full((len(bits), 1), 0.5, dtype=torch.float64), emit=emit)
    result = support.verify(setting, [drafted] * len(bits), uniforms=uniforms)
    bonus = support.verify(
        setting,
        [Request(torch.empty(0, dtype=torch.int64), p, p[:0])] * len(bits),
        uniforms=Uniforms(accept=torch.empty(len(bits), 0, dtype=torch.float64), emit=emit),
    )
    assert not result.num_accepted.any()
    assert not result.status.any()
    assert torch.equal(result.output_token_ids[:, 0], bonus.output_token_ids[:, 0])
    assert {1, 2, 3, 5, 6, 7} == {*result.output_token_ids[:, 0].tolist()}


@pytest.mark.parametrize("setting", ["block", "fly", "lenience", "mixture", "rejection"])
def test_equal_rows_accept_everything(setting: str) -> None:
    """p == q and the largest u there is."""
    requests = [support.ordinary(3, 9, seed) for seed in range(50)]
    requests = [Request(r.p[:3].argmax(-1), r.p, r.p[:3].clone()) for r in requests]
    result = support.verify(setting, requests, uniforms=support.fixed(50, 3, ALMOST_ONE, -1))
    assert result.num_accepted.tolist() == [3] * 50


@pytest.mark.parametrize("setting", ["block", "fly", "rejection"])
def test_rows_equal_but_for_rounding(setting: str) -> None:
    """h just below 1 and u above it: the residual is empty, and the draw is from p."""
    p = torch.tensor([[0.0, 0.5, 0.25, 0.25, 0.0]])
    q = p.clone()
    q[0, 1] = torch.nextafter(q[0, 1], torch.tensor(1.0))
    request = Request(torch.tensor([1]), p.expand(2, -1), q)
    for bits, token in ((0, 1), (2**62, 1), (-(2**63), 2), (-1, 3)):
        result = support.verify(setting, [request], uniforms=support.fixed(1, 1, ALMOST_ONE, bits))
        assert result.status.tolist() == [0]
        assert support.tokens(result, 0) == [token]


@pytest.mark.parametrize("setting", ["block", "rejection"])
def test_the_least_weight_there_is_is_drawn(setting: str) -> None:
    """2^-60 alone, which is 1 in the draw's integers; where a residual holds less, nothing is left, and p is drawn."""
    for weight, drawn in ((2.0**-60, {3}), (2.0**-61, {0, 1})):
        p, q = torch.tensor([[0.5, 0.499, 0.0, weight]]), torch.tensor([[0.5, 0.5, 0.0, 0.0]])
        request = Request(torch.tensor([1]), p.expand(2, -1), q)
        bits = [0, -1, 2**63 - 1, -(2**63)]
        uniforms = Uniforms(accept=torch.full((4, 1), ALMOST_ONE, dtype=torch.float64), emit=torch.tensor(bits))
        batch = support.verify(setting, [request] * 4, uniforms=uniforms)
        every = [support.fixed(1, 1, ALMOST_ONE, number) for number in bits]
        alone = [support.verify(setting, [request], "padded", uniforms=numbers) for numbers in every]
        for result in (batch, *alone):
            assert not result.num_accepted.any()
            assert not result.status.any()
        assert {*batch.output_token_ids[:, 0].tolist()} == drawn
        assert [support.tokens(one, 0) for one in alone] == batch.output_token_ids[:, :1].tolist()


@pytest.mark.parametrize("setting", ["block", "rejection"])
def test_many_weights_that_are_none_leave_nothing(setting: str) -> None:
    """Together they hold more than the least weight there is."""
    least = torch.full((1, 4096), 2.0**-61)
    p = torch.cat((torch.tensor([[0.5, 0.499]]), least), 1)
    request = Request(torch.tensor([1]), p.expand(2, -1), torch.cat((torch.tensor([[0.5, 0.5]]), 0 * least), 1))
    for bits in (0, -1, 2**63 - 1, -(2**63)):
        result = support.verify(setting, [request], uniforms=support.fixed(1, 1, ALMOST_ONE, bits))
        assert result.status.tolist() == [0]
        assert support.tokens(result, 0)[0] in {0, 1}


@pytest.mark.parametrize("q", [0.0, math.nan, -0.5, -math.inf], ids=["zero", "nan", "negative", "minus-inf"])
@pytest.mark.parametrize("setting", ["block", "fly", "lenience", "mixture", "rejection"])
def test_drafted_token_without_draft_probability_stands_iff_the_target_gives_it_any(setting: str, q: float) -> None:
    draft = torch.tensor([[q, 0.5, 0.5]])
    for probability in (1e-6, 0.3, 1.0):
        p = torch.tensor([[probability, 1 - probability, 0.0]]).expand(2, -1)
        result = support.verify(
            setting, [Request(torch.tensor([0]), p, draft)], uniforms=support.fixed(1, 1, ALMOST_ONE)
        )
        assert result.num_accepted.tolist() == [1]
    p = torch.tensor([[0.0, 0.4, 0.6]]).expand(2, -1)
    for bits in (0, -1):
        request = Request(torch.tensor([0]), p, draft)
        result = support.verify(setting, [request], uniforms=support.fixed(1, 1, 0.0, bits))
        assert result.num_accepted.tolist() == [0]
        assert support.tokens(result, 0)[0] in {1, 2}


# Vocabularies of two sizes


@forms
@layouts
@settings
def test_draft_vocabulary_smaller_than_the_target(setting: str, layout: str, form: str) -> None:
    """The draft is padded with zeros, and drafted ids in the tail are tokens as any other."""
    requests = [support.ordinary(3, 12, seed) for seed in range(40)]
    short = [Request(r.ids, r.p, torch.randn(3, 8, generator=support.generator(1)).softmax(-1)) for r in requests]
    padded = [Request(r.ids, r.p, torch.nn.functional.pad(r.q, (0, 4))) for r in short if r.q is not None]
    assert any(int(request.ids.max()) >= 8 for request in requests)
    support.same(
        support.verify(setting, short, layout, form, logprobs=True),
        support.verify(setting, padded, layout, form, logprobs=True),
    )


@layouts
def test_the_first_id_behind_a_smaller_draft_vocabulary_has_no_draft_probability(layout: str) -> None:
    request = Request(torch.tensor([2]), torch.full((2, 4), 0.25), torch.tensor([[0.25, 0.75]]))
    result = support.verify("rejection", [request], layout, uniforms=support.fixed(1, 1, ALMOST_ONE))
    assert result.num_accepted.tolist() == [1]


def test_law_over_the_tail_is_the_targets() -> None:
    """Evenly spaced bits give every recovered token as often as its share of (p - q)+, in and behind the tail."""
    p = torch.tensor([[0.125, 0.125, 0.0, 0.25, 0.5]]).expand(2, -1)
    request = Request(torch.tensor([2]), p, torch.tensor([[0.5, 0.25, 0.25]]))
    count = 1200
    steps = [2**63 * (2 * i + 1) // count for i in range(count)]  # midpoints, as unsigned words
    bits = torch.tensor([step if step < 2**63 else step - 2**64 for step in steps])
    uniforms = Uniforms(accept=torch.zeros(count, 1, dtype=torch.float64), emit=bits)
    result = support.verify("rejection", [request] * count, uniforms=uniforms)
    assert result.num_accepted.tolist() == [0] * count
    counts = torch.bincount(result.output_token_ids[:, 0], minlength=5)
    assert counts.tolist() == [0, 0, 0, count // 3, 2 * count // 3]


@layouts
@settings
def test_draft_vocabulary_larger_than_the_target(setting: str, layout: str) -> None:
    """The draft's rows are normalised over their own entries, then cut; ids behind the cut are outside."""
    requests = [support.ordinary(3, 8, seed) for seed in range(40)]
    logits = [torch.randn(3, 12, generator=support.generator(seed)) for seed in range(40)]
    wide = [Request(r.ids, r.p, rows.softmax(-1)) for r, rows in zip(requests, logits, strict=True)]
    cut = [Request(r.ids, r.p, r.q[:, :8]) for r in wide if r.q is not None]
    support.same(support.verify(setting, wide, layout), support.verify(setting, cut, layout))
    from_logits = support.lay_out(wide, layout, "logits")
    from_probs = from_logits | {"draft_probs": from_logits["draft_logits"].softmax(-1), "draft_logits": None}
    strategy = support.create(setting)
    support.same(strategy.verify(**from_logits, rng=5), strategy.verify(**from_probs, rng=5))
    wide = [support.standing(3, 8, seed) for seed in range(2)]
    wide[0].ids[1] = 9
    wide = [Request(r.ids, r.p, torch.nn.functional.pad(r.q, (0, 4), value=0.1)) for r in wide if r.q is not None]
    result = support.verify(setting, wide, layout)
    assert result.status.tolist() == [Status.INVALID_TOKEN_ID, 0]
    assert support.tokens(result, 0) == wide[0].ids[:1].tolist()


@pytest.mark.parametrize("draft", [True, False], ids=["draft", "ngram"])
@forms
@layouts
@settings
def test_vocabulary_of_one(setting: str, layout: str, form: str, draft: bool) -> None:  # noqa: FBT001
    requests = [
        Request(torch.zeros(n, dtype=torch.int64), torch.ones(n + 1, 1), torch.ones(n, 1) if draft else None)
        for n in (2, 0, 3)
    ]
    result = support.verify(setting, requests, layout, form)
    assert [support.tokens(result, b) for b in range(3)] == [[0] * 3, [0], [0] * 4]
    assert result.status.tolist() == [0, 0, 0]


# Masked tokens


def masked_rows(vocab: int, source: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs p, q in which some tokens have p = 0, chosen to lead a careless draw onto them."""
    uniform = torch.rand(vocab, generator=source)
    ends = uniform.clone()
    ends[[0, -1]] = 0
    last = uniform.clone()
    last[-3:] = 0
    half = uniform * (torch.arange(vocab) % 2)
    point = torch.zeros(vocab)
    point[vocab // 2] = 1
    faint = point.clone()
    faint[1] = 1e-12
    below = point.clone()
    below[1] = 1e-30
    pairs = []
    for row in (ends, last, half, point, faint, below):
        p = row / row.sum()
        on_masked = (p == 0).float() / (p == 0).sum()
        nearly = p.clone()
        nearly[int(p.argmax())] = torch.nextafter(p.max(), torch.tensor(1.0))
        pairs += [(p, q) for q in (p, nearly, on_masked, (p + on_masked) / 2, torch.full((vocab,), 1 / vocab))]
    return pairs


@pytest.mark.parametrize("draft", [True, False], ids=["draft", "ngram"])
@forms
@settings
def test_masked_token_is_never_emitted(setting: str, form: str, draft: bool) -> None:  # noqa: FBT001
    """2 * 10^5 draws a setting. `synthetic` may keep what was drafted; what it draws is never masked."""
    source = support.generator(31)
    vocab, most, count = 13, 2, 50_000
    pairs = masked_rows(vocab, source)
    table = torch.stack([torch.stack(pair) for pair in pairs])[
        torch.randint(len(pairs), (count, most + 1), generator=source)
    ]
    p, q = table[:, :, 0], table[:, :most, 1]
    weights = (q + 0.01).flatten(0, 1)
    ids = torch.multinomial(weights, 1, generator=source).view(count, most)
    rows = {"target": p, **({"draft": q} if draft else {})}
    arguments = {f"{name}_{form}": value.log() if form == "logits" else value for name, value in rows.items()}
    rng = support.streams(range(count))
    edge = torch.arange(count) % 8
    drawn = rng.uniforms(most)
    emit = torch.where(edge == 0, 0, torch.where(edge == 1, -1, drawn.emit))
    accept = torch.where(edge[:, None] == 2, 0.0, torch.where(edge[:, None] == 3, ALMOST_ONE, drawn.accept))
    result = support.create(setting).verify(ids, **arguments, uniforms=Uniforms(accept=accept, emit=emit))
    assert not result.status.any()
    position = torch.arange(most + 1)
    emitted = position < result.num_emitted[:, None]
    if setting not in FAITHFUL:
        emitted &= position >= result.num_accepted[:, None]
    chosen = p.gather(2, result.output_token_ids.clamp(min=0).to(torch.int64)[..., None])[..., 0]
    assert int(result.num_emitted.sum()) >= count
    assert bool((chosen[emitted] > 0).all())


# Anything at all

ENTRIES = st.sampled_from(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 0.25, 0.5, 1.0, -1.0, 5.0, 1e-45, 1e-20, 1e30, -1e30, 3e38, -3e38]
)
IDS = st.one_of(st.integers(-3, 8), st.sampled_from([-(2**63), -(2**31), 2**31, 2**62, 2**63 - 1]))


@given(st.data())
@hypothesis_settings(derandomize=True, deadline=None, max_examples=200, database=None)
def test_garbage_never_gives_an_id_outside_the_vocabulary(data: st.DataObject) -> None:
    """Whatever the values, ids lie in [0, V), counts fit, and nothing is read out of bounds."""
    setting = data.draw(st.sampled_from(sorted(SETTINGS)))
    num_requests, most, vocab = (data.draw(st.integers(*ends)) for ends in ((1, 3), (0, 3), (1, 6)))
    draft_vocab = data.draw(st.sampled_from([vocab, vocab, 1, vocab + 2]))
    ragged = data.draw(st.booleans())

    def rows(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        values = data.draw(st.lists(ENTRIES, min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.float32).view(shape)

    def integers(count: int, values: st.SearchStrategy[int]) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.int64)

    target_form, draft_form = (data.draw(st.sampled_from(["probs", "logits"])) for _ in range(2))
    if ragged:
        num_tokens = data.draw(st.integers(0, num_requests * most + 1))
        arguments: dict[str, Any] = {
            "draft_token_ids": integers(num_tokens, IDS),
            f"target_{target_form}": rows(num_tokens + num_requests, vocab),
            "cu_num_draft_tokens": integers(num_requests + 1, st.one_of(st.integers(-2, num_tokens + 2), IDS)),
            "max_num_draft_tokens": data.draw(st.sampled_from([None, most, most + 2])),
        }
        draft_shape: tuple[int, ...] = (num_tokens, draft_vocab)
    else:
        arguments = {
            "draft_token_ids": integers(num_requests * most, IDS).view(num_requests, most),
            f"target_{target_form}": rows(num_requests, most + 1, vocab),
        }
        draft_shape = (num_requests, most, draft_vocab)
    if data.draw(st.booleans()):
        arguments[f"draft_{draft_form}"] = rows(*draft_shape)
    if target_form == "logits" and data.draw(st.booleans()):
        arguments["sampling"] = SamplingParams(temperature=rows(num_requests))
    if data.draw(st.booleans()):
        arguments["bonus_token_ids"] = integers(num_requests, IDS)
    if data.draw(st.booleans()):
        arguments["logprobs"] = True
    rng = Rng(seeds=integers(num_requests, IDS), offsets=integers(num_requests, IDS))
    result = support.create(setting).verify(**arguments, rng=rng)
    support.check_sound(result, vocab)
    assert {*result.status.tolist()} <= {*Status}
    if result.status.any():
        with pytest.raises(StatusError):
            result.raise_for_status()
    else:
        result.raise_for_status()
