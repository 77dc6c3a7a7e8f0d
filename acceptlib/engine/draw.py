"""Weights of draws, and draws by inverse CDF in integers: the same token for every order of summation.

A float32 weight times 2^60 becomes an int64 (exactly, for weights of at least 2^-36), integer partial sums find the
vocabulary block, then the entry. `r` is the high word of 64 random bits times the total, so an entry of no weight is
never drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from acceptlib import ops
from acceptlib.arrays import Array, arange, as_array, as_tensor, maybe_any
from acceptlib.engine.constants import MASS_LIMIT, ROW_TOLERANCE, WEIGHT_SCALE
from acceptlib.engine.rows import mass_of
from acceptlib.engine.scratch import owns_memory, scratch, to_fixed
from acceptlib.result import INVALID_ROW, UNNORMALIZED_ROW
from acceptlib.rng import MASK

BLOCK: Final = 2048

LITTLE_MASS: Final = 2.0**-30
"""In any vocabulary, weights that each count as 0 in the draw's integers sum to less than this."""

NO_WEIGHT: Final = 2 * MASS_LIMIT
"""Takes the place of a weight that is NaN or infinite, and makes its request fail."""


def weigh(
    p: torch.Tensor,
    residual: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    is_bonus: Array,
    draft_mass: Array | float,
    *,
    is_logits: bool,
) -> tuple[torch.Tensor, Array, Array]:
    """Return the weights of draws, which of them are the target's rows, and the rows' `Status`.

    Args:
        p: [n, V] float32, the target's rows; never written.
        residual: [n, V] float32, what the strategy makes of the rows; `p` itself where it has no residual.
        given: The tensors that the residual was made from, by name; never written.
        is_bonus: [n] bool, where the target's row is drawn from.
        draft_mass: [n], the masses of the draft's rows.
        is_logits: Whether the target's rows are of logits.
    """
    mass = mass_of(p, is_logits=is_logits)
    # Where nothing in the target's row is below 0, its entries are the weights; only on the CPU may the host look.
    if residual is p and (is_logits or (p.is_cpu and not maybe_any(as_array(p.amin(1)) < 0))):
        return p, is_bonus, _status(mass, mass, draft_mass)
    if residual is not p and owns_memory(residual, given):
        weights = residual.clamp_(min=0)
    else:
        weights = torch.clamp(residual, min=0, out=scratch("weights", p.shape, torch.float32, p.device))
    from_target, drawn_mass = is_bonus, as_array(weights.sum(1))
    if residual is not p and maybe_any(is_bonus | (drawn_mass < LITTLE_MASS)):
        weights.nan_to_num_(nan=NO_WEIGHT, posinf=NO_WEIGHT)
        # p == q, or equal but for rounding: nothing is left to draw from, and p is what the token must follow.
        takes_p = as_tensor(is_bonus) | (weights.amax(1) < 1 / WEIGHT_SCALE)
        from_target = as_array(takes_p)
        weights.lerp_(p, takes_p[:, None].to(torch.float32))  # exact at 0 and 1, and quicker than `where`
        drawn_mass = as_array(weights.clamp_(min=0).sum(1))
    return weights, from_target, _status(mass, drawn_mass, draft_mass)


def _status(mass: Array, drawn_mass: Array, draft_mass: Array | float) -> Array:
    """Return the `Status` [n] of stopping rows, from the sums of the target's row, the weights and the draft's row."""
    normalized = (abs(mass - 1) <= ROW_TOLERANCE) & (draft_mass <= 1 + ROW_TOLERANCE) & (drawn_mass <= MASS_LIMIT)
    has_law = (abs(mass) < torch.inf) & (drawn_mass != 0)
    return ~has_law * INVALID_ROW + (has_law & ~normalized) * UNNORMALIZED_ROW


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
    drawn = _search(as_array(blocks), as_array(blocks.sum(-1)), as_array(bits))
    # The remainder changes nothing but an index that bad weights have led out of range.
    return as_tensor(drawn % weights.shape[1])


def _search(blocks: Array, sums: Array, bits: Array) -> Array:
    """Return each row's first entry whose running sum exceeds r, from [n, blocks, BLOCK] and the sums of blocks."""
    row = arange(len(blocks), blocks)
    ends = sums.cumsum(1)
    threshold = multiply_high(bits, ends[:, -1])[:, None]
    block = ops.minimum((ends <= threshold).sum(1), ends.shape[1] - 1)
    rest = threshold - (ends - sums)[row, block][:, None]
    return block * blocks.shape[2] + (blocks[row, block].cumsum(1) <= rest).sum(1)


def multiply_high(bits: Array, total: Array) -> Array:
    """Return the high word of the unsigned 128-bit product of `bits` and `total` >= 0, both int64."""
    bits_high, bits_low = (bits >> 32) & MASK, bits & MASK
    total_high, total_low = total >> 32, total & MASK
    carry = ((bits_low * total_low) >> 32) & MASK
    middle = bits_high * total_low + carry  # below 2^64: wraps in int64, read as unsigned
    low = bits_low * total_high + (middle & MASK)
    return bits_high * total_high + ((middle >> 32) & MASK) + (low >> 32)
