"""The Triton engine: torch's tokens, compilation without a GPU, calls it takes, and what they remember and share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

import interpreter_cases
import triton_calls
import triton_engine_cases as cases
import triton_law_cases as laws
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import ASTSource

import acceptlib
from acceptlib import VerifyResult, checks
from acceptlib.engine import backends
from acceptlib.engine.triton import call as calls
from acceptlib.engine.triton import engine, launching, memory, plans
from acceptlib.engine.triton.kernel import verify_kernel
from acceptlib.engine.triton.layout import num_counts
from acceptlib.errors import BackendError, InputError
from acceptlib.inputs import Inputs
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


@pytest.mark.parametrize(("mode", "label"), laws.labels())
def test_laws(mode: str, label: str, folder: Path) -> None:
    """What is kept of a row and with what probability, its entropy, draws by a law, and sums in thirds."""
    assert cases.run_apart(mode, folder / f"{mode.replace(':', '-')}.json", laws.__file__)[label] == ""


@pytest.mark.parametrize(("mode", "label"), interpreter_cases.labels())
def test_quick_interpreter(mode: str, label: str, folder: Path) -> None:
    """It leaves the same in memory as Triton's own after every launch."""
    assert cases.run_apart(mode, folder / f"{mode.replace(':', '-')}.json", interpreter_cases.__file__)[label] == ""


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
        monkeypatch.setattr(backends, "_fault_of_triton", lambda: "the package triton is not installed")
        assert backends.resolve("auto", inputs).name == "torch"
        assert backends.resolve("auto", inputs).name == "torch"
    (record,) = caplog.records
    assert record.name == "acceptlib"
    assert record.getMessage() == (
        "The torch engine runs a call whose rows are on a GPU: the package triton is not installed."
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


def apart(values: torch.Tensor) -> torch.Tensor:
    """Return the same values with others between them."""
    found = torch.stack((values, values.flip(0)), -1)[..., 0]
    assert not found.is_contiguous()
    return found


def test_numbers_of_requests_may_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take no stride of a few numbers per request, so they are given copies."""
    monkeypatch.setattr(engine, "schedule", functools.cache(engine.schedule))
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda *launch: launched.append(launch[-1])))
    number = torch.tensor([0.5, 0.25])
    numbers = {
        "cu": torch.tensor([0, 1, 3]),
        "emit": torch.tensor([5, 6]),
        "bonus": torch.tensor([7, 8]),
        "target_temperature": number,
        "target_top_k": torch.tensor([2, 3]),
        "target_top_p": 1.5 * number,
        "target_min_p": number.double(),
        "target_biases": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "target_bias_values": torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
    }
    given = {name: apart(values) for name, values in numbers.items()}
    sampling = acceptlib.SamplingParams(
        **{name: given[f"target_{name}"] for name in ("temperature", "top_k", "top_p", "min_p")},
        logit_bias=acceptlib.LogitBias(given["target_biases"], given["target_bias_values"]),
    )
    inputs = cases.inputs(
        torch.zeros(3, dtype=torch.int64),
        target_logits=torch.rand(3, 9),
        cu_num_draft_tokens=given["cu"],
        max_num_draft_tokens=2,
        bonus_token_ids=given["bonus"],
        uniforms=acceptlib.Uniforms(accept=torch.rand(3).double(), emit=given["emit"]),
        sampling=sampling,
    )
    engine.verify(acceptlib.create("rejection").plan, inputs)
    for name, values in numbers.items():
        found = launched[0][verify_kernel.arg_names.index(f"{name}_ptr")]
        assert found.is_contiguous(), name
        assert torch.equal(found, values), name


@pytest.mark.parametrize("place", ["first", "later", "transposed", "all-one", "behind", "elsewhere"])
def test_drafted_tokens_that_lie_where_emitted_ones_go_are_copied(place: str) -> None:
    """For a program may write a token while another still decides by the drafted one."""
    buffer = torch.arange(40, dtype=torch.int32)
    out = dataclasses.replace(VerifyResult.empty(3, 3, torch.device("cpu")), output_token_ids=buffer[:12].view(3, 4))
    ids = {
        "first": buffer[:12].view(3, 4)[:, :3],
        "later": buffer[9:18].view(3, 3),
        "transposed": buffer[:9].view(3, 3).T,
        "all-one": buffer[11:12].expand(3, 3),
        "behind": buffer[12:21].view(3, 3),
        "elsewhere": torch.arange(9, dtype=torch.int32).view(3, 3),
    }[place]
    inputs, launched = cases.inputs(ids, rng=0, target_probs=torch.full((3, 4, 50), 0.02), out=out), []
    with mock.patch.object(engine, "launch", lambda _, tensors, __: launched.extend(tensors)):
        engine.verify(acceptlib.create("rejection").plan, inputs)
    found = launched[verify_kernel.arg_names.index("ids_ptr")]
    assert torch.equal(found, ids)
    assert found.stride() == ids.stride()
    apart = place in {"behind", "elsewhere"}
    assert (found.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()) is apart


@pytest.mark.parametrize(
    ("strides", "distance", "copies"), [((3, 1), 8, True), ((3, 1), 9, False), ((12, 1), 20, True)]
)
def test_drafted_tokens_that_reach_into_emitted_ones_are_copied(
    strides: tuple[int, int], distance: int, *, copies: bool
) -> None:
    """They begin some elements before these, and may have more between them than they have themselves."""
    buffer = torch.arange(40, dtype=torch.int32)
    tokens = buffer[distance : distance + 12].view(3, 4)
    out = dataclasses.replace(VerifyResult.empty(3, 3, torch.device("cpu")), output_token_ids=tokens)
    ids, launched = buffer.as_strided((3, 3), strides), []
    inputs = cases.inputs(ids, rng=0, target_probs=torch.full((3, 4, 50), 0.02), out=out)
    with mock.patch.object(engine, "launch", lambda _, tensors, __: launched.extend(tensors)):
        engine.verify(acceptlib.create("rejection").plan, inputs)
    found = launched[verify_kernel.arg_names.index("ids_ptr")]
    assert torch.equal(found, ids)
    assert (found.data_ptr() != ids.data_ptr()) is copies


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
    used = engine.counters_of(launched[0], 1, 2, -(-vocab_size // launched[0].emit_block))
    assert used % 2 == 0
    assert not workspace.counters[:used].any()
    assert used <= len(workspace.counters)


def test_what_cannot_be_cleared_does_not_hide_why_a_call_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that has failed."""
    inputs = inputs_on("cpu")
    monkeypatch.setattr(engine, "launch", mock.Mock(side_effect=ValueError("does not compile")))
    monkeypatch.setattr(torch.Tensor, "zero_", mock.Mock(side_effect=RuntimeError("cannot clear")))
    with pytest.raises(ValueError, match="does not compile") as caught:
        engine.verify(acceptlib.create("rejection").plan, inputs)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("capturing", [False, True])
def test_a_capture_that_fails_clears_nothing(monkeypatch: pytest.MonkeyPatch, *, capturing: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    counters = mock.Mock(is_cuda=True)
    memory.clear(counters)
    assert counters.zero_.called is not capturing


@pytest.mark.parametrize(("num_requests", "vocab_size"), [(8, 128256), (7, 150000), (8, 70000), (1, 66000), (100, 9)])
def test_a_workspace_is_enough_for_smaller_batches(num_requests: int, vocab_size: int) -> None:
    """Of fewer requests or entries, some of which wait for sums in memory of the workspace's, or list runs in it."""
    plan = acceptlib.create("rejection").plan
    workspace = engine.workspace(plan, 100, 2, 150000, torch.device("cpu"))
    rows, ids = torch.empty(num_requests, 2, vocab_size), torch.zeros(num_requests, 1, dtype=torch.int64)
    inputs = cases.inputs(ids, rng=0, target_probs=rows, draft_probs=rows[:, 1:], workspace=workspace)
    listing = acceptlib.SamplingParams(min_p=0.1)
    too = cases.inputs(ids, rng=0, target_logits=rows, draft_logits=rows[:, 1:], sampling=listing, workspace=workspace)
    with mock.patch.object(engine, "launch"), mock.patch.object(engine, "resident_programs", return_value=660):
        engine.verify(plan, inputs)  # or raises
        engine.verify(plan, too)
    assert len(workspace.counters) < 30000  # as of few requests, not of 100 that wait


def lent(inputs: Inputs, *sizes: int) -> acceptlib.Workspace:
    """Return what a call gets that ends well."""
    with memory.memory_for(inputs, *sizes) as workspace:
        return workspace


def test_a_workspace_of_just_enough_is_taken() -> None:
    workspace = acceptlib.Workspace(counters=torch.zeros(4, dtype=torch.int32), words=torch.empty(5, dtype=torch.int64))
    call = {"target_logits": torch.rand(1, 2, 9), "workspace": workspace}
    inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64), rng=0, **call)
    assert lent(inputs, 4, 5) is workspace
    for needed in ((5, 5), (4, 6)):
        with pytest.raises(InputError, match="expected at least {} counters and {} words".format(*needed)):
            memory.memory_for(inputs, *needed)


def test_a_workspace_of_another_device_is_refused() -> None:
    call = {"target_logits": torch.rand(1, 2, 9), "workspace": acceptlib.Workspace.allocate(4, 5, torch.device("meta"))}
    inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64), rng=0, **call)
    with pytest.raises(InputError, match="expected at least 4 counters and 5 words on cpu, got 4 and 5 on meta"):
        memory.memory_for(inputs, 4, 5)


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
    kernels = {(*key, warps, registers): Compiled() for key, _, warps, registers, _ in found}
    monkeypatch.setattr(launching, "KERNELS", kernels)
    monkeypatch.setattr(launching, "current_stream", {torch.device("cpu"): 5}.__getitem__)
    if how in {"enter", "exit"}:
        monkeypatch.setattr(getattr(launching.knobs.runtime, f"launch_{how}_hook"), "calls", [print])
    monkeypatch.setattr(launching, "DIRECT", how != "unknown")
    engine.verify(plan, inputs)
    assert len(found) > 1
    for key, grid, warps, registers, values in found:
        addresses = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)
        launch = (grid, (*addresses, *key))
        assert kernels[(*key, warps, registers)].launched == [launch if how == "direct" else ("hooked", *launch)]


def test_a_stage_of_other_warps_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same constants, but a call that was launched with others would be launched with theirs."""
    compiled: list[Compiled] = []

    class Kernel:
        """Stands for the kernel's own dispatch, and notes what it compiles."""

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
            def compile_for(*_: object, num_warps: int, maxnreg: int = 0, **__: object) -> Compiled:
                compiled.append(Compiled())
                compiled[-1].launched.append((num_warps, maxnreg, grid))
                return compiled[-1]

            return compile_for

    monkeypatch.setattr(launching, "verify_kernel", Kernel())
    monkeypatch.setattr(launching, "current_stream", lambda _: 5)
    monkeypatch.setattr(launching, "KERNELS", {})
    key = launching.Key(mock.Mock(), "select", 0, first=True, late=False, overlap=False)
    sizes = ((8, 168), (4, 168), (8, 0))
    for _ in range(3):
        for warps, registers in sizes:
            stage = launching.launch_of(key, (2, 1, 1), warps, registers, 0)
            launching.launch((stage,), (torch.zeros(1),), ())
    assert [kernel.launched[0] for kernel in compiled] == [(*size, (2, 1, 1)) for size in sizes]
    assert [len(kernel.launched) for kernel in compiled] == [3, 3, 3]
    monkeypatch.setattr(launching, "MAX_KERNELS", 3)
    launching.launch((launching.launch_of(key, (2, 1, 1), 1, 0, 0),), (torch.zeros(1),), ())
    assert len(launching.KERNELS) == 1  # what is forgotten does not stay


@pytest.mark.parametrize(
    ("first", "overlap", "early"), [(True, True, False), (False, True, True), (True, False, None), (False, False, None)]
)
def test_stages_that_wait_start_early(
    monkeypatch: pytest.MonkeyPatch, *, first: bool, overlap: bool, early: bool | None
) -> None:
    """Where devices have it; the first of a call must not start before the call ahead of it ends."""
    options: list[Any] = []
    dispatched = mock.MagicMock()
    dispatched.__getitem__.return_value = lambda *_, **given: options.append(given.get("launch_pdl")) or Compiled()
    monkeypatch.setattr(launching, "verify_kernel", dispatched)
    monkeypatch.setattr(launching, "KERNELS", {})
    key = launching.Key(mock.Mock(), "emit", 0, first=first, late=False, overlap=overlap)
    launching.launch((launching.launch_of(key, (1, 1, 1), 4, 0, 0),), (torch.zeros(1),), ())
    assert options == [early]


@pytest.mark.parametrize(
    ("registers", "hip", "bound"), [(0, None, None), (96, None, 96), (96, "6.4", None)], ids=["none", "cuda", "hip"]
)
def test_registers_are_bounded_where_compilers_take_a_bound(
    registers: int, hip: str | None, bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nowhere may a compiler contract products and sums, whose bits are part of the specification."""
    options: list[dict[str, Any]] = []
    dispatched = mock.MagicMock()
    dispatched.__getitem__.return_value = lambda *_, **given: options.append(given)
    monkeypatch.setattr(launching, "verify_kernel", dispatched)
    monkeypatch.setattr(launching, "KERNELS", {})
    monkeypatch.setattr(torch.version, "hip", hip)
    key = launching.Key(mock.Mock(), "emit", 0, first=True, late=False, overlap=False)
    launching.dispatch(launching.launch_of(key, (1, 1, 1), 4, registers, 0), (torch.zeros(1),), ())
    assert (options[0].get("maxnreg"), options[0]["enable_fp_fusion"]) == (bound, False)


@pytest.mark.parametrize("direct", [True, False])
def test_a_stage_is_told_its_first_position(monkeypatch: pytest.MonkeyPatch, *, direct: bool) -> None:
    """When it is compiled, where a tensor stands in for one that a call has not, and later."""
    rows, compiled, dispatched = torch.zeros(1), Compiled(), mock.MagicMock()
    dispatched.__getitem__.return_value = mock.Mock(return_value=compiled)
    monkeypatch.setattr(launching, "verify_kernel", dispatched)
    monkeypatch.setattr(launching, "current_stream", lambda _: 5)
    monkeypatch.setattr(launching, "KERNELS", {})
    monkeypatch.setattr(launching, "DIRECT", direct)
    key = launching.Key(mock.Mock(), "reduce", 0, first=True, late=False, overlap=False)
    stage = launching.launch_of(key, (1, 1, 1), 4, 0, 3)
    for _ in range(2):
        launching.launch((stage,), (rows, None), (11,))
    assert dispatched.__getitem__.return_value.call_args.args == (rows, rows, 11, 3, *key)
    assert compiled.launched[0][-1] == (rows.data_ptr(), None, 11, 3, *key)


def test_a_call_with_one_new_stage_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is; others of its stages are those of a call that came before."""
    dispatched = mock.MagicMock()
    dispatched.__getitem__.return_value = lambda *_, **__: Compiled()
    monkeypatch.setattr(launching, "verify_kernel", dispatched)
    key = launching.Key(mock.Mock(), "emit", 0, first=True, late=False, overlap=False)
    known, new = (launching.launch_of(key, (1, 1, 1), warps, 0, 0) for warps in (4, 8))
    for stages in ((known, new), (new, known)):
        monkeypatch.setattr(launching, "KERNELS", {})
        launching.launch((known,), (torch.zeros(1),), ())
        launching.launch(stages, (torch.zeros(1),), ())
        assert launching.KERNELS.keys() == {known.kernel, new.kernel}


def test_a_call_with_one_new_stage_launches_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, those too that are compiled already."""
    launched: list[int] = []
    dispatched = mock.MagicMock()
    dispatched.__getitem__.return_value = lambda *_, num_warps, **__: launched.append(num_warps)
    monkeypatch.setattr(launching, "verify_kernel", dispatched)
    key = launching.Key(mock.Mock(), "emit", 0, first=True, late=False, overlap=False)
    stages = tuple(launching.launch_of(key, (1, 1, 1), warps, 0, 0) for warps in (4, 8, 2))
    monkeypatch.setattr(launching, "KERNELS", {stages[0].kernel: Compiled(), stages[2].kernel: Compiled()})
    launching.launch(stages, (torch.zeros(1),), ())
    assert launched == [4, 8, 2]


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
    shapes = (triton_calls.ONE_BLOCK, (2, 3, 301), triton_calls.FILTERED_SHAPE)
    given = {(shape, name): call for shape in shapes for name, call in triton_calls.calls(shape).items()}
    given |= {("variant", name): call for name, call in variants(triton_calls.calls(shapes[0])["padded"]).items()}
    found: list[Any] = []
    monkeypatch.setattr(engine, "launch", lambda *launch: found.append(launch))
    remembered: dict[Any, checks.Checked] = {}
    strategies = triton_calls.strategies()
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


RAGGED = {
    "plain": {},
    "filtered": {"sampling": acceptlib.SamplingParams(temperature=0.7, top_k=3, top_p=0.9)},
    "without-bonus-rows": {"bonus_token_ids": torch.zeros(3, dtype=torch.int64)},
    "logprobs": {"logprobs": True},
}


@pytest.mark.parametrize("kind", [*RAGGED, "masked", "uniforms", "out"])
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_ragged_batches_are_run_alike_whatever_is_drafted(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if each were the first of its form: what is remembered of calls must not be of their numbers of tokens."""
    plan, memory_for, found = acceptlib.create(name).plan, engine.memory_for, []
    monkeypatch.setattr(engine, "launch", lambda *launch: found.append(launch))
    monkeypatch.setattr(engine, "memory_for", lambda _, *sizes: found.append(sizes) or memory_for(_, *sizes))
    remembered: dict[Any, checks.Checked] = {}
    for lengths in ([2, 0, 3], [0, 0, 0], [3, 3, 3], [1, 0, 0], [7, 7, 7]):
        counts = torch.tensor([0, *itertools.accumulate(lengths)])
        num_tokens = sum(lengths)
        num_rows = num_tokens + 3 * (kind != "without-bonus-rows")
        buffer = torch.zeros(99, dtype=torch.int64)
        call = {
            "target_logits": torch.zeros(num_rows, 70),
            "draft_logits": torch.zeros(num_tokens, 70),
            "cu_num_draft_tokens": counts,
            "max_num_draft_tokens": 3,
            "rng": 0,
            **RAGGED.get(kind, {}),
        }
        if kind == "masked":
            mask = torch.full((num_rows, 3), -1, dtype=torch.int32)
            call["sampling"] = acceptlib.SamplingParams(allowed_token_bitmask=mask)
        if kind == "uniforms":
            accept = torch.zeros(num_tokens, dtype=torch.float64)
            call |= {"uniforms": acceptlib.Uniforms(accept=accept, emit=counts[:3]), "rng": None}
        if kind == "out":  # which the longest drafts reach into
            tokens = buffer[20:32].view(3, 4)
            call["out"] = dataclasses.replace(VerifyResult.empty(3, 3, "cpu"), output_token_ids=tokens)
        for known in ({}, remembered):
            monkeypatch.setattr(checks, "_CHECKED", known)
            engine.verify(plan, cases.inputs(buffer[:num_tokens], **call))
        sizes, (launches, tensors, numbers), others, (other_launches, other_tensors, other_numbers) = found
        found.clear()
        assert (others, other_launches, other_numbers) == (sizes, launches, numbers)
        assert numbers[verify_kernel.arg_names.index("num_tokens") - len(tensors)] == num_tokens
        place = verify_kernel.arg_names.index("ids_ptr")
        there = {launched[place].untyped_storage().data_ptr() for launched in (tensors, other_tensors)}
        assert (there == {buffer.untyped_storage().data_ptr()}) is not (kind == "out" and num_tokens > 20)
    (checked,) = remembered.values()
    assert len(checked.runs) == 1


def test_ragged_rows_with_a_negative_bit_have_the_strides_of_their_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copy is packed, but for one of a single row, which keeps any stride."""
    monkeypatch.setattr(checks, "_CHECKED", {})
    found: list[Any] = []
    monkeypatch.setattr(engine, "launch", lambda _, __, numbers: found.append(numbers))
    base, plan = torch.rand(4, 32), acceptlib.create("rejection").plan
    place = verify_kernel.arg_names.index("target_row_stride") - verify_kernel.arg_names.index("root_seed")
    for num_tokens in (0, 3):
        rows = torch._neg_view(base[: num_tokens + 1])[:, :16]
        counts = torch.tensor([0, num_tokens])
        call = {"target_logits": rows, "cu_num_draft_tokens": counts, "max_num_draft_tokens": 4, "rng": 0}
        engine.verify(plan, cases.inputs(torch.zeros(num_tokens, dtype=torch.int64), **call))
    assert found[-1][place] == 16


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


def test_streams_are_derived_from_a_seed_and_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(engine, "launch", lambda _, __, numbers: found.append(numbers[:2]))
    inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64), rng=0, target_probs=torch.ones(1, 2, 9))
    for root in (Root(1, 2), Root(1, -3), Root(-4, 2)):
        engine.verify(acceptlib.create("greedy").plan, inputs._replace(rng=root))
    assert found == [(1, 2), (1, -3), (-4, 2)]


@pytest.mark.parametrize("name", ["ids", "bonus_token_ids", "cu_num_draft_tokens", "output_token_ids"])
def test_integers_of_other_dtypes_have_kernels_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is found again reads and writes what it was compiled for."""
    kernels: list[set[Any]] = []
    monkeypatch.setattr(engine, "launch", lambda launches, *_: kernels.append({stage.kernel for stage in launches}))
    for dtype in (torch.int32, torch.int64):
        given = {
            "ids": torch.zeros(3, dtype=torch.int64),
            "bonus_token_ids": torch.zeros(2, dtype=torch.int64),
            "cu_num_draft_tokens": torch.tensor([0, 1, 3]),
        }
        out = VerifyResult.empty(2, 2, "cpu")
        if name in given:
            given[name] = given[name].to(dtype)
        else:
            out = dataclasses.replace(out, **{name: getattr(out, name).to(dtype)})
        rows = {"target_probs": torch.full((5, 9), 1 / 9), "max_num_draft_tokens": 2}
        engine.verify(acceptlib.create("rejection").plan, cases.inputs(**given, **rows, rng=0, out=out))
    assert kernels[0].isdisjoint(kernels[1])


@pytest.mark.parametrize(
    ("capability", "hip", "overlaps"), [((9, 0), None, True), ((8, 9), None, False), ((9, 4), "6.2", False)]
)
def test_kernels_overlap_where_a_device_can(
    capability: tuple[int, int], hip: str | None, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert engine._overlaps.__wrapped__(torch.device("cuda:0")) is overlaps
    assert not engine._overlaps.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize("current", [0, 1])
def test_a_call_runs_on_the_device_of_its_rows(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device.index)
        with mock.patch.object(torch.cuda, "current_device", return_value=device.index):
            yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", on)
    out = VerifyResult.empty(0, 1, "cpu")
    inputs = mock.Mock(device=torch.device("cuda:1"), num_requests=0, out=out)
    assert engine.verify(acceptlib.create("rejection").plan, inputs) is out
    assert entered == [1] * (current == 0)


def test_what_is_remembered_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: dict[Any, checks.Checked] = {}
    monkeypatch.setattr(checks, "_CHECKED", checked)
    monkeypatch.setattr(checks, "MAX_CHECKED", 2)
    sizes = []
    for most in (1, 2, 3, 3, 4, 5):
        cases.inputs(torch.zeros(1, most, dtype=torch.int64), rng=0, target_logits=torch.rand(1, most + 1, 9))
        sizes.append(len(checked))
    assert sizes == [1, 2, 1, 1, 2, 1]


def test_threads_share_no_memory() -> None:
    """Their launches on one stream may take turns."""
    inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64), rng=0, target_logits=torch.rand(1, 2, 9))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lent, inputs, 3, 5).result() is not lent(inputs, 3, 5)
    assert lent(inputs, 3, 5) is lent(inputs, 3, 5)


def test_a_call_within_a_call_shares_no_memory() -> None:
    """As where a signal's handler verifies between two launches."""
    inputs = inputs_on("cpu")
    with memory.memory_for(inputs, 3, 5) as outer:
        inner = lent(inputs, 3, 5)
        assert inner is not outer
        assert lent(inputs, 3, 5) is inner
    assert lent(inputs, 3, 5) is outer


def test_memory_in_which_a_call_failed_is_not_lent_again() -> None:
    inputs = inputs_on("cpu")
    with contextlib.suppress(KeyboardInterrupt), memory.memory_for(inputs, 3, 5) as failed:
        failed.counters.fill_(7)
        raise KeyboardInterrupt
    found = lent(inputs, 3, 5)
    assert found is not failed
    assert not found.counters.any()


def test_memory_is_kept_for_the_latest_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_KEPT", {})
    monkeypatch.setattr(memory, "MAX_KEPT", 2)
    inputs, found = inputs_on("cpu"), {}
    for thread in (1, 2, 1, 3, 1, 2):
        monkeypatch.setattr(threading, "get_ident", lambda thread=thread: thread)
        found.setdefault(thread, []).append(lent(inputs, 3, 5))
        assert len(memory._KEPT) <= 2
    assert len({id(each) for each in found[1]}) == 1
    assert found[2][0] is not found[2][1]  # longest without a call when the third came


def test_memory_of_calls_that_end_together_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_KEPT", {})
    monkeypatch.setattr(memory, "MAX_KEPT", 2)
    inputs = inputs_on("cpu")
    with contextlib.ExitStack() as calls_at_once:
        for thread in range(5):
            monkeypatch.setattr(threading, "get_ident", lambda thread=thread: thread)
            calls_at_once.enter_context(memory.memory_for(inputs, 3, 5))
    assert len(memory._KEPT) == 2


def test_calls_share_memory_of_every_size() -> None:
    """Of counters and words alike there is as much as the call with most needs, rounded up."""
    inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64), rng=0, target_logits=torch.rand(1, 2, 9))
    sizes = list(itertools.product((40, 3, 900), (50, 7000, 6)))
    with ThreadPoolExecutor(1) as other:  # which has none yet
        found = list(other.map(lambda size: lent(inputs, *size), sizes))
    for (num_counters, num_words), workspace in zip(sizes, found, strict=True):
        assert len(workspace.counters) >= num_counters
        assert len(workspace.words) >= num_words
        assert not workspace.counters.any()
    largest = found[-1]
    assert (len(largest.counters), len(largest.words)) == (1024, 8192)
    assert all(workspace is largest for workspace in found[sizes.index((900, 50)) :])
    assert len({id(workspace) for workspace in found}) == 3  # and not one for each pair of sizes


def test_counters_are_reserved_where_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, once for all threads and streams."""
    monkeypatch.setattr(memory, "_RESERVED", {})
    monkeypatch.setattr(memory, "current_stream", mock.Mock(side_effect=[1, 2, 2]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(memory, "_KEPT", {})
    lent(inputs_on("cpu"), 3, 5)
    assert not memory._RESERVED
    with FakeTensorMode():
        given = inputs_on("cuda")
        first, *others = [lent(given, 3, 5) for _ in range(3)]
    assert others[0] is others[1]
    assert others[0] is not first  # of another stream, whose calls may run at the same time
    (counters,) = memory._RESERVED.values()
    assert len(counters) == memory.RESERVED_COUNTERS


def test_counters_are_reserved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often memory is made for calls."""
    device = torch.device("cpu")
    monkeypatch.setattr(memory, "_RESERVED", {})
    memory._reserve(device)
    first = memory._RESERVED[device]
    memory._reserve(device)
    assert memory._RESERVED[device] is first


def test_captured_calls_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their counters are reserved ones while there are enough, and then their own."""
    device, reserved = torch.device("cpu"), torch.zeros(10, dtype=torch.int32)
    monkeypatch.setattr(memory, "_RESERVED", {device: reserved})
    found = [memory._captured(size, 5, device) for size in (4, 4, 4, 2)]
    for number, workspace in enumerate(found):
        assert not workspace.counters.any()
        workspace.counters.fill_(number + 1)
    assert [workspace.counters.tolist() for workspace in found] == [[1] * 4, [2] * 4, [3] * 4, [4] * 2]
    assert reserved.tolist() == [1] * 4 + [2] * 4 + [4] * 2
    assert len({workspace.words.data_ptr() for workspace in found}) == 4


def test_a_captured_call_finds_no_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph may be replayed while they run."""
    monkeypatch.setattr(memory, "current_stream", lambda _: 1)
    monkeypatch.setattr(memory, "_RESERVED", {})
    monkeypatch.setattr(memory, "RESERVED_COUNTERS", 0)
    monkeypatch.setattr(memory, "_KEPT", {})
    with FakeTensorMode():
        given, found = inputs_on("cuda"), []
        for capturing in (False, True, True):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
            found.append(lent(given, 4, 5))
    assert len({id(workspace) for workspace in found}) == 3


def test_no_requests_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid without programs would be refused."""
    monkeypatch.setattr(engine, "launch", mock.Mock(side_effect=AssertionError("launched")))
    call = {"target_logits": torch.empty(0, 3, 9), "draft_logits": torch.empty(0, 2, 9)}
    result = engine.verify(acceptlib.create("rejection").plan, cases.inputs(torch.empty(0, 2).long(), rng=0, **call))
    assert result.output_token_ids.shape == (0, 3)


def test_more_requests_than_a_grid_holds_take_torch() -> None:
    for count, why in ((65535, "None"), (65536, "at most 65535 requests, and there are 65536")):
        ids, rows = torch.empty(count, 1, dtype=torch.int64, device="meta"), torch.empty(count, 2, 4, device="meta")
        assert why in str(engine.unsupported(cases.inputs(ids, rng=0, target_probs=rows)))


def test_a_longer_draft_than_a_grid_holds_takes_torch() -> None:
    probs, bounds = torch.full((1, 4), 0.25), torch.zeros(2, dtype=torch.int32)
    ragged = {"target_probs": probs, "cu_num_draft_tokens": bounds, "max_num_draft_tokens": 65535}
    inputs = cases.inputs(torch.zeros(0, dtype=torch.int64), rng=0, **ragged)
    assert "at most 65534 drafted tokens" in str(engine.unsupported(inputs))


def test_more_rows_than_are_counted_take_torch() -> None:
    """Kernels compute in 32 bits where counters are."""
    for most, why in ((5460, "None"), (5461, "at most 357913941 rows, and requests times K + 1 are 357952170")):
        ids = torch.empty(65535, most, dtype=torch.int64, device="meta")
        rows = torch.empty(65535, most + 1, 2, device="meta")
        assert why in str(engine.unsupported(cases.inputs(ids, rng=0, target_probs=rows)))
    assert num_counts.fn(65535, 5460).value < 2**31
    assert num_counts.fn(engine.MAX_ROWS, 0).value < 2**31


def test_the_most_that_kernels_hold_takes_no_torch() -> None:
    ids, rows = torch.empty(49981, 7160, dtype=torch.int64, device="meta"), torch.empty(49981, 7161, 2, device="meta")
    assert engine.MAX_ROWS == 49981 * 7161
    assert engine.unsupported(cases.inputs(ids, rng=0, target_probs=rows)) is None
    rows = torch.empty(1, 2, engine.MAX_ENTRIES, device="meta")
    assert engine.unsupported(cases.inputs(ids[:1, :1], rng=0, target_logits=rows)) is None


def test_words_of_a_bitmask_far_apart_take_torch() -> None:
    """Kernels compute in 32 bits where the words of a row's mask are."""
    ids, rows = torch.empty(1, 1, dtype=torch.int64, device="meta"), torch.empty(1, 2, 128256, device="meta")
    for stride, why in ((535_933, "None"), (535_934, "span at most 2147483647 words, and one spans 2147487538")):
        mask = torch.empty_strided((1, 2, 4008), (1, 1, stride), dtype=torch.int32, device="meta")
        sampling = acceptlib.SamplingParams(allowed_token_bitmask=mask)
        assert why in str(engine.unsupported(cases.inputs(ids, rng=0, target_logits=rows, sampling=sampling)))


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
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(backends, "_fault_of_triton", backends._fault_of_triton.__wrapped__)
    assert "not installed" in str(backends.triton_unavailable(inputs_on("cpu")))


def test_a_triton_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backends, "_fault_of_triton", backends._fault_of_triton.__wrapped__)
    monkeypatch.setattr(importlib, "import_module", mock.Mock(side_effect=ImportError("libfoo.so is missing")))
    assert "cannot be imported (ImportError: libfoo.so is missing)" in str(
        backends.triton_unavailable(inputs_on("cpu"))
    )


@pytest.mark.parametrize("version", ["2.3.1", "3.2.0", "3.5.1+git1", "3.6.0", "3.10.0", "4.0.0"])
def test_a_triton_that_is_too_old_is_none(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(backends, "_fault_of_triton", backends._fault_of_triton.__wrapped__)
    reason = backends.triton_unavailable(inputs_on("cpu"))
    if version in {"3.6.0", "3.10.0", "4.0.0"}:
        assert reason is None
    else:
        assert f"need triton 3.6 or later, and {version} is installed" in str(reason)
        assert backends.resolve("auto", inputs_on("cpu")).name == "torch"
        with pytest.raises(BackendError, match=r"need triton 3\.6"):
            backends.require("triton", torch.device("cpu"))


def test_an_explicit_choice_raises_with_the_reason() -> None:
    probs = torch.full((1, 2, 4), 0.25)
    strategy = acceptlib.create("rejection", backend="triton")
    with pytest.raises(BackendError, match="cannot run on cpu: Triton runs on GPUs"):
        strategy.verify(torch.zeros(1, 1, dtype=torch.int64), target_probs=probs, draft_probs=probs[:, :1])
