"""What one program lists of a row: sub-blocks that reach a bound, and their entries, which if few are ranked at once.

Each thread holds whole rows of what it lists from, so it counts by itself, and stores without moving anything.
"""

# ruff: noqa: N803 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import rows
from acceptlib.engine.triton.counters import THREADS
from acceptlib.engine.triton.keys import BEHIND_ALL, NOTHING, logit_of
from acceptlib.engine.triton.records import LISTED, WIDTH, list_of, sub_maxima
from acceptlib.engine.triton.sums import mass_of, normaliser_of

COMPARED = tl.constexpr(32)
"""Entries that are compared each with each in one turn, at most: most bins have no more."""

ABREAST = tl.constexpr(8)
"""Where there are more, how many all are compared with at a time. A loop, for code is slow when it first runs."""


class Reduced(NamedTuple):
    """A row whose maximum is known, and whose law is to be found."""

    position: tl.tensor
    model: rows.Model
    maximum: tl.tensor
    factor: tl.tensor


class Filters(NamedTuple):
    """What a row is filtered by: k or 0, p or 1, the mass that top-p keeps, and the least weight beside the largest."""

    top_k: tl.tensor
    top_p: tl.tensor
    to_keep: tl.tensor
    least: tl.tensor


@triton.jit
def maxima_of(position, model, CALL: tl.constexpr):
    """Return the numbers of a row's sub-blocks and their maxima, [n, m] in the order of `a_row_each`."""
    index = a_row_each(CALL.max_blocks * CALL.block // WIDTH)
    maxima_ptr = sub_maxima(model, position) + index
    inside = index < model.num_blocks * (CALL.block // WIDTH)
    return index, tl.load(maxima_ptr, mask=inside, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def a_row_each(SIZE: tl.constexpr):
    """Return numbers below SIZE, [n, m], so that a thread holds whole rows, and neighbouring rows neighbouring numbers.

    A thread then counts what it lists by itself, and stores it without moving it. (So it is under Triton 3.6.)
    """
    threads: tl.constexpr = min(THREADS.value, SIZE)
    # Neighbours are swapped, or the compiler would load four at once, and carry them to the layout of the list.
    thread = tl.arange(0, threads) ^ 1
    return thread[:, None] + threads * tl.arange(0, SIZE // threads)[None, :]


@triton.jit
def list_sub_blocks(row, index, reaches, CALL: tl.constexpr):
    """List those of sub-blocks [n, m] that reach a bound, as many as there is room for; return how many do."""
    place, number = places_of(reaches)
    list_ptr = list_of(row.model, row.position, CALL).sub_blocks_ptr
    tl.store(list_ptr + place, index, mask=reaches & (place < CALL.tile * LISTED))
    tl.debug_barrier()
    return number


@triton.jit
def number_of(row, num_sub_blocks, CALL: tl.constexpr):
    """Return how many sub-blocks `sub_blocks_at` has: those listed, or all if there was no room for these."""
    return tl.where(num_sub_blocks <= CALL.tile * LISTED, num_sub_blocks, row.model.num_blocks * (CALL.block // WIDTH))


@triton.jit
def sub_blocks_at(row, place, num_sub_blocks, CALL: tl.constexpr):
    """Return the sub-blocks at places of the list, -1 beyond its end."""
    listed = num_sub_blocks <= CALL.tile * LISTED
    list_ptr = list_of(row.model, row.position, CALL).sub_blocks_ptr
    inside = place < tl.where(listed, num_sub_blocks, 0)
    return tl.load(list_ptr + place, mask=inside, other=tl.where(listed, -1, place), cache_modifier=".cg")


@triton.jit
def places_of(listed):
    """Return the places in a list of those of rows [n, m] that are `listed`, and how many are."""
    numbers = tl.sum(listed.to(tl.int32), 1)
    places = (tl.cumsum(numbers, 0) - numbers)[:, None] + tl.cumsum(listed.to(tl.int32), 1) - 1
    return places, tl.sum(numbers, 0)


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
    top_k, top_p, to_keep, least = filters
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
                to_keep = mass_to_keep(top_p, tl.sum(tl.where(kept, mass, 0), 0))
            kept = kept & (above + tl.sum(before, 1) < to_keep)
    if CALL.min_ps[MODEL]:
        kept = kept & (tl.exp2((x - maximum) * factor) >= least)
    least_word, total = tl.reduce((tl.where(kept, word, BEHIND_ALL), tl.where(kept, mass, 0)), 0, _least_and_sum)
    return logit_of((least_word >> 32).to(tl.int32)), least_word.to(tl.int32).to(tl.int64), normaliser_of(above + total)


@triton.jit
def _least_and_sum(least, total, other_least, other_total):
    return tl.minimum(least, other_least), total + other_total


@triton.jit
def mass_to_keep(top_p, total):
    """Return the integer mass that top-p keeps of a total."""
    return tl.minimum(tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1), total)
