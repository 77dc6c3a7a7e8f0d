"""The exact law of a strategy, by enumeration in float64.

A rule returns a probability, so what a strategy emits needs no sampling: every drafted sequence (weighted by the
draft), every pattern of acceptances (weighted by h) and every token of the final draw is summed over. Lossless is then
an equality to rounding, and a lossy rule's distance from the target a number.
"""

from __future__ import annotations

import itertools
import math
import operator
import reprlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from acceptlib.engine import decide
from acceptlib.engine.constants import ROW_SUM_LIMIT, ROW_TOLERANCE
from acceptlib.engine.plan import Plan, evaluate
from acceptlib.errors import EnumerationError, InputError, StrategyDefinitionError, expect_int, short_repr
from acceptlib.registry import as_strategy
from acceptlib.rules import Rule
from acceptlib.strategy import AcceptanceStrategy
from acceptlib.tensors import made_on_cpu

Model: TypeAlias = Callable[[tuple[int, ...]], torch.Tensor]
"""Maps the tokens emitted or drafted so far to the next row [V]."""

State: TypeAlias = Mapping[str, float | torch.Tensor]
"""One request's state by name: numbers, bools or [1] tensors."""

MAX_OUTCOMES: Final = 4_000_000
"""Drafted sequences times acceptance patterns times vocabulary, or sequences of a joint law, that may be enumerated."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a strategy's rules say of N drafted sequences of length K, before any random number.

    Attributes:
        h: [N, K] float64, the probability that each drafted token is accepted.
        may_stand: [N, K] bool, whether it may stand although rejected; None where the strategy has no such rule.
        weights: [N, K, V] float64, the weights of the draw after a rejection at each position; [1, K, V] where the
            rows and the rule do not depend on the sequence.
    """

    h: torch.Tensor
    may_stand: torch.Tensor | None
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Steps:
    """Verification of N drafted sequences of length K, in exact probabilities.

    Attributes:
        stops: [N, K+1] float64, the probability that exactly so many drafted tokens stand.
        emits: [N, K+1, V] float64, the law of the token emitted after each stop.
    """

    stops: torch.Tensor
    emits: torch.Tensor


@made_on_cpu()
def law(
    strategy: str | AcceptanceStrategy,
    target: torch.Tensor | Model,
    draft: torch.Tensor | Model | None = None,
    *,
    num_draft_tokens: int | None = None,
    draft_token_ids: Sequence[int] | torch.Tensor | None = None,
    state: State | None = None,
) -> dict[tuple[int, ...], float]:
    """Return the law of the tokens that one step emits.

    Rows are normalised in float64, so that rows of float32 show no distance where there is none.

    Args:
        strategy: Any strategy that is given by rules, or its name.
        target: Rows [K+1, V] of probabilities, the same whatever was drafted; or a function from the tokens so far to a
            row [V], as a real model is.
        draft: Rows [K, V'] or such a function; the drafted tokens are drawn from it. V' is at most V. None with
            `draft_token_ids`.
        num_draft_tokens: K, needed where `target` is a function.
        draft_token_ids: A fixed draft of K tokens: one-hot rows where `draft` is None (an n-gram), otherwise the law
            given it.
        state: The request's `Traits.state` by name; that of a new request if None.

    Returns:
        Probability by emitted sequence, of length 1 to K+1, those above 0 only.

    Raises:
        EnumerationError: There is too much to enumerate.
        InputError: The arguments do not go together, a row is no law, `state` lacks a name, or the strategy overrides
            `verify` whole.
        StrategyDefinitionError: A rule returns NaN.
    """
    strategy = as_strategy(strategy)
    plan, given = plan_of(strategy), num_draft_tokens
    target_at = as_model(target, "target")
    num_draft_tokens = length_of(target, given)
    if draft is None and draft_token_ids is None:
        msg = "expected a draft, or draft_token_ids for a one-hot draft, got neither"
        raise InputError(msg)
    vocab_size = len(target_at(()))
    draft_at = None if draft is None else as_model(draft, "draft", vocab_size)
    # If a length was given, rows beyond it are left out. Otherwise they mean that the target's bonus row is missing.
    if isinstance(draft, torch.Tensor) and (
        len(draft) < num_draft_tokens or (given is None and len(draft) > num_draft_tokens)
    ):
        msg = f"draft: expected [K, V] = [{num_draft_tokens}, {vocab_size}], got {list(draft.shape)}"
        raise InputError(msg)
    fixed = None if draft_token_ids is None else _fixed_draft(draft_token_ids, num_draft_tokens, vocab_size)
    num_sequences = 1 if fixed is not None else vocab_size**num_draft_tokens
    outcomes = num_sequences * 2**num_draft_tokens * vocab_size
    if outcomes > MAX_OUTCOMES:
        msg = (
            f"{num_sequences} drafted sequences, {2**num_draft_tokens} acceptance patterns and {vocab_size} tokens are "
            f"{outcomes} outcomes, above {MAX_OUTCOMES}: use a smaller vocabulary or fewer drafted tokens"
        )
        raise EnumerationError(msg)
    drafts = [fixed] if fixed is not None else list(itertools.product(range(vocab_size), repeat=num_draft_tokens))
    ids = torch.tensor(drafts, dtype=torch.int64).view(len(drafts), num_draft_tokens)
    p = _rows(target_at, drafts, num_draft_tokens + 1)
    q = functional.one_hot(ids, vocab_size).to(torch.float64)
    weight = torch.ones(len(drafts), dtype=torch.float64)
    if draft_at is not None and num_draft_tokens:
        q = _rows(draft_at, drafts, num_draft_tokens)
        if fixed is None:
            weight = q.gather(2, ids[..., None])[..., 0].prod(1)
    steps = verify_exactly(plan, ids, p, q, as_state(strategy, state))
    found: defaultdict[tuple[int, ...], float] = defaultdict(float)
    joint = weight[:, None, None] * steps.stops[..., None] * steps.emits
    for sequence, stop, token in joint.nonzero().tolist():
        found[(*drafts[sequence][:stop], token)] += float(joint[sequence, stop, token])
    return dict(found)


@made_on_cpu()
def complete(emitted: Mapping[tuple[int, ...], float], target: torch.Tensor | Model, length: int) -> torch.Tensor:
    """Return the joint law of the first `length` tokens, [V, ...] float64, sampling on from the target.

    A step that emits fewer tokens is continued by the target's own samples: a strategy is lossless iff the result is
    the target's joint law, which is `complete({(): 1.0}, target, length)`.

    Args:
        emitted: Probability by sequence, as `law` returns it.
        target: Rows [length, V] or more, or a function from the tokens so far to a row [V].
        length: How many tokens.

    Raises:
        EnumerationError: There are too many sequences of that length.
        InputError: A row is no law, there are too few rows, or the length is not an int >= 0.
    """
    expect_int("length", length)
    if isinstance(target, torch.Tensor) and len(target) < length:
        msg = f"target: expected at least [{length}, V] for {length} tokens, got {list(target.shape)}"
        raise InputError(msg)
    target_at = as_model(target, "target")
    vocab_size = len(target_at(()))
    if vocab_size**length > MAX_OUTCOMES:
        msg = (
            f"a joint law of {length} tokens has {vocab_size**length} entries, above {MAX_OUTCOMES}: use a smaller "
            "vocabulary or fewer tokens"
        )
        raise EnumerationError(msg)
    joint = torch.zeros((vocab_size,) * length, dtype=torch.float64)
    for sequence, probability in emitted.items():
        for tail in itertools.product(range(vocab_size), repeat=max(length - len(sequence), 0)):
            full = (*sequence, *tail)[:length]
            chances = (float(target_at(full[:position])[full[position]]) for position in range(len(sequence), length))
            joint[full] += math.prod(chances, start=probability)
    return joint


def as_state(strategy: AcceptanceStrategy, state: State | None) -> dict[str, torch.Tensor]:
    """Return a request's state as [1] tensors by name; that of a new request for None.

    Raises:
        InputError: Names are not those of `Traits.state`.
    """
    if state is None:
        state = strategy.initial_state(1, "cpu")
    declared = plan_of(strategy).traits.state
    if {*state} != {*declared}:
        msg = f"state: expected {', '.join(declared) or 'none'}, got {', '.join(sorted(map(str, state))) or 'none'}"
        raise InputError(msg)
    # Left to itself, torch makes float32 of a plain number.
    return {
        name: torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None).view(1)
        for name, value in state.items()
    }


@made_on_cpu()
def verify_exactly(
    plan: Plan,
    ids: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor | None = None,
) -> Steps:
    """Verify N drafted sequences and return probabilities instead of tokens; arguments are those of `acceptance`.

    Raises:
        StrategyDefinitionError: A rule returns NaN, so that there are no probabilities.
    """
    num_sequences, length = ids.shape
    rules = acceptance(plan, ids, p, q, state, token_ids)
    for role, numbers in (("accept", rules.h), ("residual", rules.weights)):
        for index, position in numbers.isnan().nonzero()[:1, :2].tolist():
            before, token = ids[index, :position].tolist(), int(ids[index, position])
            target, draft = (reprlib.repr(rows[index, position].tolist()) for rows in (p, q))
            msg = (
                f"strategy {plan.name!r}: rule {role!r} returned NaN at position {position}, for token {token} drafted "
                f"after {before}, where p = {target} and q = {draft}"
            )
            raise StrategyDefinitionError(msg)
    # Every pattern of acceptances, [N * 2^K, K].
    patterns = (torch.arange(2**length)[:, None] >> torch.arange(length)) % 2 == 1
    accepted = patterns.repeat(num_sequences, 1)
    stop = decide.stop_position(
        plan,
        accepted,
        None if rules.may_stand is None else rules.may_stand.repeat_interleave(len(patterns), 0),
        torch.full((len(accepted),), length),
    )
    h = probability_of(rules.h)[:, None]
    chances = torch.where(patterns, h, 1 - h).prod(-1)
    stops = torch.zeros(num_sequences, length + 1, dtype=torch.float64)
    stops.scatter_add_(1, stop.view(num_sequences, -1), chances)
    bonus = p[:, -1:]
    recovered = draw_law(rules.weights, p[:, :-1], plan.traits.recovered)
    emits = torch.cat((recovered, draw_law(bonus, bonus, plan.traits.bonus)), 1)
    return Steps(stops=stops, emits=emits)


def probability_of(h: torch.Tensor) -> torch.Tensor:
    """Return how probable it is that u < h, of a uniform u: of a rule that does not stay within [0, 1] too."""
    return h.clamp(0, 1)


@made_on_cpu()
def acceptance(
    plan: Plan,
    ids: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor | None = None,
) -> Acceptance:
    """Return what the rules say of N drafted sequences of length K.

    Args:
        plan: A strategy's `plan`.
        ids: [N, K] int64, the sequences.
        p: [N, K+1, V] float64, the target's rows.
        q: [N, K, V] float64, the draft's rows; one-hot at `ids` where there are none.
        state: [N] or [1] tensors by name, as `initial_state` returns them.
        token_ids: [K, V], the tokens that the entries of cut rows stand for; None where they are 0..V-1.
    """
    num_sequences, length = ids.shape
    num_draft_tokens = torch.full((num_sequences,), length)
    values = decide.positional(plan, num_draft_tokens, length, state)
    values |= row_scalars(plan, ids, p[:, :-1], q, values)
    if token_ids is not None:
        values["draft_token_id"] = token_ids.gather(1, ids.T).T.to(torch.float64)
    carry = decide.run_carry(plan, values, ids)
    weights = residuals(plan, ids, p[:, :-1], q, {**values, "carry": carry[:, :-1]})

    def next_residual_mass() -> torch.Tensor:
        return functional.pad(weights.sum(-1)[:, 1:], (0, 1))

    h = decide.acceptance(plan, values, carry, next_residual_mass).to(torch.float64)
    return Acceptance(h=h, may_stand=decide.forgiven(plan, values, carry), weights=weights)


def row_scalars(
    plan: Plan,
    ids: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    given: decide.Values,
) -> decide.Values:
    """Return what rules read of rows at drafted tokens, float64.

    Args:
        plan: The strategy's plan.
        ids: [N, K] int64.
        p: [N, K, V] or [1, K, V] float64; with the latter, what does not depend on the token comes back as [1, K].
        q: The same for the draft.
        given: What `decide.positional` says of the positions.
    """
    at = ids[..., None]
    values: decide.Values = {
        "draft_token_id": ids.to(torch.float64),
        "target_prob": p.expand(len(ids), -1, -1).gather(-1, at)[..., 0],
        "draft_prob": q.expand(len(ids), -1, -1).gather(-1, at)[..., 0],
    }
    if "target_max_prob" in plan.reads:
        values["target_max_prob"] = p.amax(-1)
    if "draft_max_prob" in plan.reads:
        values["draft_max_prob"] = q.amax(-1)
    if "is_target_argmax" in plan.reads:
        values["is_target_argmax"] = p.argmax(-1) == ids
    if "target_entropy" in plan.reads:
        values["target_entropy"] = -torch.xlogy(p, p).sum(-1)
    if "target_top_entropy" in plan.reads:
        top = p.topk(min(plan.traits.top_k, p.shape[-1])).values
        top = top / top.sum(-1, keepdim=True)
        values["target_top_entropy"] = -torch.xlogy(top, top).sum(-1)
    # The same for all sequences.
    of_positions = {name: value[:1] for name, value in given.items() if name == "position" or name in plan.constants}
    for name, row_sum in plan.used_row_sums.items():
        terms = _elementwise(row_sum, ids, p, q, {**values, **of_positions}, plan.numbers)
        values[name] = terms.sum(-1).masked_fill(~(terms.abs().sum(-1) < ROW_SUM_LIMIT), torch.nan)
    return values


def residuals(
    plan: Plan,
    ids: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    values: decide.Values,
) -> torch.Tensor:
    """Return the weights [N, K, V] of the draw after a rejection at each position.

    They are [1, K, V] if `p` is and if they do not depend on the drafted token. `values` holds `carry` as it is before
    each position; the rest is as for `row_scalars`.
    """
    if plan.residual is None:
        return p
    return _elementwise(plan.residual, ids, p, q, values, plan.numbers).clamp(min=0)


def draw_law(weights: torch.Tensor, p: torch.Tensor, how: str) -> torch.Tensor:
    """Return the law [..., V] of the token drawn from weights, or from `p` where they leave nothing."""
    # What rounding leaves of p - p is not a residual.
    nothing_left = weights.sum(-1, keepdim=True) < torch.finfo(torch.float64).eps
    weights = torch.where(nothing_left, p, weights)
    if how == "argmax":
        return functional.one_hot(weights.argmax(-1), p.shape[-1]).to(torch.float64)
    return weights / weights.sum(-1, keepdim=True)


def _elementwise(
    rule: Rule,
    ids: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    values: decide.Values,
    numbers: Mapping[str, float],
) -> torch.Tensor:
    read = {name: value[..., None] for name, value in values.items() if name in rule.names}
    read |= {"p": p, "q": q}
    if "is_drafted" in rule.names:
        read["is_drafted"] = functional.one_hot(ids, p.shape[-1]).bool()
    # One number, or one per position, stands for every entry.
    weights: torch.Tensor = evaluate(rule, read, numbers) + torch.zeros_like(p)
    return weights


def plan_of(strategy: AcceptanceStrategy) -> Plan:
    """Return a strategy's rules.

    Raises:
        InputError: It overrides `verify` whole and has none.
    """
    plan = strategy.plan
    if plan is None:
        msg = f"strategy {strategy.name!r} overrides verify whole: it has no rules whose law could be enumerated"
        raise InputError(msg)
    return plan


def length_of(target: torch.Tensor | Model, num_draft_tokens: int | None) -> int:
    """Return K, which is taken from the target's rows if it is not given.

    Raises:
        InputError: Neither says it, or there are too few rows.
    """
    given = num_draft_tokens
    if given is not None:
        expect_int("num_draft_tokens", given)
    if not isinstance(target, torch.Tensor):
        if given is None:
            msg = "num_draft_tokens: expected an int where the target is a function, got None"
            raise InputError(msg)
        return int(given)  # NumPy's too
    length = len(target) - 1 if given is None else int(given)
    if target.ndim != 2 or not 0 <= length < len(target):  # noqa: PLR2004 - rows of entries
        rows = "[K+1, V]" if given is None else f"at least [{length + 1}, V] for {length} drafted tokens"
        msg = f"target: expected {rows}, got {list(target.shape)}"
        raise InputError(msg)
    return length


def as_model(rows: torch.Tensor | Model, name: str, vocab_size: int | None = None) -> Model:
    """Return rows as a function, or a function that checks, normalises and keeps what `rows` returns.

    Errors begin with `name`.

    Raises:
        InputError: They are neither a tensor nor a function; when called, where a row is no law over `vocab_size`
            entries.
    """
    if not isinstance(rows, torch.Tensor) and not callable(rows):
        msg = f"{name}: expected a torch.Tensor or a function of the tokens so far, got {type(rows).__name__}"
        raise InputError(msg)
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def row(prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in known:
            given = rows[len(prefix)] if isinstance(rows, torch.Tensor) else rows(prefix)
            exact = torch.as_tensor(given, dtype=torch.float64).detach()
            total = exact.sum()
            fits = exact.ndim == 1 and (vocab_size is None or len(exact) <= vocab_size)
            law = fits and bool((exact >= 0).all())
            if not law or not abs(float(total) - 1) <= ROW_TOLERANCE:
                size = "V" if vocab_size is None else f"{vocab_size}, as the target's, or fewer"
                msg = (
                    f"{name}, after tokens {prefix}: expected [{size}] probabilities that sum to 1 (of logits, their "
                    f"softmax), got {list(exact.shape)}: {short_repr(exact.tolist())}"
                )
                raise InputError(msg)
            missing = 0 if vocab_size is None else vocab_size - len(exact)  # a draft's vocabulary may be narrower
            known[prefix] = functional.pad(exact / total, (0, missing))
        return known[prefix]

    return row


def _fixed_draft(ids: Sequence[int] | torch.Tensor, length: int, vocab_size: int) -> tuple[int, ...]:
    """Return a given draft of so many tokens.

    Raises:
        InputError: It is another number of them, or not of integers in the vocabulary.
    """
    try:
        found = tuple(map(operator.index, ids))
    except TypeError:
        found = None
    if found is None or len(found) != length or not all(0 <= token < vocab_size for token in found):
        msg = f"draft_token_ids: expected {length} ids in [0, {vocab_size}), got {short_repr(found or ids)}"
        raise InputError(msg)
    return found


def _rows(model: Model, drafts: list[tuple[int, ...]], count: int) -> torch.Tensor:
    return torch.stack([torch.stack([model(draft[:position]) for position in range(count)]) for draft in drafts])
