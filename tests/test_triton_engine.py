"""The Triton engine interpreted against the torch engine, token for token, and compiled without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import triton_engine_cases as cases
import triton_law_cases as laws
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import ASTSource

import acceptlib
from acceptlib import VerifyResult, checks, ops
from acceptlib.engine import backends
from acceptlib.engine.triton import call as calls
from acceptlib.engine.triton import engine, launching, memory, plans, tunings
from acceptlib.engine.triton.kernel import verify_kernel
from acceptlib.engine.triton.rows import BOTH, DRAFT, TARGET
from acceptlib.engine.triton.stages import parts
from acceptlib.errors import BackendError
from acceptlib.inputs import Inputs
from acceptlib.ops import Value
from acceptlib.rng import Root

Results = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the results of this run."""
    # Workers share the folder above their own, which is this run's.
    base: Path = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "triton-engine"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Return a function that runs all cases of a mode, once."""
    return functools.cache(lambda mode: cases.run_apart(mode, folder / f"{mode.replace(':', '-')}.json"))


@pytest.mark.parametrize(("group", "label"), laws.labels())
def test_laws(group: str, label: str, folder: Path) -> None:
    """What is kept of a row and with what probability, its entropy, draws by a law, and sums in thirds."""
    assert cases.run_apart(f"interpreted:{group}", folder / f"{group}.json", laws.__file__)[label] == ""


@pytest.mark.parametrize(("mode", "label"), cases.interpreted())
def test_interpreted_equals_torch(mode: str, label: str, results: Results) -> None:
    """Tokens, counts, status and offsets: exactly, from probabilities, bad values included."""
    assert results(mode)[label] == ""


@pytest.mark.parametrize(("mode", "label"), cases.compiled())
def test_compiles_without_gpu(mode: str, label: str, results: Results) -> None:
    assert results(mode)[label] == ""


def inputs_on(device: str) -> Inputs:
    target, draft = (torch.full((1, rows, 4), 0.25, device=device) for rows in (2, 1))
    uniforms = acceptlib.Uniforms(
        accept=torch.zeros(1, 1, dtype=torch.float64, device=device),
        emit=torch.zeros(1, dtype=torch.int64, device=device),
    )
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return cases.inputs(ids, target_probs=target, draft_probs=draft, uniforms=uniforms)


def test_auto_takes_torch_off_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_on("cpu")
    assert backends.resolve("auto", inputs).name == "torch"
    assert backends.triton_unavailable(inputs) == "Triton runs on GPUs, and the rows are not on one"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.resolve("auto", inputs).name == "triton"


def test_auto_says_once_why_it_takes_torch_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said where it does not, nor where torch was asked for."""
    backends._say.cache_clear()
    with FakeTensorMode():
        inputs = inputs_on("cuda")
        assert backends.resolve("auto", inputs).name == "triton"
        assert backends.resolve("torch", inputs).name == "torch"
        assert not caplog.records
        monkeypatch.setattr(backends, "_has_triton", lambda: False)
        assert backends.resolve("auto", inputs).name == "torch"
        assert backends.resolve("auto", inputs).name == "torch"
    (record,) = caplog.records
    assert record.name == "acceptlib"
    assert record.getMessage() == (
        "The torch engine runs a call whose rows are on a GPU: "
        "the package triton is not installed (pip install acceptlib[triton])."
    )


def test_a_row_whose_sum_would_overflow_takes_torch() -> None:
    rows = torch.empty(1, 2, 1 << 19, device="meta")
    for kind, why in (("target_logits", "at most 524287 entries of logits"), ("target_probs", "None")):
        call = {kind: rows, "uniforms": acceptlib.Uniforms(accept=rows[0, :1, :1].double(), emit=rows[0, 0, :1].long())}
        inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64, device="meta"), **call)
        assert why in str(engine.unsupported(inputs))
    call |= {"target_probs": rows[..., :4], "draft_logits": rows[:, :1]}  # a draft's, of which the rest is cut
    inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64, device="meta"), **call)
    assert "at most 524287 entries of logits" in str(engine.unsupported(inputs))


def test_options_of_other_lengths_have_tables_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two strategies whose kernels are the same, called alike, in either order."""
    monkeypatch.setattr(checks, "_CHECKED", {})
    monkeypatch.setattr(engine, "schedule", functools.cache(engine.schedule))
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda *launch: launched.append((launch[0], launch[-1]))))
    rows = torch.full((1, 4, 9), 1 / 9)
    place, ids = verify_kernel.arg_names.index("table_size"), torch.zeros(1, 3, dtype=torch.int64)
    for rates in ((0.9,), (1.0, 1.0, 0.1), (0.9,)):
        plan = acceptlib.create("synthetic", synthetic_acceptance_rates=rates).plan
        engine.verify(plan, cases.inputs(ids, rng=0, target_probs=rows))
        assert launched[-1][1][place] == len(rates) + 1
    assert len({key for key, _ in launched}) == 1


def test_rows_with_a_negative_bit_have_strides_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied, so a call of the same strides without the bit is another one, in either order."""
    monkeypatch.setattr(checks, "_CHECKED", {})
    monkeypatch.setattr(engine, "schedule", functools.cache(engine.schedule))
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda *launch: launched.append(launch[-1])))
    pairs = torch.rand(1, 4, 9, 2)
    negative, plain = torch.view_as_complex(pairs).conj().imag, pairs[..., 0]
    assert negative.is_neg()
    assert negative.stride() == plain.stride() == (72, 18, 2)
    place, ids = verify_kernel.arg_names.index("target_stride"), torch.zeros(1, 3, dtype=torch.int64)
    for rows, stride in ((negative, 1), (plain, 2), (negative, 1)):
        engine.verify(acceptlib.create("rejection").plan, cases.inputs(ids, rng=0, target_logits=rows))
        assert launched[-1][place] == stride


def test_a_workspace_of_fake_tensors_leaves_none_behind() -> None:
    strategy = acceptlib.create("synthetic", synthetic_acceptance_rates=(0.9, 0.5))
    with FakeTensorMode():
        engine.workspace(strategy.plan, 1, 3, 9, torch.device("cpu"))
    _, tables = plans.bound(strategy.plan, torch.device("cpu"))
    assert tables[0, 0] == 0.9


@pytest.mark.parametrize("form", ["target_logits", "target_probs"])
def test_a_call_that_fails_between_launches_leaves_no_counts(form: str) -> None:
    plan, launched, vocab_size = acceptlib.create("rejection").plan, [], 70000
    with torch.inference_mode():  # a caller's own tensors, which cannot be written outside of it
        allocated = engine.workspace(plan, 1, 2, vocab_size, torch.device("cpu"))
        workspace = acceptlib.Workspace(counters=allocated.counters.clone(), words=allocated.words.clone())
    rows = torch.full((1, 3, vocab_size), 1 / vocab_size)
    inputs = cases.inputs(torch.zeros(1, 2, dtype=torch.int64), rng=0, workspace=workspace, **{form: rows})

    def interrupted(key: tuple[Any, ...], *_: object) -> None:
        launched.append(key[0])
        with torch.inference_mode():
            workspace.counters.fill_(7)
        raise KeyboardInterrupt

    with mock.patch.object(engine, "launch", cases.each(interrupted)), pytest.raises(KeyboardInterrupt):
        engine.verify(plan, inputs)
    assert launched[0].awaits == (form == "target_probs")
    blocks = [-(-vocab_size // size) for size in (launched[0].block, launched[0].emit_block)]
    used = engine.counters(launched[0], 1, 2, *blocks)
    assert used % 2 == 0
    assert not workspace.counters[:used].any()
    assert used <= len(workspace.counters)


def of_probs(vocab_size: int) -> dict[str, object]:
    """Return a call of one request."""
    return {"target_probs": torch.full((1, 2, vocab_size), 1 / vocab_size)}


def under_min_p(vocab_size: int) -> dict[str, object]:
    """Return a call of one request, whose rows' programs may wait for each other."""
    rows = torch.zeros(1, 2, vocab_size)
    return {"target_logits": rows, "draft_logits": rows[:, 1:], "sampling": acceptlib.SamplingParams(min_p=0.1)}


@pytest.mark.parametrize("target", ["cuda:80", cases.EVERYTHING])
@pytest.mark.parametrize(
    ("call", "num_loops"), [(of_probs(1 << 17), 2), (of_probs(9000), 0), (under_min_p(1 << 19), 2), (under_min_p(9), 2)]
)
def test_warps_that_wait_see_the_same_words(
    call: dict[str, object], num_loops: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn of a loop that waits has a barrier: a warp that left it alone would clear what another waits for."""
    monkeypatch.setattr(engine, "can_wait", lambda *_: True)
    call["ids"] = torch.zeros(1, 1, dtype=torch.int64)
    (_, asm), *rest = cases.codes(acceptlib.create("rejection"), target, call)
    assert not any("ld.volatile" in other["ptx"] for _, other in rest)
    code, turns = asm["ptx"], []
    for label in re.finditer(r"^(\$L__BB\w+):", code, re.MULTILINE):
        back = re.compile(rf"bra\S*\s+{re.escape(label[1])};")
        turns += [code[label.start() : end.end()] for end in back.finditer(code, label.end())]
    waiting = [turn for turn in turns if "ld.volatile" in turn]
    assert len(waiting) == num_loops
    assert all("bar.sync" in turn for turn in waiting)


@pytest.mark.parametrize(
    ("num_blocks", "num_requests", "name", "sizes", "waits"),
    [
        (32, 1, "rejection", tunings.SIZES, True),
        (32, 8, "block", tunings.SIZES, True),
        (32, 9, "rejection", tunings.SIZES, False),  # which is not small
        (66, 1, "rejection", tunings.SIZES, True),
        (67, 1, "rejection", tunings.SIZES, False),  # of which not enough rows have all programs run at a time
        (35, 64, "block", cases.EVERY_SIZE[0], False),  # whose programs have two blocks each, were it small
    ],
)
def test_programs_of_a_row_wait_where_many_rows_run(
    num_blocks: int,
    num_requests: int,
    name: str,
    sizes: tunings.Sizes,
    waits: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has one block, for it must not wait for what it would store later."""
    monkeypatch.setattr(tunings, "SIZES", sizes)
    device = mock.Mock(type="cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        engine, "resident_programs", lambda _, warps, registers: 132 * (65536 // (32 * warps * registers))
    )
    can_wait = engine.can_wait
    monkeypatch.setattr(engine, "can_wait", lambda _, warps, blocks: can_wait(device, warps, blocks))
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda *launch: launched.append(launch)))
    call = under_min_p(num_blocks * engine.BLOCK)
    repeated = {
        name: value.expand(num_requests, -1, -1) for name, value in call.items() if isinstance(value, torch.Tensor)
    }
    ids = torch.zeros(num_requests, 1, dtype=torch.int64)
    engine.verify(acceptlib.create(name).plan, cases.inputs(ids, rng=0, **{**call, **repeated}))
    (key, grid, *_), *_ = launched
    assert key[0].floors == waits
    assert not waits or grid[0] == 2 * num_blocks


@pytest.mark.parametrize(
    ("name", "form", "shapes", "spares"),
    [
        ("rejection", {}, [(16, 4), (4, 16), (32, 3), (256, 1)], True),
        ("rejection", {}, [(16, 3), (8, 7), (63, 1), (4096, 0)], False),
        ("rejection", {"num_passed": True}, [(256, 7)], False),  # which asks for every row
        ("wary", {}, [(256, 7)], False),  # whose decisions follow from each other
        ("rejection", {"one_hot": True}, [(28, 4), (7, 16)], True),  # of one model's rows
        ("rejection", {"one_hot": True}, [(27, 4), (32, 3)], False),
        ("greedy", {}, [(32, 2)], True),
        ("greedy", {}, [(31, 2)], False),
        ("rejection", {"dtype": torch.bfloat16}, [(60, 4), (48, 5)], True),
        ("rejection", {"dtype": torch.bfloat16}, [(59, 4), (32, 7)], False),
        ("rejection", {"min_p": 0.1}, [(16, 7), (28, 4)], True),
        ("rejection", {"min_p": 0.1}, [(32, 3), (27, 4)], False),
        ("rejection", {"top_k": 9}, [(64, 3)], True),  # whose positions go in parts
        ("rejection", {"top_k": 9}, [(63, 3)], False),
        ("typical", {}, [(28, 4)], True),  # whose entropy comes with the laws
        ("typical", {"min_p": 0.1}, [(38, 4)], False),  # and here does not
    ],
)
def test_rows_are_left_out_where_that_may_spare_enough(
    name: str, form: dict[str, Any], shapes: list[tuple[int, int]], *, spares: bool
) -> None:
    """That hangs on the batch, the draft's length, and what is read of an entry."""
    parameters = {name: value for name, value in form.items() if name in {"min_p", "top_k"}}
    for num_requests, most in shapes:
        rows = torch.empty(num_requests, most + 1, 128256, dtype=form.get("dtype"), device="meta")
        given: dict[str, Any] = {"target_logits": rows, "sampling": acceptlib.SamplingParams(**parameters)}
        if not form.get("one_hot"):
            given["draft_logits"] = rows[:, 1:]
        out = VerifyResult.empty(num_requests, most, rows.device, num_passed=form.get("num_passed", False))
        ids = torch.empty(num_requests, most, dtype=torch.int64, device="meta")
        launched: list[Any] = []
        with (
            mock.patch.object(engine, "launch", cases.each(lambda *launch: launched.append(launch))),  # noqa: B023
            mock.patch.object(tunings, "tuning_of", wraps=tunings.tuning_of) as tuning_of,
        ):
            engine.verify(cases.strategies()[name].plan, cases.inputs(ids, rng=0, out=out, **given))
        (key, *_), *_ = launched
        assert key.call.lazy == spares, (num_requests, most)
        # Where no row can be left out, a batch is not run as a large one at all.
        assert tunings.tuning_of(*tuning_of.call_args.args).lazy == spares, (num_requests, most)


@pytest.mark.parametrize(("num_requests", "vocab_size"), [(8, 128256), (7, 150000), (8, 70000), (1, 66000), (100, 9)])
def test_a_workspace_is_enough_for_smaller_batches(
    num_requests: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fewer requests or entries, some of which wait for sums or maxima in memory of the workspace's."""
    monkeypatch.setattr(engine, "can_wait", lambda *_: True)
    plan = acceptlib.create("rejection").plan
    workspace = engine.workspace(plan, 100, 2, 150000, torch.device("cpu"))
    rows, ids = torch.empty(num_requests, 2, vocab_size), torch.zeros(num_requests, 1, dtype=torch.int64)
    inputs = cases.inputs(ids, rng=0, target_probs=rows, draft_probs=rows[:, 1:], workspace=workspace)
    waiting = acceptlib.SamplingParams(min_p=0.1)
    too = cases.inputs(ids, rng=0, target_logits=rows, draft_logits=rows[:, 1:], sampling=waiting, workspace=workspace)
    with mock.patch.object(engine, "launch"), mock.patch.object(engine, "resident_programs", return_value=660):
        engine.verify(plan, inputs)  # or raises
        engine.verify(plan, too)
    assert len(workspace.counters) < 20000


class Compiled:
    """Stands for a compiled kernel, and notes what it is launched with."""

    function, packed_metadata = 7, (8, 9)

    def __init__(self) -> None:
        """Start with no launches."""
        self.launched: list[tuple[object, ...]] = []

    def run(self, *arguments: object) -> None:
        """Note a launch without hooks."""
        *grid, stream, function, metadata, of_launch, enter, leave = arguments[:9]
        assert (stream, function, metadata, of_launch, enter, leave) == (5, 7, (8, 9), None, None, None)
        self.launched.append((tuple(grid), arguments[9:]))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        """Note a launch of Triton's own, which tells hooks of it."""
        return lambda *arguments: self.launched.append(("hooked", grid, arguments))


@pytest.mark.parametrize("how", ["direct", "enter", "exit", "unknown"])
def test_compiled_stages_are_given_addresses(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a profiler's hooks are told of launches, and where Triton is one whose launch is not known."""
    plan, out = acceptlib.create("rejection").plan, acceptlib.VerifyResult.empty(2, 3, torch.device("cpu"))
    rng = acceptlib.Rng(seeds=torch.arange(2), offsets=torch.arange(2))
    logits, ids = torch.rand(2, 4, 9), torch.zeros(2, 3, dtype=torch.int64)
    inputs = cases.inputs(ids, rng=rng, target_logits=logits, draft_logits=logits[:, 1:], out=out)
    found: list[tuple[Any, ...]] = []
    with mock.patch.object(engine, "launch", cases.each(lambda *launch: found.append(launch))):
        engine.verify(plan, inputs)
    kernels = {key: Compiled() for key, *_ in found}
    monkeypatch.setattr(launching, "KERNELS", kernels)
    monkeypatch.setattr(launching, "current_stream", {torch.device("cpu"): 5}.__getitem__)
    if how in {"enter", "exit"}:
        monkeypatch.setattr(getattr(launching.knobs.runtime, f"launch_{how}_hook"), "calls", [print])
    monkeypatch.setattr(launching, "DIRECT", how != "unknown")
    engine.verify(plan, inputs)
    assert len(found) > 1
    for key, grid, _, _, values in found:
        addresses = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)
        launch = (grid, (*addresses, *key))
        assert kernels[key].launched == [launch if how == "direct" else ("hooked", *launch)]


def shifted(rows: torch.Tensor) -> torch.Tensor:
    """Return the same rows at an address that is no multiple of 16."""
    found = torch.empty(rows.numel() + 1)[1:].view(rows.shape)
    return found.copy_(rows)


def variants(padded: dict[str, Any]) -> dict[str, dict[str, object]]:
    """Return calls that differ in nothing but where rows lie, or what is given beside them."""
    target, draft = padded["target_probs"], padded["draft_probs"]
    count, most = padded["ids"].shape
    wide = VerifyResult.empty(count, most, "cpu", totals=True)
    long = dataclasses.replace(wide, output_token_ids=wide.output_token_ids.long())
    streams = {"rng": acceptlib.Rng(seeds=torch.arange(count), offsets=torch.full((count,), 2**40 + 5))}
    logits = {"ids": padded["ids"], "target_logits": target, "draft_logits": draft, **streams}
    bias = acceptlib.LogitBias(token_ids=torch.ones(count, 1, dtype=torch.int64), values=torch.ones(count, 1))
    narrow = dataclasses.replace(bias, token_ids=bias.token_ids.int())
    return {
        "target": {**padded, "target_probs": shifted(target)},
        "draft": {**padded, "draft_probs": shifted(draft)},
        "standing": {**padded, "rng": dataclasses.replace(streams["rng"], advances=False)},
        "default": {**padded, "rng": None},
        "out": {**padded, **streams, "out": wide},
        "long": {**padded, **streams, "out": long},
        "logprobs": {**padded, **streams, "logprobs": True},
        "half": {**padded, **streams, "draft_probs": draft.half()},
        "int": {**padded, **streams, "ids": padded["ids"].int()},
        "bonus": {**padded, **streams, "bonus_token_ids": torch.arange(count)},
        "bonus-int": {**padded, **streams, "bonus_token_ids": torch.arange(count, dtype=torch.int32)},
        "sampling": {**logits, "sampling": acceptlib.SamplingParams()},
        "bias": {**logits, "sampling": acceptlib.SamplingParams(logit_bias=bias)},
        "bias-int": {**logits, "sampling": acceptlib.SamplingParams(logit_bias=narrow)},
    }


def test_calls_that_are_alike_run_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever came before, a call is launched as it would be if nothing were remembered, and so is its like."""
    shapes = (cases.ONE_BLOCK, (2, 3, 301), cases.FILTERED_SHAPE)
    given = {(shape, name): call for shape in shapes for name, call in cases.calls(shape).items()}
    given |= {("variant", name): call for name, call in variants(cases.calls(shapes[0])["padded"]).items()}
    found: list[Any] = []
    monkeypatch.setattr(engine, "launch", lambda *launch: found.append(launch))
    remembered: dict[Any, checks.Checked] = {}
    strategies = cases.strategies()
    for (key, call), name in itertools.product(given.items(), ("rejection", "block", "relaxed")):
        for known in (cases.Forgotten(), remembered, remembered):
            monkeypatch.setattr(checks, "_CHECKED", known)
            cases.run(engine.verify, strategies[name], dict(call))
        assert len(found) == 3, (key, name)
        (launches, tensors, numbers), *others = found
        found.clear()
        for other_launches, other_tensors, other_numbers in others:
            assert (other_launches, other_numbers) == (launches, numbers), (key, name)
            forms = zip(tensors, other_tensors, strict=True)
            assert all((a is None) == (b is None) and (a is None or a.shape == b.shape) for a, b in forms), (key, name)
    calls_of_one = [len(checked.runs) for checked in remembered.values()]
    assert len(given) < sum(calls_of_one) < 3 * len(given)  # calls that differ in values alone are alike


def test_streams_may_be_derived_or_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls without any: a captured one on a GPU draws what others derive from the generator's state."""
    found: list[bool] = []
    monkeypatch.setattr(engine, "launch", lambda launches, *_: found.append(launches[0].key.call.rooted))
    plan, ids = acceptlib.create("greedy").plan, torch.zeros(1, 1, dtype=torch.int64)
    drawn = cases.inputs(ids, target_probs=torch.ones(1, 2, 9))
    still = acceptlib.Rng(seeds=torch.zeros(1, dtype=torch.int64), offsets=drawn.rng.offsets, advances=False)
    for inputs in (drawn, drawn._replace(rng=Root(1, 2)), drawn._replace(rng=still), drawn):
        engine.verify(plan, inputs)
    assert found == [False, True, False, False]
    assert len(drawn.checked.runs) == 3


def test_what_is_remembered_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: dict[Any, checks.Checked] = {}
    monkeypatch.setattr(checks, "_CHECKED", checked)
    monkeypatch.setattr(checks, "MOST_CHECKED", 2)
    sizes = []
    for most in (1, 2, 3, 3, 4, 5):
        cases.inputs(torch.zeros(1, most, dtype=torch.int64), rng=0, target_logits=torch.rand(1, most + 1, 9))
        sizes.append(len(checked))
    assert sizes == [1, 2, 1, 1, 2, 1]


def test_threads_share_no_memory() -> None:
    """Their launches on one stream may take turns."""
    inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64), rng=0, target_logits=torch.rand(1, 2, 9))
    kept = functools.partial(memory.memory_for, inputs, 3, 5)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(kept).result() is not kept()
    assert kept() is kept()


def test_a_longer_draft_than_a_grid_holds_takes_torch() -> None:
    probs, bounds = torch.full((1, 4), 0.25), torch.zeros(2, dtype=torch.int32)
    ragged = {"target_probs": probs, "cu_num_draft_tokens": bounds, "max_num_draft_tokens": 65535}
    inputs = cases.inputs(torch.zeros(0, dtype=torch.int64), rng=0, **ragged)
    assert "at most 65534 drafted tokens" in str(engine.unsupported(inputs))


def test_instances_that_are_alike_share_their_kernels() -> None:
    """A kernel is compiled for what a strategy is, not for each object."""
    first, same, other = (acceptlib.create("lenience", lenience=value).plan for value in (0.5, 0.5, 0.6))
    rules = [plans.bound(plan, torch.device("cpu"))[0] for plan in (first, same, other)]
    assert rules[0] is rules[1]
    assert rules[0] is not rules[2]


def test_other_code_finds_no_kernels_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own key has the kernel's functions and what a call says of itself, but not how the rest follows."""
    found: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: found.append(key[0])))
    call = cases.inputs(torch.zeros(1, 1, dtype=torch.int64), rng=0, target_logits=torch.rand(1, 2, 9))
    engine.verify(acceptlib.create("rejection").plan, call)

    def key() -> str:
        return str(ASTSource(fn=verify_kernel, signature={}, constexprs={(0,): found[0]}, attrs={}).hash())

    before = key()
    assert key() == before
    monkeypatch.setattr(calls, "_sources", lambda: "another version")
    assert key() != before


def test_without_triton_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    assert "not installed" in str(backends.triton_unavailable(inputs_on("cpu")))


def test_an_explicit_choice_raises_with_the_reason() -> None:
    probs = torch.full((1, 2, 4), 0.25)
    strategy = acceptlib.create("rejection", backend="triton")
    with pytest.raises(BackendError, match="cannot run on cpu: Triton runs on GPUs"):
        strategy.verify(torch.zeros(1, 1, dtype=torch.int64), target_probs=probs, draft_probs=probs[:, :1])


def stages(strategy: str, monkeypatch: pytest.MonkeyPatch, **arguments: object) -> list[str]:
    """Return the stages that a call launches."""
    launched: list[str] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: launched.append(key[1])))
    inputs = cases.inputs(torch.zeros(2, 3, dtype=torch.int64), rng=0, **arguments)
    engine.verify(acceptlib.create(strategy).plan, inputs)
    return launched


@pytest.mark.parametrize("sizes", cases.EVERY_SIZE)
@pytest.mark.parametrize("filtered", [TARGET.value, DRAFT.value])
def test_rows_without_filters_are_read_beside_the_search(
    filtered: int, sizes: tunings.Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the search decides which rows are read at all, or finds what is kept of both models' rows."""
    monkeypatch.setattr(tunings, "SIZES", sizes)
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: found.append((key[1], key[2], key[4]))))
    logits = torch.zeros(2, 1, 50)
    cut, plain = acceptlib.SamplingParams(top_k=9), acceptlib.SamplingParams()
    pairs = [(cut, plain), (plain, cut)][filtered], (cut, cut)
    for sampling, draft_sampling in pairs:
        call = {"target_logits": logits, "draft_logits": logits[:, :0]}
        samplings = {"sampling": sampling, "draft_sampling": draft_sampling}
        ids = torch.zeros(2, 0, dtype=torch.int64)
        engine.verify(acceptlib.create("rejection").plan, cases.inputs(ids, rng=0, **call, **samplings))
    together = [("reduce", BOTH.value, False), ("select", BOTH.value, False), ("emit", BOTH.value, False)]
    apart = [("reduce", filtered, False), together[1], ("reduce", 1 - filtered, True), together[2]]
    lazy = sizes == cases.EVERY_SIZE[-1]
    assert found == [*(together if lazy else apart), *together]


@pytest.mark.parametrize("far", [1 << 30, 1])
def test_far_batches_start_no_stage_before_rows_are_read(far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the place of one that reads them; after any other stage it may wait where it will run."""
    monkeypatch.setattr(tunings, "SIZES", cases.EVERY_SIZE[-1])
    monkeypatch.setattr(engine, "OVERLAP_BLOCKS", far)
    monkeypatch.setattr(engine, "_overlaps", lambda _: True)
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: found.append((key[1], key[3], key[5]))))
    # Of so many requests each position is a part of its own.
    ids, logits = torch.zeros(4096, 1, dtype=torch.int64), torch.zeros(4096, 2, 50)
    for top_p in (0.9, None):
        call = {"target_logits": logits, "sampling": acceptlib.SamplingParams(top_p=top_p)}
        engine.verify(acceptlib.create("rejection").plan, cases.inputs(ids, rng=0, **call))
    near = far > 1
    found_in_parts = [("reduce", False), ("select", not near), ("collect", False), ("finish", False)] * 2
    filtered = [("reduce", True), *found_in_parts[1:], ("emit", False)]
    plain = [("reduce", True, near), ("emit", not near, near)]
    assert found == [*((*stage, True) for stage in filtered), *plain]


@pytest.mark.parametrize(
    ("num_positions", "num_blocks", "firsts"),
    [
        (1, 1, [0]),
        (2, 1, [0, 1]),
        (9, 1, [0, 8]),
        (6, 64 * 32, [0, 2]),
        (8, 128 * 32, [0, 1, 3]),
        (8, 256 * 32, [0, 1, 2, 4]),
        (65535, 1 << 13, [0, 1, 2, 4, 8, *range(38, 65535, 4096)]),  # where next to no request is expected
    ],
)
def test_parts_grow_as_fewer_requests_are_expected(num_positions: int, num_blocks: int, firsts: list[int]) -> None:
    """Each has about as much to read if six of ten requests get on from every position."""
    assert list(parts(num_positions, num_blocks)) == [*itertools.pairwise([*firsts, num_positions])]


@pytest.mark.parametrize("sizes", cases.EVERY_SIZE)
def test_an_entropy_costs_no_stage_from_logits(sizes: tunings.Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with the law of a row, unless a filter or probabilities leave it to another pass."""
    monkeypatch.setattr(tunings, "SIZES", sizes)
    logits, cut = torch.zeros(2, 4, 50), acceptlib.SamplingParams(top_k=9)
    warm = acceptlib.SamplingParams(temperature=0.7)
    for sampling in (None, warm):
        given = {"target_logits": logits, "sampling": sampling}
        assert stages("typical", monkeypatch, **given) == stages("rejection", monkeypatch, **given)
    assert "sum" in stages("typical", monkeypatch, target_logits=logits, sampling=cut)
    assert "sum" in stages("typical", monkeypatch, target_probs=logits.softmax(-1))
    mixed = {"target_logits": logits, "draft_logits": logits[:, :3], "draft_sampling": cut, "sampling": warm}
    assert "sum" not in stages("typical", monkeypatch, **mixed)


# Grids


def makespan(num_blocks: int, num_requests: int, resident: int, num_programs: int) -> int:
    """Return when the last program ends, each taking a step a block and one more, `resident` of them at a time."""
    steps = [len(range(first, num_blocks, num_programs)) + 1 for first in range(num_programs)] * num_requests
    slots = [0] * resident
    for step in steps:
        heapq.heapreplace(slots, slots[0] + step)
    return max(slots)


@pytest.mark.parametrize("resident", [4, 108 * 5, 132 * 4, 132 * 8])
@pytest.mark.parametrize("num_requests", [1, 9, 32, 64, 200])
def test_programs_of_the_last_stage_end_together(num_requests: int, resident: int) -> None:
    """No other number of programs would end sooner."""
    best = min(makespan(40, num_requests, resident, number) for number in range(1, 41))
    assert makespan(40, num_requests, resident, engine.programs_of(40, num_requests, resident)) == best


SMALL, _, LARGE = cases.EVERY_SIZE


@pytest.mark.parametrize("sizes", cases.EVERY_SIZE)
@pytest.mark.parametrize(
    ("strategy", "arguments", "by_law"),
    [
        ("rejection", {}, True),
        ("lenience", {}, True),
        ("typical", {}, True),  # whose recovered token is the argmax, and whose bonus token is drawn
        ("rejection", {"draft": True}, False),
        ("typical", {"draft": True}, True),
        ("rejection", {"sampling": acceptlib.SamplingParams(temperature=0.5)}, True),
        ("rejection", {"sampling": acceptlib.SamplingParams(top_k=3)}, False),
        ("cautious", {}, False),  # which may take from other entries than the drafted one
        ("likeliest", {}, False),  # which takes the residual's argmax
        ("block", {}, False),
        ("wary", {}, False),
    ],
)
def test_a_draw_from_the_target_takes_one_program(
    strategy: str, arguments: dict[str, object], *, by_law: bool, sizes: tunings.Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sums of blocks that laws are made of tell where it falls."""
    monkeypatch.setattr(tunings, "SIZES", sizes)
    monkeypatch.setattr(engine, "resident_programs", lambda *_: 64)  # so that a row has several elsewhere
    found: list[tuple[bool, int]] = []
    monkeypatch.setattr(
        engine, "launch", cases.each(lambda key, grid, *_: found.append((key[0].draws_by_law, grid[0])))
    )
    logits = torch.zeros(2, 4, 6 * 4096)
    given = {"target_logits": logits, **arguments}
    if given.pop("draft", False):
        given["draft_logits"] = logits[:, :3]
    engine.verify(cases.strategies()[strategy].plan, cases.inputs(torch.zeros(2, 3, dtype=torch.int64), rng=0, **given))
    assert found[-1][0] == by_law
    assert (found[-1][1] == 1) == by_law


class Odds(acceptlib.AcceptanceStrategy):
    """A third party's strategy, whose residual cannot be computed for a draft that is certain, but from tensors."""

    name = "odds"
    traits = acceptlib.Traits(guarantee="lossy", bound="none")

    @acceptlib.rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        """Return h."""
        return target_prob * draft_prob

    @acceptlib.rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return p - q / (1.0 - q)


class Distance(Odds):
    """Another, whose weights are where the draft alone has mass, too."""

    name = "distance"

    @acceptlib.rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return ops.abs(p - q)


class Swapped(Odds):
    """Another, whose weights are there alone."""

    name = "swapped"

    @acceptlib.rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return -2.0 * (p - q)


class Added(Odds):
    """Another, whose weights are where either has mass."""

    name = "added"

    @acceptlib.rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return p - -0.5 * q


class Beside(Odds):
    """Another, whose weights are where the draft has no more than a half."""

    name = "beside"

    @acceptlib.rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return ops.where(p - q <= -0.5, 0.0, 1.0)


class Absent(Odds):
    """Another, whose weights are where the draft has nothing."""

    name = "absent"

    @acceptlib.rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return ops.where(q == 0.0, 1.0, p - q)


class Empty(Odds):
    """Another, whose weights are where the target has nothing, too."""

    name = "empty"

    @acceptlib.rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return ops.where(p == 0.0, 1.0, p) - q


class Again(Odds):
    """Another, of which only the drafted token has a weight wherever it is."""

    name = "again"

    @acceptlib.rule
    def residual(p: Value, q: Value, is_drafted: Value) -> Value:
        """Return the weight of each entry."""
        return ops.where(is_drafted, 0.5, p) - q


class Passed(Odds):
    """Another, whose weights are all there is of what passes from one position to the next."""

    name = "passed"

    @acceptlib.rule
    def carry(carry: Value, target_prob: Value) -> Value:
        """Return what passes on."""
        return carry * target_prob

    @acceptlib.rule
    def residual(p: Value, q: Value, carry: Value) -> Value:
        """Return the weight of each entry."""
        return carry + p - q


def test_a_residual_that_takes_from_the_target_alone_is_known() -> None:
    for name in ("rejection", "block", "fly", "entropy-scaled"):
        rules, _ = plans.bound(cases.strategies()[name].plan, torch.device("cpu"))
        assert rules["within_target"], name


def test_a_residual_that_cannot_be_tried_is_weighed() -> None:
    for strategy in (Odds(), Distance(), Swapped(), Added(), Beside(), Absent(), Empty(), Again(), Passed()):
        rules, _ = plans.bound(strategy.plan, torch.device("cpu"))
        assert rules["keeps_target"] == (strategy.name == "again")  # where the draft is certain of that token
        assert not rules["within_target"]


@pytest.mark.parametrize(
    ("strategy", "sampling", "sizes", "lists"),
    [
        ("rejection", {"top_k": 3}, LARGE, True),
        ("lenience", {"min_p": 0.1}, LARGE, True),
        ("typical", {"top_k": 3, "top_p": 0.5}, LARGE, True),
        ("rejection", {"top_k": 3}, SMALL, False),  # where it would take longer
        ("rejection", {"top_p": 0.5}, LARGE, False),  # which may keep many entries
        ("rejection", {}, LARGE, False),
        ("cautious", {"top_k": 3}, LARGE, False),  # whose drafted token may have a weight wherever it is
        ("block", {"top_k": 3}, LARGE, False),  # whose masses take whole rows
    ],
)
def test_a_draw_goes_through_what_is_listed_of_a_row(
    strategy: str, sampling: dict[str, Any], sizes: tunings.Sizes, *, lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where little is kept of it and nothing else may have a weight."""
    monkeypatch.setattr(tunings, "SIZES", sizes)
    found: list[bool] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: found.append(key[0].lists)))
    logits = torch.zeros(2, 4, 6 * 4096)
    given = {"target_logits": logits, "draft_logits": logits[:, :3], "sampling": acceptlib.SamplingParams(**sampling)}
    engine.verify(cases.strategies()[strategy].plan, cases.inputs(torch.zeros(2, 3, dtype=torch.int64), rng=0, **given))
    assert {*found} == {lists}


@pytest.mark.parametrize(
    ("strategy", "filtered", "registers"),
    [
        ("rejection", "sampling", 99),
        ("rejection", "draft_sampling", tunings.LARGE_FILTERED.emit_registers),
        ("cautious", "sampling", tunings.LARGE_FILTERED.emit_registers),
    ],
)
def test_programs_that_read_whole_rows_leave_room_for_others(
    strategy: str, filtered: str, registers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws from lists have a bound of their own, and nothing else does for the filters' sake."""
    monkeypatch.setattr(tunings, "SIZES", LARGE)
    monkeypatch.setattr(engine, "LIST_REGISTERS", 99)
    found: list[int] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda _key, _grid, _warps, registers, _: found.append(registers)))
    logits = torch.zeros(2, 4, 9)
    given = {"target_logits": logits, "draft_logits": logits[:, :3], filtered: acceptlib.SamplingParams(top_k=3)}
    engine.verify(cases.strategies()[strategy].plan, cases.inputs(torch.zeros(2, 3, dtype=torch.int64), rng=0, **given))
    assert found[-1] == registers


def test_a_large_batch_starts_the_programs_that_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, tuple[int, int, int]] = {}
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, grid, *_: grids.update({key[1]: grid})))
    monkeypatch.setattr(tunings, "SIZES", tunings.Sizes(medium=1, large=0))
    monkeypatch.setattr(engine, "resident_programs", lambda *_: 9)
    probs = torch.zeros(3, 3, 20 * tunings.LARGE_PROBS.emit_block)
    call = cases.inputs(torch.zeros(3, 2, dtype=torch.int64), rng=0, target_probs=probs, draft_probs=probs[:, :2])
    engine.verify(acceptlib.create("rejection").plan, call)
    assert grids == {"emit": (3, 3, 1)}
