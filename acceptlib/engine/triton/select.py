"""What top-k, top-p and min-p keep of a row, without a sort: a cut, found by one program a row.

Every block of a row leaves the maxima of its sub-blocks of WIDTH entries. Whatever is kept reaches a bound that these
maxima alone give (the k-th largest of them is no larger than the k-th largest entry), so that few sub-blocks can hold
any of it: their entries that reach the bound are listed. As a rule there are few: each of them is compared with each,
which ranks them all at once. Where there are more, `search` finds the cut among them. Under min-p alone the cut follows
from the maximum: what it keeps is weighed and listed, in large batches by the last program that reduces the row, and
from other lists in small ones (`min_p`). These lists are what draws go through (`listed`).

Under top-p alone many entries may be kept: many programs then list those that the cut may be among (`bins`).
"""

# ruff: noqa: N803 - jit functions; constants in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import bins, counters, decide, laws, min_p, rows
from acceptlib.engine.triton.keys import LOWEST, key_of, word_of
from acceptlib.engine.triton.lists import (
    Filters,
    Reduced,
    a_row_each,
    list_sub_blocks,
    mass_to_keep,
    maxima_of,
    number_of,
    places_of,
    rank_few,
    sub_blocks_at,
)
from acceptlib.engine.triton.records import LISTED, WIDTH, entries_in, list_of, record_of
from acceptlib.engine.triton.rows import DRAFT, LARGEST_INT32, TARGET
from acceptlib.engine.triton.search import search_row
from acceptlib.engine.triton.sums import SUM_SHIFT, normaliser_of

SPARE = tl.constexpr(8)
"""Sub-blocks that a bound may let through beyond those that it has to, so that it is found sooner."""

WEIGHED = tl.constexpr(32)
"""Sub-blocks that are weighed at a time."""

LOOKED_AT = tl.constexpr(64)
"""Sub-blocks whose entries are looked at at a time."""


@triton.jit
def select_rows(position, count, program, request, STAGE: tl.constexpr, CALL: tl.constexpr):
    """Find the law of one filtered row, the target's or the draft's; decide the position if the last to do so.

    Rows under top-p alone are left to the stage `finish`, once their entries are in bins.
    """
    if counters.needed(position, position <= count, request, CALL, LATEST=True):
        wanted: tl.constexpr = CALL.collects if STAGE == "finish" else CALL.filtered
        if CALL.alike and not CALL.lists_runs:  # whose code is short, and lists what is kept of the target's rows alone
            share = rows.share_of(program, 1, position, count, request)
            if share.exists:
                select_row(position, share.model, STAGE, CALL, TARGET)
        else:
            if wanted[TARGET]:
                if program == 0:
                    select_row(position, request.target, STAGE, CALL, TARGET)
            if wanted[DRAFT]:
                if (program == tl.num_programs(0) - 1) & (position < count):
                    select_row(position, request.draft, STAGE, CALL, DRAFT)
        if CALL.lazy and not CALL.needs_sums and (STAGE == "finish" or CALL.num_collected == 0):
            decide.settle(position, count, tl.num_programs(0), request, CALL)


@triton.jit
def select_row(position, model, STAGE: tl.constexpr, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find the law of one row in its stage."""
    if STAGE == "finish":
        bins.finish_row(position, model, CALL, MODEL)
    elif CALL.lists_runs:
        min_p.store_law(position, model, CALL, MODEL)
    else:
        store_law(position, model, CALL, MODEL)


@triton.jit
def store_law(position, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find the law of a reduced row, and store it as `laws.load_parts` reads it."""
    factor = rows.factor_of(model, CALL, MODEL)
    lane = tl.zeros((1,), tl.int32)
    parts = laws.load_blocks(model, lane + position, lane == 0, CALL, MODEL)
    # On their way while the law is combined, if registers are left for them.
    early = () if CALL.lazy else maxima_of(position, model, CALL)
    least = rows.floor_of(model) if CALL.min_ps[MODEL] else tl.full((), 0.0, tl.float32)
    maximum, sums = laws.largest_of(parts.maxima), tl.zeros((1,), tl.int64)
    if (not CALL.min_p_alone) | (least == 0):  # there are no sums of all entries otherwise
        _, sums = laws.combine(model, parts, CALL, MODEL)
    law = laws.law_of(model, parts, maximum, sums, CALL, MODEL)
    maximum, normaliser = tl.sum(law.maximum, 0), tl.sum(law.normaliser, 0)
    top_k, top_p = model.top_k.to(tl.int64), model.top_p.to(tl.float64)
    total = tl.full((), 1, tl.int64)
    to_keep = total
    if CALL.top_ks[MODEL]:
        top_k = tl.where((top_k > 0) & (top_k < model.width), top_k, 0)
    if CALL.top_ps[MODEL]:
        top_p = tl.where(top_p > 0, tl.minimum(top_p, 1.0), 1.0)
        total = tl.maximum(tl.sum(sums, 0), 1) >> SUM_SHIFT
        to_keep = mass_to_keep(top_p, total)
    cut = tl.full((), float("-inf"), tl.float32)
    first = tl.full((), 0, tl.int64)
    number = tl.full((), -1, tl.int32)
    if (maximum == maximum) & (factor > 0) & ((top_k > 0) | (top_p < 1) | (least > 0)):
        row = Reduced(position, model, maximum, factor)
        filters = Filters(top_k, top_p, to_keep, least)
        sub_blocks = maxima_of(position, model, CALL) if CALL.lazy else early
        if CALL.collects[MODEL] & (least == 0):
            cut += float("nan")  # until it is found
            bins.lay_out(row, sub_blocks, to_keep, total, CALL, MODEL)
        else:
            low, num_sub_blocks = candidates(row, sub_blocks, filters, CALL, MODEL)
            if CALL.top_ks[MODEL] or CALL.top_ps[MODEL]:
                few = num_sub_blocks <= CALL.tile * LISTED
                count = tl.full((), 0, tl.int32)
                if few:
                    count = list_entries(row, low, num_sub_blocks, CALL, MODEL)
                    few = count <= CALL.tile * WIDTH
                if few & (count <= CALL.tile):
                    most: tl.constexpr = CALL.tile
                    half: tl.constexpr = CALL.tile // 2
                    none = tl.full((), 0, tl.int64)
                    words_ptr = list_of(model, position, CALL).words_ptr
                    if count <= half:
                        cut, first, normaliser = rank_few(row, words_ptr, count, none, filters, half, "", CALL, MODEL)
                    else:
                        cut, first, normaliser = rank_few(row, words_ptr, count, none, filters, most, "", CALL, MODEL)
                else:
                    cut, first, normaliser = search_row(row, low, count, few, total, filters, CALL, MODEL)
                count = tl.where(few, count, -1)
            else:
                cut, normaliser, count = weigh_kept(row, num_sub_blocks, least, CALL, MODEL)
            number = tl.where(count <= CALL.most_listed, count, -1)
    record = record_of(model, position)
    tl.store(record.maximum_ptr, maximum)
    tl.store(record.normaliser_ptr, normaliser)
    tl.store(record.argmax_ptr, tl.sum(law.argmax, 0))
    tl.store(record.cut_ptr, cut)
    tl.store(record.first_kept_ptr, first.to(tl.int32))
    tl.store(record.num_listed_ptr, number)


@triton.jit
def candidates(row, sub_blocks, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return a bound that everything kept reaches, and how many sub-blocks do; list them, as many as there is room for.

    Where top-p needs the mass of what top-k keeps, all that top-k keeps reaches the bound.
    """
    maximum, factor = row.maximum, row.factor
    top_k, top_p, to_keep, least = filters
    index, maxima = sub_blocks
    key = key_of(maxima)
    low = tl.full((), LOWEST, tl.int64)
    if CALL.top_ks[MODEL]:
        if top_k > 0:
            low = bound_of_count(key, top_k, maximum)
    if CALL.top_ps[MODEL]:
        if (top_k == 0) & (top_p < 1):
            deep = bins.depth_of_mass(maxima, to_keep, maximum, factor)
            if deep < bins.DEPTH:
                reached = (maximum - maxima) * factor <= deep
                low = tl.min(tl.min(tl.where(reached, key, LARGEST_INT32), 1), 0).to(tl.int64)
    if CALL.min_ps[MODEL]:
        bound = key_of(min_p.bound_of(maximum, least, factor)).to(tl.int64)
        if (top_k == 0) | (top_p == 1):
            low = tl.maximum(low, bound)
    reaches = (key >= low.to(tl.int32)) & (key > LOWEST)
    return low, list_sub_blocks(row, index, reaches, CALL)


@triton.jit
def list_entries(row, low, num_sub_blocks, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List the entries of listed sub-blocks that reach a bound, as many as there is room for; return how many do."""
    position, model = row.position, row.model
    listed = list_of(model, position, CALL)
    at_once: tl.constexpr = min(LOOKED_AT.value, CALL.tile)
    number = a_row_each(at_once * WIDTH)
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_sub_blocks, at_once):
        lane = start + number // WIDTH
        sub_block = tl.load(listed.sub_blocks_ptr + lane, mask=lane < num_sub_blocks, other=-1)
        entry = entries_in(sub_block, number % WIDTH, model, CALL)
        key = key_of(rows.load(model, position, entry, entry >= 0, float("-inf"), CALL, MODEL))
        reaches = (key >= low.to(tl.int32)) & (key > LOWEST)
        place, found = places_of(reaches)
        place += count
        tl.store(listed.words_ptr + place, word_of(key, entry), mask=reaches & (place < CALL.tile * WIDTH))
        count += found
    tl.debug_barrier()
    return count


@triton.jit
def bound_of_count(key, top_k, maximum):
    """Return a key that top_k of the sub-blocks' maxima reach, and as a rule few more."""
    # At least as many numbers as `key` has rows reach the smallest of the rows' largest numbers.
    low = tl.where(top_k <= key.shape[0], tl.min(tl.max(key, 1), 0), LOWEST).to(tl.int64)
    above = key_of(maximum).to(tl.int64) + 1
    count = top_k + SPARE + 1
    if low == LOWEST:
        # Most of the row is forbidden, or k is large: perhaps there is nothing to search for.
        finite = key > LOWEST
        count = tl.sum(tl.sum(finite.to(tl.int32), 1), 0).to(tl.int64)
        if count >= top_k:
            low = tl.min(tl.min(tl.where(finite, key, LARGEST_INT32), 1), 0).to(tl.int64)
    while (above - low > 1) & (count > top_k + SPARE):
        middle = low + (above - low) // 2
        found = tl.sum(tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 1), 0)
        if found >= top_k:
            low = middle
            count = found.to(tl.int64)
        else:
            above = middle
    return low


@triton.jit
def weigh_kept(row, num_sub_blocks, least, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the smallest logit that min-p keeps, 1 / sum of what it keeps, and how many entries are listed of that.

    It goes through the sub-blocks that reach the bound, or through all where there was no room to list these.
    """
    position, model, maximum, factor = row.position, row.model, row.maximum, row.factor
    cut = tl.full((), float("inf"), tl.float32)
    kept = tl.full((), 0, tl.int64)
    count = tl.full((), 0, tl.int32)
    number = a_row_each(WEIGHED * WIDTH)
    for start in range(0, number_of(row, num_sub_blocks, CALL), WEIGHED):
        sub_block = sub_blocks_at(row, start + number // WIDTH, num_sub_blocks, CALL)
        entry = entries_in(sub_block, number % WIDTH, model, CALL)
        x = rows.load(model, position, entry, entry >= 0, float("-inf"), CALL, MODEL)
        keeps = tl.exp2((x - maximum) * factor) >= least
        smallest, mass, count = min_p.weigh(row, x, word_of(key_of(x), entry), keeps, count, CALL, MODEL)
        cut = tl.minimum(cut, smallest)
        kept += mass
    return cut, normaliser_of(kept), count
