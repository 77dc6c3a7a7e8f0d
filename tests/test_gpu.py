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
from acceptlib import Rng, SamplingParams, VerifyResult, checks
from acceptlib.benchmarks import measure, timing, workloads
from acceptlib.benchmarks.workloads import Workload

pytest.importorskip("triton", reason="without Triton there are no fused kernels")

import fcntl
import json

import cli_support
import memory_interpreted as memory
import triton_calls
import triton_engine_cases as cases
import triton_law_cases as laws
from gpu_cases import FULL, LONG, K, Step, V, batch, create, every_form, every_strategy, on_a_gpu, same, streams
from triton import knobs

from acceptlib.engine import torch_engine
from acceptlib.engine.triton import engine, launching, tunings
from acceptlib.engine.triton import kernel as kernels
from acceptlib.engine.triton import memory as kept
from acceptlib.rng import CUDA_STEP
from acceptlib.testing import check_strategy

pytestmark = on_a_gpu

GIB = 1 << 30


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
    out = VerifyResult.empty(count, K, torch.device("cuda"), num_passed=True)
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


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_call_between_launches_disturbs_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a signal's handler that verifies: after the first launch of another call, and before its second."""
    outer, inner = (Step(name, 64, "logits", seed, lends=False) for seed in range(2))
    expected = [step.from_the_start(3) for step in (outer, inner)]
    plain, found = engine.launch, []

    def interrupted(launches: tuple[launching.Launch, ...], *arguments: Any) -> None:
        assert len(launches) > 1
        plain(launches[:1], *arguments)
        with mock.patch.object(engine, "launch", plain):
            found.append(inner().clone())
        plain(launches[1:], *arguments)

    monkeypatch.setattr(engine, "launch", interrupted)
    for index in range(3):
        assert torch.equal(outer(), expected[0][index])
        assert torch.equal(found[index], expected[1][index])


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


def test_the_suite_passes_on_a_gpu() -> None:
    """With kernels, only what is quick to compile: a form of call takes seconds."""
    results = check_strategy("rejection", device="cuda", backend="torch")
    some = ["offsets_advance", "out_is_overwritten", "totals", "steps_differ", "decreasing_counts", "graph_capture"]
    results += check_strategy("greedy", device="cuda", backend="triton", only=some)
    assert {result.name: result.message for result in results if result.status not in {"passed", "skipped"}} == {}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("form", ["probs", "logits"])
def test_runs_on_the_device_of_the_rows(form: str) -> None:
    """Which is not the current one: in a plain call, and in a graph of that device."""
    strategy, call = create("block"), batch(8, form)
    sampling = SamplingParams(top_p=0.9) if form == "logits" else None
    expected = strategy.verify(**call | {"sampling": sampling}, rng=5).output_token_ids.to("cuda:1")
    elsewhere = {name: value.to("cuda:1") for name, value in call.items() if name != "sampling"}
    assert torch.equal(strategy.verify(**elsewhere, sampling=sampling, rng=5).output_token_ids, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
        found = strategy.verify(**elsewhere, sampling=sampling, rng=5)
    graph.replay()
    assert torch.equal(found.output_token_ids, expected)


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


@pytest.mark.parametrize("kind", laws.NEIGHBOURLY.values())
def test_a_neighbour_s_filter_changes_nothing(kind: str) -> None:
    """Down to the last bit of a random number, in rows of several blocks."""
    assert laws.compare_neighbours(kind, (tunings.SIZES,), vocab_size=FULL, device="cuda") == ""


# Addresses beyond 2^31


@pytest.mark.parametrize("count", [4, 100])
@pytest.mark.parametrize("kind", ["probs", "logits"])
def test_entropies(kind: str, count: int) -> None:
    """Those of float64, of flat rows and of certain tokens too, in batches of every size."""
    rows = (
        torch.randn(count, 2, FULL, device="cuda")
        * torch.tensor([0.0, 0.1, 3.0, 50.0], device="cuda")[torch.arange(count, device="cuda") % 4, None, None]
    )
    p = rows.softmax(-1)
    expected = torch.special.entr(p.double() if kind == "probs" else rows.double().softmax(-1)).sum(-1)[:, 0]
    given = {"target_probs": p} if kind == "probs" else {"target_logits": rows}
    strategy, ids = laws.Expecting(backend="triton"), torch.zeros(count, 1, dtype=torch.int64, device="cuda")
    assert strategy.verify(ids, **given, state={"expected": expected}).num_accepted.tolist() == [1] * count


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


def test_models_on_a_gpu() -> None:
    """Their rows and laws are there, and what a row of the table says of them is found on the CPU."""
    arguments = ["--prompts", "2", "--max-new-tokens", "12", "--num-draft-tokens", "2", "--device", "cuda"]
    printed = cli_support.run("compare", "--strategies", "rejection,fly,greedy", *arguments, "-f", "json").stdout
    rows = json.loads(printed)["rows"]
    assert [(row["error"], row["num_steps"] > 0) for row in rows] == [(None, True)] * 3
    assert rows[0]["tv"] == pytest.approx(0, abs=1e-6)
    assert "steps" in cli_support.run("generate", "import os", "--max-new-tokens", "12", "--device", "cuda").stdout
