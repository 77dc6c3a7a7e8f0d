"""Strategies with per-request state that are right in a request's first step and wrong later, or wrong with the state.

Imported for the list in `rule_mutants`, which they join.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rule_mutants import UNBOUNDED, rules

from acceptlib import AcceptanceStrategy, Traits, VerifyResult, ops, rule
from acceptlib.ops import Value
from acceptlib.strategies.block import Block
from acceptlib.strategies.greedy import Greedy
from acceptlib.strategies.lenience import Lenience
from acceptlib.strategies.rejection import Rejection

STATE = ("steps",)


class Stepped(AcceptanceStrategy):
    """Counts the steps of each request; to be inherited beside a strategy with rules."""

    name = "stepped"
    traits = replace(UNBOUNDED, state=STATE)
    accept = Rejection.accept

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"steps": torch.zeros(num_requests, device=device)}

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:  # noqa: ARG002
        state["steps"].add_(1.0)


@rules("lossless_law")
class ExactAtFirst(Stepped, Rejection):
    """From the second step on, tokens are accepted half a percent too often."""

    name = "exact-at-first"
    traits = Traits(guarantee="lossless", state=STATE)

    @rule
    def accept(target_prob: Value, draft_prob: Value, steps: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where(steps > 0, ops.minimum(1.005 * h, 1.0), h)


@rules("lossless_law_one_hot")
class OneHotIsGreedyLater(Stepped, Rejection):
    """From the third step on, a draft that is certain of its token is accepted iff it is the target's argmax."""

    name = "one-hot-is-greedy-later"
    traits = Traits(guarantee="lossless", state=STATE)

    @rule
    def accept(
        target_prob: Value, draft_prob: Value, draft_max_prob: Value, is_target_argmax: Value, steps: Value
    ) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        greedy = (steps > 1) & (draft_max_prob == 1.0)
        return ops.where(greedy, ops.where(is_target_argmax, 1.0, 0.0), h)


@rules("greedy_sequence")
class GreedyAtFirst(Stepped, Greedy):
    """From the second step on, any of the tokens that share the largest probability is accepted."""

    name = "greedy-at-first"
    traits = replace(Greedy.traits, state=STATE)

    @rule
    def accept(is_target_argmax: Value, target_prob: Value, target_max_prob: Value, steps: Value) -> Value:
        return ops.where(is_target_argmax | ((steps > 0) & (target_prob == target_max_prob)), 1.0, 0.0)


@rules("declared_bound")
class BoundAtFirst(Stepped, Lenience):
    """From the second step on, anything possible is accepted."""

    name = "bound-at-first"
    traits = replace(Lenience.traits, state=STATE, neutral={}, neutral_equals="")

    @rule
    def accept(target_prob: Value, draft_prob: Value, lenience: Value, steps: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, lenience * draft_prob), 1.0)
        return ops.where((steps > 0) & (target_prob > 0), 1.0, h)


@rules("neutral_setting")
class NeutralAtFirst(Stepped, Lenience):
    """From the second step on, the neutral value is neutral but for one in ten thousand."""

    name = "neutral-at-first"
    traits = replace(UNBOUNDED, state=STATE, neutral={"lenience": 1.0}, neutral_equals="rejection")

    @rule
    def accept(target_prob: Value, draft_prob: Value, lenience: Value, steps: Value) -> Value:
        scale = ops.where(steps > 0, 0.9999 * lenience, lenience)
        return ops.minimum(ops.ratio(target_prob, scale * draft_prob), 1.0)


class Share(AcceptanceStrategy):
    """Accepts in proportion to what is left of a budget; to be inherited."""

    name = "share"
    traits = replace(UNBOUNDED, state=("budget",))
    accept = Rejection.accept

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"budget": torch.full((num_requests,), 2, device=device)}

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.num_accepted).clamp_(min=0)


@rules("acceptance_is_probability")
class Overdrawn(Share, Rejection):
    """A share of the budget is accepted, which may fall below 0."""

    name = "overdrawn"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.num_accepted)

    @rule
    def accept(target_prob: Value, draft_prob: Value, budget: Value) -> Value:
        return ops.minimum(ops.ratio(target_prob, draft_prob), 1.0) * budget / 2.0


@rules("acceptance_is_probability")
class OverdrawnByLongDrafts(Share, Rejection):
    """A share of a budget of three is accepted, which a step of four tokens may overdraw."""

    name = "overdrawn-by-long-drafts"

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"budget": torch.full((num_requests,), 3.0, device=device)}

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.num_accepted)

    @rule
    def accept(target_prob: Value, budget: Value) -> Value:
        return ops.where(target_prob > 0, ops.minimum(budget / 3.0, 1.0), 0.0)


@rules("acceptance_is_probability")
class Exhausted(Share, Rejection):
    """A budget is divided by itself, which is NaN once nothing is left."""

    name = "exhausted"

    @rule
    def accept(target_prob: Value, draft_prob: Value, budget: Value) -> Value:
        return ops.minimum(ops.ratio(target_prob, draft_prob), 1.0) * (budget / budget)


@rules("acceptance_is_probability")
class FallsWithMassLater(Stepped, Block):
    """From the third step on, acceptance falls as the next row's residual mass grows."""

    name = "falls-with-mass-later"
    traits = replace(UNBOUNDED, stop="last_acceptance", state=STATE)

    @rule
    def accept(carry: Value, next_residual_mass: Value, is_last: Value, steps: Value) -> Value:
        return ops.where(is_last | (steps < 2), carry, carry / (1.0 + next_residual_mass))


@rules("impossible_draft_never_stands")
class OverridesConstraintsLater(Stepped, Rejection):
    """From the second step on, one token in ten is accepted whatever the target says."""

    name = "overrides-constraints-later"

    @rule
    def accept(target_prob: Value, draft_prob: Value, steps: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where(steps > 0, ops.maximum(h, 0.1), h)


# The state itself


@rules("initial_state")
class ForgetsAName(Stepped, Rejection):
    """New requests lack one of two names of the state."""

    name = "forgets-a-name"
    traits = replace(UNBOUNDED, state=("steps", "budget"))


@rules("initial_state")
class OneForAll(Stepped, Rejection):
    """New requests have one value together."""

    name = "one-for-all"

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:  # noqa: ARG002
        return {"steps": torch.zeros(1, device=device)}


@rules("update_state")
class Rebinds(Stepped, Rejection):
    """A step leaves a new tensor in the mapping, and the old one as it was."""

    name = "rebinds"

    def update_state(self, state: Any, result: VerifyResult) -> None:  # noqa: ARG002
        state["steps"] = state["steps"] + 1.0


@rules("update_state")
class ReturnsState(Stepped, Rejection):
    """The state after a step is returned."""

    name = "returns-state"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> Any:  # noqa: ARG002
        return {"steps": state["steps"] + 1.0}


@rules("update_state")
class CountsOnTheHost(Stepped, Rejection):
    """The emitted tokens are counted on the host."""

    name = "counts-on-the-host"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["steps"].add_(torch.tensor([float(count) for count in result.num_emitted.tolist()]))


@rules("update_state")
class AsksWhatStands(Stepped, Rejection):
    """The host asks whether any token stands before it counts the step."""

    name = "asks-what-stands"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        if bool(result.num_accepted.any()):
            state["steps"].add_(1.0)


@rules("new_requests_are_alike")
class OfItsPlace(Share, Rejection):
    """A new request's budget depends on its place in the batch."""

    name = "of-its-place"

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"budget": torch.arange(num_requests, device=device) % 4}


@rules("new_requests_are_alike")
class KeepsOne(Share, Rejection):
    """All who are new share a tensor, with what is left of the budget of those before them."""

    name = "keeps-one"

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        kept = self.__dict__.setdefault("kept", {})
        return {"budget": kept.setdefault(num_requests, torch.full((num_requests,), 2, device=device))}


@rules("state_of_each_request")
class TakesItsNeighbours(Share, Rejection):
    """A request's budget falls by what its neighbour accepted."""

    name = "takes-its-neighbours"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.num_accepted.roll(1)).clamp_(min=0)


@rules("state_of_each_request")
class TakesTheMost(Share, Rejection):
    """Every budget falls by the most that any request accepted."""

    name = "takes-the-most"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.num_accepted.amax()).clamp_(min=0)


@rules("state_of_each_request")
class TakesK(Share, Rejection):
    """A budget falls by K, however many tokens the request had."""

    name = "takes-k"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.output_token_ids.shape[1] - 1).clamp_(min=-9)


@rules("state_of_each_request")
class TakesByChance(Share, Rejection):
    """A budget falls by a number of torch's own generator."""

    name = "takes-by-chance"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(torch.randint(1 << 40, result.num_accepted.shape))


@rules("state_of_each_request")
class TakesTheResult(Share, Rejection):
    """What was accepted is taken from the result too."""

    name = "takes-the-result"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.num_accepted).clamp_(min=0)
        result.num_accepted.zero_()
