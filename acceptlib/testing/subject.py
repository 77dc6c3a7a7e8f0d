"""What a check is given: a strategy, where it runs, and calls that are the same on every device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeAlias, cast

import torch

from acceptlib import exact
from acceptlib.engine import backends
from acceptlib.engine.plan import Plan
from acceptlib.errors import ConformanceError, short_repr
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng
from acceptlib.strategy import AcceptanceStrategy, Traits
from acceptlib.tensors import STATE_DTYPES
from acceptlib.testing.batches import VOCABULARY, Request, generator, lay_out, streams

VerifyArguments: TypeAlias = Callable[[int, torch.device], Mapping[str, Any]]
"""From B and a device to further arguments of `verify`, such as per-request tensors [B, ...] that rules read."""

CAPACITY: Final = 256
"""Keys of requests are below it: per-request arguments are made for so many requests, then looked up by key."""

LENGTHS: Final = (5, 4, 3)
"""Requests with state have 0 to 3 steps behind them, of so many drafted tokens below `VOCABULARY`."""

STEPS: Final = len(LENGTHS) + 1


class Skipped(Exception):  # noqa: N818 - nothing is wrong: the check does not apply
    """A check cannot say anything about this strategy here; the message says why."""


def require(condition: bool, message: str) -> None:  # noqa: FBT001 - as `assert`
    """Raise `ConformanceError` unless `condition` holds."""
    if not condition:
        raise ConformanceError(message)


def no_arguments(_num_requests: int, _device: torch.device) -> Mapping[str, Any]:
    """Return no further arguments."""
    return {}


@dataclass(frozen=True)
class Subject:
    """A strategy under test.

    Attributes:
        strategy: The instance.
        device: Where its tensors live.
        verify_arguments: Further arguments of every call.
    """

    strategy: AcceptanceStrategy
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    verify_arguments: VerifyArguments = no_arguments

    @property
    def traits(self) -> Traits:
        """What the strategy declares under its options."""
        return self.strategy.resolve_traits()

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter, which takes some 30 ms for each request."""
        on = os.environ.get("TRITON_INTERPRET") == "1"
        return on and self.device.type == "cpu" and self.strategy.backend != "torch"

    @property
    def plan(self) -> Plan:
        """The rules.

        Raises:
            Skipped: The strategy overrides `verify` whole and has none.
        """
        plan = self.strategy.plan
        if plan is None:
            msg = "the strategy overrides verify whole and has no rules to look at"
            raise Skipped(msg)
        return plan

    def require_rules(self) -> None:
        """Raise `Skipped` if the strategy overrides `verify` whole and has no rules."""
        _ = self.plan

    def on_backend(self, choice: backends.Choice) -> Subject:
        """Return the same strategy on another backend."""
        return replace(self, strategy=self.strategy.with_backend(choice))

    def with_strategy(self, strategy: AcceptanceStrategy) -> Subject:
        """Return another strategy in the same place."""
        return replace(self, strategy=strategy)

    def verify(
        self,
        requests: Sequence[Request],
        layout: str = "padded",
        form: str = "probs",
        *,
        draft: bool = True,
        **arguments: Any,
    ) -> VerifyResult:
        """Verify requests; each has the stream of its key unless `rng` or `uniforms` is given."""
        if not {"rng", "uniforms"} & arguments.keys():
            arguments["rng"] = streams(request.key for request in requests)
        laid_out = lay_out(requests, layout, form, draft=draft)
        return self.call([request.key for request in requests], **{**laid_out, **arguments})

    def call(self, keys: Sequence[int], **arguments: Any) -> VerifyResult:
        """Call `verify` on the device for the requests of these keys; tensors already there are passed as they are."""
        found: object = self.strategy.verify(**self.place(arguments), **self.further(keys))
        require(isinstance(found, VerifyResult), f"verify returned {short_repr(found)}, expected a VerifyResult")
        return cast("VerifyResult", found)

    def further(self, keys: Sequence[int]) -> dict[str, Any]:
        """Return fresh further arguments for the requests of these keys: a strategy may write to them.

        Requests are at different steps, so their states differ as far as `update_state` changes them; key 0's is new. A
        state that `verify_arguments` gives is left as it is.
        """
        given = self.verify_arguments(CAPACITY, self.device)
        state = {} if "state" in given else self._carried
        arguments = {**({"state": state} if state else {}), **given}
        return _select(arguments, torch.tensor(list(keys), dtype=torch.int64))

    @cached_property
    def _carried(self) -> Mapping[str, torch.Tensor]:
        """The state of each key after `key % STEPS` steps of its own, all of them possible steps."""
        arguments = self.further_of_new(CAPACITY)
        state: Mapping[str, torch.Tensor] = arguments.get("state", {})
        strategy = self.on_backend("torch").strategy  # every engine emits the same tokens
        key = torch.arange(CAPACITY)
        for step, length in enumerate(LENGTHS if state else (), 1):
            source = generator(step)
            logits = 2 * torch.randn(CAPACITY, length + 1, VOCABULARY, generator=source)
            q = (logits[:, :length] + torch.randn(CAPACITY, length, VOCABULARY, generator=source)).softmax(-1)
            ids = torch.multinomial(q.flatten(0, 1), 1, generator=source).view(CAPACITY, length)
            # A rule may let few tokens stand, but the target's argmaxes among them: 0 to 5 of these come first.
            best = torch.arange(length) < (key // STEPS % (LENGTHS[0] + 1))[:, None]
            ids = torch.where(best, logits[:, :length].argmax(-1), ids)
            rows = {"draft_token_ids": ids, "target_probs": logits.softmax(-1), "draft_probs": q}
            before = {name: value.clone() for name, value in state.items()}
            result = strategy.verify(**self.place(rows), **arguments, rng=self.streams(key.tolist()))
            try:
                strategy.update_state(state, result)
            except (Exception, SystemExit) as error:
                msg = f"update_state, after a step of {CAPACITY} requests, raised {type(error).__name__}: {error}"
                raise ConformanceError(msg) from error
            found, wanted = _described(state), _described(before)
            require(found == wanted, f"update_state left {found} in `state`, expected {wanted}: write into its tensors")
            done = (key % STEPS < step).to(self.device)
            for name, value in state.items():
                value[done] = before[name][done]
        return state

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """One key for each distinct state among requests, a new request's first; 0 alone without state."""
        values = {name: value.tolist() for name, value in self.state(range(CAPACITY)).items()}
        first: dict[str, int] = {}
        for key in range(CAPACITY if values else 1):
            first.setdefault(str([value[key] for value in values.values()]), key)
        return tuple(first.values())

    @cached_property
    def moments(self) -> tuple[int, ...]:
        """Keys of up to `STEPS` different states to check laws in: 0, which is new, then ones that are steps apart."""
        steps: dict[int, int] = {}
        for key in self.distinct:
            steps.setdefault(key % STEPS, key)
        found = [*steps.values(), *(key for key in self.distinct if key not in steps.values())]
        return tuple(sorted(found[:STEPS]))

    def having(self, key: int) -> str:
        """Return the state that rules read of a key's request, for the end of a message."""
        if self.strategy.plan is None:
            return ""
        return "".join(f", {name} = {value.item()}" for name, value in self.state([key]).items())

    @cached_property
    def state_problem(self) -> str:
        """What is wrong with the state of new requests; empty where nothing is."""
        count, names = 3, self.traits.state
        if "state" in self.verify_arguments(count, self.device):
            return ""
        asked = f"initial_state({count}, {str(self.device)!r})"
        try:
            state: object = self.strategy.initial_state(count, self.device)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what it raises is what is wrong with it
            return f"{asked} raised {type(error).__name__}: {error}"
        if isinstance(state, Mapping):
            own = self.strategy.plan is None  # what its own `verify` takes is its own business
            if own and {*names} <= {*state}:
                return ""
            if {*names} == {*state} and all(_is_state(value, count, self.device) for value in state.values()):
                return ""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES)
        wanted = f"a dict with a tensor [{count}] on {self.device} (one of {dtypes}) for each of these names"
        found = f"{asked} returned {_described(state)}, but Traits.state is {names}"
        return f"{found}: return {wanted if names else '{}'}"

    def law(
        self,
        target: torch.Tensor | exact.Model,
        draft: torch.Tensor | exact.Model | None = None,
        *,
        key: int = 0,
        **arguments: Any,
    ) -> dict[tuple[int, ...], float]:
        """Return `acceptlib.exact.law` of the rules, in the state of a key's request; key 0's is new.

        Raises:
            Skipped: The strategy overrides `verify` whole and has none.
        """
        self.require_rules()
        return exact.law(self.strategy, target, draft, **arguments, state=self.state([key]) or None)

    def state(self, keys: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the state of the requests of these keys on the CPU, [n] by name, for the exact law."""
        state = self.further(keys).get("state", {})
        return {name: value.cpu() for name, value in state.items()} if isinstance(state, Mapping) else {}

    def further_of_new(self, num_requests: int) -> dict[str, Any]:
        """Return the further arguments for so many requests, all new unless `verify_arguments` gives their state."""
        given = self.verify_arguments(num_requests, self.device)
        state = {} if "state" in given else self.strategy.initial_state(num_requests, self.device)
        return {**({"state": state} if state else {}), **given}

    def place(self, value: Any) -> Any:
        """Return tensors, and what holds them, on the device."""
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        if isinstance(value, Mapping):
            return {name: self.place(entry) for name, entry in value.items()}
        if not is_dataclass(value) or isinstance(value, type):
            return value
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        moved = {name: self.place(part) for name, part in parts.items()}
        # The same object if nothing moved: `out` is returned, and offsets are advanced, in place.
        return value if all(moved[name] is part for name, part in parts.items()) else type(value)(**moved)

    def streams(self, keys: Sequence[int]) -> Rng:
        """Return streams at step 0 on the device."""
        placed: Rng = self.place(streams(keys))
        return placed


def _select(arguments: Mapping[str, Any], keys: torch.Tensor) -> dict[str, Any]:
    """Return arguments made for `CAPACITY` requests, for some of them."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            found[name] = _select(value, keys)
        elif isinstance(value, torch.Tensor) and value.ndim and len(value) == CAPACITY:
            found[name] = value[keys.to(value.device)]
        else:
            found[name] = value
    return found


def _is_state(value: object, count: int, device: torch.device) -> bool:
    """Return whether a value is a state of `count` requests that rules can read."""
    if not isinstance(value, torch.Tensor) or value.device.type != device.type:
        return False
    return value.shape == (count,) and value.dtype in STATE_DTYPES


def _described(value: object) -> str:
    """Return what a value is in a few words, without the entries of tensors."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_described(entry)}" for name, entry in value.items()) + "}"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
