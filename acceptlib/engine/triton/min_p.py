"""What min-p alone keeps of a row in smaller batches: listed block by block, and found from these lists.

What is kept follows from the row's maximum, which no program knows from its block alone. But whatever is kept of the
row would also be kept of its block by itself, and as a rule few runs of neighbours hold any of that. Programs that
reduce rows list these runs, each with its largest entry. A program of the next stage knows the maximum and goes through
the lists of its row. It finds the mass and the smallest of what is kept, and lists, for draws, the runs that hold any.
What the lists lack is read again: whole runs where one may hold two kept entries, and blocks with more such runs than
there is room for.
"""

# ruff: noqa: N803, RUF005 - jit functions; constants in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import keys, laws, rows
from acceptlib.engine.triton.lists import Reduced, a_row_each
from acceptlib.engine.triton.records import HELD, RUN, block_list, list_of, record_of
from acceptlib.engine.triton.rows import TARGET
from acceptlib.engine.triton.sums import mass_of, normaliser_of, sum_exp

LEVELS = tl.constexpr(12)
"""Levels at which `before` pairs the numbers of a row, of which there are at most 2^12."""


@triton.jit
def store_block(x, entry, model, position, block, mask, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Store what the law of one row needs of one block, [BLOCK] float32, -inf beyond the row: see `laws.store_block`.

    Where the request has a min-p, the place of the sum has how many runs hold any of what would be kept, and in its
    upper half the largest second entry of a run.
    """
    largest, second = two_largest(x, CALL)
    maximum, second = tl.reduce((largest, second), 0, _larger_two)
    at = position.to(tl.int64) * model.num_blocks + block
    tl.store(model.maxima_ptr + at, maximum, mask=mask)
    laws.store_best(x, maximum, entry, at, model, mask, CALL, MODEL)
    factor, least = rows.factor_of(model, CALL, MODEL), rows.floor_of(model)
    if mask & (factor > 0):
        if least > 0:
            reaches = (largest >= bound_of(maximum, least, factor)) & (largest > float("-inf"))
            ends = list_runs(largest, reaches, position, block, model, CALL)
            lane = tl.arange(0, ends.shape[0])
            tl.store(model.sums_ptr + at + lane * 0, packed(second, ends), mask=lane == ends.shape[0] - 1)
        else:
            tl.store(model.sums_ptr + at, sum_exp(x, maximum, factor))


@triton.jit
def two_largest(x, CALL: tl.constexpr):
    """Return the largest and the second of each run of a block, [BLOCK / RUN]; the first is NaN if any is."""
    first, second = tl.split(tl.reshape(x, [CALL.block // 2, 2]))
    highs, lows = keys.larger(first, second), tl.minimum(first, second)
    high, other_high = tl.split(tl.reshape(highs, [CALL.block // RUN, 2]))
    low, other_low = tl.split(tl.reshape(lows, [CALL.block // RUN, 2]))
    return keys.larger(high, other_high), tl.maximum(tl.minimum(high, other_high), tl.maximum(low, other_low))


@triton.jit
def _larger_two(first, second, other_first, other_second):
    return keys.larger(first, other_first), tl.maximum(second, other_second)


@triton.jit
def list_runs(largest, reaches, position, block, model, CALL: tl.constexpr):
    """List runs of a block that reach a bound, as many as there is room for; return how many do up to each thread."""
    each: tl.constexpr = max(CALL.block // RUN // laws.REDUCE_THREADS, 1)  # runs that a thread has
    run = block * (CALL.block // RUN) + tl.arange(0, CALL.block // RUN)
    # By thread, where it has loaded four neighbours at a time: nothing moves.
    flags = tl.trans(tl.reshape(reaches.to(tl.int32), [each, CALL.block // RUN // each]))
    word = tl.trans(tl.reshape(packed(largest, run), [each, CALL.block // RUN // each]))
    numbers = tl.sum(flags, 1)
    ends = tl.cumsum(numbers, 0)
    place = (ends - numbers)[:, None] + before(flags)
    tl.store(block_list(model, position, block) + place, word, mask=(flags != 0) & (place < HELD))
    return ends


@triton.jit
def before(numbers):
    """Return the sum of what comes before each of numbers [n, m] in its row; a scan would carry rows elsewhere."""
    n: tl.constexpr = numbers.shape[0]
    m: tl.constexpr = numbers.shape[1]
    firsts = ()
    for i in tl.static_range(LEVELS):
        if m >> i > 1:
            first, second = tl.split(tl.reshape(numbers, [n, m >> (i + 1), 2]))
            firsts = firsts + (first,)
            numbers = first + second
    found = numbers * 0
    for i in tl.static_range(len(firsts)):
        first = firsts[len(firsts) - 1 - i]
        found = tl.reshape(tl.join(found, found + first), [n, 2 << i])
    return found


@triton.jit
def bound_of(maximum, least, factor):
    """Return a logit that all reach whose weight beside the largest is at least `least`: a little low, for rounding."""
    return maximum + tl.div_rn(tl.log2(least) - 0.001, factor)


@triton.jit
def packed(x, number):
    """Return a logit and a number as a word."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | number


@triton.jit
def logit_in(word):
    """Return the logit of a word."""
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_law(position, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find the law of a reduced row, and store it as `laws.load_parts` reads it."""
    factor, least = rows.factor_of(model, CALL, MODEL), rows.floor_of(model)
    lane = tl.zeros((1,), tl.int32)
    parts = laws.load_blocks(model, lane + position, lane == 0, CALL, MODEL)
    # On their way while the maximum is found, along with whatever is in places where no run was listed.
    place = a_row_each(CALL.max_blocks * HELD)
    inside = place < model.num_blocks * HELD
    word = tl.load(block_list(model, position, 0) + place, mask=inside, other=0, cache_modifier=".cg")
    numbers_ptr = model.sums_ptr + position.to(tl.int64) * model.num_blocks
    number = tl.load(numbers_ptr + place // HELD, mask=inside, other=0, cache_modifier=".cg").to(tl.int32)
    filters = (factor > 0) & (least > 0)
    maximum, total = laws.largest_of(parts.maxima), tl.zeros((1,), tl.int64)
    if not filters:
        _, total = laws.combine(model, parts, CALL, MODEL)
    law = laws.law_of(model, parts, maximum, total, CALL, MODEL)
    maximum, normaliser = tl.sum(law.maximum, 0), tl.sum(law.normaliser, 0)
    row = Reduced(position, model, maximum, factor)
    record = record_of(model, position)
    cut = tl.full((), float("-inf"), tl.float32)
    count = tl.full((), -1, tl.int32)
    keeps = place < 0
    filters = filters & (maximum == maximum)
    if filters:
        held = (place % HELD < number) & (number <= HELD)
        keeps = held & (tl.exp2((logit_in(word) - maximum) * factor) >= least)
        cut, kept, count = weigh(row, logit_in(word), word.to(tl.int32), keeps, count * 0, CALL, MODEL)
        normaliser = normaliser_of(kept)
    tl.store(record.maximum_ptr, maximum)
    tl.store(record.argmax_ptr, tl.sum(law.argmax, 0))
    tl.store(record.first_kept_ptr, 0)
    store_kept(record, cut, normaliser, count, CALL)
    if filters:
        # Last, or programs would have to pass over code that seldom runs.
        weigh_again(row, parts, word, keeps, least, count, record, CALL, MODEL)


@triton.jit
def weigh_again(row, parts, word, keeps, least, count, record, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Store anew what is kept of a row if its lists lack some: entries of a run beside its largest, or whole blocks."""
    number, second = tl.sum(parts.sums, 0).to(tl.int32), logit_in(tl.sum(parts.sums, 0))
    bound = bound_of(row.maximum, least, row.factor)
    reaches = tl.max(parts.maxima, 0) >= bound
    left = reaches & (number > HELD)
    if tl.max((left | (reaches & (second >= bound))).to(tl.int32), 0) != 0:
        # First the runs that are listed, whole, and then the blocks that are not.
        place = a_row_each(CALL.max_blocks * HELD)
        run, wanted = word.to(tl.int32), keeps
        index = tl.arange(0, CALL.max_blocks)
        each: tl.constexpr = CALL.block // RUN
        block = tl.full((), -1, tl.int32)
        start = tl.full((), each, tl.int32)
        cut, kept = tl.full((), float("inf"), tl.float32), tl.full((), 0, tl.int64)
        while block < row.model.num_blocks:
            entry = run[:, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
            x = rows.load(row.model, row.position, entry, wanted[:, :, None], float("-inf"), CALL, MODEL)
            stays = tl.exp2((x - row.maximum) * row.factor) >= least
            cut = tl.minimum(cut, tl.min(tl.where(stays, x, float("inf"))))
            kept += tl.sum(tl.where(stays, mass_of(x, row.maximum, row.factor), 0))
            if CALL.lists and MODEL == TARGET:
                flags = tl.where(block < 0, 0, tl.max(stays.to(tl.int32), 2))
                count = list_kept(row, run, flags, count, CALL)
            if start >= each:
                block = tl.min(tl.where(left & (index > block), index, row.model.num_blocks), 0)
                start = start * 0
            run = block * each + start + place
            wanted = (start + place < each) & (block < row.model.num_blocks)
            start += CALL.max_blocks * HELD
        store_kept(record, cut, normaliser_of(kept), count, CALL)


@triton.jit
def store_kept(record, cut, normaliser, count, CALL: tl.constexpr):
    """Store what is kept of a row, and that `count` runs hold any of it; -1 where there is no list."""
    tl.store(record.cut_ptr, cut)
    tl.store(record.normaliser_ptr, normaliser)
    tl.store(record.num_listed_ptr, tl.where(count <= CALL.most_listed // CALL.listed_run, count, -1))


@triton.jit
def weigh(row, x, words, keeps, count, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the smallest of logits [n, m] that are kept, their mass, and how many are listed; `count` were before.

    The target's are listed, by their words. Draws read no other list.
    """
    cut = tl.min(tl.where(keeps, x, float("inf")), 1)
    kept = tl.sum(tl.where(keeps, mass_of(x, row.maximum, row.factor), 0), 1)
    cut, kept, number = tl.reduce((cut, kept, tl.sum(keeps.to(tl.int32), 1)), 0, _together)
    if CALL.lists and MODEL == TARGET:
        list_kept(row, words, keeps.to(tl.int32), count, CALL)
    return cut, kept, count + number


@triton.jit
def list_kept(row, words, flags, count, CALL: tl.constexpr):
    """List the flagged ones of words [n, m] behind `count` others; return how many are listed by then."""
    numbers = tl.sum(flags, 1)
    place = count + (tl.cumsum(numbers, 0) - numbers)[:, None] + before(flags)
    words_ptr = list_of(row.model, row.position, CALL).words_ptr
    fits = place < CALL.most_listed // CALL.listed_run
    tl.store(words_ptr + place, words.to(tl.int64), mask=(flags != 0) & fits)
    return count + tl.sum(numbers, 0)


@triton.jit
def _together(cut, kept, number, other_cut, other_kept, other_number):
    return tl.minimum(cut, other_cut), kept + other_kept, number + other_number
