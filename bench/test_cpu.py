"""The ratios that the step is held to on a CPU, each of two times taken in turns. Nothing is timed that is not right.

Run with `make bench`, which prints them beside their goals; `make record` adds them to the record of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from ratios import Figure, median_times, publish
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.utils import _speculative_sampling

import acceptlib
from acceptlib import exact
from acceptlib.benchmarks import gate, measure, workloads
from acceptlib.benchmarks.peers import PEERS
from acceptlib.benchmarks.workloads import Batch, Kind, Workload
from acceptlib.exact import oracle

if TYPE_CHECKING:
    import pytest

FILTERS: dict[str, Any] = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
PATHS: dict[Kind, str] = {"logits": "from logits", "probs": "from probabilities"}

REQUESTS: Final = 16
"""Single requests that are timed together, of rows and drafts of their own: the more tokens stand, the longer it
takes."""

FILTERED: Final = 4
"""As many of these are timed under `FILTERS`, which takes transformers' processors long."""

Step = Callable[[], Any]


def requests(kind: Kind = "logits") -> list[Batch]:
    """Return batches of one request each."""
    return [workloads.make(Workload(kind=kind), seed=seed) for seed in range(REQUESTS)]


def step(name: str, batches: Sequence[Batch]) -> Step:
    """Return one verified step of every batch, after checking each against the oracle."""
    strategy = acceptlib.create(name)
    for batch in batches:
        gate.check(strategy, batch)
    return in_a_row([measure.step(strategy, batch) for batch in batches])


def in_a_row(steps: Sequence[Step]) -> Step:
    """Return one call of all."""
    return lambda: [step() for step in steps]


def transformers() -> Step:
    """Return transformers' step on the same rows."""
    return in_a_row([PEERS["transformers"].bind(batch)[0] for batch in requests()])


def filtered(batch: Batch) -> tuple[Step, Step]:
    """Return a step under `FILTERS` from logits, after checking it against the oracle, and transformers' own.

    Its decoding loop puts every row through its processors, and then takes the step.
    """
    assert batch.draft is not None
    target, draft, strategy = batch.target, batch.draft, acceptlib.create("rejection")
    laws = [torch.stack([exact.processed(row.tolist(), **FILTERS) for row in rows[0]]) for rows in (target, draft)]
    p, q = (law.float() for law in laws)
    ids = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(0)).view(1, -1)
    given = {"target_logits": target, "draft_logits": draft, "sampling": acceptlib.SamplingParams(**FILTERS)}
    uniforms = batch.rng.uniforms(ids.shape[1])
    result = strategy.verify(ids, uniforms=uniforms, **given)
    u, bits = uniforms.accept[0].tolist(), int(uniforms.emit[0])
    tokens, accepted = oracle.verify("rejection", ids[0].tolist(), p, q, u, bits)
    assert (result.output_token_ids[0, : len(tokens)].tolist(), int(result.num_accepted[0])) == (tokens, accepted)

    sequence = torch.cat((ids[:, :1], ids), 1)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.9)])

    def peer() -> Any:
        rows = [torch.stack([processors(sequence, row) for row in logits.unbind(1)], 1) for logits in (draft, target)]
        return _speculative_sampling(sequence, rows[0], ids.shape[1], rows[1])

    return lambda: strategy.verify(ids, rng=batch.rng, **given), peer


def one_row(batch: Batch) -> Callable[[], Any]:
    """Return one row's clamp, cumulative sum and search: the least that a draw in floats costs."""
    assert batch.draft is not None
    p, q, u = batch.target[0, :1], batch.draft[0, :1], torch.tensor([[0.1]])
    return lambda: torch.searchsorted((p - q).clamp(min=0).cumsum(-1), u)


def test_ratios(benchmark: Any, request: pytest.FixtureRequest) -> None:
    """Print how the step compares with transformers, with one row's search, and with a larger batch."""
    one = {kind: step("rejection", requests(kind)) for kind in PATHS}
    many = {kind: step("rejection", [workloads.make(Workload(kind=kind, num_requests=64))]) for kind in PATHS}
    logits, probs, peer, row = median_times(
        one["logits"],
        one["probs"],
        transformers(),
        in_a_row([one_row(batch) for batch in requests("probs")]),
        rounds=15,
    )
    pairs = zip(*map(filtered, requests()[:FILTERED]), strict=True)
    ours, theirs = median_times(*map(in_a_row, pairs), rounds=5)
    # Both from memory: so many requests leave nothing of each other's rows in the cache.
    one_logits, many_logits = median_times(one["logits"], many["logits"], rounds=9)
    one_probs, many_probs = median_times(one["probs"], many["probs"], rounds=9)
    figures = [
        Figure(
            name="B = 1 from logits, times faster than transformers' `_speculative_sampling`",
            goal="at least 3",
            value=peer / logits,
        ),
        Figure(
            name="the same with its processors: temperature 0.7, top-k 50, top-p 0.9",
            goal="at least 10",
            value=theirs / ours,
        ),
        Figure(
            name="B = 1 from probabilities, in units of one row's clamp, cumulative sum and search",
            goal="at most 4",
            value=probs / row,
        ),
        Figure(
            name="B = 64 from logits, in units of B = 1", goal="at most 40", value=REQUESTS * many_logits / one_logits
        ),
        Figure(
            name="B = 64 from probabilities, in units of B = 1",
            goal="at most 40",
            value=REQUESTS * many_probs / one_probs,
        ),
    ]
    benchmark.extra_info |= {figure.name: figure.value for figure in figures}
    publish(figures, request)
    benchmark.pedantic(one["logits"], rounds=5)
