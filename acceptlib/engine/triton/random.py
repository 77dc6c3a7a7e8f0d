"""The streams of `acceptlib.rng`, inside the kernels."""

# ruff: noqa: N803, RET505 - jit functions; constants in capitals, branches known when compiling

import triton
import triton.language as tl

from acceptlib.rng import MULTIPLIERS, ROUNDS, WEYL, Purpose

ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
EMIT = tl.constexpr(int(Purpose.EMIT))
SEED = tl.constexpr(int(Purpose.SEED))

UNIT = tl.constexpr(2.0**-53)

NUM_ROUNDS = tl.constexpr(ROUNDS)
FIRST_FACTOR, SECOND_FACTOR = map(tl.constexpr, MULTIPLIERS)
FIRST_STEP, SECOND_STEP = map(tl.constexpr, WEYL)


@triton.jit
def philox(seed, a, b, c, d):
    """Return the four words that Philox makes of counters uint32, all of one shape, and a seed int64.

    `tl.philox` writes its rounds out. A loop is unrolled too, but only after a pass of Triton's whose time grows with
    the square of the number of instructions: it took half of the time to compile `block`.
    """
    first, second = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in range(NUM_ROUNDS):
        high, low = tl.umulhi(c, SECOND_FACTOR), c * SECOND_FACTOR
        other_high, other_low = tl.umulhi(a, FIRST_FACTOR), a * FIRST_FACTOR
        a, b, c, d = high ^ b ^ first, low, other_high ^ d ^ second, other_low
        first += FIRST_STEP
        second += SECOND_STEP
    return a, b, c, d


@triton.jit
def _words_at(position, PURPOSE: tl.constexpr, seed, offset):
    """Return the first two words of Philox, uint32, at places of one stream."""
    zero = (position * 0).to(tl.uint32)
    low, high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    first, second, _, _ = philox(seed, position.to(tl.uint32), zero + PURPOSE, zero + low, zero + high)
    return first, second


@triton.jit
def seed_of(seed, offset, request):
    """Return the seed of a request's stream under a `Root`."""
    first, second = _words_at(request, SEED, seed, offset)
    return (first.to(tl.int64) << 32) | second.to(tl.int64)


@triton.jit
def uniform(seed, offset, position):
    """Return u for accepting positions, float64 in [0, 1)."""
    first, second = _words_at(position, ACCEPT, seed, offset)
    return ((first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)).to(tl.float64) * UNIT


@triton.jit
def bits(seed, offset, emit_ptr, CALL: tl.constexpr):
    """Return the 64 random bits of a request's draw, uint64."""
    if CALL.explicit:
        return tl.load(emit_ptr).to(tl.uint64, bitcast=True)
    else:
        first, second = _words_at(tl.full((), 0, tl.int32), EMIT, seed, offset)
        return (first.to(tl.uint64) << 32) | second.to(tl.uint64)


@triton.jit
def bits_of(request, CALL: tl.constexpr):
    """Return the 64 random bits of the request's draw."""
    stream = request.stream
    if CALL.draws_by_law:
        return stream.bits
    else:
        return bits(stream.seed, stream.offset, stream.emit_ptr, CALL)


@triton.jit
def multiply_high(bits, total):
    """Return where a draw falls in [0, total): the high word of bits [uint64] times total [int64]."""
    return tl.umulhi(bits, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
