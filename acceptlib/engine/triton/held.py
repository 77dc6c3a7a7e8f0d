"""A draw from weights that programs still hold, for small batches of logits.

Each program of the last stage has one block of the stopping row. It stores the block's sum, looks at those of the
others, and the one that the draw falls into writes the token: nothing is read a second time. The request's last program
in the grid watches. It writes what does not depend on the draw, and draws by itself where nobody else can.

Programs need not all run at a time, and one that waits may take the place of one that it waits for. So a program that
has looked for long enough leaves, unless the last one has started, and so all others have. The last one learns whether
any has left before it looks itself. If so, it draws by itself: the draw may fall into a block of one that left.
"""

# ruff: noqa: N803, N806, RUF005 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import call, random
from acceptlib.engine.triton.rows import LARGEST_INT32
from acceptlib.engine.triton.sums import fixed

WARP = tl.constexpr(call.WARP)

LOW_BITS = tl.constexpr(42)
"""Low bits of a sum; those above them are added up apart."""

LOW = tl.constexpr((1 << LOW_BITS.value) - 1)
"""Mask of these."""

THIRD = tl.constexpr((1 << 21) - 1)
"""Mask of half the low bits: a warp has one instruction for a sum of integers of 32 bits."""

SURE = tl.constexpr(5 << 16)
"""High bits of a mass of 1.25. A mass up to this is no fault, however weights are rounded, and sums do not wrap."""

DOUBT = tl.constexpr(3 << 59)
"""A mass of 1.5, which stands for any above SURE, for NaN, and for a sum that is missing; see `forms.MAX_DOUBTS`."""

LEFT = tl.constexpr(1)
STARTED = tl.constexpr(2)
"""What the word behind the sums says: that a program has left before the last one started, or that this has started."""


class HeldSums(NamedTuple):
    """What programs found of a row: the sum of each one's block, int64, and whether the row's mass is in no doubt."""

    parts: tl.tensor
    sure: tl.tensor


@triton.jit
def hold(weights, grid, request, CALL: tl.constexpr):
    """Store the sum of a block's weights [BLOCK], in the order of `partials.entries_of`.

    Return the token in the place of the only thread that may have it, and -1 elsewhere, if `CALL.draws_held`.
    """
    PARTS: tl.constexpr = CALL.emit_parts
    FOURS: tl.constexpr = CALL.emit_run // 4
    ROUNDS: tl.constexpr = CALL.emit_rounds
    rounds = _in_rounds(tl.reshape(weights, [ROUNDS, PARTS, FOURS, 4]))
    mass, first_ends = _ends_in_fours(rounds[0])
    own = first_ends[3]
    ends = (first_ends,)
    for i in tl.static_range(1, ROUNDS):
        more, next_ends = _ends_in_fours(rounds[i])
        mass += more
        own += next_ends[3]
        ends = ends + (next_ends,)
    sums = _sum(tl.where(mass <= 1, own, DOUBT))
    total = tl.sum(sums, 0)
    doubtful = total.to(tl.uint64, bitcast=True) >= DOUBT
    words_ptr = request.counters.awaited_ptr
    tl.store(words_ptr + grid.program, (tl.where(doubtful, DOUBT, total) << 1) | 1)
    token = tl.full([PARTS, FOURS], -1, tl.int32)
    if CALL.draws_held:
        # While the others' sums are on their way: where each four begins. The assembler would move this before the
        # store if it could, so all of it depends on what warps exchange, which Triton 3.6 places behind the store.
        start = tl.cumsum(sums, 0) - sums
        four = tl.arange(0, FOURS)[None, :]
        starts = ()
        for i in tl.static_range(ROUNDS):
            shifted = ends[i][3] + tl.where(four == 0, start[:, None], 0)
            starts = starts + (tl.cumsum(shifted, 1) - ends[i][3],)
            start = _sum(shifted)
        part = grid.program * PARTS + tl.arange(0, PARTS)[:, None]
        lane = part * 0 + tl.arange(0, WARP)[None, :]  # every warp looks at all sums by itself
        bits = random.bits_of(request, CALL)
        words = _words(lane, bits, grid, request, CALL)
        total = _sum_before(words, lane, grid.num_programs)[:, None]
        r = random.multiply_high(bits, total)
        r -= _sum_before(words, lane, grid.program)[:, None]
        for i in tl.static_range(ROUNDS):
            rest = r - starts[i]
            within = tl.zeros_like(token)
            for j in tl.static_range(3):
                within += (ends[i][j] <= rest).to(tl.int32)
            here = rest.to(tl.uint64, bitcast=True) < ends[i][3].to(tl.uint64, bitcast=True)
            here = here & (total < DOUBT)
            token = tl.where(here, part * CALL.emit_part + i * CALL.emit_run + four * 4 + within, token)
    return token


@triton.jit
def watch(grid, request, CALL: tl.constexpr):
    """Wait until each program has stored its sum.

    Return whether the one that the draw falls into writes the token, and whether the row's mass is in no doubt.
    """
    left = tl.atomic_xchg(request.counters.awaited_ptr + grid.num_programs, STARTED, sem="relaxed") == LEFT
    lane = tl.arange(0, WARP)
    bits = random.bits_of(request, CALL)
    total = tl.full((), 0, tl.int64)
    missing = grid.num_programs
    while missing > 0:
        words = _words(lane, bits, grid, request, CALL)
        total = _sum_before(words, lane, grid.num_programs)
        absent = words[0] == 0
        for i in tl.static_range(1, len(words)):
            absent = absent | (words[i] == 0)
        missing = tl.max(absent.to(tl.int32), 0)
    sure = total < DOUBT
    return (total > 0) & sure & (left == 0), sure


@triton.jit
def load_sums(sure, grid, request, CALL: tl.constexpr):
    """Return what programs found, once they have stored it, beside whether it is `sure`."""
    index = tl.arange(0, CALL.max_emit_blocks)
    words = tl.load(request.counters.awaited_ptr + index, mask=index < grid.num_programs, other=1, volatile=True)
    return HeldSums(words >> 1, sure)


@triton.jit
def _in_rounds(numbers):
    """Return [n, parts, fours, 4] as n tensors, for which nothing moves between threads."""
    if numbers.shape[0] == 1:
        return (tl.reshape(numbers, numbers.shape[1:]),)
    else:  # noqa: RET505 - a branch on what is known when compiling
        shape: tl.constexpr = [2, numbers.shape[0] // 2, numbers.shape[1], numbers.shape[2], numbers.shape[3]]
        first, second = tl.split(tl.permute(tl.reshape(numbers, shape), (1, 2, 3, 4, 0)))
        return _in_rounds(first) + _in_rounds(second)


@triton.jit
def _ends_in_fours(weights):
    """Return the sums of fours [parts, fours, 4] in floats, and their running sums times 2^60, int64."""
    evens, odds = tl.split(tl.reshape(weights, [weights.shape[0], weights.shape[1], 2, 2]))
    first, third = tl.split(evens)
    second, fourth = tl.split(odds)
    one = fixed(first)
    two = one + fixed(second)
    three = two + fixed(third)
    return (first + second) + (third + fourth), (one, two, three, three + fixed(fourth))


@triton.jit
def _sum(numbers):
    """Return sums of int64 along the last axis, DOUBT where they are more than SURE."""
    return _joined((numbers >> LOW_BITS).to(tl.int32), numbers & LOW)


@triton.jit
def _joined(high, low):
    """Return the same for numbers that are given as their high and low bits."""
    AXIS: tl.constexpr = len(low.shape) - 1
    high = tl.sum(high, AXIS)
    middle = tl.sum((low >> 21).to(tl.int32), AXIS)
    total = (high.to(tl.int64) << LOW_BITS) + (middle.to(tl.int64) << 21) + tl.sum((low & THIRD).to(tl.int32), AXIS)
    return tl.where(high <= SURE, total, DOUBT)


@triton.jit
def _sum_before(words, lane, end):
    """Return the sum of the sums of programs before `end`, given `_words`, DOUBT where it is more than SURE."""
    high = lane * 0
    low = high.to(tl.int64)
    for i in tl.static_range(len(words)):
        number = tl.where(words[i] == 0, DOUBT, words[i] >> 1)
        number = tl.where(lane + i * WARP < end, number, 0)
        high += (number >> LOW_BITS).to(tl.int32)
        low += number & LOW
    return _joined(high, low)


@triton.jit
def _words(lane, bits, grid, request, CALL: tl.constexpr):
    """Return the words of programs, every 32nd in each of 32 lanes of the last axis; 0 for one that was given up on."""
    PAIRS: tl.constexpr = (CALL.max_emit_blocks + 2 * WARP - 1) // (2 * WARP)
    words_ptr = request.counters.awaited_ptr
    mark_ptr = words_ptr + grid.num_programs
    # How often to look is made to depend on the draw's bits, or the assembler would compute these afterwards.
    looks = tl.where(bits == 0, CALL.looks + 1, CALL.looks)
    found = ()
    for i in tl.static_range(PAIRS):
        at = lane + 2 * i * WARP
        if CALL.spins:
            found = found + _look(words_ptr + at, grid.num_programs - at, looks, mark_ptr)
        else:  # once, for interpreted programs run one after the other
            first = tl.load(words_ptr + at, mask=at < grid.num_programs, other=1, volatile=True)
            second = tl.load(words_ptr + at + WARP, mask=at + WARP < grid.num_programs, other=1, volatile=True)
            tl.store(mark_ptr + at * 0, LEFT, mask=(first == 0) | (second == 0))
            found = found + (first, second)
    return found


@triton.jit
def _look(words_ptr, num_words, looks, mark_ptr):
    """Return two words, 32 apart, once neither is 0, and 1 beyond the last word: each thread looks by itself.

    It looks at most `looks` times unless the last program has started, and then marks that this program has left.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred first, second, missing, waits;
        .reg .s32 left;
        .reg .s64 said;
        setp.gt.s32 first, $3, 0;
        setp.gt.s32 second, $3, 32;
        mov.b64 $0, 1;
        mov.b64 $1, 1;
        mov.b32 left, $4;
        LOOK:
        @first ld.volatile.global.b64 $0, [$2];
        @second ld.volatile.global.b64 $1, [$2 + 256];
        setp.eq.s64 missing, $0, 0;
        setp.eq.or.s64 missing, $1, 0, missing;
        @!missing bra DONE;
        sub.s32 left, left, 1;
        setp.gt.s32 waits, left, 0;
        @waits bra LOOK;
        atom.relaxed.gpu.global.cas.b64 said, [$5], 0, 1;
        setp.eq.s64 waits, said, 2;
        @waits bra LOOK;
        DONE:
        }""",
        "=&l,=&l,l,r,r,l",
        [words_ptr, num_words, looks, mark_ptr],
        dtype=(tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )


@triton.jit
def write(token, draws, token_ptr, CALL: tl.constexpr):
    """Store the token of the only thread that has one if it `draws`.

    The thread stores it from where it is: a compiler would carry all tokens to another layout first.
    """
    writes = token >= tl.where(draws, 0, LARGEST_INT32)
    ID: tl.constexpr = token_ptr.dtype.element_ty
    BITS: tl.constexpr = "64" if ID.primitive_bitwidth == 64 else "32"
    REGISTER: tl.constexpr = "l" if ID.primitive_bitwidth == 64 else "r"
    if CALL.spins:
        tl.inline_asm_elementwise(
            "{ .reg .pred own; setp.ne.s32 own, $3, 0; @own st.global.b" + BITS + " [$1], $2; mov.b32 $0, 0; }",
            "=r,l," + REGISTER + ",r",
            [token_ptr + token * 0, token.to(ID), writes.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(token_ptr + token * 0, token.to(ID), mask=writes)
