"""The interface that strategies are written against, built-in or not: its names, and what rules read and call."""

from __future__ import annotations

import ast
import dataclasses
import math
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from interface_cases import LOSSY, Lenient
from support import Request

import acceptlib
from acceptlib import AcceptanceStrategy, Options, Traits, VerifyResult, arrays, exact, ops, row_sum, rule
from acceptlib.errors import OptionError

PACKAGE = Path(acceptlib.__file__).parent
BUILT_INS = sorted(path for path in (PACKAGE / "strategies").glob("*.py") if path.name != "__init__.py")


def run(strategy: AcceptanceStrategy, requests: list[Request], **arguments: Any) -> VerifyResult:
    """Verify with a strategy that is not registered."""
    if "uniforms" not in arguments:
        arguments["rng"] = support.streams(range(len(requests)))
    return strategy.verify(**support.lay_out(requests), **arguments)


def test_public_names_are_pinned() -> None:
    assert acceptlib.__all__ == [
        "PLACEHOLDER_TOKEN_ID",
        "AcceptanceStrategy",
        "AcceptlibError",
        "LogitBias",
        "Options",
        "Rng",
        "SamplingParams",
        "Status",
        "Traits",
        "Uniforms",
        "VerifyResult",
        "Workspace",
        "available",
        "create",
        "from_config",
        "hookimpl",
        "ops",
        "pack_bitmask",
        "row_sum",
        "rule",
        "sample",
    ]
    for name in acceptlib.__all__:
        assert hasattr(acceptlib, name)
    assert acceptlib.__version__ == metadata.version("acceptlib")


def test_results_and_streams_equal_themselves_alone() -> None:
    """There is no one truth about two tensors."""
    cpu = torch.device("cpu")
    for make in (lambda: VerifyResult.empty(2, 3, cpu), lambda: acceptlib.Rng.of(0, 2, cpu)):
        first, second = make(), make()
        assert first == first  # noqa: PLR0124 - what is asked
        assert first != second


def test_tokens_as_lists() -> None:
    """Without padding, in either layout; of a faulty request, what it had accepted before."""
    requests = [support.standing(n, 10, seed) for seed, n in enumerate((3, 0, 2, 2))]
    requests[2].p[1] = math.nan
    requests[3].p[0] = math.nan
    for layout in ("ragged", "padded"):
        result = acceptlib.create("rejection").verify(**support.lay_out(requests, layout), rng=0)
        lists = result.to_lists()
        assert [len(tokens) for tokens in lists] == result.num_emitted.tolist() == [4, 1, 1, 0]
        assert lists == [support.tokens(result, b)[: len(tokens)] for b, tokens in enumerate(lists)]
        assert all(type(token) is int for tokens in lists for token in tokens)
    assert VerifyResult.empty(0, 3, "cpu").to_lists() == []


def test_a_status_has_a_name() -> None:
    probs = torch.full((1, 2, 4), torch.nan)
    result = acceptlib.create("rejection").verify(torch.zeros(1, 1, dtype=torch.int64), target_probs=probs, rng=0)
    assert acceptlib.Status(int(result.status)) is acceptlib.Status.INVALID_ROW


def test_a_sign_that_is_kept_apart_from_memory_is_read() -> None:
    """Torch has views whose numbers are those in memory, negated."""
    target, draft = (torch.rand(3, n, 9, generator=torch.Generator().manual_seed(n)) for n in (4, 3))
    ids = torch.tensor([[1, 2, 3]] * 3)
    for name in ("rejection", "greedy", "typical"):
        rows = {"target_logits": target, "draft_logits": draft}
        hidden = {key: torch._neg_view(-value) for key, value in rows.items()}
        for some in (slice(0, 1), slice(0, 3)):
            found, wanted = (
                acceptlib.create(name).verify(ids[some], **{key: value[some] for key, value in given.items()}, rng=3)
                for given in (hidden, rows)
            )
            assert torch.equal(found.output_token_ids, wanted.output_token_ids)


# A strategy of one's own


def test_strategy_of_ones_own() -> None:
    requests = [support.ordinary(n % 5, 11, seed=n) for n in range(40)]
    support.same(run(Lenient(bonus=1.0), requests), support.verify("rejection", requests))
    uniforms = support.streams(range(40)).uniforms(4)
    result = run(Lenient(), requests, uniforms=uniforms)
    for b, request in enumerate(requests):
        assert request.q is not None
        stood = 0
        while stood < request.n:
            token = request.ids[stood]
            p, q = (rows[stood, token].double() for rows in (request.p, request.q))
            if not uniforms.accept[b, stood] < min(1.5 * float(p / q), 1.0):
                break
            stood += 1
        assert int(result.num_accepted[b]) == stood
    assert repr(Lenient()) == "acceptlib.create('lenient', bonus=1.5)"
    assert repr(Lenient(backend="torch")) == "acceptlib.create('lenient', bonus=1.5, backend='torch')"
    with pytest.raises(OptionError, match="Did you mean 'bonus'"):
        Lenient(bonsu=2)


class OwnVerify(AcceptanceStrategy):
    """A strategy outside the skeleton."""

    name = "own-verify"
    traits = LOSSY

    def verify(self, draft_token_ids: torch.Tensor, **_: Any) -> VerifyResult:
        count, most = draft_token_ids.shape
        result = VerifyResult.empty(count, most, draft_token_ids.device)
        result.output_token_ids.fill_(-1)
        result.output_token_ids[:, 0] = 7
        result.num_accepted.fill_(0)
        result.num_emitted.fill_(1)
        result.status.fill_(0)
        return result


def test_strategy_may_override_verify_whole() -> None:
    """It needs no rule, and options and backends are checked as for any other."""
    strategy = OwnVerify(backend="torch")
    assert strategy.verify(torch.zeros(2, 3, dtype=torch.int64)).output_token_ids.tolist() == [[7, -1, -1, -1]] * 2
    with pytest.raises(OptionError, match="It has none"):
        OwnVerify(speed=1)


def test_a_strategy_with_its_own_verify_names_its_methods_as_it_likes() -> None:
    assert type("Own", (OwnVerify,), {"residual": lambda self: self})().residual


class Scheduled(AcceptanceStrategy):
    """Acceptance by position, from an option that is a tuple."""

    name = "scheduled"
    traits = LOSSY

    class Options(Options):
        schedule: tuple[float, ...] = (1.0, 0.5)

    @rule
    def accept(schedule: Any) -> Any:
        return schedule


def test_tuple_holds_one_value_a_position_and_0_beyond() -> None:
    requests = [support.ordinary(n, 11, seed=n) for n in (4, 1, 2, 0)]
    for schedule, u, stood in (
        ((1.0, 0.5), 0.4, [2, 1, 2, 0]),
        ((1.0, 0.5), 0.5, [1, 1, 1, 0]),
        ((1.0,) * 9, support.ALMOST_ONE, [4, 1, 2, 0]),
        ((), 0.0, [0, 0, 0, 0]),
    ):
        result = run(Scheduled(schedule=schedule), requests, uniforms=support.fixed(4, 4, u))
        assert result.num_accepted.tolist() == stood


class Weighted(AcceptanceStrategy):
    """A row sum with an option of each position, and options that no rule can read."""

    name = "weighted"
    traits = LOSSY

    class Options(Options):
        weights: tuple[float, ...] = (1.0, 0.0, 1.0)
        layers: tuple[tuple[int, int], ...] = ((1, 2),)
        words: tuple[str, ...] = ("a",)

    @row_sum
    def mass(p: Any, weights: Any) -> Any:
        return p * weights

    @rule
    def accept(mass: Any) -> Any:
        return mass


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_a_row_sum_may_have_a_constant_of_each_position(layout: str) -> None:
    strategy = Weighted(weights=(1.0, 1.0))
    requests = [support.ordinary(length, 11, length) for length in (3, 1, 2)]
    result = strategy.verify(**support.lay_out(requests, layout), rng=support.streams(range(3)))
    assert result.num_accepted.tolist() == [2, 1, 2]
    p, q = torch.full((4, 2), 0.5), torch.tensor([[0.75, 0.25]] * 3)
    assert exact.law(Weighted(), p, draft_token_ids=(0, 0, 0)) == {(0, 0): 0.5, (0, 1): 0.5}
    # Everything is rejected at the first row, and nothing at the second.
    figures = exact.step_figures(Weighted(weights=(0.0, 1.0)), torch.tensor([0, 0, 0]), p, q, num_visited=2)
    assert figures.tv == pytest.approx((0 + 0.25) / 2)


@pytest.mark.parametrize("view", [lambda p: p[:], lambda p: p.detach(), lambda p: p.view_as(p)])
@pytest.mark.parametrize("kind", [row_sum, rule])
def test_a_rule_that_returns_a_view_of_a_row_leaves_the_row_alone(kind: Any, view: Any) -> None:
    body: dict[str, Any] = {"name": "viewing", "traits": LOSSY}
    if kind is row_sum:
        body |= {"accept": rule(lambda mass: 0.0 * mass), "mass": row_sum(view)}
    else:
        body |= {"accept": rule(lambda target_prob: 0.0 * target_prob), "residual": rule(view)}
    strategy = type("Viewing", (AcceptanceStrategy,), body)()
    given = support.lay_out([support.ordinary(3, 11, 0)], "padded")
    rows = given["target_probs"].clone()
    assert run(strategy, [support.ordinary(3, 11, 0)]).status.tolist() == [0]
    assert strategy.verify(**given, rng=0).status.tolist() == [0]
    assert torch.equal(given["target_probs"], rows)


def test_a_rule_may_return_an_int() -> None:
    body: dict[str, Any] = {"name": "whole", "traits": LOSSY, "accept": rule(lambda: 0), "residual": rule(lambda: 1)}
    strategy = type("Whole", (AcceptanceStrategy,), body)()
    arguments = support.lay_out([support.ordinary(3, 11, 0)], "padded")
    for result in (strategy.verify(**arguments, rng=0), run(strategy, [support.ordinary(3, 11, 0)] * 2)):
        assert not result.num_accepted.any()
        assert {*result.status.tolist()} == {2}  # eleven ones sum to more than 4


class PointResidual(AcceptanceStrategy):
    """Rejects everything and never draws the drafted token, weighting the rest by what was drafted."""

    name = "point-residual"
    traits = LOSSY

    @rule
    def accept() -> Any:
        return 0.0

    @rule
    def residual(p: Any, is_drafted: Any, target_prob: Any) -> Any:
        return ops.where(is_drafted, 0.0, p * target_prob)


def test_residual_may_depend_on_the_drafted_token() -> None:
    count = 2000
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    requests = [Request(torch.tensor([0]), p.expand(2, -1), None)] * count
    bits = (torch.arange(count) * 2 + 1) * (2**64 // (2 * count) // 2)  # the lower half of r, evenly
    uniforms = acceptlib.Uniforms(accept=torch.zeros(count, 1, dtype=torch.float64), emit=bits)
    result = run(PointResidual(), requests, uniforms=uniforms)
    assert result.num_accepted.tolist() == [0] * count
    assert torch.bincount(result.output_token_ids[:, 0].long(), minlength=4).tolist() == [0, count, 0, 0]
    uniforms = dataclasses.replace(uniforms, emit=bits | -(2**63))  # the upper half
    result = run(PointResidual(), requests, uniforms=uniforms)
    assert torch.bincount(result.output_token_ids[:, 0].long(), minlength=4).tolist() == [0, 0, count // 2, count // 2]


class Distance(AcceptanceStrategy):
    """Accepts with the overlap of the two rows, a sum of its own."""

    name = "distance"
    traits = LOSSY

    @row_sum
    def distance(p: Any, q: Any) -> Any:
        return 0.5 * ops.abs(p - q)

    @rule
    def accept(distance: Any) -> Any:
        return 1.0 - distance


class DistanceBesideElements(Distance):
    """Also sums what it is given, each of which is 1: rows as they are, and one number of each."""

    name = "distance-beside-elements"

    @row_sum
    def a_mass(p: Any) -> Any:
        return p

    @row_sum
    def b_repeated(target_prob: Any) -> Any:
        return target_prob

    @row_sum
    def c_mass(p: Any) -> Any:
        return p

    @rule
    def accept(distance: Any, target_prob: Any, a_mass: Any, b_repeated: Any, c_mass: Any) -> Any:
        return (1.0 - distance) * a_mass * c_mass * b_repeated / (997 * target_prob)


@pytest.mark.parametrize("strategy", [Distance(), DistanceBesideElements()], ids=lambda strategy: strategy.name)
def test_row_sum_of_ones_own(strategy: AcceptanceStrategy) -> None:
    requests = [support.ordinary(3, 997, seed) for seed in range(30)]
    overlap = torch.stack([1 - 0.5 * (r.p[:3] - r.q).double().abs().sum(-1) for r in requests if r.q is not None])
    for offset, stood in ((-1e-6, 3), (1e-6, 0)):
        uniforms = acceptlib.Uniforms(accept=overlap + offset, emit=torch.zeros(30, dtype=torch.int64))
        assert run(strategy, requests, uniforms=uniforms).num_accepted.tolist() == [stood] * 30


class Weighed(AcceptanceStrategy):
    """Accepts where a sum of terms of either sign is as expected."""

    name = "weighed"
    traits = LOSSY

    class Options(Options):
        scale: float
        expected: float

    @row_sum
    def weight(p: Any, is_drafted: Any, scale: Any) -> Any:
        return ops.where(is_drafted, -p, p) * scale

    @rule
    def accept(weight: Any, expected: Any) -> Any:
        return ops.where(weight == expected, 1.0, 0.0)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(
    ("scale", "is_number"), [(2.0**18 - 0.5, True), (2.0**18, False), (2.0**20, False), (2.0**24, False)]
)
def test_a_row_sum_beyond_the_limit_is_nan(scale: float, *, negative: bool, is_number: bool) -> None:
    """Whether or not half of its terms have the other sign."""
    target = torch.zeros(2, 997)
    target[:, 3] = target[:, 500] = 0.5
    drafted = torch.tensor([[3 if negative else 4]])
    strategy = Weighed(scale=scale, expected=0.0 if negative else scale)
    result = strategy.verify(drafted, target_probs=target[None], rng=0)
    assert result.num_accepted.tolist() == [is_number]
    law = exact.law(strategy, target, num_draft_tokens=1, draft_token_ids=(drafted.item(),))
    assert {len(emitted) for emitted in law} == {2 if is_number else 1}


@pytest.mark.parametrize(("scale", "is_number"), [(2.0**18 - 33, True), (2.0**18 - 32, False)])
def test_the_limit_of_a_row_sum_is_the_same_for_equal_terms(scale: float, *, is_number: bool) -> None:
    """Of which a bound by the row's norm is no larger than what their magnitudes sum to.

    Those of four are rounded: to 1023.75, or up to 1024.
    """
    target = torch.full((2, 1024), 2.0**-10)
    strategy = Weighed(scale=scale, expected=scale * (1 - 2.0**-9))  # the drafted token's term has the other sign
    assert strategy.verify(torch.tensor([[4]]), target_probs=target[None], rng=0).num_accepted.tolist() == [is_number]


def test_what_a_row_sum_has_room_for_is_what_its_terms_sum_to() -> None:
    """Terms that are few or many may sum to it, beside rows whose sums are none."""
    target = torch.full((3, 2, 1 << 17), 2.0**-17)
    target[1, :, :9] = torch.nan
    target[2, :, -9:] = 1.0
    strategy = Weighed(scale=2.0**17, expected=2.0**17 - 2.0)
    drafted = torch.full((3, 1), 50)
    assert strategy.verify(drafted, target_probs=target, rng=0).num_accepted.tolist() == [1, 0, 0]


@pytest.mark.parametrize("length", [4, 7, 8])
def test_terms_of_a_row_sum_are_added_up_in_fours(length: int) -> None:
    """(a + b) + (c + d) as float32, where a + b + c + d is more, also in the last four, which may be short."""
    target = torch.zeros(2, length)
    for start in range(0, length, 4):
        target[:, start] = 0.5
        target[:, start + 1 : start + 3] = 2.0**-25
    drafted = torch.tensor([[3]])
    for expected, stands in ((0.5 * -(-length // 4), True), (target[0].double().sum().item(), False)):
        result = Weighed(scale=1.0, expected=expected).verify(drafted, target_probs=target[None], rng=0)
        assert result.num_accepted.tolist() == [stands]


class Sure(AcceptanceStrategy):
    """Accepts where the draft is sure of some token."""

    name = "sure"
    traits = LOSSY

    @rule
    def accept(draft_max_prob: Any) -> Any:
        return ops.where(draft_max_prob > 0.5, 1.0, 0.0)


@pytest.mark.parametrize("form", ["probs", "logits"])
def test_the_largest_entry_of_a_draft_may_be_beyond_the_vocabulary(form: str) -> None:
    target, draft = torch.full((1, 2, 4), 0.25), torch.tensor([[[0.1, 0.1, 0.1, 0.1, 0.6]]])
    rows = {"target": target, "draft": draft}
    given = {f"{model}_{form}": value.log() if form == "logits" else value for model, value in rows.items()}
    assert Sure().verify(torch.tensor([[1]]), **given, rng=0).num_accepted.tolist() == [1]


class EveryQuantity(AcceptanceStrategy):
    """Reads all there is, and accepts where it is as documented."""

    name = "every-quantity"
    traits = Traits(guarantee="lossy", bound="none", top_k=2)

    @rule
    def carry(carry: Any) -> Any:
        return 0.5 * carry

    @rule
    def accept(  # noqa: PLR0917 - all of them
        position: Any,
        num_draft_tokens: Any,
        is_last: Any,
        is_target_argmax: Any,
        carry: Any,
        target_max_prob: Any,
        target_prob: Any,
        draft_max_prob: Any,
        draft_prob: Any,
        target_entropy: Any,
        target_top_entropy: Any,
        next_residual_mass: Any,
    ) -> Any:
        right = (
            (num_draft_tokens == 3.0)
            & (is_last == (position == 2.0))
            & (carry == 0.5 * ops.exp(-0.6931471805599453 * position))
        )
        right = right & (is_target_argmax == (target_prob == target_max_prob)) & (draft_prob <= draft_max_prob)
        right = right & (ops.abs(target_entropy - 0.6931471805599453) < 1e-6)
        right = right & (ops.abs(target_top_entropy - 0.6931471805599453) < 1e-6)
        return ops.where(right & (next_residual_mass == ops.where(is_last, 0.0, 1.0)), 1.0, 0.0)


def test_quantities_are_as_documented() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0])
    request = Request(torch.tensor([0, 2, 1]), p.expand(4, -1), torch.full((3, 4), 0.25))
    result = run(EveryQuantity(), [request] * 2, uniforms=support.fixed(2, 3, support.ALMOST_ONE))
    assert result.num_accepted.tolist() == [2, 2]  # token 1 ties with the argmax, which is token 0


def test_a_branch_on_an_option() -> None:
    class Switch(AcceptanceStrategy):
        name, traits = "switch", LOSSY

        class Options(acceptlib.Options):
            careful: float = 1.0

        @rule
        def accept(target_prob: Any, careful: Any) -> Any:
            return target_prob if careful > 0 else 1.0

    numbers = acceptlib.Uniforms(accept=torch.tensor([[0.2, 0.3]], dtype=torch.float64), emit=torch.tensor([1]))
    call = {"target_probs": torch.full((1, 3, 4), 0.25), "uniforms": numbers}
    for careful, accepted in ((1.0, 1), (0.0, 2)):
        result = Switch(careful=careful).verify(torch.zeros(1, 2, dtype=torch.int64), **call)
        assert result.num_accepted.tolist() == [accepted]


def test_inherited_rules_can_be_replaced() -> None:
    """A subclass keeps what it does not write."""

    class Never(Lenient):
        name = "never"

        @rule
        def accept() -> Any:
            return 0.0

    requests = [support.ordinary(3, 11, seed) for seed in range(5)]
    assert run(Never(), requests).num_accepted.tolist() == [0] * 5
    assert Never().options.model_dump() == {"bonus": 1.5}
    assert Never.residual is Lenient.residual


def test_a_later_row_has_a_say_by_the_stop_or_by_a_rule() -> None:
    def looks_ahead(stop: str, accept: Any) -> bool:
        body = {"name": "looking", "traits": dataclasses.replace(LOSSY, stop=stop), "accept": rule(accept)}
        return type("Looking", (AcceptanceStrategy,), body)().plan.looks_ahead

    assert not looks_ahead("first_rejection", lambda target_prob: target_prob)
    assert looks_ahead("last_acceptance", lambda target_prob: target_prob)
    assert looks_ahead("first_rejection", lambda next_residual_mass: next_residual_mass)


# Functions that rules call


def test_numbers_alone_have_limits_too() -> None:
    assert (ops.ratio(1.0, 0), ops.ratio(0, 0.0), ops.ratio(1, 4)) == (math.inf, 0.0, 0.25)


@pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["array", "tensor"])
def test_a_ratio_of_nan_accepts_nothing(convert: Callable[[list[float]], Any]) -> None:
    """As in a kernel: of 1 - ratio, say, with a sum over a row that has no law."""
    a, b = convert([math.nan, math.inf, 1.0, 0.0, 1.0, 0.0]), convert([1.0, math.inf, math.nan, math.nan, 0.0, 0.0])
    expected = [math.nan, math.nan, 0.0, 0.0, math.inf, 0.0]
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(ops.ratio(a, b), expected)
        np.testing.assert_array_equal(ops.ratio(a[:1], 2.0), expected[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_over_a_tensor_is_rounded_once(dtype: torch.dtype) -> None:
    """As in a kernel. Torch's own operator takes a product with the reciprocal, an ulp off for one in ten."""
    below = torch.rand(1000, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected = np.array(0.05, below.numpy().dtype) / below.numpy()
    assert np.array_equal(ops.ratio(0.05, below).numpy(), expected)
    assert ops.ratio(0.05, below).dtype == dtype
    assert not np.array_equal((0.05 / below).numpy(), expected)


@pytest.fixture(params=[False, True], ids=["torch's logarithms", "NumPy's"])
def numpy_takes_logarithms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have logarithms taken by either library, whatever this processor is good at."""
    monkeypatch.setattr(arrays, "_has_wide_logarithms", lambda: request.param)
    monkeypatch.setattr(torch, "get_num_threads", lambda: arrays.FEW_THREADS)
    return bool(request.param)


@pytest.mark.usefixtures("numpy_takes_logarithms")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_logarithm_takes_what_torch_takes(dtype: torch.dtype) -> None:
    numbers = torch.tensor([0.0, 0.25, 1.0, 3.0, torch.inf, -1.0], dtype=dtype)
    found = ops.log(numbers)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == dtype
    rtol = torch.finfo(dtype).eps * (2 if dtype == torch.float32 else 1)
    torch.testing.assert_close(found, torch.log(numbers), rtol=rtol, atol=0.0, equal_nan=True)
    slope = torch.full((), 4.0, dtype=dtype, requires_grad=True)
    ops.log(slope).backward()
    assert slope.grad == 0.25


def test_a_logarithm_to_base_2_is_within_two_units_of_the_last_place(*, numpy_takes_logarithms: bool) -> None:
    numbers = torch.cat([torch.rand(100_001, generator=torch.manual_seed(0)), torch.logspace(-38, 38, 10_001)])
    exact = numbers.double().log2()
    unit = torch.nextafter(exact.abs().float(), torch.tensor(torch.inf)) - exact.abs().float()
    found = ops.log2(numbers)
    assert torch.equal(found, torch.log2(numbers)) != numpy_takes_logarithms
    assert ((found - exact).abs() <= (2.1 if numpy_takes_logarithms else 1.0) * unit).all()
    # Whoever is near, and wherever it lies.
    assert torch.equal(ops.log2(numbers[7:1000:3]), found[7:1000:3])
    assert torch.equal(ops.log2(numbers[None].expand(2, -1)), found[None].expand(2, -1))


@pytest.mark.usefixtures("numpy_takes_logarithms")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_logarithm_to_base_2_of_another_dtype_is_torchs(dtype: torch.dtype) -> None:
    numbers = torch.rand(1001, generator=torch.manual_seed(0)).to(dtype)
    for guard in (0.0, 2.0**-7):
        assert torch.equal(ops.log2(numbers, guard), torch.log2(numbers + guard))


def test_a_numpy_that_cannot_tell_takes_no_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 2.1."""
    monkeypatch.delattr(np.lib, "introspect", raising=False)
    monkeypatch.delitem(sys.modules, "numpy.lib.introspect", raising=False)
    monkeypatch.setattr(np.lib, "__path__", [])
    assert not arrays._has_wide_logarithms.__wrapped__()


def test_many_threads_take_logarithms_sooner_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_has_wide_logarithms", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: arrays.FEW_THREADS + 1)
    numbers = torch.rand(100_001, generator=torch.manual_seed(0))
    assert torch.equal(ops.log2(numbers), torch.log2(numbers))


def test_a_guarded_logarithm_is_that_of_the_sum_and_leaves_its_argument_alone(*, numpy_takes_logarithms: bool) -> None:
    row = torch.tensor([0.0, 1e-6, 0.3, 1.0])
    given = row.clone()
    found = ops.log2(row, 1e-5)
    assert torch.equal(found, ops.log2(row + 1e-5))
    assert numpy_takes_logarithms or torch.equal(found, torch.log2(row + 1e-5))
    assert torch.equal(row, given)
    assert np.array_equal(ops.log2(row.double().numpy(), 1e-5), np.log2(row.double().numpy() + 1e-5))
    assert ops.log2(0.25) == ops.log2(0.0, 0.25) == -2
    slope = torch.zeros(1, requires_grad=True)
    ops.log2(slope, 0.5).backward()
    assert slope.grad is not None
    assert slope.grad.item() == pytest.approx(2 / ops.LN_2)


@pytest.mark.parametrize("name", ["exp", "log", "log2", "sqrt"])
@pytest.mark.parametrize("number", [0.0, 0, -1.0, 2, 1000.0, math.inf, True, np.bool_(1), np.float32(0.1), np.int64(3)])
def test_functions_of_plain_numbers_are_those_of_arrays(name: str, number: float) -> None:
    """Beyond what they are defined for too: options are plain numbers."""
    function = getattr(ops, name)
    found = function(number)
    assert type(found) is float
    with np.errstate(all="ignore"):
        for value in (
            function(np.array([number], np.float64)),
            function(torch.tensor([float(number)], dtype=torch.float64)),
        ):
            assert found == pytest.approx(float(value[0]), rel=1e-14, nan_ok=True)


# The built-ins' files


@pytest.mark.parametrize("path", BUILT_INS, ids=lambda path: path.stem)
def test_built_in_is_one_short_file_that_states_its_terms(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 1
    docstring = ast.get_docstring(classes[0])
    assert docstring is not None
    paragraphs = docstring.split("\n\n")
    for heading in ("Guarantee: ", "Formula: ", "Source: "):
        assert sum(paragraph.startswith(heading) for paragraph in paragraphs) == 1, heading
    name = path.stem.replace("_", "-")
    assert acceptlib.create(name).name == name
    assert type(acceptlib.create(name)).__name__ == classes[0].name


def strings(path: Path) -> set[str]:
    """Return the string constants of a file, without docstrings and the words of `Literal[...]`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    literals = (
        node.slice
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"
    )
    words = {id(inner) for literal in literals for inner in ast.walk(literal)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in words)
    return {node.value for node in constants if isinstance(node.value, str)}


@pytest.mark.parametrize(
    "path",
    [*sorted(PACKAGE.glob("*.py")), *sorted((PACKAGE / "engine").rglob("*.py"))],
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_no_built_in_is_special(path: Path) -> None:
    """Only the list in `strategies` knows their names: what they may do, a plugin's strategy may."""
    names = {
        name
        for built_in in (acceptlib.create(p.stem.replace("_", "-")) for p in BUILT_INS)
        for name in (built_in.name, *built_in.aliases)
    }
    assert strings(path).isdisjoint(names)
