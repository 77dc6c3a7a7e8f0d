"""Exact figures of a strategy: distance from the target and expected tokens, for worked examples and for real rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from acceptlib.engine import decide
from acceptlib.engine.plan import Plan, evaluate
from acceptlib.errors import expect_int
from acceptlib.exact.enumeration import (
    Model,
    State,
    as_state,
    complete,
    draw_law,
    law,
    length_of,
    plan_of,
    probability_of,
    residuals,
    row_scalars,
    verify_exactly,
)
from acceptlib.registry import as_strategy
from acceptlib.strategy import AcceptanceStrategy
from acceptlib.tensors import made_on_cpu

TRUNCATED_VOCABULARY: Final = 4
TRUNCATED_LENGTH: Final = 3

MAX_NUMBERS: Final = 1 << 20
"""Numbers of a tensor with a row [V] for each of some drafted tokens, unless V alone is more."""

ROUNDING: Final = 1e-14
"""Probability that may be rounding."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Exact figures of one step of a real run.

    Attributes:
        tv: Mean total variation between the strategy's law of a token and the target's, over the visited rows.
        kl: Mean KL(out || p) in nats, the Kullback-Leibler divergence of the strategy's law from the target's.
        expected_tokens: Expected number of emitted tokens, given what was drafted.
    """

    tv: float
    kl: float
    expected_tokens: float


def tv(
    strategy: str | AcceptanceStrategy,
    target: torch.Tensor | Model,
    draft: torch.Tensor | Model | None = None,
    *,
    num_draft_tokens: int | None = None,
    draft_token_ids: Sequence[int] | torch.Tensor | None = None,
    state: State | None = None,
) -> float:
    """Return the total variation between the joint law of K+1 tokens under the strategy and under the target.

    Arguments and errors are those of `law`; a step that emits fewer tokens is continued by the target. 0 to rounding,
    some 1e-16, for a lossless strategy.
    """
    return _tv(*_joint_laws(strategy, target, draft, num_draft_tokens, draft_token_ids, state))


def kl(
    strategy: str | AcceptanceStrategy,
    target: torch.Tensor | Model,
    draft: torch.Tensor | Model | None = None,
    *,
    num_draft_tokens: int | None = None,
    draft_token_ids: Sequence[int] | torch.Tensor | None = None,
    state: State | None = None,
) -> float:
    """Return KL(out || p) in nats between the same joint laws as `tv`; infinite where out leaves p's support."""
    return _kl(*_joint_laws(strategy, target, draft, num_draft_tokens, draft_token_ids, state))


def expected_tokens(
    strategy: str | AcceptanceStrategy,
    target: torch.Tensor | Model,
    draft: torch.Tensor | Model | None = None,
    *,
    num_draft_tokens: int | None = None,
    draft_token_ids: Sequence[int] | torch.Tensor | None = None,
    state: State | None = None,
) -> float:
    """Return the expected number of tokens that one step emits; arguments and errors are those of `law`."""
    emitted = law(
        strategy, target, draft, num_draft_tokens=num_draft_tokens, draft_token_ids=draft_token_ids, state=state
    )
    return sum(len(sequence) * probability for sequence, probability in emitted.items())


@made_on_cpu()
def step_figures(
    strategy: str | AcceptanceStrategy,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    num_visited: int,
    state: State | None = None,
) -> StepFigures:
    """Return exact figures of one step of a real run.

    For a strategy that stops at the first rejection, the law of a row is exact over the whole vocabulary, given the
    tokens accepted before it. Where the decision depends on later rows it would take a sum over every drafted sequence:
    there the law of the step's first token is taken on rows cut to their `TRUNCATED_VOCABULARY` likeliest entries and
    `TRUNCATED_LENGTH` positions.

    Args:
        strategy: A strategy given by rules, or its name.
        draft_token_ids: [K].
        target_probs: [K+1, V], processed; normalised here in float64.
        draft_probs: [K, V'], padded with zeros or cut to V; likewise.
        num_visited: How many of the rows the step reached, 1..K+1.
        state: The request's, before the step; that of a new request if None.

    Raises:
        InputError: `num_visited` is no int of at least 1.
    """
    expect_int("num_visited", num_visited, least=1)
    strategy = as_strategy(strategy)
    plan = plan_of(strategy)
    p, ids = target_probs.to(torch.float64), draft_token_ids.to(torch.int64)
    length, vocab_size = len(ids), p.shape[1]
    q = torch.zeros(length, vocab_size, dtype=torch.float64)
    shared = min(vocab_size, draft_probs.shape[-1])
    q[:, :shared] = draft_probs[:, :shared]
    # Rows of float32 sum to 1 within 1e-7 only, which would read as a distance.
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    tensors = as_state(strategy, state)
    stops = verify_exactly(plan, ids[None], p[None], q[None], tensors).stops[0]
    expected = 1 + float((stops * torch.arange(length + 1)).sum())
    if not plan.looks_ahead or not length:
        grid = decide.positional(plan, torch.tensor([length]), length, tensors)
        scalars = row_scalars(plan, ids[None], p[None, :-1], q[None], grid)
        grid["carry"] = decide.run_carry(plan, {**grid, **scalars}, ids[None])[:, :-1]
        found = []
        for row in range(min(num_visited, length)):
            here = {name: value[:, row, None] for name, value in grid.items()}
            found.append(row_law(plan, p[row], q[row], here))
        if num_visited > length:
            found.append(draw_law(p[-1], p[-1], plan.traits.bonus))
    else:
        p, q, token_ids = _truncate(p, q)
        found = [_first_token_law(plan, p, q, tensors, token_ids)]
    pairs = list(zip(found, p, strict=False))
    return StepFigures(
        tv=sum(_tv(out, row) for out, row in pairs) / len(pairs),
        kl=sum(_kl(out, row) for out, row in pairs) / len(pairs),
        expected_tokens=expected,
    )


def row_law(plan: Plan, p: torch.Tensor, q: torch.Tensor, values: decide.Values) -> torch.Tensor:
    """Return the law of the token at one row, for a strategy that does not look ahead.

    out(y) = q(y) h(y) + sum_x q(x) (1 - h(x)) res_x(y).

    Args:
        plan: The strategy's plan.
        p: [V] float64 target row.
        q: [V] float64 draft row.
        values: [1, 1] tensors by name: what `decide.positional` says of the row, and `carry` as it is before it.

    Returns:
        [V] float64.
    """
    every, draft = torch.arange(len(p))[:, None], q
    p, q = p[None, None], q[None, None]

    def of_tokens(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return h [n] of drafted tokens [n, 1], and the laws [n, V] of what replaces them; [1, V] if that is one."""
        before = {**values, **row_scalars(plan, ids, p, q, values)}
        carry = evaluate(plan.carry, before, plan.numbers) if plan.carry else before["carry"]
        h = torch.as_tensor(evaluate(plan.accept, {**before, "carry": carry}, plan.numbers), dtype=torch.float64)
        recovered = draw_law(residuals(plan, ids, p, q, before), p, plan.traits.recovered)[:, 0]
        return probability_of(h.expand(ids.shape)[:, 0]), recovered

    # Where entries depend on the drafted token, all tokens at once would take V^2 numbers.
    by_token = any("is_drafted" in row_sum.names for row_sum in plan.used_row_sums.values())
    by_token = by_token or len(of_tokens(every[:2])[1]) > 1
    out = torch.zeros_like(draft)
    step = max(1, MAX_NUMBERS // len(every)) if by_token else len(every)
    for start in range(0, len(every), step):
        ids = every[start : start + step]
        token = ids[:, 0]
        h, recovered = of_tokens(ids)
        rejected = draft[token] * (1 - h)
        out[token] += draft[token] * h
        out += rejected @ recovered if len(recovered) > 1 else rejected.sum() * recovered[0]
    return out


def _first_token_law(
    plan: Plan, p: torch.Tensor, q: torch.Tensor, state: Mapping[str, torch.Tensor], token_ids: torch.Tensor
) -> torch.Tensor:
    """Return the law of a step's first token, on rows that `_truncate` cut to the entries of these ids."""
    ids = torch.cartesian_prod(*[torch.arange(p.shape[1])] * len(q)).view(-1, len(q))
    shape = (len(ids), -1, -1)
    steps = verify_exactly(plan, ids, p.expand(shape), q.expand(shape), state, token_ids)
    weight = q.expand(shape).gather(2, ids[..., None])[..., 0].prod(1)
    out = (weight * steps.stops[:, 0]) @ steps.emits[:, 0]
    return out.index_add(0, ids[:, 0], weight * (1 - steps.stops[:, 0]))


def _truncate(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut rows to the entries likeliest under target and draft at each position, and to a few positions.

    Returns:
        [K'+1, V'] and [K', V'] rows, and the ids [K', V'] of the entries.
    """
    p, q = p[: TRUNCATED_LENGTH + 1], q[:TRUNCATED_LENGTH]
    likeliest = torch.cat((p[:-1] + q, p[-1:])).topk(min(TRUNCATED_VOCABULARY, p.shape[1])).indices
    p, q = p.gather(1, likeliest), q.gather(1, likeliest[:-1])
    # After top-k or top-p a model may give nothing to any of them: it is taken to agree with the other.
    p[:-1], q = p[:-1].where(p[:-1].sum(1, keepdim=True) > 0, q), q.where(q.sum(1, keepdim=True) > 0, p[:-1])
    return p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True), likeliest[:-1]


def _joint_laws(
    strategy: str | AcceptanceStrategy,
    target: torch.Tensor | Model,
    draft: torch.Tensor | Model | None,
    num_draft_tokens: int | None,
    draft_token_ids: Sequence[int] | torch.Tensor | None,
    state: State | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    emitted = law(
        strategy, target, draft, num_draft_tokens=num_draft_tokens, draft_token_ids=draft_token_ids, state=state
    )
    length = length_of(target, num_draft_tokens) + 1
    return complete(emitted, target, length), complete({(): 1.0}, target, length)


def _tv(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().sum() / 2)


def _kl(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found = found.where(found > ROUNDING, 0)  # outside of p's support, what rounding leaves would be infinite
    return float((torch.xlogy(found, found) - torch.xlogy(found, wanted)).sum())
