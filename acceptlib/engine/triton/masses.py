"""Which rows a request may stop at, where that hangs on what passes from one position to the next, or on masses.

`prepare` finds what passes, position by position. Where a residual's mass decides, it says which rows may be stopped
at: the last stage finds their masses, and `accepts` says what these come to.
"""

# ruff: noqa: N803, RUF005, SIM108 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import decide, laws, rows
from acceptlib.engine.triton.binding import evaluate

NUM_BITS = tl.constexpr(63)
"""Rows of a request that may be left out one by one; later ones are not."""


class Known(NamedTuple):
    """Of the first LANES positions, u, the scalars but for a mass, and the laws of both models' rows."""

    u: tl.tensor
    scalars: tl.tuple
    laws: laws.Pair


class Wanted(NamedTuple):
    """Rows that a stop or a mass may need: first and last, and those between whose bit is set or that have none."""

    first: tl.tensor
    last: tl.tensor
    bits: tl.tensor


@triton.jit
def prepare(length, fetched, request, CALL: tl.constexpr):
    """Store the carry before and after every drafted position; return the rows that a stop or a mass may need.

    Where masses are spared, row `first` is stopped at unless a mass says otherwise: the probability of acceptance does
    not fall as the mass grows, so what is accepted at none is accepted, and what is rejected at the largest is not.
    Where `CALL.keeps_laws`, `Known` comes with them.
    """
    sound_length = length
    first = length * 0
    last = length if not CALL.spares_masses else first
    bits = tl.full((), 0 if CALL.spares_masses else -1, tl.int64)
    running = tl.full((), 1.0, tl.float64)
    known = ()
    if CALL.keeps_laws:
        zero = tl.zeros((decide.LANES,), tl.float64)
        known = Known(zero, decide.no_values(zero, CALL), laws.no_pair(decide.LANES, CALL))
    for base in range(0, tl.maximum(length, 1), decide.LANES):
        position = base + tl.arange(0, decide.LANES)
        u, sound, found, pair = decide.look(position, fetched, length, request, CALL)
        sound, found = in_each_warp(sound, found)
        before = position * 0.0 + running
        after = before
        if CALL.carry is not None:
            for i in range(base, tl.minimum(base + decide.LANES, length)):
                before = tl.where(position >= i, running, before)
                # For all lanes, though one is asked for: what does not hang on the carry is found once.
                carried = evaluate(CALL.carry, with_scalar(found, before, CALL.carry_value), tl.float64)
                running = _lane(carried, position == i)
                after = tl.where(position >= i, running, after)
        here_ptr = request.scalars_ptr + CALL.carry_scalar * request.num_positions + position
        tl.store(here_ptr, before, mask=position < length)
        tl.store(here_ptr + request.num_positions, after, mask=position < length)
        if CALL.mass_scalar >= 0 and not CALL.spares_masses:
            # The last drafted token has no next row, and no program stores its mass.
            mass_ptr = request.scalars_ptr + CALL.mass_scalar * request.num_positions + position
            tl.store(mass_ptr, before * 0.0, mask=position == length - 1)
        if CALL.spares_masses or CALL.keeps_laws:
            found = with_scalar(with_scalar(found, before, CALL.carry_value), after, CALL.carry_value + 1)
        if CALL.keeps_laws:
            if base == 0:
                known = Known(u, found, pair)
        if CALL.spares_masses:
            least = passes(u, found, before * 0.0, CALL)
            most = passes(u, found, before * 0.0 + rows.MASS_LIMIT, CALL)
            sound_length = tl.minimum(sound_length, tl.min(tl.where(sound, length, position), 0))
            within = position < sound_length
            first = tl.maximum(first, tl.max(tl.where(within & least, position + 1, 0), 0))
            wanted = within & (position < length - 1) & most & (least == 0)
            last = tl.maximum(last, tl.max(tl.where(wanted, position + 1, 0), 0))
            bit = tl.full((decide.LANES,), 1, tl.int64) << tl.minimum(position + 1, NUM_BITS - 1).to(tl.int64)
            bits += tl.sum(tl.where(wanted & (position + 1 < NUM_BITS), bit, 0), 0)
        if base + decide.LANES < length:
            fetched = decide.fetch(position + decide.LANES, length, request, CALL)
    return Wanted(first, tl.maximum(first, last), bits), known


@triton.jit
def in_each_warp(sound, found):
    """Return what `decide.look` found of LANES positions, laid out so that every warp has all of it.

    It was found by warps of some rows each, and so would pass from one position to the next through shared memory.
    """
    lane = tl.arange(0, decide.LANES)
    here = ()
    for i in tl.static_range(len(found)):
        if found[i].dtype == tl.int1:
            here = here + (tl.gather(found[i].to(tl.int32), lane, 0) != 0,)
        else:
            here = here + (tl.gather(found[i], lane, 0),)
    return tl.gather(sound.to(tl.int32), lane, 0) != 0, here


@triton.jit
def may_matter(position, wanted):
    """Return whether a row from the first to the last is wanted."""
    bit = wanted.bits >> tl.minimum(position, NUM_BITS - 1).to(tl.int64)
    return (position == wanted.first) | (position >= NUM_BITS) | ((bit & 1) != 0)


@triton.jit
def accepts(position, mass, length, known, request, CALL: tl.constexpr):
    """Return whether the token at one sound position is accepted, given the mass of the next row."""
    lane = tl.arange(0, decide.LANES)
    accepted = position < 0
    is_known = accepted
    if CALL.keeps_laws:
        is_known = position < decide.LANES
        stands = passes(known.u, known.scalars, lane * 0.0 + mass, CALL)
        accepted = tl.sum((stands & (lane == position)).to(tl.int32), 0) != 0
    if not is_known:
        here = tl.zeros((1,), tl.int32) + position
        u, _, found, _ = decide.look(here, decide.fetch(here, length, request, CALL), length, request, CALL)
        accepted = tl.sum(passes(u, found, here * 0.0 + mass, CALL).to(tl.int32), 0) != 0
    return accepted


@triton.jit
def passes(u, found, mass, CALL: tl.constexpr):
    """Return whether tokens at positions [n] are accepted, given the masses of the rows behind them."""
    return u < evaluate(CALL.accept, with_scalar(found, mass, CALL.mass_value), tl.float64)


@triton.jit
def with_scalar(found, scalar, at: tl.constexpr):
    """Return the scalars with another one at one place."""
    here = ()
    for i in tl.static_range(len(found)):
        if i == at:
            here = here + (scalar.to(tl.float64),)
        else:
            here = here + (found[i],)
    return here


@triton.jit
def lane_of(found, chosen):
    """Return the scalars [LANES] at one lane."""
    here = ()
    for i in tl.static_range(len(found)):
        here = here + (_lane(found[i], chosen),)
    return here


@triton.jit
def _lane(values, chosen):
    """Return the one of [LANES] values that is chosen."""
    if values.dtype == tl.int1:
        return tl.max((values & chosen).to(tl.int32), 0) != 0
    else:  # noqa: RET505 - a branch on what is known when compiling
        return tl.sum(tl.where(chosen, values, 0.0), 0)
