"""A cut of a row of which many entries may be kept: searched for in a tile, in a pool of entries, or in the whole row.

Searches are bisections over the logits' bits, which order like them, and all sums are integers, so that neither the
layout of a program nor a sample changes a bit of a cut.
"""

# ruff: noqa: FBT003, N803, PLR5501, RET505 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import rows
from acceptlib.engine.triton.keys import LOWEST, NOTHING, key_of, logit_of, word_of
from acceptlib.engine.triton.lists import mass_to_keep, places_of
from acceptlib.engine.triton.records import WIDTH, list_of
from acceptlib.engine.triton.sums import mass_of, normaliser_of

TRIES = tl.constexpr(4)
"""Passes over a row at most in search of a pool."""

COUNT = tl.constexpr(0)
MASS = tl.constexpr(1)
TIES = tl.constexpr(2)


class Tile(NamedTuple):
    """Entries of a row in registers: keys, masses and numbers; and the mass of what is larger than all of them."""

    key: tl.tensor
    mass: tl.tensor
    entry: tl.tensor
    above: tl.tensor


@triton.jit
def search_row(row, low, count, few, total, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what `cut_row` does: if `few`, of `count` listed entries, all with keys from `low` on; else of the row."""
    position, model, maximum, factor = row
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
        words_ptr = list_of(model, position, CALL).words_ptr
        word = tl.load(words_ptr + place, mask=place < count, other=NOTHING, cache_modifier=".cg")
        key = (word >> 32).to(tl.int32)
        tile = Tile(key, mass_of(logit_of(key), maximum, factor), word.to(tl.int32), above)
        cut, first, normaliser = cut_row(row, tile, low, high, filters, False, CALL, MODEL)
    else:
        nothing = Tile(low, low, low, low)
        cut, first, normaliser = cut_row(row, nothing, low, high, filters, True, CALL, MODEL)
    return cut, first, normaliser


@triton.jit
def pool(row, low, high, total, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List the entries among which a cut may be; return [low, high) of their keys, the mass above, and their number.

    Where top-p alone cuts, a sample of the row says where to look: a pass over the row then lists what is there, and
    tells whether the cut is. The bracket returned holds the cut in any case, but all of its entries are listed only if
    there is room for them.
    """
    top_k, top_p, to_keep, least = filters
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
        wanted = tl.maximum(tl.sum(tile.mass) - left_out_of_sample(entry, row.model.width, to_keep, total)[0], 1)
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
            if (by_mass == 0) | (mass < to_keep):  # nothing but top-p can be narrowed down, and only where it cuts
                tries = TRIES
        else:
            if above >= to_keep:
                low = end
                rank -= 2 * spread
                count = tl.full((), room + 1, tl.int64)
            elif mass + above < to_keep:
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
    lane = tl.arange(0, CALL.tile).to(tl.int64) * (row.model.num_blocks * (CALL.block // WIDTH)) // CALL.tile
    entry = lane.to(tl.int32)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return entry, rows.load(row.model, row.position, entry, wanted | (entry < 0), float("-inf"), CALL, MODEL)


@triton.jit
def left_out_of_sample(entry, width, to_keep, total):
    """Return how much mass of a sample is left out if `to_keep` of the row's total is kept; and the sample's share.

    What is left out is the mass of many entries, about which a sample tells more than about the few that are kept.
    """
    share = tl.sum((entry < width).to(tl.int32)).to(tl.float64) / width
    return ((total - to_keep).to(tl.float64) * share).to(tl.int64), share


@triton.jit
def list_between(row, low, high, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List entries with keys in [low, high), as many as fit a tile; return how many, the mass above and theirs."""
    position, model, maximum, factor = row
    words_ptr = list_of(model, position, CALL).words_ptr
    count = tl.full((), 0, tl.int64)
    above = tl.full((), 0, tl.int64)
    inside = tl.full((), 0, tl.int64)
    tl.debug_barrier()
    x = rows.load(model, position, tl.arange(0, CALL.block), position >= 0, float("-inf"), CALL, MODEL)
    for block in range(model.num_blocks):
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
def cut_row(row, tile, low, high, filters, WHOLE: tl.constexpr, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the smallest logit kept, the first id kept of those that equal it, and 1 / sum of what is kept.

    WHOLE rows are gone through instead of a tile.
    """
    factor, maximum = row.factor, row.maximum
    top_k, top_p, to_keep, least = filters
    cut = low
    first = tl.full((), 0, tl.int64)
    if CALL.top_ks[MODEL]:
        if top_k > 0:
            cut = search(row, tile, cut, high, cut, top_k, COUNT, WHOLE, CALL, MODEL)
            if CALL.top_ps[MODEL]:
                if top_p < 1:
                    to_keep = mass_to_keep(top_p, measure(row, tile, cut, cut, MASS, WHOLE, CALL, MODEL))
    if CALL.top_ps[MODEL]:
        if top_p < 1:
            cut = search(row, tile, cut, high, cut, to_keep, MASS, WHOLE, CALL, MODEL)
            rest = to_keep - measure(row, tile, cut + 1, cut, MASS, WHOLE, CALL, MODEL)
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
    return logit_of(cut), first, normaliser_of(kept)


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
            if KIND == COUNT:  # which entries are kept may be known before the smallest of them is
                high = tl.where(found == wanted, low + 1, high)
        else:
            high = middle
    return low


@triton.jit
def measure(row, tile, bound, cut, KIND: tl.constexpr, WHOLE: tl.constexpr, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the number or mass of entries whose key reaches a bound, or the number at the cut whose id does."""
    if WHOLE:
        position, model, maximum, factor = row
        found = tl.full((), 0, tl.int64)
        for block in range(model.num_blocks):
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
    """Return the lowest key in [low, high] whose weight is at least `least`, as that of `high` is."""
    low = low - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.exp2((logit_of(middle) - maximum) * factor) >= least:
            high = middle
        else:
            low = middle
    return high
