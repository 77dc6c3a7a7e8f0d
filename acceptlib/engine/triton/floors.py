"""Rows under min-p alone in small batches: the mass of what is kept, block by block.

What min-p keeps follows from the row's maximum, which no program knows from its block alone. So a program holds its
block while it waits for the maxima of the others, in words that are 0 before the call and that no maximum makes 0; the
last stage leaves them at 0.

It does not wait for ever, because programs of a row are next to each other in the grid, and CUDA's devices start them
in its order: of the first row that is not done, all have started, or start as soon as rows before it end, where a row's
programs are few beside those that run at a time. `engine.can_wait` leaves room for calls on several streams.
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

MISSING = tl.constexpr(2**31 - 1)
"""What is 1 below that key, as integers wrap: of keys less 1, one maximum says whether a word is missing too."""


@triton.jit
def weigh_block(x, entry, model, position, block, num_blocks, words_ptr, mask, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Store what the law of one row needs of one block, [BLOCK] float32, -inf beyond the row.

    The words of the row's blocks are at `words_ptr`; `mask` says whether the row exists.
    """
    maximum = announce(x, words_ptr + block, mask)
    at = position.to(tl.int64) * num_blocks + block
    tl.store(model.maxima_ptr + at, maximum, mask=mask)
    store_best(x, maximum, entry, at, model, mask, CALL, MODEL)
    factor = rows.factor_of(model, CALL, MODEL)
    if mask & (factor > 0):
        highest = wait(words_ptr, num_blocks, CALL)
        floor = rows.floor_of(model)
        mass = tl.full((), 0, tl.int64)
        if tl.exp2((maximum - highest) * factor) >= floor:  # most blocks hold nothing that is kept
            kept = tl.exp2((x - highest) * factor) >= floor
            mass = tl.sum(tl.where(kept, mass_of(x, highest, factor), 0), 0)
        tl.store(model.sums_ptr + at, mass)


@triton.jit
def announce(x, word_ptr, mask):
    """Store the word of a block; return its maximum."""
    maximum = tl.reduce(x, 0, larger)
    tl.store(word_ptr, key_or_nan(maximum) ^ SIGN, mask=mask)
    return maximum


@triton.jit
def wait(words_ptr, num_blocks, CALL: tl.constexpr):
    """Return the largest of a row's maxima, NaN if one is, as soon as all are there.

    One warp looks at the words, or two at more, and all go on as the words say that were seen.
    """
    index = tl.arange(0, max(THREADS.value, CALL.max_blocks))
    highest = tl.full((), MISSING, tl.int32)
    while highest == MISSING:
        words = tl.load(words_ptr + index, mask=index < num_blocks, other=LOWEST ^ SIGN, volatile=True)
        highest = tl.max(tl.sub(words ^ SIGN, 1, sanitize_overflow=False), 0)
    return logit_of(highest + 1)
