"""One position's rows for elementwise rules: blocks of both models' rows, as probabilities, beside the scalars."""

# ruff: noqa: N803, RET505, RUF005 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import laws, pairs, positions, rows
from acceptlib.engine.triton.rows import DRAFT, TARGET


class Row(NamedTuple):
    """One position's rows for elementwise rules: the drafted token, -1 at a bonus row, its scalars, and both laws."""

    token: tl.tensor
    scalars: tl.tuple
    target_law: laws.Law
    draft_law: laws.Law


class Block(NamedTuple):
    """Entry numbers and a block of both rows, after bias and mask, [BLOCK]."""

    entry: tl.tensor
    target: tl.tensor
    draft: tl.tensor


@triton.jit
def open_row(position, length, request, CALL: tl.constexpr):
    """Return one position's rows for elementwise rules."""
    target, draft = request.target, request.draft
    lane = tl.zeros((1,), tl.int32)
    target_parts = laws.load_parts(target, lane + position, lane == 0, CALL, TARGET)
    draft_parts = target_parts
    if CALL.has_draft:
        exists = lane + (position < length).to(tl.int32) != 0
        draft_parts = laws.load_parts(draft, lane + position, exists, CALL, DRAFT)
    pair = pairs.pair_at(pairs.both(target, target_parts, draft, draft_parts, CALL), lane == 0, CALL)
    return row_of(position, length, pair, request, CALL)


@triton.jit
def row_of(position, length, pair, request, CALL: tl.constexpr):
    """Return one position's rows for elementwise rules, given their laws."""
    drafted = position < length
    token = positions.tokens_at(request, position, drafted, 0)
    inside = drafted & (token < request.vocab_size)
    entries = positions.load_drafted(position, token, inside, request, CALL)
    found = positions.values(position, token, inside, entries, length, request, pair, CALL)
    return Row(tl.where(drafted, token, -1), found, pair.target, pair.draft)


@triton.jit
def load_both(entries, position, drafted, POLICY: tl.constexpr, request, CALL: tl.constexpr):
    """Return entries [BLOCK] of both rows, after bias and mask; see `rows.load_block`.

    Entries beyond the rows, and those not needed, have a value that becomes a probability of 0, unless the law is
    greedy.
    """
    target, draft = request.target, request.draft
    entry = entries.each
    # A greedy row is known without reading it.
    wanted = position >= 0
    if CALL.temperature[TARGET]:
        wanted = target.temperature > 0
    read = entry < tl.where(wanted, request.vocab_size, 0)
    x = rows.load_raw(target, position, entry, read, nothing(CALL, TARGET), POLICY, CALL)
    draft_wanted = drafted
    if CALL.temperature[DRAFT]:
        draft_wanted = draft_wanted & (draft.temperature > 0)
    draft_read = entry < tl.where(draft_wanted, request.vocab_size, 0)
    y = x
    if CALL.has_draft:
        y = rows.load_raw(draft, position, entry, draft_read, nothing(CALL, DRAFT), POLICY, CALL)
    if CALL.masked[TARGET] and not CALL.loops:
        tl.debug_barrier()  # else words of the mask come first, and entries wait for their registers
    x = rows.after_bias_and_mask(x, target, position, entries, read, wanted, CALL, TARGET)
    if CALL.has_draft:
        y = rows.after_bias_and_mask(y, draft, position, entries, draft_read, draft_wanted, CALL, DRAFT)
    return Block(entry, x, y)


@triton.jit
def nothing(CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what stands for an entry that does not exist, and becomes a probability of 0."""
    return float("-inf") if CALL.logits[MODEL] else 0.0


@triton.jit
def probs(raw, row, request, CALL: tl.constexpr):
    """Return p, q and is_drafted of a loaded block, [BLOCK]."""
    p = laws.prob(raw.target, raw.entry, request.target, row.target_law, CALL, TARGET)
    is_drafted = raw.entry == row.token
    q = is_drafted.to(tl.float32)
    if CALL.has_draft:
        q = laws.prob(raw.draft, raw.entry, request.draft, row.draft_law, CALL, DRAFT)
        q = tl.where(q > 0, q, 0.0)  # NaN counts as 0
    return p, q, is_drafted


@triton.jit
def as_rows(scalars):
    """Return scalars as elementwise rules read them: float32, flags as they are."""
    found = ()
    for i in tl.static_range(len(scalars)):
        found = found + (_as_row(scalars[i]),)
    return found


@triton.jit
def _as_row(scalar):
    if scalar.dtype == tl.int1:
        return scalar
    else:
        return scalar.to(tl.float32)
