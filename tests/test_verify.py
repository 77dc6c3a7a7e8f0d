"""What `verify` promises beyond the law: layouts, parameters, results, and what it leaves alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import support
import torch
from support import ALMOST_ONE, FAITHFUL, SETTINGS, Request, forms, layouts, settings
from torch.nn import functional

import acceptlib
from acceptlib import (
    AcceptanceStrategy,
    LogitBias,
    Rng,
    SamplingParams,
    Traits,
    Uniforms,
    VerifyResult,
    arrays,
    ops,
    rule,
)
from acceptlib import rng as streams
from acceptlib.engine import chains, draw, process, rows, single, torch_engine
from acceptlib.engine.rows import RowReader
from acceptlib.errors import ConformanceError, InputError
from acceptlib.inputs import Rows
from acceptlib.ops import Value
from acceptlib.testing.checks.execution import NoWaiting

POSITION_BY_POSITION = ["greedy", "lenience", "mixture", "rejection", "typical", "typical-sample"]
"""Settings under which a token's h depends on its own rows alone."""

READ_NO_DRAFT = {"greedy", "synthetic", "typical", "typical-sample"}


def mixed(count: int, vocab: int = 11, seed: int = 0) -> list[Request]:
    """Return requests of 0 to 4 drafted tokens, most of them contested."""
    return [support.ordinary((3 * index) % 5, vocab, seed + index) for index in range(count)]


# Layouts


@forms
@settings
def test_layouts_agree(setting: str, form: str) -> None:
    requests = mixed(40)
    support.same(
        support.verify(setting, requests, "ragged", form, logprobs=True),
        support.verify(setting, requests, "padded", form, logprobs=True),
    )


@settings
def test_drafted_tokens_may_lie_where_the_emitted_ones_go(setting: str) -> None:
    """As in a buffer of tokens that is verified where it is."""
    requests = [support.ordinary(3, 11, seed) for seed in range(40)]
    call = support.lay_out(requests, "padded", "logits")
    state = support.create(setting).initial_state(40, "cpu")
    expected = support.create(setting).verify(**call, rng=0, state=state)
    tokens = functional.pad(call["draft_token_ids"], (0, 1))
    out = replace(VerifyResult.empty(40, 3, torch.device("cpu")), output_token_ids=tokens)
    found = support.create(setting).verify(**call | {"draft_token_ids": tokens[:, :3]}, rng=0, state=state, out=out)
    assert torch.equal(found.output_token_ids, expected.output_token_ids.long())


@settings
def test_ragged_finds_the_longest_draft_itself(setting: str) -> None:
    requests = mixed(10)
    support.same(support.verify(setting, requests), support.verify(setting, requests, max_num_draft_tokens=None))


@settings
def test_larger_limit_only_widens_the_result(setting: str) -> None:
    requests = mixed(10)
    narrow, wide = support.verify(setting, requests), support.verify(setting, requests, max_num_draft_tokens=9)
    assert wide.output_token_ids.shape == (10, 10)
    assert bool((wide.output_token_ids[:, 5:] == acceptlib.PLACEHOLDER_TOKEN_ID).all())
    assert torch.equal(wide.output_token_ids[:, :5], narrow.output_token_ids)
    assert torch.equal(wide.num_emitted, narrow.num_emitted)


@pytest.mark.parametrize("draft", [True, False], ids=["draft", "ngram"])
@forms
@layouts
@settings
def test_nothing_drafted(setting: str, layout: str, form: str, draft: bool) -> None:  # noqa: FBT001
    """T = 0 and K = 0: one token each, drawn from the bonus row."""
    requests = [support.standing(0, 7, seed) for seed in range(3)]
    arguments = support.lay_out(requests, layout, form, draft=draft)
    for limit in (0, None) if layout == "padded" else (0, None, 4):
        arguments["max_num_draft_tokens"] = limit
        result = support.create(setting).verify(**arguments, rng=support.streams(range(3)), logprobs=True)
        assert result.output_token_ids.shape == (3, (limit or 0) + 1)
        assert result.num_accepted.tolist() == [0, 0, 0]
        assert result.num_emitted.tolist() == [1, 1, 1]
        assert result.status.tolist() == [0, 0, 0]
        given = support.create(setting).verify(**arguments, rng=0, bonus_token_ids=torch.tensor([4, 5, 6]))
        assert [support.tokens(given, b) for b in range(3)] == [[4], [5], [6]]


@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "plain"])
@forms
@settings
def test_no_requests(setting: str, form: str, logprobs: bool) -> None:  # noqa: FBT001
    """B = 0, as between batches."""
    strategy = support.create(setting)
    ragged = {
        "draft_token_ids": torch.empty(0, dtype=torch.int64),
        f"target_{form}": torch.empty(0, 7),
        f"draft_{form}": torch.empty(0, 7),
        "cu_num_draft_tokens": torch.zeros(1, dtype=torch.int32),
    }
    padded = {
        "draft_token_ids": torch.empty(0, 3, dtype=torch.int64),
        f"target_{form}": torch.empty(0, 4, 7),
        f"draft_{form}": torch.empty(0, 3, 7),
    }
    for arguments, columns in ((ragged, 1), (ragged | {"max_num_draft_tokens": 2}, 3), (padded, 4)):
        result = strategy.verify(**arguments, rng=support.streams([]), logprobs=logprobs)
        assert result.output_token_ids.shape == (0, columns)
        assert result.output_token_ids.dtype == torch.int32
        assert result.num_accepted.shape == result.num_emitted.shape == result.status.shape == (0,)
        assert (result.logprobs is not None) == logprobs
        out = VerifyResult.empty(0, columns - 1, torch.device("cpu"), logprobs=logprobs)
        assert strategy.verify(**arguments, rng=0, logprobs=logprobs, out=out) is out
        result.raise_for_status()


@layouts
@pytest.mark.parametrize("setting", FAITHFUL)
def test_given_bonus_token_is_emitted_only_where_all_stand(setting: str, layout: str) -> None:
    requests = [support.standing(n, 11, seed) for seed, n in enumerate((3, 3, 0, 2, 4))]
    support.mask_drafted(requests[1], 2)  # the last drafted token
    support.mask_drafted(requests[4], 0)
    plain = support.verify(setting, requests, layout)
    for dtype in (torch.int32, torch.int64):
        bonus = torch.tensor([10, 9, 8, 7, 6], dtype=dtype)
        result = support.verify(setting, requests, layout, bonus_token_ids=bonus)
        assert [support.tokens(result, b)[-1] for b in (0, 2, 3)] == [10, 8, 7]
        assert result.num_accepted.tolist() == [3, 2, 0, 2, 0]
        support.same(result, plain, rows=[1, 4], to=[1, 4])


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


@settings
def test_a_given_bonus_token_is_not_that_of_a_chain_that_ended_early(setting: str) -> None:
    """Ragged counts say where the bonus row is: at a placeholder before it, a token is drawn from the row there."""
    requests = [support.standing(3, 11, seed) for seed in range(6)]
    for request in requests[:3]:
        request.ids[2 if request is requests[0] else 1] = -1
    plain = support.verify(setting, requests)
    given = support.verify(setting, requests, bonus_token_ids=torch.full((6,), 10))
    support.same(given, plain, rows=[0, 1, 2], to=[0, 1, 2])
    assert [support.tokens(given, b)[-1] for b in (3, 4, 5)] == [10, 10, 10]


@layouts
@pytest.mark.parametrize("setting", POSITION_BY_POSITION)
def test_passed_counts_positions_past_the_stop(setting: str, layout: str) -> None:
    """Each drafted token by itself, as a request of one: the same h, u by u."""
    requests = mixed(40)
    uniforms = support.streams(range(len(requests))).uniforms(4)
    out = VerifyResult.empty(len(requests), 4, torch.device("cpu"), totals=True)
    assert out.num_passed is not None
    assert out.totals is not None
    assert out.totals.tolist() == [0, 0]
    out.totals.add_(torch.tensor([5, 2**40]))
    out = replace(out, output_token_ids=out.output_token_ids.long())
    support.verify(setting, requests, layout, uniforms=uniforms, out=out)
    assert out.totals.tolist() == [5 + int(out.num_passed.sum()), 2**40 + int(out.num_emitted.sum())]
    wanted = support.verify(setting, requests, layout, uniforms=uniforms)
    assert torch.equal(out.output_token_ids, wanted.output_token_ids.long())
    for b, request in enumerate(requests):
        alone = [Request(request.ids[[i]], request.p[i : i + 2], request.q[[i]]) for i in range(request.n)]
        own = Uniforms(accept=uniforms.accept[b, : request.n, None], emit=torch.zeros(request.n, dtype=torch.int64))
        passed = support.verify(setting, alone, "padded", uniforms=own).num_accepted.sum() if alone else 0
        assert int(out.num_passed[b]) == int(passed)
    assert bool((out.num_passed > out.num_accepted).any())


# Sampling parameters


@layouts
@pytest.mark.parametrize("setting", FAITHFUL)
def test_temperature_0_is_greedy_for_its_request_alone(setting: str, layout: str) -> None:
    requests = mixed(30)
    temperature = torch.tensor([0.0, 1.0, 0.6] * 10)
    sampling = SamplingParams(temperature=temperature)
    result = support.verify(setting, requests, layout, "logits", sampling=sampling)
    greedy = support.verify("greedy", requests, layout, "logits")
    cold = list(range(0, 30, 3))
    support.same(result, greedy, rows=cold, to=cold)
    warm = SamplingParams(temperature=torch.tensor([1.0, 1.0, 0.6] * 10))
    untouched = support.verify(setting, requests, layout, "logits", sampling=warm)
    rest = [b for b in range(30) if b % 3]
    support.same(result, untouched, rows=rest, to=rest)


@layouts
@settings
def test_temperature_0_keeps_a_greedy_draft(setting: str, layout: str) -> None:
    """Argmax tokens drafted, argmax tokens emitted, by every rule."""
    requests = [support.standing(n, 11, seed) for seed, n in enumerate((3, 0, 4, 1))]
    for temperature in (0, 0.0, torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)):
        for draft in (True, False):
            arguments = support.lay_out(requests, layout, "logits", draft=draft)
            sampling = SamplingParams(temperature=temperature)
            result = support.create(setting).verify(**arguments, sampling=sampling, rng=1)
            assert [support.tokens(result, b) for b in range(4)] == [r.p.argmax(-1).tolist() for r in requests]


@layouts
@settings
def test_temperature_as_a_number_is_the_same_for_every_request(setting: str, layout: str) -> None:
    requests = mixed(20)
    for number in (0.0, 0.7, 1.0, 2):
        one, each = (
            support.verify(setting, requests, layout, "logits", sampling=SamplingParams(temperature=temperature))
            for temperature in (number, torch.full((20,), number, dtype=torch.float64))
        )
        support.same(one, each)
        if number == 1:
            support.same(one, support.verify(setting, requests, layout, "logits"))
            support.same(one, support.verify(setting, requests, layout, "logits", sampling=SamplingParams()))


@layouts
@settings
def test_draft_sampling_acts_on_the_draft_alone(setting: str, layout: str) -> None:
    requests = mixed(40)
    warm, cool = SamplingParams(temperature=1.7), SamplingParams(temperature=0.4)
    result = support.verify(setting, requests, layout, "logits", sampling=cool, draft_sampling=warm)
    arguments = support.lay_out(requests, layout, "logits")
    logits = arguments.pop("draft_logits")
    arguments["draft_probs"] = (logits / torch.tensor(1.7)).softmax(-1)
    wanted = support.create(setting).verify(**arguments, sampling=cool, rng=support.streams(range(40)))
    support.same(result, wanted)
    shared = support.verify(setting, requests, layout, "logits", sampling=cool)
    assert torch.equal(result.output_token_ids, shared.output_token_ids) == (setting in READ_NO_DRAFT)
    support.same(
        shared,
        support.verify(
            setting, requests, layout, "logits", sampling=cool, draft_sampling=SamplingParams(temperature=0.4)
        ),
    )


# Results


@forms
@settings
def test_logprobs_are_those_of_the_target(setting: str, form: str) -> None:
    """log p of what was emitted, accepted, recovered and bonus tokens alike; NaN beyond."""
    requests = mixed(40)
    sampling = {"sampling": SamplingParams(temperature=0.8)} if form == "logits" else {}
    result = support.verify(setting, requests, "ragged", form, logprobs=True, **sampling)
    assert result.logprobs is not None
    assert result.logprobs.dtype == torch.float32
    for b, request in enumerate(requests):
        emitted = support.tokens(result, b)
        rows = request.p.double().log()
        rows = (rows / 0.8).log_softmax(-1) if form == "logits" else rows
        wanted = torch.tensor([rows[i, token] for i, token in enumerate(emitted)], dtype=torch.float32)
        torch.testing.assert_close(result.logprobs[b, : len(emitted)], wanted, rtol=1e-5, atol=1e-6)
        assert result.logprobs[b, len(emitted) :].isnan().all()


def test_result_dtypes() -> None:
    result = support.verify("rejection", mixed(3), logprobs=True)
    assert result.output_token_ids.dtype == result.num_accepted.dtype == result.num_emitted.dtype == torch.int32
    assert result.status.dtype == torch.int8


@settings
def test_out_of_an_earlier_step(setting: str) -> None:
    """The tensors stay where they are, as a CUDA graph needs, and hold nothing of the step before."""
    first, second = mixed(10), mixed(10, seed=50)
    out = support.verify(setting, first)
    places = [tensor.data_ptr() for tensor in (out.output_token_ids, out.num_accepted, out.num_emitted, out.status)]
    again = support.verify(setting, second, out=out)
    assert again is out
    assert places == [t.data_ptr() for t in (out.output_token_ids, out.num_accepted, out.num_emitted, out.status)]
    support.same(out, support.verify(setting, second))


def test_out_of_another_shape_is_an_error_and_stays_as_it_was() -> None:
    requests = mixed(4)
    for num_requests, most in ((3, 4), (4, 3), (5, 5)):
        out = VerifyResult.empty(num_requests, most, torch.device("cpu"), logprobs=False)
        out.output_token_ids.fill_(77)
        with pytest.raises(InputError, match=r"out\.output_token_ids: expected shape \[4, 5\]"):
            support.verify("rejection", requests, out=out)
        assert bool((out.output_token_ids == 77).all())


# Randomness


@settings
def test_explicit_uniforms_are_those_of_the_stream(setting: str) -> None:
    """`Rng.uniforms` shows what `verify` uses, and passing them in changes nothing."""
    requests = mixed(20)
    rng = Rng(seeds=torch.arange(20) * 977, offsets=torch.arange(20) + 2**33)
    uniforms = rng.uniforms(4)
    support.same(support.verify(setting, requests, uniforms=uniforms), support.verify(setting, requests, rng=rng))


@pytest.mark.parametrize("advances", [True, False])
@forms
@layouts
@settings
def test_offsets_advance_by_one_step_a_call(setting: str, layout: str, form: str, *, advances: bool) -> None:
    """Also of a request without drafted tokens, of one that stops early, and of one that is marked; or they stay."""
    requests = [support.ordinary(n, 11, seed=n) for n in (3, 0, 4, 1)]
    requests[3].p[:] = torch.nan
    start = torch.tensor([0, 10, 2**40, -1])
    rng = Rng(seeds=torch.tensor([5, 6, 7, 8]), offsets=start.clone(), advances=advances)
    offsets = rng.offsets
    for step in range(1, 4):
        support.verify(setting, requests, layout, form, rng=rng)
        assert rng.offsets is offsets
        assert torch.equal(offsets, start + step * advances)
        assert rng.seeds.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("setting", ["rejection", "block", "typical-sample"])
def test_consecutive_steps_differ_and_replay_alike(setting: str) -> None:
    requests = [support.ordinary(3, 101, seed) for seed in range(50)]
    runs = []
    for _ in range(2):
        rng = support.streams(range(50))
        runs.append([support.verify(setting, requests, rng=rng).output_token_ids.clone() for _ in range(3)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][1], runs[0][2])


def test_generator_and_int_as_randomness() -> None:
    """A seeded generator replays, a call advances it; an int is the same at every call."""
    requests = [support.ordinary(3, 101, seed) for seed in range(50)]
    source = torch.Generator().manual_seed(3)
    first = support.verify("rejection", requests, rng=source)
    second = support.verify("rejection", requests, rng=source)
    assert not torch.equal(first.output_token_ids, second.output_token_ids)
    support.same(first, support.verify("rejection", requests, rng=source.manual_seed(3)))
    support.same(support.verify("rejection", requests, rng=9), support.verify("rejection", requests, rng=9))


# What is left alone


@forms
@layouts
@settings
def test_callers_tensors_are_never_written(setting: str, layout: str, form: str) -> None:
    requests = [Request(r.ids.to(torch.int32), r.p, r.q) for r in mixed(12)]
    arguments = support.lay_out(requests, layout, form)
    arguments["bonus_token_ids"] = torch.arange(12) % 11
    arguments["uniforms"] = support.streams(range(12)).uniforms(4)
    if form == "logits":
        arguments["sampling"] = SamplingParams(temperature=torch.linspace(0, 2, 12))
        arguments["draft_sampling"] = SamplingParams(temperature=torch.linspace(0.5, 0, 12))
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    tensors |= {"accept": arguments["uniforms"].accept, "emit": arguments["uniforms"].emit}
    tensors |= {name: arguments[name].temperature for name in ("sampling", "draft_sampling") if name in arguments}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    support.create(setting).verify(**arguments, logprobs=True)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)
        assert tensor._version == versions[name], name


@forms
@settings
def test_rows_that_require_grad(setting: str, form: str) -> None:
    requests = mixed(8)
    temperature = torch.linspace(0.5, 2, 8)
    sampling = {"sampling": SamplingParams(temperature=temperature)} if form == "logits" else {}
    wanted = support.verify(setting, requests, "padded", form, logprobs=True, **sampling)
    arguments = support.lay_out(requests, "padded", form)
    for tensor in (arguments[f"target_{form}"], arguments[f"draft_{form}"], temperature):
        tensor.requires_grad_()
    result = support.create(setting).verify(**arguments, **sampling, logprobs=True, rng=support.streams(range(8)))
    support.same(result, wanted)
    assert result.logprobs is not None
    assert result.logprobs.grad_fn is None
    assert not result.logprobs.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@forms
@layouts
@settings
def test_half_precision_rows_are_their_values_in_float32(
    setting: str, layout: str, form: str, dtype: torch.dtype
) -> None:
    arguments = support.lay_out(mixed(30, vocab=67), layout, form)
    half, full = dict(arguments), dict(arguments)
    for name in (f"target_{form}", f"draft_{form}"):
        half[name] = arguments[name].to(dtype)
        full[name] = half[name].to(torch.float32)
    sampling = {"sampling": SamplingParams(temperature=torch.linspace(0, 2, 30))} if form == "logits" else {}
    left, right = (
        support.create(setting).verify(**rows, **sampling, rng=support.streams(range(30)), logprobs=True)
        for rows in (half, full)
    )
    support.same(left, right)
    assert not left.status.any()


# Options that make one strategy another


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenience", {"lenience": 1.0}),
        ("mixture", {"weight": 1.0}),
        ("fly", {"fly_entropy_threshold": float("inf")}),
    ],
    ids=["lenience-1", "mixture-1", "fly-infinite"],
)
@pytest.mark.parametrize("draft", [True, False], ids=["draft", "ngram"])
@forms
def test_neutral_option_is_rejection(name: str, options: dict[str, float], form: str, draft: bool) -> None:  # noqa: FBT001
    """Bit for bit, over batches of every shape."""
    for seed in range(8):
        count, most, vocab = 50 + seed, seed % 6, 3 + 13 * (seed % 4)
        source = support.generator(seed)
        target = 2 * torch.randn(count, most + 1, vocab, generator=source)
        rows = target[:, :most] + torch.randn(count, most, vocab, generator=source)
        ids = torch.randint(-1 if seed % 2 else 0, vocab, (count, most), generator=source)
        arguments = {f"target_{form}": target, f"draft_{form}": rows}
        if form == "probs":
            arguments = {name: value.softmax(-1) for name, value in arguments.items()}
        if not draft:
            del arguments[f"draft_{form}"]
        left, right = (
            strategy.verify(ids, **arguments, rng=support.streams(range(count)), logprobs=True)
            for strategy in (acceptlib.create(name, **options), acceptlib.create("rejection"))
        )
        support.same(left, right)


def test_synthetic_rates_are_exact_by_position() -> None:
    """Over a grid of uniforms, position i stands in exactly its share of the requests."""
    rates = (0.8, 0.4, 0.1)
    grid = (torch.arange(20, dtype=torch.float64) + 0.5) / 20
    accept = torch.cartesian_prod(grid, grid, grid)
    count = len(accept)
    ids = torch.zeros(count, 4, dtype=torch.int64)
    uniforms = Uniforms(
        accept=torch.cat([accept, torch.zeros(count, 1, dtype=torch.float64)], 1),
        emit=torch.zeros(count, dtype=torch.int64),
    )
    for target in (torch.full((count, 5, 3), 1 / 3), torch.eye(3)[2].expand(count, 5, 3)):
        result = acceptlib.create("synthetic", synthetic_acceptance_rates=rates).verify(
            ids, target_probs=target, uniforms=uniforms
        )
        standing = [int((result.num_accepted > position).sum()) for position in range(4)]
        assert standing == [count * 8 // 10, count * 4 // 10, count // 10, 0]


def test_synthetic_length_is_the_mean_of_emitted_tokens() -> None:
    grid = (torch.arange(20, dtype=torch.float64) + 0.5) / 20
    accept = torch.cartesian_prod(grid, grid, grid)
    uniforms = Uniforms(accept=accept, emit=torch.zeros(len(accept), dtype=torch.int64))
    ids = torch.zeros(accept.shape, dtype=torch.int64)
    target = torch.full((len(accept), 4, 3), 1 / 3)
    for length, emitted in ((1.0, 8000), (1.25, 10_000), (2.5, 20_000), (3.0, 24_000), (4.0, 32_000), (9.0, 32_000)):
        strategy = acceptlib.create("synthetic", synthetic_acceptance_length=length)
        result = strategy.verify(ids, target_probs=target, uniforms=uniforms)
        assert int(result.num_emitted.sum()) == emitted


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
            for module in (torch_engine, rows):
                patch.setattr(module, "KEPT_BYTES", 0)
            patch.setattr(rows, "SHARED_ROW", 0)
            support.same(support.verify(setting, requests, layout, form, logprobs=True), wanted)


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


ENTRIES = [*map(support.create, ("rejection", "lenience", "mixture")), Bare(), Constant()]
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


@pytest.mark.parametrize("form", ["probs", "logits", "parameters"])
@pytest.mark.parametrize("kind", ["streams", "seed", "uniforms"])
@pytest.mark.parametrize("strategy", ENTRIES, ids=lambda strategy: strategy.name)
def test_a_request_alone_has_the_result_that_it_has_in_a_batch(
    strategy: AcceptanceStrategy, kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # positions of logits at a time, where rows are long
    generator = torch.Generator().manual_seed(0)
    statuses = set()
    for number in range(240):
        monkeypatch.setattr(single, "SCRATCH_BYTES", 1 if number % 8 == 1 else rows.SCRATCH_BYTES)
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
    assert statuses >= {"probs": {0, 1, 2, 3}, "logits": {0, 1, 2, 3}, "parameters": {0, 1, 3, 5}}[form]


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


def test_a_tensor_that_a_rule_holds_stays_as_it_is() -> None:
    held = torch.full((11,), 1 / 11)

    class Holding(Bare):
        name = "holding"

        @rule
        def residual() -> Value:
            return held

    for count in (1, 2):
        Holding().verify(**support.lay_out(mixed(3)[1 : 1 + count], "padded", "probs"), rng=1)
    assert torch.equal(held, torch.full((11,), 1 / 11))


@pytest.mark.parametrize("form", ["probs", "logits"])
def test_a_request_alone_whose_rows_need_gradients(form: str) -> None:
    arguments = support.lay_out(mixed(2)[1:], "padded", form)
    wanted = acceptlib.create("rejection").verify(**arguments, rng=1)
    for name in (f"target_{form}", f"draft_{form}"):
        arguments[name] = arguments[name].clone().requires_grad_()
    support.same(acceptlib.create("rejection").verify(**arguments, rng=1), wanted)


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
        monkeypatch.setattr(module, "as_words", lambda tensor: tensor)
    monkeypatch.setattr(streams, "_columns", streams._columns.__wrapped__)  # keeps words
    support.same(support.verify(setting, requests, layout, form, rng=support.streams(range(20)), **arguments), wanted)


@forms
@layouts
@settings
def test_verify_never_waits(setting: str, layout: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_readable", lambda _tensor: False)  # as on a device
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


def test_h_of_1_accepts_the_largest_u_and_h_of_0_rejects_the_smallest() -> None:
    sure, never = support.standing(3, 11, 0), support.standing(3, 11, 1)
    support.mask_drafted(never, 0)
    for setting in FAITHFUL:
        high = support.verify(setting, [sure], uniforms=support.fixed(1, 3, ALMOST_ONE, -1))
        low = support.verify(setting, [never], uniforms=support.fixed(1, 3, 0.0, 0))
        assert (high.num_accepted.tolist(), low.num_accepted.tolist()) == ([3], [0]), setting


class FromDraft(AcceptanceStrategy):
    """A third party's strategy, which rejects every token and draws from the draft's row as it is given."""

    name = "from-draft"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(target_prob: Value) -> Value:
        """Return h."""
        return 0.0 * target_prob

    @rule
    def residual(q: Value) -> Value:
        """Return the weight of each entry."""
        return q


def test_a_residual_that_is_a_given_row_leaves_it_alone() -> None:
    """Weights are scaled in place only where they are nobody else's."""
    requests = [support.ordinary(1, 9000, seed) for seed in range(3)]
    for request in requests:
        request.q[:, ::2] = 0
    given = support.lay_out(requests, "padded", "probs")
    before = {name: value.clone() for name, value in given.items()}
    result = FromDraft().verify(**given, rng=support.streams(range(3)))
    assert all(torch.equal(given[name], value) for name, value in before.items())
    assert (result.output_token_ids[:, 0] % 2 == 1).all()


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
