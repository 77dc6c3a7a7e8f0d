"""What a check is given: a strategy, where it runs, and calls that are the same on every device."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, TypeAlias

import torch

from acceptlib import exact
from acceptlib.engine import backends
from acceptlib.engine.plan import Plan
from acceptlib.errors import ConformanceError
from acceptlib.result import PLACEHOLDER_TOKEN_ID, VerifyResult
from acceptlib.rng import Rng
from acceptlib.strategy import AcceptanceStrategy, Traits
from acceptlib.testing.batches import Request, generator, lay_out, streams

__all__ = ["ConformanceError", "Skipped", "Subject", "VerifyArguments", "expect"]

VerifyArguments: TypeAlias = Callable[[int, torch.device], Mapping[str, Any]]
"""From B and a device to further arguments of `verify`, such as per-request tensors [B, ...] that rules read."""

CAPACITY: Final = 256
"""Keys of requests lie below it: per-request arguments are made for so many and then looked up by key."""

STEPS: Final = 4
"""Requests with state have 0 to 3 steps behind them, of up to `MOST` accepted tokens below `VOCABULARY`."""

MOST: Final = 3
VOCABULARY: Final = 11


class Skipped(Exception):  # noqa: N818 - nothing is wrong: the check does not apply
    """A check cannot say anything about this strategy here; the message says why."""


def expect(condition: bool, message: str) -> None:  # noqa: FBT001 - as `assert`
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
        plan = getattr(self.strategy, "plan", None)
        if plan is None:
            msg = "the strategy overrides verify whole and has no rules to look at"
            raise Skipped(msg)
        return plan  # type: ignore[no-any-return]

    def on_backend(self, choice: backends.Choice) -> Subject:
        """Return the same strategy on another backend."""
        strategy = copy.copy(self.strategy)
        strategy.backend = backends.check(choice)
        return replace(self, strategy=strategy)

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
        """Call `verify` on the device for the requests of these keys; what lies there already is passed as it is."""
        return self.strategy.verify(**self.place(arguments), **self.further(keys))

    def further(self, keys: Sequence[int]) -> dict[str, Any]:
        """Return the further arguments for the requests of these keys, anew: a strategy may write them.

        Requests are at different steps, so that their states differ as far as `update_state` takes them; that of key 0
        is new. A state that `verify_arguments` gives is left as it is.
        """
        arguments = self.every_time(CAPACITY)
        if "state" in arguments and "state" not in self.verify_arguments(CAPACITY, self.device):
            self._go_on(arguments["state"])
        return _select(arguments, torch.tensor(list(keys), dtype=torch.int64))

    def _go_on(self, state: Mapping[str, torch.Tensor]) -> None:
        """Bring the state of each key to after `key % STEPS` steps, in place."""
        key = torch.arange(CAPACITY)
        place = torch.arange(MOST + 1)
        for step in range(1, STEPS):
            source = generator(step)
            accepted = torch.randint(0, MOST + 1, (CAPACITY,), generator=source)
            ids = torch.randint(0, VOCABULARY, (CAPACITY, MOST + 1), generator=source)
            result = VerifyResult(
                output_token_ids=torch.where(place <= accepted[:, None], ids, PLACEHOLDER_TOKEN_ID).int(),
                num_accepted=accepted.int(),
                num_emitted=accepted.int() + 1,
                status=torch.zeros(CAPACITY, dtype=torch.int8),
            )
            before = {name: value.clone() for name, value in state.items()}
            self.strategy.update_state(state, self.place(result))
            done = (key % STEPS < step).to(self.device)
            for name, value in state.items():
                value[done] = before[name][done]

    def law(
        self, target: torch.Tensor | exact.Model, draft: torch.Tensor | exact.Model | None = None, **arguments: Any
    ) -> dict[tuple[int, ...], float]:
        """Return `acceptlib.exact.law` of the rules, in the state of the request of key 0.

        Raises:
            Skipped: The strategy overrides `verify` whole and has none.
        """
        _ = self.plan
        return exact.law(self.strategy, target, draft, **arguments, state=self.state([0]) or None)

    def state(self, keys: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the state of the requests of these keys on the CPU, [n] by name, for the exact law."""
        return {name: value.cpu() for name, value in self.further(keys).get("state", {}).items()}

    def every_time(self, num_requests: int) -> dict[str, Any]:
        """Return the further arguments for so many requests: new ones, unless `verify_arguments` gives their state."""
        state = self.strategy.initial_state(num_requests, self.device)
        return {**({"state": state} if state else {}), **self.verify_arguments(num_requests, self.device)}

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
        # The very object where nothing moved: `out` is returned, and offsets are advanced, in place.
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
