"""Which rows a request may stop at, where that depends on what passes from one position to the next, or on masses.

`prepare` finds what passes, position by position. Where a residual's mass decides, it also says which rows may be
stopped at. The last stage finds their masses, and `accepts` decides by them.
"""

# ruff: noqa: N803, RUF005, SIM108 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import decide, pairs, positions, rows
from acceptlib.engine.triton.rules import evaluate

NUM_BITS = tl.constexpr(63)
"""Rows of a request that may be left out one by one; later ones are not."""

ALL_BITS = tl.constexpr((1 << NUM_BITS.value) - 1)
"""One for each of these."""

LANE_BITS = tl.constexpr((1 << positions.LANES.value) - 1)
"""One for each position that is looked at at a time."""

HALF = tl.constexpr(positions.LANES.value // 2)
"""Positions that are looked at together: later ones only where a request has as many, for most draft few tokens."""

TWICE = tl.constexpr(2 * positions.LANES.value)
"""Lanes for each position twice: whether it is accepted at no mass, and at the largest, is found at once."""


class Halves(NamedTuple):
    """What `positions.fetch` finds of LANES positions, in two halves, and u [TWICE]."""

    first: positions.Fetched
    later: positions.Fetched
    u: tl.tensor


class Known(NamedTuple):
    """What is known of the first LANES positions: u and the scalars but for a mass [TWICE], and both models' laws."""

    u: tl.tensor
    scalars: tl.tuple
    laws: pairs.Pair


class Wanted(NamedTuple):
    """Rows that a stop or a mass may need: first and last, and those between whose bit is set or that have none."""

    first: tl.tensor
    last: tl.tensor
    bits: tl.tensor


@triton.jit
def fetch(base, count, request, CALL: tl.constexpr):
    """Return what LANES positions need that no stage finds."""
    half = base + tl.arange(0, HALF)
    first = positions.fetch(half, count, request, CALL)
    later = positions.fetch(half + HALF, count, request, CALL)
    position = base + tl.arange(0, TWICE) % positions.LANES
    return Halves(first, later, positions.uniforms(position, position < count, request, CALL))


@triton.jit
def after_wait(fetched, count, request, CALL: tl.constexpr):
    """Wait until the stages before have ended, and return what `fetch` found."""
    return Halves(fetched.first, fetched.later, decide.kept_over_wait(fetched.u, count, request, CALL))


@triton.jit
def joined(fetched, count, request, CALL: tl.constexpr):
    """Return what `fetch` found of the first positions as `positions.fetch_first` does."""
    first, later = fetched.first, fetched.later
    position = tl.arange(0, positions.LANES)
    return positions.Fetched(
        pairs.end_to_end(first.ids, later.ids),
        pairs.end_to_end(first.x_target, later.x_target),
        pairs.end_to_end(first.x_draft, later.x_draft),
        positions.uniforms(position, position < count, request, CALL),
    )


@triton.jit
def prepare(count, fetched, request, CALL: tl.constexpr):
    """Store the carry before and after every drafted position; return the rows that a stop or a mass may need.

    Where masses are spared, row `first` is stopped at unless a mass says otherwise: the probability of acceptance does
    not fall as the mass grows, so a token accepted at mass 0, or rejected at the largest mass, is so at any mass. The
    request's length is returned before the rows, and where `CALL.keeps_laws`, `Known` after them.
    """
    parts = load_parts(0, count, request, CALL)
    length = length_by(fetched, count, request)
    lane = tl.arange(0, TWICE)
    all_sound = length >= 0
    first = length * 0
    last = length if not CALL.spares_masses else first
    bits = tl.full((), 0 if CALL.spares_masses else -1, tl.int64)
    running = tl.full((TWICE,), 1.0, tl.float64)
    known = ()
    if CALL.keeps_laws:
        zero = tl.zeros((TWICE,), tl.float64)
        known = Known(zero, positions.no_values(zero, CALL), pairs.no_pair(positions.LANES, CALL))
    for base in range(0, tl.maximum(length, 1), positions.LANES):
        position = base + lane % positions.LANES
        sound, found, pair = look(base, fetched, parts, length, request, CALL)
        u = fetched.u
        before, after, running = carry_on(running, base, found, length, CALL)
        here_ptr = request.scalars_ptr + CALL.carry_scalar * request.num_positions + position
        tl.store(here_ptr, before, mask=position < length)
        tl.store(here_ptr + request.num_positions, after, mask=position < length)
        if CALL.mass_scalar >= 0 and not CALL.spares_masses:
            # The last drafted token has no next row, and no program stores its mass.
            mass_ptr = request.scalars_ptr + CALL.mass_scalar * request.num_positions + position
            tl.store(mass_ptr, tl.zeros_like(before), mask=position == length - 1)
        if CALL.spares_masses or CALL.keeps_laws:
            found = with_scalar(with_scalar(found, before, CALL.carry_scalar), after, CALL.carry_scalar + 1)
        if CALL.keeps_laws:
            if base == 0:
                known = Known(u, found, pair)
        if CALL.spares_masses:
            least_bits, wanted_bits, all_sound = bounds(all_sound, base, u, found, sound, length, CALL)
            first = tl.where(least_bits != 0, base + decide.bit_length(least_bits), first)
            last = tl.where(wanted_bits != 0, base + decide.bit_length(wanted_bits), last)
            if base + 1 < NUM_BITS:
                bits |= (wanted_bits.to(tl.int64) << (base + 1)) & ALL_BITS
        if base + positions.LANES < length:
            fetched = fetch(base + positions.LANES, length, request, CALL)
            parts = load_parts(base + positions.LANES, length, request, CALL)
    return length, Wanted(first, tl.maximum(first, last), bits), known


@triton.jit
def carry_on(running, base, found, length, CALL: tl.constexpr):
    """Return the carry before and after LANES positions [TWICE], and behind them, given it before the first."""
    lane = tl.arange(0, TWICE)
    position = base + lane % positions.LANES
    before = running
    after = before
    if CALL.carry is not None:
        for i in range(base, tl.minimum(base + positions.LANES, length)):
            before = tl.where(position >= i, running, before)
            # For all lanes, though one is asked for: what does not hang on the carry is found once.
            carried = evaluate(CALL.carry, with_scalar(found, before, CALL.carry_scalar), tl.float64)
            running = tl.gather(carried, lane * 0 + (i - base), 0)
            after = tl.where(position >= i, running, after)
    return before, after, running


@triton.jit
def bounds(all_sound, base, u, found, sound, length, CALL: tl.constexpr):
    """Return which of LANES positions are accepted at any mass, and which hang on it, as bits, up to an unsound one.

    Whether all positions so far are sound comes last, and is given of those before.
    """
    lane = tl.arange(0, TWICE)
    stands = passes(u, found, tl.where(lane < positions.LANES, 0.0, rows.MASS_LIMIT), CALL)
    # As bits of one sum, for threads take long to exchange numbers.
    flags = tl.where(lane < positions.LANES, (sound == 0).to(tl.int32) << (lane + TWICE), 0)
    word = tl.sum(flags + (stands.to(tl.int32) << lane), 0)
    least_bits, most_bits, unsound = word & LANE_BITS, (word >> positions.LANES) & LANE_BITS, word >> TWICE
    # The mass behind the last token decides nothing.
    num_followed = tl.minimum(tl.maximum(length - 1 - base, 0), positions.LANES)
    wanted_bits = most_bits & ~least_bits & ((1 << num_followed) - 1)
    before_unsound = tl.where(all_sound, (unsound & -unsound) - 1, 0)  # all bits if there is none
    return least_bits & before_unsound, wanted_bits & before_unsound, all_sound & (unsound == 0)


@triton.jit
def load_parts(base, length, request, CALL: tl.constexpr):
    """Return what the laws of rows at LANES positions are made from, of either half of them."""
    half = base + tl.arange(0, HALF)
    return positions.load_parts(half, length, request, CALL), positions.load_parts(half + HALF, length, request, CALL)


@triton.jit
def length_by(fetched, count, request):
    """Return how many tokens were drafted before the first placeholder, given `fetch` of the first positions."""
    lane = tl.arange(0, HALF)
    first = tl.where((fetched.first.ids < 0) & (lane < count), lane, count)
    later = tl.where((fetched.later.ids < 0) & (lane + HALF < count), lane + HALF, count)
    return positions.cut_short(tl.min(tl.minimum(first, later), 0), positions.LANES, request, count)


@triton.jit
def look(base, fetched, parts, length, request, CALL: tl.constexpr):
    """Return whether tokens are sound, and the scalars, [TWICE] in each warp, and the laws of their rows [LANES]."""
    half = base + tl.arange(0, HALF)
    first = positions.look(half, fetched.first, parts[0], length, request, CALL)
    later = first  # stands in, and does not count: a position of the first half is not sound then
    if length >= base + HALF:
        later = positions.look(half + HALF, fetched.later, parts[1], length, request, CALL)
    scalars = ()
    for i in tl.static_range(len(first.scalars)):
        scalars = scalars + (in_each_warp(first.scalars[i], later.scalars[i]),)
    return in_each_warp(first.sound, later.sound), scalars, pairs.joined(first.laws, later.laws, CALL)


@triton.jit
def in_each_warp(first, later):
    """Return what was found of two halves of LANES positions, [TWICE], laid out so that every warp has all of it.

    Each warp found it of some rows; left so, what passes between positions would go through shared memory.
    """
    lane = tl.arange(0, TWICE) % positions.LANES
    if first.dtype == tl.int1:
        return tl.gather(pairs.end_to_end(first.to(tl.int32), later.to(tl.int32)), lane, 0) != 0
    else:  # noqa: RET505 - a branch on what is known when compiling
        return tl.gather(pairs.end_to_end(first, later), lane, 0)


@triton.jit
def may_matter(position, wanted):
    """Return whether a row from the first to the last is wanted."""
    bit = wanted.bits >> tl.minimum(position, NUM_BITS - 1).to(tl.int64)
    return (position == wanted.first) | (position >= NUM_BITS) | ((bit & 1) != 0)


@triton.jit
def accepts(position, mass, length, known, request, CALL: tl.constexpr):
    """Return whether the token at one sound position is accepted, given the mass of the next row."""
    lane = tl.arange(0, TWICE)
    accepted = position < 0  # never
    is_known = accepted
    if CALL.keeps_laws:
        is_known = position < positions.LANES
        stands = passes(known.u, known.scalars, lane * 0.0 + mass, CALL)
        accepted = tl.sum((stands & (lane == position)).to(tl.int32), 0) != 0
    if not is_known:
        here = tl.zeros((1,), tl.int32) + position
        parts = positions.load_parts(here, length, request, CALL)
        seen = positions.look(here, positions.fetch(here, length, request, CALL), parts, length, request, CALL)
        accepted = tl.sum(passes(seen.u, seen.scalars, here * 0.0 + mass, CALL).to(tl.int32), 0) != 0
    return accepted


@triton.jit
def passes(u, found, mass, CALL: tl.constexpr):
    """Return whether tokens at positions [n] are accepted, given the masses of the rows behind them."""
    return u < evaluate(CALL.accept, with_scalar(found, mass, CALL.mass_scalar), tl.float64)


@triton.jit
def with_scalar(found, scalar, at: tl.constexpr):
    """Return the values of positions with one of the plan's scalars replaced."""
    here = ()
    for i in tl.static_range(len(found)):
        if i == positions.FIRST_SCALAR + at:
            here = here + (scalar.to(tl.float64),)
        else:
            here = here + (found[i],)
    return here


@triton.jit
def lane_of(found, chosen):
    """Return the scalars [TWICE] at one lane."""
    here = ()
    for i in tl.static_range(len(found)):
        here = here + (_lane(found[i], chosen),)
    return here


@triton.jit
def _lane(values, chosen):
    """Return the chosen one of [TWICE] values."""
    if values.dtype == tl.int1:
        return tl.max((values & chosen).to(tl.int32), 0) != 0
    else:  # noqa: RET505 - a branch on what is known when compiling
        return tl.sum(tl.where(chosen, values, 0.0), 0)
