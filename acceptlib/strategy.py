"""The interface: a strategy is a rule that returns a probability, its options and its traits."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping
from numbers import Number
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Union, get_args, get_origin

import pydantic
import torch

from acceptlib.checks import Arguments
from acceptlib.engine import backends, custom_op
from acceptlib.engine.plan import Constant, Plan, Traits
from acceptlib.errors import (
    InputError,
    OptionError,
    StrategyDefinitionError,
    expect_int,
    problems_of,
    short_repr,
    suggest,
)
from acceptlib.inputs import prepare
from acceptlib.result import VerifyResult
from acceptlib.rules import ELEMENTS, SCALARS, RowSum, Rule
from acceptlib.tensors import as_device
from acceptlib.workspace import Workspace

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from typing_extensions import Self

    from acceptlib.rng import Rng, Uniforms
    from acceptlib.sampling import SamplingParams

__all__ = ["INTERFACE_VERSION", "AcceptanceStrategy", "Options", "Traits"]

INTERFACE_VERSION: Final = 1
"""Version of this interface. Strategies state the one they were written for in `interface_version`."""

RULES: Final = ("accept", "carry", "forgive", "residual")
"""Names of a strategy's rules."""

NAME: Final = re.compile(r"[A-Za-z0-9]+([-_.]+[A-Za-z0-9]+)*")
"""What a strategy or an alias may be called: a word of a command line and of its lists, which commas separate."""


NO_NUMBERS: Final = {bool: "a flag", str: "a text", bytes: "bytes"}
"""What pydantic would turn into a number, in words."""


class Options(pydantic.BaseModel):
    """Base class of a strategy's options: unknown names are errors, values are validated and frozen."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=True, validate_default=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _expect_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Where numbers are expected, refuse NaN, and a flag or text that pydantic would turn into a number."""
        several = isinstance(value, list | tuple)
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation, several=several)
        for entry in value if several else (value,):
            plain = entry.item() if getattr(entry, "ndim", None) == 0 else entry  # a scalar of NumPy or torch
            given = next((NO_NUMBERS[kind] for kind in {*NO_NUMBERS} - kinds if isinstance(plain, kind)), "")
            if not several and isinstance(plain, Number) and plain != plain:  # noqa: PLR0124 - of any type
                given = "NaN"  # in a tuple it may say that a position has no number
            if kinds & {int, float} and given:
                msg = f"expected {'a number' if float in kinds else 'an integer'}, not {given}"
                raise ValueError(msg)
        return value


_Options = Options  # by a name that no attribute of the class below hides


def _is_constant(value: object) -> bool:
    """Return whether rules may read a value as it is."""
    entries = value if isinstance(value, tuple) else (value,)
    return all(isinstance(entry, int | float) for entry in entries)


def _kinds(annotation: Any, *, several: bool) -> set[Any]:
    """Return the types that an option may have, or with `several` those of a tuple's or list's entries."""
    found = _alternatives(annotation)
    if several:
        entries = [kind for part in found if get_origin(part) in {tuple, list} for kind in get_args(part)]
        found = [part for kind in entries for part in _alternatives(kind)]
    return {type(choice) for part in found if get_origin(part) is Literal for choice in get_args(part)} | {*found}


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types that a value may have, without the metadata of `Annotated`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _alternatives(parts[0])
    return [one for part in parts for one in _alternatives(part)] if origin in {Union, UnionType} else [annotation]


class AcceptanceStrategy:
    """Decides how many drafted tokens stand and draws the token that follows them.

    A subclass sets `name` and `traits`, nests an `Options` model if it has options, and writes its rules:

    - `accept` (required): the probability h that the drafted token is accepted. The engine draws u in [0, 1)
      and accepts where u < h.
    - `residual`: the weight of each vocabulary entry in the draw after a rejection, clamped at 0. Without this rule
      the recovered token comes from the target's row.
    - `carry`: a scalar, 1 at the start, carried from one position to the next.
    - `forgive`: for `Traits(stop="window")`, whether a rejected token may stand.

    Rules are decorated with `acceptlib.rule`, take no `self`, and read quantities (`acceptlib.rules.SCALARS`,
    `acceptlib.rules.ELEMENTS`), sums declared with `acceptlib.row_sum`, per-request state declared with
    `Traits(state=...)`, and options by parameter name. A strategy that does not fit this skeleton overrides `verify`
    whole.

    Attributes:
        name: Its name in configs and on the command line, such as `my-rule`.
        aliases: Other names for it, which subclasses do not inherit.
        traits: What it declares about itself.
        interface_version: The `INTERFACE_VERSION` it was written for; a published strategy states it as a number.
        options: The validated options of this instance.
        backend: `auto`, `torch` or `triton`.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits]
    interface_version: ClassVar[int] = INTERFACE_VERSION
    Options: ClassVar[type[Options]] = Options

    accept: ClassVar[Rule]
    carry: ClassVar[Rule | None] = None
    forgive: ClassVar[Rule | None] = None
    residual: ClassVar[Rule | None] = None

    plan: Plan | None = None
    """What the engines know of it; None if it overrides `verify`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check what can be checked when the class is written."""
        super().__init_subclass__(**kwargs)
        if "aliases" not in vars(cls):
            cls.aliases = ()  # they are the other strategy's
        for attribute, kind in (("name", str), ("traits", Traits)):
            value = getattr(cls, attribute, None)
            if not isinstance(value, kind):
                expected = f"expected a class attribute {attribute!r}, a {kind.__name__}"
                msg = f"strategy class {cls.__qualname__}: {expected}, got {short_repr(value)}. What strategies share "
                msg += "goes into a class of its own beside AcceptanceStrategy."
                raise StrategyDefinitionError(msg)
        if not (isinstance(cls.Options, type) and issubclass(cls.Options, _Options)):
            expected = "expected Options to derive from acceptlib.Options"
            msg = f"strategy {cls.name!r}: {expected}, got {short_repr(cls.Options)}"
            raise StrategyDefinitionError(msg)
        if not isinstance(cls.aliases, tuple) or not all(isinstance(alias, str) for alias in cls.aliases):
            msg = f"strategy {cls.name!r}: expected aliases, a tuple of str, got {cls.aliases!r}"
            raise StrategyDefinitionError(msg)
        for name in (cls.name, *cls.aliases):
            if not NAME.fullmatch(name):
                what = "a name like my-rule: ASCII letters and digits, with '-', '_' or '.' between them"
                msg = f"strategy class {cls.__qualname__}: expected {what}, got {name!r}"
                raise StrategyDefinitionError(msg)
        cls._check_rules()
        reserved = (*SCALARS, *ELEMENTS, "backend")
        counts = Counter((*reserved, *cls.Options.model_fields, *cls._row_sums(), *cls.traits.state))
        taken = sorted(name for name, count in counts.items() if count > 1)
        if taken:
            names = ", ".join(map(repr, taken))
            msg = f"strategy {cls.name!r}: rename what is named like a quantity, an argument or each other: {names}"
            raise StrategyDefinitionError(msg)

    def __init__(self, /, *, backend: backends.Choice = "auto", **options: Any) -> None:
        """Validate the options and bind them to the rules.

        Args:
            backend: `auto`, `torch` or `triton`.
            **options: The strategy's options.

        Raises:
            OptionError: An option does not exist or is out of range.
            BackendError: There is no such backend.
            StrategyDefinitionError: A rule reads a name that does not exist.
        """
        try:
            self._options = self.Options(**options)
        except pydantic.ValidationError as error:
            raise OptionError(_explain(self.name, self.Options, error)) from None
        self.backend = backend
        if type(self).verify is AcceptanceStrategy.verify:
            constants = self.constants()
            self._check_constants(constants)
            self._check_options(constants)
            traits = self.resolve_traits()
            if not isinstance(traits, Traits):
                msg = f"strategy {self.name!r}: expected `resolve_traits` to return Traits, got {short_repr(traits)}"
                raise StrategyDefinitionError(msg)
            self.plan = Plan(
                name=self.name,
                accept=self.accept,
                carry=self.carry,
                forgive=self.forgive,
                residual=self.residual,
                row_sums=self._row_sums(),
                constants=constants,
                traits=traits,
            )
            self._key = custom_op.register(self, self._options)

    @property
    def options(self) -> _Options:
        """The options that the rules are bound to; other options need another strategy."""
        return self._options

    @property
    def backend(self) -> backends.Choice:
        """`auto`, `torch` or `triton`.

        Raises:
            BackendError: It is set to anything else.
        """
        return self._backend

    @backend.setter
    def backend(self, choice: str) -> None:
        self._backend = backends.check(choice)

    def with_backend(self, choice: backends.Choice) -> Self:
        """Return the same strategy, with the same options, on another backend.

        Raises:
            BackendError: There is no such backend.
        """
        other = copy.copy(self)
        other.backend = choice
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which graphs know by a key of its own."""
        self.__dict__ |= state
        if "_key" in state:
            self._key = custom_op.register(self, self._options)

    def constants(self) -> dict[str, Constant]:
        """Return the constants that rules may read: by default every option that is a number or a tuple of numbers.

        Override it to derive constants from options. A tuple holds one value per position, and is 0 beyond its end.
        """
        return {name: value for name, value in self._options.model_dump().items() if _is_constant(value)}

    def resolve_traits(self) -> Traits:
        """Return the traits under this instance's options: by default those of the class."""
        return self.traits

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Return the state of new requests, to be passed to `verify` as `state`: tensors [num_requests] by name.

        A strategy with `Traits.state` overrides it, so that callers that run strategies by name can run it too.

        Raises:
            StrategyDefinitionError: The strategy has state and does not override this.
        """
        names = self.resolve_traits().state
        if names:
            msg = f"strategy {self.name!r} reads state ({', '.join(names)}): override `initial_state`, or pass `state`"
            raise StrategyDefinitionError(msg)
        return {}

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        """Advance `state` by one step, in place and without waiting for the device.

        The caller calls it after `verify`, with the step's result. By default nothing changes from step to step.
        """

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float | None:  # noqa: ARG002
        """Return by how much a law breaks `Traits.bound`, at most 0 where the bound holds; None if there is no bound.

        A lossy strategy overrides it so that `acceptlib.testing` can check its bound.

        Args:
            p: [V] float64, the target's row.
            q: [V] float64, the draft's row; one-hot where there is none.
            out: [V] float64, the law of the token emitted there, over drafts from `q` and over the uniforms.
        """
        return None

    def verify(  # noqa: PLR0913 - one call, documented argument by argument
        self,
        draft_token_ids: torch.Tensor,
        *,
        target_logits: torch.Tensor | None = None,
        target_probs: torch.Tensor | None = None,
        draft_logits: torch.Tensor | None = None,
        draft_probs: torch.Tensor | None = None,
        cu_num_draft_tokens: torch.Tensor | None = None,
        max_num_draft_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        draft_sampling: SamplingParams | None = None,
        rng: Rng | torch.Generator | int | None = None,
        bonus_token_ids: torch.Tensor | None = None,
        uniforms: Uniforms | None = None,
        state: Mapping[str, torch.Tensor] | None = None,
        logprobs: bool = False,
        out: VerifyResult | None = None,
        workspace: Workspace | None = None,
    ) -> VerifyResult:
        """Verify one step of drafted tokens for a batch of B requests.

        Request b has n_b drafted tokens, K is the largest n_b or more, T their sum. V is the target's vocabulary size,
        and V' the draft's, which may differ: entries that the draft lacks have probability 0, and those that it has
        beyond V are left out. A request's drafted token i is tested against its row i; the row after the last drafted
        token is its bonus row.

        Args:
            draft_token_ids: [T] (ragged) or [B, K] (padded), int32 or int64. The first negative id ends a request's
                chain, and the row at that position is its bonus row.
            target_logits: [T+B, V] or [B, K+1, V], float32, float16 or bfloat16. Row i of request b is at
                `cu_num_draft_tokens[b] + b + i` in the ragged layout.
            target_probs: The same rows as probabilities, already processed. Give exactly one of the two. With
                `bonus_token_ids`, and without `logprobs`, either may leave out the bonus rows: [T, V] or [B, K, V], row
                i of request b at `cu_num_draft_tokens[b] + i`.
            draft_logits: [T, V'] or [B, K, V'], the rows that the drafted tokens were drawn from.
            draft_probs: The same rows as probabilities. With neither, each draft is one-hot at its token (n-gram).
            cu_num_draft_tokens: [B+1] int32 or int64 with a leading 0, or [B] without it if there are as many
                `bonus_token_ids`. If given, the layout is ragged.
            max_num_draft_tokens: K for the ragged layout. Required off the CPU, where finding it would wait for the
                device.
            sampling: Per-request parameters applied to the target's logits, and to the draft's unless
                `draft_sampling` is given; the bitmask applies to the target's alone. Rules see processed rows.
            draft_sampling: Parameters that the draft's tokens were drawn under, where they differ.
            rng: Seeds and offsets per request. The offsets advance in place by one step unless `Rng.advances` is false.
                A `torch.Generator` (None: the default one) draws fresh seeds; an int derives them from the row number.
            bonus_token_ids: [B] tokens to emit where every drafted token stands. In the ragged layout, a chain that
                ends early at a negative id gets a token drawn from the row there instead.
            uniforms: Every random number of the call, instead of `rng`. Their values are not checked.
            state: The tensors that `Traits.state` names, [B] bool, int32, int64, float32 or float64. Only read here:
                call `update_state` after the step.
            logprobs: Also return the log-probability of each emitted token under the processed target row and under the
                raw one, before `sampling`.
            out: An earlier result of the same shapes, or `VerifyResult.empty`, written in place and returned.
            workspace: The result of `self.workspace`: the fused kernels use this memory and allocate none. The torch
                engine needs none.

        Returns:
            The emitted tokens, [B, K+1] int32 padded with -1, counts and status. Bad values inside tensors are
            reported there and by `raise_for_status()`, not raised here.

        Raises:
            InputError: Shapes, dtypes, devices or the combination of arguments do not fit.
            BackendError: The requested backend cannot run this call.
            StrategyDefinitionError: A subclass overrides `verify` and calls this one, or its `__init__` does not call
                super's.
        """
        plan = self.plan
        if plan is None:
            expected = "expected an `__init__` that calls super()'s"
            if type(self).verify is not AcceptanceStrategy.verify:
                expected = (
                    "expected the `verify` that overrides this one to do without it. To add to another strategy's, "
                    "hold an instance of that"
                )
            msg = f"strategy {self.name!r}: no engine has its rules; {expected}"
            raise StrategyDefinitionError(msg)
        arguments = Arguments(
            draft_token_ids=draft_token_ids,
            target_logits=target_logits,
            target_probs=target_probs,
            draft_logits=draft_logits,
            draft_probs=draft_probs,
            cu_num_draft_tokens=cu_num_draft_tokens,
            max_num_draft_tokens=max_num_draft_tokens,
            sampling=sampling,
            draft_sampling=draft_sampling,
            rng=rng,
            bonus_token_ids=bonus_token_ids,
            uniforms=uniforms,
            state=state,
            logprobs=logprobs,
            out=out,
            workspace=workspace,
        )
        if custom_op.is_traced(draft_token_ids):
            return custom_op.verify(self._key, arguments)
        if self.backend == "triton" and isinstance(draft_token_ids, torch.Tensor):
            backends.require("triton", draft_token_ids.device)  # before a generator is drawn from
        inputs = prepare(arguments, plan.traits.state)
        return backends.resolve(self.backend, inputs).verify(plan, inputs)

    def workspace(
        self, num_requests: int, max_num_draft_tokens: int, vocab_size: int, device: torch.device | str
    ) -> Workspace:
        """Allocate memory for `verify`, enough for every call of up to these sizes, and of at most B * K ids if ragged.

        With `out` and a workspace, a call that the fused kernels run allocates nothing on the device. The workspace is
        empty where the fused kernels run no call. It is also empty for a strategy with its own `verify`, which
        overrides this method if it needs memory.

        Args:
            num_requests: B.
            max_num_draft_tokens: K.
            vocab_size: V, the larger one where the draft's differs.
            device: Where the rows are.

        Raises:
            InputError: A size is not an int >= 0, or there is no such device.
        """
        device = as_device(device)
        sizes = {"num_requests": num_requests, "max_num_draft_tokens": max_num_draft_tokens, "vocab_size": vocab_size}
        for name, size in sizes.items():
            expect_int(name, size)
        if self.plan is None:
            return Workspace.allocate(0, 0, device)
        num_requests, max_num_draft_tokens, vocab_size = map(int, sizes.values())  # NumPy's too
        return backends.workspace(self.backend, self.plan, num_requests, max_num_draft_tokens, vocab_size, device)

    @classmethod
    def _check_rules(cls) -> None:
        for attribute, value in vars(cls).items():
            if type(value) is Rule and attribute not in RULES:
                msg = (
                    f"strategy {cls.name!r}: there is no rule {attribute!r}.{suggest(attribute, RULES)} "
                    f"Available: {', '.join(RULES)}."
                )
                raise StrategyDefinitionError(msg)
        for role in RULES if cls.verify is AcceptanceStrategy.verify else ():
            value = getattr(cls, role, None)
            if type(value) is not Rule and (value is not None or role == "accept"):
                instead = " or its own `verify`" if role == "accept" else ""
                expected = f"expected `{role}` to be a rule (decorated with @acceptlib.rule){instead}"
                msg = f"strategy {cls.name!r}: {expected}, got {short_repr(value)}"
                raise StrategyDefinitionError(msg)

    def _check_constants(self, constants: object) -> None:
        expected = "expected numbers by name, or tuples of one a position"
        if not isinstance(constants, Mapping):
            msg = f"strategy {self.name!r}: constants() returned {short_repr(constants)}: {expected}"
            raise StrategyDefinitionError(msg)
        for name, value in constants.items():
            if not _is_constant(value):
                msg = f"strategy {self.name!r}: constants() returned {short_repr(value)} as {name!r}: {expected}"
                raise StrategyDefinitionError(msg)

    def _check_options(self, constants: Mapping[str, Constant]) -> None:
        options = {name: value for name, value in self._options.model_dump().items() if not _is_constant(value)}
        rules = {role: rule for role in RULES if (rule := getattr(self, role)) is not None} | self._row_sums()
        for role, rule in rules.items():
            for name in rule.names:
                if name in options and name not in constants:
                    kind = type(options[name]).__name__
                    msg = (
                        f"strategy {self.name!r}: rule {role!r} reads option {name!r}, which is a {kind}; rules read "
                        "numbers only: override `constants()` to turn it into one, or a tuple of one a position"
                    )
                    raise StrategyDefinitionError(msg)

    @classmethod
    def _row_sums(cls) -> dict[str, RowSum]:
        names = (name for base in reversed(cls.__mro__) for name in vars(base))
        return {name: value for name in names if isinstance(value := getattr(cls, name), RowSum)}

    def __repr__(self) -> str:
        """Show the call that makes this strategy, as it would be if registered under its name."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.model_dump().items())
        backend = "" if self.backend == "auto" else f", backend={self.backend!r}"
        return f"acceptlib.create({self.name!r}{options}{backend})"


def expect_strategy(strategy: object, expected: str = "what acceptlib.create returns") -> AcceptanceStrategy:
    """Return a strategy as it is.

    Raises:
        InputError: It is none; `expected` says what would be.
    """
    if not isinstance(strategy, AcceptanceStrategy):
        msg = f"strategy: expected {expected}, got {short_repr(strategy)}"
        raise InputError(msg)
    return strategy


def _explain(name: str, options: type[Options], error: pydantic.ValidationError) -> str:
    known = sorted(options.model_fields)

    def say(option: str, detail: ErrorDetails) -> str:
        if detail["type"] == "extra_forbidden":
            available = f"Available: {', '.join(known)}." if known else "It has none."
            return f"Strategy {name!r} has no option {option}.{suggest(detail['loc'][-1], known)} {available}"
        if detail["type"] == "missing":
            return f"Strategy {name!r} needs option {option}, which has no default."
        if detail["loc"]:
            problem = detail["msg"].removeprefix("Value error, ")
            problem = problem[:1].upper() + problem[1:]
            return f"Strategy {name!r}, option {option}: got {short_repr(detail['input'])}. {problem}."
        return f"Strategy {name!r}: {detail['msg'].removeprefix('Value error, ')}."

    return problems_of(error, say)
