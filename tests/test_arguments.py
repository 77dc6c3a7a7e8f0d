"""What a call's arguments must be: an error names the one that does not fit, and what barely fits is no error."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import support
import torch

import acceptlib
from acceptlib import AcceptanceStrategy, SamplingParams, Traits, Uniforms, VerifyResult, checks, inputs, rule
from acceptlib.errors import InputError, short_repr
from acceptlib.ops import Value
from acceptlib.result import Status
from acceptlib.tensors import as_device

pytestmark = pytest.mark.usefixtures("remembered")


def plain_call(layout: str = "ragged") -> dict[str, Any]:
    """Return a good call: B = 2, n = 2 and 1, T = 3, K = 2, V = 7."""
    return support.lay_out([support.ordinary(2, 7, 0), support.ordinary(1, 7, 1)], layout) | {"rng": 0}


def result_like(**changes: torch.Tensor) -> VerifyResult:
    """Return a result that fits `plain_call`, but for `changes`."""
    good = VerifyResult.empty(2, 2, torch.device("cpu"))
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
    "draft-dtype": (
        {"draft_probs": torch.ones(3, 7, dtype=I64)},
        ["draft rows", "float32", "int64", "`.to(torch.float32)`, unless two arguments were swapped"],
    ),
    "draft-double": ({"draft_probs": torch.ones(3, 7, dtype=F64)}, ["float64; pass `.to(torch.float32)`"]),
    "draft-complex": (
        {"draft_probs": torch.ones(3, 7, dtype=torch.complex64)},
        ["complex64", "unless two arguments were swapped"],
    ),
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
    "cu-shape": ({"cu_num_draft_tokens": torch.zeros(3, 1, dtype=I64)}, ["cu_num_draft_tokens", "[B+1]", "[3, 1]"]),
    "cu-empty": ({"cu_num_draft_tokens": torch.zeros(0, dtype=I64)}, ["cu_num_draft_tokens", "[B+1]", "[0]"]),
    "cu-device": (
        {"cu_num_draft_tokens": torch.zeros(3, dtype=I64, device="meta")},
        ["cu_num_draft_tokens", "device cpu", "meta"],
    ),
    "max-huge": ({"max_num_draft_tokens": 2**62}, ["max_num_draft_tokens", "below 2^31", str(2**62)]),
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
    "sampling-for-the-draft": (
        {"draft_probs": None, "draft_logits": torch.zeros(3, 7), "sampling": SamplingParams(temperature=0.5)},
        ["sampling", "; draft_sampling is for draft_logits alone"],
    ),
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
    "out-lacks-logprobs": (
        {"out": result_like(), "logprobs": True},
        ["out.logprobs", "a tensor", "got None: make `out` with VerifyResult.empty(..., logprobs=True)"],
    ),
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
    "ids-nested": ({"draft_token_ids": support.NESTED}, ["draft_token_ids", "a nested one"]),
    "bonus-scalar": (
        {"bonus_token_ids": torch.tensor(1), "logprobs": True, "target_probs": torch.ones(2, 2, 7)},
        ["bonus_token_ids", "[B]", "[]"],
    ),
    "bonus-nested": ({"bonus_token_ids": support.NESTED}, ["bonus_token_ids", "a nested one"]),
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

NUMBERS = Uniforms(accept=torch.zeros(2, 2, dtype=F64), emit=torch.zeros(2, dtype=I64))

LOOKALIKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tensor": ({}, {"draft_token_ids": describe(torch.zeros(2, 2, dtype=I64))}, "draft_token_ids"),
    "moved": (
        {"sampling": SamplingParams(logit_bias=BIAS), "draft_sampling": SamplingParams()},
        {"sampling": SamplingParams(), "draft_sampling": MOVED},
        "draft_sampling",
    ),
    "number": ({"max_num_draft_tokens": 2}, {"max_num_draft_tokens": 2.0}, "max_num_draft_tokens"),
    "out": (
        {"out": VerifyResult.empty(2, 2, "cpu")},
        {"out": dataclasses.replace(VerifyResult.empty(2, 2, "cpu"), status=torch.empty(2, dtype=torch.int32))},
        r"out\.status",
    ),
    "emit": (
        {"rng": None, "uniforms": NUMBERS},
        {"rng": None, "uniforms": dataclasses.replace(NUMBERS, emit=NUMBERS.emit.int())},
        r"uniforms\.emit",
    ),
    "rng": ({"rng": None, "uniforms": NUMBERS}, {"uniforms": NUMBERS}, "rng and uniforms both"),
    "bias": (
        {"sampling": SamplingParams(logit_bias=BIAS)},
        {"sampling": SamplingParams(logit_bias=acceptlib.LogitBias(BIAS.token_ids, torch.ones(2, 2)))},
        r"logit_bias\.values",
    ),
}


@pytest.mark.parametrize("case", LOOKALIKES)
def test_a_call_that_looks_like_a_good_one_is_checked(case: str) -> None:
    good, bad, fragment = LOOKALIKES[case]
    call = {"draft_token_ids": torch.zeros(2, 2, dtype=I64), **ROWS, "rng": 0}
    acceptlib.create("rejection").verify(**call | good)
    with pytest.raises(InputError, match=fragment):
        acceptlib.create("rejection").verify(**call | bad)


@pytest.mark.parametrize("argument", ["out", "workspace", "sampling", "uniforms", "logprobs", "max_num_draft_tokens"])
def test_a_tensor_in_the_place_of_something_else_is_not_read(argument: str) -> None:
    """A device would have to be waited for: `meta` tensors have nothing to read."""
    given = torch.empty(2, 3, dtype=I64, device="meta")
    with pytest.raises(InputError, match=rf"^{argument}: expected .* got <Tensor \[2, 3\] torch\.int64 on meta>"):
        acceptlib.create("rejection").verify(**plain_call() | LOGITS | {argument: given})


def ragged_call(num_tokens: int, **changes: object) -> dict[str, Any]:
    """Return a call of two requests, with `num_tokens` drafted tokens between them."""
    return {
        "draft_token_ids": torch.zeros(num_tokens, dtype=I64),
        "target_logits": torch.zeros(num_tokens + 2, 7),
        "draft_logits": torch.zeros(num_tokens, 7),
        "cu_num_draft_tokens": torch.tensor([0, num_tokens // 2, num_tokens]),
        "max_num_draft_tokens": 4,
        "rng": 0,
        **changes,
    }


@pytest.mark.parametrize(
    "name", ["target_logits", "draft_logits", "cu_num_draft_tokens", "bonus_token_ids", "bitmask", "accept", "padded"]
)
def test_ragged_calls_are_checked_once_whatever_is_drafted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And others that differ by as much from T, or are as long as one that was good, are refused."""
    monkeypatch.setattr(checks, "_CHECKED", {})
    strategy = acceptlib.create("rejection")

    def changes(length: int) -> dict[str, Any]:
        """Return what is as long as it should be for T = 5 if `length` is 5, and one too long for 4."""
        if name == "bitmask":
            mask = torch.full((length + 2, 1), -1, dtype=torch.int32)
            return {"sampling": SamplingParams(allowed_token_bitmask=mask)}
        if name in {"accept", "padded"}:
            shape = (length,) if name == "accept" else (length - 3, 4)
            uniforms = Uniforms(accept=torch.zeros(shape, dtype=torch.float64), emit=torch.zeros(2, dtype=I64))
            return {"uniforms": uniforms, "rng": None}
        extra, dtype = {"target_logits": (2, None), "draft_logits": (0, None)}.get(name, (-2, I64))
        extra += name == "bonus_token_ids" and -1
        return {name: torch.zeros(length + extra, *[7] * (dtype is None), dtype=dtype)}

    for num_tokens in (5, 3, 8, 0, 5):
        good = changes(num_tokens if name in {"target_logits", "draft_logits", "bitmask", "accept"} else 5)
        strategy.verify(**ragged_call(num_tokens, **good))
    assert len(checks._CHECKED) == 1
    with pytest.raises(InputError, match=r"expected .*\[|expected shape"):
        strategy.verify(**ragged_call(4, **changes(6)))


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_call_is_checked_once_whatever_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that turns a parameter off is another call."""
    monkeypatch.setattr(checks, "_CHECKED", {})
    found = []
    for value in (0.5, 0.25, 0.0 if name == "min_p" else 1.0):
        acceptlib.create("rejection").verify(**plain_call() | LOGITS | {"sampling": SamplingParams(**{name: value})})
        found.append(len(checks._CHECKED))
    assert found == [1, 1, 2]


def test_a_device_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mps" in checks.NO_FLOAT64
    monkeypatch.setattr(checks, "NO_FLOAT64", {"cpu"})
    monkeypatch.setattr(checks, "_CHECKED", {})
    with pytest.raises(InputError, match="expected a device that has float64, in which tokens are drawn, got cpu"):
        acceptlib.create("rejection").verify(**plain_call())
    with pytest.raises(InputError, match="logits: expected a device that has float64"):
        acceptlib.sample(torch.zeros(1, 3), rng=acceptlib.Rng.of(0, 1, "cpu"), position=0)


class Counting(AcceptanceStrategy):
    """Accept what a request's state says."""

    name = "counting"
    traits = Traits(guarantee="lossy", bound="none", state=("steps",))

    @rule
    def accept(steps: Value) -> Value:
        """Return h."""
        return steps


def test_state_of_another_strategy_is_refused() -> None:
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


def test_one_number_for_several_parameters_becomes_a_tensor_of_each_ones_dtype() -> None:
    """Tensors of equal numbers are shared between calls."""
    for number, names in ((2, ("temperature", "top_k")), (0.7, ("temperature", "top_p", "min_p"))):
        for order in (names, names[::-1]):
            found = {}
            for name in order:
                params = SamplingParams(**{name: number})
                found[name] = getattr(inputs.make_rows(torch.zeros(2, 3, 7), None, params, 2), name).dtype
            dtypes = {"temperature": torch.float32, "top_k": I64, "top_p": torch.float64, "min_p": torch.float64}
            assert found == {name: dtypes[name] for name in names}


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


STREAMS = acceptlib.Rng(seeds=torch.arange(2), offsets=torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    "made", [VerifyResult.empty(2, 3, "cpu"), STREAMS, STREAMS.uniforms(3)], ids=["result", "streams", "uniforms"]
)
def test_what_holds_tensors_equals_itself_alone(made: Any) -> None:
    """Equality of tensors is no bool: a search in a list would end with an error."""
    other = dataclasses.replace(made, **{field.name: _copied(made, field.name) for field in dataclasses.fields(made)})
    assert made in [other, made]
    assert made != other


def _copied(made: Any, name: str) -> Any:
    value = getattr(made, name)
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("sizes", [(-1, 4), (3, -1)])
def test_a_result_has_no_negative_size(sizes: tuple[int, int]) -> None:
    """A K of -1 would leave tensors of no width."""
    with pytest.raises(InputError, match=r"expected sizes >= 0, got -?\d requests of -?\d drafted tokens"):
        VerifyResult.empty(*sizes, "cpu")


def test_a_result_is_all_on_its_device() -> None:
    result = VerifyResult.empty(2, 3, "meta", logprobs=True, totals=True)
    assert {getattr(result, field.name).device.type for field in dataclasses.fields(result)} == {"meta"}


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


def test_temperature_of_more_digits_than_an_integer_has() -> None:
    ids, row = torch.zeros(1, 0, dtype=torch.int64), torch.arange(4.0)[None, None]
    result = acceptlib.create("rejection").verify(
        ids, target_logits=row, sampling=SamplingParams(temperature=10**20), rng=0
    )
    assert result.num_emitted.tolist() == [1]


def test_no_request_of_a_ragged_call_may_have_given_tokens() -> None:
    """Rows are as many as tokens then, with bonus rows or without."""
    ids, rows = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5)
    given = {"cu_num_draft_tokens": torch.tensor([0]), "bonus_token_ids": torch.zeros(0, dtype=torch.int64)}
    result = acceptlib.create("rejection").verify(ids, target_logits=rows, logprobs=True, **given)
    assert result.to_lists() == []


def test_streams_are_plain_tensors_of_int64() -> None:
    with pytest.raises(InputError, match=r"Rng offsets: expected \[B\] int64, .* got \[2\] torch.int32\. Make "):
        acceptlib.Rng(seeds=torch.zeros(2, dtype=I64), offsets=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(InputError, match=r"Rng seeds: expected a torch\.Tensor, got a nested one"):
        acceptlib.Rng(seeds=support.NESTED, offsets=torch.zeros(2, dtype=torch.int64))


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


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.tensor(7), "tensor(7)"),
        (torch.ones((), device="meta"), "<Tensor [] torch.float32 on meta>"),
        (torch.ones(1), "<Tensor [1] torch.float32 on cpu>"),
    ],
    ids=["number", "number elsewhere", "numbers"],
)
def test_a_message_shows_a_number_that_is_at_hand(value: torch.Tensor, said: str) -> None:
    """To show one of another device would wait for it."""
    assert short_repr(value) == said


@pytest.mark.usefixtures("remembered")
def test_the_longest_draft_is_found_anew_in_each_ragged_call() -> None:
    """It follows from values of a tensor, so a call of the same shapes may have another."""
    ids, target = torch.zeros(4, dtype=torch.int64), torch.ones(6, 1)
    for counts, longest in (([0, 2, 4], 2), ([0, 1, 4], 3), ([0, 4, 4], 4)):
        result = acceptlib.create("greedy").verify(ids, target_probs=target, cu_num_draft_tokens=torch.tensor(counts))
        assert result.output_token_ids.shape == (2, longest + 1)
        assert result.status.tolist() == [0, 0]


@pytest.mark.usefixtures("remembered")
def test_a_signature_says_whether_a_negation_is_a_flag() -> None:
    """The tensor that takes its place has other strides."""
    ids, wide = torch.zeros(2, 2, dtype=torch.int64), torch.rand(2, 3, 14)
    plain, flagged = wide[:, :, ::2], torch._neg_view(-wide)[:, :, ::2]
    assert plain.stride() == flagged.stride()
    found = [checks._signature(checks.Arguments(ids, target_probs=given), ()) for given in (plain, flagged)]
    assert found[0] != found[1]


@pytest.mark.parametrize("state", [{"stops": torch.ones(2)}, {"steps": torch.ones(3)}], ids=["name", "shape"])
def test_other_state_than_that_of_a_good_call_is_checked(state: dict[str, torch.Tensor]) -> None:
    strategy = Counting()
    strategy.verify(**plain_call() | {"state": {"steps": torch.ones(2)}})
    with pytest.raises(InputError, match="state"):
        strategy.verify(**plain_call() | {"state": state})


def test_signatures_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_CHECKED", {})
    monkeypatch.setattr(checks, "MAX_CHECKED", 2)
    for count in range(1, 6):
        acceptlib.create("greedy").verify(torch.zeros(count, 1, dtype=I64), target_probs=torch.ones(count, 2, 1))
        assert 1 <= len(checks._CHECKED) <= 2


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InputError, match=r"^device 'cuda:99': "):
        as_device("cuda:99")
