"""Draws by inverse CDF in integers: the same token for every order of summation.

A float32 weight times 2^60 becomes an int64 (exactly, for weights of at least 2^-36), integer partial sums find the
vocabulary block, then the entry. `r` is the high word of 64 random bits times the total, so an entry of no weight is
never drawn.
"""

from __future__ import annotations

import torch

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
    fixed = (weights * WEIGHT_SCALE).to(torch.int64)
    whole = vocab_size - vocab_size % BLOCK
    sums = [fixed[:, :whole].view(rows, -1, BLOCK).sum(-1)] if whole else []
    if whole < vocab_size:
        sums.append(fixed[:, whole:].sum(-1, keepdim=True))
    ends = torch.cat(sums, 1).cumsum(1)
    threshold = multiply_high(bits, ends[:, -1])[:, None]
    block = (ends <= threshold).sum(1, keepdim=True).clamp_(max=ends.shape[1] - 1)
    entry = block * BLOCK + torch.arange(min(BLOCK, vocab_size), device=weights.device)
    inside = fixed.gather(1, entry.clamp(max=vocab_size - 1)).masked_fill_(entry >= vocab_size, 0).cumsum(1)
    start = ends.gather(1, block) - inside[:, -1:]
    return (block[:, 0] * BLOCK + (inside <= threshold - start).sum(1)).clamp_(max=vocab_size - 1)


def multiply_high(bits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the high word of the unsigned 128-bit product of `bits` and `total` >= 0, both int64."""
    bits_high, bits_low = (bits >> 32) & MASK, bits & MASK
    total_high, total_low = total >> 32, total & MASK
    carry = ((bits_low * total_low) >> 32) & MASK
    middle = bits_high * total_low + carry  # below 2^64: wraps in int64, read as unsigned
    low = bits_low * total_high + (middle & MASK)
    return bits_high * total_high + ((middle >> 32) & MASK) + (low >> 32)
