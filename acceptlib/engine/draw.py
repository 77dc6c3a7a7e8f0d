"""Draws by inverse CDF in integers: the same token for every order of summation.

A float32 weight times 2^60 becomes an int64 (exactly, for weights of at least 2^-36), integer partial sums find the
vocabulary block, then the entry. `r` is the high word of 64 random bits times the total, so an entry of no weight is
never drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acceptlib import ops
from acceptlib.arrays import Words, arange, as_tensor, as_words
from acceptlib.engine.scratch import to_fixed

if TYPE_CHECKING:
    import torch

WEIGHT_SCALE = 2.0**60
BLOCK = 2048
MASK = 0xFFFFFFFF


def draw(weights: torch.Tensor, bits: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """Draw one entry a row.

    Args:
        weights: [n, V] float32, >= 0, each row summing to at most 4 and with some entry of at least 2^-60.
        bits: [n] int64, 64 random bits a row.
        in_place: Whether the weights may be scaled where they are.

    Returns:
        [n] int64 in [0, V), whatever the weights.
    """
    block = min(BLOCK, weights.shape[1])
    blocks = to_fixed(weights, WEIGHT_SCALE, block, in_place=in_place).view(len(weights), -1, block)
    drawn = _search(as_words(blocks), as_words(blocks.sum(-1)), as_words(bits))
    # The remainder changes nothing but an index that bad weights have led out of range.
    return as_tensor(drawn % weights.shape[1])


def _search(blocks: Words, sums: Words, bits: Words) -> Words:
    """Return each row's first entry whose running sum exceeds r, from [n, blocks, BLOCK] and the sums of blocks."""
    row = arange(len(blocks), blocks)
    ends = sums.cumsum(1)
    threshold = multiply_high(bits, ends[:, -1])[:, None]
    block = ops.minimum((ends <= threshold).sum(1), ends.shape[1] - 1)
    rest = threshold - (ends - sums)[row, block][:, None]
    return block * blocks.shape[2] + (blocks[row, block].cumsum(1) <= rest).sum(1)


def multiply_high(bits: Words, total: Words) -> Words:
    """Return the high word of the unsigned 128-bit product of `bits` and `total` >= 0, both int64."""
    bits_high, bits_low = (bits >> 32) & MASK, bits & MASK
    total_high, total_low = total >> 32, total & MASK
    carry = ((bits_low * total_low) >> 32) & MASK
    middle = bits_high * total_low + carry  # below 2^64: wraps in int64, read as unsigned
    low = bits_low * total_high + (middle & MASK)
    return bits_high * total_high + ((middle >> 32) & MASK) + (low >> 32)
