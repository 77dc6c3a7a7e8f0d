"""Short cuts for greedy requests and for a request alone: the same results as without them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import support
import torch
from support import ALMOST_ONE, Request, forms, layouts, mixed

import acceptlib
from acceptlib import AcceptanceStrategy, LogitBias, Rng, SamplingParams, Traits, Uniforms, VerifyResult, ops, rule
from acceptlib.engine import chains, rows, scratch, single
from acceptlib.ops import Value

# Greedy requests, one by one


class Halfway(AcceptanceStrategy):
    """Reads nothing but argmaxes, and still accepts half of the others."""

    name = "halfway"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(is_target_argmax: Value) -> Value:
        """Return h."""
        return ops.where(is_target_argmax, 1.0, 0.5)


class Warm(AcceptanceStrategy):
    """Takes what is no argmax where it is likely."""

    name = "warm"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(is_target_argmax: Value, target_prob: Value) -> Value:
        """Return h."""
        return ops.where(is_target_argmax | (target_prob > 0.1), 1.0, 0.0)


class Last(AcceptanceStrategy):
    """Stands up to the last argmax."""

    name = "last"
    traits = Traits(guarantee="lossy", bound="none", stop="last_acceptance")

    @rule
    def accept(is_target_argmax: Value) -> Value:
        """Return h."""
        return ops.where(is_target_argmax, 1.0, 0.0)


@forms
@layouts
@pytest.mark.parametrize("strategy", [acceptlib.create("greedy"), Halfway(), Warm(), Last()], ids=lambda s: s.name)
def test_requests_taken_one_by_one_change_nothing(
    strategy: AcceptanceStrategy, layout: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed(60)
    for number, request in enumerate(requests[:40]):  # chains of argmaxes, most of them with another token at the end
        request.ids[:] = request.p.argmax(1)[: request.n]
        if number % 3 and request.n:
            request.ids[-1] = (request.ids[-1] + 1) % 11
    requests[1].p[0, 4] = torch.nan
    requests[2].p[1] = 0 * requests[2].p[1]
    requests[3].p[:] = 1 / 11  # ties
    requests[4].ids[1] = 11
    requests[7].ids[0] = -1
    requests[-1].ids[:] = requests[-1].p.argmax(1)[:-1]  # and no row behind them where there are no bonus rows
    arguments = support.lay_out(requests, layout, form)
    if layout == "ragged":
        arguments["cu_num_draft_tokens"][-3] = 10**6
    bonus = {"bonus_token_ids": torch.arange(60) % 13 - 1}
    no_bonus_rows = {**bonus, f"target_{form}": _without_bonus_rows(arguments[f"target_{form}"], requests)}
    temperature = torch.ones(60)
    temperature[5:7] = torch.tensor([0.0, torch.nan])
    warm = {"sampling": SamplingParams(temperature=temperature)} if form == "logits" else {}

    def results() -> list[VerifyResult]:
        out = VerifyResult.empty(60, 4, torch.device("cpu"), num_passed=True)
        nothing = torch.empty(60, 0, dtype=torch.int64), {f"target_{form}": torch.empty(60, 0, 11)}
        return [
            strategy.verify(nothing[0], **nothing[1], **bonus, rng=support.streams(range(60))),
            *(
                strategy.verify(**{**arguments, **more}, rng=support.streams(range(60)))
                for more in ({}, {"logprobs": True}, bonus, no_bonus_rows, warm, {"out": out})
            ),
        ]

    monkeypatch.setattr(chains, "FEW_ROWS", 0)
    wanted = results()
    monkeypatch.setattr(rows, "LONG_ROW", 0)
    with mock.patch.object(chains, "walk", side_effect=chains.walk) as walk:
        found = results()
    # All but those with log-probabilities or a count of what passes.
    assert walk.call_count == (5 if strategy.name == "greedy" else 0)
    for one, other in zip(found, wanted, strict=True):
        support.same(one, other)
    assert found[-1].num_passed is not None
    assert torch.equal(found[-1].num_passed, wanted[-1].num_passed)


def test_few_greedy_requests_are_taken_one_by_one() -> None:
    for count, drafted in itertools.product((chains.FEW_REQUESTS, chains.FEW_REQUESTS + 1), (0, 4, 5)):
        requests = [support.ordinary(drafted, 11, seed) for seed in range(count)]
        with mock.patch.object(chains, "walk", side_effect=chains.walk) as walk:
            support.verify("greedy", requests, "padded")
        few = count <= chains.FEW_REQUESTS and count * (drafted + 1) <= chains.FEW_ROWS
        assert walk.called == few == (count == chains.FEW_REQUESTS and drafted < 5)


@forms
def test_few_greedy_requests_of_half_precision(form: str) -> None:
    arguments = support.lay_out(mixed(3), "padded", form)
    half = {name: rows.bfloat16() if rows.is_floating_point() else rows for name, rows in arguments.items()}
    full = {name: rows.float() if rows.is_floating_point() else rows for name, rows in half.items()}
    found, wanted = (acceptlib.create("greedy").verify(**rows, rng=0) for rows in (half, full))
    support.same(found, wanted)


@pytest.mark.parametrize(("recovered", "bonus"), [("sample", "argmax"), ("argmax", "sample"), ("argmax", "argmax")])
def test_who_draws_a_token_is_not_greedy(
    recovered: Literal["sample", "argmax"], bonus: Literal["sample", "argmax"]
) -> None:
    """Even if argmaxes alone are accepted: by chance, or from a residual."""
    body = {"accept": type(acceptlib.create("greedy")).accept}
    if "sample" not in {recovered, bonus}:
        body["residual"] = rule(lambda p: 1 - p)
    traits = Traits(guarantee="lossy", bound="none", recovered=recovered, bonus=bonus)
    strategy = type("Drawing", (AcceptanceStrategy,), {"name": "drawing", "traits": traits, **body})()
    # All bits of a draw set take the last token there is.
    uniforms = Uniforms(accept=torch.zeros(2, 1, dtype=torch.float64), emit=torch.full((2,), -1))
    rows = torch.tensor([0.75, 0.25]).expand(2, 2, 2).contiguous()
    found = strategy.verify(torch.tensor([[0], [1]]), target_probs=rows, uniforms=uniforms)
    drawn = int(bonus == "sample"), int(recovered == "sample" or bonus == "argmax")
    assert found.output_token_ids.tolist() == [[0, drawn[0]], [drawn[1], -1]]


def _without_bonus_rows(target: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    if target.ndim > 2:
        return target[:, :-1].contiguous()
    kept = torch.cat([torch.arange(request.n + 1) < request.n for request in requests])
    return target[kept]


def test_rows_behind_a_miss_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy reads rows as far as chains reach, and one more: 1 of 5, 3 of 5, all 5, and 2 of 5 where 1 was drafted."""
    requests = [support.ordinary(4, 11, seed) for seed in range(4)]
    for request, stands in zip(requests, (0, 2, 4, 1), strict=True):
        request.ids[:] = request.p.argmax(1)[:4]
        request.ids[stands:] = (request.ids[stands:] + 1) % 11
    requests[3].ids[1:] = -1
    read = []

    class Watched:
        def __init__(self, given: Any) -> None:
            self.given, self.shape = given, given.shape

        def __getitem__(self, row: int) -> Any:
            read.append(row)
            return self.given[row]

    walk_one = chains._walk_one
    monkeypatch.setattr(chains, "_walk_one", lambda given, *rest: walk_one(Watched(given), *rest))
    monkeypatch.setattr(rows, "LONG_ROW", 11)
    result = support.verify("greedy", requests, "padded")
    assert result.num_accepted.tolist() == [0, 2, 4, 1]
    assert read == [0, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("long", [1, 99])
def test_a_step_of_greedy_requests_advances_their_streams(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "FEW_ROWS", 0)
    monkeypatch.setattr(rows, "LONG_ROW", long)
    arguments = support.lay_out(mixed(3), "padded", "probs")
    with torch.inference_mode():
        rng = Rng(seeds=torch.arange(3), offsets=torch.arange(3))
    acceptlib.create("greedy").verify(**arguments, rng=rng)
    assert rng.offsets.tolist() == [1, 2, 3]
    acceptlib.create("greedy").verify(**arguments, rng=replace(rng, advances=False))
    assert rng.offsets.tolist() == [1, 2, 3]


# A request alone, in plain numbers


class Bare(AcceptanceStrategy):
    """Accept at a rate, whatever rows say, and draw from the target's row."""

    name = "bare"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(draft_prob: Value) -> Value:
        """Return h."""
        return 0.5 + 0.0 * draft_prob


class Constant(Bare):
    """Draw among all tokens alike, after a rejection; and return a number of fewer bits."""

    name = "constant"

    @rule
    def accept(draft_prob: Value) -> Value:
        """Return h."""
        return (1.0 - 0.5 * draft_prob).astype("float32") if isinstance(draft_prob, np.ndarray) else draft_prob

    @rule
    def residual(p: Value) -> Value:
        """Return the weight of each entry."""
        return 0.01 + 0.0 * p


ENTRIES = [*map(support.create, ("rejection", "lenience", "mixture", "target-only")), Bare(), Constant()]
"""Strategies that read drafted entries, and two rows for their draw: alone, a request is decided in plain numbers."""


def spoil(number: int, request: Request) -> None:
    """Make a request's rows or ids bad in one of several ways."""
    kind = number % 12
    for row in (request.p, request.q):
        chosen = torch.rand(row.shape, generator=torch.Generator().manual_seed(number)) < 0.1
        row[chosen] = {1: torch.nan, 2: -1.0, 3: torch.inf, 4: -torch.inf}.get(kind, row[chosen])
        row.mul_({5: 1.5, 6: 0.0, 7: 1.01}.get(kind, 1.0))
    if kind == 8:
        request.q[:] = request.p[:-1]
    if kind == 11:
        request.p.mul_(1 + 1 / 64)
    if request.n and kind in {9, 10}:
        request.ids[number % request.n] = {9: -1, 10: request.p.shape[1] + 1}[kind]


OF_DRAFT = ((), ("temperature",), ("top_k", "min_p"), ("top_p", "temperature"), ("logit_bias", "allowed_token_bitmask"))
"""Of the target's parameters, those that are the draft's too, where not all are."""


def parameters(number: int, shape: torch.Size) -> dict[str, Any]:
    """Return sampling parameters of two requests, of which the first may have one out of range, and a mask."""
    mask = torch.randint(-(2**31), 2**31, (*shape[:2], 2), generator=torch.Generator().manual_seed(number))
    found = {
        "temperature": torch.tensor([(0.7, 0.0, 1.3, -1.0, 2.0, 0.5, 0.0)[number % 7], 1.0]),
        "top_k": torch.tensor([number % 11 - 1, 3]),
        "top_p": torch.tensor([number % 13 / 10, 0.5]),
        "min_p": torch.tensor([(0.0, 0.05, 1.5)[number % 3], 0.01]),
        "allowed_token_bitmask": mask.to(torch.int32),
        # sometimes of a token beyond the vocabulary
        "logit_bias": torch.tensor([[39, number % 38 + 4], [-1, -1]]) + (number % 11 == 1),
    }
    names = [*found]
    return {name: found[name] for name in (names[number % 6], names[number // 6 % 6])}


def pair_of_requests(number: int, form: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two requests laid out, of which the first may be bad, and their sampling parameters."""
    requests = [support.ordinary(number % 5, 40, number), support.ordinary(number % 5, 40, 7)]
    spoil(number, requests[0])
    kinds = ["probs" if form == "probs" else "logits"] * 2
    if form == "logits" and number % 7 < 2:  # one model's rows of each kind
        kinds[number % 7] = "probs"
    names = [f"{model}_{kind}" for model, kind in zip(("target", "draft"), kinds, strict=True)]
    if form == "one-hot":
        names = [f"target_{'probs' if number % 3 else 'logits'}"]
    both = support.lay_out(requests, "padded", "probs") | support.lay_out(requests, "padded", "logits")
    arguments = {name: both[name] for name in ("draft_token_ids", *names)}
    if number % 11 in {4, 7}:
        half = torch.bfloat16 if number % 11 == 4 else torch.float16
        arguments |= {name: arguments[name].to(half) for name in names if name.endswith("logits")}
    if number % 3 == 1:  # rows that do not lie in one piece
        arguments |= {name: arguments[name].mT.contiguous().mT for name in names}
    if number % 2:
        dtype = torch.int64 if number % 4 == 1 else torch.int32
        arguments["draft_token_ids"] = arguments["draft_token_ids"].to(dtype)
    return arguments, parameters(number, arguments["target_logits"].shape) if form == "parameters" else {}


def of_some(parameters: dict[str, Any], count: int, number: int) -> dict[str, SamplingParams]:
    """Return the parameters of the first requests as `verify` takes them."""
    own = {name: value[:count] for name, value in parameters.items()}
    if "logit_bias" in own:
        own["logit_bias"] = LogitBias(own["logit_bias"], torch.tensor([[2.0, -1.0]] * count))
    given = {"sampling": SamplingParams(**own)} if own else {}
    turn = number // 5 % len(OF_DRAFT)  # not in step with the drafts' lengths
    if own and turn:  # else the same as the target's
        kept = {name: value for name, value in own.items() if name in OF_DRAFT[turn]}
        if "allowed_token_bitmask" in kept:
            kept["allowed_token_bitmask"] = kept["allowed_token_bitmask"][:, :-1]
        given["draft_sampling"] = SamplingParams(**kept)
    return given


@pytest.mark.parametrize("form", ["probs", "logits", "parameters", "one-hot"])
@pytest.mark.parametrize("kind", ["streams", "seed", "uniforms"])
@pytest.mark.parametrize("strategy", ENTRIES, ids=lambda strategy: strategy.name)
def test_a_request_alone_has_the_result_that_it_has_in_a_batch(
    strategy: AcceptanceStrategy, kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # positions of logits at a time, where rows are long
    generator = torch.Generator().manual_seed(0)
    statuses = set()
    for number in range(240):
        monkeypatch.setattr(single, "SCRATCH_BYTES", 1 if number % 8 == 1 else scratch.SCRATCH_BYTES)
        arguments, sampling = pair_of_requests(number, form)
        copies = {name: value.clone() for name, value in arguments.items()}
        accept = torch.rand(2, number % 5, dtype=torch.float64, generator=generator)
        if number % 4 == 2:
            accept[:, 1:2] = ALMOST_ONE
        emit = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator)
        found = []
        for count in (1, 2):
            rng = support.streams(range(number, number + count))
            offsets = rng.offsets + 1
            numbers: dict[str, dict[str, Any]] = {
                "streams": {"rng": rng},
                "seed": {"rng": number},
                "uniforms": {"uniforms": Uniforms(accept=accept[:count], emit=emit[:count])},
            }
            with mock.patch.object(single, "step", side_effect=single.step) as step:
                some = {name: value[:count] for name, value in arguments.items()}
                found.append(strategy.verify(**some, **of_some(sampling, count, number), **numbers[kind]))
            assert step.called == (count == 1)
            assert kind != "streams" or torch.equal(rng.offsets, offsets)
        for name in ("output_token_ids", "num_accepted", "num_emitted", "status"):
            alone, together = (getattr(result, name)[0].tolist() for result in found)
            assert alone == together, (number, name)
        assert all(torch.equal(arguments[name].nan_to_num(9), copy.nan_to_num(9)) for name, copy in copies.items())
        statuses |= {*found[0].status.tolist()}
    assert statuses >= {0, 1, 3} | ({5} if form == "parameters" else {2})


@pytest.mark.parametrize("what", ["bonus", "half", "narrow", "wide", "logprobs", "passed"])
def test_a_request_alone_that_plain_numbers_do_not_serve(what: str) -> None:
    requests = [support.standing(3, 11, seed) for seed in (0, 1)]
    arguments = support.lay_out(requests, "padded", "probs")
    q = arguments["draft_probs"]
    arguments |= {
        "bonus": {"bonus_token_ids": torch.tensor([4, 5])},
        "half": {name: arguments[name].to(torch.bfloat16) for name in ("target_probs", "draft_probs")},
        "narrow": {"draft_probs": q[..., :7].contiguous()},
        "wide": {"draft_probs": torch.cat((q, 0 * q), -1)},
    }.get(what, {})
    found = []
    for count in (1, 2):
        some = {name: value[:count] for name, value in arguments.items()}
        out = VerifyResult.empty(count, 3, "cpu", logprobs=what == "logprobs", num_passed=what == "passed")
        with mock.patch.object(single, "step", side_effect=single.step) as step:
            found.append(
                acceptlib.create("rejection").verify(
                    **some, rng=support.streams(range(count)), logprobs=what == "logprobs", out=out
                )
            )
        assert not step.called
    support.same(*found, rows=[0], to=[0])


@pytest.mark.parametrize("form", ["probs", "logits"])
def test_a_request_alone_beside_other_defaults(form: str) -> None:
    arguments = support.lay_out(mixed(2)[1:], "padded", form)
    wanted = acceptlib.create("rejection").verify(**arguments, rng=1)
    with torch.device("meta"):
        found = acceptlib.create("rejection").verify(**arguments, rng=1, out=VerifyResult.empty(1, 3, "cpu"))
    support.same(found, wanted)


def test_a_long_chain_is_not_gone_through_in_plain_numbers() -> None:
    longest = single.LONGEST_CHAIN
    for length in (longest, longest + 1):
        arguments = support.lay_out([support.ordinary(length, 11, 0)], "padded", "probs")
        with mock.patch.object(single, "step", side_effect=single.step) as step:
            acceptlib.create("rejection").verify(**arguments, rng=1)
        assert step.called == (length == longest)


def test_a_request_alone_whose_residual_says_yes_or_no() -> None:
    class Likely(Bare):
        name = "likely"

        @rule
        def residual(p: Value) -> Value:
            return p > 0.05

    for bits in (-1, 2**62):
        found = []
        for count in (1, 2):
            arguments = support.lay_out([support.ordinary(3, 11, 0)] * count, "padded", "probs")
            found.append(Likely().verify(**arguments, uniforms=support.fixed(count, 3, ALMOST_ONE, bits)))
        support.same(*found, rows=[0], to=[0])


def test_a_step_of_a_request_alone_advances_its_stream() -> None:
    arguments = support.lay_out(mixed(2)[1:], "padded", "probs")
    rng = Rng(seeds=torch.tensor([5]), offsets=torch.tensor([1]))
    for advances in (True, False):
        acceptlib.create("rejection").verify(**arguments, rng=replace(rng, advances=advances))
        assert rng.offsets.tolist() == [2]


@pytest.mark.parametrize("form", ["probs", "logits"])
def test_a_request_alone_whose_rows_need_gradients(form: str) -> None:
    arguments = support.lay_out(mixed(2)[1:], "padded", form)
    wanted = acceptlib.create("rejection").verify(**arguments, rng=1)
    for name in (f"target_{form}", f"draft_{form}"):
        arguments[name] = arguments[name].clone().requires_grad_()
    support.same(acceptlib.create("rejection").verify(**arguments, rng=1), wanted)
