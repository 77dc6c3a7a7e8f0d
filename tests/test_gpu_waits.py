"""What programs of the fused kernels wait for on a GPU: stages, stops of requests, and sums that others find."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import acceptlib
from acceptlib import SamplingParams, VerifyResult, checks

pytest.importorskip("triton", reason="without Triton there are no fused kernels")

from gpu_cases import FORMS, FULL, LONG, K, Step, V, batch, create, every_strategy, on_a_gpu, same, streams

from acceptlib.engine.triton import engine, launching, tunings
from acceptlib.engine.triton.call import Call
from acceptlib.result import Status

pytestmark = on_a_gpu


@pytest.mark.parametrize("filtered", ["sampling", "draft_sampling"])
@pytest.mark.parametrize("count", [8, 110])  # a small batch and a medium one
@pytest.mark.parametrize("filters", [{"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
def test_stages_side_by_side_are_waited_for(filtered: str, count: int, filters: dict[str, float]) -> None:
    """One model's rows are filtered while the other's are read: the draw must not see laws of the call before."""
    samplings = {name: SamplingParams() for name in ("sampling", "draft_sampling")}
    samplings[filtered] = SamplingParams(temperature=0.7, **filters)
    take_turns(count, samplings)


@pytest.mark.parametrize("filters", [{"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
@pytest.mark.parametrize("far", [1 << 30, 1])
@pytest.mark.parametrize("large", [1 << 30, 1])
def test_stages_wait_for_what_they_read(
    filters: dict[str, float], far: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a stage starts before the one that it depends on ends or not."""
    monkeypatch.setattr(tunings, "SIZES", tunings.Sizes(medium=1, runs=1, large=large))
    monkeypatch.setattr(engine, "OVERLAP_BLOCKS", far)
    take_turns(40, {"sampling": SamplingParams(temperature=0.7, **filters)})


@pytest.mark.parametrize(
    ("name", "form"),
    [*itertools.product(["rejection", "typical"], FORMS[1:]), ("typical", "probs"), ("greedy", "probs")],
)
@pytest.mark.parametrize("most", [K, 31, 32])  # one word says what became of 32 positions
@pytest.mark.parametrize("count", [2, 40])  # of few, rows beyond their stops are read in vain
def test_stops_are_waited_for(name: str, form: str, most: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's by itself, while other rows are read; and rows read in vain leave nothing to the next call."""
    assert_large_as_medium(name, [batch(count, form, most, seed=seed) for seed in range(2)], count, most, monkeypatch)


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("form", ["probs", "logits", "one-hot"])
@every_strategy
def test_tokens_may_be_emitted_where_drafted_ones_lie(name: str, form: str, count: int) -> None:
    """Each time the same, though requests with many rows end in any order."""
    strategy, call = create(name), batch(count, form)
    state = [strategy.initial_state(count, "cuda") for _ in range(9)]
    expected = strategy.verify(**call, rng=streams(count), state=state[0])
    out = VerifyResult.empty(count, K, torch.device("cuda"))
    out = dataclasses.replace(out, output_token_ids=out.output_token_ids.long())
    drafted = out.output_token_ids[:, :K]
    for again in state[1:]:
        drafted.copy_(call["draft_token_ids"])
        strategy.verify(**call | {"draft_token_ids": drafted}, rng=streams(count), state=again, out=out)
        assert torch.equal(out.output_token_ids, expected.output_token_ids)


@pytest.mark.parametrize(("name", "form"), [*(("rejection", form) for form in FORMS[1:]), ("typical", "probs")])
@pytest.mark.parametrize("most", [K, 32])
def test_nobody_waits_for_requests_with_faults(
    name: str, form: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those beside them held up, in the same call or the next."""
    count = 40
    calls = [with_faults(batch(count, form, most, seed=seed)) for seed in range(2)]
    found = assert_large_as_medium(name, calls, count, most, monkeypatch)
    for call, result in zip(calls, found, strict=True):
        expected = acceptlib.create(name, backend="torch").verify(**call, rng=streams(count))
        assert torch.equal(result.status, expected.status)
        kinds = {Status(value) for value in result.status.tolist()}
        assert kinds >= {Status.OK, Status.INVALID_ROW, Status.INVALID_TOKEN_ID}
        assert (Status.INVALID_PARAMETER in kinds) == (form != "probs")
        assert (Status.INVALID_COUNT in kinds) == (form == "ragged-logits")


def with_faults(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call some of whose requests have no sound temperature, rows, drafted tokens or, if ragged, counts."""
    kind, ragged = "target_probs" if "target_probs" in call else "target_logits", "cu_num_draft_tokens" in call
    ids, target = call["draft_token_ids"].clone(), call[kind].clone()
    changed: dict[str, Any] = {"draft_token_ids": ids, kind: target}
    first = call["cu_num_draft_tokens"][:-1] if ragged else torch.arange(len(ids), device="cuda") * ids.shape[1]
    ids.view(-1)[first[1::6]] = V + 5
    target.view(-1, V)[(first + torch.arange(len(first), device="cuda"))[2::6]] = float("nan")
    if "sampling" in call:
        temperature = call["sampling"].temperature.clone()
        temperature[::6] = float("nan")
        changed["sampling"] = SamplingParams(temperature=temperature)
    if ragged:
        changed["cu_num_draft_tokens"] = call["cu_num_draft_tokens"].clone()
        changed["cu_num_draft_tokens"][-3] = 1 << 20
    return call | changed


def assert_large_as_medium(
    name: str, calls: list[dict[str, Any]], count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> list[VerifyResult]:
    """Check two calls in turns in the same memory, whose stages wait for stops, against stages that wait for all."""
    strategy = create(name)
    workspace = strategy.workspace(count, most, V, "cuda")

    def turns(times: int, large: int) -> list[VerifyResult]:
        monkeypatch.setattr(tunings, "SIZES", tunings.Sizes(medium=1, large=large))
        monkeypatch.setattr(checks, "_CHECKED", {})
        return [strategy.verify(**calls[turn % 2], rng=streams(count), workspace=workspace) for turn in range(times)]

    expected = turns(2, large=1 << 30)
    for turn, result in enumerate(turns(40, large=0)):
        assert same(result, expected[turn % 2])
    return expected


def take_turns(count: int, samplings: dict[str, SamplingParams]) -> None:
    """Check many calls of two batches, one after the other in the same memory."""
    strategy = create("rejection")
    calls = [{**batch(count, "logits", seed=seed), **samplings} for seed in range(2)]
    expected = [acceptlib.create("rejection", backend="torch").verify(**call, rng=streams(count)) for call in calls]
    workspace = strategy.workspace(count, K, V, "cuda")
    found = [strategy.verify(**calls[turn % 2], rng=streams(count), workspace=workspace) for turn in range(40)]
    for turn, result in enumerate(found):
        assert torch.equal(result.output_token_ids, expected[turn % 2].output_token_ids)


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("name", ["rejection", "lenience"])
def test_sums_that_are_waited_for(name: str, count: int, monkeypatch: pytest.MonkeyPatch, *, lends: bool) -> None:
    """Of long rows from probabilities: in calls of two sizes, in turns, then in replays of both."""
    monkeypatch.setattr(launching, "KERNELS", {})
    steps = [Step(name, some, "probs", vocab_size=LONG, lends=lends) for some in (count, count + 1)]
    reference, expected = acceptlib.create(name, backend="torch"), []
    for step in steps:
        given, rng = {**step.arguments, "workspace": None}, streams(len(step.out.status))
        expected.append([reference.verify(**given, rng=rng).output_token_ids for _ in range(20)])
    for turns in zip(*expected, strict=True):
        for step, tokens in zip(steps, turns, strict=True):
            assert torch.equal(step(), tokens)
    graphs = [step.capture() for step in steps]
    for step in steps:
        step.rng.offsets.zero_()
    for turns in zip(*expected, strict=True):
        for step, graph, tokens in zip(steps, graphs, turns, strict=True):
            graph.replay()
            assert torch.equal(step.out.output_token_ids, tokens)
    assert all(key[0].awaits and key[0].spins for key in launching.KERNELS)


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("filters_draft", [True, False])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("name", ["rejection", "block", "typical"])
def test_runs_that_are_listed(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch, *, filters_draft: bool, lends: bool
) -> None:
    """Of long rows under min-p: maxima of sub-blocks say the same; in calls of two sizes and in replays."""
    temperature = torch.linspace(0.3, 1.5, count + 1, device="cuda")
    least = torch.linspace(0.02, 0.2, count + 1, device="cuda").flip(0)
    steps = [Step(name, some, "logits", vocab_size=LONG, lends=lends) for some in (count, count + 1)]
    for step in steps:
        some = len(step.out.status)
        sampling = SamplingParams(temperature=temperature[:some], min_p=least[:some])
        unfiltered = dataclasses.replace(sampling, min_p=None)
        step.arguments |= {"sampling": sampling, "draft_sampling": None if filters_draft else unfiltered}
    assert_changes_nothing("runs", lambda call: call.lists_runs, steps, monkeypatch)


@pytest.mark.parametrize("vocab_size", [FULL, LONG])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize(("name", "top_p"), [("rejection", None), ("lenience", None), ("typical", 0.9)])
def test_sums_from_logits_that_are_waited_for(
    name: str, top_p: float | None, count: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long rows, some greedy: a count of programs says the same; in calls of two sizes and in replays."""
    steps = [Step(name, some, "logits", vocab_size=vocab_size) for some in (count, count + 1)]
    for step in steps:
        some = len(step.out.status)
        kept = None if top_p is None else torch.full((some,), top_p, device="cuda")
        step.arguments["sampling"] = dataclasses.replace(step.arguments["sampling"], top_p=kept)
    assert_changes_nothing("in_order", lambda call: call.awaits, steps, monkeypatch)


@pytest.mark.parametrize(("vocab_size", "count"), [(FULL, 1), (LONG, 1), (FULL, 4), (FULL, 8)])
def test_programs_that_leave_their_draw_to_the_last_one(
    vocab_size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as they miss a sum, unless the last one has started, beside kernels that take places on the device."""
    step = Step("rejection", count, "logits", vocab_size=vocab_size)
    expected = step.from_the_start(20)
    monkeypatch.setattr(launching, "KERNELS", {})
    monkeypatch.setattr(checks, "_CHECKED", {})
    monkeypatch.setattr(tunings, "TUNINGS", tunings.Tunings(*(some._replace(looks=0) for some in tunings.TUNINGS)))
    assert torch.equal(torch.stack(step.from_the_start(20)), torch.stack(expected))
    assert {(call.draws_held, call.looks) for call, *_ in launching.KERNELS} == {(True, 0)}
    filler, aside = torch.ones(1 << 24, device="cuda"), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(500):
            filler.mul_(1.0)
    for _ in range(5):
        assert torch.equal(torch.stack(step.from_the_start(20)), torch.stack(expected))


def test_waiting_calls_of_other_forms_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """From logits other words are waited for than from probabilities: each call leaves what the next one needs."""
    monkeypatch.setattr(launching, "KERNELS", {})
    steps = [Step("rejection", count, form, vocab_size=LONG) for count, form in ((6, "probs"), (1, "logits"))]
    expected = [step.from_the_start(20) for step in steps]
    steps[1].arguments["workspace"] = steps[0].arguments["workspace"]
    for turns in zip(*expected, strict=True):
        for step, tokens in zip(steps, turns, strict=True):
            assert torch.equal(step(), tokens)
            assert not step.arguments["workspace"].counters.any()
    assert all(key[0].awaits and key[0].spins for key in launching.KERNELS)


def assert_changes_nothing(
    field: str, is_used: Callable[[Call], bool], steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take steps without and with what a field of all tunings turns on, and replay those with it."""
    found = []
    for turned_on in (False, True):
        monkeypatch.setattr(launching, "KERNELS", {})
        monkeypatch.setattr(checks, "_CHECKED", {})
        if not turned_on:
            all_tunings = tunings.Tunings(*(tuning._replace(**{field: False}) for tuning in tunings.TUNINGS))
            monkeypatch.setattr(tunings, "TUNINGS", all_tunings)
        found.append([step.from_the_start(20) for step in steps])
        assert {is_used(key[0]) for key in launching.KERNELS} == {turned_on}
        assert not any(step.arguments["workspace"].counters.any() for step in steps if step.arguments["workspace"])
        monkeypatch.undo()
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.stack(one), torch.stack(other))
    graphs = [step.capture() for step in steps]
    for turns in zip(*found[0], strict=True):
        for step, graph, tokens_of_turn in zip(steps, graphs, turns, strict=True):
            graph.replay()
            assert torch.equal(step.out.output_token_ids, tokens_of_turn)
