"""Which drafted tokens stand, inside the kernels.

A strategy that stops at the first rejection is decided wherever its answer is needed, LANES positions at a time: it
takes less time to find it again than to wait for it. Where a decision depends on other positions (a carry, the last
acceptance, a window), one program a request decides.

A request is a tuple: (number, vocab_size, num_blocks, ids, stream, scalars, tables, state), with
ids = (ids_ptr, stride), stream = (accept_ptr, stride, seed, offset), and the last three a pointer and the length of
one quantity's row.
"""

# ruff: noqa: N803, RUF005, SIM108 - jit functions; their constants are in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import random, rows
from acceptlib.engine.triton.binding import call
from acceptlib.engine.triton.rows import DRAFT, TARGET

LANES = tl.constexpr(8)
"""Positions decided at a time: the partial results of 8 rows are about as many as a program has threads."""

WANTED = tl.constexpr(-1.0)
"""In the place of a mass that is not known yet, and is needed."""

MOST_MASS = tl.constexpr(4.0)
"""Rows with more count as not normalised."""

FAR = tl.constexpr(1 << 30)
"""A stop at position i is kept as FAR - i, so that 0 is none and the first stop is the largest number."""

QUANTITIES = (
    "target_prob",
    "draft_prob",
    "target_max_prob",
    "draft_max_prob",
    "is_target_argmax",
    "position",
    "num_draft_tokens",
    "is_last",
    "draft_token_id",
)
"""What `values` begins with; then come the plan's scalars in the workspace, its tables and the caller's state."""


DRAFTED = tl.constexpr(QUANTITIES.index("draft_token_id"))


@triton.jit
def coded(position):
    """Return a position as a stop is kept, and back."""
    return position * -1 + FAR


@triton.jit
def tokens_at(request, position, mask, other):
    """Return drafted tokens, int64."""
    ids_ptr, stride = request[3]
    return tl.load(ids_ptr + position.to(tl.int64) * stride, mask=mask, other=other).to(tl.int64)


@triton.jit
def length_of(request, count):
    """Return how many tokens were drafted before the first placeholder."""
    length = count
    for base in range(0, count, LANES):
        position = base + tl.arange(0, LANES)
        ids = tokens_at(request, position, position < count, 0)
        length = tl.minimum(length, tl.min(tl.where(ids < 0, position, count), 0))
    return length


@triton.jit
def load_drafted(position, ids, inside, target, draft, CALL: tl.constexpr):
    """Return the entries of drafted tokens in the target's and the draft's rows, as they are given."""
    x_target = tl.zeros_like(ids).to(tl.float32)
    x_draft = x_target
    if CALL.reads_target:
        x_target = rows.load(target, position, ids, inside, 0.0, CALL, TARGET)
    if CALL.reads_draft and CALL.has_draft:
        x_draft = rows.load(draft, position, ids, inside, 0.0, CALL, DRAFT)
    return (x_target, x_draft)


@triton.jit
def values(position, ids, inside, drafted, length, request, target, target_law, draft, draft_law, CALL: tl.constexpr):
    """Return the scalars of positions, in their shape: `QUANTITIES` and what follows them; 0 where not needed."""
    zero = position.to(tl.float64) * 0.0
    p = zero
    q = zero
    p_max = zero
    q_max = zero
    is_best = position < 0
    if CALL.reads_target:
        p = rows.prob_of(drafted[0], ids, inside, target, target_law, CALL, TARGET)
    if CALL.reads_draft:
        q = zero + 1.0
        if CALL.has_draft:
            q = rows.prob_of(drafted[1], ids, inside & (ids < draft[3]), draft, draft_law, CALL, DRAFT)
            q = tl.where(q > 0, q, 0.0)  # NaN counts as 0
    if CALL.reads_target_max:
        p_max = rows.largest_prob(target, target_law, CALL, TARGET)
    if CALL.reads_draft_max:
        q_max = zero + 1.0
        if CALL.has_draft:
            q_max = rows.largest_prob(draft, draft_law, CALL, DRAFT)
            q_max = tl.where(q_max > 0, q_max, 0.0)
    if CALL.reads_argmax:
        is_best = ids == target_law[2]
    is_last = position == length - 1
    found = (p, q, p_max, q_max, is_best, zero + position, zero + length, is_last, zero + ids)
    for i in tl.static_range(len(CALL.scalars)):
        scalars_ptr, size = request[5]
        found = found + (tl.load(scalars_ptr + i * size + position, mask=inside, other=0.0, cache_modifier=".cg"),)
    for i in tl.static_range(len(CALL.tables)):
        tables_ptr, size = request[6]
        found = found + (tl.load(tables_ptr + i * size + tl.minimum(position, size - 1)),)
    for i in tl.static_range(len(CALL.state)):
        state_ptr, size = request[7]
        state = zero + tl.load(state_ptr + i * size + request[0])
        found = found + (state != 0 if CALL.state[i] else state,)
    return found


@triton.jit
def judge(position, length, request, target, draft, CALL: tl.constexpr):
    """Return, at positions [n], whether the token is accepted, and whether it could be at all; and the scalars."""
    u, sound, found = look(position, length, request, target, draft, CALL)
    return (u < call(CALL.accept, found, tl.float64)) & sound, sound, found


@triton.jit
def look(position, length, request, target, draft, CALL: tl.constexpr):
    """Return, at positions [n], the uniform number, whether the token could be accepted, and the scalars."""
    num_blocks = request[2]
    before_end = position < length
    ids = tokens_at(request, position, before_end, 0)
    inside = before_end & (ids >= 0) & (ids < request[1])
    # Everything is loaded before anything is reduced: a reduction waits for what it reads.
    target_parts = rows.load_parts(target, position, inside, num_blocks, CALL, TARGET)
    draft_parts = target_parts
    if CALL.has_draft:
        draft_parts = rows.load_parts(draft, position, inside, num_blocks, CALL, DRAFT)
    drafted = load_drafted(position, ids, inside, target, draft, CALL)
    accept_ptr, stride, seed, offset = request[4]
    if CALL.explicit:
        u = tl.load(accept_ptr + position.to(tl.int64) * stride, mask=before_end, other=0.0)
    else:
        u = random.uniform(seed, offset, position)
    target_law = rows.law(target, target_parts, CALL, TARGET)
    draft_law = target_law
    if CALL.has_draft:
        draft_law = rows.law(draft, draft_parts, CALL, DRAFT)
    found = values(position, ids, inside, drafted, length, request, target, target_law, draft, draft_law, CALL)
    return u, inside & (token_fault(ids, found[0], target_law, request[1], CALL) == 0), found


@triton.jit
def token_fault(ids, p, target_law, vocab_size, CALL: tl.constexpr):
    """Return the `Status` of drafted tokens by themselves."""
    fault = tl.where(ids < vocab_size, 0, 3)
    if CALL.reads_target:
        fault = tl.where((fault == 0) & (p > 1 + 1 / 64), 2, fault)
        fault = tl.where((p >= 0) & (p < float("inf")), fault, 1)
    if CALL.reads_argmax:
        fault = tl.where(target_law[0] == target_law[0], fault, 1)
    return fault


@triton.jit
def first_rejection(count, request, target, draft, CALL: tl.constexpr):
    """Return how many drafted tokens stand, the request's length, and how many tokens pass on their own."""
    length = count
    if CALL.reads_length:
        length = length_of(request, count)
    end = length
    stop = length
    passed = length * 0
    sound_length = length
    for base in range(0, length, LANES):
        position = base + tl.arange(0, LANES)
        accepted, sound, found = judge(position, length, request, target, draft, CALL)
        first_unsound = tl.min(tl.where(sound, length, position), 0)
        sound_length = tl.minimum(sound_length, first_unsound)
        stop = tl.minimum(stop, tl.min(tl.where(accepted, length, position), 0))
        # A placeholder is neither sound nor accepted.
        end = tl.minimum(end, tl.min(tl.where(found[DRAFTED] < 0, position, length), 0))
        passed += tl.sum((accepted & (position < sound_length)).to(tl.int32), 0)
    return stop, end, passed


@triton.jit
def last_acceptance(count, request, target, draft, CALL: tl.constexpr):
    """Return the largest accepted position, 1-based."""
    length = length_of(request, count)
    stop = length * 0
    sound_length = length
    for base in range(0, length, LANES):
        position = base + tl.arange(0, LANES)
        accepted, sound, _ = judge(position, length, request, target, draft, CALL)
        unsound = (position < length) & (sound == 0)
        sound_length = tl.minimum(sound_length, tl.min(tl.where(unsound, position, length), 0))
        stop = tl.maximum(stop, tl.max(tl.where(accepted & (position < sound_length), position + 1, 0), 0))
    return stop


@triton.jit
def window(count, request, target, draft, CALL: tl.constexpr):
    """Return how many tokens stand, where a forgiven one does if all the tokens of its window are accepted."""
    length = length_of(request, count)
    flags_ptr, size = request[5]
    flags_ptr += CALL.flags_scalar * size
    lane = tl.arange(0, LANES)
    for base in range(0, length, LANES):
        position = base + lane
        accepted, sound, found = judge(position, length, request, target, draft, CALL)
        forgiven = call(CALL.forgive, found, tl.int1) & sound
        flags = tl.where(accepted, 2.0, tl.where(forgiven, 1.0, 0.0)).to(tl.float64)
        tl.store(flags_ptr + position, flags, mask=position < length)
    tl.debug_barrier()
    stop = length
    width = tl.minimum(length - 1, CALL.window)
    for base in range(0, length, LANES):
        position = base + lane
        flags = tl.load(flags_ptr + position, mask=position < length, other=2.0)
        full = (width > 0) & (position + 1 + width <= length)
        for follower in range(1, width + 1):
            inside = position + follower < length
            full = full & (tl.load(flags_ptr + position + follower, mask=inside, other=0.0) == 2.0)
        stands = (flags == 2.0) | ((flags == 1.0) & full)
        stop = tl.minimum(stop, tl.min(tl.where(stands, length, position), 0))
    return stop


@triton.jit
def carry(count, request, target, draft, stop_ptr, CALL: tl.constexpr):
    """Store the carry before and after every drafted position, and prepare for the masses."""
    scalars_ptr, size = request[5]
    scalars_ptr += CALL.carry_scalar * size
    length = length_of(request, count)
    sound_length = length
    running = tl.full((), 1.0, tl.float64)
    for base in range(0, length, LANES):
        position = base + tl.arange(0, LANES)
        _, sound, found = look(position, length, request, target, draft, CALL)
        sound_length = tl.minimum(sound_length, tl.min(tl.where(sound, length, position), 0))
        for lane in tl.static_range(LANES):
            tl.store(scalars_ptr + base + lane, running, mask=base + lane < length)
            if CALL.carry is not None:
                here = ()
                for i in tl.static_range(len(found)):
                    if i == CALL.carry_value:
                        here = here + (running,)
                    else:
                        here = here + (_lane(found[i], lane),)
                running = call(CALL.carry, here, tl.float64)
            tl.store(scalars_ptr + size + base + lane, running, mask=base + lane < length)
    if CALL.mass_scalar >= 0:
        tl.debug_barrier()
        prepare_masses(length, sound_length, request, target, draft, stop_ptr, CALL)


@triton.jit
def prepare_masses(length, sound_length, request, target, draft, stop_ptr, CALL: tl.constexpr):
    """Store `WANTED` as the mass of the next row where it decides, 0 elsewhere, and what is accepted without.

    The probability of acceptance does not fall as the mass grows.
    """
    scalars_ptr, size = request[5]
    scalars_ptr += CALL.mass_scalar * size
    accepted = length * 0
    for base in range(0, length, LANES):
        position = base + tl.arange(0, LANES)
        u, _, found = look(position, length, request, target, draft, CALL)
        least = u < call(CALL.accept, with_mass(found, position * 0.0, CALL), tl.float64)
        most = u < call(CALL.accept, with_mass(found, position * 0.0 + MOST_MASS, CALL), tl.float64)
        sound = position < sound_length
        wanted = sound & (position < length - 1) & most & (least == 0)
        tl.store(scalars_ptr + position, tl.where(wanted, WANTED, 0.0), mask=position < length)
        accepted = tl.maximum(accepted, tl.max(tl.where(sound & least, position + 1, 0), 0))
    tl.store(stop_ptr, accepted)


@triton.jit
def with_mass(found, mass, CALL: tl.constexpr):
    """Return the scalars with another mass of the next row."""
    here = ()
    for i in tl.static_range(len(found)):
        if i == CALL.mass_value:
            here = here + (mass.to(tl.float64),)
        else:
            here = here + (found[i],)
    return here


@triton.jit
def _lane(values, lane: tl.constexpr):
    """Return one of [LANES] values."""
    chosen = tl.arange(0, LANES) == lane
    if values.dtype == tl.int1:
        return tl.max((values & chosen).to(tl.int32), 0) != 0
    else:  # noqa: RET505 - a branch on what is known when compiling
        return tl.sum(tl.where(chosen, values, 0.0), 0)
