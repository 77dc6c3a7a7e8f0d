"""What only a GPU can show of the fused kernels: graphs, streams, memory, waiting, and real compilations."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import acceptlib
from acceptlib import AcceptanceStrategy, Rng, SamplingParams, VerifyResult, checks
from acceptlib.benchmarks import measure, timing, workloads
from acceptlib.benchmarks.workloads import Workload

pytest.importorskip("triton", reason="without Triton there are no fused kernels")

import fcntl

import memory_interpreted as memory
import triton_calls
import triton_engine_cases as cases
from triton import knobs

from acceptlib.engine import torch_engine
from acceptlib.engine.triton import engine, launching, tunings
from acceptlib.engine.triton import kernel as kernels
from acceptlib.engine.triton import memory as kept
from acceptlib.engine.triton.call import Call
from acceptlib.result import Status
from acceptlib.rng import CUDA_STEP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GIB = 1 << 30
K, V = 3, 9000  # three blocks
LONG = 140_000
FULL = 128_256  # of whose parts the threads of a program that waits have one or two each
FORMS = ("probs", "logits", "ragged-logits", "one-hot")
STRATEGIES = ("rejection", "block", "fly", "typical", "greedy", "relaxed")
"""Between them they launch every stage."""

every_strategy = pytest.mark.parametrize("name", STRATEGIES)
every_form = pytest.mark.parametrize("form", FORMS)


def create(name: str) -> AcceptanceStrategy:
    """Return a strategy that runs in the fused kernels or raises."""
    strategy = triton_calls.strategies()[name]
    strategy.backend = "triton"
    return strategy


def batch(count: int, form: str, most: int = K, vocab_size: int = V, seed: int = 0) -> dict[str, Any]:
    """Return a call of B requests; those of a ragged batch have 0 to K drafted tokens, by the seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    target = 3 * torch.randn(count, most + 1, vocab_size, generator=generator, device="cuda")
    draft = target[:, :most] + torch.randn(count, most, vocab_size, generator=generator, device="cuda")
    ids = torch.multinomial(draft.softmax(-1).view(-1, vocab_size), 1, generator=generator).view(count, most)
    temperature = torch.linspace(0, 1.5, count, device="cuda")
    if form == "probs":
        return {"draft_token_ids": ids, "target_probs": target.softmax(-1), "draft_probs": draft.softmax(-1)}
    if form == "one-hot":
        return {"draft_token_ids": ids, "target_logits": target, "sampling": SamplingParams(temperature=temperature)}
    if form == "logits":
        sampling = SamplingParams(temperature=temperature)
        return {"draft_token_ids": ids, "target_logits": target, "draft_logits": draft, "sampling": sampling}
    lengths = torch.randint(most + 1, (count,), generator=generator, device="cuda")
    drafted = torch.arange(most, device="cuda") < lengths[:, None]
    return {
        "draft_token_ids": ids[drafted],
        "target_logits": target[torch.arange(most + 1, device="cuda") <= lengths[:, None]],
        "draft_logits": draft[drafted],
        "sampling": SamplingParams(temperature=temperature),
        "cu_num_draft_tokens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "max_num_draft_tokens": most,
    }


def streams(count: int) -> Rng:
    seeds = torch.arange(count, device="cuda") * 31 - 7
    return Rng(seeds=seeds, offsets=torch.zeros(count, dtype=torch.int64, device="cuda"))


class Step:
    """A call that writes into one result, in memory of its own if it `lends` any."""

    def __init__(
        self, name: str, count: int, form: str, seed: int = 0, *, lends: bool = True, vocab_size: int = V
    ) -> None:
        self.strategy = create(name)
        self.rng = streams(count)
        self.out = VerifyResult.empty(count, K, torch.device("cuda"))
        self.arguments = batch(count, form, vocab_size=vocab_size, seed=seed)
        self.arguments["state"] = self.strategy.initial_state(count, "cuda")
        self.arguments["workspace"] = self.strategy.workspace(count, K, vocab_size, "cuda") if lends else None

    def __call__(self) -> torch.Tensor:
        """Take a step and return its tokens."""
        self.strategy.verify(**self.arguments, rng=self.rng, out=self.out)
        return self.out.output_token_ids

    def from_the_start(self, times: int) -> list[torch.Tensor]:
        """Return the tokens of the first steps, and be where it began."""
        tokens = [self().clone() for _ in range(times)]
        self.rng.offsets.zero_()
        return tokens

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it remembered how calls are run, unlike in tests that change what that depends on."""
    monkeypatch.setattr(checks, "_CHECKED", {})


def same(one: VerifyResult, other: VerifyResult, rows: Any = slice(None)) -> bool:
    """Return whether a result equals some rows of another, bit for bit."""
    return all(
        torch.equal(getattr(one, field.name).nan_to_num(9.0), getattr(other, field.name)[rows].nan_to_num(9.0))
        for field in dataclasses.fields(VerifyResult)
        if getattr(one, field.name) is not None
    )


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


@pytest.mark.parametrize("name", ["rejection", "typical"])
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("most", [K, 31, 32])  # one word says what became of 32 positions
@pytest.mark.parametrize("count", [2, 40])  # of few, rows beyond their stops are read in vain
def test_stops_are_waited_for(name: str, form: str, most: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's by itself, while other rows are read; and rows read in vain leave nothing to the next call."""
    assert_large_as_medium(name, [batch(count, form, most, seed=seed) for seed in range(2)], count, most, monkeypatch)


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("most", [K, 32])
def test_nobody_waits_for_requests_with_faults(form: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those beside them held up, in the same call or the next."""
    count = 40
    calls = [with_faults(batch(count, form, most, seed=seed)) for seed in range(2)]
    found = assert_large_as_medium("rejection", calls, count, most, monkeypatch)
    for call, result in zip(calls, found, strict=True):
        expected = acceptlib.create("rejection", backend="torch").verify(**call, rng=streams(count))
        assert torch.equal(result.status, expected.status)
        kinds = {Status(value) for value in result.status.tolist()}
        assert kinds >= {Status.OK, Status.INVALID_ROW, Status.INVALID_PARAMETER, Status.INVALID_TOKEN_ID}
        assert (Status.INVALID_COUNT in kinds) == (form == "ragged-logits")


def with_faults(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call some of whose requests have no sound temperature, rows, drafted tokens or, if ragged, counts."""
    temperature = call["sampling"].temperature.clone()
    temperature[::6] = float("nan")
    ids, target, ragged = call["draft_token_ids"].clone(), call["target_logits"].clone(), "cu_num_draft_tokens" in call
    number = torch.arange(len(temperature), device="cuda")
    first = call["cu_num_draft_tokens"][:-1] if ragged else number * ids.shape[1]
    ids.view(-1)[first[1::6]] = V + 5
    target.view(-1, V)[(first + number)[2::6]] = float("nan")
    changed = {"draft_token_ids": ids, "target_logits": target, "sampling": SamplingParams(temperature=temperature)}
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


@every_form
@pytest.mark.parametrize("given", [False, True])
def test_a_generator_gives_fresh_streams(form: str, *, given: bool) -> None:
    """The same as torch's engine gets, others at every call, and again from the same state."""
    call = batch(8, form)
    generator = torch.Generator("cuda") if given else torch.cuda.default_generators[torch.cuda.current_device()]
    rng = generator if given else None

    def three(backend: str) -> list[torch.Tensor]:
        generator.manual_seed(2**63 + 5)
        strategy = acceptlib.create("rejection", backend=backend)
        return [strategy.verify(**call, rng=rng).output_token_ids for _ in range(3)]

    found, again, expected = three("triton"), three("triton"), three("torch")
    for one, two, three_ in zip(found, again, expected, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three_)
    assert not torch.equal(found[0], found[1])
    assert generator.get_offset() == 3 * CUDA_STEP


def test_a_captured_generator_gives_fresh_streams() -> None:
    """At every replay."""
    strategy, call = create("rejection"), batch(8, "logits")
    out = VerifyResult.empty(8, K, torch.device("cuda"))
    strategy.verify(**call, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strategy.verify(**call, out=out)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.output_token_ids.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_profiler_is_told_of_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's own launch tells its hooks is told of compiled stages too, which are launched without it."""
    step, heard = Step("rejection", 8, "logits"), []
    step()
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda told: heard.append(told.get()["name"])])
    step()
    assert len(heard) > 1
    assert set(heard) == {"verify_kernel"}


# Graphs


@every_form
@every_strategy
def test_a_replay_is_a_call(name: str, form: str) -> None:
    step = Step(name, 8, form)
    expected = step.from_the_start(4)
    graph = step.capture()
    assert step.rng.offsets.tolist() == [0] * 8  # a capture runs nothing
    for number, tokens in enumerate(expected):
        (step if number == 2 else graph.replay)()  # eager calls may come between
        assert torch.equal(step.out.output_token_ids, tokens)
    assert step.rng.offsets.tolist() == [4] * 8


@pytest.mark.parametrize("reserved", [kept.RESERVED_COUNTERS, 0])
def test_graphs_without_a_workspace(reserved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has memory of its own, whichever is replayed first, and calls on the stream of the capture none of it."""
    left = torch.zeros(reserved, dtype=torch.int32, device="cuda")
    monkeypatch.setattr(kept, "_RESERVED", {left.device: left})
    steps = [Step(name, 8, "logits", seed, lends=False) for seed, name in enumerate(("block", "typical"))]
    expected = [step.from_the_start(2) for step in steps]
    graphs = [step.capture() for step in steps]
    assert len(kept._RESERVED[left.device]) < max(reserved, 1)
    for number, index in itertools.product(range(2), (1, 0)):
        graphs[index].replay()
        assert torch.equal(steps[index].out.output_token_ids, expected[index][number])
    steps[0].rng.offsets.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
        assert all(
            torch.equal(step, tokens) for step, tokens in zip(steps[0].from_the_start(2), expected[0], strict=True)
        )


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


# Memory and waiting


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode announces itself as a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_form
@every_strategy
def test_nothing_is_allocated_and_nothing_waits(name: str, form: str) -> None:
    step = Step(name, 8, form)
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with waiting_is_an_error():
        step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_nothing_waits_in_a_plain_call() -> None:
    strategy, call = create("block"), batch(8, "logits")
    strategy.verify(**call, rng=streams(8))
    rng = streams(8)
    with waiting_is_an_error():
        strategy.verify(**call, rng=rng)
    with pytest.raises(RuntimeError), waiting_is_an_error():  # which is seen
        rng.offsets.tolist()


# Results


@pytest.mark.parametrize("count", [3, 300])
@every_form
@every_strategy
def test_totals_are_added_to(name: str, form: str, count: int) -> None:
    """By all requests of a call at once, and by one call after the other."""
    strategy, call = create(name), batch(count, form)
    out = VerifyResult.empty(count, K, torch.device("cuda"), logprobs=False, num_passed=True)
    tokens, totals = out.output_token_ids.long(), torch.tensor([5, 2**40], device="cuda")
    out = dataclasses.replace(out, output_token_ids=tokens, totals=totals)
    expected, rng = torch.tensor([5, 2**40]), streams(count)
    for _ in range(3):
        strategy.verify(**call, rng=rng, state=strategy.initial_state(count, "cuda"), out=out)
        assert out.num_passed is not None
        expected += torch.stack([out.num_passed.sum(), out.num_emitted.sum()]).cpu()
    assert out.totals is not None
    assert out.totals.tolist() == expected.tolist()


# Streams


@every_strategy
def test_runs_on_the_current_stream(name: str) -> None:
    """On a stream that has yet to write the rows."""
    strategy, call = create(name), batch(8, "probs")
    state = strategy.initial_state(8, "cuda")
    expected = strategy.verify(**call, rng=streams(8), state=state)
    late = {**call, "target_probs": torch.full_like(call["target_probs"], torch.nan)}
    rng, stream = streams(8), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late["target_probs"].copy_(call["target_probs"])
        found = strategy.verify(**late, rng=rng, state=state)
    torch.cuda.current_stream().wait_stream(stream)
    assert same(found, expected)


@pytest.mark.parametrize("lends", [True, False])
@every_strategy
def test_streams_do_not_meet(name: str, lends: bool) -> None:  # noqa: FBT001
    steps = [Step(name, 64, "logits", seed, lends=lends) for seed in range(2)]
    expected = [step.from_the_start(20) for step in steps]
    found: list[list[torch.Tensor]] = [[], []]
    side = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for stream in side:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # so that both queues are full before either begins
    for _ in range(20):
        for index in range(2):
            with torch.cuda.stream(side[index]):
                found[index].append(steps[index]().clone())
    torch.cuda.synchronize()
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert torch.equal(one, other)


def test_calls_in_a_queue_are_timed_as_in_a_graph() -> None:
    """A launch of its own for each call costs the device little, and the host's time is not in it."""
    batch = workloads.make(Workload(num_requests=64, kind="probs"), "cuda")
    call = measure.step(acceptlib.create("rejection"), batch)
    # The least of several in turns: what else uses the device may be in the way of one, and only adds.
    rounds = [[clock([call], batch.device).median for clock in (timing.replayed, timing.queued)] for _ in range(5)]
    in_graph, in_queue = map(min, zip(*rounds, strict=True))
    host = timing.host(call, batch.device)
    assert host is not None
    assert 0.8 * in_graph < in_queue < min(1.5 * in_graph, host)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_the_rows() -> None:
    strategy, call = create("block"), batch(8, "probs")
    expected = strategy.verify(**call, rng=streams(8))
    elsewhere = {name: value.to("cuda:1") for name, value in call.items()}
    rng = Rng(seeds=streams(8).seeds.to("cuda:1"), offsets=streams(8).offsets.to("cuda:1"))
    found = strategy.verify(**elsewhere, rng=rng)
    assert torch.equal(found.output_token_ids.to("cuda:0"), expected.output_token_ids)


# What a request's tokens depend on


@pytest.mark.parametrize("form", ["probs", "logits"])
@every_strategy
def test_order_neighbours_and_batch_size_change_nothing(name: str, form: str) -> None:
    strategy, count = create(name), 257
    call, rng = batch(count, form), streams(count)

    def verify(rows: torch.Tensor) -> VerifyResult:
        some = {
            key: SamplingParams(temperature=value.temperature[rows]) if key == "sampling" else value[rows]
            for key, value in call.items()
        }
        state = strategy.initial_state(len(rows), "cuda")
        logprobs = form == "probs"  # from logits with a temperature they are not fused
        return strategy.verify(
            **some, rng=Rng(seeds=rng.seeds[rows], offsets=rng.offsets[rows]), state=state, logprobs=logprobs
        )

    whole = verify(torch.arange(count, device="cuda"))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).cuda()
    assert same(verify(order), whole, order)
    for rows in ([0], [256], [100, 3], list(range(40))):
        some = torch.tensor(rows, device="cuda")
        assert same(verify(some), whole, some)


@pytest.mark.parametrize("form", ["probs", "logits"])
@pytest.mark.parametrize("name", ["rejection", "block", "typical"])
def test_tuning_changes_nothing(name: str, form: str) -> None:
    strategy, call = create(name), batch(16, form)
    state = strategy.initial_state(16, "cuda")
    expected = strategy.verify(**call, rng=streams(16), state=state)
    some = ((tunings.SMALL, 4, 512, 1), (tunings.LARGE, 8, 2048, 4096), (tunings.LARGE_ONE_AHEAD, 4, 1024, 1))
    for tuning, warps, block, programs in some:
        changed = tuning._replace(reduce_warps=warps, emit_warps=warps, emit_block=block)
        resident = mock.Mock(return_value=programs)
        every = tunings.Tunings(*[changed] * len(tunings.TUNINGS))
        with mock.patch.object(tunings, "TUNINGS", every), mock.patch.object(engine, "resident_programs", resident):
            checks._CHECKED.clear()
            assert same(strategy.verify(**call, rng=streams(16), state=state), expected)


# Addresses beyond 2^31


@pytest.fixture
def has_memory() -> Iterator[Callable[[int], None]]:
    """Return what skips a test that would not fit; of several processes' such tests one runs at a time."""

    def check(size: int) -> None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < size:
            pytest.skip(f"needs {size // GIB} GiB of device memory, {free // GIB} are free")

    with Path(tempfile.gettempdir(), f"acceptlib-test-gpu-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield check
        torch.cuda.empty_cache()


@pytest.mark.parametrize("sizes", cases.EVERY_SIZE)
def test_lists_change_nothing(sizes: tunings.Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw goes through up to 256 listed entries, half as many with a tile of 4, or through the row."""
    monkeypatch.setattr(tunings, "SIZES", sizes)
    ks = torch.tensor([1, 5, 24, 50, 120, 128, 129, 200, 248, 256, 257, 400, 4000, 0], device="cuda")
    filters = SamplingParams(temperature=0.9, top_k=ks)
    call, found = batch(len(ks), "logits", vocab_size=LONG) | {"sampling": filters, "draft_sampling": filters}, []
    for tile in (engine.TILE, 4):
        monkeypatch.setattr(engine, "TILE", tile)
        checks._CHECKED.clear()
        found.append(create("rejection").verify(**call, rng=streams(len(ks))))
    assert same(*found)


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("strides", memory.STRIDES)
def test_rows_far_apart(strides: str, name: str, has_memory: Callable[[int], None]) -> None:
    count, most, _ = memory.SIZES
    call: dict[str, Any] = triton_calls.calls(memory.SIZES)["padded"]
    ids = call["ids"].cuda()
    rows = {key: value.to("cuda", torch.bfloat16) for key, value in call.items() if key != "ids"}
    strategy, distances = create(name), memory.STRIDES[strides](most)
    expected = torch_engine.verify(strategy.plan, cases.inputs(ids, **rows, rng=streams(count)))
    apart = {}
    sizes = {
        key: 1 + sum((length - 1) * stride for length, stride in zip(value.shape, distances, strict=True))
        for key, value in rows.items()
    }
    has_memory(2 * sum(sizes.values()) + 2 * GIB)
    for key, value in rows.items():
        storage = torch.empty(sizes[key], dtype=torch.bfloat16, device="cuda")
        apart[key] = storage.as_strided(value.shape, distances)
        apart[key].copy_(value)
    assert same(strategy.verify(ids, **apart, rng=streams(count)), expected)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_more_than_2_31_entries(name: str, has_memory: Callable[[int], None]) -> None:
    count, most, vocab_size = 4096, 4, 131072
    has_memory(30 * GIB)
    strategy = create(name)
    rows = {
        "target_logits": torch.empty(count, most + 1, vocab_size, dtype=torch.bfloat16, device="cuda"),
        "draft_logits": torch.empty(count, most, vocab_size, dtype=torch.bfloat16, device="cuda"),
    }
    for value in rows.values():
        for part in value.split(256):
            part.normal_()
        assert value.numel() >= 2**31
    ids, rng = torch.randint(vocab_size, (count, most), device="cuda"), streams(count)
    found = strategy.verify(ids, **rows, rng=copy.deepcopy(rng))
    for index in (0, 2047, 4095):
        one = slice(index, index + 1)
        alone = {key: value[one] for key, value in rows.items()}
        stream = Rng(seeds=rng.seeds[one], offsets=rng.offsets[one])
        assert same(strategy.verify(ids[one], **alone, rng=stream), found, one)


# How often Triton compiles


@every_form
@every_strategy
def test_batches_compile_nothing_new(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, caches = create(name), kernels.verify_kernel.device_caches
    # What was compiled before is forgotten, if not by the disk.
    monkeypatch.setattr(launching, "KERNELS", {})
    caches.clear()

    def run(count: int, most: int, seed: int) -> None:
        call = batch(count, form, most, seed=seed)
        strategy.verify(**call, rng=streams(count), state=strategy.initial_state(count, "cuda"))

    # Batches of every size, whatever its patience, and those whose stages do not overlap; one drafted token has no next
    # residual.
    num_blocks = -(-V // engine.BLOCK)
    sizes = [1, *(-(-size // num_blocks) for size in (*tunings.SIZES, engine.OVERLAP_BLOCKS))]
    for count, most in itertools.product(sizes, (1, 2, 4)):
        run(count, most, 0)
    stages = {key[1:-1] for key in launching.KERNELS}
    compiled = sum(len(cache[0]) for cache in caches.values())
    assert len(stages) <= compiled <= len(sizes) * len(stages)
    for seed, (count, most) in enumerate(itertools.product((2, 3, 16, 17, 127, 129, 500), (1, 2, 3, 5, 8, 16))):
        run(count, most, seed)
    assert sum(len(cache[0]) for cache in caches.values()) == compiled


# torch.compile


@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.parametrize("form", ["probs", "ragged-logits"])
@pytest.mark.parametrize("name", ["rejection", "relaxed"])
def test_compiled_equals_eager(name: str, form: str) -> None:
    torch._dynamo.reset()
    strategy = create(name)

    def step(call: dict[str, Any], rng: Rng, state: dict[str, torch.Tensor]) -> VerifyResult:
        return strategy.verify(**call, rng=rng, state=state)

    compiled = torch.compile(step, fullgraph=True)
    for count in (5, 6, 64):
        call, state = batch(count, form), strategy.initial_state(count, "cuda")
        rng, twin = streams(count), streams(count)
        assert same(compiled(call, rng, state), step(call, twin, state))
        assert torch.equal(rng.offsets, twin.offsets)
        assert rng.offsets.tolist() == [1] * count
