"""What the interface refuses: classes, rules and traits that do not fit it, and what no strategy can be given."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from interface_cases import LOSSY, Lenient

import acceptlib
from acceptlib import AcceptanceStrategy, Options, Traits, VerifyResult, exact, ops, row_sum, rule
from acceptlib.errors import BackendError, InputError, StrategyDefinitionError
from acceptlib.ops import Value
from acceptlib.strategies.rejection import Rejection


def made(traits: Traits = LOSSY, **body: Any) -> type[AcceptanceStrategy]:
    """Return a strategy class of the given rules."""
    body = {"accept": rule(lambda target_prob: target_prob), **body}
    return type("Made", (AcceptanceStrategy,), {"name": "made", "traits": traits, **body})


def test_definition_error_is_a_type_error_of_the_tree() -> None:
    assert issubclass(StrategyDefinitionError, TypeError)
    assert issubclass(StrategyDefinitionError, acceptlib.AcceptlibError)


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


def test_a_tuple_has_no_entries_to_pick() -> None:
    class Levels(AcceptanceStrategy):
        name = "levels"
        traits = Traits(guarantee="lossy", bound="none")

        class Options(Options):
            levels: tuple[float, ...] = (0.5, 0.2)

        @rule
        def accept(levels: Any, position: Any) -> Any:
            return levels[position]

    with pytest.raises(StrategyDefinitionError, match=r"rule '.*accept': .* is its value at the position already"):
        exact.law(Levels(), torch.tensor([[0.5, 0.5]] * 3), torch.tensor([[0.5, 0.5]] * 2))


def test_resolved_traits_are_traits() -> None:
    class Nameless(AcceptanceStrategy):
        name = "no-traits"
        traits = Traits(guarantee="lossy", bound="none")

        @rule
        def accept(target_prob: Any) -> Any:
            return target_prob

        def resolve_traits(self) -> Traits:
            return None  # type: ignore[return-value]

    with pytest.raises(StrategyDefinitionError, match="expected `resolve_traits` to return Traits, got None"):
        Nameless()


@pytest.mark.parametrize("name", ["a", "entropy-scaled", "2-fast", "top_H", "v1.5", "a--b"])
def test_name_may_be_any_such_word(name: str) -> None:
    assert type("Wordy", (Lenient,), {"name": name, "aliases": (f"{name}-too",)})().name == name


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


@pytest.mark.parametrize("name", ["target_prob", "carry", "p", "is_drafted", "position"])
def test_option_and_row_sum_may_not_be_named_like_a_quantity(name: str) -> None:
    with pytest.raises(StrategyDefinitionError, match=f"'made': rename what is named like .* each other: '{name}'$"):
        made(Options=type("Options", (Options,), {"__annotations__": {name: float}, name: 1.0}))
    if name != "carry":  # which is a rule's name as well
        with pytest.raises(
            StrategyDefinitionError, match=f"'made': rename what is named like .* each other: '{name}'$"
        ):
            made(**{name: row_sum(lambda p: p)})


def test_an_option_may_not_be_named_like_an_argument() -> None:
    """`create(..., backend=...)` would never set it."""
    with pytest.raises(StrategyDefinitionError, match=r"'made': rename what is named like .* each other: 'backend'$"):
        made(Options=type("Options", (Options,), {"__annotations__": {"backend": float}, "backend": 1.0}))


def test_several_names_that_are_taken() -> None:
    options = type("Options", (Options,), {"__annotations__": {"q": float, "p": float}, "p": 1.0, "q": 1.0})
    with pytest.raises(StrategyDefinitionError, match=r"'made': rename what is named like .* each other: 'p', 'q'$"):
        made(Options=options)


def test_a_rule_that_reads_a_text() -> None:
    options = type("Options", (Options,), {"__annotations__": {"mode": str}, "mode": "fast"})
    strategy = made(Options=options, accept=rule(lambda target_prob, mode: target_prob * mode))
    message = r"rule 'accept' reads option 'mode', which is a str; rules read numbers only: override `constants\(\)`"
    with pytest.raises(StrategyDefinitionError, match=message):
        strategy()
    strategy.constants = lambda self: {"mode": {"fast": 1.0}[self.options.mode]}  # type: ignore[attr-defined]
    assert strategy().plan.constants == {"mode": 1.0}


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


@pytest.mark.parametrize(
    ("trait", "need"), [("window", "stop='window'"), ("top_k", "a rule that reads target_top_entropy")]
)
def test_a_trait_without_an_effect(trait: str, need: str) -> None:
    with pytest.raises(StrategyDefinitionError, match=rf"Traits\.{trait} has no effect: expected {need} beside it"):
        made(traits=dataclasses.replace(LOSSY, **{trait: 3}))()


def test_an_entropy_of_no_entries() -> None:
    expected = r"Traits\.top_k: expected at least 1 for a rule that reads target_top_entropy, got 0"
    with pytest.raises(StrategyDefinitionError, match=expected):
        made(LOSSY, accept=rule(lambda target_top_entropy: target_top_entropy))()


def test_a_window_of_no_tokens() -> None:
    """`forgive` would never be asked."""
    windowed = dataclasses.replace(LOSSY, stop="window")
    with pytest.raises(StrategyDefinitionError, match=r"Traits\.window: expected at least 1 for stop='window', got 0"):
        made(traits=windowed, forgive=rule(lambda target_prob: target_prob > 0))()


@pytest.mark.parametrize("promise", [{"bound": "TV <= 1"}, {"neutral": {"a": 1.0}, "neutral_equals": "rejection"}])
@pytest.mark.parametrize("guarantee", ["lossless", "greedy"])
def test_a_promise_beside_a_guarantee_that_says_more(guarantee: Any, promise: dict[str, Any]) -> None:
    with pytest.raises(StrategyDefinitionError, match=f"no bound and no neutral setting with guarantee='{guarantee}'"):
        Traits(guarantee=guarantee, **promise)


@pytest.mark.parametrize("given", [{"neutral": {"lenience": 1.0}}, {"neutral_equals": "rejection"}])
def test_a_neutral_setting_says_what_it_equals(given: dict[str, Any]) -> None:
    with pytest.raises(StrategyDefinitionError, match="expected neutral and neutral_equals together"):
        Traits(guarantee="lossy", **given)


@pytest.mark.parametrize("given", [{"bound": None}, {"neutral": [1]}, {"neutral_equals": 1}], ids=str)
def test_traits_of_another_type(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(StrategyDefinitionError, match=rf"Traits\.{name}: expected a (str|Mapping), got"):
        Traits(guarantee="lossy", **given)


# Rules that do not fit


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda target_prob: torch.clamp(target_prob, max=1), r"max=int\)\. Rules.*use acceptlib.ops"),
        (lambda target_prob: 1.0 - math.exp(target_prob), "use acceptlib.ops"),
        (lambda target_prob: "h", "returned 'h': expected a number or an array"),  # noqa: ARG005
    ],
)
def test_what_a_rule_cannot_take_or_return(function: Any, says: str) -> None:
    strategy = made(LOSSY, accept=rule(function))()
    with pytest.raises(StrategyDefinitionError, match=says):
        strategy.verify(torch.zeros(1, 2, dtype=torch.int64), target_probs=torch.ones(1, 3, 1))


def test_a_name_that_a_rule_has_not() -> None:
    """It is found before there are any values."""
    with pytest.raises(StrategyDefinitionError, match=r"rule '.*<lambda>': name 'oops' is not defined\.$"):
        made(accept=rule(lambda target_prob: target_prob * oops))()  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (lambda target_prob, floor: target_prob * (1 / floor), r"zero\. Numbers of options.* acceptlib\.ops\.ratio\.$"),
        (lambda target_prob, floor: target_prob + math.exp(1000 - floor), "error. Numbers of options .* of them.$"),
        (lambda target_prob: ops.minimun(target_prob, 1.0), r"Did you mean 'minimum'\? Available: abs, .* where\.$"),
    ],
    ids=["divides", "overflows", "misspells"],
)
def test_what_no_value_could_mend(written: Any, said: str) -> None:
    """It is found before there are any values, and names the rule, whichever engine would run it."""
    options = type("Options", (Options,), {"__annotations__": {"floor": float}, "floor": 0.0})
    for role in ("accept", "residual"):
        with pytest.raises(StrategyDefinitionError, match=rf"^rule '.*<lambda>': .*{said}"):
            made(**{role: rule(written)}, Options=options)()


@pytest.mark.parametrize("constants", [None, [1], {"rates": None}, {"rates": [0.5]}, {"rates": (0.5, "x")}])
def test_constants_that_no_rule_can_read(constants: Any) -> None:
    strategy = made(accept=rule(lambda target_prob, rates: target_prob * rates), constants=lambda _: constants)
    with pytest.raises(StrategyDefinitionError, match=r"strategy 'made': constants\(\) returned .* tuples of one a"):
        strategy()


@pytest.mark.parametrize("role", ["accept", "residual"])
def test_a_branch_on_what_differs_from_token_to_token(role: str) -> None:
    """Also where a single token would let it pass."""
    rules = {role: rule(lambda target_prob: 1.0 if target_prob > 1 / 2 else 0.0)}
    with pytest.raises(StrategyDefinitionError, match=rf"rule '{role}' branches on values .* acceptlib\.ops\.where"):
        made(**rules)()


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


@pytest.mark.parametrize("role", ["accept", "carry", "forgive", "residual"])
def test_a_rule_that_is_not_marked(role: str) -> None:
    """A plain function, which no engine could read."""
    said = rf"'made': expected `{role}` to be a rule \(decorated with @acceptlib.rule\).*, got <function"
    with pytest.raises(StrategyDefinitionError, match=said):
        made(**{role: lambda target_prob: target_prob})


def test_a_rule_that_is_misspelt() -> None:
    """And not that it is missing, which it is too."""
    with pytest.raises(StrategyDefinitionError, match=r"no rule 'acept'. Did you mean 'accept'\?"):
        made(accept=None, acept=rule(lambda target_prob: target_prob))


def test_a_rule_that_there_is_not() -> None:
    """It would be left out without a word."""
    with pytest.raises(
        StrategyDefinitionError, match=r"no rule 'residul'. Did you mean 'residual'\? Available: accept"
    ):
        made(residul=rule(lambda p, q: p - q))


# What no strategy can be given


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Lenient().options.bonus = 2.0  # type: ignore[attr-defined]


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


@pytest.mark.parametrize(("sizes", "device"), [((-1, 2, 3), "cpu"), ((1, 2.0, 3), "cpu"), ((1, 2, 3), "foo")])
def test_a_workspace_of_no_size(sizes: Any, device: str) -> None:
    with pytest.raises(InputError, match=r"expected an int >= 0|device 'foo'"):
        acceptlib.create("rejection").workspace(*sizes, device)


# Rules that are no rules, or that do what only one engine would do


@pytest.mark.parametrize("function", [staticmethod(abs), functools.partial(abs, 1), max, 3, rule(lambda p: p)], ids=str)
@pytest.mark.parametrize("mark", [rule, row_sum])
def test_a_rule_is_a_plain_function(mark: Any, function: Any) -> None:
    with pytest.raises(StrategyDefinitionError, match=rf"^acceptlib\.{mark.__name__}: expected a plain function"):
        mark(function)


def halves_in_place(target_prob: Value) -> Value:
    target_prob *= 0.5
    return target_prob


def halves_an_alias(target_prob: Value) -> Value:
    h = target_prob
    h *= 0.5
    return h


def halves_its_own(target_prob: Value) -> Value:
    h = 1.0 * target_prob
    h *= 0.5
    return h


@pytest.mark.parametrize("function", [halves_in_place, halves_an_alias])
@pytest.mark.parametrize("role", ["accept", "carry"])
def test_a_rule_that_writes_into_what_it_reads(role: str, function: Any) -> None:
    """Kernels bind a name anew; an array would be changed for every rule that reads it."""
    with pytest.raises(StrategyDefinitionError, match=f"rule '{role}' writes into what it reads"):
        made(**{role: rule(function)})()
    ids, probs = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    halved = made(accept=rule(halves_its_own))().verify(ids, target_probs=probs, draft_probs=probs[:, :1], rng=0)
    assert int(halved.status) == 0


def test_a_residual_that_writes_into_a_row() -> None:
    def residual(p: Value, q: Value) -> Value:
        p -= q
        return p

    with pytest.raises(StrategyDefinitionError, match="rule 'residual' writes into what it reads"):
        made(residual=rule(residual))()


@pytest.mark.parametrize(
    "held", [torch.full((3,), 1 / 3), torch.tensor([[-0.5, 0.75, 0.75]]), np.full(3, 1 / 3)], ids=str
)
def test_a_rule_that_returns_an_array_of_its_own_is_refused(held: Any) -> None:
    """The engine would clamp and scale it in place, and the next call would find that."""
    with pytest.raises(StrategyDefinitionError, match="rule 'residual' returns an array of its own"):
        made(residual=rule(lambda: held))()


def test_a_flag_is_inverted_with_not() -> None:
    """`~False` is -1 and `~True` is -2, both of which count as true."""
    options = type("Options", (Options,), {"__annotations__": {"strict": bool}, "strict": False})

    def inverted(target_prob: Value, strict: Value) -> Value:
        return ops.where((target_prob < 0.5) & ~strict, 0.0, target_prob)

    def negated(target_prob: Value, strict: Value) -> Value:
        return target_prob if not strict else ops.where((target_prob < 0.5) & strict, 0.0, target_prob)

    with pytest.raises(StrategyDefinitionError, match=r"rule 'accept' inverts an option with `~`.*: write `not`"):
        made(Options=options, accept=rule(inverted))()
    made(Options=options, accept=rule(negated))(strict=True)


def test_forgive_says_whether() -> None:
    traits = Traits(guarantee="lossy", bound="none", stop="window", window=1)
    with pytest.raises(StrategyDefinitionError, match="expected rule 'forgive' to return whether a token may stand"):
        made(traits, forgive=rule(lambda target_prob: target_prob))()
    made(traits, forgive=rule(lambda target_prob: target_prob > 0))()
    made(traits, forgive=rule(lambda: True))()


def test_forgive_may_return_a_flag() -> None:
    traits = Traits(guarantee="lossy", bound="none", stop="window", window=1)
    made(traits, forgive=rule(lambda is_target_argmax: is_target_argmax))()


def test_forgive_sees_no_later_row() -> None:
    traits = Traits(guarantee="lossy", bound="none", stop="window", window=1)
    with pytest.raises(StrategyDefinitionError, match="'forgive' reads 'next_residual_mass', which it cannot"):
        made(traits, forgive=rule(lambda next_residual_mass: next_residual_mass > 0))()


def test_a_row_sum_is_no_rule() -> None:
    with pytest.raises(StrategyDefinitionError, match=r"expected `residual` to be a rule .*, got <RowSum"):
        made(residual=row_sum(lambda p, q: p - q))


def test_aliases_are_not_inherited() -> None:
    """They are the built-in strategy's, and a package that took them would be refused them by name."""
    assert Rejection.aliases
    assert type("Mine", (Rejection,), {"name": "mine"}).aliases == ()
    assert type("Mine", (Rejection,), {"name": "mine", "aliases": ("ours",)}).aliases == ("ours",)


def test_constants_that_leave_options_out() -> None:
    options = type("Options", (Options,), {"__annotations__": {"decay": float}, "decay": 0.5})
    body = {"Options": options, "accept": rule(lambda target_prob, decay: target_prob * decay)}
    with pytest.raises(
        StrategyDefinitionError, match=r"reads 'decay', which it cannot.*adds to what `super\(\)\.const"
    ):
        made(**body, constants=lambda _: {"half": 0.5})()
