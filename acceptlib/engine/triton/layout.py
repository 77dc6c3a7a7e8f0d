"""Where the parts of the workspace are: computed by the host, which allocates it, and inside the kernels."""

# ruff: noqa: N803 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton.counters import ROW_COUNTS


class Layout(NamedTuple):
    """The first word, of 64 bits, of each part.

    Attributes:
        draft_blocks: Sums, maxima and argmaxes of blocks of the draft's rows, behind those of the target's.
        scalars: The plan's scalars, for each position.
        sums: What blocks leave for row sums, largest entries, and magnitudes of row sums, for each position.
        partials: What the last stage finds of a row, for each request; of every row where a mass decides.
        partial_words: Words of one of these.
        prepared: What `masses.prepare` finds, for each request.
        cuts: Laws of the target's filtered rows, and what they are found by.
        cut_words: Words of one of these.
        draft_cuts: The same of the draft's.
        extra: What else is reduced of blocks of the target's rows.
        end: The number of words.
    """

    draft_blocks: tl.tensor
    scalars: tl.tensor
    sums: tl.tensor
    partials: tl.tensor
    partial_words: tl.tensor
    prepared: tl.tensor
    cuts: tl.tensor
    cut_words: tl.tensor
    draft_cuts: tl.tensor
    extra: tl.tensor
    end: tl.tensor


@triton.jit
def num_counts(num_requests, most):
    """Return how many counters of 32 bits come before those of 64; `num_counts.fn` does so for numbers."""
    return (num_requests * (2 + (most + 1) * ROW_COUNTS) + 1) // 2 * 2


@triton.jit
def layout_of(num_positions, num_tokens, num_requests, num_blocks, num_emit_blocks, CALL: tl.constexpr):
    """Return the layout for a call; `layout_of.fn` does so for numbers.

    There are `num_positions` = B * K places, whatever was drafted; only cuts have places for just the `num_tokens`
    that were.
    """
    num_rows = num_positions + num_requests
    draft_blocks = 2 * num_rows * num_blocks
    scalars = draft_blocks + 2 * num_positions * num_blocks
    sums = scalars + len(CALL.scalars) * num_positions
    partials = sums + (2 * len(CALL.sums) + CALL.top_k) * num_positions * num_blocks
    partial_words = CALL.emit_words * num_emit_blocks
    prepared = partials + (num_rows if CALL.mass_scalar >= 0 else num_requests) * partial_words
    cuts = prepared
    if CALL.mass_scalar >= 0:
        cuts += 3 * num_requests
    cut_words = CALL.tile_words + num_blocks * CALL.block_words
    draft_cuts = cuts
    if CALL.filtered[0]:
        draft_cuts += (num_tokens + num_requests) * cut_words
    extra = draft_cuts
    if CALL.filtered[1]:
        extra += num_tokens * cut_words
    end = extra + CALL.extra_words * num_rows * num_blocks
    return Layout(
        draft_blocks,
        scalars,
        sums,
        partials,
        partial_words,
        prepared,
        cuts,
        cut_words,
        draft_cuts,
        extra,
        end,
    )
