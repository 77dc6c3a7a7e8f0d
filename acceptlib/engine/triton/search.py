"""A cut of a row of which many entries may be kept: searched for in a tile, in a pool of entries, or in the whole row.

Searches are bisections over the logits' bits, which order like them, and all sums are integers, so that neither the
layout of a program nor a sample changes a bit of a cut.
"""

# ruff: noqa: FBT003, N803, PLR5501, RET505 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import laws, rows
from acceptlib.engine.triton.laws import WIDTH, key_of, logit_of

MASS_SCALE = tl.constexpr(4398046511104.0)
"""2^42, of masses relative to the largest entry."""

LOWEST = tl.constexpr(-2139095041)
"""The key of minus infinity."""

LISTED = tl.constexpr(8)
"""Of WIDTH numbers in a list those that are sub-blocks; entries take the others."""

TRIES = tl.constexpr(4)
"""Passes over a row at most in search of a pool."""

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
def search_row(row, low, high, above, count, total, few, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what `cut_row` does, of listed entries if they are few, else of a pool or of the whole row.

    Keys of the entries are in [low, high), and `above` is the mass of what is not listed because it is larger.
    """
    position, num_blocks, model, maximum, factor = row
    least = filters.least
    if few == 0:
        low, high, above, found = pool(row, low, high, total, filters, CALL, MODEL)
        few = found <= CALL.tile * (WIDTH - LISTED)
        # What is above the pool has to stay: min-p must not cut there.
        if least > 0:
            few = few & (tl.exp2((logit_of(high - 1) - maximum) * factor) >= least)
        count = tl.minimum(found, CALL.tile * WIDTH).to(tl.int32)
    if few:
        place = tl.arange(0, CALL.tile)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        entries_ptr = list_of(model, position, num_blocks, CALL) + CALL.tile * LISTED
        entry = tl.load(entries_ptr + place, mask=place < count, other=-1, cache_modifier=".cg")
        x = rows.load(model, position, entry, entry >= 0, float("-inf"), CALL, MODEL)
        tile = Tile(key_of(x), mass_of(x, maximum, factor), entry, above)
        cut, first, normaliser = cut_row(row, tile, low, high, filters, False, CALL, MODEL)
    else:
        nothing = Tile(low, low, low, low)
        cut, first, normaliser = cut_row(row, nothing, low, high, filters, True, CALL, MODEL)
    return cut, first, normaliser


@triton.jit
def list_of(model, position, num_blocks, CALL: tl.constexpr):
    """Return where a row's list is, after its sub-blocks' maxima: LISTED sub-blocks for each of a tile, and entries."""
    return (laws.sub_maxima(model, position) + num_blocks * (CALL.block // WIDTH)).to(tl.pointer_type(tl.int32))


@triton.jit
def pool(row, low, high, total, filters, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List the entries from which on a cut may lie; return [low, high) of their keys, the mass above, their number.

    Where top-p alone cuts, a sample of the row says where to look: a pass over the row then lists what is there, and
    tells whether the cut is. The bracket returned holds the cut in any case, but everything in it is listed only if
    there is room for as many.
    """
    top_k, top_p, target, least = filters
    room: tl.constexpr = CALL.tile * (WIDTH - LISTED)
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
def collect(row, low, high, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List entries with keys in [low, high), as many as a tile holds; return their number, the mass above, theirs."""
    position, num_blocks, model, maximum, factor = row
    entries_ptr = list_of(model, position, num_blocks, CALL) + CALL.tile * LISTED
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
        entry, listed, place, number = in_runs(entry, listed)
        tl.store(entries_ptr + count + place, entry, mask=listed & (count + place < CALL.tile * (WIDTH - LISTED)))
        count += number
    tl.debug_barrier()
    return count, above, inside


@triton.jit
def in_runs(entry, listed):
    """Return entries [n] and which of them are listed, in runs of WIDTH; where in the list; and how many are listed.

    A run is counted by the few threads that hold it, in half the instructions of one long scan.
    """
    size: tl.constexpr = entry.shape[0]
    run: tl.constexpr = min(size, WIDTH.value)
    listed = tl.reshape(listed, [size // run, run])
    places, number = places_of(listed)
    return tl.reshape(entry, [size // run, run]), listed, places, number


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
def inverse_of(mass):
    """Return the normaliser of rows of which a mass is kept."""
    return (tl.full((), MASS_SCALE, tl.float64) / mass.to(tl.float64)).to(tl.float32)


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
