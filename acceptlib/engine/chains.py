"""Greedy requests on the CPU, one after the other: with few numbers, plain Python decides soonest.

A row's argmax is found only if the chain reaches the row. No rule is evaluated, because its result is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from acceptlib.arrays import Array, as_array
from acceptlib.engine import rows
from acceptlib.engine.plan import Plan
from acceptlib.inputs import Inputs
from acceptlib.result import INVALID_ROW, INVALID_TOKEN_ID, OK, PLACEHOLDER_TOKEN_ID, VerifyResult
from acceptlib.rng import Rng

FEW_REQUESTS: Final = 32
FEW_ROWS: Final = 160
"""Up to both limits this is quicker than arrays, however short rows are and even if all are read."""


def can_walk(plan: Plan, inputs: Inputs) -> bool:
    """Return whether `walk` can run a call, and more quickly: rows are few, or so long that leaving some out pays."""
    target = inputs.target
    few = inputs.num_requests <= FEW_REQUESTS and target.data.shape[:-1].numel() <= FEW_ROWS
    return (
        plan.takes_argmaxes
        and not inputs.logprobs
        and not inputs.counts_passed
        and target.data.is_cpu
        and target.data.dtype == torch.float32
        and (few or target.data.shape[-1] >= rows.LONG_ROW)
        and target.data.is_contiguous()
        and not target.is_constrained
    )


def walk(inputs: Inputs, out: VerifyResult) -> None:
    """Verify requests whose tokens are argmaxes of their rows; see `AcceptanceStrategy.verify`."""
    if isinstance(inputs.rng, Rng) and inputs.rng.advances:  # a step like any other
        inputs.rng.offsets.add_(1)
    least = -torch.inf if inputs.target.is_logits else 0.0
    given = inputs.target.data.detach().view(-1, inputs.vocab_size).numpy()
    bonus = None if inputs.bonus_token_ids is None else inputs.bonus_token_ids.tolist()
    results = []
    for request, (first, ids, status) in enumerate(_chains(inputs)):
        found = 0, PLACEHOLDER_TOKEN_ID, status
        if status == OK:
            found = _walk_one(given, first, ids, None if bonus is None else bonus[request], least)
        results.append((ids, *found))
    write(out, results)


def write(out: VerifyResult, results: list[tuple[list[int], int, int, int]]) -> None:
    """Fill in a result from each request's drafted tokens, how many stand, the token that follows, and `Status`.

    Where none follows, the token is `PLACEHOLDER_TOKEN_ID`.
    """
    most = out.output_token_ids.shape[1] - 1
    tokens = [[*ids[:stop], token, *[PLACEHOLDER_TOKEN_ID] * (most - stop)] for ids, stop, token, _ in results]
    as_array(out.output_token_ids)[:] = tokens
    as_array(out.num_accepted)[:] = [stop for _, stop, _, _ in results]
    as_array(out.num_emitted)[:] = [stop + (status == OK) for _, stop, _, status in results]
    as_array(out.status)[:] = [status for *_, status in results]


def end_of(ids: list[int]) -> int:
    """Return how many drafted tokens come before the first placeholder."""
    return next((position for position, drafted in enumerate(ids) if drafted < 0), len(ids))


def _walk_one(given: Array, first: int, ids: list[int], bonus: int | None, least: float) -> tuple[int, int, int]:
    """Return how many tokens of a chain stand, the one that follows them, and the `Status`.

    Args:
        given: All rows [n, V].
        first: Number of the request's first row.
        ids: The drafted tokens, and `PLACEHOLDER_TOKEN_ID` behind them if the chain ends before its count.
        bonus: The given bonus token, which follows if all stand, or None.
        least: A row has a law only if its largest entry is above this.
    """
    vocab_size = given.shape[1]
    for stop, drafted in enumerate((*ids, None)):
        if drafted is None and bonus is not None:
            return (stop, bonus, OK) if 0 <= bonus < vocab_size else (stop, PLACEHOLDER_TOKEN_ID, INVALID_TOKEN_ID)
        row = given[first + stop]
        best = int(row.argmax())
        if not least < row[best] < torch.inf:
            break
        if drafted is not None and drafted >= vocab_size:
            return stop, PLACEHOLDER_TOKEN_ID, INVALID_TOKEN_ID
        if drafted != best:
            return stop, best, OK
    return stop, PLACEHOLDER_TOKEN_ID, INVALID_ROW


def _chains(inputs: Inputs) -> Iterator[tuple[int, list[int], int]]:
    """Yield each request's first row, its drafted tokens as `_walk_one` takes them, and its `Status` so far."""
    if inputs.cu_num_draft_tokens is None and inputs.target.is_plain:
        each = inputs.target.data.shape[1]
        for request, ids in enumerate(inputs.draft_token_ids.tolist()):
            yield request * each, ids[: end_of(ids)], OK
        return
    layout = rows.Layout(inputs, reads_draft=False)
    first = rows.row_number(inputs.target.data, layout.index("target", layout.request, 0 * layout.request))
    faults = layout.request * OK if layout.faults is None else layout.faults
    # A token outside the vocabulary was clamped, perhaps to the argmax.
    drafted = np.where(layout.outside, inputs.vocab_size, layout.ids)
    of_requests = zip(first, drafted, layout.num_draft_tokens, layout.reached_end, faults, strict=True)
    for row, ids, count, whole, fault in of_requests:
        yield int(row), [*ids[:count].tolist(), *[PLACEHOLDER_TOKEN_ID] * (not whole)], int(fault)
