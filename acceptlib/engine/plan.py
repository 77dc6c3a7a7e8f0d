"""What an engine needs to know of a strategy: its rules, its constants and its traits, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np
import torch

from acceptlib.errors import StrategyDefinitionError, short_repr, suggest
from acceptlib.ops import Value
from acceptlib.rules import ELEMENTS, SCALARS, RowSum, Rule, fails_on_any_values

Constant: TypeAlias = float | tuple[float, ...]
"""An option as rules see it; a tuple holds one value a position, and 0 beyond its end."""

INT32_MAX: Final = (1 << 31) - 1
"""Largest integer that a kernel takes."""

AFTER_CARRY: Final = frozenset({"next_residual_mass"})
"""Quantities that residuals, and so the carry, have to be known for: `accept` alone may read them."""

OF_ROWS: Final = frozenset(
    {"target_prob", "draft_prob", "target_max_prob", "draft_max_prob", "target_entropy", "target_top_entropy"}
)
"""Quantities that are numbers found in a position's rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What a strategy declares about itself, beyond its rules.

    Attributes:
        guarantee: `lossless`: emitted tokens follow the target's law. `greedy`: they are the target's argmax
            sequence. `lossy`: neither.
        bound: For lossy strategies, what is promised instead, in a few words.
        neutral: Options under which a lossy strategy equals `neutral_equals`, bit for bit.
        neutral_equals: Name of the strategy, itself not lossy, that it then equals.
        stop: `first_rejection`; `last_acceptance`: the largest accepted position stands, with all before it;
            `window`: a rejection that `forgive` allows stands if the next `window` tokens are accepted.
        recovered: `sample` draws the recovered token from the residual, `argmax` takes its largest entry.
        bonus: The same for the bonus token, from the target's bonus row.
        window: Length of the window, at most n_b - 1; a request with one drafted token has none.
        top_k: Entries behind `target_top_entropy`.
        state: Names of per-request quantities that the caller carries from step to step, and rules read: float64 per
            position, bool where the tensor is.
        topology: Shape of the draft. Only chains exist so far.
    """

    guarantee: Literal["lossless", "greedy", "lossy"]
    bound: str = ""
    neutral: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    neutral_equals: str = ""
    stop: Literal["first_rejection", "last_acceptance", "window"] = "first_rejection"
    recovered: Literal["sample", "argmax"] = "sample"
    bonus: Literal["sample", "argmax"] = "sample"
    window: int = 0
    top_k: int = 0
    state: tuple[str, ...] = ()
    topology: Literal["chain"] = "chain"

    def __post_init__(self) -> None:
        """Check the values: a wrong one would otherwise show much later."""
        for name, annotation in get_type_hints(Traits).items():
            choices = get_args(annotation)
            if get_origin(annotation) is Literal and getattr(self, name) not in choices:
                msg = f"Traits.{name}: expected {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}"
                raise StrategyDefinitionError(msg)
        kinds = {"bound": str, "neutral": Mapping, "neutral_equals": str}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                msg = f"Traits.{name}: expected a {kind.__name__}, got {short_repr(getattr(self, name))}"
                raise StrategyDefinitionError(msg)
        if bool(self.neutral) != bool(self.neutral_equals):
            msg = (
                f"Traits: expected neutral and neutral_equals together, got {self.neutral} and {self.neutral_equals!r}"
            )
            raise StrategyDefinitionError(msg)
        if self.guarantee != "lossy" and (self.bound or self.neutral):
            msg = (
                f"Traits: expected no bound and no neutral setting with guarantee={self.guarantee!r}, which promises "
                f"more, got bound={self.bound!r} and neutral={self.neutral}"
            )
            raise StrategyDefinitionError(msg)
        if not isinstance(self.state, tuple) or not all(isinstance(name, str) for name in self.state):
            msg = f"Traits.state: expected a tuple of str, got {self.state!r}"
            raise StrategyDefinitionError(msg)
        for name in ("window", "top_k"):
            number = getattr(self, name)
            if type(number) is not int or not 0 <= number <= INT32_MAX:
                msg = f"Traits.{name}: expected an int from 0 to {INT32_MAX}, got {short_repr(number)}"
                raise StrategyDefinitionError(msg)


TRIED, TRIED_FLAGS = np.full(2, 0.5), np.full(2, fill_value=True)
"""What rules are tried on."""

for _array in (TRIED, TRIED_FLAGS):
    _array.setflags(write=False)

INVERTED: Final = "~ of a bool option"

MISTAKES: Final = {
    "ambiguous": "branches on values that differ from token to token. An `if` may ask for options alone: use "
    "acceptlib.ops.where for the rest. `and`, `or`, `not`, `min`, `max` and a < b < c branch too: use &, |, ~, "
    "ops.minimum and ops.maximum.",
    "read-only": "writes into what it reads, as `x *= y` does, and others read that too: write `x = x * y`.",
    INVERTED: "inverts an option with `~`, which is -1 or -2 for a bool and so always true: write `not`.",
}
"""What a rule does, by a part of the error that it raises when it is tried."""


class _Flag(int):
    """Stands for an option that is a bool while a rule is tried."""

    def __invert__(self) -> int:
        """Refuse what gives -1 or -2, both of which count as true."""
        raise TypeError(INVERTED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A strategy with its options bound, as the engines take it. Plans compare by identity: engines cache by them.

    Attributes:
        name: Name of the strategy, for messages.
        accept: Probability of accepting the drafted token, given everything in `SCALARS`.
        carry: Next value of the running scalar, which starts at 1; None keeps it at 1.
        forgive: Whether a rejected token may stand if its followers are accepted (`stop="window"`).
        residual: Weight of each entry in the draw after a rejection, clamped at 0; None takes the target's row.
        row_sums: Elementwise functions whose sums over the row the rules read by name.
        constants: Options by name.
        traits: The strategy's traits, with options applied.
    """

    name: str
    accept: Rule
    carry: Rule | None
    forgive: Rule | None
    residual: Rule | None
    row_sums: Mapping[str, RowSum]
    constants: Mapping[str, Constant]
    traits: Traits

    def __post_init__(self) -> None:
        """Check every rule's parameters against what it may read."""
        quantities = {*SCALARS, *ELEMENTS, *self.row_sums, *self.traits.state}
        if taken := sorted(quantities & {*self.constants}):
            msg = f"strategy {self.name!r}: constants() returned {', '.join(taken)}, which already name quantities"
            raise StrategyDefinitionError(msg)
        known = {*SCALARS, *self.row_sums, *self.constants, *self.traits.state}
        self._check(self.accept, "accept", known)
        self._check(self.carry, "carry", known - AFTER_CARRY)
        self._check(self.forgive, "forgive", known - AFTER_CARRY)
        self._check(self.residual, "residual", (known - AFTER_CARRY) | {*ELEMENTS})
        for name, row_sum in self.row_sums.items():
            self._check(row_sum, name, {"target_prob", "draft_prob", "position", *self.constants, *ELEMENTS})
        if (self.traits.stop == "window") != (self.forgive is not None):
            msg = f"strategy {self.name!r}: a `forgive` rule and Traits(stop='window') go together"
            raise StrategyDefinitionError(msg)
        sizes = {
            "window": ("stop='window'", self.traits.stop == "window"),
            "top_k": ("a rule that reads target_top_entropy", "target_top_entropy" in self.reads),
        }
        for name, (user, is_there) in sizes.items():
            size = getattr(self.traits, name)
            if bool(size) != is_there:
                unused, needed = f" has no effect: expected {user} beside it", f": expected at least 1 for {user}"
                msg = f"strategy {self.name!r}: Traits.{name}{unused if size else needed + ', got 0'}"
                raise StrategyDefinitionError(msg)

    def _check(self, rule: Rule | None, role: str, known: set[str]) -> None:
        for name in rule.names if rule else ():
            if name not in known:
                msg = (
                    f"strategy {self.name!r}: rule {role!r} reads {name!r}, which it cannot.{suggest(name, known)} "
                    f"Available: {', '.join(sorted(known))}. Options are read as `constants()` gives them: numbers and "
                    "tuples of them. One that overrides it adds to what `super().constants()` returns."
                )
                raise StrategyDefinitionError(msg)
        if rule:
            self._try(rule, role)

    def _try(self, rule: Rule, role: str) -> None:
        """Evaluate a rule on two tokens at once, in arrays that it must not write to.

        A branch on a value that may differ between them fails. A strategy that is created in a compiled function goes
        without: torch's compiler would make the arrays writable, for good.
        """
        if torch.compiler.is_dynamo_compiling():
            return
        values: dict[str, Value] = {
            name: TRIED_FLAGS if name.startswith("is_") else TRIED
            for name in rule.names
            if not isinstance(self.constants.get(name), int | float)
        }
        options = {name: _Flag(value) if isinstance(value, bool) else value for name, value in self.constants.items()}
        try:
            with np.errstate(all="ignore"):
                found, again = (evaluate(rule, values, options) for _ in range(2))
        except Exception as error:
            # What else is wrong shows on real values.
            if fails_on_any_values(error.__cause__):
                raise
            for part, mistake in MISTAKES.items():
                if part in str(error):
                    msg = f"strategy {self.name!r}: rule {role!r} {mistake}"
                    raise StrategyDefinitionError(msg) from error
            return
        held = found is again and all(found is not value for value in values.values())
        if held and isinstance(found, np.ndarray | torch.Tensor) and found.ndim:
            what = "returns an array of its own, which an engine would write into: compute it of what the rule reads"
            msg = f"strategy {self.name!r}: rule {role!r} {what}"
            raise StrategyDefinitionError(msg)
        if role == "forgive" and np.asarray(found).dtype != bool:
            what = "whether a token may stand, as a comparison does"
            msg = f"strategy {self.name!r}: expected rule 'forgive' to return {what}, got {short_repr(found)}"
            raise StrategyDefinitionError(msg)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Every name that some rule reads."""
        rules = (self.accept, self.carry, self.forgive, self.residual, *self.used_row_sums.values())
        return frozenset(name for rule in rules if rule for name in rule.names)

    @cached_property
    def numbers(self) -> Mapping[str, float]:
        """Constants that are the same at every position."""
        return {name: value for name, value in self.constants.items() if not isinstance(value, tuple)}

    @cached_property
    def scalars(self) -> frozenset[str]:
        """Names among `reads` that are computed from rows, except argmaxes and residual masses."""
        return self.reads & {*OF_ROWS, *self.used_row_sums}

    @cached_property
    def used_row_sums(self) -> Mapping[str, RowSum]:
        """Row sums that some rule reads."""
        rules = (self.accept, self.carry, self.forgive, self.residual)
        read = {name for rule in rules if rule for name in rule.names}
        return {name: row_sum for name, row_sum in self.row_sums.items() if name in read}

    @cached_property
    def reads_draft(self) -> bool:
        """Whether the draft's rows matter at all."""
        return not self.reads.isdisjoint({"q", "draft_prob", "draft_max_prob"})

    @property
    def looks_ahead(self) -> bool:
        """Whether what is emitted at a position may depend on rows after it."""
        return self.traits.stop != "first_rejection" or not self.reads.isdisjoint(AFTER_CARRY)

    @cached_property
    def takes_argmaxes(self) -> bool:
        """Whether emitted tokens are the target's argmaxes, whatever else is given: matching drafts, and one more."""
        if self.traits.stop != "first_rejection" or self.reads != {"is_target_argmax"}:
            return False
        with np.errstate(all="ignore"):
            h = evaluate(self.accept, {"is_target_argmax": np.array([False, True])}, {})
        return not self.draws and np.array_equal(h, [0, 1])

    @cached_property
    def reads_entries_alone(self) -> bool:
        """Whether a chain ends at its first rejection, drafted entries alone decide, and draws read only `ELEMENTS`."""
        decides = {*self.accept.names} <= {"target_prob", "draft_prob", *self.numbers}
        draws = self.residual is None or {*self.residual.names} <= {*ELEMENTS, *self.numbers}
        kinds = (self.traits.stop, self.traits.recovered, self.traits.bonus)
        return decides and draws and self.carry is None and kinds == ("first_rejection", "sample", "sample")

    @property
    def samples(self) -> bool:
        """Whether any token is drawn rather than taken as an argmax."""
        return "sample" in {self.traits.recovered, self.traits.bonus}

    @property
    def draws(self) -> bool:
        """Whether any token is drawn, or taken from a residual."""
        return self.samples or self.residual is not None


def evaluate(rule: Rule, values: Mapping[str, Value], constants: Mapping[str, Constant]) -> Value:
    """Evaluate a rule in torch or NumPy on named values and constants; values win over constants of the same name."""
    return rule(*[values[name] if name in values else constants[name] for name in rule.names])
