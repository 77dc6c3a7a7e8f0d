"""What `verify` promises beyond the law: layouts, parameters, results, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import support
import torch
from support import ALMOST_ONE, FAITHFUL, READ_NO_DRAFT, Request, forms, layouts, mixed, settings
from torch.nn import functional

import acceptlib
from acceptlib import AcceptanceStrategy, Rng, SamplingParams, Traits, Uniforms, VerifyResult, rule
from acceptlib.engine import rows, torch_engine
from acceptlib.errors import InputError
from acceptlib.ops import Value

POSITION_BY_POSITION = [
    "greedy",
    "lenience",
    "mixture",
    "rejection",
    "target-only",
    "tv-budget",
    "typical",
    "typical-sample",
]
"""Settings under which a token's h depends on its own rows alone."""


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


@forms
@settings
def test_a_chain_of_nothing_behind_a_rejection(setting: str, form: str) -> None:
    """In the ragged layout it has no draft's row, and the last one of all, which the rejection reads, stands in."""
    requests = [support.ordinary(1, 11, 0), support.ordinary(0, 11, 1)]
    support.mask_drafted(requests[0], 0)
    ragged, padded = (support.verify(setting, requests, layout, form) for layout in ("ragged", "padded"))
    support.same(ragged, padded)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_given_bonus_token_needs_no_row(dtype: torch.dtype) -> None:
    """Where nothing was drafted, there is none at all to take an argmax of."""
    ids, rows = torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0, 7, dtype=dtype)
    result = acceptlib.create("greedy").verify(ids, target_logits=rows, bonus_token_ids=torch.tensor([3, 4]))
    assert result.to_lists() == [[3], [4]]


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


@layouts
@pytest.mark.parametrize("setting", ["lenience", "mixture", "rejection", "target-only", "tv-budget", "typical"])
def test_passed_counts_rows_that_no_chain_reaches(setting: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches, and long rows, of logits are read as far as chains get, but not where all that passes counts."""
    requests = [support.ordinary(4, 11, seed) for seed in range(20)]

    def passed(some: list[int]) -> list[int]:
        out = VerifyResult.empty(len(some), 4, "cpu", num_passed=True)
        given = [requests[b] for b in some]
        support.verify(setting, given, layout, "logits", rng=support.streams(some), out=out)
        assert out.num_passed is not None
        return out.num_passed.tolist()

    wanted = passed([*range(20)])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch_engine, "SCRATCH_BYTES", 1)
    for module in (torch_engine, rows):
        monkeypatch.setattr(module, "KEPT_BYTES", 0)
    assert passed([*range(20)]) == wanted
    assert [passed([b])[0] for b in range(20)] == wanted


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
    first, second = mixed(10), mixed(10, first_key=50)
    out = support.verify(setting, first)
    places = [tensor.data_ptr() for tensor in (out.output_token_ids, out.num_accepted, out.num_emitted, out.status)]
    again = support.verify(setting, second, out=out)
    assert again is out
    assert places == [t.data_ptr() for t in (out.output_token_ids, out.num_accepted, out.num_emitted, out.status)]
    support.same(out, support.verify(setting, second))


def test_out_of_more_requests_takes_a_smaller_batch() -> None:
    """What lies behind the batch is left alone, and totals go on."""
    requests = mixed(3)
    expected = support.verify("rejection", requests, logprobs=True)
    out = VerifyResult.empty(5, expected.output_token_ids.shape[1] - 1, "cpu", logprobs=True, totals=True)
    out.output_token_ids.fill_(77)
    for step in (1, 2):
        support.same(support.verify("rejection", requests, logprobs=True, out=out.narrow(3)), expected)
        assert out.totals is not None
        assert out.totals[1] == step * expected.num_emitted.sum()
    assert torch.equal(out.output_token_ids[:3], expected.output_token_ids)
    assert bool((out.output_token_ids[3:] == 77).all())
    for number in (-1, 6):
        with pytest.raises(InputError, match=f"num_requests: expected 0 to 5, .* got {number}"):
            out.narrow(number)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_narrowed_result_shares_memory_and_all_totals(number: int) -> None:
    """Of fewer requests than there are totals too."""
    out = VerifyResult.empty(5, 3, "cpu", totals=True)
    narrowed = out.narrow(number)
    assert narrowed.totals is out.totals
    assert narrowed.logprobs is None
    assert narrowed.output_token_ids.shape == (number, 4)
    narrowed.num_accepted.fill_(77)
    assert bool((out.num_accepted[:number] == 77).all())


def test_out_of_another_shape_is_an_error_and_stays_as_it_was() -> None:
    requests = mixed(4)
    for num_requests, most in ((3, 4), (4, 3), (5, 5)):
        out = VerifyResult.empty(num_requests, most, torch.device("cpu"))
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


def test_h_of_1_accepts_the_largest_u_and_h_of_0_rejects_the_smallest() -> None:
    sure, never = support.standing(3, 11, 0), support.standing(3, 11, 1)
    support.mask_drafted(never, 0)
    for setting in FAITHFUL:
        high = support.verify(setting, [sure], uniforms=support.fixed(1, 3, ALMOST_ONE, -1))
        low = support.verify(setting, [never], uniforms=support.fixed(1, 3, 0.0, 0))
        assert (high.num_accepted.tolist(), low.num_accepted.tolist()) == ([3], [0]), setting


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


# Options that make one strategy another


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenience", {"lenience": 1.0}),
        ("mixture", {"weight": 1.0}),
        ("tv-budget", {"epsilon": 0.0}),
        ("fly", {"fly_entropy_threshold": float("inf")}),
    ],
    ids=["lenience-1", "mixture-1", "tv-budget-0", "fly-infinite"],
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


@forms
@layouts
def test_target_only_is_rejection_of_one_hot_drafts(layout: str, form: str) -> None:
    """Bit for bit, whatever the draft's rows are."""
    requests, rng = support.mixed(60), support.streams(range(60))
    given = support.lay_out(requests, layout, form)
    one_hot = support.lay_out(requests, layout, form, draft=False)
    wanted = acceptlib.create("rejection").verify(**one_hot, rng=support.streams(range(60)), logprobs=form == "logits")
    support.same(acceptlib.create("target-only").verify(**given, rng=rng, logprobs=form == "logits"), wanted)


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
