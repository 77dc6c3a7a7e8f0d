"""Drop-ins on the CPU beside the algorithm that each original documents, written plainly in torch.

Nothing is timed that is not right first: the drop-in takes the oracle's tokens, and the plain version has the drop-in's
mean number of emitted tokens. Both sides are timed in turns. `make bench` prints the ratios beside their goals, and
`make record` adds them to the record of the page. Functions that take no batch are called once a request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from ratios import Figure, median_times, publish

from acceptlib import Rng
from acceptlib.compat import flashinfer, naive_speculate, vllm_v0, vllm_v1
from acceptlib.exact import oracle

NUM_DRAFT_TOKENS: Final = 5
TEMPERATURE: Final = 0.8
Emitted = tuple[torch.Tensor, ...]
Step = Callable[[], list[Emitted]]


@dataclass(frozen=True)
class Batch:
    """One batch as every library wants it; K tokens a request."""

    ids: torch.Tensor
    logits: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    bonus: torch.Tensor

    @functools.cached_property
    def requests(self) -> list[Batch]:
        """Return each request by itself, for functions that take one."""
        parts = zip(*(tensor.split(1) for tensor in (self.ids, self.logits, self.p, self.q, self.bonus)), strict=True)
        return [Batch(*part) for part in parts]

    @property
    def metadata(self) -> vllm_v1.SpecDecodeMetadata:
        """Return the drafts as vLLM V1 describes them."""
        return vllm_v1.SpecDecodeMetadata.make_dummy(self.ids.tolist(), torch.device("cpu"))

    def sampling(self, temperature: float) -> vllm_v1.SamplingMetadata:
        """Return parameters as vLLM V1 describes them."""
        greedy = temperature == vllm_v1.GREEDY_TEMPERATURE
        values = torch.full((len(self.ids),), temperature)
        return vllm_v1.SamplingMetadata(temperature=values, all_greedy=greedy, all_random=not greedy)


def batch(num_requests: int, vocab_size: int) -> Batch:
    """Return rows whose drafts are accepted about two times in three."""
    generator = torch.Generator().manual_seed(num_requests)
    logits = torch.randn(num_requests, NUM_DRAFT_TOKENS + 1, vocab_size, generator=generator) * 3
    noise = torch.randn(num_requests, NUM_DRAFT_TOKENS, vocab_size, generator=generator)
    q = ((logits[:, :-1] + noise) / TEMPERATURE).softmax(-1)
    ids = torch.multinomial(q.view(-1, vocab_size), 1, generator=generator).view(num_requests, -1)
    p = (logits / TEMPERATURE).softmax(-1)
    bonus = torch.multinomial(p[:, -1], 1, generator=generator)
    return Batch(ids, logits, p, q, bonus)


# The documented algorithms


def plain_flashinfer(rows: Batch) -> Emitted:
    """Return tokens [B, K+1], positions passed [B], and tokens accepted [B]."""
    at = rows.ids[..., None]
    p, q = rows.p[:, :-1].gather(-1, at)[..., 0], rows.q.gather(-1, at)[..., 0]
    passes = torch.rand(p.shape) < p / q
    stop = passes.long().cumprod(1).sum(1)
    row = torch.arange(len(stop))
    weights = rows.p[row, stop]
    weights = weights - rows.q[row, stop.clamp(max=NUM_DRAFT_TOKENS - 1)] * (stop < NUM_DRAFT_TOKENS)[:, None]
    token = torch.multinomial(weights.clamp(min=0), 1)[:, 0]
    return arrange(rows.ids, stop, token), passes.sum(1), stop


def plain_naive(rows: Batch) -> Emitted:
    """Return the index of the first rejection and the token there, for one request; as documented, 1e-9 included."""
    ids, p, q = rows.ids[0], rows.p[0], rows.q[0]
    at = ids[:, None]
    passes = torch.rand(len(ids)) < p[:-1].gather(1, at)[:, 0] / (q.gather(1, at)[:, 0] + 1e-9)
    stop = passes.long().cumprod(0).sum()
    residual = p[stop] - (q[stop] if stop < len(ids) else 0)
    return stop, torch.multinomial(residual.clamp(min=0) + 1e-9, 1)[0]


def plain_greedy_match(rows: Batch) -> Emitted:
    """Return the index of the first token that is not the argmax, and the argmax there, for one request."""
    best = rows.p[0].argmax(-1)
    stop = (best[:-1] == rows.ids[0]).long().cumprod(0).sum()
    return stop, best[stop]


def plain_typical(rows: Batch) -> Emitted:
    """Return tokens [B, K+1]."""
    p = rows.p[:, :-1]
    entropy = -(p * (p + 1e-5).log()).sum(-1)
    passes = p.gather(-1, rows.ids[..., None])[..., 0] > (-entropy).exp().mul(0.3).clamp(max=0.09)
    return (with_bonus(rows, passes, p.argmax(-1)),)


def plain_rejection(rows: Batch) -> Emitted:
    """Return tokens [B, K+1]; a recovered token is drawn at every position, by V exponentials a row."""
    p = rows.p[:, :-1]
    at = rows.ids[..., None]
    passes = torch.rand(rows.ids.shape) < (p.gather(-1, at) / rows.q.gather(-1, at))[..., 0]
    residual = (p - rows.q).clamp(min=torch.finfo(torch.float32).tiny)
    residual = residual / residual.sum(-1, keepdim=True)
    return (with_bonus(rows, passes, (residual / torch.empty_like(residual).exponential_()).argmax(-1)),)


def plain_v1(rows: Batch) -> Emitted:
    """Return tokens [B, K+1] from logits; a request's positions share V exponentials."""
    p = (rows.logits[:, :-1] / TEMPERATURE).softmax(-1)
    at = rows.ids[..., None]
    passes = p.gather(-1, at) >= torch.rand(rows.ids.shape)[..., None] * rows.q.gather(-1, at)
    noise = torch.empty(len(p), 1, p.shape[-1]).exponential_()
    return (with_bonus(rows, passes[..., 0], ((p - rows.q).clamp(min=0) / noise).argmax(-1)),)


def plain_v1_greedy(rows: Batch) -> Emitted:
    """Return tokens [B, K+1] from logits."""
    best = rows.logits[:, :-1].argmax(-1)
    return (with_bonus(rows, best == rows.ids, best),)


def with_bonus(rows: Batch, passes: torch.Tensor, recovered: torch.Tensor) -> torch.Tensor:
    """Return tokens [B, K+1], given which pass, what replaces each, and the bonus tokens."""
    stop = passes.long().cumprod(1).sum(1)
    return arrange(rows.ids, stop, torch.cat((recovered, rows.bonus), 1).gather(1, stop[:, None])[:, 0])


def arrange(ids: torch.Tensor, stop: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return tokens [B, K+1], padded with -1."""
    position = torch.arange(ids.shape[1] + 1)
    padded = torch.nn.functional.pad(ids, (0, 1))
    return torch.where(position < stop[:, None], padded, torch.where(position == stop[:, None], token[:, None], -1))


# The drop-ins, on the same rows


def dropin_flashinfer(rows: Batch) -> Callable[[], Emitted]:
    """Return FlashInfer's call."""
    return lambda: flashinfer.chain_speculative_sampling(rows.q, rows.ids, rows.p)


def dropin_naive(rows: Batch) -> Callable[[], Emitted]:
    """Return naive-speculate's call, for one request."""
    return lambda: naive_speculate.speculative_sampling(rows.p[0], rows.q[0], rows.ids[0])


def dropin_greedy_match(rows: Batch) -> Callable[[], Emitted]:
    """Return naive-speculate's greedy call, for one request."""
    return lambda: naive_speculate.greedy_match(rows.p[0], rows.ids[0])


def dropin_typical(rows: Batch) -> Callable[[], Emitted]:
    """Return vLLM V0's call."""
    sampler = vllm_v0.TypicalAcceptanceSampler()
    return lambda: (sampler(rows.p, rows.bonus, None, rows.ids),)


def dropin_rejection(rows: Batch) -> Callable[[], Emitted]:
    """Return vLLM V0's call."""
    sampler = vllm_v0.RejectionSampler()
    return lambda: (sampler(rows.p, rows.bonus, rows.q, rows.ids),)


def dropin_v1(rows: Batch) -> Callable[[], Emitted]:
    """Return vLLM V1's call, with draft probabilities."""
    return _v1(rows, TEMPERATURE)


def dropin_v1_greedy(rows: Batch) -> Callable[[], Emitted]:
    """Return vLLM V1's call for greedy requests."""
    return _v1(rows, vllm_v1.GREEDY_TEMPERATURE)


def _v1(rows: Batch, temperature: float) -> Callable[[], Emitted]:
    vocab_size = rows.p.shape[-1]
    sampler, metadata, sampling = vllm_v1.RejectionSampler(), rows.metadata, rows.sampling(temperature)
    logits, q = rows.logits[:, :-1].reshape(-1, vocab_size).contiguous(), rows.q.view(-1, vocab_size)
    return lambda: (sampler(metadata, q, logits, rows.bonus, sampling),)


@dataclass(frozen=True)
class Pair:
    """A drop-in and its documented algorithm.

    Attributes:
        title: What the page calls it.
        dropin: Makes the call.
        plain: The same step.
        strategy: The oracle's rule.
        num_requests: B.
        vocab_size: V.
        unbatched: Whether both take one request and return two scalars; a step is then a call for each.
        given_bonus: Whether the bonus token is the caller's.
        goal: How many times faster the drop-in has to be.
    """

    title: str
    dropin: Callable[[Batch], Callable[[], Emitted]]
    plain: Callable[[Batch], Emitted]
    strategy: str
    num_requests: int = 32
    vocab_size: int = 32000
    unbatched: bool = False
    given_bonus: bool = False
    goal: int = 1

    def parts(self, rows: Batch) -> list[Batch]:
        """Return what one call takes at a time."""
        return rows.requests if self.unbatched else [rows]

    def steps(self, rows: Batch) -> tuple[Step, Step]:
        """Return the drop-in's step and the plain one."""
        parts = self.parts(rows)
        calls = [self.dropin(part) for part in parts]
        return lambda: [call() for call in calls], lambda: [self.plain(part) for part in parts]

    def num_emitted(self, results: list[Emitted]) -> torch.Tensor:
        """Return emitted tokens a request."""
        return torch.cat([result[0][None] + 1 if self.unbatched else (result[0] >= 0).sum(1) for result in results])


PAIRS: Final = {
    "flashinfer": Pair("FlashInfer", dropin_flashinfer, plain_flashinfer, "rejection"),
    "naive": Pair("naive-speculate", dropin_naive, plain_naive, "rejection", unbatched=True),
    "naive-one": Pair(
        "naive-speculate, V = 128256, one request",
        dropin_naive,
        plain_naive,
        "rejection",
        num_requests=1,
        vocab_size=128256,
        unbatched=True,
        goal=3,
    ),
    "naive-greedy": Pair(
        "naive-speculate, `greedy_match`", dropin_greedy_match, plain_greedy_match, "greedy", unbatched=True
    ),
    "v0-typical": Pair("vLLM V0, typical", dropin_typical, plain_typical, "typical", given_bonus=True),
    "v0-rejection": Pair("vLLM V0, rejection", dropin_rejection, plain_rejection, "rejection", given_bonus=True),
    "v1": Pair("vLLM V1", dropin_v1, plain_v1, "rejection", given_bonus=True),
    "v1-greedy": Pair("vLLM V1, greedy", dropin_v1_greedy, plain_v1_greedy, "greedy", given_bonus=True),
}


def check_dropin(pair: Pair, rows: Batch) -> None:
    """Assert that a drop-in takes the oracle's tokens, for the numbers that torch's generator gives it."""
    torch.manual_seed(5)
    drawn = [Rng.of(None, len(part.ids), torch.device("cpu")).uniforms(NUM_DRAFT_TOKENS) for part in pair.parts(rows)]
    accept, bits = torch.cat([part.accept for part in drawn]), torch.cat([part.emit for part in drawn])
    torch.manual_seed(5)
    results = pair.steps(rows)[0]()
    for b in range(min(3, len(rows.ids))):
        numbers = accept[b].tolist(), int(bits[b])
        tokens, accepted = oracle.verify(pair.strategy, rows.ids[b].tolist(), rows.p[b], rows.q[b], *numbers)
        if pair.unbatched:
            assert [int(value) for value in results[b]] == [accepted, tokens[-1]]
            continue
        if accepted == NUM_DRAFT_TOKENS and pair.given_bonus:
            tokens[-1] = int(rows.bonus[b])
        assert results[0][0][b, : len(tokens)].tolist() == tokens


def check_plain(pair: Pair) -> None:
    """Assert that both sides emit as many tokens in the mean, over 4000 requests of a small vocabulary."""
    torch.manual_seed(6)
    sides = [pair.num_emitted(step()).double() for step in pair.steps(batch(4000, 50))]
    spread = sum(float(side.var()) / len(side) for side in sides) ** 0.5
    assert abs(float(sides[0].mean() - sides[1].mean())) <= 6 * spread


@pytest.mark.parametrize("name", PAIRS)
def test_dropin(benchmark: Any, name: str, request: pytest.FixtureRequest) -> None:
    """A drop-in beside its documented algorithm: B = 32, K = 5, V = 32000 but where the name says otherwise."""
    pair = PAIRS[name]
    rows = batch(pair.num_requests, pair.vocab_size)
    check_dropin(pair, rows)
    check_plain(pair)
    step, plain_step = pair.steps(rows)
    dropin, plain = median_times(step, plain_step, rounds=31)
    benchmark.group = f"compat-B{pair.num_requests}-K{NUM_DRAFT_TOKENS}-V{pair.vocab_size}"
    benchmark.extra_info["times faster than plain"] = plain / dropin
    publish([Figure(f"{pair.title}, times faster than plain", f"at least {pair.goal}", plain / dropin)], request)
    benchmark(step)
