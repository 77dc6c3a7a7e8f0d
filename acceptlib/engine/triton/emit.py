"""The last stage: one draw a request at its stopping row, and the result.

Every program reduces some blocks of the row's weights, each part of a block to one integer. A request's last program to
arrive, or one that waits for the others, scans these sums, searches one part, and writes the result. Where programs
hold one block each, the one that the draw falls into may write the token (`held`), and where a list holds all that may
be drawn, one program goes through that (`listed`). Where stages find stops as they go through rows, a request's
programs begin once its stop is known, while rows of other requests are still read (`counters.known_stop`).

The weights of a draw add up to the residual's mass. Where that decides, programs reduce every row that may be stopped
at, from the last to the first. If a stage has said which rows these are, the last program to arrive at a row decides
the position before it; elsewhere the request's last program decides all.
"""

# ruff: noqa: N803 - jit functions; constants in capitals, branches known when compiling

import triton
import triton.language as tl

from acceptlib.engine.triton import (
    counters,
    decide,
    draw,
    elements,
    held,
    laws,
    listed,
    masses,
    pairs,
    partials,
    positions,
    random,
    results,
    rows,
)
from acceptlib.engine.triton.rows import (
    DROP,
    INVALID_ROW,
    INVALID_TOKEN_ID,
    KEEP,
    LARGEST_INT32,
    MASS_LIMIT,
    ROW_TOLERANCE,
    TARGET,
    UNNORMALIZED_ROW,
)
from acceptlib.engine.triton.sums import WEIGHT_SCALE, add_three, fixed_fours, fours, in_thirds, running


@triton.jit
def emit(
    grid,
    count,
    fetched,  # of `positions.fetch_first` or `masses.fetch`, if decided here; else `decide.Foreseen`, or the stop
    fault,
    request,
    prepared_ptr,
    partials_ptr,  # of a row: [num_parts] int64 and float32, and [3, num_programs * emit_parts] float32
    out,
    CALL: tl.constexpr,
):
    """Weigh this program's blocks of the row that its request stops at, or of every row that it may stop at.

    One program finishes the request besides.
    """
    if CALL.mass_scalar >= 0:
        emit_by_mass(grid, count, fetched, fault, request, prepared_ptr, partials_ptr, out, CALL)
    elif CALL.lists and not CALL.decided:
        if not listed.leaves(grid, count, fault, request, CALL):
            emit_at_stop(grid, count, fetched, fault, request, partials_ptr, out, CALL)
    else:
        emit_at_stop(grid, count, fetched, fault, request, partials_ptr, out, CALL)


@triton.jit
def emit_at_stop(grid, count, fetched, fault, request, partials_ptr, out, CALL: tl.constexpr):
    """Weigh the row at the stop, known before any is weighed; finish the request if `partials.finishes` says so."""
    kept, ahead = (), ()
    if CALL.foreseen:
        stop, length, passed = fetched.stop, fetched.length, fetched.passed
    elif CALL.decided:
        length = positions.length_of(request, count)
        stop = tl.minimum(fetched if CALL.settles else counters.load_stop(length, request), length)
        passed = length
    else:
        if CALL.lists:
            ahead = listed.load_ahead(count, request, CALL)
        stop, length, passed, kept = decide.find_stop(count, fetched, request, CALL)
    if CALL.finds_faults:
        fault = tl.where((fault == 0) & (stop < length), kept.fault, fault)
    if not CALL.weighs:
        row = kept_row(stop, length, kept, request, CALL)
        finish(stop, length, passed, row, grid, count, fault, request, partials_ptr, (), out, CALL)
    elif CALL.holds:
        emit_held(stop, length, passed, kept, grid, count, fault, request, partials_ptr, out, CALL)
    else:
        few = ()
        if CALL.lists:
            few = listed.load(stop, length, count, fault, ahead, request, CALL)
            row = kept_row(stop, length, kept, request, CALL)
            if few.number < 0:
                weigh_row(stop, length, grid, kept, request, partials_ptr, CALL)
        else:
            row = weigh_row(stop, length, grid, kept, request, partials_ptr, CALL)
        if partials.finishes(grid, few, request, CALL):
            found = few if CALL.lists else partials.load_sums(partials_ptr, grid, request, CALL)
            finish(stop, length, passed, row, grid, count, fault, request, partials_ptr, found, out, CALL)


@triton.jit
def emit_held(stop, length, passed, kept, grid, count, fault, request, partials_ptr, out, CALL: tl.constexpr):
    """Weigh one block of the row at the stop, and write the token if the draw falls into it; see `held`.

    The last program weighs none. It writes the rest of the result, and draws where the others cannot.
    """
    kind = results.kind_of(stop, length, request, CALL)
    if grid.program < grid.num_programs:
        raw, row = open_block(stop, length, grid, kept, request, CALL)
        weights, _, _ = draw.weigh(raw, kind.is_bonus, row, request, CALL)
        token = held.hold(weights, grid, request, CALL)
        if CALL.draws_held:
            row_fault = laws.status_of(row.target_law, CALL)
            if CALL.keeps_laws:  # the drafted token, which would have to be loaded, is known to be sound or not
                status = tl.where(fault == 0, row_fault, fault)
                if stop < length:
                    status = tl.where(kept.unsound == stop, INVALID_ROW, status)
            else:
                status = results.fault_of(kind, row, row_fault, fault, request, CALL)
            held.write(token, (status == 0) & kind.weighed, out.token_ids_ptr + stop, CALL)
    else:
        row = kept_row(stop, length, kept, request, CALL)
        row_fault = laws.status_of(row.target_law, CALL)
        status = results.fault_of(kind, row, row_fault, fault, request, CALL)
        drawn = (status == 0) & kind.weighed
        if CALL.draws_held:
            lane = tl.arange(0, results.WRITTEN)
            ids = positions.tokens_at(request, lane, lane < stop, -1)
            results.write(stop, ids, -1, 0.0, status, drawn, request, out, CALL)
        writes, sure = held.watch(grid, request, CALL)
        if writes & drawn & CALL.draws_held:
            results.close(stop, passed, status, request, out, CALL)
        else:
            sums = held.load_sums(sure, grid, request, CALL)
            finish(stop, length, passed, row, grid, count, fault, request, partials_ptr, sums, out, CALL)


@triton.jit
def emit_by_mass(grid, count, fetched, fault, request, prepared_ptr, partials_ptr, out, CALL: tl.constexpr):
    """Weigh the rows that may be stopped at, whose masses decide; finish the request if the last to do so."""
    if CALL.decided:
        length = positions.length_of(request, count)
        first = tl.load(prepared_ptr, cache_modifier=".cg").to(tl.int32)
        last = tl.load(prepared_ptr + 1, cache_modifier=".cg").to(tl.int32)
        wanted = masses.Wanted(first, last, tl.load(prepared_ptr + 2, cache_modifier=".cg"))
        known = ()
    else:
        length, wanted, known = masses.prepare(count, fetched, request, CALL)
        tl.debug_barrier()
    weigh_wanted(wanted, length, grid, known, request, partials_ptr, CALL)
    # All arrive, even those that had nothing to read: the last one changes what the others decide by.
    if counters.arrive(request.counters.arrived_ptr, grid.num_programs * tl.num_programs(2)):
        passed = length
        if CALL.decided:
            stop = wanted.first
            if CALL.spares_masses:
                if stop < wanted.last:
                    stop = tl.maximum(stop, tl.load(request.counters.stop_ptr, cache_modifier=".cg"))
        else:
            stop, sums = stop_by_mass(wanted, length, grid, known, request, partials_ptr, CALL)
        if not CALL.spares_masses:
            tl.debug_barrier()  # every mass is stored
            again = positions.fetch_first(count, request, CALL)
            stop, _, passed, _ = decide.find_stop(count, again, request, CALL)
        partials_ptr = partials.row_partials(stop, partials_ptr, grid, CALL)
        if CALL.decided or not CALL.spares_masses:
            sums = partials.load_sums(partials_ptr, grid, request, CALL)
        row = kept_row(stop, length, known, request, CALL)
        finish(stop, length, passed, row, grid, count, fault, request, partials_ptr, sums, out, CALL)


@triton.jit
def stop_by_mass(wanted, length, grid, known, request, partials_ptr, CALL: tl.constexpr):
    """Return where a request stops by the masses of rows that are all weighed, and what was found of the row there.

    Where masses are not spared they are stored, and the first row is returned.
    """
    stop = wanted.first
    sums = partials.load_sums(partials.row_partials(stop, partials_ptr, grid, CALL), grid, request, CALL)
    for i in range(wanted.first, wanted.last):
        position = wanted.last + wanted.first - i
        if (stop == wanted.first) & (position < length) & masses.may_matter(position, wanted):
            sums_ptr = partials.row_partials(position, partials_ptr, grid, CALL)
            found = partials.load_sums(sums_ptr, grid, request, CALL)
            if settle_mass(position, found, length, known, request, CALL):
                stop = position
                sums = found
    return stop, sums


@triton.jit
def settle_mass(position, sums, length, known, request, CALL: tl.constexpr):
    """Return whether the token before a row is accepted by the row's mass; store the mass where masses are not spared.

    Where it is stored, no token is accepted here.
    """
    mass = tl.sum(sums.parts, 0).to(tl.float64) * (1 / WEIGHT_SCALE)
    accepted = position < 0  # none
    if CALL.spares_masses:
        accepted = masses.accepts(position - 1, mass, length, known, request, CALL)
    else:
        mass_ptr = request.scalars_ptr + CALL.mass_scalar * request.num_positions
        tl.store(mass_ptr + position - 1, mass)
    return accepted


@triton.jit
def weigh_wanted(wanted, length, grid, known, request, partials_ptr, CALL: tl.constexpr):
    """Reduce some blocks of the rows that `masses.prepare` found; programs of the same blocks take turns at rows.

    Rows go from the last to the first. After a stage that decides, a row's last program finds its mass, for an
    acceptance spares the rows before it; elsewhere the request's last program finds all masses.
    """
    stop_ptr = request.counters.stop_ptr
    number = wanted.first * 0
    until_own = number + tl.program_id(2)  # rows that come before the next one of this program
    for i in range(wanted.first, wanted.last + 1):
        position = wanted.last + wanted.first - i
        if masses.may_matter(position, wanted):
            if until_own == 0:
                until_own += tl.num_programs(2)
                sums_ptr = partials.row_partials(position, partials_ptr, grid, CALL)
                if not accepted_beyond(position, number, stop_ptr, CALL):
                    weigh_row(position, length, grid, known, request, sums_ptr, CALL)
                if CALL.decided:
                    if (position > wanted.first) & (position < length):
                        if counters.arrive(counters.of_row(position, counters.WEIGHED_BY, request), grid.num_programs):
                            # No program has left the row out unless a later one is accepted by now.
                            if not accepted_beyond(position, number, stop_ptr, CALL):
                                sums = partials.load_sums(sums_ptr, grid, request, CALL)
                                if settle_mass(position, sums, length, known, request, CALL):
                                    tl.atomic_max(stop_ptr, position)
            number += 1
            until_own -= 1


@triton.jit
def accepted_beyond(position, number, stop_ptr, CALL: tl.constexpr):
    """Return whether a row is spared because a later one is accepted; `number` rows are gone through before it."""
    found = number < 0
    if CALL.spares_masses and CALL.decided:
        if number > 0:
            found = counters.latest(stop_ptr) > position
    return found


@triton.jit
def open_block(stop, length, grid, kept, request, CALL: tl.constexpr):
    """Return a program's first block of the rows at a stop, after bias and mask, and the rows.

    The block is on its way before the row's law is known.
    """
    raw = load_rows(partials.entries_of(grid.program, CALL), stop, stop < length, request, CALL)
    tl.debug_barrier()  # an assembler moves loads down to where they are used, but not past this
    return raw, kept_row(stop, length, kept, request, CALL)


@triton.jit
def weigh_row(stop, length, grid, kept, request, partials_ptr, CALL: tl.constexpr):
    """Store the partial results of some blocks of one row; return the row.

    Each block is on its way before the one ahead of it is weighed.
    """
    program, num_programs, num_blocks = grid
    raw, row = open_block(stop, length, grid, kept, request, CALL)
    kind = results.kind_of(stop, length, request, CALL)
    is_bonus = kind.is_bonus
    idle = kind.idle
    if CALL.mass_scalar >= 0:
        idle = idle & is_bonus
    if CALL.awaits:
        idle = idle | (program == num_programs)
    w_mass = tl.zeros((CALL.emit_block // 4,), tl.float32)
    p_mass = w_mass
    q_mass = w_mass
    if CALL.loops:
        for block in range(program, tl.where(idle, 0, num_blocks), num_programs):
            entries = partials.entries_of(block + num_programs, CALL)
            following = load_rows(entries, stop, stop < length, request, CALL)
            w, p, q = weigh_block(block, raw, is_bonus, row, num_blocks, request, partials_ptr, CALL)
            raw = following
            w_mass += w
            p_mass += p
            q_mass += q
    elif not idle:
        w_mass, p_mass, q_mass = weigh_block(program, raw, is_bonus, row, num_blocks, request, partials_ptr, CALL)
    if not idle:
        w_sums = partials.in_parts(w_mass, CALL)
        if CALL.given_probs:
            w_sums, p_sums, q_sums = tl.reduce(
                (w_sums, partials.in_parts(p_mass, CALL), partials.in_parts(q_mass, CALL)), 1, add_three
            )
        else:
            w_sums = tl.sum(w_sums, 1)
            p_sums = w_sums
            q_sums = w_sums
        partials.store_masses(w_sums, p_sums, q_sums, grid, partials_ptr, request, CALL)
    return row


@triton.jit
def load_rows(entries, stop, has_draft, request, CALL: tl.constexpr):
    """Return entries of the rows at a stop, as `elements.load_both` does."""
    policy: tl.constexpr = DROP if CALL.drops else KEEP
    return elements.load_both(entries, stop, has_draft, policy, request, CALL)


@triton.jit
def kept_row(stop, length, kept, request, CALL: tl.constexpr):
    """Return a position's rows, by what is kept of the decision: `masses.Known`, `decide.Kept`, or nothing."""
    if CALL.keeps_laws and CALL.mass_scalar >= 0:
        scalars = masses.lane_of(kept.scalars, tl.arange(0, masses.TWICE) == stop)
        token = tl.where(stop < length, scalars[positions.DRAFTED].to(tl.int64), -1)
        pair = pairs.pair_at(kept.laws, tl.arange(0, positions.LANES) == stop, CALL)
        row = elements.Row(token, scalars, pair.target, pair.draft)
        if stop >= positions.LANES:
            row = elements.open_row(stop, length, request, CALL)
        return row
    elif CALL.keeps_laws:  # noqa: RET505 - a branch on what is known when compiling
        pair = pairs.pair_at(kept.laws, kept.first + tl.arange(0, CALL.lanes) == stop, CALL)
        row = elements.row_of(stop, length, pair, request, CALL)
        if CALL.stop == "window":
            if stop >= CALL.lanes:  # laws of the first positions are kept
                row = elements.open_row(stop, length, request, CALL)
        return row
    else:
        return elements.open_row(stop, length, request, CALL)


@triton.jit
def weigh_block(block, raw, from_target, row, num_blocks, request, partials_ptr, CALL: tl.constexpr):
    """Store what the draw needs of a loaded block; return sums of fours of the draw's weights, p and q, [BLOCK/4]."""
    weights, p, q = draw.weigh(raw, from_target, row, request, CALL)
    at = block * CALL.emit_parts + tl.arange(0, CALL.emit_parts)
    if CALL.recovered == "argmax":
        in_runs = tl.reshape(weights, [CALL.emit_rounds, CALL.emit_parts, CALL.emit_run])
        tl.store(partials.largest_in(partials_ptr, num_blocks, CALL) + at, tl.max(tl.max(in_runs, 0), 1))
    finite = weights
    if CALL.mass_scalar >= 0:
        finite = tl.where(weights < float("inf"), weights, 0.0)
    held = partials.in_parts(fixed_fours(finite, CALL.in_fours), CALL)
    sums = in_thirds(held) if CALL.thirds else tl.sum(held, 1)
    partials.store_sums(sums, at, partials_ptr, request, CALL)
    # What each thread holds of these is added up once, after all blocks.
    w_mass = fours(weights)
    p_mass = w_mass
    q_mass = w_mass
    if CALL.given_probs:
        p_mass = fours(p)
        if CALL.residual is not None:  # else nobody reads the draft's row
            q_mass = fours(q)
    return w_mass, p_mass, q_mass


@triton.jit
def finish(stop, length, passed, row, grid, count, fault, request, partials_ptr, found, out, CALL: tl.constexpr):
    """Draw one request's token, write its result, and leave the counters as they were.

    `found` is what programs found of the row; nothing where none is weighed.
    """
    kind = results.kind_of(stop, length, request, CALL)
    # On its way while the token is found.
    lane = tl.arange(0, results.WRITTEN)
    ids = positions.tokens_at(request, lane, lane < stop, -1)
    argmax = laws.argmax_at(stop, kind.takes_best, row.target_law, request, CALL)
    if not CALL.weighs:
        token = argmax.to(tl.int64)
        row_fault = laws.status_of(row.target_law, CALL)
        if CALL.draws:
            if not kind.known:
                bits = random.bits_of(request, CALL)
                if CALL.sums_weights:
                    token = draw.by_sums(stop, bits, request, CALL)
                else:
                    token, row_fault = draw.by_law(stop, kind.is_bonus, row, bits, request, CALL)
    elif CALL.lists:
        if found.number < 0:
            sums = partials.load_sums(partials_ptr, grid, request, CALL)
            token, row_fault = choose(stop, kind, row, argmax, grid, request, partials_ptr, sums, CALL)
        else:
            token, row_fault = listed.draw_listed(kind, row, found, random.bits_of(request, CALL), request, CALL)
    else:
        token, row_fault = choose(stop, kind, row, argmax, grid, request, partials_ptr, found, CALL)
    if CALL.mixes_draws:
        if not (kind.known | kind.weighed):
            token, row_fault = draw.by_law(stop, kind.is_bonus, row, random.bits_of(request, CALL), request, CALL)
    if CALL.has_bonus:
        # In the ragged layout, a placeholder that ends the chain early has a row of its own, not the bonus token's.
        if stop == (count if CALL.ragged else length):
            token = tl.load(request.bonus_ptr).to(tl.int64)
            row_fault = tl.where((token >= 0) & (token < request.vocab_size), 0, INVALID_TOKEN_ID)
    sound = (token >= 0) & (token < request.vocab_size)
    x = rows.load(request.target, stop, token, sound, 0.0, CALL, TARGET)
    p = laws.prob_of(x, token, sound, request.target, row.target_law, CALL, TARGET)
    fault = results.fault_of(kind, row, row_fault, fault, request, CALL)
    leaves = stop < 0  # never
    results.write(stop, ids, token, p, fault, leaves, request, out, CALL)
    results.close(stop, passed, fault, request, out, CALL)


@triton.jit
def choose(stop, kind, row, argmax, grid, request, partials_ptr, sums, CALL: tl.constexpr):
    """Return the token at the stopping row, given the target's argmax there, and the row's `Status`."""
    target_law, num_blocks = row.target_law, grid.num_blocks
    token = tl.full((), 0, tl.int64) + argmax
    row_fault = laws.status_of(target_law, CALL)
    if not kind.idle:
        is_bonus = kind.is_bonus
        num_parts = num_blocks * CALL.sum_parts
        bits = random.bits_of(request, CALL)
        parts = partials.in_lanes(sums.parts, CALL.part_lanes)
        from_target = is_bonus
        mass = tl.full((), 1.0, tl.float32)
        if CALL.holds:
            if not sums.sure:
                parts, mass = weigh_again(parts, num_parts, stop, from_target, row, is_bonus == 0, request, CALL)
        total, ends = partials.total_and_ends(parts)
        if CALL.residual is not None:
            if (total == 0) & (is_bonus == 0):
                # Nothing is left of the residual: draw from p, whose partial sums nobody has taken yet.
                from_target = is_bonus == 0
                parts, _ = weigh_again(parts, num_parts, stop, from_target, row, is_bonus == 0, request, CALL)
                total, ends = partials.total_and_ends(parts)
        # Draw: the first entry whose running sum exceeds r.
        r = random.multiply_high(bits, total)
        found, taken = partials.part_at(ends, r, num_parts)
        if CALL.residual is not None and CALL.recovered == "argmax":
            index = tl.arange(0, CALL.max_emit_blocks * CALL.emit_parts)
            largest_ptr = partials.largest_in(partials_ptr, num_blocks, CALL)
            largest = tl.load(largest_ptr + index, mask=index < num_parts, other=-1.0, cache_modifier=".cg")
            most = tl.max(largest, 0)
            if kind.takes_best:
                found = tl.min(tl.where((largest == most) & (index < num_parts), index, num_parts - 1), 0)
        entries = rows.entries_from(found * CALL.sum_part, CALL.sum_part)
        raw = load_rows(entries, stop, is_bonus == 0, request, CALL)
        # While the part is on its way: are the rows' masses sound?
        if CALL.holds:
            w_mass = mass
        else:
            w_mass, p_mass, q_mass = partials.total_masses(sums, grid, request, CALL)
        # A total of weights that are too large wraps around, possibly to 0: the sum in floats tells.
        invalid = ((total == 0) & ((w_mass > 0) == 0)) | (target_law.maximum != target_law.maximum)
        unnormalized = (w_mass <= MASS_LIMIT) == 0
        if CALL.given_probs:
            unnormalized = unnormalized | (tl.abs(p_mass - 1) > ROW_TOLERANCE)
            if CALL.residual is not None:
                unnormalized = unnormalized | (q_mass > 1 + ROW_TOLERANCE)
            invalid = invalid | ((tl.abs(p_mass) < float("inf")) == 0)
        row_fault = tl.where(invalid, INVALID_ROW, tl.where(unnormalized, UNNORMALIZED_ROW, 0))
        weights, _, _ = draw.weigh(raw, from_target, row, request, CALL)
        token = found.to(tl.int64) * CALL.sum_part + tl.sum(
            (running(weights, CALL.in_fours) <= r - taken).to(tl.int32), 0
        )
        if CALL.residual is not None and CALL.recovered == "argmax":
            if kind.takes_best:
                best = tl.min(tl.where(weights == most, raw.entry, LARGEST_INT32), 0)
                token = tl.where(from_target, argmax, best).to(tl.int64)
    return tl.where(kind.known, argmax, tl.minimum(token, request.vocab_size - 1)), row_fault


@triton.jit
def weigh_again(parts, num_parts, stop, from_target, row, has_draft, request, CALL: tl.constexpr):
    """Weigh a row again; return the sums of its parts, `partials.in_lanes`, and its mass where `CALL.holds`."""
    mass = tl.full((), 0.0, tl.float32)
    for number in range(num_parts):
        entries = rows.entries_from(number * CALL.sum_part, CALL.sum_part)
        raw = load_rows(entries, stop, has_draft, request, CALL)
        weights, _, _ = draw.weigh(raw, from_target, row, request, CALL)
        parts = partials.with_part(parts, number, tl.sum(fixed_fours(weights, CALL.in_fours), 0))
        if CALL.holds:
            mass += tl.sum(weights, 0)
    return parts, mass
