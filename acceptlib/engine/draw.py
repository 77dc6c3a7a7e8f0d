"""Draws by inverse CDF in integers: the same token for every order of summation.

A float32 weight times 2^60 becomes an int64 (exactly, for weights of at least 2^-36), integer partial sums find the
vocabulary block, then the entry. `r` is the high word of 64 random bits times the total, so an entry of no weight is
never drawn.
"""

from __future__ import annotations

import torch
from torch.nn import functional

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
    fixed = functional.pad((weights * WEIGHT_SCALE).to(torch.int64), (0, -vocab_size % BLOCK)).view(rows, -1, BLOCK)
    ends = fixed.sum(-1).cumsum(-1)
    threshold = multiply_high(bits, ends[:, -1])
    block = (ends <= threshold[:, None]).sum(-1).clamp_(max=ends.shape[1] - 1)
    row = torch.arange(rows, device=weights.device)
    inside = fixed[row, block].cumsum(-1)
    start = ends[row, block] - inside[:, -1]
    entry = (inside <= (threshold - start)[:, None]).sum(-1)
    return (block * BLOCK + entry).clamp_(max=vocab_size - 1)


def multiply_high(bits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the high word of the unsigned 128-bit product of `bits` and `total` >= 0, both int64."""
    bits_high, bits_low = (bits >> 32) & MASK, bits & MASK
    total_high, total_low = total >> 32, total & MASK
    carry = ((bits_low * total_low) >> 32) & MASK
    middle = bits_high * total_low + carry  # below 2^64: wraps in int64, read as unsigned
    low = bits_low * total_high + (middle & MASK)
    return bits_high * total_high + ((middle >> 32) & MASK) + (low >> 32)
