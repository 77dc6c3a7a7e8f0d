"""What `verify` reads, which is no more than it needs, and that it never waits for the device."""

from __future__ import annotations

import dataclasses
import itertools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import support
import torch
from support import READ_NO_DRAFT, SETTINGS, Request, forms, layouts, mixed, settings

import acceptlib
from acceptlib import LogitBias, SamplingParams, VerifyResult, arrays
from acceptlib import rng as streams
from acceptlib.engine import draw, process, rows, single, torch_engine
from acceptlib.engine.rows import RowReader
from acceptlib.errors import ConformanceError, InputError
from acceptlib.inputs import Rows
from acceptlib.testing.checks.execution import NoWaiting

# What is read


@layouts
def test_rejection_reads_two_rows_a_request_and_one_entry_a_token(layout: str) -> None:
    """NaN in every other entry of either model changes nothing."""
    requests = mixed(60, vocab=23)
    clean = support.verify("rejection", requests, layout, logprobs=True)
    assert {0, 1, 2, 3, 4} == {*clean.num_accepted.tolist()}
    poisoned = []
    for b, request in enumerate(requests):
        assert request.q is not None
        stop = int(clean.num_accepted[b])
        p, q = (torch.full_like(rows, torch.nan) for rows in (request.p, request.q))
        for to, source in ((p, request.p), (q, request.q)):
            position = torch.arange(request.n)
            to[position, request.ids] = source[position, request.ids]
            to[stop : stop + 1] = source[stop : stop + 1]
        poisoned.append(Request(request.ids, p, q))
    support.same(support.verify("rejection", poisoned, layout, logprobs=True), clean)


@pytest.mark.parametrize("setting", sorted(READ_NO_DRAFT))
@forms
def test_rules_without_a_draft_read_no_draft(setting: str, form: str) -> None:
    requests = mixed(20)
    arguments = support.lay_out(requests, "ragged", form)
    without = arguments | {f"draft_{form}": None}
    poisoned = arguments | {f"draft_{form}": torch.full_like(arguments[f"draft_{form}"], torch.nan)}
    results = [
        support.create(setting).verify(**given, rng=support.streams(range(20)))
        for given in (arguments, without, poisoned)
    ]
    support.same(results[0], results[1])
    support.same(results[0], results[2])


@forms
@pytest.mark.parametrize("setting", sorted({*SETTINGS} - READ_NO_DRAFT))
def test_no_draft_rows_mean_a_one_hot_draft(setting: str, form: str) -> None:
    requests = mixed(30)
    explicit = [Request(r.ids, r.p, torch.nn.functional.one_hot(r.ids, 11).float()) for r in requests]
    arguments = support.lay_out(requests, "padded", form, draft=False)
    result = support.create(setting).verify(**arguments, rng=support.streams(range(30)))
    support.same(result, support.verify(setting, explicit, "padded", form))


@settings
def test_rows_that_are_read_as_they_are_reached_change_nothing(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches go position by position, and one request as many positions at a time as there are threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    requests = mixed(30)
    for layout, form in itertools.product(("padded", "ragged"), ("probs", "logits")):
        wanted = support.verify(setting, requests, layout, form, logprobs=True)
        with monkeypatch.context() as patch:
            patch.setattr(torch_engine, "SCRATCH_BYTES", 1)
            for b, request in enumerate(requests):
                one = support.verify(setting, [request], layout, form, rng=support.streams([b]), logprobs=True)
                assert support.tokens(one, 0) == support.tokens(wanted, b)
            patch.setattr(rows, "SHARED_ROW", 0)
            for kept, logprobs in itertools.product((0, 5), (True, False)):  # rows
                for module in (torch_engine, rows):
                    patch.setattr(module, "KEPT_BYTES", kept * 4 * 11)
                found = support.verify(setting, requests, layout, form, logprobs=logprobs)
                support.same(
                    found, wanted if logprobs else dataclasses.replace(wanted, logprobs=None, raw_logprobs=None)
                )


@layouts
@pytest.mark.parametrize("setting", ["rejection", "typical", "lenience"])
def test_a_row_is_softmaxed_once(setting: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch's rows are drawn from while they are there, but for the bonus rows, which nothing read before."""
    requests = mixed(40)
    for module in (torch_engine, rows):
        monkeypatch.setattr(module, "KEPT_BYTES", 5 * 4 * 11)
    monkeypatch.setattr(torch_engine, "SCRATCH_BYTES", 2 * 4 * 11)
    processed = []

    def counted(given: Rows, out: torch.Tensor) -> torch.Tensor:
        processed.append(len(given.data))
        return process.process(given, out)

    monkeypatch.setattr(rows, "process", counted)
    stops = support.verify(setting, requests, layout, "logits").num_accepted.tolist()
    chains = [(stop, request.n) for stop, request in zip(stops, requests, strict=True)]
    drafted = sum(min(stop + 1, n) for stop, n in chains)
    if layout == "padded":  # where the place behind a chain, if there is one, has a draft's row too
        drafted += sum(stop == n < 4 for stop, n in chains)
    assert sum(processed) == sum(stop + 1 for stop in stops) + drafted * (setting not in READ_NO_DRAFT)


@pytest.mark.parametrize(("layout", "module"), [("padded", single), ("ragged", rows)], ids=["plain", "arrays"])
def test_rejected_requests_have_no_later_rows_read(
    layout: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From logits, a request that stops at once has two rows softmaxed, of its draft's four."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    request = support.ordinary(4, 11, 0)
    support.mask_drafted(request, 0)
    for each in (torch_engine, single):
        monkeypatch.setattr(each, "SCRATCH_BYTES", 1)
    processed = []

    def counted(given: Rows, out: torch.Tensor) -> torch.Tensor:
        processed.append(len(given.data))
        return process.process(given, out)

    monkeypatch.setattr(module, "process", counted)
    for sampling in (None, SamplingParams(temperature=0.7, top_k=9, top_p=0.9)):
        result = support.verify("rejection", [request], layout, "logits", sampling=sampling)
        assert result.num_accepted.tolist() == [0]
    assert processed == [1, 1, 1, 1]


@layouts
def test_given_tokens_have_no_row_read(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From probabilities `rejection` reads rows for the draw alone: here of the second of four requests."""
    requests = [support.standing(3, 11, seed) for seed in range(4)]
    support.mask_drafted(requests[1], 2)
    read = []

    def spied(reader: RowReader, request: Any, position: Any) -> torch.Tensor:
        read.append((reader.model, request.tolist(), position.tolist()))
        return whole(reader, request, position)

    whole = RowReader.rows
    monkeypatch.setattr(RowReader, "rows", spied)
    given = torch.tensor([4, 5, 6, 7])
    result = support.verify("rejection", requests, layout, bonus_token_ids=given)
    assert read == [("target", [1], [2]), ("draft", [1], [2])]
    assert result.num_accepted.tolist() == [3, 2, 3, 3]
    assert result.output_token_ids[[0, 2, 3], 3].tolist() == [4, 6, 7]
    assert result.output_token_ids[1, 3] == -1
    support.verify("rejection", requests[2:], layout, bonus_token_ids=given[2:])
    assert len(read) == 2


def without_bonus_rows(arguments: dict[str, Any], requests: list[Request], form: str) -> dict[str, Any]:
    """Return the arguments with the bonus rows taken out of the target's."""
    rows = arguments[f"target_{form}"]
    if rows.ndim == 3:
        return arguments | {f"target_{form}": rows[:, :-1]}
    kept = torch.cat([torch.arange(r.n + 1) < r.n for r in requests])
    return arguments | {f"target_{form}": rows[kept]}


@pytest.mark.parametrize("lengths", [(3, 1, 0, 5, 2, 0), (0, 0, 0)], ids=["mixed", "nothing-drafted"])
@forms
@layouts
@settings
def test_bonus_rows_may_be_left_out_where_bonus_tokens_are_given(
    setting: str, layout: str, form: str, lengths: tuple[int, ...]
) -> None:
    requests = [support.ordinary(n, 11, seed) for seed, n in enumerate(lengths)]
    arguments = support.lay_out(requests, layout, form) | {"bonus_token_ids": torch.arange(len(lengths))}
    if form == "logits":
        arguments["sampling"] = SamplingParams(temperature=torch.linspace(0.0, 2.0, len(lengths)))
    with_rows = support.create(setting).verify(**arguments, rng=3)
    shorter = without_bonus_rows(arguments, requests, form)
    support.same(support.create(setting).verify(**shorter, rng=3), with_rows)


@layouts
def test_bonus_rows_are_needed_where_they_are_read(layout: str) -> None:
    requests = [support.ordinary(n, 11, seed) for seed, n in enumerate((3, 2))]
    arguments = without_bonus_rows(support.lay_out(requests, layout), requests, "probs")
    strategy = acceptlib.create("rejection")
    with pytest.raises(InputError, match="target rows: expected"):
        strategy.verify(**arguments, rng=0)
    with pytest.raises(InputError, match="target rows: expected"):
        strategy.verify(**arguments, rng=0, bonus_token_ids=torch.tensor([1, 2]), logprobs=True)


def test_numbers_with_a_negative_bit_are_what_they_say() -> None:
    """torch keeps the sign of a conjugate's imaginary part apart from its memory, which the engines read."""

    def negated(values: torch.Tensor) -> torch.Tensor:
        found = torch.complex(torch.zeros_like(values), -values).conj().imag
        assert found.is_neg()
        assert torch.equal(found, values)
        return found

    source = torch.Generator().manual_seed(1)
    logits, ids = torch.randn(1, 4, 9, generator=source), torch.tensor([[1, 2, 3]])
    accept, temperature = torch.rand(1, 3, generator=source, dtype=torch.float64), torch.tensor([0.7])
    strategy, emit = acceptlib.create("rejection"), torch.tensor([1 << 62])
    wanted, found = (
        strategy.verify(
            ids,
            target_logits=logits,
            sampling=acceptlib.SamplingParams(temperature=numbers[0]),
            uniforms=acceptlib.Uniforms(accept=numbers[1], emit=emit),
        )
        for numbers in ((temperature, accept), (negated(temperature), negated(accept)))
    )
    assert torch.equal(wanted.output_token_ids, found.output_token_ids)


# The device is never waited for


@pytest.mark.parametrize(
    "waits",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: bool(tensor[0]),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.repeat_interleave(tensor),
        lambda tensor: tensor.unique(),
    ],
    ids=["item", "bool", "nonzero", "mask", "repeat-interleave", "unique"],
)
def test_waiting_is_noticed(waits: Any) -> None:
    """The check that follows can fail."""
    with pytest.raises(ConformanceError, match="waits for the device"), NoWaiting():
        waits(torch.tensor([1, 0, 2]))


@forms
@layouts
@settings
def test_words_of_a_device(setting: str, layout: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU small arithmetic runs on tensors, and nobody looks at them: here with tensors on the CPU."""
    requests = mixed(20)
    requests[2].p[1] = torch.nan
    arguments = {"logprobs": True, "bonus_token_ids": torch.arange(20) % 11}
    wanted = support.verify(setting, requests, layout, form, rng=support.streams(range(20)), **arguments)
    for module in (arrays, draw, process, streams, rows, torch_engine):
        monkeypatch.setattr(module, "as_array", lambda tensor: tensor)
    monkeypatch.setattr(streams, "_columns", streams._columns.__wrapped__)  # keeps words
    support.same(support.verify(setting, requests, layout, form, rng=support.streams(range(20)), **arguments), wanted)


@forms
@layouts
@settings
def test_words_of_a_device_are_not_waited_for(
    setting: str, layout: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrays are asked costs nothing; the same of tensors would wait, here with tensors on the CPU."""
    requests = mixed(9)
    requests[2].p[1] = torch.nan
    for module in (arrays, draw, process, streams, rows, torch_engine):
        monkeypatch.setattr(module, "as_array", lambda tensor: tensor)
    monkeypatch.setattr(streams, "_columns", streams._columns.__wrapped__)  # keeps words
    arguments = {"logprobs": True, "bonus_token_ids": torch.arange(9)}
    arguments |= support.lay_out(requests, layout, form)
    with NoWaiting():
        support.create(setting).verify(**arguments, rng=support.streams(range(9)))


def test_words_of_a_device_are_as_wide_as_arrays() -> None:
    like = torch.zeros(2, dtype=torch.int64)
    assert np.array_equal(arrays.full((2,), 0.1, like), arrays.full((2,), 0.1, like.numpy()))


def test_nobody_looks_whether_a_condition_of_a_device_holds() -> None:
    for device in ("cpu", "meta"):
        assert arrays.maybe_any(torch.zeros(2, dtype=torch.bool, device=device))
    assert [arrays.maybe_any(np.array([False, value])) for value in (False, True)] == [False, True]


@forms
@layouts
@settings
def test_verify_never_waits(setting: str, layout: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    support.read_as_on_a_device(monkeypatch)
    requests = mixed(9)
    requests[2].p[1] = torch.nan  # marking a request must not wait either
    out = VerifyResult.empty(9, 4, torch.device("cpu"), logprobs=True)
    for draft, extra in itertools.product((True, False), (False, True)):
        arguments = support.lay_out(requests, layout, form, draft=draft)
        if extra:
            arguments |= {"bonus_token_ids": torch.arange(9), "logprobs": True, "out": out}
        if extra and form == "logits":
            arguments["sampling"] = SamplingParams(
                temperature=torch.linspace(0, 2, 9),
                top_k=torch.arange(9) if draft else 4,
                top_p=torch.linspace(0.2, 1, 9),
                min_p=0.1,
                allowed_token_bitmask=torch.full((*arguments["target_logits"].shape[:-1], 1), -3, dtype=torch.int32),
                logit_bias=LogitBias(torch.arange(9)[:, None], torch.ones(9, 1)),
            )
        strategy = support.create(setting)
        for rng in (support.streams(range(9)), 5, torch.Generator().manual_seed(1)):
            with NoWaiting():
                strategy.verify(**arguments, rng=rng)
