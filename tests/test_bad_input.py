"""What bad rows, ids, counts and parameters get: a marked request whose neighbours are untouched."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import support
import torch
from support import ALMOST_ONE, FAITHFUL, SETTINGS, Request, forms, layouts, settings

import acceptlib
from acceptlib import AcceptanceStrategy, SamplingParams, Traits, VerifyResult, ops, row_sum, rule
from acceptlib.errors import StatusError
from acceptlib.ops import Value
from acceptlib.result import EXPLANATIONS, Status

pytestmark = pytest.mark.usefixtures("remembered")

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
    places = " and ".join(f"request {index}, position {count}" for index, count in sorted(stood.items()))
    assert str(caught.value).startswith(f"{places}: {EXPLANATIONS[status]}")


MOST = 4
SPOILED = {1: 0, 4: 1, 6: 2, 7: 3}
"""Request of `neighbourhood` to spoil -> the position to spoil."""


def neighbourhood(vocab: int = 11) -> list[Request]:
    """Return a batch: requests of three standing tokens to spoil, around them shorter, longer and empty ones."""
    lengths = [2, 3, 0, 1, 3, 4, 3, 3, 1]
    requests = [support.standing(n, vocab, index) for index, n in enumerate(lengths)]
    requests[5] = support.ordinary(MOST, vocab, 0)
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


class Sane(AcceptanceStrategy):
    """Accept where the largest entry of the draft's row is a probability."""

    name = "sane"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(draft_max_prob: Value) -> Value:
        """Return h."""
        return ops.where(draft_max_prob >= 0.0, 1.0, 0.0)


@pytest.mark.parametrize("value", [-1.0, math.nan])
@pytest.mark.parametrize("width", [3, 4, 6])
def test_entries_of_a_draft_below_zero_count_as_zero(width: int, value: float) -> None:
    """Whether or not its rows are wider than the target's."""
    p, q = torch.full((1, 2, 4), 0.25), torch.full((1, 1, width), value)
    assert Sane().verify(torch.tensor([[1]]), target_probs=p, draft_probs=q).num_accepted.tolist() == [1]


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


@layouts
@settings
def test_any_negative_id_ends_the_chain(setting: str, layout: str) -> None:
    """Of a request alone too, and before a given bonus token."""
    for count, bonus in ((1, None), (2, None), (2, torch.tensor([4, 5]))):
        found = []
        for drafted in (-1, -2, -(2**31)):
            requests = [support.standing(3, 10, seed) for seed in range(count)]
            for request in requests:
                request.ids[1] = drafted
            uniforms = support.fixed(count, 3, 0.0)
            found.append(support.verify(setting, requests, layout, uniforms=uniforms, bonus_token_ids=bonus))
        assert found[0].num_accepted.tolist() == [1] * count
        support.same(found[1], found[0])
        support.same(found[2], found[0])


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
def test_bad_counts_are_found_before_bad_parameters(setting: str) -> None:
    """Of two faults of a request the first one is named, and no token of it counts as passed."""
    requests = [support.standing(3, 10, seed) for seed in range(4)]
    arguments = support.lay_out(requests, "ragged", "logits")
    arguments["cu_num_draft_tokens"][-1] = 40
    sampling = SamplingParams(temperature=torch.tensor([1.0, math.nan, 1.0, math.nan]))
    out = VerifyResult.empty(4, 3, "cpu", num_passed=True)
    result = support.create(setting).verify(**arguments, sampling=sampling, rng=support.streams(range(4)), out=out)
    assert result.status.tolist() == [0, Status.INVALID_PARAMETER, 0, Status.INVALID_COUNT]
    assert result.num_emitted.tolist()[1::2] == [0, 0]
    assert out.num_passed is not None
    assert out.num_passed.tolist()[1::2] == [0, 0]


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
    with pytest.raises(
        StatusError, match=r"request 1, position 0 and request 2, position 0.*: a sampling parameter is out of range: "
    ):
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


@pytest.mark.parametrize(
    ("off", "status"),
    [
        (1 / 64, Status.OK),
        (1 / 64 + 2**-23, Status.UNNORMALIZED_ROW),
        (-1 / 64, Status.OK),
        (-1 / 64 - 2**-24, Status.UNNORMALIZED_ROW),
    ],
)
def test_rows_may_be_off_by_a_64th(off: float, status: Status) -> None:
    """That much is still right: in a row's sum, in one entry, and, above 1 alone, in the sum of a draft's row."""
    bonus = Request(torch.empty(0, dtype=torch.int64), torch.tensor([[0.5 + off, 0.5]]), torch.empty(0, 2))
    certain = Request(torch.tensor([0]), torch.tensor([[1 + off, 0.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5]]))
    drafted = Request(torch.tensor([0]), torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.5 + off, 0.5]]))
    wanted = (status, *[status if off > 0 else Status.OK] * 2)
    for request, found in zip((bonus, certain, drafted), wanted, strict=True):
        for count in (1, 2):
            uniforms = support.fixed(count, request.n, 0.0)
            result = support.verify("rejection", [request] * count, "padded", uniforms=uniforms)
            assert result.status.tolist() == [found] * count


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
        "4. Tokens accepted before were kept; nothing was drawn. target_probs and draft_probs take probabilities, "
        "target_logits and draft_logits take logits."
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


@pytest.mark.parametrize("factor", [math.nan, math.inf, 4.0, 4.0 + 2**-21])
def test_a_residual_that_is_no_weight_matters_only_where_it_is_drawn_from(factor: float) -> None:
    """One entry is enough, and 4 is a weight still. A bonus token beside it is drawn from the target's row."""

    class Spoiled(AcceptanceStrategy):
        name = "spoiled"
        traits = Traits(guarantee="lossy", bound="none")

        @rule
        def accept(target_prob: Any) -> Any:
            return ops.where(target_prob > 0.5, 1.0, 0.0)

        @rule
        def residual(p: Any, is_drafted: Any, factor: Any) -> Any:
            return ops.where(is_drafted, factor, 0.0 * p)

        def constants(self) -> dict[str, Any]:
            return {"factor": factor}

    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.75, 0.25], [0.0, 1.0]]])
    result = Spoiled(backend="torch").verify(torch.tensor([[0], [0]]), target_probs=p, rng=0)
    assert result.status.tolist() == [Status.OK if factor == 4 else Status.UNNORMALIZED_ROW, Status.OK]
    assert result.to_lists() == [[0] if factor == 4 else [], [0, 1]]


def test_a_fault_that_is_no_rows_gets_no_advice_on_rows() -> None:
    request = support.standing(2, 10, 0)
    request.ids[1] = 10
    with pytest.raises(StatusError, match=r"outside the vocabulary\. Tokens accepted before were kept; .* drawn\.$"):
        support.verify("rejection", [request]).raise_for_status()


def test_raise_for_status_names_the_first_of_many() -> None:
    """A whole batch of bad rows makes no message of megabytes."""
    requests = [support.standing(1, 10, seed) for seed in range(20)]
    for request in requests:
        request.p[0] = math.nan
    with pytest.raises(StatusError) as caught:
        support.verify("rejection", requests).raise_for_status()
    assert str(caught.value).count("position 0") == 8
    assert str(caught.value).count("the target's row has NaN") == 1
    assert "; and 12 requests more. Tokens accepted" in str(caught.value)


def test_raise_for_status_is_silent_where_all_is_well() -> None:
    support.verify("rejection", [support.standing(2, 5, 0)]).raise_for_status()


def test_every_status_is_explained() -> None:
    assert {*EXPLANATIONS} == {*Status} - {Status.OK}
    documented = " ".join((Status.__doc__ or "").replace("`", "").split())
    for status in EXPLANATIONS.keys() - {Status.INVALID_PARAMETER}:  # of which the page says the short of it
        assert f"{status.name}: {status.value}, {EXPLANATIONS[status]}" in documented


def test_one_request_more_than_are_named_is_counted() -> None:
    requests = [support.standing(1, 10, seed) for seed in range(9)]
    for request in requests:
        request.p[0] = math.nan
    with pytest.raises(StatusError, match=r"; and 1 request more\. Tokens accepted"):
        support.verify("rejection", requests).raise_for_status()


@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_a_fault_of_rows_gets_advice_on_rows(value: float) -> None:
    """Of either kind by itself: rows of logits are negative, or do not sum to 1."""
    request = support.standing(2, 10, 0)
    request.p[2] *= value
    with pytest.raises(StatusError, match=r"target_logits and draft_logits take logits\.$"):
        support.verify("rejection", [request]).raise_for_status()
