"""What top-k, top-p and min-p keep of a row, without a sort: a cut, found by one program a row.

Every block of a row leaves the maxima of its sub-blocks of WIDTH entries. Whatever is kept reaches a bound that these
maxima alone give (the k-th largest of them is no larger than the k-th largest entry), so that few sub-blocks can hold
any of it: their entries that reach the bound are listed. As a rule there are few: each of them is compared with each,
which ranks them all at once. Where there are more, `search` finds the cut among them. Under min-p alone, whose cut
follows from the maximum, they only have to be weighed; in large batches the last program that reduces a row does so.

Where even the sub-blocks are too many, as top-p keeps of a flat row, a sample of the row says which entries the cut is
among; many programs then go through the row (`collect`), list these and add up the mass above them, and one program
(`finish`) finds the cut in the list. Where the sample was wrong, and in rare cases besides, `search` goes through all.
"""

# ruff: noqa: N803 - jit functions; constants in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import counters, laws, rows
from acceptlib.engine.triton.laws import WIDTH, key_of, logit_of
from acceptlib.engine.triton.rows import DRAFT, TARGET
from acceptlib.engine.triton.search import (
    LISTED,
    LOWEST,
    MASS_SCALE,
    Filters,
    Reduced,
    at_least,
    in_runs,
    inverse_of,
    left_out_of_sample,
    list_of,
    mass_of,
    mass_to_keep,
    places_of,
    sample,
    search_row,
)

DEPTH = tl.constexpr(42.0)
"""Binary digits below the largest entry from which on a mass is 0."""

STEPS = tl.constexpr(10)
"""Of the search for a depth."""

BINS = tl.constexpr(256)
"""Of depths down to DEPTH."""

BINS_A_DIGIT = tl.constexpr(BINS.value / DEPTH.value)

HIGHEST = tl.constexpr(2147483647)

BEHIND_ALL = tl.constexpr(HIGHEST.value << 32)
"""A word of a key and an entry's number behind those of all entries."""

SPARE = tl.constexpr(8)
"""Sub-blocks that a bound may let through beside those that it has to, to be found sooner."""

LOOKED_AT = tl.constexpr(64)
"""Sub-blocks whose entries are looked at at a time."""

RANKED = tl.constexpr(128)
"""Entries of which each is compared with each, at most."""

FULL = tl.constexpr(0.75)
"""How full a list is meant to be."""

WEIGHED = tl.constexpr(32)
"""Sub-blocks that are weighed at a time."""

ABREAST = tl.constexpr(8)
"""Entries that all others are compared with at a time: a loop, for code is slow where it runs for the first time."""


@triton.jit
def select_rows(position, count, program, request, STAGE: tl.constexpr, CALL: tl.constexpr):
    """Find the law of one filtered row, the target's or the draft's; decide the position if the last to do so.

    Rows of which top-p keeps many are left to the stage `finish`, once their entries are listed.
    """
    if counters.needed(position, position <= count, request, CALL):
        wanted: tl.constexpr = CALL.collects if STAGE == "finish" else CALL.filtered
        if wanted[TARGET]:
            if program == 0:
                select_row(position, request.num_blocks, request.target, STAGE, CALL, TARGET)
        if wanted[DRAFT]:
            if (program == tl.num_programs(0) - 1) & (position < count):
                select_row(position, request.num_blocks, request.draft, STAGE, CALL, DRAFT)
        if CALL.lazy and not CALL.needs_sums and (STAGE == "finish" or CALL.num_collected == 0):
            if counters.arrive(request.counters.rows_arrived_ptr + position, tl.num_programs(0)):
                tl.debug_barrier()
                counters.settle(position, count, request, CALL)


@triton.jit
def select_row(position, num_blocks, model, STAGE: tl.constexpr, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find the law of one row in its stage."""
    if STAGE == "finish":
        finish_row(position, num_blocks, model, CALL, MODEL)
    else:
        store_law(position, num_blocks, model, CALL, MODEL)


@triton.jit
def store_law(position, num_blocks, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find the law of a reduced row, and store it as `laws.load_parts` reads it."""
    factor = rows.factor_of(model, CALL, MODEL)
    numbers_ptr, ids_ptr, words_ptr = laws.law_pointers(model, position)
    one = tl.zeros((1,), tl.int32)
    parts = laws.load_blocks(model, one + position, one == 0, num_blocks, CALL, MODEL)
    law = laws.combine(model, parts, CALL, MODEL)
    maximum, normaliser = tl.sum(law.maximum, 0), tl.sum(law.normaliser, 0)
    top_k = tl.full((), 0, tl.int64)
    top_p = tl.full((), 1.0, tl.float64)
    least = tl.full((), 0.0, tl.float32)
    total = tl.full((), 1, tl.int64)
    target = total
    if CALL.top_ks[MODEL]:
        top_k = tl.load(model.top_k_ptr).to(tl.int64)
        top_k = tl.where((top_k > 0) & (top_k < model.width), top_k, 0)
    if CALL.top_ps[MODEL]:
        top_p = tl.load(model.top_p_ptr).to(tl.float64)
        top_p = tl.where(top_p > 0, tl.minimum(top_p, 1.0), 1.0)
        total = tl.maximum(tl.sum(laws.terms_of(parts.maxima, parts.sums, law.maximum, factor)), 1) >> 2
        target = mass_to_keep(top_p, total)
    if CALL.min_ps[MODEL]:
        least = at_least(tl.load(model.min_p_ptr))
    cut = tl.full((), float("-inf"), tl.float32)
    first = tl.full((), 0, tl.int64)
    if (maximum == maximum) & (factor > 0) & ((top_k > 0) | (top_p < 1) | (least > 0)):
        row = Reduced(position, num_blocks, model, maximum, factor)
        filters = Filters(top_k, top_p, target, least)
        low, num_sub_blocks = candidates(row, filters, CALL, MODEL)
        if CALL.top_ks[MODEL] or CALL.top_ps[MODEL]:
            few = num_sub_blocks <= CALL.tile * LISTED
            count = tl.full((), 0, tl.int32)
            ranked: tl.constexpr = min(RANKED.value, CALL.tile * LISTED.value)
            if few:
                count = list_entries(row, low, num_sub_blocks, CALL, MODEL)
                few = count <= CALL.tile * (WIDTH - LISTED)
            if few & (count <= ranked):
                cut, first, normaliser = rank(row, count, ranked, filters, CALL, MODEL)
            elif CALL.collects[MODEL] & (few == 0) & (top_p < 1) & (least == 0):
                cut += float("nan")  # until it is found
                lowest, beyond = bracket(row, target, total, CALL, MODEL)
                tl.store(ids_ptr + 5, lowest)
                tl.store(ids_ptr + 6, beyond)
                tl.store(ids_ptr + 7, 0)
                tl.store(words_ptr + 4, 0)
                tl.store(words_ptr + 5, 0)
                tl.store(words_ptr + 6, total)
            else:
                high = key_of(maximum).to(tl.int64) + 1
                none = tl.full((), 0, tl.int64)
                cut, first, normaliser = search_row(row, low, high, none, count, total, few, filters, CALL, MODEL)
        else:
            cut, normaliser = weigh(row, num_sub_blocks, least, CALL, MODEL)
    tl.store(numbers_ptr, maximum)
    tl.store(numbers_ptr + 1, normaliser)
    tl.store(ids_ptr + 2, tl.sum(law.argmax, 0))
    tl.store(numbers_ptr + 3, cut)
    tl.store(ids_ptr + 4, first.to(tl.int32))


@triton.jit
def candidates(row, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return a bound that everything kept reaches, and how many sub-blocks do; list them, as many as there is room for.

    All that top-k keeps does where top-p needs its mass.
    """
    position, num_blocks, model, maximum, factor = row
    top_k, top_p, target, least = filters
    index = a_row_each(CALL.max_sub_blocks)
    num_maxima = num_blocks * (CALL.block // WIDTH)
    maxima_ptr = laws.sub_maxima(model, position) + index
    maxima = tl.load(maxima_ptr, mask=index < num_maxima, other=float("-inf"), cache_modifier=".cg")
    list_ptr = list_of(model, position, num_blocks, CALL)
    key = key_of(maxima)
    low = tl.full((), LOWEST, tl.int64)
    if CALL.top_ks[MODEL]:
        if top_k > 0:
            low = bound_of_count(key, top_k, maximum)
    if CALL.top_ps[MODEL]:
        if (top_k == 0) & (top_p < 1):
            low = bound_of_mass(maxima, key, target, maximum, factor)
    if CALL.min_ps[MODEL]:
        # A little lower, for what rounding there is.
        bound = key_of(maximum + tl.div_rn(tl.log2(least) - 0.001, factor)).to(tl.int64)
        if (top_k == 0) | (top_p == 1):
            low = tl.maximum(low, bound)
    reaches = (key >= low.to(tl.int32)) & (key > LOWEST)
    place, number = places_of(reaches)
    tl.store(list_ptr + place, index, mask=reaches & (place < CALL.tile * LISTED))
    tl.debug_barrier()
    return low, number


@triton.jit
def a_row_each(SIZE: tl.constexpr):
    """Return numbers below SIZE, [n, m], so that threads hold whole rows, and neighbours what comes next in memory.

    What a thread lists of its rows it then counts by itself, and stores from where it is. (So it is under Triton 3.6.)
    """
    threads: tl.constexpr = min(counters.THREADS.value, SIZE)
    # In pairs the other way round, or the compiler would load four at once, and carry them to the layout of the list.
    thread = tl.arange(0, threads) ^ 1
    return thread[:, None] + threads * tl.arange(0, SIZE // threads)[None, :]


@triton.jit
def list_entries(row, low, num_sub_blocks, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List the entries of listed sub-blocks that reach a bound, behind them, and keys of the first; return how many."""
    position, model = row.position, row.model
    list_ptr = list_of(model, position, row.num_blocks, CALL)
    entries_ptr, keys_ptr = list_ptr + CALL.tile * LISTED, list_ptr + CALL.tile * WIDTH
    at_once: tl.constexpr = min(LOOKED_AT.value, CALL.tile)
    number = a_row_each(at_once * WIDTH)
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_sub_blocks, at_once):
        lane = start + number // WIDTH
        sub_block = tl.load(list_ptr + lane, mask=lane < num_sub_blocks, other=-1)
        entry = sub_block * WIDTH + number % WIDTH
        key = key_of(rows.load(model, position, entry, entry >= 0, float("-inf"), CALL, MODEL))
        reaches = (key >= low.to(tl.int32)) & (key > LOWEST)
        place, found = places_of(reaches)
        place += count
        tl.store(entries_ptr + place, entry, mask=reaches & (place < CALL.tile * (WIDTH - LISTED)))
        tl.store(keys_ptr + place, key, mask=reaches & (place < RANKED))
        count += found
    tl.debug_barrier()
    return count


@triton.jit
def bound_of_count(key, top_k, maximum):
    """Return the key of a number that top_k of the sub-blocks' maxima reach, and few more as a rule."""
    # Each row's largest reaches the smallest of these.
    low = tl.where(top_k <= key.shape[0], tl.min(tl.max(key, 1), 0), LOWEST).to(tl.int64)
    above = key_of(maximum).to(tl.int64) + 1
    count = top_k + SPARE + 1
    if low == LOWEST:
        # Most of the row is forbidden, or k is large: perhaps nothing is to be searched for.
        finite = key > LOWEST
        count = tl.sum(tl.sum(finite.to(tl.int32), 1), 0).to(tl.int64)
        if count >= top_k:
            low = tl.min(tl.min(tl.where(finite, key, HIGHEST), 1), 0).to(tl.int64)
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
def bound_of_mass(maxima, key, target, maximum, factor):
    """Return the key of a number from which on the sub-blocks' maxima have a mass; the lowest if they have not."""
    mass = mass_of(maxima, maximum, factor)
    depth = (maximum - maxima) * factor
    low = tl.full((), LOWEST, tl.int64)
    if tl.sum(mass) >= target:
        short = tl.full((), 0.0, tl.float32)
        deep = tl.full((), DEPTH, tl.float32)
        for _ in range(STEPS):
            middle = (short + deep) * 0.5
            enough = tl.sum(tl.where(depth <= middle, mass, 0)) >= target
            short = tl.where(enough, short, middle)
            deep = tl.where(enough, middle, deep)
        low = tl.min(tl.where(depth <= deep, key, HIGHEST)).to(tl.int64)
    return low


@triton.jit
def rank(row, count, ranked: tl.constexpr, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what `cut_row` does, of few listed entries, by comparing each with each."""
    position, num_blocks, model, maximum, factor = row
    top_k, top_p, target, least = filters
    list_ptr = list_of(model, position, num_blocks, CALL)
    entries_ptr, keys_ptr = list_ptr + CALL.tile * LISTED, list_ptr + CALL.tile * WIDTH
    lane = tl.arange(0, ranked)
    kept = lane < count
    entry = tl.load(entries_ptr + lane, mask=kept, other=-1)
    key = tl.load(keys_ptr + lane, mask=kept, other=LOWEST)
    x = logit_of(key)
    mass = mass_of(x, maximum, factor)
    place = tl.zeros((ranked, ABREAST), tl.int32)
    before = tl.zeros((ranked, ABREAST), tl.int64)
    for start in range(0, count, ABREAST):
        index = start + tl.arange(0, ABREAST)
        other = tl.load(keys_ptr + index, mask=index < count, other=LOWEST)
        above = other[None, :] > key[:, None]
        place += above.to(tl.int32)
        if CALL.top_ps[MODEL]:
            # Of equal logits those with the highest ids are kept.
            ids = tl.load(entries_ptr + index, mask=index < count, other=-1)
            above = above | ((other[None, :] == key[:, None]) & (ids[None, :] > entry[:, None]))
            before += tl.where(above, mass_of(logit_of(other), maximum, factor)[None, :], 0)
    if CALL.top_ks[MODEL]:
        if top_k > 0:
            kept = kept & (tl.sum(place, 1) < top_k)
    if CALL.top_ps[MODEL]:
        if top_p < 1:
            if top_k > 0:
                target = mass_to_keep(top_p, tl.sum(tl.where(kept, mass, 0), 0))
            kept = kept & (tl.sum(before, 1) < target)
    if CALL.min_ps[MODEL]:
        kept = kept & (tl.exp2((x - maximum) * factor) >= least)
    word = tl.where(kept, (key.to(tl.int64) << 32) | entry, BEHIND_ALL)
    word, total = tl.reduce((word, tl.where(kept, mass, 0)), 0, _least_and_sum)
    return logit_of((word >> 32).to(tl.int32)), word.to(tl.int32).to(tl.int64), inverse_of(total)


@triton.jit
def _least_and_sum(least, total, other_least, other_total):
    return tl.minimum(least, other_least), total + other_total


@triton.jit
def weigh(row, num_sub_blocks, least, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the smallest logit that min-p keeps, and 1 / sum of what it keeps.

    It goes through the sub-blocks that reach the bound, or through all where there was no room to list these.
    """
    position, num_blocks, model, maximum, factor = row
    list_ptr = list_of(model, position, num_blocks, CALL)
    cut = tl.full((), float("inf"), tl.float32)
    kept = tl.full((), 0, tl.int64)
    listed = num_sub_blocks <= CALL.tile * LISTED
    number = tl.where(listed, num_sub_blocks, num_blocks * (CALL.block // WIDTH))
    for start in range(0, number, WEIGHED):
        lane = start + tl.arange(0, WEIGHED)
        inside = lane < tl.where(listed, number, 0)
        sub_block = tl.load(list_ptr + lane, mask=inside, other=tl.where(listed, -1, lane))
        entry = sub_block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x = rows.load(model, position, entry, entry >= 0, float("-inf"), CALL, MODEL)
        keeps = tl.exp2((x - maximum) * factor) >= least
        cut = tl.minimum(cut, tl.min(tl.where(keeps, x, float("inf"))))
        kept += tl.sum(tl.where(keeps, mass_of(x, maximum, factor), 0))
    return cut, inverse_of(kept)


@triton.jit
def bracket(row, target, total, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return [low, high) of keys that a sample of the row takes the cut of top-p to be in; a tile holds the entries."""
    maximum, factor = row.maximum, row.factor
    entry, x = sample(row, row.position >= 0, CALL, MODEL)
    left_out, share = left_out_of_sample(entry, row.model.width, target, total)
    # Entries are counted by how far they lie below the largest, and a bin's mass is taken for that of its middle.
    number = tl.minimum((maximum - x) * (factor * BINS_A_DIGIT), BINS - 1).to(tl.int32)
    counts = tl.histogram(tl.reshape(number, [CALL.tile * WIDTH]), BINS).to(tl.float32)
    bins = tl.arange(0, BINS)
    masses = counts * tl.exp2((bins + 0.5) * (-1 / BINS_A_DIGIT))
    center = place_of(tl.sum(masses, 0) - left_out.to(tl.float32) / MASS_SCALE, masses)
    rank = tl.sum(counts * tl.minimum(tl.maximum(center - bins, 0.0), 1.0), 0)
    radius = share.to(tl.float32) * (CALL.tile * (WIDTH - LISTED) * FULL / 2)
    deep = place_of(rank + radius, counts)
    short = place_of(tl.maximum(rank - radius, 0.0), counts)
    low = key_of(maximum - tl.div_rn(deep, factor * BINS_A_DIGIT))
    high = key_of(maximum - tl.div_rn(short, factor * BINS_A_DIGIT)) + 1
    return low, high


@triton.jit
def place_of(amount, parts):
    """Return from the start of [BINS] parts how many bins hold an amount, and what share of the next."""
    upto = tl.cumsum(parts, 0)
    number = tl.sum((upto < amount).to(tl.int32), 0)
    here = tl.arange(0, BINS) == number
    part = tl.sum(tl.where(here, parts, 0.0), 0)
    before = tl.sum(tl.where(here, upto, 0.0), 0) - part
    return number + tl.where(part > 0, tl.maximum(amount - before, 0.0) / part, 0.0)


@triton.jit
def collect_rows(position, count, program, request, CALL: tl.constexpr):
    """List the entries of one row that the cut of top-p is among, of some blocks, if its law is not known yet."""
    if counters.needed(position, position <= count, request, CALL):
        step = tl.num_programs(0) // CALL.num_collected
        if CALL.collects[TARGET]:
            if program < step:
                collect_row(position, program, step, request.num_blocks, request.target, CALL, TARGET)
        if CALL.collects[DRAFT]:
            first = program - (tl.num_programs(0) - step)
            if (first >= 0) & (position < count):
                collect_row(position, first, step, request.num_blocks, request.draft, CALL, DRAFT)


@triton.jit
def collect_row(position, first, step, num_blocks, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List the entries of one row that the cut is among, of every `step`th block from the first on."""
    numbers_ptr, ids_ptr, words_ptr = laws.law_pointers(model, position)
    cut = tl.load(numbers_ptr + 3, cache_modifier=".cg")
    if cut != cut:
        factor = rows.factor_of(model, CALL, MODEL)
        maximum = tl.load(numbers_ptr, cache_modifier=".cg")
        low = tl.load(ids_ptr + 5, cache_modifier=".cg")
        high = tl.load(ids_ptr + 6, cache_modifier=".cg")
        entries_ptr = list_of(model, position, num_blocks, CALL) + CALL.tile * LISTED
        above = tl.full((), 0, tl.int64)
        inside = tl.full((), 0, tl.int64)
        for block in range(first, num_blocks, step):
            entry = block * CALL.block + tl.arange(0, CALL.block)
            x = rows.load(model, position, entry, position >= 0, float("-inf"), CALL, MODEL)
            key = key_of(x)
            mass = mass_of(x, maximum, factor)
            listed = (key >= low) & (key < high)
            above += tl.sum(tl.where(key >= high, mass, 0), 0)
            inside += tl.sum(tl.where(listed, mass, 0), 0)
            entry, listed, place, number = in_runs(entry, listed)
            place += tl.atomic_add(ids_ptr + 7, number, sem="relaxed")
            tl.store(entries_ptr + place, entry, mask=listed & (place < CALL.tile * (WIDTH - LISTED)))
        tl.atomic_add(words_ptr + 4, above, sem="relaxed")
        tl.atomic_add(words_ptr + 5, inside, sem="relaxed")


@triton.jit
def finish_row(position, num_blocks, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find the law of a row if it is not known yet."""
    numbers_ptr, ids_ptr, words_ptr = laws.law_pointers(model, position)
    cut = tl.load(numbers_ptr + 3, cache_modifier=".cg")
    if cut != cut:
        maximum = tl.load(numbers_ptr, cache_modifier=".cg")
        count = tl.load(ids_ptr + 7, cache_modifier=".cg")
        above = tl.load(words_ptr + 4, cache_modifier=".cg")
        inside = tl.load(words_ptr + 5, cache_modifier=".cg")
        total = tl.load(words_ptr + 6, cache_modifier=".cg")
        top_p = tl.load(model.top_p_ptr).to(tl.float64)
        target = mass_to_keep(top_p, total)
        row = Reduced(position, num_blocks, model, maximum, rows.factor_of(model, CALL, MODEL))
        filters = Filters(tl.full((), 0, tl.int64), top_p, target, tl.full((), 0.0, tl.float32))
        found = (above < target) & (above + inside >= target) & (count <= CALL.tile * (WIDTH - LISTED))
        low = tl.load(ids_ptr + 5, cache_modifier=".cg").to(tl.int64)
        high = tl.load(ids_ptr + 6, cache_modifier=".cg").to(tl.int64)
        low = tl.where(found, low, LOWEST)
        high = tl.where(found, high, key_of(maximum).to(tl.int64) + 1)
        tl.debug_barrier()  # every warp has seen that the law is not known
        cut, first, normaliser = search_row(row, low, high, above, count, total, found, filters, CALL, MODEL)
        tl.store(numbers_ptr + 1, normaliser)
        tl.store(numbers_ptr + 3, cut)
        tl.store(ids_ptr + 4, first.to(tl.int32))
