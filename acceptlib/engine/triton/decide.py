"""Which drafted tokens stand, inside the kernels.

Where the first rejection stops a request, or there is a window, the stop is found wherever it is needed, a few
positions at a time: finding it again takes less time than waiting for it. But in large batches whose rows are gone
through, the first rejection is found as they are read (`settle`). Where a decision depends on other positions (a carry,
the last acceptance), one program a request decides. Where it depends on the mass of residuals, the last stage, which
finds the masses, decides: see `masses`.
"""

# ruff: noqa: N803, N806 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import counters, pairs, positions, rows
from acceptlib.engine.triton.rows import DRAFT, TARGET
from acceptlib.engine.triton.rules import evaluate

FAULT_BITS = tl.constexpr(rows.INVALID_TOKEN_ID.value.bit_length())
"""What `positions.token_fault` returns fits in as many."""

FAULT_MASK = tl.constexpr((1 << FAULT_BITS.value) - 1)
"""Mask of these."""


class Foreseen(NamedTuple):
    """A decision that no row has a say in: what `first_rejection` returns but for the laws."""

    stop: tl.tensor
    length: tl.tensor
    passed: tl.tensor


class Kept(NamedTuple):
    """The laws of both models' rows at `CALL.lanes` positions from `first` on, among which the stop is or may be.

    If `unsound` is the stop, the token there could not be accepted whatever its random number. Where
    `CALL.finds_faults`, `fault` is its `Status` by itself.
    """

    first: tl.tensor
    laws: pairs.Pair
    unsound: tl.tensor
    fault: tl.tensor


@triton.jit
def foresee(count, request, CALL: tl.constexpr):
    """Return a decision that no row has a say in."""
    stop, length, passed, _ = first_rejection(count, positions.fetch_first(count, request, CALL), request, CALL)
    return Foreseen(stop, length, passed)


@triton.jit
def after_wait(fetched, count, request, CALL: tl.constexpr):
    """Wait until the stages before have ended, and return what `positions.fetch` or `foresee` found."""
    if CALL.foreseen:
        stop = kept_over_wait(fetched.stop.to(tl.float64), count, request, CALL)
        return Foreseen(stop.to(tl.int32), fetched.length, fetched.passed)
    else:  # noqa: RET505 - a branch on what is known when compiling
        u = kept_over_wait(fetched.u, count, request, CALL)
        return positions.Fetched(fetched.ids, fetched.x_target, fetched.x_draft, u)


@triton.jit
def kept_over_wait(numbers, count, request, CALL: tl.constexpr):
    """Wait until the stages before have ended, and return float64 numbers that are found by then.

    Whether to wait depends on these numbers, and on random bits, factors and addresses that the rest of the stage
    needs, or the assembler would move the arithmetic that finds them behind the wait. The answer is always yes, since
    no magnitude is less than -1, but the assembler does not know that.
    """
    target, draft = request.target, request.draft
    ready = numbers.to(tl.int64, bitcast=True) ^ count
    ready ^= target.sums_ptr.to(tl.int64) ^ target.maxima_ptr.to(tl.int64)
    if CALL.draws_by_law:
        ready ^= request.stream.bits.to(tl.int64, bitcast=True)
    if CALL.has_draft:
        ready ^= draft.sums_ptr.to(tl.int64) ^ draft.maxima_ptr.to(tl.int64)
    if CALL.temperature[TARGET]:
        ready ^= rows.factor_of(target, CALL, TARGET).to(tl.int32, bitcast=True)
    if CALL.temperature[DRAFT]:
        ready ^= rows.factor_of(draft, CALL, DRAFT).to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(
        """{
        .reg .pred always;
        .reg .f32 ready;
        abs.f32 ready, $1;
        setp.geu.f32 always, ready, 0fBF800000;
        @always griddepcontrol.wait;
        mov.b64 $0, $2;
        }""",
        "=d,r,d",
        [(ready ^ (ready >> 32)).to(tl.int32), numbers],
        dtype=tl.float64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def judge(position, fetched, parts, length, request, CALL: tl.constexpr):
    """Return whether tokens at positions [n] are accepted, and what `positions.look` returns."""
    seen = positions.look(position, fetched, parts, length, request, CALL)
    return (seen.u < evaluate(CALL.accept, seen.scalars, tl.float64)) & seen.sound, seen


@triton.jit
def settle(position, count, expected, request, CALL: tl.constexpr):
    """Say whether the drafted token at a position stands, if this program is the last of `expected` to come here.

    Behind the last token a request stops in any case.
    """
    if counters.arrive(counters.of_row(position, counters.DECIDED_BY, request), expected):
        length = count
        if CALL.reads_length:
            length = positions.length_of(request, count)
        here = tl.zeros((1,), tl.int32) + position
        fetched = positions.fetch(here, length, request, CALL)
        parts = positions.load_parts(here, length, request, CALL)
        accepted, _ = judge(here, fetched, parts, length, request, CALL)
        stands = (position < count) & (tl.sum(accepted.to(tl.int32), 0) != 0)
        counters.settle(position, stands, request, CALL)


@triton.jit
def first_rejection(count, fetched, request, CALL: tl.constexpr):
    """Return how many drafted tokens stand, the request's length, how many tokens pass on their own, and `Kept`.

    Where `CALL.keeps_laws` and no mass decides, the last holds the laws at the stop.
    """
    NUM: tl.constexpr = CALL.lanes
    KEEPS: tl.constexpr = CALL.keeps_laws and CALL.mass_scalar < 0
    length = count
    if CALL.reads_length:
        length = positions.length_of(request, count)
    end = length
    stop = length
    passed = length * 0
    sound_length = length
    num_rows = length
    kept = ()
    if KEEPS:
        kept = Kept(length * 0, pairs.no_pair(NUM, CALL), length, length * 0)
        num_rows += 1  # what is emitted behind the last token has a law too
    for base in range(0, num_rows, NUM):
        # Positions behind a rejection are left out, unless what passes is counted: some of them may.
        goes_on = stop >= base if KEEPS and not CALL.counts_passed else True
        if goes_on:
            lane = tl.arange(0, NUM)
            position = base + lane
            parts = positions.load_parts(position, length, request, CALL)
            following = fetched
            if NUM < positions.LANES:  # on its way meanwhile; with all LANES, so many tokens are rare
                if base + NUM < num_rows:
                    following = positions.fetch(position + NUM, length, request, CALL)
            accepted, seen = judge(position, fetched, parts, length, request, CALL)
            # A placeholder is neither sound nor accepted.
            is_placeholder = seen.scalars[positions.DRAFTED] < 0
            placeholder = tl.where(is_placeholder, position, length)
            unsound = tl.where(seen.sound, length, position)
            faults = length * 0
            if CALL.holds:
                firsts = (tl.where(accepted, length, position), placeholder, unsound)
                first, first_placeholder, first_unsound = tl.reduce(firsts, 0, _smaller_three)
            else:
                # As bits of one sum, for threads take long to exchange numbers; programs that hold weights lose by it.
                bits = ((accepted == 0).to(tl.int32) | (is_placeholder.to(tl.int32) << NUM)) << lane
                bits = tl.sum(bits | (seen.fault << (lane * FAULT_BITS + 2 * NUM)), 0)
                first = first_bit(bits & ((1 << NUM) - 1), base, length)
                first_placeholder = first_bit((bits >> NUM) & ((1 << NUM) - 1), base, length)
                first_unsound = tl.min(unsound, 0)
                faults = bits >> (2 * NUM)
            sound_length = tl.minimum(sound_length, first_unsound)
            stop = tl.minimum(stop, first)
            end = tl.minimum(end, first_placeholder)
            passed += tl.sum((accepted & (position < sound_length)).to(tl.int32), 0)
            if KEEPS:
                if (stop >= base) & (stop < base + NUM):
                    fault = (faults >> ((stop - base) * FAULT_BITS)) & FAULT_MASK
                    kept = Kept(length * 0 + base, seen.laws, sound_length, fault)
            if NUM == positions.LANES:
                if base + NUM < num_rows:
                    following = positions.fetch(position + NUM, length, request, CALL)
            fetched = following
    return stop, end, passed, kept


@triton.jit
def _smaller_three(a, b, c, d, e, f):
    """Return the smaller ones of two triples."""
    return tl.minimum(a, d), tl.minimum(b, e), tl.minimum(c, f)


@triton.jit
def first_bit(bits, base, none):
    """Return the place of the lowest bit that is set, from `base` on, or `none`."""
    return tl.where(bits != 0, base + bit_length(bits & -bits) - 1, none)


@triton.jit
def bit_length(bits):
    """Return the bit length of a number of few bits, by the exponent of a float."""
    return tl.maximum((bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def last_acceptance(count, fetched, request, CALL: tl.constexpr):
    """Return the largest accepted position, 1-based, and the request's length."""
    length = positions.length_of(request, count)
    stop = length * 0
    sound_length = length
    for base in range(0, length, positions.LANES):
        position = base + tl.arange(0, positions.LANES)
        parts = positions.load_parts(position, length, request, CALL)
        accepted, seen = judge(position, fetched, parts, length, request, CALL)
        unsound = (position < length) & (seen.sound == 0)
        sound_length = tl.minimum(sound_length, tl.min(tl.where(unsound, position, length), 0))
        stop = tl.maximum(stop, tl.max(tl.where(accepted & (position < sound_length), position + 1, 0), 0))
        if base + positions.LANES < length:
            fetched = positions.fetch(position + positions.LANES, length, request, CALL)
    return stop, length


@triton.jit
def window(count, fetched, request, CALL: tl.constexpr):
    """Return how many tokens stand, and the request's length; a forgiven one stands if all of its window are accepted.

    Where `CALL.keeps_laws` and no mass decides, `Kept` of the first positions comes after them.
    """
    NUM: tl.constexpr = CALL.lanes
    KEEPS: tl.constexpr = CALL.keeps_laws and CALL.mass_scalar < 0
    length = positions.length_of(request, count)
    flags_ptr = request.scalars_ptr + CALL.flags_scalar * request.num_positions
    lane = tl.arange(0, NUM)
    kept = ()
    if KEEPS:
        kept = Kept(length * 0, pairs.no_pair(NUM, CALL), length, length * 0)
    for base in range(0, tl.maximum(length, 1) if KEEPS else length, NUM):
        position = base + lane
        parts = positions.load_parts(position, length, request, CALL)
        accepted, seen = judge(position, fetched, parts, length, request, CALL)
        forgiven = evaluate(CALL.forgive, seen.scalars, tl.int1) & seen.sound
        flags = tl.where(accepted, 2.0, tl.where(forgiven, 1.0, 0.0)).to(tl.float64)
        tl.store(flags_ptr + position, flags, mask=position < length)
        if KEEPS:
            unsound = tl.minimum(kept.unsound, tl.min(tl.where(seen.sound, length, position), 0))
            kept = Kept(kept.first, kept.laws, unsound, kept.fault)
            if base == 0:
                kept = Kept(kept.first, seen.laws, unsound, kept.fault)
        if base + NUM < length:
            fetched = positions.fetch(position + NUM, length, request, CALL)
    tl.debug_barrier()
    stop = length
    width = tl.minimum(length - 1, CALL.window)
    for base in range(0, length, NUM):
        position = base + lane
        flags = tl.load(flags_ptr + position, mask=position < length, other=2.0)
        full = (width > 0) & (position + 1 + width <= length)
        for follower in range(1, width + 1):
            inside = position + follower < length
            full = full & (tl.load(flags_ptr + position + follower, mask=inside, other=0.0) == 2.0)
        stands = (flags == 2.0) | ((flags == 1.0) & full)
        stop = tl.minimum(stop, tl.min(tl.where(stands, length, position), 0))
    return stop, length, kept


@triton.jit
def find_stop(count, fetched, request, CALL: tl.constexpr):
    """Return what `first_rejection` does, however the strategy stops, given every scalar of every position.

    How many tokens pass is only found where it is asked for, or comes with the stop.
    """
    passed, kept = count, ()
    if CALL.stop == "first_rejection" or CALL.counts_passed:
        stop, length, passed, kept = first_rejection(count, fetched, request, CALL)
    if CALL.stop == "last_acceptance":
        stop, length = last_acceptance(count, fetched, request, CALL)
    elif CALL.stop == "window":
        stop, length, kept = window(count, fetched, request, CALL)
    return stop, length, passed, kept
