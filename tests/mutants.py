"""Wrong versions of lossless rules that shipped elsewhere: the checks must fail every one of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import torch

from acceptlib import AcceptanceStrategy, Traits, ops, rule
from acceptlib.arrays import Words, as_words
from acceptlib.engine import torch_engine
from acceptlib.inputs import PLACEHOLDER_TOKEN_ID, VerifyResult
from acceptlib.ops import Value
from acceptlib.strategies.block import Block
from acceptlib.strategies.rejection import Rejection


class ProductRule(Block):
    """Accept the last i with prod min(1, r) >= prod u: one product of uniforms instead of independent tests."""

    name = "mutant-product"

    def verify(self, draft_token_ids, *, target_probs, draft_probs, rng, **unused):  # noqa: ANN001, ANN003, ANN201, ARG002
        uniforms = rng.uniforms(draft_token_ids.shape[1])
        ids = draft_token_ids[..., None].long()
        ratio = target_probs[:, :-1].gather(2, ids) / draft_probs.gather(2, ids)
        passed = ratio[..., 0].clamp(max=1).cumprod(1) >= uniforms.accept.cumprod(1)
        position = torch.arange(1, passed.shape[1] + 1)
        stop = torch.where(passed, position, 0).amax(1)
        # Everything else is left to the real thing: the chain is cut by certain acceptance and certain rejection.
        sure = torch.where(position[None] <= stop[:, None], 0.0, 1 - 2.0**-53).double()
        row = torch.arange(len(stop))
        q = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
        weights = (target_probs[row, stop] - q[row, stop]).clamp(min=0)
        token = torch_engine.draw(
            torch.where(weights.sum(1, keepdim=True) > 0, weights, target_probs[row, stop]), uniforms.emit
        )
        rng.offsets.add_(1)
        column = torch.arange(passed.shape[1] + 1)
        tokens = torch.where(column == stop[:, None], token[:, None], PLACEHOLDER_TOKEN_ID)
        tokens[:, :-1] = torch.where(sure == 0, draft_token_ids, tokens[:, :-1])
        zero = torch.zeros_like(stop)
        return VerifyResult(tokens.int(), stop.int(), (stop + 1).int(), zero.to(torch.int8))


class TokenResidual(Block):
    """Block's acceptance with the token rule's residual."""

    name = "mutant-token-residual"

    @rule
    def residual(p: Value, q: Value) -> Value:
        return p - q


class StopsAtFirstFailure(Block):
    """Block's acceptance, stopping at the first failure."""

    name = "mutant-first-failure"
    traits = Traits(guarantee="lossless", stop="first_rejection")


class SameRowMass(Block):
    """Z from row i instead of row i+1, and h = 0 at a zero denominator."""

    name = "mutant-same-row"

    @rule
    def accept(carry: Value, next_residual_mass: Value, is_last: Value) -> Value:
        denominator = next_residual_mass + (1.0 - carry)
        h = next_residual_mass / ops.where(denominator > 0, denominator, 1.0)
        return ops.where(is_last, carry, ops.where(denominator > 0, h, 0.0))


class UnscaledBlockResidual(Block):
    """Residual from (p - q)+ scaled the wrong way round: (p - P q)+."""

    name = "mutant-swapped-scale"

    @rule
    def residual(p: Value, q: Value, carry: Value) -> Value:
        return p - carry * q


class RecoversFromTarget(Rejection):
    """Rejection sampling that recovers from p instead of the residual."""

    name = "mutant-recovers-from-p"
    residual = None


class AlwaysAccepts(AcceptanceStrategy):
    """`u` stuck at 0 accepts everything."""

    name = "mutant-always"
    traits = Traits(guarantee="lossless")

    @rule
    def accept(target_prob: Value) -> Value:
        return ops.where(target_prob >= 0, 1.0, 0.0)


def _same_row_mass(step: torch_engine._Step) -> Words:
    """Return the mass of each position's own row under the carry after it."""
    carried = step.carry
    step.carry = carried[:, 1:]
    layout = step.layout
    elements, _ = step._elements(layout.flat_request, layout.flat_position)
    weights = step._residual(layout.flat_request, layout.flat_position, elements)
    step.carry = carried
    return layout.to_grid(as_words(weights.double().sum(1)))


@dataclass(frozen=True)
class Mutant:
    """A wrong lossless rule.

    Attributes:
        strategy: Its class.
        patch: A change to the engine that goes with it, as a context manager.
        reuse_offsets: Whether it draws the same numbers in every step.
    """

    strategy: type[AcceptanceStrategy]
    patch: AbstractContextManager[object] = field(default_factory=nullcontext)
    reuse_offsets: bool = False


MUTANTS = {
    "product-of-uniforms": Mutant(ProductRule),
    "same-row-mass": Mutant(SameRowMass, mock.patch.object(torch_engine._Step, "_next_residual_mass", _same_row_mass)),
    "token-residual": Mutant(TokenResidual),
    "stops-at-first-failure": Mutant(StopsAtFirstFailure),
    "swapped-scale": Mutant(UnscaledBlockResidual),
    "uniforms-reused-next-step": Mutant(Block, reuse_offsets=True),
    "recovers-from-target": Mutant(RecoversFromTarget),
    "always-accepts": Mutant(AlwaysAccepts),
}
