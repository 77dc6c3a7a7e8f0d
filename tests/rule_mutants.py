"""Strategies whose rules, declarations or stops are wrong, and the list of all mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, Uniforms, VerifyResult, ops, row_sum, rule
from acceptlib.ops import Value
from acceptlib.strategies.block import Block
from acceptlib.strategies.greedy import Greedy
from acceptlib.strategies.lenience import Lenience
from acceptlib.strategies.rejection import Rejection

UNBOUNDED = Traits(guarantee="lossy", bound="none")
"""Declared by most mutants, so that no law has to be proven and their bug is left to one check."""


@dataclass(frozen=True)
class Mutant:
    """A wrong strategy.

    Attributes:
        check: The check that it is there for.
        bug: What is wrong, in a sentence.
        make: Returns it.
    """

    check: str
    bug: str
    make: Callable[[], AcceptanceStrategy]


MUTANTS: dict[str, Mutant] = {}


def add(name: str, check: str, bug: str | None, make: Callable[[], AcceptanceStrategy]) -> None:
    MUTANTS[name] = Mutant(check, " ".join((bug or "").rstrip(".").split()), make)


def rules(check: str) -> Callable[[type[AcceptanceStrategy]], type[AcceptanceStrategy]]:
    """Register a strategy class whose rules are wrong."""

    def register(strategy: type[AcceptanceStrategy]) -> type[AcceptanceStrategy]:
        add(strategy.name, check, strategy.__doc__, strategy)
        return strategy

    return register


@rules("lossless_law")
class RecoversFromTarget(Rejection):
    """The recovered token is drawn from p."""

    name = "recovers-from-target"
    residual = None


@rules("acceptance_is_probability")
class FallsWithMass(Block):
    """Acceptance falls as the next row's residual mass grows."""

    name = "falls-with-mass"
    traits = replace(UNBOUNDED, stop="last_acceptance")

    @rule
    def accept(carry: Value, next_residual_mass: Value, is_last: Value) -> Value:
        return ops.where(is_last, carry, carry / (1.0 + next_residual_mass))


@rules("lossless_law")
class TokenResidual(Block):
    """Block's acceptance with the token rule's residual."""

    name = "token-residual"

    @rule
    def residual(p: Value, q: Value) -> Value:
        return p - q


@rules("lossless_law")
class StopsAtFirstFailure(Block):
    """Block's acceptance that stops at the first failure."""

    name = "stops-at-first-failure"
    traits = Traits(guarantee="lossless", stop="first_rejection")


@rules("lossless_law")
class SwappedScale(Block):
    """Block's residual scaled the wrong way round, (p - P q)+."""

    name = "swapped-scale"

    @rule
    def residual(p: Value, q: Value, carry: Value) -> Value:
        return p - carry * q


@rules("lossless_law")
class AlwaysAccepts(AcceptanceStrategy):
    """Every drafted token is accepted."""

    name = "always-accepts"
    traits = Traits(guarantee="lossless")

    @rule
    def accept(target_prob: Value) -> Value:
        return ops.where(target_prob > 0, 1.0, 0.0)


@rules("lossless_law")
class TrustsLateDrafts(Rejection):
    """From the eighth position on, every possible token is accepted."""

    name = "trusts-late-drafts"

    @rule
    def accept(target_prob: Value, draft_prob: Value, position: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where((position >= 7) & (target_prob > 0), 1.0, h)


@rules("lossless_law")
class TrustsFlatRows(Rejection):
    """Where the target's entropy is high, every drafted token is accepted."""

    name = "trusts-flat-rows"

    @rule
    def accept(target_prob: Value, draft_prob: Value, target_entropy: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where(target_entropy > 2.5, 1.0, h)


@rules("lossless_law")
class TrustsLargeIdsLater(Rejection):
    """From the second position on, every possible token with an id of 4 or more is accepted."""

    name = "trusts-large-ids-later"

    @rule
    def accept(target_prob: Value, draft_prob: Value, draft_token_id: Value, position: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where((position >= 1) & (draft_token_id >= 4) & (target_prob > 0), 1.0, h)


@rules("lossless_law")
class TrustsFlatRowsLater(Rejection):
    """From the second position on, every possible token is accepted where the target's entropy is high."""

    name = "trusts-flat-rows-later"

    @rule
    def accept(target_prob: Value, draft_prob: Value, target_entropy: Value, position: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where((position >= 1) & (target_entropy > 1.4) & (target_prob > 0), 1.0, h)


@rules("lossless_law")
class TrustsLongDrafts(Rejection):
    """Of four drafted tokens or more, every possible one is accepted where the target is in some doubt."""

    name = "trusts-long-drafts"

    @rule
    def accept(target_prob: Value, draft_prob: Value, target_entropy: Value, num_draft_tokens: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where((num_draft_tokens >= 4) & (target_entropy > 0.7) & (target_prob > 0), 1.0, h)


@rules("lossless_law_one_hot")
class OneHotIsGreedy(Rejection):
    """A draft that is certain of its token is taken for a greedy one: accepted iff it is the target's argmax."""

    name = "one-hot-is-greedy"

    @rule
    def accept(target_prob: Value, draft_prob: Value, draft_max_prob: Value, is_target_argmax: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where(draft_max_prob == 1.0, ops.where(is_target_argmax, 1.0, 0.0), h)


@rules("zero_draft_probability")
class GivesUpOnZero(Rejection):
    """A drafted token of zero draft probability is rejected, to be safe from the division."""

    name = "gives-up-on-zero"

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        return ops.where(draft_prob > 0, ops.minimum(ops.ratio(target_prob, draft_prob), 1.0), 0.0)


@rules("greedy_sequence")
class AcceptsTies(Greedy):
    """Any of the tokens that share the largest probability is accepted."""

    name = "accepts-ties"

    @rule
    def accept(target_prob: Value, target_max_prob: Value) -> Value:
        return ops.where(target_prob == target_max_prob, 1.0, 0.0)


@rules("greedy_sequence")
class AcceptsNearTies(Greedy):
    """A token that is almost as likely as the best is accepted."""

    name = "accepts-near-ties"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value, target_max_prob: Value) -> Value:
        near = (target_prob >= target_max_prob - 0.001) & (target_prob < target_max_prob)
        return ops.where(is_target_argmax | near, 1.0, 0.0)


@rules("greedy_sequence")
class AcceptsCertainDrafts(Greedy):
    """Any possible token is accepted of a draft that is certain of it, as every draft without rows is."""

    name = "accepts-certain-drafts"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value, draft_prob: Value) -> Value:
        return ops.where(is_target_argmax | ((draft_prob >= 1) & (target_prob > 0)), 1.0, 0.0)


@rules("greedy_sequence")
class AcceptsSureDrafts(Greedy):
    """Any possible token is accepted of a draft that is rather sure of it."""

    name = "accepts-sure-drafts"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value, draft_prob: Value) -> Value:
        return ops.where(is_target_argmax | ((draft_prob >= 0.6) & (draft_prob < 1) & (target_prob > 0)), 1.0, 0.0)


@rules("greedy_sequence")
class AcceptsOfSharpRows(Greedy):
    """Any possible token is accepted where the target is in little doubt."""

    name = "accepts-of-sharp-rows"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value, target_entropy: Value) -> Value:
        return ops.where(is_target_argmax | ((target_entropy < 0.5) & (target_prob > 0)), 1.0, 0.0)


@rules("greedy_sequence")
class AcceptsOfFlatRows(Greedy):
    """Any possible token is accepted where the target is in great doubt."""

    name = "accepts-of-flat-rows"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value, target_entropy: Value) -> Value:
        return ops.where(is_target_argmax | ((target_entropy > 4) & (target_prob > 0)), 1.0, 0.0)


@rules("greedy_sequence")
class FollowsDraft(Greedy):
    """The recovered token is the draft's favourite among those that the target finds possible."""

    name = "follows-draft"

    @rule
    def residual(p: Value, q: Value) -> Value:
        return ops.where(p > 0, q, 0.0)


@rules("greedy_sequence")
class NowAndThen(Greedy):
    """One in a hundred other possible tokens is accepted."""

    name = "now-and-then"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value) -> Value:
        return ops.where(is_target_argmax, 1.0, ops.where(target_prob > 0, 0.01, 0.0))


@rules("greedy_sequence")
class AcceptsRunnersUp(Greedy):
    """A token of more than 0.4 is accepted, beside a likelier one too."""

    name = "accepts-runners-up"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value) -> Value:
        return ops.where(is_target_argmax | (target_prob > 0.4), 1.0, 0.0)


@rules("greedy_sequence")
class GreedyToSeven(Greedy):
    """From the eighth position on, anything possible is accepted."""

    name = "greedy-to-seven"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value, position: Value) -> Value:
        return ops.where(is_target_argmax | ((position >= 7) & (target_prob > 0)), 1.0, 0.0)


@rules("promise")
class Vague(Rejection):
    """The declared bound is a sentence that nothing can check."""

    name = "vague"
    traits = Traits(guarantee="lossy", bound="close to the target")


@rules("promise")
class Silent(Rejection):
    """Lossy, and not a word of what is promised instead."""

    name = "silent"
    traits = Traits(guarantee="lossy")


@rules("promise")
class SaysNone(Lenience):
    """A bound can be checked, and none is declared."""

    name = "says-none"
    traits = UNBOUNDED

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:
        return super().bound_excess(p, q, out)


@rules("declared_bound")
class MoreLenient(Lenience):
    """Lenience applied twice in the acceptance and once in the residual."""

    name = "more-lenient"

    @rule
    def accept(target_prob: Value, draft_prob: Value, lenience: Value) -> Value:
        return ops.minimum(ops.ratio(target_prob, lenience * lenience * draft_prob), 1.0)


@rules("declared_bound")
class LenientLater(Lenience):
    """From the eighth position on, the acceptance is more lenient than the residual."""

    name = "lenient-later"

    @rule
    def accept(target_prob: Value, draft_prob: Value, lenience: Value, position: Value) -> Value:
        scale = ops.where(position >= 7, lenience * lenience, lenience)
        return ops.minimum(ops.ratio(target_prob, scale * draft_prob), 1.0)


@rules("declared_bound")
class LenientToLongDrafts(Lenience):
    """Of three drafted tokens or more, every possible one is accepted where the target is in some doubt."""

    name = "lenient-to-long-drafts"

    @rule
    def accept(
        target_prob: Value, draft_prob: Value, lenience: Value, target_entropy: Value, num_draft_tokens: Value
    ) -> Value:
        h = ops.minimum(ops.ratio(target_prob, lenience * draft_prob), 1.0)
        trusts = (lenience < 1) & (num_draft_tokens >= 3) & (target_entropy > 0.7) & (target_prob > 0)
        return ops.where(trusts, 1.0, h)


@rules("declared_bound")
class LenientToOneHotLater(Lenience):
    """From the second position on, any possible token is accepted of a draft that is certain of it."""

    name = "lenient-to-one-hot-later"

    @rule
    def accept(target_prob: Value, draft_prob: Value, lenience: Value, position: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, lenience * draft_prob), 1.0)
        return ops.where((lenience < 1) & (position >= 1) & (draft_prob >= 1) & (target_prob > 0), 1.0, h)


@rules("declared_bound")
class ExcludesNothing(Lenience):
    """A bound that every law keeps."""

    name = "excludes-nothing"

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:  # noqa: ARG002
        return -1.0


@rules("neutral_setting")
class IgnoresOption(Rejection):
    """An option that no rule reads."""

    name = "ignores-option"
    traits = Traits(guarantee="lossy", bound="none", neutral={"weight": 1.0}, neutral_equals="rejection")

    class Options(acceptlib.Options):
        weight: float = 0.8

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        return ops.minimum(ops.ratio(0.8 * target_prob + 0.2 * draft_prob, draft_prob), 1.0)


@rules("options_are_read")
class ForgetsOption(Rejection):
    """Its only option changes nothing."""

    name = "forgets-option"
    traits = UNBOUNDED

    class Options(acceptlib.Options):
        weight: float = 0.8


@rules("options_are_read")
class ForgetsOneOfTwo(Rejection):
    """Its traits depend on one option, and nothing on the other."""

    name = "forgets-one-of-two"
    traits = UNBOUNDED

    class Options(acceptlib.Options):
        sharp: bool = False
        weight: float = 0.8

    options: Options

    def resolve_traits(self) -> Traits:
        return replace(self.traits, bonus="argmax" if self.options.sharp else "sample")


@rules("options_are_read")
class ReadsAnother(Rejection):
    """A row sum of its own is summed, and the rule reads acceptlib's quantity of a similar name."""

    name = "reads-another"
    traits = UNBOUNDED

    @row_sum
    def entropy(p: Value) -> Value:
        return -p * ops.log2(p, 1e-5)

    @rule
    def accept(target_prob: Value, draft_prob: Value, target_entropy: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where((target_entropy > 1) & (target_prob > 0), 1.0, h)


@rules("neutral_setting")
class NearlyNeutral(Lenience):
    """The neutral value is neutral but for one in ten thousand."""

    name = "nearly-neutral"
    traits = replace(UNBOUNDED, neutral={"lenience": 1.0}, neutral_equals="rejection")

    @rule
    def accept(target_prob: Value, draft_prob: Value, lenience: Value) -> Value:
        return ops.minimum(ops.ratio(target_prob, 0.9999 * lenience * draft_prob), 1.0)


@rules("acceptance_is_probability")
class UnguardedLogarithm(Rejection):
    """An entropy is NaN where the target's row has a 0, and no comparison with it holds."""

    name = "unguarded-logarithm"
    traits = UNBOUNDED

    @row_sum
    def negentropy(p: Value) -> Value:
        return p * ops.log(p)

    @rule
    def accept(target_prob: Value, negentropy: Value) -> Value:
        return ops.where(target_prob > 0.3 * ops.exp(negentropy), 1.0, 0.0)


@rules("acceptance_is_probability")
class SumOfLogarithms(Rejection):
    """A sum of guarded logarithms is a number in small rows alone: in a model's its terms are too large."""

    name = "sum-of-logarithms"
    traits = UNBOUNDED

    @row_sum
    def logarithms(p: Value) -> Value:
        return ops.log2(p, 1e-5)

    @rule
    def accept(target_prob: Value, draft_prob: Value, logarithms: Value) -> Value:
        sharp = ops.where(logarithms < 0.0, 1.0, 0.0)
        return ops.minimum(ops.ratio(target_prob, draft_prob), 1.0) * sharp


@rules("acceptance_is_probability")
class MoreThanOneLater(Rejection):
    """From the fourth position on, accept returns more than 1."""

    name = "more-than-one-later"
    traits = UNBOUNDED

    @rule
    def accept(target_prob: Value, draft_prob: Value, position: Value) -> Value:
        return ops.minimum(ops.ratio(target_prob, draft_prob), ops.where(position < 3.0, 1.0, 3.0))


@rules("acceptance_is_probability")
class MoreThanOneOfLargeIds(Rejection):
    """Of ids of 40 or more, accept returns more than 1."""

    name = "more-than-one-of-large-ids"
    traits = UNBOUNDED

    @rule
    def accept(target_prob: Value, draft_prob: Value, draft_token_id: Value) -> Value:
        return ops.minimum(ops.ratio(target_prob, draft_prob), ops.where(draft_token_id < 40.0, 1.0, 3.0))


@rules("acceptance_is_probability")
class UnguardedDivision(Rejection):
    """p / q without a guard is NaN where both are 0."""

    name = "unguarded-division"
    traits = UNBOUNDED

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        return ops.minimum(target_prob / draft_prob, 1.0)


@rules("acceptance_is_probability")
class UnguardedResidual(Rejection):
    """The recovered token is drawn from p / q, which is infinite where the draft gives nothing."""

    name = "unguarded-residual"
    traits = UNBOUNDED

    @rule
    def residual(p: Value, q: Value) -> Value:
        return ops.ratio(p, q)


@rules("impossible_draft_never_stands")
class OverridesConstraints(Rejection):
    """One token in ten is accepted whatever the target says."""

    name = "overrides-constraints"
    traits = UNBOUNDED

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        return ops.maximum(ops.minimum(ops.ratio(target_prob, draft_prob), 1.0), 0.1)


@rules("impossible_draft_never_stands")
class ForgivesImpossible(Rejection):
    """A rejected token may stand whatever the target says."""

    name = "forgives-impossible"
    traits = replace(UNBOUNDED, stop="window", window=1)

    @rule
    def forgive(position: Value) -> Value:
        return position >= 0


@rules("wide_flat_rows")
class SpreadsOut(Rejection):
    """The recovered token is drawn from roots, which add up to more than a draw takes where a vocabulary is large."""

    name = "spreads-out"
    traits = UNBOUNDED

    @rule
    def residual(p: Value) -> Value:
        return ops.sqrt(p) / 8.0


@rules("drawn_token_is_possible")
class LeakyResidual(Rejection):
    """1e-9 is added to every entry of the residual."""

    name = "leaky-residual"
    traits = UNBOUNDED

    @rule
    def residual(p: Value, q: Value) -> Value:
        return ops.maximum(p - q, 0.0) + 1e-9


def take_uniforms(ids: torch.Tensor, arguments: dict[str, Any]) -> Uniforms:
    """Take `rng` out of the arguments as the uniforms of this step, and advance it."""
    uniforms = arguments.pop("uniforms", None)
    rng = arguments.pop("rng", None)
    if uniforms is None:
        most = arguments["max_num_draft_tokens"] if "cu_num_draft_tokens" in arguments else ids.shape[1]
        uniforms = rng.uniforms(most)
        if rng.advances:
            rng.offsets.add_(1)
    return uniforms


class OwnStop(AcceptanceStrategy):
    """Decides in its own way how many tokens stand, and leaves the rest to block."""

    name = "own-stop"
    traits = Block.traits

    def accepted(self, p: torch.Tensor, q: torch.Tensor, ids: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Return which tokens are accepted [B, K]: p [B, K+1, V], q [B, K, V], u [B, K]. The last one stops."""
        raise NotImplementedError  # each mutant has its own

    def verify(self, draft_token_ids: torch.Tensor, **arguments: Any) -> VerifyResult:  # type: ignore[override]
        p, q = arguments.get("target_probs"), arguments.get("draft_probs")
        if p is None or draft_token_ids.ndim != 2 or not draft_token_ids.numel():
            return Block().verify(draft_token_ids, **arguments)
        uniforms = take_uniforms(draft_token_ids, arguments)
        size = p.shape[-1]
        ids = draft_token_ids.long().clamp(0, size - 1)
        if q is None:
            q = torch.nn.functional.one_hot(ids, size).float()
        q = torch.nn.functional.pad(q.nan_to_num(nan=0.0), (0, size - q.shape[-1]))
        accepted = self.accepted(p, q, ids, uniforms.accept) & (draft_token_ids >= 0)
        position = torch.arange(1, accepted.shape[1] + 1)
        stop = torch.where(accepted, position, 0).amax(1)
        # The chain is cut by certain acceptance and certain rejection.
        cut = torch.where(position[None] <= stop[:, None], -1.0, 2.0)
        return Block().verify(draft_token_ids, **arguments, uniforms=replace(uniforms, accept=cut.double()))


@rules("lossless_over_two_steps")
class ProductOfUniforms(OwnStop):
    """The last i with prod min(1, r) >= prod u stands: one product of uniforms instead of independent tests."""

    name = "product-of-uniforms"

    def accepted(self, p: torch.Tensor, q: torch.Tensor, ids: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        ratio = (p[:, :-1] / q).gather(2, ids[..., None])[..., 0]
        return ratio.clamp(max=1).cumprod(1) >= u.cumprod(1)


@rules("lossless_over_two_steps")
class SameRowMass(OwnStop):
    """Block's mass is taken from a position's own row instead of the next one."""

    name = "same-row-mass"

    def accepted(self, p: torch.Tensor, q: torch.Tensor, ids: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        ratio = (p[:, :-1] / q).gather(2, ids[..., None])[..., 0].double()
        carry, found = torch.ones(len(ids), dtype=torch.float64), []
        for position in range(ids.shape[1]):
            carry = (carry * ratio[:, position]).clamp(max=1)
            mass = (carry[:, None] * p[:, position] - q[:, position]).clamp(min=0).sum(1)
            found.append(mass / (mass + 1 - carry) if position < ids.shape[1] - 1 else carry)
        return u < torch.stack(found, 1).nan_to_num(nan=0.0)
