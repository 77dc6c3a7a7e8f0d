"""What an engine around `verify` relies on: its own memory, few compilations, any strides, and graphs."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import os
import re
import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import support
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import acceptlib
from acceptlib import AcceptanceStrategy, LogitBias, Rng, SamplingParams, Traits, VerifyResult, Workspace, arrays
from acceptlib.checks import Arguments
from acceptlib.compat import _common, flashinfer, vllm_v0, vllm_v1
from acceptlib.engine import backends, custom_op, scratch
from acceptlib.errors import InputError
from acceptlib.testing.batches import Request, lay_out, ordinary

pytest.importorskip("triton", reason="without Triton there are no fused kernels")

import memory_interpreted as memory
import triton_calls
import triton_engine_cases as cases
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from acceptlib.engine.triton import engine, plans, tunings
from acceptlib.engine.triton import kernel as kernels

# Where the kernels read and write


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what is wrong in interpreted kernels, by case."""
    # Workers share the folder above their own, which is this run's.
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return cases.run_apart("interpreted", folder / "memory.json", memory.__file__)


@pytest.mark.parametrize("case", memory.CASES)
def test_memory(case: str, interpreted: dict[str, str]) -> None:
    """Same tokens in a workspace full of rubbish that is not exceeded, and from rows beyond 2^31 elements."""
    assert interpreted[case] == ""


class Whole(AcceptanceStrategy):
    """Overrides `verify`."""

    name = "whole"
    traits = Traits(guarantee="lossy", bound="none")

    def verify(self, draft_token_ids: torch.Tensor, **_: Any) -> VerifyResult:  # type: ignore[override]
        return VerifyResult.empty(len(draft_token_ids), 0, draft_token_ids.device)


def test_what_needs_no_workspace() -> None:
    assert Whole().workspace(8, 4, 1000, "cpu").words.numel() == 0
    strategy = acceptlib.create("block")
    workspace = strategy.workspace(8, 4, 1000, "cpu")
    assert (workspace.counters.numel(), workspace.words.numel()) == (0, 0)
    call = lay_out([ordinary(3, 7, 0)], "padded", "probs")
    assert torch.equal(
        strategy.verify(**call, rng=0, workspace=workspace).output_token_ids,
        strategy.verify(**call, rng=0).output_token_ids,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"words": torch.empty(4, dtype=torch.int32)},
            r"workspace\.words: expected a contiguous int64 .*got \[4\] int32",
        ),
        ({"words": torch.zeros(1, dtype=torch.int64).expand(4)}, r"workspace\.words: .* of strides \[0\]"),
        ({"words": torch.zeros(2, 2, dtype=torch.int64)}, r"workspace\.words: .* got \[2, 2\]"),
        ({"counters": torch.zeros(4, dtype=torch.int64)}, r"workspace\.counters: expected a contiguous int32"),
        ({"counters": torch.zeros(4, dtype=torch.int32, device="meta")}, r"workspace\.words: .* on one device, .* cpu"),
        ({"counters": None}, r"workspace\.counters: .*got NoneType"),
    ],
)
def test_memory_that_kernels_could_not_use(changes: dict[str, Any], message: str) -> None:
    given = {"counters": torch.zeros(4, dtype=torch.int32), "words": torch.empty(4, dtype=torch.int64)}
    with pytest.raises(InputError, match=message):
        Workspace(**given | changes)


@pytest.mark.parametrize("kind", ["probs", "logits"])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_no_default_device_matters(layout: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows say where a call runs, and no memory that is kept is of another device."""
    monkeypatch.setattr(scratch, "_BUFFERS", scratch._Buffers())
    call, strategy = lay_out([ordinary(3, 7, 0), ordinary(2, 7, 1)], layout, kind), acceptlib.create("block")
    with torch.device("meta"):
        found = strategy.verify(**call, rng=0, logprobs=True)
    assert torch.equal(found.output_token_ids, strategy.verify(**call, rng=0, logprobs=True).output_token_ids)


def test_no_device_is_none_for_a_workspace() -> None:
    with pytest.raises(InputError, match="device 'None'"):
        acceptlib.create("rejection").workspace(1, 1, 8, None)  # type: ignore[arg-type]


def test_no_fake_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_BUFFERS", scratch._Buffers())
    wanted = ("rows", (2, 9), torch.float32, torch.device("cpu"))
    with FakeTensorMode():
        assert type(scratch.scratch(*wanted)) is FakeTensor
    assert type(scratch.scratch(*wanted)) is torch.Tensor


@pytest.mark.parametrize("name", ["rejection", "relaxed"])
def test_results_made_in_inference_mode_are_written_outside_of_it(name: str) -> None:
    strategy, device = triton_calls.strategies()[name], torch.device("cpu")
    sizes = (2, 3, 11)
    with torch.inference_mode():
        out = VerifyResult.empty(*sizes[:2], device, logprobs=True)
        memory_of_its_own = engine.workspace(strategy.plan, *sizes, device)
        workspace = Workspace(**{name: getattr(memory_of_its_own, name).clone() for name in ("counters", "words")})
    call = lay_out([ordinary(*sizes[1:], seed) for seed in range(2)], "padded", "logits")
    given = cases.inputs(
        call.pop("draft_token_ids"),
        **call,
        rng=Rng(seeds=torch.arange(2), offsets=torch.zeros(2, dtype=torch.int64)),
        state=strategy.initial_state(2, device),
        state_names=strategy.plan.traits.state,
        logprobs=True,
        out=out,
        workspace=workspace,
    )
    with mock.patch.object(engine, "launch") as launch:
        assert engine.verify(strategy.plan, given) is out
    launch.assert_called()


def test_workspace_in_a_compiled_function() -> None:
    allocate = torch.compile(lambda: Workspace.allocate(2, 3, "cpu").counters, fullgraph=True, backend="eager")
    assert torch.equal(allocate(), torch.zeros(2, dtype=torch.int32))


class Operations(TorchDispatchMode):
    """Names of the tensor operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["padded", "ragged-logits"])
@pytest.mark.parametrize("name", triton_calls.strategies())
def test_nothing_is_allocated(name: str, form: str) -> None:
    """Beside the kernels a call with `out` and a workspace makes views of tensors, and copies state into them."""
    strategy, sizes, device = triton_calls.strategies()[name], (5, 3, 1000), torch.device("meta")
    arguments = nowhere(strategy, *sizes, form)
    arguments["out"] = VerifyResult.empty(*sizes[:2], device)
    arguments["workspace"] = engine.workspace(strategy.plan, *sizes, device)
    with mock.patch.object(engine, "launch"):
        with Operations() as operations:
            engine.verify(strategy.plan, cases.inputs(**arguments))
        assert {*operations.names} <= {"slice", "view", "select", "unbind", "detach", "copy_"}
        with Operations() as operations:
            engine.verify(strategy.plan, cases.inputs(**{**arguments, "out": None}))
        assert "empty" in operations.names


def test_a_number_becomes_a_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that is one number for all requests is filled in at the first call alone, in any mode of torch."""
    monkeypatch.setattr(arrays, "_CACHE", arrays._Cache())
    strategy, call = acceptlib.create("rejection"), lay_out(requests(3), "padded", "logits") | {"rng": 0}

    def filled(parameters: dict[str, Any]) -> int:
        """Return how many tensors a call fills whose result is that of given ones."""
        with Operations() as operations:
            result = strategy.verify(**call, sampling=SamplingParams(**parameters))
        given = {name: torch.tensor([number] * 3) for name, number in parameters.items()}
        assert_same(result, strategy.verify(**call, sampling=SamplingParams(**given)))
        return operations.names.count("full")

    parameters = {"temperature": 0.65, "top_k": 7, "top_p": 0.75, "min_p": 0.015625}
    with torch.inference_mode():
        assert filled(parameters) == len(parameters)
    kept = [value for (key, _, _), value in arrays._CACHE.found.items() if key[0] == "full"]
    assert kept
    assert not any(tensor.is_inference() for tensor in kept)
    assert filled(parameters) == 0
    assert filled(parameters | {"temperature": 0.66}) == 1
    monkeypatch.setattr(arrays, "MAX_CACHED", 6)
    for temperature in (0.1, 0.2, 0.3):
        filled({"temperature": temperature})
        assert len(arrays._CACHE.found) <= 6
    assert filled({"temperature": 0.3}) == 0  # what is new is kept rather than what is old


@pytest.mark.parametrize("kind", ["engine", "drop-in"])
def test_what_calls_share_is_of_their_stream(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream may read before it is written. A pretended GPU: nothing is launched."""
    gpu, stream, capturing = torch.device("cuda", 0), mock.Mock(cuda_stream=1), [False]
    monkeypatch.setattr(arrays, "_CACHE", arrays._Cache())
    monkeypatch.setattr(_common, "_ZEROS", {})
    monkeypatch.setattr(arrays, "current_stream", lambda _: stream.cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))  # noqa: ARG005

    def shared() -> torch.Tensor:
        if kind == "drop-in":
            return _common.zero(gpu)
        found: torch.Tensor = arrays.cached("x", gpu, lambda: torch.zeros(1, dtype=torch.float64, device=gpu))
        return found

    first = shared()
    assert shared() is first
    stream.cuda_stream = 2
    assert shared() is not first
    stream.cuda_stream, capturing[0] = 3, True
    # A graph makes its own, or takes what was written before torch waited for all streams to capture it.
    assert (shared() is first) == (kind == "drop-in")
    assert len(arrays._CACHE.found) + len(_common._ZEROS) == 2


# What drop-ins launch beside the kernels


def dropins(count: int, most: int, vocab_size: int) -> dict[str, tuple[Callable[[], object], list[str]]]:
    """Return calls of drop-ins, and the operations of each that are a kernel on a GPU."""
    p, q = torch.rand(count, most + 1, vocab_size), torch.rand(count, most, vocab_size)
    ids, bonus = torch.zeros(count, most, dtype=torch.int64), torch.zeros(count, 1, dtype=torch.int64)
    chain = functools.partial(flashinfer.chain_speculative_sampling, q, ids, p)
    totals = [torch.zeros(count, dtype=torch.int32) for _ in range(2)]
    words = torch.zeros(count, dtype=torch.int64)
    rejection, typical = vllm_v0.RejectionSampler(), vllm_v0.TypicalAcceptanceSampler()
    metadata = vllm_v1.SpecDecodeMetadata.make_dummy(ids.tolist(), torch.device("cpu"))
    v1 = functools.partial(vllm_v1.RejectionSampler(), metadata, q.flatten(0, 1), p[:, 1:].flatten(0, 1), bonus)
    warm = vllm_v1.SamplingMetadata(torch.ones(count), all_greedy=False, all_random=True)
    greedy = vllm_v1.SamplingMetadata(None, all_greedy=True, all_random=False)
    mixed = vllm_v1.SamplingMetadata(torch.ones(count), all_greedy=False, all_random=False)
    return {
        "flashinfer": (chain, ["randint"]),
        "flashinfer-counts": (lambda: chain(*totals), ["randint", "_foreach_add_"]),
        "flashinfer-int-seed": (lambda: chain(seed=3, offset=5), ["arange", "add_", "full_like"]),
        "flashinfer-seeds": (lambda: chain(seed=words, offset=words), []),
        "vllm_v0-rejection": (lambda: rejection(p, bonus, q, ids), ["randint"]),
        "vllm_v0-typical": (lambda: typical(p, bonus, None, ids), []),
        "vllm_v1-random": (lambda: v1(warm), ["randint"]),
        "vllm_v1-mixed": (lambda: v1(mixed), ["clamp", "randint"]),
        "vllm_v1-greedy": (lambda: v1(greedy), []),
    }


@pytest.mark.parametrize("name", dropins(1, 1, 2))
def test_few_kernels_beside_the_engines(name: str) -> None:
    """Each takes a microsecond or two, as much as a twentieth of the step itself."""
    step, expected = dropins(5, 3, 1000)[name]
    with (
        mock.patch.object(engine, "launch"),
        mock.patch.object(backends, "resolve", return_value=backends.Backend("triton", engine.verify)),
    ):
        step()  # allocates the engine's workspace
        with Operations() as operations:
            step()
    free = {"empty", "view", "expand", "select", "slice", "unbind", "detach"}
    assert sorted(name for name in operations.names if name not in free) == sorted(expected)


# How often Triton compiles

BATCHES = [(b, k) for b in (1, 2, 3, 7, 16, 17, 100, 257, 4096) for k in (0, 1, 2, 3, 5, 8, 16, 64)]
VOCABULARIES = (50, 128256)


def launches(strategy: AcceptanceStrategy, num_requests: int, most: int, vocab_size: int, form: str) -> list[Any]:
    """Return the launches of a call on tensors without memory, so that nothing depends on what they hold."""
    found: list[Any] = []
    arguments = nowhere(strategy, num_requests, most, vocab_size, form)
    with (
        mock.patch.object(engine, "launch", cases.each(lambda *launch: found.append(launch))),
        mock.patch.object(engine, "_overlaps", return_value=True),  # as on the newest devices
    ):
        engine.verify(strategy.plan, cases.inputs(**arguments))
    return found


def nowhere(strategy: AcceptanceStrategy, num_requests: int, most: int, vocab_size: int, form: str) -> dict[str, Any]:
    """Return the arguments of a call on tensors without memory."""
    empty = functools.partial(torch.empty, device="meta")
    num_tokens = max(num_requests * most - 1, 0)
    ragged, kind = form == "ragged-logits", "probs" if form == "padded" else "logits"
    target, draft = (num_tokens + num_requests,) if ragged else (num_requests, most + 1), (num_requests, most)
    arguments: dict[str, Any] = {
        f"target_{kind}": empty(*target, vocab_size),
        f"draft_{kind}": empty(*((num_tokens,) if ragged else draft), vocab_size),
        "rng": Rng(seeds=empty(num_requests, dtype=torch.int64), offsets=empty(num_requests, dtype=torch.int64)),
        "state_names": strategy.plan.traits.state,
        "state": {name: empty(num_requests, dtype=torch.bool) for name in strategy.plan.traits.state},
    }
    if ragged:
        arguments["cu_num_draft_tokens"] = empty(num_requests + 1, dtype=torch.int32)
        arguments["max_num_draft_tokens"] = most
        arguments["sampling"] = SamplingParams(temperature=empty(num_requests))
    elif form == "far-apart":
        for model, length in (("target", most + 1), ("draft", most)):
            shape = (num_requests, length, vocab_size)
            strides = (2**31 * num_requests, 2**31 if num_requests > 2 else 2**20, 1)
            arguments[f"{model}_logits"] = torch.empty_strided(shape, strides, device="meta")
    return arguments | {"ids": empty(*((num_tokens,) if ragged else draft), dtype=torch.int64)}


@pytest.mark.parametrize("form", ["padded", "ragged-logits", "far-apart"])
@pytest.mark.parametrize("name", triton_calls.strategies())
def test_a_variant_a_size_whatever_the_batch(name: str, form: str) -> None:
    """One for batches of each size, for each stage and place in the sequence of stages."""
    strategy = triton_calls.strategies()[name]
    most_variants = len(tunings.SIZES) + 1
    if form == "padded":  # of probabilities, small or large, or between where whole rows are gone through
        most_variants = 3 if plans.rules_of(strategy.plan).goes_through_rows else 2
    if "next_residual_mass" in strategy.plan.reads:
        most_variants = 3  # and small ones of two kinds
    specialise = create_function_from_signature(
        kernels.verify_kernel.signature, kernels.verify_kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    for vocab_size in VOCABULARIES:
        variants = collections.defaultdict(set)
        specialisations = collections.defaultdict(set)
        for num_requests, most in BATCHES:
            for key, _, warps, _, values in launches(strategy, num_requests, most, vocab_size, form):
                variants[key[1:]].add((key[0], warps))
                _, found, _ = specialise(*values, *key)
                specialisations[key].add(tuple(map(str, found[: len(values)])))
        assert variants
        assert {place: len(keys) for place, keys in variants.items() if len(keys) > most_variants} == {}
        # A kernel is found again by its key, so Triton must not tell apart what has one.
        assert [found for found in specialisations.values() if len(found) > 1] == []


# In graphs


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def requests(count: int) -> list[Request]:
    return [ordinary(3 - index % 2, 40, index) for index in range(count)]


def streams(count: int) -> Rng:
    return Rng(seeds=torch.arange(count) * 31 - 7, offsets=torch.arange(count))


def everything(count: int) -> dict[str, Any]:
    """Return sampling parameters of every kind, numbers and tensors, and others for the draft."""
    bias = LogitBias(torch.tensor([[3, -1]] * count), torch.tensor([[-torch.inf, 0.0]] * count))
    mask = torch.full((count, 4, 2), -2, dtype=torch.int32)
    return {
        "sampling": SamplingParams(
            temperature=torch.linspace(0, 1, count), top_k=20, top_p=torch.linspace(0.5, 1, count), min_p=0.01,
            allowed_token_bitmask=mask, logit_bias=bias,
        ),
        "draft_sampling": SamplingParams(temperature=0.5, top_k=torch.arange(count), logit_bias=bias),
    }  # fmt: skip


def calls(count: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return strategies and arguments by a readable name: everything that `verify` takes."""
    batch = requests(count)
    padded, ragged = lay_out(batch, "padded", "probs"), lay_out(batch, "ragged", "probs")
    logits, ragged_logits = lay_out(batch, "padded", "logits"), lay_out(batch, "ragged", "logits")
    one_hot = {name: value for name, value in padded.items() if not name.startswith("draft_p")}
    out = VerifyResult.empty(count, 3, torch.device("cpu"), logprobs=True, num_passed=True)
    out = dataclasses.replace(out, totals=torch.zeros(2, dtype=torch.int64))
    return {
        "padded": ("rejection", padded),
        "ragged": ("block", ragged),
        "one-hot": ("fly", one_hot),
        "sampling": ("rejection", {**logits, **everything(count), "logprobs": True}),
        "target-only": ("typical", {**ragged_logits, "sampling": SamplingParams(temperature=0.7)}),
        "bonus": ("rejection", {**ragged, "bonus_token_ids": torch.arange(count)}),
        "ends": (
            "rejection",
            {
                **ragged,
                "cu_num_draft_tokens": ragged["cu_num_draft_tokens"][1:],
                "bonus_token_ids": torch.arange(count),
            },
        ),
        "int": ("rejection", {**padded, "rng": 5}),
        "standing": ("rejection", {**padded, "rng": dataclasses.replace(streams(count), advances=False)}),
        "uniforms": ("rejection", {**padded, "uniforms": streams(count).uniforms(3), "rng": None}),
        "out": ("rejection", {**padded, "out": out, "logprobs": True}),
        "state": ("relaxed", {**logits, "state": {"thinking": torch.arange(count) % 2 == 0}}),
        "workspace": ("rejection", {**padded, "workspace": Workspace.allocate(8, 8, "cpu")}),
    }


CALLS = list(calls(1))


def compiled(strategy: AcceptanceStrategy, **options: Any) -> Callable[[dict[str, Any]], VerifyResult]:
    """Return a step around `verify`, compiled."""

    def step(arguments: dict[str, Any]) -> VerifyResult:
        return strategy.verify(**arguments)

    return torch.compile(step, fullgraph=True, **options)  # type: ignore[no-any-return]


def assert_same(found: VerifyResult, expected: VerifyResult) -> None:
    for field in dataclasses.fields(VerifyResult):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_equals_eager(name: str, backend: str) -> None:
    key, arguments = calls(4)[name]
    strategy = triton_calls.strategies()[key]
    arguments = {"rng": streams(4)} | arguments
    expected = strategy.verify(**copy.deepcopy(arguments))
    found = compiled(strategy, backend=backend)(arguments)
    assert_same(found, expected)
    assert arguments.get("out") in {None, found}
    rng = arguments["rng"]
    if isinstance(rng, Rng):
        assert rng.offsets.tolist() == [offset + rng.advances for offset in range(4)]


def test_a_compiled_ragged_call_takes_its_length_from_its_result() -> None:
    """Off the CPU it could not be found without waiting."""
    strategy = acceptlib.create("rejection")
    arguments = {"rng": streams(4)} | lay_out(requests(4), "ragged", "probs")
    most = arguments.pop("max_num_draft_tokens")
    expected = strategy.verify(**copy.deepcopy(arguments), max_num_draft_tokens=most + 2)
    out = VerifyResult.empty(4, most + 2, "cpu")
    assert_same(compiled(strategy, backend="eager")(arguments | {"out": out}), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor() -> None:
    key, arguments = calls(4)["sampling"]
    strategy = acceptlib.create(key)
    arguments = {"rng": streams(4)} | arguments
    expected = strategy.verify(**copy.deepcopy(arguments))
    assert_same(compiled(strategy)(arguments), expected)
    assert arguments["rng"].offsets.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["padded", "ragged", "ends", "sampling"])
def test_one_graph_for_every_batch_size(name: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    key, _ = calls(2)[name]
    strategy = acceptlib.create(key)
    step = compiled(strategy, backend=backend, dynamic=True)
    for count in (5, 6, 9):  # unlike any other length, which would count as the same one
        arguments = {"rng": streams(count)} | calls(count)[name][1]
        expected = strategy.verify(**copy.deepcopy(arguments))
        assert_same(step(arguments), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 2**64 + 5, -(2**70)])
def test_any_int_is_a_seed(seed: int) -> None:
    ids, probs = torch.zeros(2, 1, dtype=torch.int64), torch.rand(2, 2, 9).softmax(-1)
    strategy = acceptlib.create("rejection")

    def step() -> torch.Tensor:
        return strategy.verify(ids, target_probs=probs, rng=seed).output_token_ids

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(), step())


def test_a_caller_may_build_arguments_inside() -> None:
    strategy = acceptlib.create("rejection")
    call = lay_out(requests(3), "padded", "logits")

    def step(seeds: torch.Tensor, offsets: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sampling = SamplingParams(temperature=temperature, top_p=0.9)
        result = strategy.verify(**call, rng=Rng(seeds=seeds, offsets=offsets), sampling=sampling)
        return result.output_token_ids + 0, result.num_emitted

    arguments = torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.full((3,), 0.8)
    expected = step(*copy.deepcopy(arguments))
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert arguments[1].tolist() == [1, 1, 1]


def operands(strategy: AcceptanceStrategy, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the operator's arguments for a call."""
    with mock.patch.object(torch.ops.acceptlib, "verify") as operator:
        custom_op.verify(strategy._key, Arguments(**arguments))
    return dict(operator.call_args.kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_operator(name: str) -> None:
    """What is written is declared, the fake implementation agrees, and it survives functionalisation."""
    key, arguments = calls(2)[name]
    strategy = triton_calls.strategies()[key]
    torch.library.opcheck(torch.ops.acceptlib.verify.default, (), operands(strategy, {"rng": streams(2)} | arguments))


def test_a_graph_that_another_process_saved_finds_no_other_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, too, the first strategy is number 0."""
    call = lay_out(requests(3), "padded", "logits")
    monkeypatch.setattr(custom_op, "_NUMBERS", itertools.count())
    saved = operands(acceptlib.create("lenience", lenience=1.0), {**call, "rng": 0})
    monkeypatch.setattr(custom_op, "_NUMBERS", itertools.count())
    other = acceptlib.create("lenience", lenience=0.1)
    with pytest.raises(InputError, match="make the same strategies in the same order"):
        torch.ops.acceptlib.verify(**saved)
    monkeypatch.setattr(custom_op, "_NUMBERS", itertools.count())
    same = acceptlib.create("lenience", lenience=1.0)
    torch.ops.acceptlib.verify(**saved)
    assert saved["output_token_ids"].tolist() == same.verify(**call, rng=0).output_token_ids.tolist()
    assert saved["output_token_ids"].tolist() != other.verify(**call, rng=0).output_token_ids.tolist()


def test_a_strategy_may_show_itself_by_what_is_set_after_it_was_made() -> None:
    class Later(AcceptanceStrategy):
        name = "later"
        traits = Traits(guarantee="lossy", bound="none")

        @acceptlib.rule
        def accept(target_prob: Any) -> Any:
            return target_prob

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.label = "shown"

        def __repr__(self) -> str:
            return self.label

    assert repr(Later()) == "shown"


@pytest.mark.parametrize("copied", [copy.deepcopy, support.pickled])
def test_copies_are_strategies_of_their_own(copied: Callable[[AcceptanceStrategy], AcceptanceStrategy]) -> None:
    strategy = acceptlib.create("typical", posterior_threshold=0.2)
    call = lay_out(requests(3), "padded", "logits")
    twin = copied(strategy)
    key = strategy._key
    assert key != twin._key
    expected = strategy.verify(**call, rng=0)
    operator_arguments = operands(strategy, {**call, "rng": 0})
    del strategy
    assert_same(compiled(twin, backend="eager")({**call, "rng": 0}), expected)
    with pytest.raises(InputError, match=re.escape(f"{key!r} of a compiled graph does not exist")):
        torch.ops.acceptlib.verify(**operator_arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rng": torch.Generator()}, "in a compiled function, got Generator"),
        ({"rng": "seed"}, "in a compiled function, got str"),
        ({"max_num_draft_tokens": None}, "max_num_draft_tokens: expected an int in the ragged layout of a compiled"),
    ],
)
def test_what_no_graph_can_hold(changes: dict[str, Any], message: str) -> None:
    step = compiled(acceptlib.create("rejection"), backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        step({**lay_out(requests(2), "ragged", "probs"), "rng": 0, **changes})


def test_bad_shapes_are_errors_when_the_graph_runs() -> None:
    step = compiled(acceptlib.create("rejection"), backend="eager")
    call = lay_out(requests(2), "padded", "probs")
    with pytest.raises(InputError, match=r"draft rows: expected \[B, K, V\]"):
        step({**call, "draft_probs": call["draft_probs"][:, 1:], "rng": 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_draft_tokens": 4}, "max_num_draft_tokens: expected 3, the width of draft_token_ids, got 4"),
        ({"out": VerifyResult.empty(2, 3, "cpu", logprobs=True)}, r"out\.logprobs: expected None"),
    ],
)
def test_what_numbers_and_flags_contradict_is_an_error_when_the_graph_runs(
    changes: dict[str, Any], message: str
) -> None:
    step = compiled(acceptlib.create("rejection"), backend="eager")
    with pytest.raises(InputError, match=message):
        step({**lay_out(requests(2), "padded", "probs"), "rng": 0, **changes})


def test_an_operator_is_given_state_by_name() -> None:
    state = {"second": torch.tensor([1, 2]), "first": torch.tensor([3, 4])}
    found = operands(acceptlib.create("rejection"), {**lay_out(requests(2), "padded", "probs"), "state": state})
    pairs = zip(found["state_names"], found["state"], strict=True)
    assert {name: values.tolist() for name, values in pairs} == {"second": [1, 2], "first": [3, 4]}


def test_an_operator_writes_where_the_ids_are() -> None:
    call = {name: torch.as_tensor(value, device="meta") for name, value in calls(2)["padded"][1].items()}
    found = operands(acceptlib.create("rejection"), {**call, "rng": 0})
    assert found["output_token_ids"].device == call["draft_token_ids"].device


def test_an_operator_hands_the_workspace_on() -> None:
    given, strategy = Workspace.allocate(2, 3, "cpu"), acceptlib.create("rejection")
    call = operands(strategy, {**lay_out(requests(2), "padded", "probs"), "rng": 0, "workspace": given})
    with mock.patch.object(AcceptanceStrategy, "verify") as verify:
        torch.ops.acceptlib.verify(**call)
    found = verify.call_args.kwargs["workspace"]
    assert found.counters.data_ptr() == given.counters.data_ptr()
    assert found.words.data_ptr() == given.words.data_ptr()


def test_a_compiled_call_may_be_greedy_by_a_number() -> None:
    strategy = acceptlib.create("rejection")
    call = {**lay_out(requests(4), "padded", "logits"), "sampling": SamplingParams(temperature=0.0), "rng": 0}
    assert_same(compiled(strategy, backend="eager")(call), strategy.verify(**call))


def test_an_operator_says_that_kernels_write_its_workspace() -> None:
    """On a CPU they do not, so that nothing else notices."""
    arguments = {argument.name: argument for argument in torch.ops.acceptlib.verify.default._schema.arguments}
    assert arguments["workspace"].alias_info.is_write


def test_a_compiled_call_takes_numbers_of_numpy() -> None:
    """A bound on drafted tokens comes from lengths, often NumPy's."""
    strategy, rows = acceptlib.create("rejection"), torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    call = {"target_probs": rows / rows.sum(1, keepdim=True), "cu_num_draft_tokens": torch.tensor([0, 1, 1])}
    ids, most = torch.zeros(1, dtype=torch.int64), np.int64(2)

    def step(ids: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = strategy.verify(ids, **call, max_num_draft_tokens=most, rng=3).output_token_ids
        return tokens

    assert torch.equal(torch.compile(step, fullgraph=True, backend="eager")(ids), step(ids))
