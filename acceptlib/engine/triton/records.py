"""Where the workspace has what is found of a filtered row: its law, what its blocks leave, and lists.

Under min-p alone, blocks of smaller batches leave lists of runs (`min_p`); otherwise blocks leave the maxima of their
sub-blocks.

A sub-block is some entries of a block. They lie in runs all over the block, so that the one thread that has loaded them
to reduce the block finds the largest by itself.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

WIDTH = tl.constexpr(32)
"""Entries of a sub-block, of which filtered rows keep the largest."""

LOADED_BITS = tl.constexpr(128)
"""Bits of a row that one thread loads at once, at most: a run."""

LISTED = tl.constexpr(8)
"""A list has room for `CALL.tile * LISTED` sub-blocks and `CALL.tile * WIDTH` entries."""

HELD = tl.constexpr(32)
"""Runs of a block that are listed under min-p alone, at most."""

RUN = tl.constexpr(4)
"""Neighbours in such a run, which one thread has loaded."""

LAW_WORDS = tl.constexpr(8)
"""Words of the `Record` of a filtered row."""


class Record(NamedTuple):
    """Where the law of a filtered row is, and what it is found by.

    Attributes:
        maximum_ptr, normaliser_ptr, argmax_ptr, cut_ptr, first_kept_ptr: See `laws.CutLaw`; the cut is NaN until it is
            found.
        start_ptr, end_ptr, bend_ptr: See `bins.Bounds`.
        above_ptr: The mass of entries that lie above all bins, int64.
        total_ptr: That of all entries.
        num_binned_ptr: How many sub-blocks reach the bins.
        num_listed_ptr: How many entries are listed, or runs where `CALL.lists_runs`; -1 if these do not hold all that
            is kept.
    """

    maximum_ptr: tl.tensor
    normaliser_ptr: tl.tensor
    argmax_ptr: tl.tensor
    cut_ptr: tl.tensor
    first_kept_ptr: tl.tensor
    start_ptr: tl.tensor
    end_ptr: tl.tensor
    bend_ptr: tl.tensor
    above_ptr: tl.tensor
    total_ptr: tl.tensor
    num_binned_ptr: tl.tensor
    num_listed_ptr: tl.tensor


class List(NamedTuple):
    """Where what is listed of a row is: numbers of sub-blocks, words of entries or runs, sums and counts of bins."""

    sub_blocks_ptr: tl.tensor
    words_ptr: tl.tensor
    sums_ptr: tl.tensor
    counts_ptr: tl.tensor


@triton.jit
def _words_of(model, position):
    """Return where the words of filtered rows begin: a law, what blocks leave, and lists."""
    return model.cuts_ptr + position.to(tl.int64) * model.cut_words


@triton.jit
def record_of(model, position):
    """Return where filtered rows at positions, a number or [n], have their laws."""
    words_ptr = _words_of(model, position)
    numbers_ptr, ids_ptr = words_ptr.to(tl.pointer_type(tl.float32)), words_ptr.to(tl.pointer_type(tl.int32))
    return Record(
        maximum_ptr=numbers_ptr,
        normaliser_ptr=numbers_ptr + 1,
        argmax_ptr=ids_ptr + 2,
        cut_ptr=numbers_ptr + 3,
        first_kept_ptr=ids_ptr + 4,
        start_ptr=numbers_ptr + 5,
        end_ptr=numbers_ptr + 6,
        bend_ptr=numbers_ptr + 7,
        above_ptr=words_ptr + 4,
        total_ptr=words_ptr + 5,
        num_binned_ptr=ids_ptr + 12,
        num_listed_ptr=ids_ptr + 13,
    )


@triton.jit
def sub_maxima(model, position):
    """Return where the maxima of a filtered row's sub-blocks are."""
    return (_words_of(model, position) + LAW_WORDS).to(tl.pointer_type(tl.float32))


@triton.jit
def block_list(model, position, block):
    """Return where runs are listed that hold any of what min-p may keep of a block: see `min_p.packed`."""
    return _words_of(model, position) + LAW_WORDS + block * HELD


@triton.jit
def in_runs(x, model, CALL: tl.constexpr):
    """Return a block [BLOCK] of a row by run, sub-block and entry of the run."""
    run: tl.constexpr = LOADED_BITS // model.rows_ptr.dtype.element_ty.primitive_bitwidth
    return tl.reshape(x, [WIDTH // run, CALL.block // WIDTH, run])


@triton.jit
def entries_in(sub_block, number, model, CALL: tl.constexpr):
    """Return entries of a row by sub-block and their numbers in it, run by run; negative ones of sub-block -1.

    It is written so that a compiler sees which entries are neighbours.
    """
    run: tl.constexpr = LOADED_BITS // model.rows_ptr.dtype.element_ty.primitive_bitwidth
    within = sub_block & (CALL.block // WIDTH - 1)
    place = number // run * (CALL.block // WIDTH * run) + number % run
    return (sub_block - within) * WIDTH + within * run + place


@triton.jit
def list_of(model, position, CALL: tl.constexpr):
    """Return where what is listed of a row is, behind what its blocks leave."""
    sub_blocks_ptr = _words_of(model, position) + LAW_WORDS + model.num_blocks * CALL.block_words
    words_ptr = sub_blocks_ptr + CALL.tile * LISTED // 2
    sums_ptr = words_ptr + CALL.tile * WIDTH
    counts_ptr = (sums_ptr + WIDTH).to(tl.pointer_type(tl.int32))
    return List(sub_blocks_ptr.to(tl.pointer_type(tl.int32)), words_ptr, sums_ptr, counts_ptr)
