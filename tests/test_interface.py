"""The interface that strategies are written against, and what is said of a class that does not fit it."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import support
import torch
from support import Request

import acceptlib
from acceptlib import AcceptanceStrategy, Options, Traits, VerifyResult, arrays, exact, ops, row_sum, rule
from acceptlib.errors import BackendError, InputError, OptionError, StrategyDefinitionError

PACKAGE = Path(acceptlib.__file__).parent
BUILT_INS = sorted(path for path in (PACKAGE / "strategies").glob("*.py") if path.name != "__init__.py")
LOSSY = Traits(guarantee="lossy", bound="none")


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


# A strategy of one's own


class Lenient(AcceptanceStrategy):
    """Rejection sampling with a bonus for the draft: what a newcomer writes first."""

    name = "lenient"
    traits = LOSSY

    class Options(Options):
        bonus: float = 1.5

    @rule
    def accept(target_prob: Any, draft_prob: Any, bonus: Any) -> Any:
        return ops.minimum(bonus * ops.ratio(target_prob, draft_prob), 1.0)

    @rule
    def residual(p: Any, q: Any) -> Any:
        return p - q


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
    with pytest.raises(OptionError, match="Did you mean 'bonus'"):
        Lenient(bonsu=2)


class OwnVerify(AcceptanceStrategy):
    """A strategy outside the skeleton."""

    name = "own-verify"
    traits = LOSSY

    def verify(self, draft_token_ids: torch.Tensor, **_: Any) -> VerifyResult:
        count, most = draft_token_ids.shape
        result = VerifyResult.empty(count, most, draft_token_ids.device, logprobs=False)
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


def test_a_verify_that_calls_the_one_it_overrides_is_told_what_to_do() -> None:
    class Counting(Lenient):
        name = "counting"

        def verify(self, draft_token_ids: torch.Tensor, **arguments: Any) -> VerifyResult:  # type: ignore[override]
            return super().verify(draft_token_ids, **arguments)

    with pytest.raises(StrategyDefinitionError, match=r"'counting': no engine has its rules.* hold an instance"):
        Counting().verify(torch.zeros(1, 0, dtype=torch.int64), target_probs=torch.ones(1, 1, 1))


def test_an_init_without_supers() -> None:
    class Bare(Lenient):
        name = "bare"

        def __init__(self) -> None:
            pass

    with pytest.raises(StrategyDefinitionError, match="'bare': no engine has its rules; expected an `__init__`"):
        Bare().verify(torch.zeros(1, 0, dtype=torch.int64), target_probs=torch.ones(1, 1, 1))


def test_options_are_acceptlibs() -> None:
    with pytest.raises(
        StrategyDefinitionError, match=r"expected Options to derive from acceptlib\.Options, got <class"
    ):

        class Loose(Lenient):
            name = "loose"

            class Options(pydantic.BaseModel):  # type: ignore[assignment]
                floor: float = 0.5


def test_constants_name_no_quantity() -> None:
    class Shadow(Lenient):
        name = "shadow"

        def constants(self) -> dict[str, Any]:
            return {"position": 0.0, "p": 1.0}

    with pytest.raises(StrategyDefinitionError, match=r"constants\(\) returned p, position, which already name"):
        Shadow()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda target_prob: torch.clamp(target_prob, max=1), "clamp.*use acceptlib.ops"),
        (lambda target_prob: 1.0 - math.exp(target_prob), "use acceptlib.ops"),
        (lambda target_prob: "h", "returned 'h': expected a number or an array"),  # noqa: ARG005
    ],
)
def test_what_a_rule_cannot_take_or_return(function: Any, says: str) -> None:
    strategy = made(LOSSY, accept=rule(function))()
    with pytest.raises(StrategyDefinitionError, match=says):
        strategy.verify(torch.zeros(1, 2, dtype=torch.int64), target_probs=torch.ones(1, 3, 1))


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


# Classes that do not fit


def test_strategy_needs_a_name() -> None:
    with pytest.raises(StrategyDefinitionError, match="Nameless: expected a class attribute 'name', a str"):

        class Nameless(AcceptanceStrategy):
            traits = LOSSY


def test_strategy_needs_traits() -> None:
    with pytest.raises(StrategyDefinitionError, match="Traitless: expected a class attribute 'traits', a Traits"):

        class Traitless(AcceptanceStrategy):
            name = "traitless"


@pytest.mark.parametrize("accept", [None, lambda target_prob: target_prob], ids=["missing", "undecorated"])
def test_strategy_needs_an_accept_rule(accept: Any) -> None:
    body = {"name": "ruleless", "traits": LOSSY, **({"accept": accept} if accept else {})}
    said = r"'ruleless': expected `accept` to be a rule .* or its own `verify`"
    with pytest.raises(StrategyDefinitionError, match=said):
        type("Ruleless", (AcceptanceStrategy,), body)


def test_aliases_are_a_tuple() -> None:
    """A lone string would become an alias a letter."""
    with pytest.raises(StrategyDefinitionError, match="aliases"):
        type("Lone", (Lenient,), {"name": "lone", "aliases": ("penny")})


@pytest.mark.parametrize("name", ["", "my rule", "a,b", " a", "-a", "a-", "a=1", "a/b", "a\n", "é"])
@pytest.mark.parametrize("attribute", ["name", "aliases"])
def test_name_is_a_word_of_a_command_line(attribute: str, name: str) -> None:
    body = {"name": "wordy", attribute: name if attribute == "name" else ("penny", name)}
    with pytest.raises(StrategyDefinitionError, match="expected a name like my-rule") as caught:
        type("Wordy", (Lenient,), body)
    assert str(caught.value).endswith(f"got {name!r}")


@pytest.mark.parametrize("name", ["a", "entropy-scaled", "2-fast", "top_H", "v1.5", "a--b"])
def test_name_may_be_any_such_word(name: str) -> None:
    assert type("Wordy", (Lenient,), {"name": name, "aliases": (f"{name}-too",)})().name == name


def test_definition_error_is_a_type_error_of_the_tree() -> None:
    assert issubclass(StrategyDefinitionError, TypeError)
    assert issubclass(StrategyDefinitionError, acceptlib.AcceptlibError)


def test_results_and_streams_equal_themselves_alone() -> None:
    """There is no one truth about two tensors."""
    cpu = torch.device("cpu")
    for make in (lambda: VerifyResult.empty(2, 3, cpu), lambda: acceptlib.Rng.of(0, 2, cpu)):
        first, second = make(), make()
        assert first == first  # noqa: PLR0124 - what is asked
        assert first != second


def test_a_status_has_a_name() -> None:
    probs = torch.full((1, 2, 4), torch.nan)
    result = acceptlib.create("rejection").verify(torch.zeros(1, 1, dtype=torch.int64), target_probs=probs, rng=0)
    assert acceptlib.Status(int(result.status)) is acceptlib.Status.INVALID_ROW


@pytest.mark.parametrize(("sizes", "device"), [((-1, 2, 3), "cpu"), ((1, 2.0, 3), "cpu"), ((1, 2, 3), "foo")])
def test_a_workspace_of_no_size(sizes: Any, device: str) -> None:
    with pytest.raises(InputError, match=r"expected num_requests|device 'foo'"):
        acceptlib.create("rejection").workspace(*sizes, device)


def test_what_rules_were_bound_to_stays() -> None:
    """Options that were set later would be shown, and do nothing."""
    strategy = acceptlib.create("lenience", lenience=0.5)
    with pytest.raises(AttributeError, match="options"):
        strategy.options = acceptlib.create("lenience").options  # type: ignore[misc]
    with pytest.raises(BackendError, match=r"Unknown backend 'troch'\. Did you mean 'torch'\?"):
        strategy.backend = "troch"
    strategy.backend = "torch"
    assert strategy.backend == "torch"


@pytest.mark.parametrize("backend", [None, 5, "tritn"])
def test_an_unknown_backend(backend: Any) -> None:
    with pytest.raises(BackendError, match=r"Unknown backend .*Available: auto, torch, triton"):
        acceptlib.create("rejection", backend=backend)


@pytest.mark.parametrize("role", ["accept", "residual"])
def test_a_branch_on_what_differs_from_token_to_token(role: str) -> None:
    """Also where a single token would let it pass."""
    rules = {role: rule(lambda target_prob: 1.0 if target_prob > 1 / 2 else 0.0)}
    with pytest.raises(StrategyDefinitionError, match=rf"rule '{role}' branches on values .* acceptlib\.ops\.where"):
        made(**rules)()


def test_numbers_alone_have_limits_too() -> None:
    assert (ops.ratio(1.0, 0), ops.ratio(0, 0.0), ops.ratio(1, 4)) == (math.inf, 0.0, 0.25)


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


def test_an_entropy_of_no_entries() -> None:
    with pytest.raises(StrategyDefinitionError, match=r"of Traits\.top_k entries: expected at least 1, got 0"):
        made(LOSSY, accept=rule(lambda target_top_entropy: target_top_entropy))()


@pytest.mark.parametrize("default", ["self", "default", "keyword", "star"])
def test_rule_takes_plain_parameters(default: str) -> None:
    functions = {
        "self": lambda self, target_prob: target_prob,  # noqa: ARG005 - what it is refused for
        "default": lambda target_prob=1.0: target_prob,
        "keyword": lambda *, target_prob: target_prob,
        "star": lambda *target_prob: target_prob,
    }
    with pytest.raises(StrategyDefinitionError, match=r"expected plain parameters without defaults.*takes no self"):
        rule(functions[default])


def made(traits: Traits = LOSSY, **body: Any) -> type[AcceptanceStrategy]:
    """Return a strategy class of the given rules."""
    body = {"accept": rule(lambda target_prob: target_prob), **body}
    return type("Made", (AcceptanceStrategy,), {"name": "made", "traits": traits, **body})


@pytest.mark.parametrize(
    ("role", "function", "fragments"),
    [
        ("accept", lambda target_probs: target_probs, ["'accept' reads 'target_probs'", "Did you mean 'target_prob'"]),
        ("accept", lambda p: p, ["'accept' reads 'p'"]),
        ("carry", lambda next_residual_mass: next_residual_mass, ["'carry' reads 'next_residual_mass'"]),
        ("residual", lambda next_residual_mass: next_residual_mass, ["'residual' reads 'next_residual_mass'"]),
        ("residual", lambda p, weight: p * weight, ["'residual' reads 'weight'", "Available: "]),
    ],
    ids=["misspelt", "row-in-a-scalar-rule", "carry-sees-ahead", "residual-sees-ahead", "missing-option"],
)
def test_rule_reads_what_there_is(role: str, function: Any, fragments: list[str]) -> None:
    with pytest.raises(StrategyDefinitionError) as caught:
        made(**{role: rule(function)})()
    for fragment in ("strategy 'made'", *fragments):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("role", ["accept", "carry", "residual"])
def test_rule_without_a_return_is_named(role: str) -> None:
    """By the engine, and by the exact law."""

    def forgotten(target_prob: Any) -> Any:
        ops.minimum(target_prob, 0.5)

    strategy = made(**{role: rule(forgotten)})()
    ids, p = torch.tensor([[0]]), torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    said = r"forgotten' returned None: .*is a `return` missing\?"
    with pytest.raises(StrategyDefinitionError, match=said):
        strategy.verify(ids, target_probs=p)
    with pytest.raises(StrategyDefinitionError, match=said):
        exact.law(strategy, p[0], draft_token_ids=(0,))


@pytest.mark.parametrize(
    ("role", "expected"), [("accept", r"\[1, 1\]"), ("residual", r"\[1, 2\]")], ids=["accept", "residual"]
)
def test_rule_that_changes_the_shape_is_refused(role: str, expected: str) -> None:
    strategy = made(**{role: rule(lambda: torch.ones(3))})()
    ids, p = torch.tensor([[0]]), torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    with pytest.raises(StrategyDefinitionError, match=rf"elementwise: .*for {expected}, got \[3\]"):
        strategy.verify(ids, target_probs=p)


def test_row_sum_reads_rows_and_options() -> None:
    with pytest.raises(StrategyDefinitionError, match=r"'mass' reads 'carry', which it cannot.*`constants\(\)`"):
        made(mass=row_sum(lambda p, carry: p * carry), accept=rule(lambda mass: mass))()


@pytest.mark.parametrize("name", ["target_prob", "carry", "p", "is_drafted", "position"])
def test_option_and_row_sum_may_not_be_named_like_a_quantity(name: str) -> None:
    with pytest.raises(StrategyDefinitionError, match=f"'made': {name} already name"):
        made(Options=type("Options", (Options,), {"__annotations__": {name: float}, name: 1.0}))
    if name != "carry":  # which is a rule's name as well
        with pytest.raises(StrategyDefinitionError, match=f"'made': {name} already name"):
            made(**{name: row_sum(lambda p: p)})


@pytest.mark.parametrize("role", ["accept", "carry", "forgive", "residual"])
def test_a_rule_that_is_not_marked(role: str) -> None:
    """A plain function, which no engine could read."""
    said = rf"'made': expected `{role}` to be a rule \(decorated with @acceptlib.rule\).*, got <function"
    with pytest.raises(StrategyDefinitionError, match=said):
        made(**{role: lambda target_prob: target_prob})


def test_a_strategy_with_its_own_verify_names_its_methods_as_it_likes() -> None:
    assert type("Own", (OwnVerify,), {"residual": lambda self: self})().residual


def test_a_rule_that_there_is_not() -> None:
    """It would be left out without a word."""
    with pytest.raises(
        StrategyDefinitionError, match=r"no rule 'residul'. Did you mean 'residual'\? Available: accept"
    ):
        made(residul=rule(lambda p, q: p - q))


def test_an_option_may_not_be_named_like_an_argument() -> None:
    """`create(..., backend=...)` would never set it."""
    with pytest.raises(StrategyDefinitionError, match="'made': backend already name"):
        made(Options=type("Options", (Options,), {"__annotations__": {"backend": float}, "backend": 1.0}))


@pytest.mark.parametrize("forgives", [True, False], ids=["forgive-without-window", "window-without-forgive"])
def test_forgive_and_window_go_together(forgives: bool) -> None:  # noqa: FBT001
    windowed = dataclasses.replace(LOSSY, stop="window", window=2)
    strategy = made(forgive=rule(lambda target_prob: target_prob > 0)) if forgives else made(traits=windowed)
    with pytest.raises(StrategyDefinitionError, match=r"a `forgive` rule and Traits\(stop='window'\) go together"):
        strategy()


@pytest.mark.parametrize("name", ["window", "top_k"])
@pytest.mark.parametrize(
    "number",
    ["3", -1, 2.5, True, None, 1 << 31, 1 << 100_000],
    ids=["text", "below", "part", "flag", "none", "large", "huge"],
)
def test_numbers_of_traits_are_counts(name: str, number: Any) -> None:
    """Some would fail at the first call, and some never."""
    with pytest.raises(StrategyDefinitionError, match=rf"Traits\.{name}: expected an int from 0 to 2147483647, got"):
        Traits(guarantee="lossy", stop="window", **{name: number})


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


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Lenient().options.bonus = 2.0  # type: ignore[attr-defined]


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
    assert acceptlib.create(path.stem).name == path.stem
    assert type(acceptlib.create(path.stem)).__name__ == classes[0].name


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
        for built_in in map(acceptlib.create, (p.stem for p in BUILT_INS))
        for name in (built_in.name, *built_in.aliases)
    }
    assert strings(path).isdisjoint(names)


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


@pytest.mark.parametrize("given", [{"neutral": {"lenience": 1.0}}, {"neutral_equals": "rejection"}])
def test_a_neutral_setting_says_what_it_equals(given: dict[str, Any]) -> None:
    with pytest.raises(StrategyDefinitionError, match="expected neutral and neutral_equals together"):
        Traits(guarantee="lossy", **given)
