"""What bad input gets: an error at the call, or a marked request whose neighbours are untouched."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import support
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support import ALMOST_ONE, FAITHFUL, SETTINGS, Request, forms, layouts, settings

import acceptlib
from acceptlib import (
    AcceptanceStrategy,
    Rng,
    SamplingParams,
    Traits,
    Uniforms,
    VerifyResult,
    checks,
    ops,
    row_sum,
    rule,
)
from acceptlib.errors import InputError, StatusError
from acceptlib.ops import Value
from acceptlib.result import EXPLANATIONS, Status

# Errors at the call


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have good calls remembered, whatever other tests do about it."""
    monkeypatch.setattr(checks, "_CHECKED", {})


def plain_call(layout: str = "ragged") -> dict[str, Any]:
    """Return a good call: B = 2, n = 2 and 1, T = 3, K = 2, V = 7."""
    return support.lay_out([support.ordinary(2, 7, 0), support.ordinary(1, 7, 1)], layout) | {"rng": 0}


def result_like(**changes: torch.Tensor) -> VerifyResult:
    """Return a result that fits `plain_call`, but for `changes`."""
    good = VerifyResult.empty(2, 2, torch.device("cpu"), logprobs=False)
    fields = {name: getattr(good, name) for name in ("output_token_ids", "num_accepted", "num_emitted", "status")}
    return VerifyResult(**(fields | changes))


F64, I16, I64 = torch.float64, torch.int16, torch.int64
LOGITS = {"target_probs": None, "target_logits": torch.zeros(5, 7)}

RAGGED_ERRORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no-target": ({"target_probs": None}, ["exactly one of target_logits and target_probs", "neither"]),
    "two-targets": ({"target_logits": torch.zeros(5, 7)}, ["exactly one of target_logits and target_probs", "both"]),
    "two-drafts": ({"draft_logits": torch.zeros(3, 7)}, ["exactly one of draft_logits and draft_probs", "both"]),
    "target-type": ({"target_probs": [[1.0]]}, ["target_probs", "torch.Tensor", "list"]),
    "draft-type": ({"draft_probs": "rows"}, ["draft_probs", "torch.Tensor", "str"]),
    "target-rows": ({"target_probs": torch.ones(3, 7)}, ["target rows", "[T+B, V] = [5, V]", "[3, 7]", "B = 2, for"]),
    "logprobs": ({"logprobs": 5}, ["logprobs: expected bool, got 5 (int)"]),
    "logprobs-number": ({"logprobs": 0}, ["logprobs: expected bool, got 0 (int)"]),
    "target-dimensions": ({"target_probs": torch.ones(1, 5, 7)}, ["target rows", "[5, V]", "[1, 5, 7]"]),
    "target-scalar": ({"target_probs": torch.tensor(1.0)}, ["target rows", "[5, V]", "[]"]),
    "target-dtype": ({"target_probs": torch.ones(5, 7, dtype=F64)}, ["target rows", "float64", "`.to(torch.float32)`"]),
    "target-no-entry": ({"target_probs": torch.ones(5, 0)}, ["at least one vocabulary entry", "[5, 0]"]),
    "draft-no-entry": ({"draft_probs": torch.ones(3, 0)}, ["draft rows", "at least one vocabulary entry", "[3, 0]"]),
    "draft-rows": ({"draft_probs": torch.ones(5, 7)}, ["draft rows", "[T, V] = [3, V]", "[5, 7]"]),
    "draft-dtype": ({"draft_probs": torch.ones(3, 7, dtype=I64)}, ["draft rows", "float32", "int64"]),
    "draft-device": ({"draft_probs": torch.ones(3, 7, device="meta")}, ["draft rows", "device cpu", "meta"]),
    "ids-none": ({"draft_token_ids": None}, ["draft_token_ids", "torch.Tensor", "NoneType"]),
    "ids-type": ({"draft_token_ids": [1, 2, 3]}, ["draft_token_ids", "torch.Tensor", "list"]),
    "ids-dtype": ({"draft_token_ids": torch.zeros(3)}, ["draft_token_ids", "int32 or int64", "float32"]),
    "ids-device": (
        {"draft_token_ids": torch.zeros(3, dtype=I64, device="meta")},
        ["draft_token_ids", "device cpu", "meta"],
    ),
    "ids-padded": ({"draft_token_ids": torch.zeros(2, 2, dtype=I64)}, ["draft_token_ids", "[T]", "[2, 2]"]),
    "cu-type": ({"cu_num_draft_tokens": (0, 2, 3)}, ["cu_num_draft_tokens", "torch.Tensor", "tuple"]),
    "cu-dtype": ({"cu_num_draft_tokens": torch.zeros(3, dtype=I16)}, ["cu_num_draft_tokens", "int32", "int16"]),
    "cu-shape": ({"cu_num_draft_tokens": torch.zeros(3, 1, dtype=I64)}, ["cu_num_draft_tokens", "[any]", "[3, 1]"]),
    "cu-empty": ({"cu_num_draft_tokens": torch.zeros(0, dtype=I64)}, ["cu_num_draft_tokens", "[B+1]", "[0]"]),
    "cu-device": (
        {"cu_num_draft_tokens": torch.zeros(3, dtype=I64, device="meta")},
        ["cu_num_draft_tokens", "device cpu", "meta"],
    ),
    "max-negative": ({"max_num_draft_tokens": -1}, ["max_num_draft_tokens", ">= 0", "-1"]),
    "max-type": ({"max_num_draft_tokens": 2.0}, ["max_num_draft_tokens", "int", "2.0"]),
    "max-bool": ({"max_num_draft_tokens": True}, ["max_num_draft_tokens", "int", "True"]),
    "bonus-rows": (
        {"target_probs": torch.ones(3, 7), "bonus_token_ids": torch.zeros(2, dtype=I64), "logprobs": True},
        ["target rows", "logprobs=True reads", "[3, 7]", "[T+B, V]"],
    ),
    "bonus-shape": ({"bonus_token_ids": torch.zeros(3, dtype=I64)}, ["bonus_token_ids", "leading 0", "[2]", "[3]"]),
    "bonus-dtype": ({"bonus_token_ids": torch.zeros(2)}, ["bonus_token_ids", "int32 or int64", "float32"]),
    "rng-type": ({"rng": "seed"}, ["rng", "acceptlib.Rng", "str"]),
    "rng-shape": ({"rng": support.streams([1, 2, 3])}, ["rng", "[2]", "[3]"]),
    "rng-beside-uniforms": ({"uniforms": support.fixed(2, 2)}, ["rng and uniforms", "pass one"]),
    "uniforms-type": ({"rng": None, "uniforms": torch.zeros(2, 2)}, ["uniforms", "Uniforms", "Tensor"]),
    "accept-type": (
        {"rng": None, "uniforms": Uniforms(accept=[0.5], emit=torch.zeros(2, dtype=I64))},  # type: ignore[arg-type]
        ["uniforms.accept", "torch.Tensor", "list"],
    ),
    "accept-shape": ({"rng": None, "uniforms": support.fixed(2, 3)}, ["uniforms.accept", "[2, 2]", "[2, 3]"]),
    "accept-dtype": (
        {"rng": None, "uniforms": Uniforms(accept=torch.zeros(2, 2), emit=torch.zeros(2, dtype=I64))},
        ["uniforms.accept", "float64", "float32"],
    ),
    "emit-shape": (
        {"rng": None, "uniforms": Uniforms(accept=torch.zeros(3, dtype=F64), emit=torch.zeros(3, dtype=I64))},
        ["uniforms.emit", "[2]", "[3]"],
    ),
    "emit-dtype": (
        {"rng": None, "uniforms": Uniforms(accept=torch.zeros(3, dtype=F64), emit=torch.zeros(2))},
        ["uniforms.emit", "int64", "float32"],
    ),
    "sampling-beside-probs": ({"sampling": SamplingParams(temperature=0.5)}, ["sampling", "target_logits"]),
    "sampling-type": ({**LOGITS, "sampling": {"temperature": 0.5}}, ["sampling", "SamplingParams", "dict"]),
    "draft-sampling-beside-probs": (
        {**LOGITS, "draft_sampling": SamplingParams(temperature=0.5)},
        ["draft_sampling", "draft_logits"],
    ),
    "temperature-shape": (
        {**LOGITS, "sampling": SamplingParams(temperature=torch.ones(3))},
        ["sampling.temperature", "[2]", "[3]"],
    ),
    "temperature-dtype": (
        {**LOGITS, "sampling": SamplingParams(temperature=torch.ones(2, dtype=I64))},
        ["sampling.temperature", "float32", "int64"],
    ),
    "workspace-type": ({"workspace": torch.zeros(8)}, ["workspace", "Workspace", "Tensor"]),
    "out-type": ({"out": torch.zeros(2, 3)}, ["out", "VerifyResult", "Tensor"]),
    "out-tokens": (
        {"out": result_like(output_token_ids=torch.zeros(2, 2, dtype=torch.int32))},
        ["out.output_token_ids", "[2, 3]", "[2, 2]"],
    ),
    "out-tokens-dtype": (
        {"out": result_like(output_token_ids=torch.zeros(2, 3, dtype=torch.int16))},
        ["out.output_token_ids", "int32 or int64", "int16"],
    ),
    "out-totals": (
        {"out": result_like(num_passed=torch.zeros(2, dtype=torch.int32), totals=torch.zeros(2, dtype=torch.int32))},
        ["out.totals", "int64", "int32"],
    ),
    "out-totals-alone": (
        {"out": result_like(totals=torch.zeros(2, dtype=I64))},
        ["out.num_passed", "[B] int32", "out.totals", "None"],
    ),
    "out-accepted": (
        {"out": result_like(num_accepted=torch.zeros(2, dtype=I64))},
        ["out.num_accepted", "int32", "int64"],
    ),
    "out-emitted": (
        {"out": result_like(num_emitted=torch.zeros(1, dtype=torch.int32))},
        ["out.num_emitted", "[2]", "[1]"],
    ),
    "out-status": (
        {"out": result_like(status=torch.zeros(2, dtype=torch.int32))},
        ["out.status", "int8", "int32"],
    ),
    "out-lacks-logprobs": ({"out": result_like(), "logprobs": True}, ["out.logprobs", "a tensor"]),
    "out-has-logprobs": ({"out": result_like(logprobs=torch.zeros(2, 3))}, ["out.logprobs", "None"]),
    "out-logprobs-shape": (
        {"out": result_like(logprobs=torch.zeros(2, 2)), "logprobs": True},
        ["out.logprobs", "[2, 3]", "[2, 2]"],
    ),
}

PADDED_ERRORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ids-flat": (
        {"draft_token_ids": torch.zeros(3, dtype=I64)},
        ["draft_token_ids", "[B, K]", "[3]", "cu_num_draft_tokens"],
    ),
    "max-differs": ({"max_num_draft_tokens": 3}, ["max_num_draft_tokens", "expected 2", "got 3"]),
    "max-list": ({"max_num_draft_tokens": [2]}, ["max_num_draft_tokens", "expected an int", "got [2]"]),
    "max-float": ({"max_num_draft_tokens": 2.0}, ["max_num_draft_tokens", "expected an int", "got 2.0"]),
    "max-tensor": ({"max_num_draft_tokens": torch.tensor(2)}, ["max_num_draft_tokens", "expected an int"]),
    "ids-sparse": ({"draft_token_ids": torch.ones(2, 2, dtype=I64).to_sparse()}, ["draft_token_ids", "dense"]),
    "bonus-sparse": ({"bonus_token_ids": torch.ones(2, dtype=I64).to_sparse()}, ["bonus_token_ids", "dense"]),
    "logprobs-none": ({"logprobs": None}, ["logprobs: expected bool, got None"]),
    "target-nested": (
        {"target_probs": torch.nested.nested_tensor([torch.ones(3, 7)] * 2, layout=torch.jagged)},
        ["target_probs", "nested"],
    ),
    "target-rows": ({"target_probs": torch.ones(2, 2, 7)}, ["target rows", "[B, K+1, V] = [2, 3, V]", "[2, 2, 7]"]),
    "bonus-rows": (
        {"target_probs": torch.ones(2, 2, 7), "bonus_token_ids": torch.zeros(2, dtype=I64), "logprobs": True},
        ["target rows", "logprobs=True reads", "[2, 2, 7]", "[B, K+1, V]"],
    ),
    "target-flat": ({"target_probs": torch.ones(6, 7)}, ["target rows", "[2, 3, V]", "[6, 7]"]),
    "target-sparse": (
        {"target_probs": torch.eye(7)[:3].expand(2, 3, 7).to_sparse()},
        ["target rows", "dense", "sparse_coo", "to_dense()"],
    ),
    "draft-sparse": ({"draft_probs": torch.ones(2, 2, 7).to_sparse()}, ["draft rows", "dense", "sparse_coo"]),
    "draft-rows": ({"draft_probs": torch.ones(2, 3, 7)}, ["draft rows", "[B, K, V] = [2, 2, V]", "[2, 3, 7]"]),
    "accept-flat": (
        {
            "rng": None,
            "uniforms": Uniforms(accept=torch.zeros(3, dtype=F64), emit=torch.zeros(2, dtype=I64)),
        },
        ["uniforms.accept", "[2, 2]", "[3]"],
    ),
}


def check_error(good: dict[str, Any], changes: dict[str, Any], fragments: list[str]) -> None:
    """Check what a call raises that a good one was made before, of which checks remember that it is good."""
    acceptlib.create("rejection").verify(**good)
    arguments = good | changes
    with pytest.raises(InputError) as caught:
        acceptlib.create("rejection").verify(**arguments)
    assert isinstance(caught.value, acceptlib.AcceptlibError)
    assert isinstance(caught.value, ValueError)
    for fragment in fragments:
        assert fragment in str(caught.value)


def describe(tensor: torch.Tensor) -> Any:
    """Return what checks remember of a tensor, which is no tensor."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


BIAS = acceptlib.LogitBias(token_ids=torch.zeros(2, 1, dtype=I64), values=torch.ones(2, 1))
ROWS = {"target_logits": torch.zeros(2, 3, 7), "draft_logits": torch.zeros(2, 2, 7)}
NOTHING: Any = None
MOVED = SamplingParams(temperature=BIAS.token_ids, top_k=BIAS.values)

LOOKALIKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tensor": ({}, {"draft_token_ids": describe(torch.zeros(2, 2, dtype=I64))}, "draft_token_ids"),
    "moved": (
        {"sampling": SamplingParams(logit_bias=BIAS), "draft_sampling": SamplingParams()},
        {"sampling": SamplingParams(), "draft_sampling": MOVED},
        "draft_sampling",
    ),
    "number": ({"max_num_draft_tokens": 2}, {"max_num_draft_tokens": 2.0}, "max_num_draft_tokens"),
}


@pytest.mark.parametrize("case", LOOKALIKES)
def test_a_call_that_looks_like_a_good_one_is_checked(case: str) -> None:
    good, bad, fragment = LOOKALIKES[case]
    call = {"draft_token_ids": torch.zeros(2, 2, dtype=I64), **ROWS, "rng": 0}
    acceptlib.create("rejection").verify(**call | good)
    with pytest.raises(InputError, match=fragment):
        acceptlib.create("rejection").verify(**call | bad)


def test_state_of_another_strategy_is_refused() -> None:
    class Counting(AcceptanceStrategy):
        """Accept what a request's state says."""

        name = "counting"
        traits = Traits(guarantee="lossy", bound="none", state=("steps",))

        @rule
        def accept(steps: Value) -> Value:
            """Return h."""
            return steps

    call = plain_call() | {"state": {"steps": torch.ones(2)}}
    Counting().verify(**call)
    with pytest.raises(InputError, match="state: expected none"):
        acceptlib.create("rejection").verify(**call)


def test_other_tensors_in_the_same_places_are_remembered() -> None:
    for value in (1.0, 2.0):
        bias = acceptlib.LogitBias(token_ids=torch.zeros(2, 1, dtype=I64), values=torch.full((2, 1), value))
        sampling = SamplingParams(temperature=torch.full((2,), value), logit_bias=bias)
        call = {"draft_token_ids": torch.zeros(2, 2, dtype=I64), "target_logits": torch.rand(2, 3, 7), "rng": 0}
        acceptlib.create("rejection").verify(**call, sampling=sampling)
        assert len(checks._CHECKED) == 1


def test_arguments_are_those_of_verify() -> None:
    """In their order: they are passed on by position."""
    _, *names = inspect.signature(AcceptanceStrategy.verify).parameters
    assert tuple(names) == checks.Arguments._fields
    passed = mock.Mock(side_effect=InterruptedError)
    with mock.patch("acceptlib.strategy.prepare", passed), pytest.raises(InterruptedError):
        acceptlib.create("rejection").verify(**{name: name for name in names})
    assert passed.call_args.args[0] == tuple(names)


@pytest.mark.parametrize("case", RAGGED_ERRORS)
def test_error_at_the_call_ragged(case: str) -> None:
    changes, fragments = RAGGED_ERRORS[case]
    check_error(plain_call(), changes, fragments)


def test_ints_of_numpy_are_ints() -> None:
    strategy, call = acceptlib.create("rejection"), plain_call()
    expected = strategy.verify(**call | {"max_num_draft_tokens": 2, "rng": 3})
    found = strategy.verify(**call | {"max_num_draft_tokens": np.int64(2), "rng": np.uint64(3)})
    assert torch.equal(found.output_token_ids, expected.output_token_ids)
    assert strategy.workspace(np.int64(2), np.int32(2), np.int64(7), "cpu").words.numel() == 0


@pytest.mark.parametrize("case", PADDED_ERRORS)
def test_error_at_the_call_padded(case: str) -> None:
    changes, fragments = PADDED_ERRORS[case]
    check_error(plain_call("padded"), changes, fragments)


def test_ragged_on_a_device_needs_the_longest_draft() -> None:
    """Finding it would wait for the device."""
    tensors = {name: value.to("meta") for name, value in plain_call().items() if isinstance(value, torch.Tensor)}
    check_error(plain_call(), tensors | {"max_num_draft_tokens": None}, ["max_num_draft_tokens", "meta", "None"])


@pytest.mark.parametrize("temperature", [-0.5, math.nan, math.inf, -math.inf, "hot"])
def test_temperature_out_of_range_is_an_error_as_a_number(temperature: Any) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(temperature=temperature)
    assert "number >= 0" in str(caught.value)
    assert repr(temperature) in str(caught.value)


@pytest.mark.parametrize("parameters", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": torch.zeros(1)}])
def test_rows_too_long_for_the_sums_of_filters(parameters: dict[str, Any]) -> None:
    ids, row = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 1, 1 << 21)
    sampling = SamplingParams(**parameters)
    with pytest.raises(InputError, match=r"at most 2097151 entries, .* got V = 2097152"):
        acceptlib.create("rejection").verify(ids, target_logits=row, sampling=sampling)
    longest = acceptlib.create("rejection").verify(ids, target_logits=row[..., 1:], sampling=sampling, rng=0)
    longest.raise_for_status()
    off = SamplingParams(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0)
    acceptlib.create("rejection").verify(ids, target_logits=row, sampling=off, rng=0).raise_for_status()


def test_an_error_consumes_no_randomness() -> None:
    rng = support.streams([1, 2])
    with pytest.raises(InputError):
        acceptlib.create("rejection").verify(
            **plain_call() | {"rng": rng, "bonus_token_ids": torch.zeros(3, dtype=torch.int64)}
        )
    assert rng.offsets.tolist() == [0, 0]
    generator = torch.Generator().manual_seed(3)
    state, logits = generator.get_state(), {"target_logits": torch.zeros(1, 2, 7)}
    with pytest.raises(InputError, match="top_k"):
        acceptlib.create("rejection").verify(
            torch.zeros(1, 1, dtype=I64),
            **logits,
            sampling=SamplingParams(top_k=torch.ones(2, dtype=I64)),
            rng=generator,
        )
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.7}, {"top_k": 3}])
def test_drafts_beyond_the_longest_allowed_without_bonus_rows(parameters: dict[str, Any]) -> None:
    """No position has a row then, and every row has a request nevertheless."""
    result = acceptlib.create("rejection").verify(
        torch.tensor([3]),
        target_logits=torch.randn(1, 9),
        cu_num_draft_tokens=torch.tensor([0, 1]),
        max_num_draft_tokens=0,
        bonus_token_ids=torch.tensor([2]),
        sampling=SamplingParams(**parameters),
    )
    assert result.status.tolist() == [Status.INVALID_COUNT]


def test_an_empty_batch_of_ends() -> None:
    """Counts without a leading 0, and nobody to say what K is."""
    none = torch.zeros(0, dtype=torch.int64)
    ends = {"cu_num_draft_tokens": none, "bonus_token_ids": none}
    result = acceptlib.create("rejection").verify(none, target_probs=torch.zeros(0, 5), **ends)
    assert result.output_token_ids.shape == (0, 1)


def test_ends_below_zero() -> None:
    """The longest draft that is found among them is none."""
    result = acceptlib.create("rejection").verify(
        torch.zeros(0, dtype=I64),
        target_logits=torch.randn(2, 9),
        cu_num_draft_tokens=torch.tensor([-3, -5]),
        bonus_token_ids=torch.tensor([2, 3]),
    )
    assert result.output_token_ids.tolist() == [[-1], [-1]]
    assert result.status.tolist() == [Status.INVALID_COUNT] * 2


# Bad rows

BAD_VALUES = {"nan": math.nan, "no-mass": 0.0, "infinite": math.inf, "negative": -0.5}
"""What fills a target row. As logits: NaN, all -inf, all +inf, and NaN again."""

READS_TARGET = [name for name in SETTINGS if name != "synthetic"]


def check_marked(
    setting: str, requests: list[Request], stood: dict[int, int], status: Status, layout: str, form: str = "probs"
) -> None:
    """Assert that some requests keep so many tokens and are marked, and that others are as in a batch without them.

    Args:
        setting: The strategy.
        requests: The batch.
        stood: Spoiled request -> the drafted tokens it keeps.
        status: What it is marked with.
        layout: `padded` or `ragged`.
        form: `probs` or `logits`.
    """
    everyone = range(len(requests))
    rest = [index for index in everyone if index not in stood]
    result = support.verify(setting, requests, layout, form)
    support.check_sound(result, requests[0].p.shape[1])
    for index, count in stood.items():
        assert support.tokens(result, index) == requests[index].ids[:count].tolist(), index
        assert int(result.num_accepted[index]) == int(result.num_emitted[index]) == count
    assert result.status.tolist() == [status if index in stood else 0 for index in everyone]
    limit = {"max_num_draft_tokens": MOST} if layout == "ragged" else {}
    alone = support.verify(setting, [requests[b] for b in rest], layout, form, rng=support.streams(rest), **limit)
    support.same(result, alone, rows=rest)
    with pytest.raises(StatusError) as caught:
        result.raise_for_status()
    for index, count in stood.items():
        assert f"request {index}, position {count}: {EXPLANATIONS[status]}" in str(caught.value)


MOST = 4
SPOILED = {1: 0, 4: 1, 6: 2, 7: 3}
"""Request of `neighbourhood` to spoil -> the position to spoil."""


def neighbourhood(vocab: int = 11, seed: int = 0) -> list[Request]:
    """Return a batch: requests of three standing tokens to spoil, around them shorter, longer and empty ones."""
    lengths = [2, 3, 0, 1, 3, 4, 3, 3, 1]
    requests = [support.standing(n, vocab, 10 * seed + index) for index, n in enumerate(lengths)]
    requests[5] = support.ordinary(MOST, vocab, 10 * seed)
    return requests


@pytest.mark.parametrize("bad", BAD_VALUES)
@forms
@layouts
@pytest.mark.parametrize("setting", READS_TARGET)
def test_bad_target_row(setting: str, layout: str, form: str, bad: str) -> None:
    """A row that no token can be drawn from stops its request there, and touches nothing else."""
    spoiled = SPOILED
    for vocab in (10, 11):
        requests = neighbourhood(vocab)
        for index, position in spoiled.items():
            requests[index].p[position] = BAD_VALUES[bad]
        check_marked(setting, requests, spoiled, Status.INVALID_ROW, layout, form)


@pytest.mark.parametrize("bad", BAD_VALUES)
@forms
@layouts
def test_bad_stopping_row_of_a_rule_that_reads_no_row(layout: str, form: str, bad: str) -> None:
    requests = neighbourhood()
    requests[4].p[3] = BAD_VALUES[bad]
    check_marked("synthetic", requests, {4: 3}, Status.INVALID_ROW, layout, form)


@pytest.mark.parametrize("vocab", [10, 11], ids=["even-vocabulary", "odd-vocabulary"])
@layouts
def test_bad_row_leaves_no_mass_to_blocks_decision(layout: str, vocab: int) -> None:
    """Block verification weighs a position by the next row. A bad one counts as no mass, so only P = 1 stands there."""
    requests = neighbourhood(vocab)
    certain, contested = requests[4], requests[6]
    assert contested.q is not None
    contested.q[0] = contested.p[0] * 0.5
    contested.q[0, contested.ids[0]] += 0.5  # p < q at the drafted token, so that P < 1
    certain.p[1] = contested.p[1] = math.nan
    for u in (0.0, 0.3, ALMOST_ONE):
        result = support.verify("block", requests, layout, uniforms=support.fixed(len(requests), MOST, u))
        assert support.tokens(result, 4) == certain.ids[:1].tolist()
        assert (int(result.status[4]), int(result.status[6])) == (Status.INVALID_ROW, Status.OK)
        assert (int(result.num_accepted[6]), int(result.num_emitted[6])) == (0, 1)


class Near(AcceptanceStrategy):
    """Accept what is at least half as likely as the likeliest token."""

    name = "near"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(target_prob: Value, target_max_prob: Value) -> Value:
        """Return h."""
        return ops.where(target_prob >= 0.5 * target_max_prob, 1.0, 0.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_row_without_a_law_has_no_largest_entry(value: float) -> None:
    p = torch.full((1, 2, 4), 0.25)
    assert Near().verify(torch.tensor([[1]]), target_probs=p).num_accepted.tolist() == [1]
    p[0, 0] = value
    p[0, 0, 1] = 0.0  # of the drafted token
    result = Near().verify(torch.tensor([[1]]), target_probs=p)
    assert (result.num_accepted.tolist(), result.num_emitted.tolist()) == ([0], [0])


class Light(AcceptanceStrategy):
    """Accept where the draft's row sums to less than 2."""

    name = "light"
    traits = Traits(guarantee="lossy", bound="none")

    @row_sum
    def mass(q: Value) -> Value:
        """Sum to the row's mass."""
        return q

    @rule
    def accept(mass: Value) -> Value:
        """Return h."""
        return ops.where(mass < 2.0, 1.0, 0.0)


def test_a_sum_over_an_infinite_entry_accepts_nothing() -> None:
    p = torch.full((1, 2, 4), 0.25)
    q = p[:, :1].clone()
    ids = torch.tensor([[1]])
    assert Light().verify(ids, target_probs=p, draft_probs=q).num_accepted.tolist() == [1]
    q[0, 0, 2] = math.inf
    assert Light().verify(ids, target_probs=p, draft_probs=q).num_accepted.tolist() == [0]


@pytest.mark.parametrize("where", [0, 5, 10], ids=["first", "inner", "last"])
@layouts
@settings
def test_one_bad_entry_in_the_bonus_row(setting: str, layout: str, where: int) -> None:
    cases = {math.nan: Status.INVALID_ROW, math.inf: Status.INVALID_ROW}
    if setting != "greedy":  # an argmax is one all the same
        cases |= {-math.inf: Status.INVALID_ROW, -0.5: Status.UNNORMALIZED_ROW}
    for value, status in cases.items():
        requests = neighbourhood()
        requests[4].p[3, where] = value
        check_marked(setting, requests, {4: 3}, status, layout)


@layouts
@pytest.mark.parametrize("setting", FAITHFUL)
def test_bad_rows_past_the_stop_do_not_matter(setting: str, layout: str) -> None:
    """Nothing after the stopping row is anyone's business."""
    for vocab in (10, 11):
        good = neighbourhood(vocab)
        support.mask_drafted(good[4], 0)
        bad = [request.copy() for request in good]
        bad[4].p[1:] = math.nan
        uniforms = support.fixed(len(good), MOST, 0.5, 12345)
        support.same(
            support.verify(setting, good, layout, uniforms=uniforms, logprobs=True),
            support.verify(setting, bad, layout, uniforms=uniforms, logprobs=True),
        )


@pytest.mark.parametrize("factor", [0.9, 1.1, 3.0, 1e30])
@layouts
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "greedy"])
def test_unnormalised_bonus_row(setting: str, layout: str, factor: float) -> None:
    requests = neighbourhood()
    requests[4].p[3] *= factor
    check_marked(setting, requests, {4: 3}, Status.UNNORMALIZED_ROW, layout)


@pytest.mark.parametrize("factor", [0.9, 1.1, 3.0])
@layouts
@pytest.mark.parametrize("setting", [name for name in FAITHFUL if name != "greedy"])
def test_unnormalised_row_after_a_rejection(setting: str, layout: str, factor: float) -> None:
    requests = neighbourhood()
    support.mask_drafted(requests[4], 1)
    requests[4].p[1] *= factor
    check_marked(setting, requests, {4: 1}, Status.UNNORMALIZED_ROW, layout)


@layouts
@pytest.mark.parametrize("setting", ["rejection", "block", "fly", "lenience"])
def test_unnormalised_draft_row_after_a_rejection(setting: str, layout: str) -> None:
    requests = neighbourhood()
    support.mask_drafted(requests[4], 1)
    assert requests[4].q is not None
    requests[4].q[1] *= 1.2
    check_marked(setting, requests, {4: 1}, Status.UNNORMALIZED_ROW, layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@settings
def test_rounded_rows_count_as_normalised(setting: str, dtype: torch.dtype) -> None:
    """Half-precision rows do not sum to 1; that is no fault of theirs."""
    requests = [support.ordinary(3, 997, seed) for seed in range(20)]
    arguments = support.lay_out(requests)
    arguments |= {name: arguments[name].to(dtype) for name in ("target_probs", "draft_probs")}
    assert not support.create(setting).verify(**arguments, rng=3).status.any()


@settings
def test_logprobs_change_neither_tokens_nor_status(setting: str) -> None:
    """They are read on the side, also where rows are bad."""
    for value, form in itertools.product((math.nan, 0.0, 3.0, math.inf), ("probs", "logits")):
        requests = neighbourhood()
        for index, position in SPOILED.items():
            requests[index].p[position] = value
        plain = support.verify(setting, requests, "ragged", form)
        with_logprobs = support.verify(setting, requests, "ragged", form, logprobs=True)
        for name in ("output_token_ids", "num_accepted", "num_emitted", "status"):
            assert torch.equal(getattr(plain, name), getattr(with_logprobs, name)), (value, form, name)


# Bad ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@forms
@layouts
@settings
def test_drafted_id_outside_the_vocabulary(setting: str, layout: str, form: str, dtype: torch.dtype) -> None:
    spoiled = {index: position for index, position in SPOILED.items() if position < 3}
    for outside in (11, 12, 2**31 - 1, *((2**40, 2**63 - 1) if dtype == torch.int64 else ())):
        requests = [Request(r.ids.to(dtype), r.p, r.q) for r in neighbourhood()]
        for index, position in spoiled.items():
            requests[index].ids[position] = outside
        check_marked(setting, requests, spoiled, Status.INVALID_TOKEN_ID, layout, form)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@layouts
@pytest.mark.parametrize("setting", FAITHFUL)
def test_bonus_id_outside_the_vocabulary_matters_only_where_it_is_emitted(
    setting: str, layout: str, dtype: torch.dtype
) -> None:
    requests = [support.standing(n, 10, seed=n) for n in (2, 3, 0, 3)]
    support.mask_drafted(requests[1], 1)
    free = support.verify(setting, requests, layout)
    for outside in (10, -1, -(2**31), 2**31 - 1):
        bonus = torch.tensor([outside, outside, outside, 4], dtype=dtype)
        result = support.verify(setting, requests, layout, bonus_token_ids=bonus)
        assert result.status.tolist() == [Status.INVALID_TOKEN_ID, 0, Status.INVALID_TOKEN_ID, 0]
        assert result.num_emitted.tolist() == [2, 2, 0, 4]
        assert support.tokens(result, 0) == requests[0].ids.tolist()
        assert support.tokens(result, 1) == support.tokens(free, 1)
        assert support.tokens(result, 3) == [*requests[3].ids.tolist(), 4]


@settings
def test_given_bonus_token_needs_no_bonus_row(setting: str) -> None:
    """The caller has drawn it itself, so the row is not read."""
    requests = [support.standing(n, 10, seed=n) for n in (2, 0, 3)]
    for request in requests:
        request.p[-1] = math.nan
    for layout in ("padded", "ragged"):
        result = support.verify(setting, requests, layout, bonus_token_ids=torch.tensor([7, 8, 9]))
        assert result.status.tolist() == [0, 0, 0]
        assert [support.tokens(result, b)[-1] for b in range(3)] == [7, 8, 9]


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "mid-chain", "trailing"])
@forms
@layouts
@settings
def test_placeholder_ends_the_chain(setting: str, layout: str, form: str, at: int) -> None:
    """The row there is the bonus row; what follows is not read, valid ids and NaN rows alike."""
    requests = [support.ordinary(3, 10, seed) for seed in range(9)]
    cut = [Request(r.ids[:at], r.p[: at + 1], None if r.q is None else r.q[:at]) for r in requests]
    requests = [request.copy() for request in requests]
    for index, request in enumerate(requests):
        assert request.q is not None
        request.ids[at] = (-1, -7, -(2**31))[index % 3]
        request.p[at + 1 :] = math.nan
        request.q[at:] = math.nan
    result = support.verify(setting, requests, layout, form)
    shorter = support.verify(setting, cut, layout, form)
    assert result.status.tolist() == [0] * 9
    for name in ("num_accepted", "num_emitted", "status"):
        assert torch.equal(getattr(result, name), getattr(shorter, name))
    assert torch.equal(result.output_token_ids[:, : at + 1], shorter.output_token_ids)
    assert bool((result.output_token_ids[:, at + 1 :] == acceptlib.PLACEHOLDER_TOKEN_ID).all())


# Bad counts

BAD_COUNTS: dict[str, tuple[list[int], int | None, list[int]]] = {
    "decreases": ([0, 5, 3, 8], 5, [0, 4, 4]),
    "above-T": ([0, 3, 9, 8], 5, [0, 4, 4]),
    "behind-one-above-T": ([0, 9, 8, 8], 5, [4, 4, 4]),
    "last-above-T": ([0, 3, 5, 20], 5, [0, 0, 4]),
    "below-zero": ([0, -1, 3, 8], 5, [4, 4, 0]),
    "far-outside": ([0, 2**31 - 1, -(2**31), 8], 5, [4, 4, 4]),
    "leading-one": ([1, 3, 5, 8], 5, [4, 4, 4]),
    "leading-minus-one": ([-1, 3, 5, 8], 5, [4, 4, 4]),
    "above-limit": ([0, 2, 3, 8], 4, [0, 0, 4]),
    "above-limit-of-none": ([0, 2, 2, 8], 0, [4, 0, 4]),
    "decreases-without-limit": ([0, 5, 3, 8], None, [0, 4, 4]),
    "far-outside-without-limit": ([0, 2**31 - 1, -(2**31), 8], None, [4, 4, 4]),
    "leading-all-the-way": ([8, 8, 8, 8], None, [4, 4, 4]),
}


@pytest.mark.parametrize("case", BAD_COUNTS)
@settings
def test_bad_counts(setting: str, case: str) -> None:
    """Requests whose bounds make sense are verified, the others emit nothing, and no index leaves a tensor."""
    bounds, most, expected = BAD_COUNTS[case]
    whole = support.ordinary(8, 10, seed=13)
    p = torch.cat([whole.p, support.ordinary(1, 10, seed=14).p])  # T + B = 11 rows
    arguments = support.lay_out([Request(whole.ids, p, whole.q)]) | {
        "cu_num_draft_tokens": torch.tensor(bounds, dtype=torch.int64),
        "max_num_draft_tokens": most,
    }
    result = support.create(setting).verify(**arguments, rng=support.streams(range(3)))
    support.check_sound(result, 10)
    assert result.status.tolist() == expected
    assert whole.q is not None
    for b in (b for b, status in enumerate(expected) if status == 0):
        start, end = bounds[b], bounds[b + 1]
        request = Request(whole.ids[start:end], p[start + b : end + b + 1], whole.q[start:end])
        alone = support.verify(setting, [request], rng=support.streams([b]))
        assert support.tokens(result, b) == support.tokens(alone, 0)
    for b in (b for b, status in enumerate(expected) if status != 0):
        assert support.tokens(result, b) == []
    with pytest.raises(StatusError, match="cu_num_draft_tokens"):
        result.raise_for_status()


@settings
def test_tokens_that_belong_to_no_request(setting: str) -> None:
    """Bounds that end before T, as a buffer longer than its content has them."""
    request = support.ordinary(5, 10, seed=15)
    p = torch.cat([request.p, request.p[:1]])
    for bounds, most in (([0, 0, 0], None), ([0, 0, 0], 0), ([0, 2, 3], None), ([0, 2, 3], 4)):
        arguments = support.lay_out([Request(request.ids, p, request.q)]) | {
            "cu_num_draft_tokens": torch.tensor(bounds),
            "max_num_draft_tokens": most,
        }
        result = support.create(setting).verify(**arguments, rng=support.streams(range(2)))
        support.check_sound(result, 10)
        assert result.status.tolist() == [0, 0]


# Bad parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("side", ["sampling", "draft_sampling"])
@layouts
@settings
def test_bad_temperature_in_a_tensor(setting: str, layout: str, side: str, dtype: torch.dtype) -> None:
    """A negative, NaN or infinite entry marks its request and no other, for either model whose rows are read."""
    requests = [support.ordinary(n, 10, seed=n) for n in (3, 2, 0, 3, 1)]
    bad = torch.tensor([0.5, math.nan, -1.0, math.inf, 0.0], dtype=dtype)
    good = torch.tensor([0.5, 1.0, 1.0, 1.0, 0.0], dtype=dtype)
    result, wanted = (
        support.verify(setting, requests, layout, "logits", **{side: SamplingParams(temperature=temperature)})
        for temperature in (bad, good)
    )
    if side == "draft_sampling" and not support.create(setting).plan.reads_draft:
        assert result.status.tolist() == [0] * 5
        support.same(result, wanted, rows=range(5), to=range(5))
        return
    assert result.status.tolist() == [0, 5, 5, 5, 0]
    assert [support.tokens(result, b) for b in (1, 2, 3)] == [[], [], []]
    support.same(result, wanted, rows=[0, 4], to=[0, 4])
    with pytest.raises(StatusError, match="request 1, position 0: a sampling parameter is out of range; request 2"):
        result.raise_for_status()


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-39, 1e-30])
@settings
def test_tiny_temperature_is_greedy(setting: str, temperature: float) -> None:
    """Dividing by it must not overflow into a row of NaN."""
    requests = [support.standing(n, 10, seed=n) for n in (3, 2, 0, 3)]
    sampling = SamplingParams(temperature=temperature)
    result = support.verify(setting, requests, "ragged", "logits", sampling=sampling)
    assert result.status.tolist() == [0, 0, 0, 0]
    assert [support.tokens(result, b) for b in range(4)] == [request.p.argmax(-1).tolist() for request in requests]


# Nothing left, nothing drafted


@pytest.mark.parametrize("setting", ["block", "fly", "mixture", "rejection"])
def test_zero_residual_draws_from_the_target(setting: str) -> None:
    """p == q, and a drafted token that neither gives any probability: the draw is the one of a bonus row."""
    p = torch.tensor([[0.0, 0.1, 0.2, 0.1, 0.0, 0.2, 0.1, 0.3, 0.0]])  # none at both ends, where a failed search ends
    drafted = Request(torch.tensor([4]), p.expand(2, -1), p)
    bits = [0, -1, 2**63 - 1, -(2**63), *range(-(2**63), 2**63, 2**63 // 500)]
    emit = torch.tensor(bits)
    uniforms = Uniforms(accept=torch.full((len(bits), 1), 0.5, dtype=torch.float64), emit=emit)
    result = support.verify(setting, [drafted] * len(bits), uniforms=uniforms)
    bonus = support.verify(
        setting,
        [Request(torch.empty(0, dtype=torch.int64), p, p[:0])] * len(bits),
        uniforms=Uniforms(accept=torch.empty(len(bits), 0, dtype=torch.float64), emit=emit),
    )
    assert not result.num_accepted.any()
    assert not result.status.any()
    assert torch.equal(result.output_token_ids[:, 0], bonus.output_token_ids[:, 0])
    assert {1, 2, 3, 5, 6, 7} == {*result.output_token_ids[:, 0].tolist()}


@pytest.mark.parametrize("setting", ["block", "fly", "lenience", "mixture", "rejection"])
def test_equal_rows_accept_everything(setting: str) -> None:
    """p == q and the largest u there is."""
    requests = [support.ordinary(3, 9, seed) for seed in range(50)]
    requests = [Request(r.p[:3].argmax(-1), r.p, r.p[:3].clone()) for r in requests]
    result = support.verify(setting, requests, uniforms=support.fixed(50, 3, ALMOST_ONE, -1))
    assert result.num_accepted.tolist() == [3] * 50


@pytest.mark.parametrize("setting", ["block", "fly", "rejection"])
def test_rows_equal_but_for_rounding(setting: str) -> None:
    """h just below 1 and u above it: the residual is empty, and the draw is from p."""
    p = torch.tensor([[0.0, 0.5, 0.25, 0.25, 0.0]])
    q = p.clone()
    q[0, 1] = torch.nextafter(q[0, 1], torch.tensor(1.0))
    request = Request(torch.tensor([1]), p.expand(2, -1), q)
    for bits, token in ((0, 1), (2**62, 1), (-(2**63), 2), (-1, 3)):
        result = support.verify(setting, [request], uniforms=support.fixed(1, 1, ALMOST_ONE, bits))
        assert result.status.tolist() == [0]
        assert support.tokens(result, 0) == [token]


@pytest.mark.parametrize("q", [0.0, math.nan, -0.5, -math.inf], ids=["zero", "nan", "negative", "minus-inf"])
@pytest.mark.parametrize("setting", ["block", "fly", "lenience", "mixture", "rejection"])
def test_drafted_token_without_draft_probability_stands_iff_the_target_gives_it_any(setting: str, q: float) -> None:
    draft = torch.tensor([[q, 0.5, 0.5]])
    for probability in (1e-6, 0.3, 1.0):
        p = torch.tensor([[probability, 1 - probability, 0.0]]).expand(2, -1)
        result = support.verify(
            setting, [Request(torch.tensor([0]), p, draft)], uniforms=support.fixed(1, 1, ALMOST_ONE)
        )
        assert result.num_accepted.tolist() == [1]
    p = torch.tensor([[0.0, 0.4, 0.6]]).expand(2, -1)
    for bits in (0, -1):
        request = Request(torch.tensor([0]), p, draft)
        result = support.verify(setting, [request], uniforms=support.fixed(1, 1, 0.0, bits))
        assert result.num_accepted.tolist() == [0]
        assert support.tokens(result, 0)[0] in {1, 2}


# Vocabularies of two sizes


@forms
@layouts
@settings
def test_draft_vocabulary_smaller_than_the_target(setting: str, layout: str, form: str) -> None:
    """The draft is padded with zeros, and drafted ids in the tail are tokens as any other."""
    requests = [support.ordinary(3, 12, seed) for seed in range(40)]
    short = [Request(r.ids, r.p, torch.randn(3, 8, generator=support.generator(1)).softmax(-1)) for r in requests]
    padded = [Request(r.ids, r.p, torch.nn.functional.pad(r.q, (0, 4))) for r in short if r.q is not None]
    assert any(int(request.ids.max()) >= 8 for request in requests)
    support.same(
        support.verify(setting, short, layout, form, logprobs=True),
        support.verify(setting, padded, layout, form, logprobs=True),
    )


def test_law_over_the_tail_is_the_targets() -> None:
    """Evenly spaced bits give every recovered token as often as its share of (p - q)+, in and behind the tail."""
    p = torch.tensor([[0.125, 0.125, 0.0, 0.25, 0.5]]).expand(2, -1)
    request = Request(torch.tensor([2]), p, torch.tensor([[0.5, 0.25, 0.25]]))
    count = 1200
    steps = [2**63 * (2 * i + 1) // count for i in range(count)]  # midpoints, as unsigned words
    bits = torch.tensor([step if step < 2**63 else step - 2**64 for step in steps])
    uniforms = Uniforms(accept=torch.zeros(count, 1, dtype=torch.float64), emit=bits)
    result = support.verify("rejection", [request] * count, uniforms=uniforms)
    assert result.num_accepted.tolist() == [0] * count
    counts = torch.bincount(result.output_token_ids[:, 0], minlength=5)
    assert counts.tolist() == [0, 0, 0, count // 3, 2 * count // 3]


@layouts
@settings
def test_draft_vocabulary_larger_than_the_target(setting: str, layout: str) -> None:
    """The draft's rows are normalised over their own entries, then cut; ids behind the cut are outside."""
    requests = [support.ordinary(3, 8, seed) for seed in range(40)]
    logits = [torch.randn(3, 12, generator=support.generator(seed)) for seed in range(40)]
    wide = [Request(r.ids, r.p, rows.softmax(-1)) for r, rows in zip(requests, logits, strict=True)]
    cut = [Request(r.ids, r.p, r.q[:, :8]) for r in wide if r.q is not None]
    support.same(support.verify(setting, wide, layout), support.verify(setting, cut, layout))
    from_logits = support.lay_out(wide, layout, "logits")
    from_probs = from_logits | {"draft_probs": from_logits["draft_logits"].softmax(-1), "draft_logits": None}
    strategy = support.create(setting)
    support.same(strategy.verify(**from_logits, rng=5), strategy.verify(**from_probs, rng=5))
    wide = [support.standing(3, 8, seed) for seed in range(2)]
    wide[0].ids[1] = 9
    wide = [Request(r.ids, r.p, torch.nn.functional.pad(r.q, (0, 4), value=0.1)) for r in wide if r.q is not None]
    result = support.verify(setting, wide, layout)
    assert result.status.tolist() == [Status.INVALID_TOKEN_ID, 0]
    assert support.tokens(result, 0) == wide[0].ids[:1].tolist()


@pytest.mark.parametrize("draft", [True, False], ids=["draft", "ngram"])
@forms
@layouts
@settings
def test_vocabulary_of_one(setting: str, layout: str, form: str, draft: bool) -> None:  # noqa: FBT001
    requests = [
        Request(torch.zeros(n, dtype=torch.int64), torch.ones(n + 1, 1), torch.ones(n, 1) if draft else None)
        for n in (2, 0, 3)
    ]
    result = support.verify(setting, requests, layout, form)
    assert [support.tokens(result, b) for b in range(3)] == [[0] * 3, [0], [0] * 4]
    assert result.status.tolist() == [0, 0, 0]


# Anything at all

ENTRIES = st.sampled_from(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 0.25, 0.5, 1.0, -1.0, 5.0, 1e-45, 1e-20, 1e30, -1e30, 3e38, -3e38]
)
IDS = st.one_of(st.integers(-3, 8), st.sampled_from([-(2**63), -(2**31), 2**31, 2**62, 2**63 - 1]))


@given(st.data())
@hypothesis_settings(derandomize=True, deadline=None, max_examples=200, database=None)
def test_garbage_never_gives_an_id_outside_the_vocabulary(data: st.DataObject) -> None:
    """Whatever the values, ids lie in [0, V), counts fit, and nothing is read out of bounds."""
    setting = data.draw(st.sampled_from(sorted(SETTINGS)))
    num_requests, most, vocab = (data.draw(st.integers(*ends)) for ends in ((1, 3), (0, 3), (1, 6)))
    draft_vocab = data.draw(st.sampled_from([vocab, vocab, 1, vocab + 2]))
    ragged = data.draw(st.booleans())

    def rows(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        values = data.draw(st.lists(ENTRIES, min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.float32).view(shape)

    def integers(count: int, values: st.SearchStrategy[int]) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.int64)

    target_form, draft_form = (data.draw(st.sampled_from(["probs", "logits"])) for _ in range(2))
    if ragged:
        num_tokens = data.draw(st.integers(0, num_requests * most + 1))
        arguments: dict[str, Any] = {
            "draft_token_ids": integers(num_tokens, IDS),
            f"target_{target_form}": rows(num_tokens + num_requests, vocab),
            "cu_num_draft_tokens": integers(num_requests + 1, st.one_of(st.integers(-2, num_tokens + 2), IDS)),
            "max_num_draft_tokens": data.draw(st.sampled_from([None, most, most + 2])),
        }
        draft_shape: tuple[int, ...] = (num_tokens, draft_vocab)
    else:
        arguments = {
            "draft_token_ids": integers(num_requests * most, IDS).view(num_requests, most),
            f"target_{target_form}": rows(num_requests, most + 1, vocab),
        }
        draft_shape = (num_requests, most, draft_vocab)
    if data.draw(st.booleans()):
        arguments[f"draft_{draft_form}"] = rows(*draft_shape)
    if target_form == "logits" and data.draw(st.booleans()):
        arguments["sampling"] = SamplingParams(temperature=rows(num_requests))
    if data.draw(st.booleans()):
        arguments["bonus_token_ids"] = integers(num_requests, IDS)
    if data.draw(st.booleans()):
        arguments["logprobs"] = True
    rng = Rng(seeds=integers(num_requests, IDS), offsets=integers(num_requests, IDS))
    result = support.create(setting).verify(**arguments, rng=rng)
    support.check_sound(result, vocab)
    assert {*result.status.tolist()} <= {*Status}
    if result.status.any():
        with pytest.raises(StatusError):
            result.raise_for_status()
    else:
        result.raise_for_status()


# Masked tokens


def masked_rows(vocab: int, source: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs p, q in which some tokens have p = 0, chosen to lead a careless draw onto them."""
    uniform = torch.rand(vocab, generator=source)
    ends = uniform.clone()
    ends[[0, -1]] = 0
    last = uniform.clone()
    last[-3:] = 0
    half = uniform * (torch.arange(vocab) % 2)
    point = torch.zeros(vocab)
    point[vocab // 2] = 1
    faint = point.clone()
    faint[1] = 1e-12
    below = point.clone()
    below[1] = 1e-30
    pairs = []
    for row in (ends, last, half, point, faint, below):
        p = row / row.sum()
        on_masked = (p == 0).float() / (p == 0).sum()
        nearly = p.clone()
        nearly[int(p.argmax())] = torch.nextafter(p.max(), torch.tensor(1.0))
        pairs += [(p, q) for q in (p, nearly, on_masked, (p + on_masked) / 2, torch.full((vocab,), 1 / vocab))]
    return pairs


@pytest.mark.parametrize("draft", [True, False], ids=["draft", "ngram"])
@forms
@settings
def test_masked_token_is_never_emitted(setting: str, form: str, draft: bool) -> None:  # noqa: FBT001
    """2 * 10^5 draws a setting. `synthetic` may keep what was drafted; what it draws is never masked."""
    source = support.generator(31)
    vocab, most, count = 13, 2, 50_000
    pairs = masked_rows(vocab, source)
    table = torch.stack([torch.stack(pair) for pair in pairs])[
        torch.randint(len(pairs), (count, most + 1), generator=source)
    ]
    p, q = table[:, :, 0], table[:, :most, 1]
    weights = (q + 0.01).flatten(0, 1)
    ids = torch.multinomial(weights, 1, generator=source).view(count, most)
    rows = {"target": p, **({"draft": q} if draft else {})}
    arguments = {f"{name}_{form}": value.log() if form == "logits" else value for name, value in rows.items()}
    rng = support.streams(range(count))
    edge = torch.arange(count) % 8
    drawn = rng.uniforms(most)
    emit = torch.where(edge == 0, 0, torch.where(edge == 1, -1, drawn.emit))
    accept = torch.where(edge[:, None] == 2, 0.0, torch.where(edge[:, None] == 3, ALMOST_ONE, drawn.accept))
    result = support.create(setting).verify(ids, **arguments, uniforms=Uniforms(accept=accept, emit=emit))
    assert not result.status.any()
    position = torch.arange(most + 1)
    emitted = position < result.num_emitted[:, None]
    if setting not in FAITHFUL:
        emitted &= position >= result.num_accepted[:, None]
    chosen = p.gather(2, result.output_token_ids.clamp(min=0).to(torch.int64)[..., None])[..., 0]
    assert int(result.num_emitted.sum()) >= count
    assert bool((chosen[emitted] > 0).all())


# raise_for_status


def test_raise_for_status_names_request_position_and_fault() -> None:
    requests = [support.standing(3, 10, seed) for seed in range(4)]
    requests[0].p[2] = math.nan
    requests[2].ids[1] = 10
    requests[3].p[3] *= 2
    result = support.verify("rejection", requests)
    with pytest.raises(StatusError) as caught:
        result.raise_for_status()
    assert isinstance(caught.value, acceptlib.AcceptlibError)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == (
        "request 0, position 2: the target's row has NaN or +inf, gives the drafted token less than 0, or has no entry "
        "above 0 (a mask may forbid them all); "
        "request 2, position 1: a drafted or bonus token id is outside the vocabulary; "
        "request 3, position 3: a row does not sum to 1 (within 1/64), or the rule's residual is NaN or sums to over "
        "4. Tokens accepted before were kept; nothing was drawn."
    )


@pytest.mark.parametrize("factor", [math.nan, math.inf, 5.0])
def test_residual_that_is_no_weight_is_not_blamed_on_the_row_alone(factor: float) -> None:
    class Heavy(AcceptanceStrategy):
        name = "heavy"
        traits = Traits(guarantee="lossy", bound="none")

        @rule
        def accept(target_prob: Any) -> Any:
            return 0.0 * target_prob

        @rule
        def residual(p: Any, factor: Any) -> Any:
            return p * factor

        def constants(self) -> dict[str, Any]:
            return {"factor": factor}

    request = support.ordinary(2, 10, seed=0)
    result = Heavy(backend="torch").verify(**support.lay_out([request]), rng=0)
    assert result.status.tolist() == [Status.UNNORMALIZED_ROW]
    with pytest.raises(StatusError, match=r"position 0: a row .*, or the rule's residual is NaN or sums to over 4"):
        result.raise_for_status()


def test_raise_for_status_names_the_first_of_many() -> None:
    """A whole batch of bad rows makes no message of megabytes."""
    requests = [support.standing(1, 10, seed) for seed in range(20)]
    for request in requests:
        request.p[0] = math.nan
    with pytest.raises(StatusError) as caught:
        support.verify("rejection", requests).raise_for_status()
    assert str(caught.value).count("the target's row has NaN") == 8
    assert "; and 12 requests more. Tokens accepted" in str(caught.value)


def test_raise_for_status_is_silent_where_all_is_well() -> None:
    support.verify("rejection", [support.standing(2, 5, 0)]).raise_for_status()


def test_every_status_is_explained() -> None:
    assert {*EXPLANATIONS} == {*Status} - {Status.OK}
