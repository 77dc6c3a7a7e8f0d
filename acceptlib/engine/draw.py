"""Draws by inverse CDF in integers: the same token for every order of summation.

A float32 weight times 2^60 becomes an int64 (exactly, for weights of at least 2^-36), integer partial sums find the
vocabulary block, then the entry. `r` is the high word of 64 random bits times the total, so an entry of no weight is
never drawn.
"""

from __future__ import annotations

import torch

from acceptlib.arrays import Words, arange, as_tensor, as_words
from acceptlib.engine.scratch import to_fixed

WEIGHT_SCALE = 2.0**60
BLOCK = 2048
MASK = 0xFFFFFFFF


def draw(weights: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw one entry a row.

    Args:
        weights: [n, V] float32, >= 0, each row summing to at most 4 and with some entry of at least 2^-60.
        bits: [n] int64, 64 random bits a row.

    Returns:
        [n] int64 in [0, V), whatever the weights.
    """
    rows, vocab_size = weights.shape
    fixed = to_fixed(weights, WEIGHT_SCALE)
    whole = vocab_size - vocab_size % BLOCK
    sums = fixed[:, :whole].view(rows, -1, BLOCK).sum(-1)
    if whole < vocab_size:
        sums = torch.cat((sums, fixed[:, whole:].sum(-1, keepdim=True)), 1)
    return as_tensor(_search(as_words(fixed), as_words(sums), as_words(bits)))


def _search(fixed: Words, sums: Words, bits: Words) -> Words:
    """Return the first entry of each row [n, V] whose running sum exceeds r, given the sums of its blocks."""
    vocab_size = fixed.shape[1]
    row, inside = arange(len(fixed), fixed), arange(min(BLOCK, vocab_size), fixed)
    ends = sums.cumsum(1)
    threshold = multiply_high(bits, ends[:, -1])[:, None]
    # The remainders change nothing but an index that bad weights have led out of range.
    block = (ends <= threshold).sum(1) % ends.shape[1]
    rest = threshold - (ends - sums)[row, block][:, None]
    # The last block goes on at the first entry, where the search cannot come any more.
    entry = ((block * BLOCK)[:, None] + inside) % vocab_size
    running = fixed[row[:, None], entry].cumsum(1)
    return (block * BLOCK + (running <= rest).sum(1)) % vocab_size


def multiply_high(bits: Words, total: Words) -> Words:
    """Return the high word of the unsigned 128-bit product of `bits` and `total` >= 0, both int64."""
    bits_high, bits_low = (bits >> 32) & MASK, bits & MASK
    total_high, total_low = total >> 32, total & MASK
    carry = ((bits_low * total_low) >> 32) & MASK
    middle = bits_high * total_low + carry  # below 2^64: wraps in int64, read as unsigned
    low = bits_low * total_high + (middle & MASK)
    return bits_high * total_high + ((middle >> 32) & MASK) + (low >> 32)
