"""Verification on the CPU beside transformers' own step, in one process. Nothing is timed that is not right first.

Run with `make bench`. `test_ratios` prints the ratios that matter beside their goals.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.utils import _speculative_sampling

import acceptlib
from acceptlib.exact import oracle

VOCAB_SIZE = 128256
NUM_DRAFT_TOKENS = 5
PARAMETERS: dict[str, Any] = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
SAMPLING = acceptlib.SamplingParams(**PARAMETERS)


@dataclass(frozen=True)
class Workload:
    """Rows of one batch, as logits and as probabilities."""

    ids: torch.Tensor
    target_logits: torch.Tensor
    draft_logits: torch.Tensor
    target_probs: torch.Tensor
    draft_probs: torch.Tensor

    @property
    def rng(self) -> acceptlib.Rng:
        """Return fresh streams."""
        return acceptlib.Rng(seeds=torch.arange(len(self.ids)), offsets=torch.zeros(len(self.ids), dtype=torch.int64))


def workload(num_requests: int) -> Workload:
    """Return rows whose drafts are accepted about two times in three."""
    generator = torch.Generator().manual_seed(num_requests)
    target = torch.randn(num_requests, NUM_DRAFT_TOKENS + 1, VOCAB_SIZE, generator=generator) * 3
    draft = target[:, :-1] + torch.randn(num_requests, NUM_DRAFT_TOKENS, VOCAB_SIZE, generator=generator)
    draft_probs = draft.softmax(-1)
    ids = torch.multinomial(draft_probs.view(-1, VOCAB_SIZE), 1, generator=generator).view(num_requests, -1)
    return Workload(ids, target, draft, target.softmax(-1), draft_probs)


def filtered(rows: Workload) -> Workload:
    """Return one request whose probabilities are those under `SAMPLING`, and whose drafts came from them."""
    p, q = (
        torch.stack([oracle.processed(row.tolist(), **PARAMETERS) for row in logits[0]]).float()
        for logits in (rows.target_logits, rows.draft_logits)
    )
    ids = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(0)).view(1, -1)
    return Workload(ids, rows.target_logits, rows.draft_logits, p[None], q[None])


def step(strategy: acceptlib.AcceptanceStrategy, rows: Workload, form: str) -> Callable[[], Any]:
    """Return one verified step, after checking it against the oracle."""
    given: dict[str, Any] = {"target_logits": rows.target_logits, "draft_logits": rows.draft_logits}
    if form == "probs":
        given = {"target_probs": rows.target_probs, "draft_probs": rows.draft_probs}
    elif form == "filtered":
        given["sampling"] = SAMPLING
    result = strategy.verify(rows.ids, rng=rows.rng, **given)
    uniforms = rows.rng.uniforms(NUM_DRAFT_TOKENS)
    tokens, accepted = oracle.verify(
        strategy.name,
        rows.ids[0].tolist(),
        rows.target_probs[0],
        rows.draft_probs[0],
        uniforms.accept[0].tolist(),
        int(uniforms.emit[0]),
    )
    assert (result.output_token_ids[0, : len(tokens)].tolist(), int(result.num_accepted[0])) == (tokens, accepted)
    rng = rows.rng
    return lambda: strategy.verify(rows.ids, rng=rng, **given)


def peer(rows: Workload) -> Callable[[], Any]:
    """Return transformers' step, from logits."""
    sequence = torch.cat((torch.zeros(1, 1, dtype=torch.int64), rows.ids), 1)
    return lambda: _speculative_sampling(sequence, rows.draft_logits, NUM_DRAFT_TOKENS, rows.target_logits, False)  # noqa: FBT003


def filtering_peer(rows: Workload) -> Callable[[], Any]:
    """Return transformers' processors, row by row as its decoding loop applies them, and its step."""
    sequence = torch.cat((torch.zeros(1, 1, dtype=torch.int64), rows.ids), 1)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.9)])

    def step() -> Any:
        target, draft = (
            torch.stack([processors(sequence, logits[:, i]) for i in range(logits.shape[1])], 1)
            for logits in (rows.target_logits, rows.draft_logits)
        )
        return _speculative_sampling(sequence, draft, NUM_DRAFT_TOKENS, target, False)  # noqa: FBT003

    return step


def one_row(rows: Workload) -> Callable[[], Any]:
    """Return one row's clamp, cumulative sum and search: the least that a draw in floats costs."""
    p, q, u = rows.target_probs[0, :1], rows.draft_probs[0, :1], torch.tensor([[0.1]])
    return lambda: torch.searchsorted((p - q).clamp(min=0).cumsum(-1), u)


ROWS = workload(1)


@pytest.mark.parametrize("form", ["logits", "probs"])
@pytest.mark.parametrize("name", acceptlib.available())
def test_strategy(benchmark: Any, name: str, form: str) -> None:
    """Every strategy at B = 1, K = 5, V = 128256, float32."""
    benchmark.group = f"B1-K5-V128256-float32-{form}"
    benchmark.extra_info["backend"] = "torch"
    benchmark(step(acceptlib.create(name), ROWS, form))


def test_transformers(benchmark: Any) -> None:
    """The peer, on the same rows."""
    benchmark.group = "B1-K5-V128256-float32-logits"
    benchmark(peer(ROWS))


def median_times(*functions: Callable[[], Any], rounds: int = 41) -> list[float]:
    """Return the median seconds of each function, taken in turns so that a slow moment hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, column in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            column.append(time.perf_counter() - start)
    return [statistics.median(column) for column in times]


def test_ratios(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Print how the step compares with transformers, with one row's search, and with a larger batch."""
    rejection, many = acceptlib.create("rejection"), workload(64)
    logits, probs, hf, row = median_times(
        step(rejection, ROWS, "logits"), step(rejection, ROWS, "probs"), peer(ROWS), one_row(ROWS)
    )
    few = filtered(ROWS)
    filtering, hf_filtering = median_times(step(rejection, few, "filtered"), filtering_peer(few), rounds=15)
    many_logits, many_probs = median_times(step(rejection, many, "logits"), step(rejection, many, "probs"), rounds=5)
    figures = {
        "times faster than transformers, from logits (goal: at least 3)": hf / logits,
        "times faster than transformers, with top-k and top-p (goal: at least 10)": hf_filtering / filtering,
        "times one row's clamp, cumsum and search, from probabilities (goal: at most 4)": probs / row,
        "times B = 1 for B = 64, from logits (goal: at most 40)": many_logits / logits,
        "times B = 1 for B = 64, from probabilities (goal: at most 40)": many_probs / probs,
    }
    benchmark.extra_info.update(figures)
    with capsys.disabled():
        print("\n" + "\n".join(f"{value:6.2f} {name}" for name, value in figures.items()))
    benchmark.pedantic(step(rejection, ROWS, "logits"), rounds=5)
