"""What top-p alone keeps of a row: entries around the cut, in bins of depth.

An entry's depth is how many binary digits its weight lies below the largest. One program a row lays out bins down to
the depth that the cut may have (`lay_out`), which it takes from the maxima of sub-blocks, from these and the heavy
entries that they hide, or else from a sample of the row. Many programs then go through the sub-blocks that reach the
last bin, list each entry in its bin, and add up the mass of every bin and of all that is above them (`collect`). One
program finds the bin that the cut is in and compares its entries, each with each (`finish`). Where the bins miss the
cut, or that bin has no room for its entries, `search` goes through the row. Masses are integers, so the cut is the same
to the bit either way.
"""

# ruff: noqa: N803 - jit functions; constants in capitals

import math
from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine import constants
from acceptlib.engine.triton import counters, rows
from acceptlib.engine.triton.keys import LOWEST, key_of, word_of
from acceptlib.engine.triton.lists import (
    COMPARED,
    Filters,
    Reduced,
    list_sub_blocks,
    mass_to_keep,
    number_of,
    rank_few,
    sub_blocks_at,
)
from acceptlib.engine.triton.records import LISTED, WIDTH, entries_in, list_of, record_of
from acceptlib.engine.triton.rows import DRAFT, TARGET
from acceptlib.engine.triton.search import left_out_of_sample, sample, search_row
from acceptlib.engine.triton.sums import MASS_SCALE, mass_of

BINS = WIDTH
"""Bins of a row. Each has room for `CALL.tile` entries."""

AT_ONCE = tl.constexpr(32)
"""Sub-blocks that a program goes through at a time."""

NARROWEST = tl.constexpr(0.001)
"""Digits that bins span at least."""

COARSE = tl.constexpr(2.0**17)
"""Scale of the masses of sub-blocks' maxima: a sum of fewer than 2^14 fits 32 bits, and one of more may wrap, but only
falls short."""

COARSE_SHIFT = tl.constexpr(int(math.log2(constants.MASS_SCALE / COARSE.value)))
"""How many more bits a mass has than one of these."""

DEPTH = tl.constexpr(18.0)
"""Depth from which on such a mass is 0."""

STEPS = tl.constexpr(6)
"""Steps of the search for a depth."""

SAMPLED = tl.constexpr(256)
"""Bins of a sample."""

SAMPLED_A_DIGIT = tl.constexpr(6.0)
"""How many of these bins there are to a binary digit."""

HEAVY = tl.constexpr(6.0)
"""Largest depth of heavy entries: two of them in one sub-block weigh enough to make a difference."""

MAX_HEAVY = tl.constexpr(256)
"""Sub-blocks with heavy entries that are looked into, at most: if there are more, none is."""

MAX_REACHING = tl.constexpr(2048)
"""Sub-blocks that may reach the last bin, at most, unless a sample says how deep it lies."""

FULL = tl.constexpr(0.5)
"""How full bins are meant to be where a sample says how deep they lie."""


class Bounds(NamedTuple):
    """The depths between which a row's bins are, and whether they get narrower downwards.

    `bend` is 0 for bins of one width, and 1 for bins that begin at cube roots: the deeper, the more entries there are.
    """

    start: tl.tensor
    end: tl.tensor
    bend: tl.tensor


class LaidOut(NamedTuple):
    """What is known of a row that is laid out, and the first sub-blocks of the list that a program goes through."""

    cut: tl.tensor
    maximum: tl.tensor
    bounds: Bounds
    num_sub_blocks: tl.tensor
    listed: tl.tensor


@triton.jit
def bin_of(x, maximum, factor, bounds):
    """Return the bins that logits lie in, float32: a larger logit never has a deeper bin, whatever the rounding."""
    scale = tl.div_rn(tl.full((), 1.0, tl.float32), bounds.end - bounds.start)
    part = ((maximum - x) * factor - bounds.start) * scale
    return part * (1 - bounds.bend + bounds.bend * part * part) * BINS


@triton.jit
def lay_out(row, sub_blocks, to_keep, total, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Store where a row's bins are, empty them, and list the sub-blocks that reach them, for `collect` and `finish`."""
    maximum, factor = row.maximum, row.factor
    index, maxima = sub_blocks
    start = tl.full((), 0.0, tl.float32)
    bounds = Bounds(start, depth_of_mass(maxima, to_keep, maximum, factor), start + 1)
    number = list_sub_blocks(row, index, bin_of(maxima, maximum, factor, bounds) < BINS, CALL)
    if (bounds.end == DEPTH) | (number > CALL.tile * LISTED):
        hidden, count = heavy_entries(row, index, maxima, CALL, MODEL)
        deep = depth_of_mass(maxima, to_keep - hidden, maximum, factor)
        bounds = Bounds(start, tl.maximum(deep, HEAVY), start + 1)
        number = list_sub_blocks(row, index, bin_of(maxima, maximum, factor, bounds) < BINS, CALL)
        if (bounds.end == DEPTH) | (number > MAX_REACHING) | (count > BINS * CALL.tile * FULL):
            bounds = bracket(row, to_keep, total, CALL, MODEL)
            number = list_sub_blocks(row, index, bin_of(maxima, maximum, factor, bounds) < BINS, CALL)
    bins = list_of(row.model, row.position, CALL)
    each = tl.arange(0, BINS)
    tl.store(bins.sums_ptr + each, tl.zeros((BINS,), tl.int64))
    tl.store(bins.counts_ptr + each, tl.zeros((BINS,), tl.int32))
    record = record_of(row.model, row.position)
    tl.store(record.start_ptr, bounds.start)
    tl.store(record.end_ptr, bounds.end)
    tl.store(record.bend_ptr, bounds.bend)
    tl.store(record.above_ptr, 0)
    tl.store(record.total_ptr, total)
    tl.store(record.num_binned_ptr, number)


@triton.jit
def depth_of_mass(maxima, to_keep, maximum, factor):
    """Return a depth down to which the maxima of sub-blocks [n, m] have the mass `to_keep`; DEPTH if all have less."""
    depth = (maximum - maxima) * factor
    # Rounded down, and a warp has one instruction for a sum of 32 bits.
    mass = (tl.exp2(-depth) * COARSE).to(tl.int32)
    wanted = (to_keep >> COARSE_SHIFT) + 1
    short = tl.full((), 0.0, tl.float32)
    deep = tl.full((), DEPTH, tl.float32)
    for _ in range(STEPS):
        middle = (short + deep) * 0.5
        enough = tl.sum(tl.sum(tl.where(depth <= middle, mass, 0), 1), 0) >= wanted
        short = tl.where(enough, short, middle)
        deep = tl.where(enough, middle, deep)
    return deep


@triton.jit
def heavy_entries(row, index, maxima, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the mass of heavy entries that are not the largest of their sub-blocks, and how many heavy ones there are.

    Where there may be many, both are 0.
    """
    position, model, maximum, factor = row.position, row.model, row.maximum, row.factor
    number = list_sub_blocks(row, index, (maximum - maxima) * factor <= HEAVY, CALL)
    hidden = tl.full((), 0, tl.int64)
    count = tl.full((), 0, tl.int32)
    for start in range(0, tl.where(number <= MAX_HEAVY, number, 0), AT_ONCE):
        sub_block = sub_blocks_at(row, start + tl.arange(0, AT_ONCE), number, CALL)
        entry = entries_in(sub_block[:, None], tl.arange(0, WIDTH)[None, :], model, CALL)
        x = rows.load(model, position, entry, entry >= 0, float("-inf"), CALL, MODEL)
        mass = mass_of(x, maximum, factor)
        heavy = (maximum - x) * factor <= HEAVY
        hidden += tl.sum(tl.where(heavy, mass, 0)) - tl.sum(tl.max(mass, 1), 0)
        count += tl.sum(heavy.to(tl.int32))
    tl.debug_barrier()  # every warp has read the list
    return hidden, count


@triton.jit
def bracket(row, to_keep, total, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return bounds that a sample of the row puts around the cut, with as many entries as bins are meant to hold."""
    entry, x = sample(row, row.position >= 0, CALL, MODEL)
    left_out, share = left_out_of_sample(entry, row.model.width, to_keep, total)
    # Entries are counted by depth, and each is taken to weigh what the middle of its bin does.
    number = tl.minimum((row.maximum - x) * (row.factor * SAMPLED_A_DIGIT), SAMPLED - 1).to(tl.int32)
    counts = tl.histogram(tl.reshape(number, [CALL.tile * WIDTH]), SAMPLED).to(tl.float32)
    each = tl.arange(0, SAMPLED)
    masses = counts * tl.exp2((each + 0.5) * (-1 / SAMPLED_A_DIGIT))
    center = place_of(tl.sum(masses, 0) - left_out.to(tl.float32) / MASS_SCALE, masses)
    rank = tl.sum(counts * tl.minimum(tl.maximum(center - each, 0.0), 1.0), 0)
    radius = share.to(tl.float32) * (BINS * CALL.tile * FULL / 2)
    start = place_of(tl.maximum(rank - radius, 0.0), counts) * (1 / SAMPLED_A_DIGIT)
    end = place_of(rank + radius, counts) * (1 / SAMPLED_A_DIGIT)
    return Bounds(start, tl.maximum(end, start + NARROWEST), start * 0)


@triton.jit
def place_of(amount, parts):
    """Return how many of [SAMPLED] parts, from the first on, hold an amount, with a fraction for the last of them."""
    upto = tl.cumsum(parts, 0)
    number = tl.sum((upto < amount).to(tl.int32), 0)
    here = tl.arange(0, SAMPLED) == number
    part = tl.sum(tl.where(here, parts, 0.0), 0)
    before = tl.sum(tl.where(here, upto, 0.0), 0) - part
    return number + tl.where(part > 0, tl.maximum(amount - before, 0.0) / part, 0.0)


@triton.jit
def collect_rows(position, count, program, request, CALL: tl.constexpr):
    """List in bins the entries of some of one row's sub-blocks, if its law is not known yet."""
    step = tl.num_programs(0) // CALL.num_collected
    if CALL.alike:
        model, first, exists, _ = rows.share_of(program, step, position, count, request)
        laid_out = load_laid_out(position, exists, first, model, CALL)
        if counters.needed(position, exists, request, CALL, LATEST=True):
            collect_row(laid_out, position, first, step, model, CALL, TARGET)
    else:
        if CALL.collects[TARGET]:
            if program < step:
                laid_out = load_laid_out(position, position <= count, program, request.target, CALL)
                if counters.needed(position, position <= count, request, CALL, LATEST=True):
                    collect_row(laid_out, position, program, step, request.target, CALL, TARGET)
        if CALL.collects[DRAFT]:
            first = program - (tl.num_programs(0) - step)
            if first >= 0:
                laid_out = load_laid_out(position, position < count, first, request.draft, CALL)
                if counters.needed(position, position < count, request, CALL, LATEST=True):
                    collect_row(laid_out, position, first, step, request.draft, CALL, DRAFT)


@triton.jit
def load_laid_out(position, exists, first, model, CALL: tl.constexpr):
    """Load what is known of a row that is laid out, to be on its way while the stop is looked at."""
    record = record_of(model, position)
    lane = first * AT_ONCE + tl.arange(0, AT_ONCE)
    list_ptr = list_of(model, position, CALL).sub_blocks_ptr
    room = tl.where(exists, CALL.tile * LISTED, 0)
    return LaidOut(
        cut=tl.load(record.cut_ptr, mask=exists, other=0.0, cache_modifier=".cg"),
        maximum=tl.load(record.maximum_ptr, mask=exists, other=0.0, cache_modifier=".cg"),
        bounds=Bounds(
            start=tl.load(record.start_ptr, mask=exists, other=0.0, cache_modifier=".cg"),
            end=tl.load(record.end_ptr, mask=exists, other=0.0, cache_modifier=".cg"),
            bend=tl.load(record.bend_ptr, mask=exists, other=0.0, cache_modifier=".cg"),
        ),
        num_sub_blocks=tl.load(record.num_binned_ptr, mask=exists, other=0, cache_modifier=".cg"),
        listed=tl.load(list_ptr + lane, mask=lane < room, other=-1, cache_modifier=".cg"),
    )


@triton.jit
def collect_row(laid_out, position, first, step, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """List in bins the entries of some of one row's sub-blocks, and add up masses."""
    cut, maximum, bounds, num_sub_blocks, sub_block = laid_out
    if cut != cut:
        row = Reduced(position, model, maximum, rows.factor_of(model, CALL, MODEL))
        bins = list_of(model, position, CALL)
        above = tl.full((), 0, tl.int64)
        lane = first * AT_ONCE + tl.arange(0, AT_ONCE)
        sub_block = tl.where(lane < num_sub_blocks, sub_block, -1)
        sub_block = tl.where(num_sub_blocks <= CALL.tile * LISTED, sub_block, lane)
        for start in range(first * AT_ONCE, number_of(row, num_sub_blocks, CALL), step * AT_ONCE):
            # Neighbours are swapped, or four would be loaded at once, and all carried to the layout of the atomics.
            entry = entries_in(sub_block[:, None], (tl.arange(0, WIDTH) ^ 1)[None, :], model, CALL)
            x = rows.load(model, position, entry, entry >= 0, float("-inf"), CALL, MODEL)
            sub_block = sub_blocks_at(row, start + step * AT_ONCE + tl.arange(0, AT_ONCE), num_sub_blocks, CALL)
            mass = mass_of(x, maximum, row.factor)
            number = bin_of(x, maximum, row.factor, bounds)
            if bounds.start > 0:
                above += tl.sum(tl.where(number < 0, mass, 0))
            listed = (number >= 0) & (number < BINS)
            number = tl.where(listed, number, 0.0).to(tl.int32)
            place = tl.atomic_add(bins.counts_ptr + number, 1, mask=listed, sem="relaxed")
            tl.atomic_add(bins.sums_ptr + number, mass, mask=listed, sem="relaxed")
            word = word_of(key_of(x), entry)
            tl.store(bins.words_ptr + number * CALL.tile + place, word, mask=listed & (place < CALL.tile))
        if bounds.start > 0:
            tl.atomic_add(record_of(model, position).above_ptr, above, sem="relaxed")


@triton.jit
def finish_row(position, model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Find the law of a row if it is not known yet."""
    record, bins = record_of(model, position), list_of(model, position, CALL)
    each = tl.arange(0, BINS)
    # All is on its way before any of it is looked at.
    cut = tl.load(record.cut_ptr, cache_modifier=".cg")
    maximum = tl.load(record.maximum_ptr, cache_modifier=".cg")
    above = tl.load(record.above_ptr, cache_modifier=".cg")
    total = tl.load(record.total_ptr, cache_modifier=".cg")
    masses = tl.load(bins.sums_ptr + each, cache_modifier=".cg")
    counts = tl.load(bins.counts_ptr + each, cache_modifier=".cg")
    tl.debug_barrier()  # loads stay ahead of it, also of what another warp stores below
    if cut != cut:
        row = Reduced(position, model, maximum, rows.factor_of(model, CALL, MODEL))
        top_p = model.top_p.to(tl.float64)
        to_keep = mass_to_keep(top_p, total)
        number = tl.sum((above + tl.cumsum(masses, 0) < to_keep).to(tl.int32), 0)
        above += tl.sum(tl.where(each < number, masses, 0), 0)
        count = tl.sum(tl.where(each == number, counts, 0), 0)
        filters = Filters(tl.full((), 0, tl.int64), top_p, to_keep, tl.full((), 0.0, tl.float32))
        if (above < to_keep) & (number < BINS) & (count <= CALL.tile):
            words_ptr = bins.words_ptr + number * CALL.tile
            few: tl.constexpr = min(COMPARED.value, CALL.tile)
            if count <= few:
                cut, first, normaliser = rank_few(row, words_ptr, count, above, filters, few, ".cg", CALL, MODEL)
            else:
                most: tl.constexpr = CALL.tile
                cut, first, normaliser = rank_few(row, words_ptr, count, above, filters, most, ".cg", CALL, MODEL)
        else:
            low, none = tl.full((), LOWEST, tl.int64), tl.full((), 0, tl.int32)
            cut, first, normaliser = search_row(row, low, none, none != 0, total, filters, CALL, MODEL)
        tl.store(record.normaliser_ptr, normaliser)
        tl.store(record.cut_ptr, cut)
        tl.store(record.first_kept_ptr, first.to(tl.int32))
