"""A cut of a row of which many entries may be kept: searched for in a tile, in a pool of entries, or in the whole row.

Searches are bisections over the logits' bits, which order like them, and all sums are integers, so that neither the
layout of a program nor a sample changes a bit of a cut.
"""

# ruff: noqa: FBT003, N803, PLR5501, RET505 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import rows
from acceptlib.engine.triton.counters import THREADS
from acceptlib.engine.triton.laws import LOWEST, key_of, logit_of
from acceptlib.engine.triton.records import LISTED, WIDTH, list_of, sub_maxima
from acceptlib.engine.triton.sums import inverse_of, mass_of

COMPARED = tl.constexpr(32)
"""Entries of which each is compared with each in one turn, at most: most bins have no more."""

ABREAST = tl.constexpr(8)
"""Entries that more are compared with at a time: a loop, for code is slow where it runs for the first time."""

TRIES = tl.constexpr(4)
"""Passes over a row at most in search of a pool."""

NOTHING = tl.constexpr(LOWEST.value << 32)
"""A word of an entry that weighs nothing, before those of all others."""

BEHIND_ALL = tl.constexpr(0x7FFFFFFF << 32)
"""A word of a key and an entry's number behind those of all entries."""

COUNT = tl.constexpr(0)
MASS = tl.constexpr(1)
TIES = tl.constexpr(2)


class Reduced(NamedTuple):
    """A row of which the law is to be found, and the maximum is."""

    position: tl.tensor
    num_blocks: tl.tensor
    model: rows.Model
    maximum: tl.tensor
    factor: tl.tensor


class Filters(NamedTuple):
    """What a row is filtered by: k or 0, p or 1, the mass that top-p keeps, and the least weight beside the largest."""

    top_k: tl.tensor
    top_p: tl.tensor
    target: tl.tensor
    least: tl.tensor


class Tile(NamedTuple):
    """Entries of a row in registers: keys, masses and numbers; and the mass of what is larger than all of them."""

    key: tl.tensor
    mass: tl.tensor
    entry: tl.tensor
    above: tl.tensor


@triton.jit
def search_row(row, low, count, few, total, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what `cut_row` does: of `count` listed entries with keys from `low` on if they are few, or of the row."""
    position, num_blocks, model, maximum, factor = row
    least = filters.least
    high = key_of(maximum).to(tl.int64) + 1
    above = tl.full((), 0, tl.int64)
    if few == 0:
        low, high, above, found = pool(row, low, high, total, filters, CALL, MODEL)
        few = found <= CALL.tile * WIDTH
        # What is above the pool has to stay: min-p must not cut there.
        if least > 0:
            few = few & (tl.exp2((logit_of(high - 1) - maximum) * factor) >= least)
        count = tl.minimum(found, CALL.tile * WIDTH).to(tl.int32)
    if few:
        place = tl.arange(0, CALL.tile)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        words_ptr = list_of(model, position, num_blocks, CALL).words_ptr
        word = tl.load(words_ptr + place, mask=place < count, other=NOTHING, cache_modifier=".cg")
        key = (word >> 32).to(tl.int32)
        tile = Tile(key, mass_of(logit_of(key), maximum, factor), word.to(tl.int32), above)
        cut, first, normaliser = cut_row(row, tile, low, high, filters, False, CALL, MODEL)
    else:
        nothing = Tile(low, low, low, low)
        cut, first, normaliser = cut_row(row, nothing, low, high, filters, True, CALL, MODEL)
    return cut, first, normaliser


@triton.jit
def maxima_of(position, num_blocks, model, CALL: tl.constexpr):
    """Return the numbers of a row's sub-blocks and their maxima, [n, m] in the order of `a_row_each`."""
    index = a_row_each(CALL.max_sub_blocks)
    maxima_ptr = sub_maxima(model, position) + index
    inside = index < num_blocks * (CALL.block // WIDTH)
    return index, tl.load(maxima_ptr, mask=inside, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def a_row_each(SIZE: tl.constexpr):
    """Return numbers below SIZE, [n, m], so that threads hold whole rows, and neighbours the next numbers.

    What a thread lists of its rows it then counts by itself, and stores from where it is. (So it is under Triton 3.6.)
    """
    threads: tl.constexpr = min(THREADS.value, SIZE)
    # In pairs the other way round, or the compiler would load four at once, and carry them to the layout of the list.
    thread = tl.arange(0, threads) ^ 1
    return thread[:, None] + threads * tl.arange(0, SIZE // threads)[None, :]


@triton.jit
def list_sub_blocks(row, index, reaches, CALL: tl.constexpr):
    """List those of sub-blocks [n, m] that reach a bound, as many as there is room for; return how many do."""
    place, number = places_of(reaches)
    list_ptr = list_of(row.model, row.position, row.num_blocks, CALL).sub_blocks_ptr
    tl.store(list_ptr + place, index, mask=reaches & (place < CALL.tile * LISTED))
    tl.debug_barrier()
    return number


@triton.jit
def number_of(row, num_sub_blocks, CALL: tl.constexpr):
    """Return how many sub-blocks `sub_blocks_at` has: those listed, or all if there was no room for these."""
    return tl.where(num_sub_blocks <= CALL.tile * LISTED, num_sub_blocks, row.num_blocks * (CALL.block // WIDTH))


@triton.jit
def sub_blocks_at(row, place, num_sub_blocks, CALL: tl.constexpr):
    """Return the sub-blocks at places of the list, -1 beyond its end."""
    listed = num_sub_blocks <= CALL.tile * LISTED
    list_ptr = list_of(row.model, row.position, row.num_blocks, CALL).sub_blocks_ptr
    inside = place < tl.where(listed, num_sub_blocks, 0)
    return tl.load(list_ptr + place, mask=inside, other=tl.where(listed, -1, place), cache_modifier=".cg")


@triton.jit
def rank_few(
    row,
    words_ptr,
    count,
    above,
    filters,
    MOST: tl.constexpr,
    CACHE: tl.constexpr,
    CALL: tl.constexpr,
    MODEL: tl.constexpr,
):
    """Return what `cut_row` does, of few listed entries, by comparing each with each.

    Args:
        row: The row.
        words_ptr: The entries.
        count: How many they are.
        above: The mass of what is not among them because it is larger.
        filters: What the row is filtered by.
        MOST: How many they may be.
        CACHE: The modifier of loads: ".cg" where another program has listed them.
        CALL: The call.
        MODEL: Which of the two models.
    """
    top_k, top_p, target, least = filters
    maximum, factor = row.maximum, row.factor
    lane = tl.arange(0, MOST)
    kept = lane < count
    word = tl.load(words_ptr + lane, mask=kept, other=NOTHING, cache_modifier=CACHE)
    key = (word >> 32).to(tl.int32)
    x = logit_of(key)
    mass = mass_of(x, maximum, factor)
    abreast: tl.constexpr = MOST if MOST <= COMPARED else ABREAST
    place = tl.zeros((MOST, abreast), tl.int32)
    before = tl.zeros((MOST, abreast), tl.int64)
    for start in range(0, count, abreast):
        other = tl.gather(word, start + tl.arange(0, abreast), 0)
        other_key = (other >> 32).to(tl.int32)
        place += (other_key[None, :] > key[:, None]).to(tl.int32)
        if CALL.top_ps[MODEL]:
            other_mass = mass_of(logit_of(other_key), maximum, factor)
            before += tl.where(other[None, :] > word[:, None], other_mass[None, :], 0)
    if CALL.top_ks[MODEL]:
        if top_k > 0:
            kept = kept & (tl.sum(place, 1) < top_k)
    if CALL.top_ps[MODEL]:
        if top_p < 1:
            if top_k > 0:
                target = mass_to_keep(top_p, tl.sum(tl.where(kept, mass, 0), 0))
            kept = kept & (above + tl.sum(before, 1) < target)
    if CALL.min_ps[MODEL]:
        kept = kept & (tl.exp2((x - maximum) * factor) >= least)
    least_word, total = tl.reduce((tl.where(kept, word, BEHIND_ALL), tl.where(kept, mass, 0)), 0, _least_and_sum)
    return logit_of((least_word >> 32).to(tl.int32)), least_word.to(tl.int32).to(tl.int64), inverse_of(above + total)


@triton.jit
def _least_and_sum(least, total, other_least, other_total):
    return tl.minimum(least, other_least), total + other_total


@triton.jit
def pool(row, low, high, total, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List the entries from which on a cut may lie; return [low, high) of their keys, the mass above, their number.

    Where top-p alone cuts, a sample of the row says where to look: a pass over the row then lists what is there, and
    tells whether the cut is. The bracket returned holds the cut in any case, but everything in it is listed only if
    there is room for as many.
    """
    top_k, top_p, target, least = filters
    room: tl.constexpr = CALL.tile * WIDTH
    by_mass = (top_k == 0) & (top_p < 1)
    count = tl.full((), room + 1, tl.int64)
    above = tl.full((), 0, tl.int64)
    rank = tl.full((), 0, tl.int64)
    spread = tl.full((), room // 128 + 1, tl.int64)
    entry, x = sample(row, by_mass, CALL, MODEL)
    key = key_of(x)
    tile = Tile(key, mass_of(x, row.maximum, row.factor), entry, above)
    if by_mass:
        wanted = tl.maximum(tl.sum(tile.mass) - left_out_of_sample(entry, row.model.width, target, total)[0], 1)
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
        count, above, mass = list_between(row, start, end, CALL, MODEL)
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
def sample(row, wanted, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return numbers and logits of entries all over a row, a tile of runs of WIDTH; -inf if they are not wanted."""
    lane = tl.arange(0, CALL.tile).to(tl.int64) * (row.num_blocks * (CALL.block // WIDTH)) // CALL.tile
    entry = lane.to(tl.int32)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return entry, rows.load(row.model, row.position, entry, wanted | (entry < 0), float("-inf"), CALL, MODEL)


@triton.jit
def left_out_of_sample(entry, width, target, total):
    """Return how much mass of a sample is left out if `target` of the row's total is kept; and the sample's share.

    That is the mass of many entries, of which a sample tells more than of the few that are kept.
    """
    share = tl.sum((entry < width).to(tl.int32)).to(tl.float64) / width
    return ((total - target).to(tl.float64) * share).to(tl.int64), share


@triton.jit
def list_between(row, low, high, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List entries with keys in [low, high), as many as a tile holds; return their number, the mass above, theirs."""
    position, num_blocks, model, maximum, factor = row
    words_ptr = list_of(model, position, num_blocks, CALL).words_ptr
    count = tl.full((), 0, tl.int64)
    above = tl.full((), 0, tl.int64)
    inside = tl.full((), 0, tl.int64)
    tl.debug_barrier()
    x = rows.load(model, position, tl.arange(0, CALL.block), position >= 0, float("-inf"), CALL, MODEL)
    for block in range(num_blocks):
        entry = block * CALL.block + tl.arange(0, CALL.block)
        following = rows.load(model, position, entry + CALL.block, position >= 0, float("-inf"), CALL, MODEL)
        key = key_of(x)
        mass = mass_of(x, maximum, factor)
        x = following
        listed = (key >= low.to(tl.int32)) & (key < high.to(tl.int32)) & (key > LOWEST)
        above += tl.sum(tl.where(key >= high.to(tl.int32), mass, 0), 0)
        inside += tl.sum(tl.where(listed, mass, 0), 0)
        word = tl.reshape(word_of(key, entry), [CALL.block // WIDTH, WIDTH])
        listed = tl.reshape(listed, word.shape)
        place, number = places_of(listed)
        tl.store(words_ptr + count + place, word, mask=listed & (count + place < CALL.tile * WIDTH))
        count += number
    tl.debug_barrier()
    return count, above, inside


@triton.jit
def places_of(listed):
    """Return where in a list those come of rows [n, m] that are listed, and how many are."""
    numbers = tl.sum(listed.to(tl.int32), 1)
    places = (tl.cumsum(numbers, 0) - numbers)[:, None] + tl.cumsum(listed.to(tl.int32), 1) - 1
    return places, tl.sum(numbers, 0)


@triton.jit
def cut_row(row, tile, low, high, filters, WHOLE: tl.constexpr, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the smallest logit kept, the first id kept of those that equal it, and 1 / sum of what is kept.

    WHOLE rows are gone through instead of a tile.
    """
    factor, maximum = row.factor, row.maximum
    top_k, top_p, target, least = filters
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
                first = search(row, tile, first, first + row.model.width, cut, wanted, TIES, WHOLE, CALL, MODEL)
    if CALL.min_ps[MODEL]:
        if least > 0:
            lowest = lightest(cut, key_of(maximum).to(tl.int64), maximum, factor, least)
            first = tl.where(lowest > cut, 0, first)
            cut = lowest
    kept = measure(row, tile, cut + 1, cut, MASS, WHOLE, CALL, MODEL)
    ties = measure(row, tile, first, cut, TIES, WHOLE, CALL, MODEL)
    kept += ties * mass_of(logit_of(cut), maximum, factor)
    return logit_of(cut), first, inverse_of(kept)


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
        position, num_blocks, model, maximum, factor = row
        found = tl.full((), 0, tl.int64)
        for block in range(num_blocks):
            entry = block * CALL.block + tl.arange(0, CALL.block)
            x = rows.load(model, position, entry, position >= 0, float("-inf"), CALL, MODEL)
            mass = mass_of(x, maximum, factor)
            found += tl.sum(measured(key_of(x), mass, entry, bound, cut, KIND), 0)
        return found
    else:
        found = tl.sum(measured(tile.key, tile.mass, tile.entry, bound, cut, KIND))
        if KIND == MASS:
            found += tile.above
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
def word_of(key, entry):
    """Return int64 that order like logits, and equal ones like their ids, of which the highest are kept."""
    return (key.to(tl.int64) << 32) | entry
