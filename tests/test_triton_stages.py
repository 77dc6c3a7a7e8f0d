"""What a call is launched as: its stages, which of them overlap or wait, their programs, and what those read."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

import triton_engine_cases as cases
from triton_calls import strategies

import acceptlib
from acceptlib import VerifyResult, ops
from acceptlib.engine.triton import engine, memory, plans, tunings
from acceptlib.engine.triton.layout import num_counts
from acceptlib.engine.triton.rows import BOTH, DRAFT, TARGET
from acceptlib.engine.triton.stages import groups
from acceptlib.ops import Value


def of_probs(vocab_size: int) -> dict[str, object]:
    """Return a call of one request."""
    return {"target_probs": torch.full((1, 2, vocab_size), 1 / vocab_size)}


@pytest.mark.parametrize("target", ["cuda:80", cases.EVERYTHING])
@pytest.mark.parametrize(("call", "num_waits"), [(of_probs(1 << 17), 1), (of_probs(9000), 0)])
def test_warps_that_wait_meet_before_words_are_cleared(call: dict[str, object], num_waits: int, target: str) -> None:
    """A warp that left the others alone would clear what they wait for.

    Each turn of the loop that waits for masses has a barrier; and threads that wait for sums by themselves meet behind.
    """
    call["ids"] = torch.zeros(1, 1, dtype=torch.int64)
    (_, asm), *rest = cases.codes(acceptlib.create("rejection"), target, call)
    assert not any("ld.volatile" in other["ptx"] for _, other in rest)
    code, turns = asm["ptx"], []
    for label in re.finditer(r"^(\$L__BB\w+):", code, re.MULTILINE):
        back = re.compile(rf"bra\S*\s+{re.escape(label[1])};")
        turns += [code[label.start() : end.end()] for end in back.finditer(code, label.end())]
    waiting = [turn for turn in turns if "ld.volatile" in turn and "bra WAIT" not in turn]
    assert len(waiting) == num_waits
    assert all("bar.sync" in turn for turn in waiting)
    _, *spun = code.split("bra WAIT")
    assert len(spun) == num_waits
    assert all("bar.sync" in after[: after.index("st.global")] for after in spun)


@pytest.mark.parametrize("form", ["target_logits", "target_probs"])
@pytest.mark.parametrize(("name", "asks_for_more"), [("greedy", False), ("rejection", True)])
def test_rows_of_which_argmaxes_are_asked_are_not_weighed(name: str, form: str, *, asks_for_more: bool) -> None:
    """No exponential is taken then, and no block of a row is read again to draw from."""
    call = {form: of_probs(1 << 17)["target_probs"], "ids": torch.zeros(1, 1, dtype=torch.int64)}
    stages = {constants[1]: asm["ttir"] for constants, asm in cases.codes(acceptlib.create(name), "cuda:90", call)}
    has_exponentials = any("math.exp" in code for code in stages.values())
    assert has_exponentials == (asks_for_more and form == "target_logits")
    blocks = [int(size) for size in re.findall(r"tt\.load .*tensor<(\d+)x!tt\.ptr<f32>>", stages["emit"])]
    assert any(size >= min(engine.BLOCK, tunings.SMALL_PROBS.emit_block) for size in blocks) == asks_for_more


@pytest.mark.parametrize("filters_draft", [True, False])
@pytest.mark.parametrize(
    ("num_requests", "given", "lists_runs", "stages"),
    [
        (8, {"min_p": 0.1}, True, ["reduce", "select", "emit"]),
        (18, {"min_p": 0.1}, True, ["reduce", "select", "emit"]),
        (19, {"min_p": 0.1}, False, ["reduce", "select", "emit"]),
        (256, {"min_p": 0.1}, False, ["reduce", "emit"]),  # of which a row's last program finds what is kept
        (1, {"min_p": 0.1, "top_k": 5}, False, ["reduce", "select", "emit"]),
        (1, {"min_p": 0.1, "top_p": 0.5}, False, ["reduce", "select", "collect", "finish", "emit"]),
    ],
)
def test_blocks_of_all_but_larger_batches_list_runs_under_min_p_alone(
    num_requests: int,
    given: dict[str, float],
    stages: list[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    filters_draft: bool,
    lists_runs: bool,
) -> None:
    """Of a model without a filter rows are read with the others, for little is left to do meanwhile."""
    rows = torch.zeros(1, 1, 32 * engine.BLOCK).expand(num_requests, 4, -1)
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda *launch: launched.append(launch)))
    sampling = acceptlib.SamplingParams(**given)
    call = {"target_logits": rows, "draft_logits": rows[:, 1:], "sampling": sampling}
    call["draft_sampling"] = sampling if filters_draft else acceptlib.SamplingParams()
    ids = torch.zeros(num_requests, 3, dtype=torch.int64)
    engine.verify(acceptlib.create("rejection").plan, cases.inputs(ids, rng=0, **call))
    assert {key.call.lists_runs for key, *_ in launched} == {lists_runs}
    if lists_runs:  # laws of the draft's logits are found from lists too
        assert launched[0][0].call.filtered == (True, True)
        assert dataclasses.replace(launched[0][0].call, logits=(True, False)).filtered == (True, filters_draft)
    late = [] if filters_draft or lists_runs or "select" not in stages else ["reduce"]
    assert [key.stage for key, *_ in launched] == [*stages[:2], *late, *stages[2:]]


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
        ("rejection", {"dtype": torch.bfloat16}, [(32, 3), (24, 4)], True),
        ("rejection", {"dtype": torch.bfloat16}, [(31, 3), (23, 4)], False),
        ("rejection", {"min_p": 0.1}, [(16, 7), (28, 4)], True),
        ("rejection", {"min_p": 0.1}, [(32, 3), (27, 4)], False),
        ("rejection", {"top_k": 9}, [(64, 3)], True),  # whose positions go in groups
        ("rejection", {"top_k": 9}, [(63, 3)], False),
        ("typical", {}, [(28, 4)], True),  # whose entropy comes with the laws
        ("typical", {"min_p": 0.1}, [(38, 4)], False),  # and here does not
        ("typical", {"probs": True}, [(64, 3), (24, 8)], True),  # of which sums are found
        ("typical", {"probs": True}, [(63, 3), (32, 5)], False),
        ("greedy", {"probs": True}, [(16, 4)], True),
        ("greedy", {"probs": True}, [(21, 3)], False),
        ("rejection", {"probs": True, "draft": "logits"}, [(64, 1), (22, 3)], True),  # of the draft's rows alone
        ("rejection", {"probs": True, "draft": "logits"}, [(63, 1), (21, 3)], False),
        ("rejection", {"probs": True}, [(256, 7)], False),  # of which stopping rows alone are read
    ],
)
def test_rows_are_left_out_where_that_may_spare_enough(
    name: str, form: dict[str, Any], shapes: list[tuple[int, int]], *, spares: bool
) -> None:
    """That depends on the batch, the draft's length, and what is read of an entry."""
    parameters = {name: value for name, value in form.items() if name in {"min_p", "top_k"}}
    for num_requests, most in shapes:
        rows = torch.empty(num_requests, most + 1, 128256, dtype=form.get("dtype"), device="meta")
        kind = "probs" if form.get("probs") else "logits"
        given: dict[str, Any] = {f"target_{kind}": rows}
        if parameters:
            given["sampling"] = acceptlib.SamplingParams(**parameters)
        if not form.get("one_hot"):
            given[f"draft_{form.get('draft', kind)}"] = rows[:, 1:]
        out = VerifyResult.empty(num_requests, most, rows.device, num_passed=form.get("num_passed", False))
        ids = torch.empty(num_requests, most, dtype=torch.int64, device="meta")
        launched: list[Any] = []
        with (
            mock.patch.object(engine, "launch", cases.each(lambda *launch: launched.append(launch))),  # noqa: B023
            mock.patch.object(tunings, "tuning_of", wraps=tunings.tuning_of) as tuning_of,
        ):
            engine.verify(strategies()[name].plan, cases.inputs(ids, rng=0, out=out, **given))
        (key, *_), *_ = launched
        assert key.call.lazy == spares, (num_requests, most)
        # Where no row can be left out, a batch is not run as a large one at all.
        assert tunings.tuning_of(*tuning_of.call_args.args).lazy == spares, (num_requests, most)


@pytest.mark.parametrize("num_requests", [1, 8, 256])
@pytest.mark.parametrize(
    ("name", "form", "positions"),
    [
        ("synthetic", {}, 1),
        ("wild", {"draft": True}, 1),  # whose residual reads both rows
        ("synthetic", {"num_passed": True}, 1),
        ("synthetic", {"logprobs": True}, 4),
        ("synthetic", {"min_p": 0.1}, 4),
        ("greedy", {}, 4),
        ("rejection", {}, 4),
    ],
)
def test_the_only_row_read_is_at_the_stop_where_no_row_decides(
    name: str, form: dict[str, Any], positions: int, num_requests: int
) -> None:
    """Unless others are asked for, or filters take stages that look at all rows."""
    rows = torch.empty(num_requests, 4, 128256, device="meta")
    given: dict[str, Any] = {"target_logits": rows}
    if form.get("draft"):
        given["draft_logits"] = rows[:, 1:]
    if "min_p" in form:
        given["sampling"] = acceptlib.SamplingParams(min_p=form["min_p"])
    logprobs = form.get("logprobs", False)
    out = VerifyResult.empty(num_requests, 3, rows.device, logprobs=logprobs, num_passed=form.get("num_passed", False))
    ids = torch.empty(num_requests, 3, dtype=torch.int64, device="meta")
    grids: list[tuple[int, ...]] = []
    with mock.patch.object(engine, "launch", cases.each(lambda _, grid, *__: grids.append(grid))):
        engine.verify(strategies()[name].plan, cases.inputs(ids, rng=0, out=out, logprobs=logprobs, **given))
    assert grids[0][2] == positions


@pytest.mark.parametrize(
    ("name", "given", "num_requests", "at_stop"),
    [
        ("typical", {}, 64, True),
        ("typical", {}, 8, False),  # where the block would have to be waited for
        ("typical", {"kind": "probs"}, 64, True),
        ("typical", {"top_k": 9}, 64, False),  # whose argmax comes with the cut
        ("greedy", {}, 64, False),  # whose rule reads it
    ],
)
def test_an_argmax_that_no_rule_reads_is_found_at_the_stop_of_all_but_small_batches(
    name: str, given: dict[str, Any], num_requests: int, monkeypatch: pytest.MonkeyPatch, *, at_stop: bool
) -> None:
    """Then no other row is searched for it, in the last stage one block is."""
    rows = torch.empty(num_requests, 4, 128256, device="meta")
    calls: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: calls.append(key.call)))
    parameters = {"sampling": acceptlib.SamplingParams(top_k=given["top_k"])} if "top_k" in given else {}
    ids = torch.empty(num_requests, 3, dtype=torch.int64, device="meta")
    kind = f"target_{given.get('kind', 'logits')}"
    engine.verify(strategies()[name].plan, cases.inputs(ids, rng=0, **{kind: rows}, **parameters))
    assert {(call.argmax_at_stop, call.argmaxes) for call in calls} == {(at_stop, (not at_stop, False))}


def stages(strategy: str, monkeypatch: pytest.MonkeyPatch, **arguments: object) -> list[str]:
    """Return the stages that a call launches."""
    launched: list[str] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: launched.append(key[1])))
    inputs = cases.inputs(torch.zeros(2, 3, dtype=torch.int64), rng=0, **arguments)
    engine.verify(strategies()[strategy].plan, inputs)
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
    """It would take the place of one that reads them; after any other stage it may wait where it will run.

    The last one has something to do before, where the one that reads rows finds stops.
    """
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
    found_in_groups = [("reduce", False), ("select", not near), ("collect", False), ("finish", False)] * 2
    filtered = [("reduce", True), *found_in_groups[1:], ("emit", False)]
    plain = [("reduce", True), ("emit", False)]
    engine.verify(strategies()["fly"].plan, cases.inputs(ids, rng=0, target_probs=logits.softmax(-1)))
    summed = [("sum", True), ("decide", not near), ("emit", False)]
    assert found == [(*stage, True) for stage in (*filtered, *plain, *summed)]
    found.clear()
    monkeypatch.setattr(tunings, "SIZES", tunings.Sizes(medium=1, large=1 << 30))
    engine.verify(acceptlib.create("rejection").plan, cases.inputs(ids, rng=0, target_logits=logits))
    assert found == [("reduce", True, near), ("emit", not near, near)]


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
def test_groups_grow_as_fewer_requests_are_expected(num_positions: int, num_blocks: int, firsts: list[int]) -> None:
    """Each has about as much to read if six of ten requests get on from every position."""
    assert list(groups(num_positions, num_blocks)) == [*itertools.pairwise([*firsts, num_positions])]


@pytest.mark.parametrize("sizes", cases.EVERY_SIZE)
def test_an_entropy_costs_no_stage_from_logits(sizes: tunings.Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with the law of a row, unless a filter leaves it to another pass."""
    monkeypatch.setattr(tunings, "SIZES", sizes)
    logits, cut = torch.zeros(2, 4, 50), acceptlib.SamplingParams(top_k=9)
    warm = acceptlib.SamplingParams(temperature=0.7)
    for sampling in (None, warm):
        given = {"target_logits": logits, "sampling": sampling}
        assert stages("typical", monkeypatch, **given) == stages("rejection", monkeypatch, **given)
    assert "sum" in stages("typical", monkeypatch, target_logits=logits, sampling=cut)
    mixed = {"target_logits": logits, "draft_logits": logits[:, :3], "draft_sampling": cut, "sampling": warm}
    assert "sum" not in stages("typical", monkeypatch, **mixed)


@pytest.mark.parametrize("sizes", cases.EVERY_SIZE)
def test_rows_are_gone_through_once(sizes: tunings.Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sums, argmaxes and largest entries too, unless a law or a cut has to be known before."""
    monkeypatch.setattr(tunings, "SIZES", sizes)
    logits, cut = torch.zeros(2, 4, 50), acceptlib.SamplingParams(top_k=9)
    probs = {"target_probs": logits.softmax(-1)}
    for given in (probs, probs | {"draft_probs": logits[:, :3].softmax(-1)}):
        for name in ("typical", "fly"):
            assert "reduce" not in stages(name, monkeypatch, **given)
    # The largest entry of a draft's row may be beyond the vocabulary, where no sum goes.
    assert "reduce" in stages("cascade", monkeypatch, **probs, draft_probs=logits[:, :3].softmax(-1))
    models = {"target_logits": logits, "draft_logits": logits[:, :3]}
    assert "sum" not in stages("fly", monkeypatch, **models)
    assert "sum" not in stages("fly", monkeypatch, **models, draft_sampling=cut)
    assert "sum" in stages("fly", monkeypatch, **models, sampling=cut)


@pytest.mark.parametrize(
    "asked",
    [
        *({f"reads_{name}": True} for name in ("target", "draft", "target_max", "draft_max")),
        *({f"{name}_scalar": 0} for name in ("entropy", "mass")),
        {"sums": (None,)},
        {"logprobs": True},
        {"draws": True},
        {"top_ks": (True, False)},
    ],
)
def test_logits_have_normalisers_if_anything_asks_for_probabilities(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argmaxes alone do not."""
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: launched.append(key.call)))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    engine.verify(acceptlib.create("greedy").plan, cases.inputs(ids, rng=0, target_logits=torch.zeros(2, 4, 50)))
    assert launched[-1].normalises == (False, False)
    assert dataclasses.replace(launched[-1], **asked).normalises == (True, False)


# Memory


def sizes_of(name: str, num_requests: int = 2, most: int = 3, **arguments: Any) -> tuple[int, int]:
    """Return how many counters and words of memory a call asks for, on rows of one block and in one tuning."""
    rows = torch.zeros(num_requests, most + 1, 50)
    found: list[tuple[int, int]] = []

    def note(_: object, *sizes: int) -> memory.Lent:
        found.append(sizes)  # type: ignore[arg-type]
        return memory.Lent(acceptlib.Workspace.allocate(*sizes, "cpu"))

    form, draft = arguments.pop("form", "logits"), arguments.pop("draft", False)
    given = {f"target_{form}": rows} | ({f"draft_{form}": rows[:, :most]} if draft else {})
    ids = torch.zeros(num_requests, most, dtype=torch.int64)
    with (
        mock.patch.object(tunings, "TUNINGS", tunings.Tunings(*[tunings.SMALL] * len(tunings.TUNINGS))),
        mock.patch.object(engine, "resident_programs", return_value=64),
        mock.patch.object(engine, "memory_for", note),
        mock.patch.object(engine, "launch"),
    ):
        engine.verify(strategies()[name].plan, cases.inputs(ids, rng=0, **given, **arguments))
    return found[0]


def test_a_call_asks_for_no_memory_of_what_it_does_not_find() -> None:
    warm, cut = acceptlib.SamplingParams(temperature=0.7), acceptlib.SamplingParams(top_k=9)
    # Of raw rows, unless log-probabilities are asked for, and differ.
    assert sizes_of("rejection", sampling=warm) == sizes_of("rejection", logprobs=True) == sizes_of("rejection")
    # Of what is drawn from rows of which only the argmax is asked for.
    assert sizes_of("greedy", form="probs") == sizes_of("greedy")
    # Of sums that tell where a draw falls, where masses do.
    assert sizes_of("saver", form="probs") == sizes_of("saver")
    # Of a draw's rows but for the one at the stop: four words a position are what a block's sums and maxima take.
    _, few = sizes_of("rejection", most=3, form="probs", draft=True)
    _, more = sizes_of("rejection", most=5, form="probs", draft=True)
    assert more - few == 2 * 2 * 4
    # Of what is kept of the draft's rows where there are none.
    drafted = {"most": 0, "draft": True}
    assert sizes_of("rejection", **drafted, draft_sampling=cut) == sizes_of("rejection", **drafted)
    # Of words that are waited for, where these are in the workspace.
    counters, _ = sizes_of("rejection", draft=True)
    assert counters == num_counts.fn(2, 3).value + 2 * 2


def test_rows_of_a_wider_draft_are_read_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = torch.zeros(1, 2, 50), torch.zeros(1, 2, engine.BLOCK + 1)
    found: list[int] = []
    monkeypatch.setattr(engine, "launch", lambda launches, *_: found.append(launches[0].grid[0]))
    monkeypatch.setattr(tunings, "TUNINGS", tunings.Tunings(*[tunings.SMALL] * len(tunings.TUNINGS)))
    for target, draft in ((narrow, narrow), (narrow, wide), (wide, narrow)):
        call = {"target_logits": target, "draft_logits": draft[:, :1]}
        engine.verify(acceptlib.create("rejection").plan, cases.inputs(torch.zeros(1, 1).long(), rng=0, **call))
    assert found == [2, 4, 4]  # programs: a block of each model, or two


def test_filtered_rows_of_either_model_have_memory() -> None:
    """Each of a drafted position takes as much as the other, and the target has a row behind these."""
    cut = acceptlib.SamplingParams(top_k=9)
    none, of_target, of_draft = (
        [sizes_of("rejection", most=most, draft=True, **given)[1] for most in (0, 1, 2)]
        for given in ({}, {"sampling": cut, "draft_sampling": acceptlib.SamplingParams()}, {"draft_sampling": cut})
    )
    places = of_target[0] - none[0]
    assert places > 0
    assert [words - plain for words, plain in zip(of_target, none, strict=True)] == [places, 2 * places, 3 * places]
    assert [words - plain for words, plain in zip(of_draft, none, strict=True)] == [0, places, 2 * places]


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
        ("saver", {}, False),  # whose masses are those of draws
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
    engine.verify(strategies()[strategy].plan, cases.inputs(torch.zeros(2, 3, dtype=torch.int64), rng=0, **given))
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


class Elsewhere(Odds):
    """Another, whose weights are wherever the drafted token is not."""

    name = "elsewhere"

    @acceptlib.rule
    def residual(p: Value, q: Value, is_drafted: Value) -> Value:
        """Return the weight of each entry."""
        return ops.where(is_drafted, p, 0.5) - q


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
        rules, _ = plans.bound(strategies()[name].plan, torch.device("cpu"))
        assert rules.within_target, name


def test_a_residual_that_cannot_be_tried_is_weighed() -> None:
    for strategy in (
        Odds(),
        Distance(),
        Swapped(),
        Added(),
        Beside(),
        Absent(),
        Empty(),
        Again(),
        Elsewhere(),
        Passed(),
    ):
        rules, _ = plans.bound(strategy.plan, torch.device("cpu"))
        assert rules.keeps_target == (strategy.name == "again")  # where the draft is certain of that token
        assert not rules.within_target


class Sums(Odds):
    """Another, with sums over rows."""

    name = "sums"

    class Options(acceptlib.Options):
        """A number for each position."""

        floors: tuple[float, ...] = (0.0, 0.1)

    @acceptlib.row_sum
    def squares(p: Value) -> Value:
        """Sum to 1 where the target is certain."""
        return p * p

    @acceptlib.row_sum
    def absent(p: Value) -> Value:
        """Have a term of 1 where p is 0."""
        return ops.where(p > 0, 0.0, 1.0)

    @acceptlib.row_sum
    def unlawful(p: Value) -> Value:
        """Have a term of 1 where p is no number."""
        return ops.where(p <= 1, 0.0, 1.0)

    @acceptlib.row_sum
    def guarded(p: Value) -> Value:
        """Have a term that is no number where p is 0, for the guard is 0 in float32."""
        return p * ops.log(p + 1e-50)

    @acceptlib.row_sum
    def distant(p: Value, q: Value) -> Value:
        """Sum to twice the distance of the two rows."""
        return ops.abs(p - q)

    @acceptlib.row_sum
    def at_floor(p: Value, floors: Value) -> Value:
        """Have a term of 1 where p is a number that each position has of its own."""
        return ops.where(p == floors, 1.0, 0.0)

    @acceptlib.rule
    def accept(squares: Value, absent: Value, unlawful: Value, target_entropy: Value) -> Value:
        """Return h."""
        return squares * absent * unlawful * target_entropy

    @acceptlib.rule
    def residual(p: Value, guarded: Value, distant: Value, at_floor: Value) -> Value:
        """Return the weight of each entry."""
        return p * guarded * distant * at_floor


def test_sums_go_beyond_a_row_where_all_terms_are_sure_to_be_0() -> None:
    """Which is known of what the target alone has: a wider draft that is greedy may be certain of a token there."""
    rules, _ = plans.bound(Sums().plan, torch.device("cpu"))
    assert {name for name, none in zip(rules.scalars, rules.vanishing, strict=True) if none} == {
        "squares",
        "target_entropy",
    }


@pytest.mark.parametrize(
    ("strategy", "sampling", "sizes", "lists"),
    [
        ("rejection", {"top_k": 3}, LARGE, True),
        ("lenience", {"min_p": 0.1}, LARGE, True),
        ("typical", {"top_k": 3, "top_p": 0.5}, LARGE, True),
        ("rejection", {"top_k": 3}, SMALL, True),
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
    engine.verify(strategies()[strategy].plan, cases.inputs(torch.zeros(2, 3, dtype=torch.int64), rng=0, **given))
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
    engine.verify(strategies()[strategy].plan, cases.inputs(torch.zeros(2, 3, dtype=torch.int64), rng=0, **given))
    assert found[-1] == registers


@pytest.mark.parametrize(("length", "grid"), [(3, (4, 2, 3)), (1, (5, 2, 2))])
def test_rows_that_may_be_stopped_at_are_weighed_side_by_side(
    length: int, grid: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By programs that all run at a time: 24 do here, and a row has 20 blocks."""
    grids: dict[str, tuple[int, int, int]] = {}
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, grid, *_: grids.update({key[1]: grid})))
    monkeypatch.setattr(tunings, "SIZES", SMALL)
    monkeypatch.setattr(engine, "resident_programs", lambda *_: 24)
    logits = torch.zeros(2, length + 1, 20 * tunings.SMALL_MASSES.emit_block)
    ids = torch.zeros(2, length, dtype=torch.int64)
    engine.verify(
        acceptlib.create("block").plan,
        cases.inputs(ids, rng=0, target_logits=logits, draft_logits=logits[:, :length]),
    )
    assert grids["emit"] == grid


@pytest.mark.parametrize("form", ["logits", "probs"])
def test_programs_that_wait_are_not_all_that_run(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a request does; where they took every place, those that they wait for would never run."""
    monkeypatch.setattr(engine, "resident_programs", lambda *_: 4)
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: launched.append(key)))
    waits = []
    for num_requests in (3, 4):
        rows = torch.empty(num_requests, 2, 70000, device="meta")
        ids = torch.empty(num_requests, 1, dtype=torch.int64, device="meta")
        given = {f"target_{form}": rows, f"draft_{form}": rows[:, 1:]}
        engine.verify(acceptlib.create("rejection").plan, cases.inputs(ids, rng=0, **given))
        waits.append(launched[-1].call.awaits)
    assert waits == [True, False]


@pytest.mark.parametrize(
    ("warps", "parts", "hip", "waits"),
    [(8, 8, None, True), (4, 8, None, True), (16, 8, None, False), (8, 16, None, False), (8, 8, "6.4", False)],
)
def test_programs_wait_where_all_threads_see_the_same(
    warps: int, parts: int, hip: str | None, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """Not where warps would share a part, nor where a sum of doubts would overflow, whatever sizes are tried."""
    tuning = tunings.SMALL._replace(emit_warps=warps, emit_parts=parts)
    monkeypatch.setattr(tunings, "TUNINGS", tunings.Tunings(*[tuning] * len(tunings.TUNINGS)))
    monkeypatch.setattr(engine, "resident_programs", lambda *_: 64)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(engine, "call_of", engine.call_of.__wrapped__)  # which remembers no other compiler
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, *_: launched.append(key)))
    rows = torch.empty(1, 2, 70000, device="meta")
    ids = torch.empty(1, 1, dtype=torch.int64, device="meta")
    engine.verify(
        acceptlib.create("rejection").plan, cases.inputs(ids, rng=0, target_logits=rows, draft_logits=rows[:, 1:])
    )
    assert launched[-1].call.awaits == waits


def test_a_large_batch_starts_the_programs_that_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, tuple[int, int, int]] = {}
    monkeypatch.setattr(engine, "launch", cases.each(lambda key, grid, *_: grids.update({key[1]: grid})))
    monkeypatch.setattr(tunings, "SIZES", tunings.Sizes(medium=1, large=0))
    monkeypatch.setattr(engine, "resident_programs", lambda *_: 9)
    probs = torch.zeros(3, 3, 20 * tunings.LARGE_PROBS.emit_block)
    call = cases.inputs(torch.zeros(3, 2, dtype=torch.int64), rng=0, target_probs=probs, draft_probs=probs[:, :2])
    engine.verify(acceptlib.create("rejection").plan, call)
    assert grids == {"emit": (3, 3, 1)}
