"""Stages that go through whole rows, block by block, before the decision.

Where a strategy stops at the first rejection and there are rows enough, programs are ordered by position, so that rows
of later positions come last; a row's last program decides its position, and programs of rows beyond the stop leave:
these rows are never read. Otherwise later positions come first.
"""

# ruff: noqa: N803, N806, RUF005 - jit functions; their constants are in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import counters, decide, elements, laws, min_p, positions, rows, scalars, select
from acceptlib.engine.triton.rows import BOTH, DRAFT, KEEP, TARGET
from acceptlib.engine.triton.rules import evaluate


@triton.jit
def reduce_rows(position, count, program, request, ROWS: tl.constexpr, CALL: tl.constexpr):
    """Find what the law of one of ROWS at a position needs of some blocks; decide the position if the last to do so.

    Programs of the target's row come first, then those of the draft's: a program that holds blocks of both would leave
    room for half as many.
    """
    if counters.needed(position, position <= count, request, CALL, LATEST=False):
        step = tl.num_programs(0) // (CALL.num_reduced if ROWS == BOTH else 1)
        if CALL.alike and CALL.joins and not CALL.raw:  # the target's rows alone are reduced as they are given, too
            model, first, exists, of_draft = rows.share_of(program, step, position, count, request)
            reduce_row(position, exists, first, step, request, model, CALL, TARGET)
            close_row(position, exists, of_draft.to(tl.int32), step, count, request, model, CALL, TARGET)
        else:
            if CALL.reduces[TARGET] and ROWS != DRAFT:
                exists = position <= count
                if program < step:
                    reduce_row(position, exists, program, step, request, request.target, CALL, TARGET)
                    if CALL.joins:
                        close_row(position, exists, TARGET, step, count, request, request.target, CALL, TARGET)
            if CALL.reduces[DRAFT] and ROWS != TARGET:
                exists = position < count
                first = program - (tl.num_programs(0) - step)
                if first >= 0:
                    reduce_row(position, exists, first, step, request, request.draft, CALL, DRAFT)
                    if CALL.joins:
                        close_row(position, exists, DRAFT, step, count, request, request.draft, CALL, DRAFT)
        if CALL.lazy and not (CALL.needs_sums or CALL.filters):
            decide.settle(position, count, tl.num_programs(0), request, CALL)


@triton.jit
def reduce_row(position, exists, first, step, request, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find what the law of one row needs of every `step`th block from the first on."""
    if CALL.loops:
        for block in tl.range(first, model.num_blocks, step, num_stages=CALL.blocks_ahead + 1):
            reduce_block(position, exists, block, request, model, CALL, MODEL)
    else:
        reduce_block(position, exists, first, request, model, CALL, MODEL)


@triton.jit
def reduce_block(position, exists, block, request, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find what the law of one row needs of one block."""
    entries = rows.entries_from(block * CALL.block, CALL.block)
    x = rows.load_block(model, position, entries, exists, exists, elements.nothing(CALL, MODEL), KEEP, CALL, MODEL)
    if MODEL == DRAFT and not CALL.logits[DRAFT]:
        x = tl.where(x > 0, x, 0.0)  # NaN counts as 0
    if CALL.lists_runs and CALL.filtered[MODEL]:
        min_p.store_block(x, entries.each, model, position, block, exists, CALL, MODEL)
    else:
        laws.store_block(x, entries.each, model, position, block, exists, CALL, MODEL)
    if CALL.raw and MODEL == TARGET:
        laws.reduce_raw(x, entries.each, model, position, block, exists, CALL)
    if CALL.tops and MODEL == TARGET:
        scalars.store_tops(x, position, block, exists & (position < request.most), request, CALL)


@triton.jit
def close_row(position, exists, whose, step, count, request, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find a row's law if its last program to come here, and decide the position if no other law is missing.

    `whose` is the model's number, also where code under TARGET serves both.
    """
    if counters.arrive(counters.of_row(position, counters.REDUCED_BY + whose, request), step):
        if CALL.filtered[MODEL]:
            if exists:
                select.store_law(position, model, CALL, MODEL)
        if not CALL.needs_sums:
            decide.settle(position, count, CALL.num_reduced, request, CALL)


@triton.jit
def sum_rows(position, count, program, request, CALL: tl.constexpr):
    """Find what needs rows as probabilities, of some blocks; decide the position if the last to do so.

    That is the strategy's row sums, largest entries, and, where `CALL.in_one_pass`, what `reduce_rows` finds too.
    """
    LATEST: tl.constexpr = not CALL.in_one_pass
    exists = position <= count if CALL.sums_bonus_rows else position < count
    if counters.needed(position, exists, request, CALL, LATEST):
        length = positions.length_of(request, count)
        row = elements.open_row(position, length, request, CALL)  # no rule can read what is not found yet
        step = tl.num_programs(0)
        if CALL.loops:
            for block in range(program, request.target.num_blocks, step):
                sum_block(position, count, length, row, block, request, CALL)
        else:
            sum_block(position, count, length, row, program, request, CALL)
        if CALL.lazy:
            decide.settle(position, count, step, request, CALL)


@triton.jit
def sum_block(position, count, length, row, block, request, CALL: tl.constexpr):
    """Find what needs one block of rows as probabilities."""
    drafted = position < count
    entries = rows.entries_from(block * CALL.block, CALL.block)
    raw = elements.load_both(entries, position, position < length, KEEP, request, CALL)
    p, q, is_drafted = elements.probs(raw, row, request, CALL)
    if CALL.in_one_pass and CALL.reduces[TARGET]:
        laws.store_block(p, raw.entry, request.target, position, block, position <= count, CALL, TARGET)
    inside = raw.entry < request.vocab_size
    numbers = (p, q, is_drafted) + elements.as_rows(row.scalars)
    for i in tl.static_range(len(CALL.sums)):
        terms = evaluate(CALL.sums[i], numbers, tl.float32)
        if not CALL.vanishing[i]:
            terms = tl.where(inside, terms, 0.0)
        if CALL.filtered[TARGET] and i == CALL.entropy_scalar:
            scalars.store_entropy(i, terms, raw.target, position, block, drafted, request, CALL)
        else:
            scalars.store_sum(i, terms, position, block, drafted, request, CALL)
    if CALL.top_k and not CALL.tops:
        # An infinity makes the entropy NaN.
        left = tl.where(inside, tl.where(p == p, p, float("inf")), float("-inf"))
        if CALL.filtered[TARGET]:
            if not rows.is_filtered(request.target, CALL, TARGET):
                left = raw.target
        scalars.store_tops(left, position, block, drafted, request, CALL)
