"""Where the kernels read and write, on interpreted Triton: what `test_embedding.py` runs in a process of its own.

TRITON_INTERPRET=1 python memory_interpreted.py interpreted results.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any
from unittest import mock

import quick_interpreter
import torch
import triton_calls
import triton_engine_cases as cases
from triton.runtime.interpreter import GridExecutor

import acceptlib
from acceptlib import AcceptanceStrategy, VerifyResult, Workspace, checks
from acceptlib.engine import torch_engine
from acceptlib.engine.triton import engine, tunings
from acceptlib.engine.triton.launching import Launch
from acceptlib.engine.triton.layout import layout_of
from acceptlib.engine.triton.memory import Lent
from acceptlib.errors import InputError
from acceptlib.inputs import Inputs

SIZES = (3, 2, 40)
FORMS = ("padded", "ragged-logits")
STAGES = ("rejection", "block", "fly", "typical", "relaxed", "entropy-scaled")
"""Strategies that between them use every part of a workspace."""
RUBBISH = (5 << 32) + 5
"""Of a word, and of its halves: a small number, as how many entries are listed."""
GUARD = 32
"""Elements behind a workspace that nothing may touch."""


STRIDES = {
    "rows-apart": lambda most: ((most + 1) * 2**31, 2**31 + 64, 1),
    "rows-in-sum": lambda most: ((most + 1) * 2**30, 2**30 + 16, 1),
    "entries-apart": lambda most: ((most + 1) * 64, 64, 2**26 + 1024),
}
"""Strides of [B, K+1, V] whose last entry lies beyond 2^31 elements."""

FAR = ("rows-apart/padded", "rows-apart/ragged", "rows-in-sum/padded", "rows-in-sum/ragged", "entries-apart/padded")

EXACT = (
    "rejection/padded",
    "rejection/ragged-top-p",
    "block/padded",
    "typical/ragged-logits",
    "entropy-scaled/ragged-logits",
    "relaxed/ragged-top-p",
)
"""Calls that between them write to the end of every part of the memory that they ask for, or need state behind it."""

UNFIT = ("unfit/counters", "unfit/words", "unfit/device", "unfit/address")
LISTS = "lists/bad-counts"
LEFT_OUT = "left-out/rows"
REMEMBERED = "remembered/values"
WITHIN = "within/another"
ONCE = [LISTS, LEFT_OUT, REMEMBERED, WITHIN]
CASES = [f"workspace/{name}/{form}" for name in STAGES for form in FORMS]
CASES += [*(f"exact/{case}" for case in EXACT), *UNFIT, *FAR, *ONCE]


def guarded(workspace: Workspace) -> tuple[Workspace, Callable[[], str]]:
    """Return a workspace of the same size, full of rubbish, and what says how a call has misused it."""
    size = workspace.words.numel()
    words = torch.full((size + GUARD,), -1, dtype=torch.int64)
    counters = torch.zeros(workspace.counters.numel() + GUARD, dtype=torch.int32)
    counters[-GUARD:] = 7

    def misuse() -> str:
        problems = []
        if bool((words[size:] != -1).any()) or bool((counters[-GUARD:] != 7).any()):
            problems.append("written behind its end")
        if bool((counters[:-GUARD] != 0).any()):
            problems.append("counters are not zero")
        return ", ".join(problems)

    return Workspace(counters=counters[:-GUARD], words=words[:size]), misuse


def in_workspace(strategy: AcceptanceStrategy, form: str) -> str:
    """Return what is wrong with a call in exactly the workspace that the strategy allocates for its sizes."""
    num_requests, most, vocab_size = sizes = SIZES
    arguments = triton_calls.calls(sizes)[form]
    expected = cases.run(torch_engine.verify, strategy, arguments)
    for tunings.SIZES in cases.EVERY_SIZE:
        workspace, misuse = guarded(strategy.workspace(num_requests, most, vocab_size, "cpu"))
        found = cases.run(engine.verify, strategy, {**arguments, "workspace": workspace})
        if isinstance(found, str) or isinstance(expected, str):
            return f"{found} and {expected}"
        wrong = [name for name in cases.FIELDS if not torch.equal(getattr(found, name), getattr(expected, name))]
        if wrong or misuse():
            return f"different {wrong} {misuse()}"
    return ""


def in_exact_memory(strategy: AcceptanceStrategy, form: str) -> str:
    """Return what is wrong with a call without a workspace, in as much memory as it asks for and no more."""
    forms = triton_calls.calls(SIZES)
    top_p = {**forms["ragged-logits"], "sampling": acceptlib.SamplingParams(top_p=0.9)}
    arguments = {**forms, "ragged-top-p": top_p}[form]
    expected = cases.run(torch_engine.verify, strategy, arguments)
    lent: list[Callable[[], str]] = []

    def exactly(_: Inputs, num_counters: int, num_words: int) -> Lent:
        workspace, misuse = guarded(Workspace.allocate(num_counters, num_words, "cpu"))
        lent.append(misuse)
        return Lent(workspace)

    _, tunings.SIZES, _ = cases.EVERY_SIZE
    with mock.patch.object(engine, "memory_for", exactly):
        found = cases.run(engine.verify, strategy, arguments)
    if isinstance(found, str) or isinstance(expected, str):
        return f"{found} and {expected}"
    wrong = [name for name in cases.FIELDS if not torch.equal(getattr(found, name), getattr(expected, name))]
    (misuse,) = lent
    return f"different {wrong} {misuse()}" if wrong or misuse() else ""


def unfit(strategy: AcceptanceStrategy, part: str) -> str:
    """Return what is wrong with the error for a workspace of which a part has too few elements, or is elsewhere."""
    num_requests, most, vocab_size = SIZES
    fits, small = (strategy.workspace(count, most, vocab_size, "cpu") for count in (num_requests, num_requests - 1))
    size = fits.counters.numel()
    pool = torch.zeros(size + 1, dtype=torch.int32)
    workspace, got = {
        "counters": (Workspace(counters=small.counters, words=fits.words), f"got {small.counters.numel()} and"),
        "words": (Workspace(counters=fits.counters, words=fits.words[:8]), "and 8 on cpu"),
        "device": (Workspace(counters=fits.counters.to("meta"), words=fits.words.to("meta")), "on meta"),
        "address": (Workspace(counters=pool[1:], words=fits.words), "got an address that leaves 4."),
    }[part]
    try:
        cases.run(engine.verify, strategy, {**triton_calls.calls(SIZES)["padded"], "workspace": workspace})
    except InputError as error:
        message = str(error)
    else:
        return "no error"
    expected = "at a multiple of 8 bytes" if part == "address" else f"at least {size} counters"
    return "" if expected in message and got in message else message


def lists_of_others(strategy: AcceptanceStrategy) -> str:
    """Return what is wrong with a row that nobody needs after a call, where a request with bad counts points at it."""
    num_requests, most, vocab_size = 4, 3, SIZES[2]
    logits = torch.zeros(most + num_requests, vocab_size)
    logits[:, 0] = -20.0  # so the first drafted token is rejected, and its request's last row is never looked at
    workspace = strategy.workspace(num_requests, most, vocab_size, "cpu")
    workspace.words.fill_(RUBBISH)
    call = {
        "ids": torch.zeros(most, dtype=torch.int64),
        "target_logits": logits,
        "draft_logits": logits[:most],
        "cu_num_draft_tokens": torch.tensor([0, 3, 3, 3, 1]),
        "max_num_draft_tokens": most,
        "sampling": acceptlib.SamplingParams(top_k=3),
        "workspace": workspace,
    }
    *_, tunings.SIZES = cases.EVERY_SIZE
    with mock.patch.object(engine, "launch", side_effect=engine.launch) as launch:
        cases.run(engine.verify, strategy, call)
    launches, _, numbers = launch.call_args.args
    compiled_for = launches[-1].key.call
    layout = layout_of.fn(num_requests * most, most, num_requests, *numbers[-3:-1], compiled_for)
    row = workspace.words[layout.cuts + most * layout.cut_words :][: layout.cut_words]
    written = int((row != RUBBISH).sum())
    return f"{written} words are written" if written else "" if compiled_for.lists else "nothing is drawn from lists"


def left_out(strategy: AcceptanceStrategy) -> str:
    """Return what is wrong with what a large batch reads beyond a stop: nothing, once the stop is known."""
    num_requests, most, vocab_size = SIZES
    ids = torch.zeros(num_requests, most, dtype=torch.int64)
    target = torch.zeros(num_requests, most + 1, vocab_size)
    target[0, :, 0] = -20.0  # so that the first request rejects, and the others do not
    workspace = strategy.workspace(num_requests, most, vocab_size, "cpu")
    workspace.words.fill_(RUBBISH)
    call = {
        "ids": ids,
        "target_logits": target,
        "draft_logits": torch.zeros_like(target[:, 1:]),
        "workspace": workspace,
    }
    *_, tunings.SIZES = cases.EVERY_SIZE
    with mock.patch.object(engine, "launch", side_effect=engine.launch) as launch:
        cases.run(engine.verify, strategy, call)
    launches, _, numbers = launch.call_args.args
    num_blocks, num_emit_blocks = numbers[-3:-1]
    sizes = (num_requests * most, num_requests * most, num_requests, num_blocks, num_emit_blocks)
    sums = workspace.words[layout_of.fn(*sizes, launches[-1].key.call).draft_blocks :]
    # The last block of a row is the last program's, behind the decision about the first position.
    last = sums[: num_requests * most * num_blocks].view(num_requests, most, num_blocks)[:, 1:, -1] != RUBBISH
    return "" if last.any(1).tolist() == [False, True, True] else f"rows of requests are read: {last.tolist()}"


def within_another(strategy: AcceptanceStrategy) -> str:
    """Return what is wrong with calls between the launches of another, which share none of its memory."""
    forms = triton_calls.calls(SIZES)
    outer, inner = forms["logits"], forms["ragged-logits"]
    expected = [cases.run(torch_engine.verify, strategy, call) for call in (outer, inner)]
    plain = engine.launch
    for tunings.SIZES in cases.EVERY_SIZE:
        found: list[VerifyResult | str] = []

        def interrupted(launches: tuple[Launch, ...], *arguments: Any, found: list[VerifyResult | str] = found) -> None:
            for stage in launches:
                plain((stage,), *arguments)
                with mock.patch.object(engine, "launch", plain):
                    found.append(cases.run(engine.verify, strategy, inner))

        with mock.patch.object(engine, "launch", interrupted):
            result = cases.run(engine.verify, strategy, outer)
        if len(found) < 2:
            return f"{len(found)} launches"
        for got, wanted in [(result, expected[0]), *((each, expected[1]) for each in found)]:
            if isinstance(got, str) or isinstance(wanted, str):
                return f"{got} and {wanted}"
            if not torch.equal(got.output_token_ids, wanted.output_token_ids):
                return f"tokens {got.output_token_ids.tolist()}, not {wanted.output_token_ids.tolist()}"
    return ""


def far_apart(strategy: AcceptanceStrategy, name: str, layout: str, folder: Path) -> str:
    """Return what is wrong with a call whose rows lie far apart, in files of which only what is touched exists."""
    _, most, _ = SIZES
    arguments = dict(triton_calls.calls(SIZES)[layout])
    for model in ("target_probs", "draft_probs"):
        rows = arguments[model]
        assert isinstance(rows, torch.Tensor)
        arguments[model] = rows.to(torch.bfloat16)
    expected = cases.run(torch_engine.verify, strategy, arguments)
    for model in ("target_probs", "draft_probs"):
        rows = arguments[model]
        strides = STRIDES[name](most)[-rows.ndim :]
        size = 1 + sum((length - 1) * stride for length, stride in zip(rows.shape, strides, strict=True))
        assert size > 2**31
        path = folder / f"{name}-{layout}-{strategy.name}-{model}"
        storage = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
        apart = torch.as_strided(storage, rows.shape, strides)
        apart.copy_(rows)
        arguments[model] = apart
    for tunings.SIZES in cases.EVERY_SIZE:
        found = cases.run(engine.verify, strategy, arguments)
        if isinstance(found, str) or isinstance(expected, str):
            return f"{found} and {expected}"
        wrong = [field for field in cases.FIELDS if not torch.equal(getattr(found, field), getattr(expected, field))]
        if wrong:
            return f"different {wrong}"
    committed = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    return "" if committed < 64 << 20 else f"{committed} bytes were touched"


def remembered(name: str) -> str:
    """Return what is wrong with calls that differ from the first in values, and from the third on in addresses too."""
    fused, plain = (acceptlib.create(name, backend=backend) for backend in ("triton", "torch"))
    known: dict[Hashable, checks.Checked] = {}
    with mock.patch.object(checks, "_CHECKED", known):
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randn(3 * 3 * 40 + 1, generator=generator)[seed // 2 :][: 3 * 3 * 40].view(3, 3, 40)
            sampling = acceptlib.SamplingParams(temperature=torch.rand(3, generator=generator))
            call = {"target_logits": 3 * rows, "draft_logits": rows[:, 1:], "sampling": sampling, "rng": seed}
            ids = rows[:, 1:].argmax(2)
            found, expected = (strategy.verify(ids, **call).output_token_ids for strategy in (fused, plain))
            if not torch.equal(found, expected):
                return f"call {seed} emits {found.tolist()}, not {expected.tolist()}"
    runs = [len(checked.runs) for checked in known.values()]
    return "" if runs == [2] else f"runs that are remembered of each signature: {runs}"


def main(_mode: str, path: str) -> None:
    """Write what is wrong, by case."""
    torch.set_num_threads(1)
    quick_interpreter.install()
    # Small blocks, so that small vocabularies have several too.
    engine.BLOCK = 32
    tunings.TUNINGS = tunings.Tunings(*(tuning._replace(emit_block=32) for tuning in tunings.TUNINGS))
    strategies = triton_calls.strategies()
    found = {f"workspace/{name}/{form}": in_workspace(strategies[name], form) for name in STAGES for form in FORMS}
    for case in EXACT:
        name, form = case.split("/")
        found[f"exact/{case}"] = in_exact_memory(strategies[name], form)
    found[LISTS] = lists_of_others(strategies["rejection"])
    found[LEFT_OUT] = left_out(strategies["rejection"])
    found[REMEMBERED] = remembered("rejection")
    found[WITHIN] = within_another(strategies["block"])
    found |= {case: unfit(strategies["block"], case.split("/")[1]) for case in UNFIT}
    # The interpreter copies every storage onto itself after a call, and would touch all of it.
    with mock.patch.object(GridExecutor, "_restore_args_dev"):
        for case in FAR:
            with tempfile.TemporaryDirectory() as folder:
                found[case] = far_apart(strategies["block"], *case.split("/"), Path(folder))
    Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
