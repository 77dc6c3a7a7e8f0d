"""Sums in integers, so that neither the layout of a program nor an order changes a bit of them.

Exponentials are added up in fours first, as floats and always in the same order: a quarter as many to convert. So are
the weights of draws where `CALL.in_fours`.
"""

# ruff: noqa: N803, RET505 - jit functions; constants in capitals, branches known when compiling

import math

import triton
import triton.language as tl

from acceptlib.engine import constants

SUM_SCALE = tl.constexpr(constants.SUM_SCALE)
"""Scale of exponentials relative to their block's maximum, and of terms of row sums: fewer than 2^19 numbers up to 1
sum to less than 2^63."""

SHARE = tl.constexpr(0.25)
"""Factor of the sum of four numbers up to 1, which makes it at most 1 again."""

ROW_SUM_LIMIT = tl.constexpr(constants.ROW_SUM_LIMIT)

MAGNITUDE_SCALE = tl.constexpr(constants.MAGNITUDE_SCALE)

MAGNITUDE_LIMIT = tl.constexpr(constants.MAGNITUDE_LIMIT)

NEGLIGIBLE = tl.constexpr(256.0)
"""Bits below the largest entry at which an exponential is 0; 0 times -inf would be NaN."""

HALF = tl.constexpr(2.0**20)

MAGIC = tl.constexpr(1.5 * 2.0**23)
"""A magnitude at which float32 have no fraction."""

MAGIC_BITS = tl.constexpr(0x4B400000)

MAGNITUDE_BITS = tl.constexpr(MAGIC_BITS.value - (int(math.log2(constants.MAGNITUDE_SCALE)) << 23))
"""The bits of MAGIC / MAGNITUDE_SCALE, a magnitude at which float32 have these steps."""

WEIGHT_SCALE = tl.constexpr(constants.WEIGHT_SCALE)

MASS_SCALE = tl.constexpr(constants.MASS_SCALE)

SUM_SHIFT = tl.constexpr(int(math.log2(constants.SUM_SCALE / constants.MASS_SCALE)))
"""How many more bits a sum of exponentials has than a mass."""


@triton.jit
def sum_exp(x, maximum, factor):
    """Return the sum of exponentials of a block times 2^44, relative to its maximum, each sum of four to 2^-39.

    Conversions to 64 bits are as slow as exponentials. With MAGIC added, a float32 has its integer part in its last
    bits, so three fused multiply-adds and three subtractions do instead; 1024 halves of 20 bits fit 32. Both halves are
    added up as one tensor: a warp has an instruction for a sum of integers, but not for one of pairs.
    """
    terms = tl.exp2((x - tl.where(maximum > float("-inf"), maximum, 0.0)) * factor)
    high, low = _halves(fours(terms))
    return _joined(*tl.split(tl.sum(tl.join(high, low), 0)))


@triton.jit
def sum_exp_and_bits(x, maximum, factor, AS_ONE: tl.constexpr):
    """Return `sum_exp`, and likewise the sum of each exponential times the bits that it lies below its maximum.

    An exponential times its bits is at most 1 / (e ln 2), so that it fits where an exponential does. Added up as one
    tensor if `AS_ONE`, which takes fewer instructions, but longer where programs are few.
    """
    relative = (x - tl.where(maximum > float("-inf"), maximum, 0.0)) * factor
    terms = tl.exp2(relative)
    halves = _halves(fours(terms))
    bit_halves = _halves(fours(terms * tl.minimum(-relative, NEGLIGIBLE)))
    if AS_ONE:
        sums, bits = tl.split(tl.sum(tl.join(tl.join(*halves), tl.join(*bit_halves)), 0))
        return _joined(*tl.split(sums)), _joined(*tl.split(bits))
    else:
        highs, lows, bit_highs, bit_lows = tl.reduce(halves + bit_halves, 0, add_four)
        return _joined(highs, lows), _joined(bit_highs, bit_lows)


@triton.jit
def fours(terms):
    """Return sums of four neighbours, (a + b) + (c + d), of [n] float32: by twos, they are the same for any layout."""
    pairs = tl.sum(tl.reshape(terms, [terms.shape[0] // 2, 2]), 1)
    return tl.sum(tl.reshape(pairs, [terms.shape[0] // 4, 2]), 1)


@triton.jit
def _halves(terms):
    """Return numbers from 0 to 4 times 2^38 as two integers, the first in units of 2^20."""
    high = tl.fma(terms, SHARE * HALF, MAGIC)
    rest = tl.fma(terms, SHARE * HALF, -high + MAGIC)
    low = tl.fma(rest, HALF, MAGIC)
    return high.to(tl.int32, bitcast=True) - MAGIC_BITS, low.to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def in_magnitude_steps(numbers):
    """Return float32 numbers from 0 to 2^20 in steps of 1 / MAGNITUDE_SCALE, as int32, rounded to even."""
    return (numbers + MAGIC / MAGNITUDE_SCALE).to(tl.int32, bitcast=True) - MAGNITUDE_BITS


@triton.jit
def _joined(highs, lows):
    """Return what sums of `_halves` are together, times 2^44."""
    return ((highs.to(tl.int64) << 20) + lows.to(tl.int64)) << 6


@triton.jit
def in_thirds(numbers):
    """Return sums of rows [n, m] of int64, modulo 2^64: a warp has one instruction for a sum of 32 bits.

    There are at most 1024 numbers of 21 bits in a sum, which just fit.
    """
    low = tl.sum((numbers & 0x1FFFFF).to(tl.int32), 1)
    middle = tl.sum(((numbers >> 21) & 0x1FFFFF).to(tl.int32), 1)
    high = tl.sum((numbers >> 42).to(tl.int32), 1)
    return (high.to(tl.int64) << 42) + (middle.to(tl.int64) << 21) + low.to(tl.int64)


@triton.jit
def fixed(weights):
    """Return weights times 2^60 as int64."""
    return (weights * WEIGHT_SCALE).to(tl.int64)


@triton.jit
def fixed_fours(weights, IN_FOURS: tl.constexpr):
    """Return sums of four neighbours of [n] weights times 2^60, int64: of their sum in floats if `IN_FOURS`."""
    if IN_FOURS:
        return fixed(fours(weights))
    else:
        return tl.sum(tl.reshape(fixed(weights), [weights.shape[0] // 4, 4]), 1)


@triton.jit
def running(weights, IN_FOURS: tl.constexpr):
    """Return running sums of [n] weights times 2^60, int64, every fourth one of which is that of `fixed_fours`.

    They do not fall where weights sum to at most 4; more are a fault, which the sums in floats tell. Within a four they
    are of floats too: (a + b) + c is no more than (a + b) + (c + d), and equals it if d is 0.
    """
    if IN_FOURS:
        firsts, seconds = tl.split(tl.reshape(weights, [weights.shape[0] // 2, 2]))
        first, third = tl.split(tl.reshape(firsts, [weights.shape[0] // 4, 2]))
        first_two, last_two = tl.split(tl.reshape(firsts + seconds, [weights.shape[0] // 4, 2]))
        four = fixed(first_two + last_two)
        before = tl.cumsum(four, 0) - four
        odd = tl.join(fixed(first), fixed(first_two + third))
        even = tl.join(fixed(first_two), four)
        return tl.reshape(tl.join(odd, even) + before[:, None, None], [weights.shape[0]])
    else:
        return tl.cumsum(fixed(weights), 0)


@triton.jit
def mass_of(x, maximum, factor):
    """Return the integer mass of logits relative to the largest."""
    return (tl.exp2((x - maximum) * factor) * MASS_SCALE).to(tl.int64)


@triton.jit
def normaliser_of(mass):
    """Return the normaliser of rows, given the mass that is kept of them."""
    return tl.div_rn(tl.full((), MASS_SCALE, tl.float32), mass.to(tl.float32))


@triton.jit
def add_two(a, b, c, d):
    """Add two pairs."""
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    """Add two triples."""
    return a + d, b + e, c + f


@triton.jit
def add_four(a, b, c, d, e, f, g, h):
    """Add two quadruples."""
    return a + e, b + f, c + g, d + h
