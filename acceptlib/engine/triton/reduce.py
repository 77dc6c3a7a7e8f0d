"""Stages that go through whole rows, block by block, before the decision.

Where a strategy stops at the first rejection and there are rows enough, programs are ordered by position, so that rows
of later positions come last; a row's last program decides its position, and programs of rows beyond the stop leave:
these rows are never read. Otherwise later positions come first.
"""

# ruff: noqa: N803, N806, RET505, RUF005 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import counters, decide, laws, min_p, rows, select
from acceptlib.engine.triton.binding import evaluate
from acceptlib.engine.triton.rows import BOTH, DRAFT, KEEP, LARGEST_INT32, TARGET
from acceptlib.engine.triton.sums import MAGNITUDE_LIMIT, MAGNITUDE_SCALE, ROW_SUM_LIMIT, SUM_SCALE, fours


class Row(NamedTuple):
    """One position's rows for elementwise rules: the drafted token, -1 at a bonus row, its scalars, and both laws."""

    token: tl.tensor
    scalars: tl.tuple
    target_law: laws.Law
    draft_law: laws.Law


class Block(NamedTuple):
    """Entry numbers and a block of both rows as they are given, [BLOCK]."""

    entry: tl.tensor
    target: tl.tensor
    draft: tl.tensor


@triton.jit
def reduce_rows(position, count, program, request, ROWS: tl.constexpr, CALL: tl.constexpr):
    """Find what the law of one of ROWS at a position needs of some blocks; decide the position if the last to do so.

    Programs of the target's row come first, then those of the draft's: a program that holds blocks of both would leave
    room for half as many.
    """
    if counters.needed(position, position <= count, request, CALL, LATEST=False):
        step = tl.num_programs(0) // (CALL.num_reduced if ROWS == BOTH else 1)
        if CALL.reduces[TARGET] and ROWS != DRAFT:
            if program < step:
                reduce_row(position, position <= count, program, step, request, request.target, CALL, TARGET)
                if CALL.joins:
                    close_row(position, position <= count, step, count, request, request.target, CALL, TARGET)
        if CALL.reduces[DRAFT] and ROWS != TARGET:
            first = program - (tl.num_programs(0) - step)
            if first >= 0:
                reduce_row(position, position < count, first, step, request, request.draft, CALL, DRAFT)
                if CALL.joins:
                    close_row(position, position < count, step, count, request, request.draft, CALL, DRAFT)
        if CALL.lazy and not (CALL.needs_sums or CALL.filters):
            if counters.arrive(counters.of_row(position, counters.DECIDED_BY, request), tl.num_programs(0)):
                decide.settle(position, count, request, CALL)


@triton.jit
def reduce_row(position, exists, first, step, request, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find what the law of one row needs of every `step`th block from the first on."""
    if CALL.loops:
        for block in tl.range(first, request.num_blocks, step, num_stages=CALL.blocks_ahead + 1):
            reduce_block(position, exists, block, request, model, CALL, MODEL)
    else:
        reduce_block(position, exists, first, request, model, CALL, MODEL)


@triton.jit
def reduce_block(position, exists, block, request, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find what the law of one row needs of one block."""
    num_blocks = request.num_blocks
    entries = rows.entries_from(block * CALL.block, CALL.block)
    x = rows.load_block(model, position, entries, exists, exists, float("-inf"), KEEP, CALL, MODEL)
    if MODEL == DRAFT and not CALL.logits[DRAFT]:
        x = tl.where(x > 0, x, 0.0)  # NaN counts as 0
    if CALL.lists_runs and CALL.filtered[MODEL]:
        min_p.store_block(x, entries.each, model, position, block, num_blocks, exists, CALL, MODEL)
    else:
        laws.store_block(x, entries.each, model, position, block, num_blocks, exists, CALL, MODEL)
    if CALL.raw and MODEL == TARGET:
        laws.reduce_raw(x, entries.each, model, position, block, num_blocks, exists, CALL)


@triton.jit
def close_row(position, exists, step, count, request, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find a row's law if its last program to come here, and decide the position if that is the last of its laws."""
    if counters.arrive(counters.of_row(position, counters.REDUCED_BY + MODEL, request), step):
        if CALL.filtered[MODEL]:
            if exists:
                select.store_law(position, request.num_blocks, model, CALL, MODEL)
        if not CALL.needs_sums:
            if counters.arrive(counters.of_row(position, counters.DECIDED_BY, request), CALL.num_reduced):
                decide.settle(position, count, request, CALL)


@triton.jit
def sum_rows(position, count, block, request, CALL: tl.constexpr):
    """Add up the strategy's row sums over one block; finish the row, and decide, if the last to do so."""
    if counters.needed(position, position < count, request, CALL, LATEST=True):
        num_blocks = request.num_blocks
        partials_ptr = request.sums_ptr + position.to(tl.int64) * num_blocks
        size = request.num_positions * num_blocks
        magnitudes_ptr = partials_ptr + (len(CALL.sums) + CALL.top_k) * size
        length = decide.length_of(request, count)
        entries = rows.entries_from(block * CALL.block, CALL.block)
        raw = load_both(entries, position, position < length, KEEP, request, CALL)
        row = open_row(position, length, request, CALL)
        entry, p, q, is_drafted = elements(raw, row, request, CALL)
        inside = entry < request.vocab_size
        numbers = (p, q, is_drafted) + as_rows(row.scalars)
        for i in tl.static_range(len(CALL.sums)):
            terms = tl.where(inside, evaluate(CALL.sums[i], numbers, tl.float32), 0.0)
            # NaN counts as beyond the limit. Sums wrap only beyond it, and sums of magnitudes never do.
            terms = tl.where(tl.abs(terms) < ROW_SUM_LIMIT, terms, ROW_SUM_LIMIT)
            tl.store(partials_ptr + i * size + block, tl.sum((terms * SUM_SCALE).to(tl.int64), 0))
            magnitude = tl.sum((fours(tl.abs(terms)) * MAGNITUDE_SCALE).to(tl.int64), 0)
            tl.store(magnitudes_ptr + i * size + block, magnitude)
        left = tl.where(inside, tl.where(p == p, p, float("inf")), -1.0)  # an infinity makes the entropy NaN
        TOP_K: tl.constexpr = CALL.top_k
        for i in tl.static_range(TOP_K):
            largest = tl.max(left, 0)
            left = tl.where(entry == tl.min(tl.where(left == largest, entry, LARGEST_INT32), 0), -1.0, left)
            bits = largest.to(tl.float64).to(tl.int64, bitcast=True)
            tl.store(partials_ptr + (len(CALL.sums) + i) * size + block, bits)
        if counters.arrive(counters.of_row(position, counters.SUMMED_BY, request), num_blocks):
            index = tl.arange(0, CALL.max_blocks)
            scalars_ptr = request.scalars_ptr + position
            for i in tl.static_range(len(CALL.sums)):
                part = partials_ptr + i * size + index
                totals = tl.load(part, mask=index < num_blocks, other=0, cache_modifier=".cg")
                scalar = tl.sum(totals, 0).to(tl.float64) / SUM_SCALE
                part = magnitudes_ptr + i * size + index
                magnitudes = tl.load(part, mask=index < num_blocks, other=0, cache_modifier=".cg")
                scalar = tl.where(tl.sum(magnitudes, 0) < MAGNITUDE_LIMIT, scalar, float("nan"))
                tl.store(scalars_ptr + i * request.num_positions, scalar)
            if CALL.top_k:
                entropy = top_entropy(partials_ptr + len(CALL.sums) * size, size, num_blocks, CALL)
                tl.store(scalars_ptr + CALL.top_scalar * request.num_positions, entropy)
            if CALL.lazy:
                tl.debug_barrier()
                decide.settle(position, count, request, CALL)


@triton.jit
def top_entropy(tops_ptr, size, num_blocks, CALL: tl.constexpr):
    """Return the entropy of the largest entries of a row, renormalised, from those of its blocks, in order."""
    TOP_K: tl.constexpr = CALL.top_k
    index = tl.arange(0, CALL.max_blocks)
    taken = index * 0
    total = tl.full((), 0.0, tl.float64)
    logs = tl.full((), 0.0, tl.float64)
    for _ in tl.static_range(TOP_K):
        mask = (index < num_blocks) & (taken < CALL.top_k)
        bits = tl.load(tops_ptr + taken * size + index, mask=mask, other=0, cache_modifier=".cg")
        heads = tl.where(mask, bits.to(tl.float64, bitcast=True), -1.0)
        largest = tl.max(heads, 0)
        taken += (index == tl.min(tl.where(heads == largest, index, LARGEST_INT32), 0)).to(tl.int32)
        largest = tl.maximum(largest, 0.0)
        total += largest
        logs += tl.where(largest > 0, largest * tl.log(tl.where(largest > 0, largest, 1.0)), 0.0)
    return tl.log(total) - logs / total


@triton.jit
def open_row(position, length, request, CALL: tl.constexpr):
    """Return one position's rows for elementwise rules."""
    target, draft = request.target, request.draft
    num_blocks = request.num_blocks
    lane = tl.zeros((1,), tl.int32)
    target_parts = laws.load_parts(target, lane + position, lane == 0, num_blocks, CALL, TARGET)
    draft_parts = target_parts
    if CALL.has_draft:
        exists = lane + (position < length).to(tl.int32) != 0
        draft_parts = laws.load_parts(draft, lane + position, exists, num_blocks, CALL, DRAFT)
    pair = laws.pair_at(laws.both(target, target_parts, draft, draft_parts, CALL), lane == 0, CALL)
    return row_of(position, length, pair, request, CALL)


@triton.jit
def row_of(position, length, pair, request, CALL: tl.constexpr):
    """Return one position's rows for elementwise rules, given their laws."""
    drafted = position < length
    token = decide.tokens_at(request, position, drafted, 0)
    inside = drafted & (token < request.vocab_size)
    entries = decide.load_drafted(position, token, inside, request, CALL)
    found = decide.values(position, token, inside, entries, length, request, pair, CALL)
    return Row(tl.where(drafted, token, -1), found, pair.target, pair.draft)


@triton.jit
def load_both(entries, position, drafted, POLICY: tl.constexpr, request, CALL: tl.constexpr):
    """Return entries [BLOCK] of both rows as they are given; see `rows.load_block`.

    Beyond the rows, and where they are not needed, it has what becomes a probability of 0, unless the law is greedy.
    """
    target, draft = request.target, request.draft
    entry = entries.each
    # A greedy row is known without reading it.
    wanted = position >= 0
    if CALL.temperature[TARGET]:
        wanted = target.temperature > 0
    read = entry < tl.where(wanted, request.vocab_size, 0)
    x = rows.load_block(target, position, entries, read, wanted, nothing(CALL, TARGET), POLICY, CALL, TARGET)
    y = x
    if CALL.has_draft:
        wanted = drafted
        if CALL.temperature[DRAFT]:
            wanted = wanted & (draft.temperature > 0)
        read = entry < tl.where(wanted, request.vocab_size, 0)
        y = rows.load_block(draft, position, entries, read, wanted, nothing(CALL, DRAFT), POLICY, CALL, DRAFT)
    return Block(entry, x, y)


@triton.jit
def nothing(CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what a load has in the place of an entry that does not exist: what becomes a probability of 0."""
    return float("-inf") if CALL.logits[MODEL] else 0.0


@triton.jit
def elements(raw, row, request, CALL: tl.constexpr):
    """Return entry numbers, p, q and is_drafted of a loaded block, [BLOCK]."""
    p = laws.prob(raw.target, raw.entry, request.target, row.target_law, CALL, TARGET)
    is_drafted = raw.entry == row.token
    q = is_drafted.to(tl.float32)
    if CALL.has_draft:
        q = laws.prob(raw.draft, raw.entry, request.draft, row.draft_law, CALL, DRAFT)
        q = tl.where(q > 0, q, 0.0)  # NaN counts as 0
    return raw.entry, p, q, is_drafted


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
