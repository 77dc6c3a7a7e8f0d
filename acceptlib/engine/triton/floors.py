"""Rows under min-p alone: the mass of what is kept, block by block, in programs that know their row's maximum.

What min-p keeps follows from the maximum, which no program knows from its block alone. So a program holds its block
while it waits for the maxima of the others, in words that are 0 before the call and that no maximum makes 0; the last
stage leaves them at 0. Programs of a row are next to each other in the grid, and devices start them in its order, more
at a time than a row has: of the first row that is not done all have started, or start as rows before it end.
Elsewhere, and interpreted, a stage before finds the maxima, and blocks are read twice.
"""

# ruff: noqa: N803 - jit functions; constants in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import rows
from acceptlib.engine.triton.counters import THREADS
from acceptlib.engine.triton.laws import LOWEST, key_or_nan, larger, logit_of, store_best
from acceptlib.engine.triton.sums import mass_of

SIGN = tl.constexpr(-(2**31))
"""The key of no logit, nor of the NaN that `key_or_nan` gives: a word of 0 is none that was written."""


@triton.jit
def reduce_block(
    x,
    entry,
    model,
    position,
    block,
    num_blocks,
    exists,
    peaks_ptr,
    STAGE: tl.constexpr,
    CALL: tl.constexpr,
    MODEL: tl.constexpr,
):
    """Store what the law of one row needs of one block, [BLOCK] float32, -inf beyond the row.

    The row's words are at `peaks_ptr`. A stage `peak` only stores maxima.
    """
    maxima_ptr = model.maxima_ptr + position.to(tl.int64) * num_blocks
    at = position.to(tl.int64) * num_blocks + block
    maximum = tl.reduce(x, 0, larger)
    if CALL.waits:
        tl.store(peaks_ptr + block, key_or_nan(maximum) ^ SIGN, mask=exists)
    if STAGE == "peak" or CALL.waits:
        tl.store(maxima_ptr + block, maximum, mask=exists)
        store_best(x, maximum, entry, at, model, exists, CALL, MODEL)
    if STAGE != "peak":
        factor = rows.factor_of(model, CALL, MODEL)
        if exists & (factor > 0):
            if CALL.waits:
                highest = wait(peaks_ptr, num_blocks, CALL)
            else:
                index = tl.arange(0, CALL.max_blocks)
                maxima = tl.load(maxima_ptr + index, mask=index < num_blocks, other=float("-inf"), cache_modifier=".cg")
                highest = logit_of(tl.max(key_or_nan(maxima), 0))
            floor = rows.floor_of(model)
            mass = tl.full((), 0, tl.int64)
            if tl.exp2((maximum - highest) * factor) >= floor:  # most blocks hold nothing that is kept
                kept = tl.exp2((x - highest) * factor) >= floor
                mass = tl.sum(tl.where(kept, mass_of(x, highest, factor), 0), 0)
            tl.store(model.sums_ptr + at, mass)


@triton.jit
def wait(peaks_ptr, num_blocks, CALL: tl.constexpr):
    """Return the largest of a row's maxima, NaN if one is, as soon as all are there."""
    index = tl.arange(0, max(THREADS.value, CALL.max_blocks))
    highest = tl.full((), 0, tl.int32)
    missing = num_blocks
    while missing > 0:
        words = tl.load(peaks_ptr + index, mask=index < num_blocks, other=LOWEST ^ SIGN, volatile=True)
        missing, highest = tl.reduce(((words == 0).to(tl.int32), words ^ SIGN), 0, _sum_and_largest)
    return logit_of(highest)


@triton.jit
def _sum_and_largest(count, largest, other_count, other_largest):
    return count + other_count, tl.maximum(largest, other_largest)
