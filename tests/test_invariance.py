"""A request's result is its own, bit for bit: neighbours, layout, strides, chunks and old memory change nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from oracle_cases import (
    DEFAULTS,
    SETTINGS,
    Case,
    Request,
    call,
    lay_out,
    logit_requests,
    make_requests,
    rng_of,
    same,
)

from acceptlib import Rng, SamplingParams, VerifyResult
from acceptlib.engine import torch_engine


def batch(form: str, *, B: int = 9, K: int = 5, V: int = 101, draft: bool = True) -> list[Request]:  # noqa: N803
    """Return requests of probabilities or logits."""
    case = Case(B, K, V, draft=draft, seed=13)
    return make_requests(case) if form == "probs" else logit_requests(case, masked=False)


def check_invariance(setting: str, form: str, requests: list[Request]) -> None:
    """Assert that order, layout, padding, strides and neighbours leave every request's result alone."""
    count, most = len(requests), max(len(request.ids) for request in requests)
    rng = rng_of(count)

    def run(order: list[int], layout: str, *, columns: int | None = None, strides: str = "contiguous") -> VerifyResult:
        tensors = lay_out([requests[b] for b in order], layout, most=columns)
        fresh = Rng(seeds=rng.seeds[order], offsets=rng.offsets[order])
        return call(setting, tensors, form=form, strides=strides, rng=fresh)

    plain = list(range(count))
    result = run(plain, "padded")
    assert result.status.tolist() == [0] * count
    same(result, run(plain, "ragged"))
    for columns in (most + 1, most + 7):
        same(result, run(plain, "padded", columns=columns))
        same(result, run(plain, "ragged", columns=columns))
    for layout, strides in itertools.product(("padded", "ragged"), ("sliced", "transposed")):
        same(result, run(plain, layout, strides=strides))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    for layout in ("padded", "ragged"):
        same(_rows(result, order), run(order, layout))
    for b in (0, 1, count - 1):
        for layout in ("padded", "ragged"):
            same(_rows(result, [b]), run([b], layout))


def _rows(result: VerifyResult, rows: list[int]) -> VerifyResult:
    """Return some requests of a result."""
    return VerifyResult(
        result.output_token_ids[rows], result.num_accepted[rows], result.num_emitted[rows], result.status[rows]
    )


@pytest.mark.parametrize("draft", [True, False], ids=["draft", "ngram"])
@pytest.mark.parametrize("form", ["probs", "logits"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_invariance(setting: str, form: str, draft: bool) -> None:  # noqa: FBT001
    """A request's result is its own: catches keying by batch row, reads across requests, and padding that matters."""
    check_invariance(setting, form, batch(form, draft=draft))


@pytest.mark.parametrize("form", ["probs", "logits"])
@pytest.mark.parametrize("setting", DEFAULTS)
def test_invariance_large_vocabulary(setting: str, form: str) -> None:
    """The same where the rows of the batch exceed one chunk: catches a sum whose order depends on the batch."""
    requests = batch(form, B=34, K=5, V=40_000)
    rows = sum(len(request.ids) + 1 for request in requests)
    assert rows * 4 * 40_000 > torch_engine.SCRATCH_BYTES
    count = len(requests)
    rng = rng_of(count)
    result = call(setting, lay_out(requests, "padded"), form=form, rng=Rng(seeds=rng.seeds, offsets=rng.offsets + 0))
    assert result.status.tolist() == [0] * count
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    fresh = Rng(seeds=rng.seeds[order], offsets=rng.offsets[order])
    same(_rows(result, order), call(setting, lay_out([requests[b] for b in order], "ragged"), form=form, rng=fresh))
    for b in (0, 1, count - 1):
        fresh = Rng(seeds=rng.seeds[b : b + 1], offsets=rng.offsets[b : b + 1].clone())
        alone = call(setting, lay_out([requests[b]], "ragged"), form=form, strides="sliced", rng=fresh)
        same(_rows(result, [b]), alone)


@pytest.mark.parametrize("form", ["probs", "logits"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_chunks_change_nothing(setting: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, three rows or all rows in a chunk: catches a chunk's edge that loses, repeats or rounds a row."""
    requests = batch(form)
    uniforms = rng_of(len(requests)).uniforms(5)
    temperature = torch.linspace(0.0, 1.6, len(requests))
    sampling = SamplingParams(temperature=temperature) if form == "logits" else None
    for layout in ("padded", "ragged"):
        tensors = lay_out(requests, layout)
        whole = call(setting, tensors, form=form, uniforms=uniforms, sampling=sampling)
        for rows in (1, 3):
            monkeypatch.setattr(torch_engine, "SCRATCH_BYTES", rows * 4 * 101)
            same(whole, call(setting, tensors, form=form, uniforms=uniforms, sampling=sampling))
            monkeypatch.undo()


@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "plain"])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("setting", DEFAULTS)
def test_out_is_overwritten(setting: str, layout: str, logprobs: bool) -> None:  # noqa: FBT001
    """A result prefilled with garbage is returned and wholly rewritten: catches stale tokens past the stop."""
    requests = make_requests(Case(7, 4, 23, placeholders=True, seed=7))
    tensors = lay_out(requests, layout)
    uniforms = rng_of(7).uniforms(4)
    expected = call(setting, tensors, uniforms=uniforms, logprobs=logprobs)
    out = VerifyResult.empty(7, 4, torch.device("cpu"), logprobs=logprobs)
    for tensor in (out.output_token_ids, out.num_accepted, out.num_emitted, out.status):
        tensor.fill_(77)
    if out.logprobs is not None:
        out.logprobs.fill_(77.0)
    assert call(setting, tensors, uniforms=uniforms, logprobs=logprobs, out=out) is out
    same(out, expected)
    if logprobs:
        assert out.logprobs is not None
        assert expected.logprobs is not None
        torch.testing.assert_close(out.logprobs, expected.logprobs, rtol=0, atol=0, equal_nan=True)
        for b, request in enumerate(requests):
            tokens = out.output_token_ids[b, : int(out.num_emitted[b])].tolist()
            wanted = [math.log(request.target[i, token].item()) for i, token in enumerate(tokens)]
            assert out.logprobs[b, : len(tokens)].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert out.logprobs[b, len(tokens) :].isnan().all()
