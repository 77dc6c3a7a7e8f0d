"""Calls in surroundings that a server may have: other threads that compile, tracers, handlers of signals, defaults."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import acceptlib
from acceptlib import AcceptanceStrategy, Rng, SamplingParams, Traits, VerifyResult, arrays, exact, rule
from acceptlib.engine import scratch
from acceptlib.engine.process import law
from acceptlib.errors import BackendError, InputError
from acceptlib.ops import Value
from acceptlib.strategies.rejection import Rejection
from acceptlib.testing import check_strategy
from acceptlib.testing.batches import lay_out, mixed, same

NAMES = ("rejection", "block", "greedy")


def call(count: int = 3, layout: str = "padded", form: str = "logits", first_key: int = 0) -> dict[str, Any]:
    """Return the arguments of a call."""
    return lay_out(mixed(count + 1, first_key=first_key)[1:], layout, form)


@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("name", NAMES)
def test_other_threads_compile(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets one flag for the whole process while any thread compiles or exports: a call must not look at it."""
    strategy, arguments = acceptlib.create(name), call(3, layout)
    wanted = strategy.verify(**arguments, rng=torch.Generator().manual_seed(3))
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    same(strategy.verify(**arguments, rng=torch.Generator().manual_seed(3)), wanted)


def test_a_thread_verifies_while_another_compiles() -> None:
    strategy, arguments = acceptlib.create("rejection"), call()
    found: list[VerifyResult] = []
    wanted = strategy.verify(**arguments, rng=0)
    done = threading.Event()

    def verify() -> None:
        while not done.is_set():
            found.append(strategy.verify(**arguments, rng=0))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify)
        try:
            for width in range(1, 6):
                torch.compile(torch.nn.Linear(width, 1), backend="aot_eager")(torch.ones(1, width))
        finally:
            done.set()
        verified.result()
    assert len(found) > 1
    for result in found:
        same(result, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_traced_call_is_recorded(name: str) -> None:
    """Its results are written through NumPy, of which a tracer of operations would see nothing."""
    strategy, arguments = acceptlib.create(name), call()

    def tokens(ids: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
        return strategy.verify(ids, target_logits=target, draft_logits=draft, rng=0).output_token_ids

    given = [arguments[key] for key in ("draft_token_ids", "target_logits", "draft_logits")]
    graph = make_fx(tokens)(*given)
    other = call(first_key=9)
    given = [other[key] for key in ("draft_token_ids", "target_logits", "draft_logits")]
    assert torch.equal(graph(*given), tokens(*given))


def test_fake_tensors_give_shapes_and_leave_nothing_behind() -> None:
    strategy, arguments = acceptlib.create("rejection"), call()
    wanted = strategy.verify(**arguments, rng=0)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(value) for name, value in arguments.items()}
        found = strategy.verify(**fakes, rng=0)
        assert found.output_token_ids.shape == wanted.output_token_ids.shape
        streams = Rng(seeds=torch.zeros(2, dtype=torch.int64), offsets=torch.ones(2, dtype=torch.int64))
        ids, probs = acceptlib.sample(torch.empty(2, 7, device="meta"), rng=_on_meta(streams), position=0)
        assert (ids.shape, probs.shape) == ((2,), (2, 7))
    same(strategy.verify(**arguments, rng=0), wanted)
    acceptlib.sample(torch.zeros(2, 7), rng=Rng.of(0, 2, "cpu"), position=0)


def test_fake_parameters_are_kept_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CACHE", arrays._Cache())
    for mode in (FakeTensorMode(), contextlib.nullcontext()):
        with mode:
            logits, streams = torch.empty(2, 7, device="meta"), _on_meta(Rng.of(0, 2, "meta"))
            _, probs = acceptlib.sample(logits, sampling=SamplingParams(temperature=0.5), rng=streams, position=0)
    assert type(probs) is torch.Tensor


def _on_meta(rng: Rng) -> Rng:
    return Rng(seeds=rng.seeds.to("meta"), offsets=rng.offsets.to("meta"))


@pytest.mark.parametrize("vocab_size", [100, 5000, 20_000])
@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {}], ids=str)
def test_a_traced_law_is_one_of_other_rows_and_masks(filters: dict[str, float], vocab_size: int) -> None:
    """NumPy's part would be a constant of the graph."""
    rows = torch.randn(2, 2, vocab_size, generator=torch.manual_seed(0))
    masks = torch.randint(-(2**31), 2**31, (2, 2, -(-vocab_size // 32)), generator=torch.manual_seed(1)).int()

    def law_of(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return law(logits, SamplingParams(**filters, allowed_token_bitmask=mask))

    traced = make_fx(law_of)(rows[0], masks[0])
    assert torch.equal(traced(rows[1], masks[1]), law_of(rows[1], masks[1]))


def test_a_tracer_that_would_keep_seeds_is_refused() -> None:
    streams = Rng.of(0, 2, "cpu")
    with pytest.raises(InputError, match="expected a call outside of make_fx"):
        make_fx(lambda rows: acceptlib.sample(rows, rng=streams, position=0))(torch.zeros(2, 7))


@pytest.mark.parametrize(
    "transform",
    [torch.func.vmap, torch.func.functionalize, lambda f: torch.func.grad(lambda x: f(x).sum().float())],
    ids=["vmap", "functionalize", "grad"],
)
def test_transforms_of_functions_are_refused(transform: Callable[..., Any]) -> None:
    strategy, ids = acceptlib.create("greedy"), torch.zeros(2, 2, dtype=torch.int64)

    def tokens(rows: torch.Tensor) -> torch.Tensor:
        return strategy.verify(ids, target_logits=rows, rng=0).output_token_ids

    with pytest.raises(InputError, match=r"expected a call outside of torch\.func"):
        transform(tokens)(torch.randn(2, 2, 3, 9) if transform is torch.func.vmap else torch.randn(2, 3, 9))


class Interrupting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function once, in the middle of the n-th operation of others."""

    def __init__(self, number: int, what: Callable[[], object]) -> None:
        """Take what to call."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.left, self.what = number, what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        found = func(*args, **(kwargs or {}))
        self.left -= 1
        if self.left == 0:
            self.what()
        return found


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["rejection", "block", "typical"])
def test_a_call_within_a_call_disturbs_neither(name: str, count: int) -> None:
    """As where a handler of a signal verifies: the memory that calls reuse is the outer one's."""
    strategy, outer, inner = acceptlib.create(name), call(count), call(count, first_key=20)
    wanted = [strategy.verify(**arguments, rng=1) for arguments in (outer, inner)]
    for number in range(1, 200, 3):
        found = []
        with Interrupting(number, lambda found=found: found.append(strategy.verify(**inner, rng=1))) as mode:  # type: ignore[misc]
            result = strategy.verify(**outer, rng=1)
        same(result, wanted[0])
        if mode.left > 0:
            break
        same(found[0], wanted[1])
    assert number > 10
    assert scratch._BUFFERS.users == 0


def test_a_draw_within_a_draw_disturbs_neither() -> None:
    """`sample` reuses memory too."""
    sampling, rng = SamplingParams(temperature=0.5, top_p=0.9), Rng.of(1, 3, "cpu")
    outer, inner = torch.randn(2, 3, 1500).unbind()
    wanted = [acceptlib.sample(rows, rng=rng, position=0, sampling=sampling) for rows in (outer, inner)]
    for number in range(1, 200, 3):
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        again = lambda found=found: found.append(acceptlib.sample(inner, rng=rng, position=0, sampling=sampling))  # noqa: E731
        with Interrupting(number, again) as mode:
            found.append(acceptlib.sample(outer, rng=rng, position=0, sampling=sampling))
        assert all(map(torch.equal, found[-1], wanted[0]))
        if mode.left > 0:
            break
        assert all(map(torch.equal, found[0], wanted[1]))
    assert number > 10
    assert scratch._BUFFERS.users == 0


def test_an_interrupted_call_leaves_the_mode_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a guard within the engine's own is never ended, its end comes with the frame's, and has to come first."""
    held = []

    def lost(*_: Any) -> None:
        guard = torch._C._InferenceMode(False)  # noqa: FBT003 - it takes no name
        guard.__enter__()
        held.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr("acceptlib.engine.torch_engine._Step.run", lost)
    with contextlib.suppress(KeyboardInterrupt):  # keeps no frame, unlike pytest.raises
        acceptlib.create("rejection").verify(**call(form="probs"), rng=0)
    assert held
    assert not torch.is_inference_mode_enabled()


def test_what_calls_share_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CACHE", arrays._Cache())
    monkeypatch.setattr(arrays, "MAX_BYTES", 1000)
    for length in range(50, 70):
        arrays.cached(("x", length), None, lambda length=length: torch.zeros(length, dtype=torch.int64).numpy())  # type: ignore[misc]
        assert sum(array.nbytes for array in arrays._CACHE.found.values()) <= 1000 + 8 * length


def test_what_calls_share_counts_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CACHE", arrays._Cache())
    monkeypatch.setattr(arrays, "MAX_BYTES", 1000)
    for number in range(5):
        arrays.cached(number, None, lambda: (torch.zeros(1).numpy(), torch.zeros(200).numpy()))
        assert len(arrays._CACHE.found) <= 2


def test_what_calls_share_is_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CACHE", arrays._Cache())
    monkeypatch.setattr(arrays, "MAX_CACHED", 3)
    for length in range(9):
        arrays.cached(("x", length), None, lambda length=length: torch.zeros(length).numpy())  # type: ignore[misc]
        assert len(arrays._CACHE.found) <= 3


def test_threads_share_while_others_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and parameters that are new in every call, so that all of them write what all of them read."""
    monkeypatch.setattr(arrays, "MAX_CACHED", 16)
    switch = sys.getswitchinterval()
    monkeypatch.setattr(arrays, "_CACHE", arrays._Cache())

    def fill(thread: int) -> None:
        for number in range(2000):
            arrays.cached((thread, number), None, lambda: torch.zeros(1).numpy())

    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(fill, range(4)))
    finally:
        sys.setswitchinterval(switch)
    assert len(arrays._CACHE.found) <= 16
    assert arrays._CACHE.num_bytes == sum(array.nbytes for array in arrays._CACHE.found.values())


@pytest.fixture(params=[(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")], ids=str)
def defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set another default dtype or device, as loaders of models do."""
    dtype, device = request.param
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("defaults")
def test_a_backend_is_tried_under_the_usual_defaults() -> None:
    """Whatever another dtype would do to it: what else a plain call raises is not the backend's."""

    class OfFloats(Rejection):
        name = "of-floats"

        def verify(self, *arguments: Any, target_probs: Any = None, **named: Any) -> acceptlib.VerifyResult:
            if target_probs is not None and target_probs.dtype != torch.float32:
                msg = "no kernel for this dtype"
                raise BackendError(msg)
            return Rejection().verify(*arguments, target_probs=target_probs, **named)

    (result,) = check_strategy(OfFloats(), backend="triton", only="padding")
    assert result.status == "passed"


@pytest.mark.usefixtures("defaults")
def test_suite_and_exact_law_under_other_defaults() -> None:
    dtype = torch.get_default_dtype()
    results = check_strategy("typical", only=["filters", "logprobs", "declared_bound", "emitted_law", "neighbours"])
    assert {result.status for result in results} <= {"passed", "skipped"}
    assert torch.get_default_dtype() == dtype
    target = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64, device="cpu")
    draft = torch.tensor([[0.25, 0.75]], dtype=torch.float64, device="cpu")
    assert exact.tv(acceptlib.create("rejection"), target, draft) < 1e-12
    assert exact.expected_tokens(acceptlib.create("rejection"), target, draft) == pytest.approx(1.75)


def test_a_rule_that_raises_costs_its_own_call_alone() -> None:
    class Fragile(AcceptanceStrategy):
        """Fails on rows of two entries."""

        name = "fragile"
        traits = Traits(guarantee="lossy", bound="none")

        @rule
        def accept(target_prob: Value) -> Value:
            """Return h."""
            if getattr(target_prob, "shape", ()) == (1, 1):
                raise ValueError
            return target_prob

    strategy = Fragile()
    with pytest.raises(acceptlib.AcceptlibError, match=r"Fragile\.accept"):
        strategy.verify(torch.zeros(1, 1, dtype=torch.int64), target_probs=torch.full((1, 2, 2), 0.5), rng=0)
    assert scratch._BUFFERS.users == 0
    assert not torch.is_inference_mode_enabled()


def test_memory_that_is_an_entry_short_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_BUFFERS", scratch._Buffers())
    for length in (5, 6, 4):
        assert scratch.scratch("rows", (length,), torch.float32, torch.device("cpu")).shape == (length,)


def test_each_thread_has_memory_of_its_own() -> None:
    def address() -> int:
        return scratch.scratch("rows", (5,), torch.float32, torch.device("cpu")).data_ptr()

    here = address()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(address).result() != here
    assert address() == here
