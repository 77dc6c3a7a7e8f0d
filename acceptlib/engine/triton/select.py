"""What top-k, top-p and min-p keep of a row, without a sort: a cut, found by whoever is last to reduce the row.

Every block of a row leaves the maxima of its sub-blocks of WIDTH entries. Whatever is kept reaches a bound that these
maxima alone give (the k-th largest of them is no larger than the k-th largest entry), so that few sub-blocks can hold
any of it: they become one tile in registers, and the cut is found there. Where they are too many, as in a flat row,
passes over the row list a pool of entries that the cut is among, and these become the tile. Where even that fails, as
among thousands of equal entries, each step of the search goes through the row.

A row that nobody else has to wait for keeps nobody waiting: the other programs go on to other rows. Cuts are found by
bisection over the logits' bits, which order like them, and all sums are integers, so that neither the layout of a
program, nor a sample, nor who is last changes a bit of them.
"""

# ruff: noqa: FBT003, N803, PLR5501, RET505 - jit functions; constants in capitals, branches known when compiling

import triton
import triton.language as tl

from acceptlib.engine.triton import reduce, rows
from acceptlib.engine.triton.rows import DRAFT, TARGET

WIDTH = tl.constexpr(32)
"""Entries of a sub-block."""

MASS_SCALE = tl.constexpr(4398046511104.0)
"""2^42, of masses relative to the largest entry."""

LOWEST = tl.constexpr(-2139095041)
"""The key of minus infinity."""

TRIES = tl.constexpr(4)
"""Passes over a row at most in search of a pool."""

COUNT = tl.constexpr(0)
MASS = tl.constexpr(1)
TIES = tl.constexpr(2)


@triton.jit
def reduce_rows(position, count, program, request, target, draft, stop_ptr, arrived_ptr, CALL: tl.constexpr):
    """Do as `reduce.reduce_rows`, for one model's row; find the law of the row if the last to do so.

    Programs of the target's row come first, then those of the draft's. One counter a position holds the arrivals at
    either row, and how many of them are done.
    """
    num_blocks = request[2]
    if reduce.needed(position, position <= count, stop_ptr, CALL):
        done = position < 0
        if program < num_blocks:
            if CALL.logits[TARGET] or CALL.best[TARGET]:
                done = reduce_row(position, position <= count, program, request, target, arrived_ptr, CALL, TARGET)
        elif position < count:
            if CALL.has_draft and (CALL.logits[DRAFT] or CALL.best[DRAFT]):
                done = reduce_row(
                    position, position < count, program - num_blocks, request, draft, arrived_ptr, CALL, DRAFT
                )
        if CALL.lazy and not CALL.needs_sums:
            if done:
                num_models: tl.constexpr = CALL.num_reduced
                if arrive(arrived_ptr + position, num_models, 20):
                    reduce.settle(position, count, request, target, draft, stop_ptr, CALL)


@triton.jit
def reduce_row(position, exists, block, request, model, arrived_ptr, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Reduce one block of one row; return whether this program is the last to do so, and has found the law."""
    num_blocks = request[2]
    entry = block * CALL.block + tl.arange(0, CALL.block)
    x = rows.load(model, position, entry, exists, float("-inf"), CALL, MODEL)
    if MODEL == DRAFT and not CALL.logits[DRAFT]:
        x = tl.where(x > 0, x, 0.0)  # NaN counts as 0
    rows.reduce_block(x, entry, model, position, block, num_blocks, exists, CALL, MODEL)
    if CALL.raw and MODEL == TARGET:
        rows.reduce_raw(x, entry, model, position, block, num_blocks, exists, CALL)
    if CALL.filtered[MODEL]:
        sub_blocks: tl.constexpr = CALL.block // WIDTH
        maxima_ptr = sub_maxima(model, position, CALL)
        maxima = tl.max(tl.reshape(x, [sub_blocks, WIDTH]), 1)
        tl.store(maxima_ptr + block * sub_blocks + tl.arange(0, sub_blocks), maxima)
    last = position < 0
    if CALL.filtered[MODEL] or (CALL.lazy and not CALL.needs_sums):
        last = arrive(arrived_ptr + position, num_blocks, MODEL * 10)
    if CALL.filtered[MODEL]:
        if last:
            store_law(position, request, model, CALL, MODEL)
    return last


@triton.jit
def arrive(counter_ptr, expected, SHIFT: tl.constexpr):
    """Do as `reduce.arrive`, with 10 bits of a counter."""
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, tl.full((), 1, tl.int32) << SHIFT, sem="acq_rel")
    tl.debug_barrier()
    return ((before >> SHIFT) & 1023) == expected - 1


@triton.jit
def sub_maxima(model, position, CALL: tl.constexpr):
    """Return where the maxima of a row's sub-blocks are: after its law, 4 words, and its list."""
    words_ptr = model[10][3] + position.to(tl.int64) * model[10][4] + 4 + CALL.tile * WIDTH // 2
    return words_ptr.to(tl.pointer_type(tl.float32))


@triton.jit
def list_of(model, position):
    """Return where a program lists what its tile is made of: sub-blocks, or entries of a pool."""
    return (model[10][3] + position.to(tl.int64) * model[10][4] + 4).to(tl.pointer_type(tl.int32))


@triton.jit
def store_law(position, request, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find the law of a reduced row, and store it as `rows.load_parts` reads it."""
    num_blocks, width, factor = request[2], model[3], model[4]
    top_k_ptr, top_p_ptr, min_p_ptr, cuts_ptr, cut_words, _ = model[10]
    one = tl.zeros((1,), tl.int32)
    parts = rows.load_blocks(model, one + position, one == 0, num_blocks, CALL, MODEL)
    maxima, normalisers, best = rows.combine(model, parts, CALL, MODEL)
    maximum, normaliser = tl.sum(maxima, 0), tl.sum(normalisers, 0)
    top_k = tl.full((), 0, tl.int64)
    top_p = tl.full((), 1.0, tl.float64)
    least = tl.full((), 0.0, tl.float32)
    total = tl.full((), 1, tl.int64)
    target = total
    if CALL.top_ks[MODEL]:
        top_k = tl.load(top_k_ptr).to(tl.int64)
        top_k = tl.where((top_k > 0) & (top_k < width), top_k, 0)
    if CALL.top_ps[MODEL]:
        top_p = tl.load(top_p_ptr).to(tl.float64)
        top_p = tl.where(top_p > 0, tl.minimum(top_p, 1.0), 1.0)
        total = tl.sum(rows.total_of(parts[0], parts[1], maxima, factor), 0) >> 2
        target = mass_to_keep(top_p, total)
    if CALL.min_ps[MODEL]:
        least = at_least(tl.load(min_p_ptr))
    cut = tl.full((), float("-inf"), tl.float32)
    first = tl.full((), 0, tl.int64)
    if (maximum == maximum) & (factor > 0) & ((top_k > 0) | (top_p < 1) | (least > 0)):
        row = (position, num_blocks, model, maximum)
        high = key_of(maximum).to(tl.int64) + 1
        low, index, few = candidates(row, top_k, top_p, target, least, high, CALL, MODEL)
        entry = index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        above = tl.full((), 0, tl.int64)
        if few == 0:
            low, high, above, count = pool(row, low, high, top_k, top_p, target, total, least, CALL, MODEL)
            few = count <= CALL.tile * WIDTH
            # What is above the pool has to stay: min-p must not cut there.
            if least > 0:
                few = few & (tl.exp2((logit_of(high - 1) - maximum) * factor) >= least)
            place = tl.arange(0, CALL.tile)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            pool_ptr = list_of(model, position)
            entry = tl.load(pool_ptr + place, mask=place < count, other=-1, cache_modifier=".cg")
        if few:
            x = rows.load(model, position, entry, entry >= 0, float("-inf"), CALL, MODEL)
            tile = (key_of(x), mass_of(x, maximum, factor), entry, above)
            cut, first, normaliser = cut_row(row, tile, low, high, top_k, top_p, target, least, False, CALL, MODEL)
        else:
            nothing = (low, low, low, low)
            cut, first, normaliser = cut_row(row, nothing, low, high, top_k, top_p, target, least, True, CALL, MODEL)
    numbers_ptr = (cuts_ptr + position.to(tl.int64) * cut_words).to(tl.pointer_type(tl.float32))
    ids_ptr = numbers_ptr.to(tl.pointer_type(tl.int32))
    tl.store(numbers_ptr, maximum)
    tl.store(numbers_ptr + 1, normaliser)
    tl.store(ids_ptr + 2, tl.sum(best, 0))
    tl.store(numbers_ptr + 3, cut)
    tl.store(ids_ptr + 4, first.to(tl.int32))


@triton.jit
def candidates(row, top_k, top_p, target, least, high, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return a bound that everything kept reaches, the sub-blocks [TILE] that do, -1 beyond, and whether that is all.

    All that top-k keeps does where top-p needs its mass.
    """
    position, num_blocks, model, maximum = row
    factor = model[4]
    index = tl.arange(0, CALL.max_sub_blocks)
    maxima = tl.load(
        sub_maxima(model, position, CALL) + index,
        mask=index < num_blocks * (CALL.block // WIDTH),
        other=float("-inf"),
        cache_modifier=".cg",
    )
    key = key_of(maxima)
    low = tl.full((), LOWEST, tl.int64)
    above = high
    count = tl.full((), CALL.tile + 1, tl.int32)
    if CALL.top_ks[MODEL]:
        if top_k > 0:
            while (above - low > 1) & (count > CALL.tile):
                middle = low + (above - low) // 2
                found = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
                if found >= top_k:
                    low = middle
                    count = found
                else:
                    above = middle
    if CALL.top_ps[MODEL]:
        if (top_k == 0) & (top_p < 1):
            mass = mass_of(maxima, maximum, factor)
            while (above - low > 1) & (count > CALL.tile):
                middle = low + (above - low) // 2
                reaches = key >= middle.to(tl.int32)
                if tl.sum(tl.where(reaches, mass, 0), 0) >= target:
                    low = middle
                    count = tl.sum(reaches.to(tl.int32), 0)
                else:
                    above = middle
    if CALL.min_ps[MODEL]:
        # A little lower, for what rounding there is.
        bound = key_of(maximum + tl.div_rn(tl.log2(least) - 0.001, factor)).to(tl.int64)
        if (top_k == 0) | (top_p == 1):
            low = tl.maximum(low, bound)
    reaches = (key >= low.to(tl.int32)) & (key > LOWEST)
    number = tl.sum(reaches.to(tl.int32), 0)
    list_ptr = list_of(model, position)
    place = tl.cumsum(reaches.to(tl.int32), 0) - 1
    tl.store(list_ptr + place, index, mask=reaches & (place < CALL.tile))
    tl.debug_barrier()
    lane = tl.arange(0, CALL.tile)
    return low, tl.load(list_ptr + lane, mask=lane < number, other=-1, cache_modifier=".cg"), number <= CALL.tile


@triton.jit
def pool(row, low, high, top_k, top_p, target, total, least, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List the entries from which on a cut may lie; return [low, high) of their keys, the mass above, their number.

    Where top-p alone cuts, a sample of the row says where to look: a pass over the row then lists what is there, and
    tells whether the cut is. The bracket returned holds the cut in any case, but only if the number is no larger than
    a tile is everything listed.
    """
    position, num_blocks, model, maximum = row
    factor = model[4]
    room: tl.constexpr = CALL.tile * WIDTH
    by_mass = (top_k == 0) & (top_p < 1)
    count = tl.full((), room + 1, tl.int64)
    above = tl.full((), 0, tl.int64)
    rank = tl.full((), 0, tl.int64)
    spread = tl.full((), room // 128 + 1, tl.int64)
    lane = tl.arange(0, CALL.tile).to(tl.int64) * (num_blocks * (CALL.block // WIDTH)) // CALL.tile
    entry = lane.to(tl.int32)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    sampled = rows.load(model, position, entry, by_mass | (entry < 0), float("-inf"), CALL, MODEL)
    key = key_of(sampled)
    tile = (key, mass_of(sampled, maximum, factor), entry, above)
    if by_mass:
        whole = tl.sum(tile[1])
        share = tl.sum((entry < model[3]).to(tl.int32)).to(tl.float64) / model[3]
        # The mass left out is that of many entries, of which a sample tells more than of the few that are kept.
        wanted = tl.maximum(whole - ((total - target).to(tl.float64) * share).to(tl.int64), 1)
        center = search(row, tile, low, high, low, wanted, MASS, False, CALL, MODEL)
        rank = tl.sum((key >= center.to(tl.int32)).to(tl.int64))
    tries = 0
    while (count > room) & (tries < TRIES):
        start = low
        end = high
        if by_mass & ((tries > 0) | (least == 0)):
            start = search(row, tile, low, high, low, rank + spread, COUNT, False, CALL, MODEL)
            if rank > spread:
                end = search(row, tile, low, high, low, rank - spread, COUNT, False, CALL, MODEL) + 1
            end = tl.maximum(end, start + 1)
        count, above, mass = collect(row, start, end, CALL, MODEL)
        tries += 1
        if (start == low) & (end == high):
            if (by_mass == 0) | (mass < target):  # nothing but top-p can be narrowed down, and only where it cuts
                tries = TRIES
        else:
            if above >= target:
                low = end
                rank -= 2 * spread
                count = tl.full((), room + 1, tl.int64)
            elif mass + above < target:
                high = start
                rank += 2 * spread
                count = tl.full((), room + 1, tl.int64)
            else:
                low = start
                high = end
                spread = (spread + 1) // 2
    return low, high, above, count


@triton.jit
def collect(row, low, high, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List entries with keys in [low, high), as many as a tile holds; return their number, the mass above, theirs."""
    position, num_blocks, model, maximum = row
    pool_ptr = list_of(model, position)
    count = tl.full((), 0, tl.int64)
    above = tl.full((), 0, tl.int64)
    inside = tl.full((), 0, tl.int64)
    tl.debug_barrier()
    x = rows.load(model, position, tl.arange(0, CALL.block), position >= 0, float("-inf"), CALL, MODEL)
    for block in range(num_blocks):
        entry = block * CALL.block + tl.arange(0, CALL.block)
        following = rows.load(model, position, entry + CALL.block, position >= 0, float("-inf"), CALL, MODEL)
        key = key_of(x)
        mass = mass_of(x, maximum, model[4])
        x = following
        listed = (key >= low.to(tl.int32)) & (key < high.to(tl.int32)) & (key > LOWEST)
        place = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(pool_ptr + place, entry, mask=listed & (place < CALL.tile * WIDTH))
        count += tl.sum(listed.to(tl.int32), 0)
        above += tl.sum(tl.where(key >= high.to(tl.int32), mass, 0), 0)
        inside += tl.sum(tl.where(listed, mass, 0), 0)
    tl.debug_barrier()
    return count, above, inside


@triton.jit
def cut_row(
    row,
    tile,
    low,
    high,
    top_k,
    top_p,
    target,
    least,
    WHOLE: tl.constexpr,
    CALL: tl.constexpr,
    MODEL: tl.constexpr,
):
    """Return the smallest logit kept, the first id kept of those that equal it, and 1 / sum of what is kept.

    WHOLE rows are gone through instead of a tile.
    """
    factor, maximum = row[2][4], row[3]
    cut = low
    first = tl.full((), 0, tl.int64)
    if CALL.top_ks[MODEL]:
        if top_k > 0:
            cut = search(row, tile, cut, high, cut, top_k, COUNT, WHOLE, CALL, MODEL)
            if CALL.top_ps[MODEL]:
                if top_p < 1:
                    target = mass_to_keep(top_p, measure(row, tile, cut, cut, MASS, WHOLE, CALL, MODEL))
    if CALL.top_ps[MODEL]:
        if top_p < 1:
            cut = search(row, tile, cut, high, cut, target, MASS, WHOLE, CALL, MODEL)
            rest = target - measure(row, tile, cut + 1, cut, MASS, WHOLE, CALL, MODEL)
            each = tl.maximum(mass_of(logit_of(cut), maximum, factor), 1)
            wanted = (rest + each - 1) // each
            if measure(row, tile, first, cut, TIES, WHOLE, CALL, MODEL) > wanted:
                first = search(row, tile, first, first + row[2][3], cut, wanted, TIES, WHOLE, CALL, MODEL)
    if CALL.min_ps[MODEL]:
        if least > 0:
            lowest = lightest(cut, key_of(maximum).to(tl.int64), maximum, factor, least)
            first = tl.where(lowest > cut, 0, first)
            cut = lowest
    kept = measure(row, tile, cut + 1, cut, MASS, WHOLE, CALL, MODEL)
    ties = measure(row, tile, first, cut, TIES, WHOLE, CALL, MODEL)
    kept += ties * mass_of(logit_of(cut), maximum, factor)
    return logit_of(cut), first, (tl.full((), MASS_SCALE, tl.float64) / kept.to(tl.float64)).to(tl.float32)


@triton.jit
def search(
    row, tile, low, high, cut, wanted, KIND: tl.constexpr, WHOLE: tl.constexpr, CALL: tl.constexpr, MODEL: tl.constexpr
):
    """Return the highest of [low, high) from which on entries measure as much as wanted; at least `low`."""
    while high - low > 1:
        middle = low + (high - low) // 2
        found = measure(row, tile, middle, cut, KIND, WHOLE, CALL, MODEL)
        if found >= wanted:
            low = middle
            if KIND == COUNT:  # what is kept is known before the smallest of it is
                high = tl.where(found == wanted, low + 1, high)
        else:
            high = middle
    return low


@triton.jit
def measure(row, tile, bound, cut, KIND: tl.constexpr, WHOLE: tl.constexpr, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the number or mass of entries of which the key reaches a bound, or of those at the cut whose id does."""
    if WHOLE:
        position, num_blocks, model, maximum = row
        found = tl.full((), 0, tl.int64)
        for block in range(num_blocks):
            entry = block * CALL.block + tl.arange(0, CALL.block)
            x = rows.load(model, position, entry, position >= 0, float("-inf"), CALL, MODEL)
            mass = mass_of(x, maximum, model[4])
            found += tl.sum(measured(key_of(x), mass, entry, bound, cut, KIND), 0)
        return found
    else:
        found = tl.sum(measured(tile[0], tile[1], tile[2], bound, cut, KIND))
        if KIND == MASS:
            found += tile[3]
        return found


@triton.jit
def measured(key, mass, entry, bound, cut, KIND: tl.constexpr):
    """Return what each entry adds to a measure."""
    if KIND == COUNT:
        return (key >= bound.to(tl.int32)).to(tl.int64)
    elif KIND == MASS:
        return tl.where(key >= bound.to(tl.int32), mass, 0)
    else:
        return ((key == cut.to(tl.int32)) & (entry >= bound.to(tl.int32))).to(tl.int64)


@triton.jit
def lightest(low, high, maximum, factor, least):
    """Return the lowest key in [low, high] whose weight is not below `least`, as that of `high` is not."""
    low = low - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.exp2((logit_of(middle) - maximum) * factor) >= least:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def mass_to_keep(top_p, total):
    """Return the integer mass that top-p keeps of a total."""
    return tl.minimum(tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1), total)


@triton.jit
def mass_of(x, maximum, factor):
    """Return the integer mass of logits relative to the largest."""
    return (tl.exp2((x - maximum) * factor) * MASS_SCALE).to(tl.int64)


@triton.jit
def at_least(number):
    """Return the smallest float32 that is not below a number in [0, 1]; 0 for any other."""
    rounded = tl.where((number > 0) & (number <= 1), number, 0.0).to(tl.float32)
    following = (rounded.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where((rounded.to(tl.float64) < number.to(tl.float64)) & (rounded < 1), following, rounded)


@triton.jit
def key_of(x):
    """Return int32 that order like logits; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """Return the logit of a key, int64."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
