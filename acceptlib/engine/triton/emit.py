"""The last stage: one draw a request at its stopping row, and the result.

Every program reduces some blocks of the row's weights, each to one integer for every part of it. A request's last
program to arrive scans these sums, searches one part, and writes the result.

The weights of a draw add up to the residual's mass. Where that decides, programs reduce every row that may be stopped
at, from the last to the first, and a row's last program to arrive decides the position before it.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import decide, random, reduce, rows
from acceptlib.engine.triton.binding import call
from acceptlib.engine.triton.rows import TARGET
from acceptlib.engine.triton.sums import WEIGHT_SCALE, add_three, fixed, fours

WRITTEN = tl.constexpr(64)
"""Positions written at a time."""


@triton.jit
def emit(
    grid,  # program, num_programs, num_blocks
    count,
    fetched,  # what `decide.fetch_first` returned, if the decision is made here
    fault,
    request,
    target,
    draft,
    prepared_ptr,
    partials_ptr,  # of a row: [num_parts] int64, [num_parts] and [3, num_programs] float32
    counters,
    out,
    ends,
    most,  # K
    CALL: tl.constexpr,
):
    """Reduce some blocks of the row that one request stops at, or may, and finish the request if the last to do so."""
    stop_ptr, arrived_ptr, _, _ = counters
    if CALL.mass_scalar >= 0:
        length = decide.length_of(request, count)
        if CALL.decided:
            wanted = (tl.load(prepared_ptr).to(tl.int32), tl.load(prepared_ptr + 1).to(tl.int32))
            wanted += (tl.load(prepared_ptr + 2),)
        else:
            wanted = decide.prepare(count, fetched, request, target, draft, CALL)
            tl.debug_barrier()
        weigh_wanted(wanted, length, grid, request, target, draft, partials_ptr, counters, CALL)
        # All arrive, those too that had nothing to read: the last one changes what they decide by.
        is_last = reduce.arrive(arrived_ptr, grid[1] * tl.num_programs(2))
    else:
        if CALL.decided:
            code = tl.load(stop_ptr, cache_modifier=".cg")
            length = decide.length_of(request, count)
            stop = tl.minimum(tl.where(code == 0, length, decide.coded(code)), length)
            passed = length
        else:
            stop, length, passed = decide.first_rejection(count, fetched, request, target, draft, CALL)
        row = weigh_row(stop, length, grid, request, target, draft, partials_ptr, CALL)
        is_last = reduce.arrive(arrived_ptr, grid[1])
    if is_last:
        if CALL.mass_scalar >= 0:
            passed = length
            if CALL.spares_masses:
                stop = wanted[0]
                if stop < wanted[1]:
                    stop = tl.maximum(stop, tl.load(stop_ptr, cache_modifier=".cg"))
            else:
                again = decide.fetch_first(count, request, target, draft, CALL)
                stop, passed = decide.find_stop(count, again, request, target, draft, CALL)
            partials_ptr = row_partials(stop, partials_ptr, grid, CALL)
        found = load_partials(partials_ptr, grid, CALL)
        if CALL.mass_scalar >= 0:
            row = reduce.open_row(stop, length, request, target, draft, CALL)
        finish(
            stop,
            length,
            passed,
            row,
            grid,
            count,
            fault,
            request,
            target,
            draft,
            (partials_ptr, found),
            counters,
            out,
            ends,
            most,
            CALL,
        )


@triton.jit
def load_partials(partials_ptr, grid, CALL: tl.constexpr):
    """Return the sums of a row's parts, int64, and the masses that programs found of the draw's weights, p and q."""
    _, num_programs, num_blocks = grid
    index = tl.arange(0, CALL.max_emit_blocks * CALL.emit_parts)
    num_parts = num_blocks * CALL.emit_parts
    sums = tl.load(partials_ptr + index, mask=index < num_parts, other=0, cache_modifier=".cg")
    place = tl.arange(0, CALL.max_emit_blocks)
    used = place < num_programs
    masses_ptr = (partials_ptr + num_parts).to(tl.pointer_type(tl.float32)) + num_parts + place
    w_masses = tl.load(masses_ptr, mask=used, other=0.0, cache_modifier=".cg")
    if CALL.given_probs:
        p_masses = tl.load(masses_ptr + num_programs, mask=used, other=0.0, cache_modifier=".cg")
        q_masses = tl.load(masses_ptr + 2 * num_programs, mask=used, other=0.0, cache_modifier=".cg")
    else:
        p_masses = w_masses
        q_masses = w_masses
    return sums, w_masses, p_masses, q_masses


@triton.jit
def row_partials(position, partials_ptr, grid, CALL: tl.constexpr):
    """Return where the partial results of one of a request's rows are."""
    return partials_ptr + position.to(tl.int64) * 2 * grid[2] * (1 + CALL.emit_parts)


@triton.jit
def weigh_wanted(wanted, length, grid, request, target, draft, partials_ptr, counters, CALL: tl.constexpr):
    """Reduce some blocks of the rows that `decide.prepare` found, and find a row's mass if the last to do so.

    Rows go from the last to the first, in turns to the programs of a block, for the last acceptance spares the rest.
    """
    stop_ptr, _, rows_arrived_ptr, num_rows_arrived = counters
    rows_arrived_ptr += 2 * (num_rows_arrived // 3)
    first, last, _ = wanted
    number = first * 0
    for i in range(first, last + 1):
        position = last + first - i
        if decide.may_matter(position, wanted):
            if number % tl.num_programs(2) == tl.program_id(2):
                sums_ptr = row_partials(position, partials_ptr, grid, CALL)
                if not accepted_beyond(position, number, stop_ptr, CALL):
                    weigh_row(position, length, grid, request, target, draft, sums_ptr, CALL)
                if (position > first) & (position < length):
                    if reduce.arrive(rows_arrived_ptr + position, grid[1]):
                        # None has left the row out unless a later one is accepted by now.
                        if not accepted_beyond(position, number, stop_ptr, CALL):
                            found = load_partials(sums_ptr, grid, CALL)
                            mass = tl.sum(found[0], 0).to(tl.float64) / WEIGHT_SCALE
                            if CALL.spares_masses:
                                if decide.accepts(position - 1, mass, length, request, target, draft, CALL):
                                    tl.atomic_max(stop_ptr, position)
                            else:
                                scalars_ptr, num_positions = request[5]
                                tl.store(scalars_ptr + CALL.mass_scalar * num_positions + position - 1, mass)
            number += 1


@triton.jit
def accepted_beyond(position, number, stop_ptr, CALL: tl.constexpr):
    """Return whether a row is spared, for a later one is accepted; `number` rows come before it."""
    found = number < 0
    if CALL.spares_rows:
        if number > 0:
            found = reduce.latest(stop_ptr) > position
    return found


@triton.jit
def kind_of(stop, length, CALL: tl.constexpr):
    """Return whether a row is the bonus row, its argmax is taken, that is known, and nothing is left to reduce."""
    is_bonus = stop == length
    takes_best = (is_bonus & (CALL.bonus == "argmax")) | ((stop < length) & (CALL.recovered == "argmax"))
    known = takes_best
    if CALL.residual is not None:
        known = takes_best & is_bonus
    # The argmax of a row of the target is in its law: nothing is left to reduce, but to check sums.
    idle = known
    if CALL.given_probs and CALL.draws:
        idle = known & (stop < 0)
    return is_bonus, takes_best, known, idle


@triton.jit
def weigh_row(stop, length, grid, request, target, draft, partials_ptr, CALL: tl.constexpr):
    """Store the partial results of some blocks of one row; return the row."""
    program, num_programs, num_blocks = grid
    # The first block is on its way before the row's law is known, and each next one before this one is weighed.
    raw = reduce.load_block(program, stop, stop < length, request, target, draft, CALL.emit_block, CALL)
    row = reduce.open_row(stop, length, request, target, draft, CALL)
    is_bonus, _, _, idle = kind_of(stop, length, CALL)
    if CALL.mass_scalar >= 0:
        idle = idle & is_bonus
    num_parts = num_blocks * CALL.emit_parts
    largest_ptr = (partials_ptr + num_parts).to(tl.pointer_type(tl.float32))
    masses_ptr = largest_ptr + num_parts
    partials = (partials_ptr, largest_ptr, masses_ptr)
    w_mass = tl.zeros((CALL.emit_block // 4,), tl.float32)
    p_mass = w_mass
    q_mass = w_mass
    if CALL.loops:
        for block in range(program, tl.where(idle, 0, num_blocks), num_programs):
            following = reduce.load_block(
                block + num_programs, stop, stop < length, request, target, draft, CALL.emit_block, CALL
            )
            w, p, q = reduce_block(block, raw, is_bonus, row, request, target, draft, partials, CALL)
            raw = following
            w_mass += w
            p_mass += p
            q_mass += q
    elif not idle:
        w_mass, p_mass, q_mass = reduce_block(program, raw, is_bonus, row, request, target, draft, partials, CALL)
    if not idle:
        if CALL.given_probs:
            w_sum, p_sum, q_sum = tl.reduce((w_mass, p_mass, q_mass), 0, add_three)
            tl.store(masses_ptr + num_programs + program, p_sum)
            tl.store(masses_ptr + 2 * num_programs + program, q_sum)
        else:
            w_sum = tl.sum(w_mass, 0)
        tl.store(masses_ptr + program, w_sum)
    return row


@triton.jit
def finish(
    stop,
    length,
    passed,
    row,
    grid,
    count,
    fault,
    request,
    target,
    draft,
    partials,  # where a row's are, and what `load_partials` returned
    counters,
    out,
    ends,
    most,
    CALL: tl.constexpr,
):
    """Draw one request's token, write its result, and leave the counters as they were."""
    stop_ptr, arrived_ptr, rows_arrived_ptr, num_rows_arrived = counters
    offsets_ptr, emit_ptr, bonus_ptr = ends
    is_bonus, takes_best, known, idle = kind_of(stop, length, CALL)
    # On its way while the token is found.
    lane = tl.arange(0, WRITTEN)
    ids = decide.tokens_at(request, lane, lane < stop, -1)
    token, row_fault, p = choose(
        stop,
        is_bonus,
        takes_best,
        known,
        idle,
        row,
        request,
        target,
        draft,
        partials,
        grid[2],
        emit_ptr,
        CALL,
    )
    if CALL.has_bonus:
        # In the ragged layout a placeholder that ended the chain before its count has its own row.
        if stop == (count if CALL.ragged else length):
            token = tl.load(bonus_ptr).to(tl.int64)
            row_fault = tl.where((token >= 0) & (token < request[1]), 0, 3)
            if CALL.logprobs:
                x = rows.load(target, stop, token, row_fault == 0, 0.0, CALL, TARGET)
                p = rows.prob_of(x, token, row_fault == 0, target, row[2], CALL, TARGET)
    if not is_bonus:
        # A fault of the whole request comes first, then one of the drafted token at the stop, then the row's.
        own = decide.token_fault(row[0], row[1][0], row[2], request[1], CALL)
        row_fault = tl.where(own == 0, row_fault, own)
    fault = tl.where(fault == 0, row_fault, fault)
    write(stop, ids, token, p, fault, request, target, out, most, CALL)
    if CALL.counts_passed and (CALL.mass_scalar >= 0 or not CALL.decided):  # else the stage that decides stored it
        tl.store(out[5], passed)
    if not CALL.explicit:
        tl.store(offsets_ptr, request[4][3] + 1)
    tl.debug_barrier()  # every warp has read them
    tl.store(arrived_ptr, 0)
    tl.store(stop_ptr, 0)
    if CALL.counts_rows:
        for base in range(0, num_rows_arrived, 64):
            index = base + tl.arange(0, 64)
            tl.store(rows_arrived_ptr + index, 0, mask=index < num_rows_arrived)


@triton.jit
def reduce_block(block, raw, from_target, row, request, target, draft, partials, CALL: tl.constexpr):
    """Store what the draw needs of a loaded block; return sums of fours of the draw's weights, p and q, [BLOCK/4]."""
    partials_ptr, largest_ptr, _ = partials
    _, p, q, weights = weigh(raw, from_target, row, request, target, draft, CALL)
    at = block * CALL.emit_parts + tl.arange(0, CALL.emit_parts)
    shape: tl.constexpr = (CALL.emit_parts, CALL.emit_part)
    if CALL.recovered == "argmax":
        tl.store(largest_ptr + at, tl.max(tl.reshape(weights, shape), 1))
    finite = weights
    if CALL.mass_scalar >= 0:
        finite = tl.where(weights < float("inf"), weights, 0.0)
    tl.store(partials_ptr + at, tl.sum(tl.reshape(fixed(finite), shape), 1))
    # What threads hold is added up once for all blocks.
    w_mass = fours(weights)
    p_mass = w_mass
    q_mass = w_mass
    if CALL.given_probs:
        p_mass = fours(p)
        q_mass = fours(q)
    return w_mass, p_mass, q_mass


@triton.jit
def weigh(raw, from_target, row, request, target, draft, CALL: tl.constexpr):
    """Return entry numbers, p, q and the draw's weights of a loaded block, [BLOCK]."""
    entry, p, q, is_drafted = reduce.elements(raw, row, target, draft, CALL)
    weights = p
    if CALL.residual is not None:
        numbers = (p, q, is_drafted) + reduce.as_rows(row[1])  # noqa: RUF005 - what Triton compiles
        weights = tl.where(from_target, p, call(CALL.residual, numbers, tl.float32))
    # NaN stays, for the row's mass to tell.
    return entry, p, q, tl.where((weights <= 0) | (entry >= request[1]), 0.0, weights)


@triton.jit
def choose(
    stop,
    is_bonus,
    takes_best,
    known,
    idle,
    row,
    request,
    target,
    draft,
    partials,
    num_blocks,
    emit_ptr,
    CALL: tl.constexpr,
):
    """Return the token at the stopping row, the row's `Status`, and the token's probability."""
    target_law = row[2]
    token = tl.full((), 0, tl.int64) + target_law[2]
    row_fault = tl.where(target_law[0] == target_law[0], 0, 1)
    if not idle:
        partials_ptr, loaded = partials
        sums, w_masses, p_masses, q_masses = loaded
        index = tl.arange(0, CALL.max_emit_blocks * CALL.emit_parts)
        used = index < num_blocks * CALL.emit_parts
        if CALL.explicit:
            bits = tl.load(emit_ptr).to(tl.uint64, bitcast=True)
        else:
            bits = random.bits(request[4][2], request[4][3])
        total = tl.sum(sums, 0)
        from_target = is_bonus
        if CALL.residual is not None:
            if (total == 0) & (is_bonus == 0):
                # Nothing is left of the residual: draw from p, whose partial sums nobody has taken yet.
                from_target = is_bonus == 0
                for number in range(num_blocks * CALL.emit_parts):
                    raw = reduce.load_block(number, stop, is_bonus == 0, request, target, draft, CALL.emit_part, CALL)
                    _, _, _, weights = weigh(raw, from_target, row, request, target, draft, CALL)
                    sums = tl.where(index == number, tl.sum(fixed(weights), 0), sums)
                total = tl.sum(sums, 0)
        # Draw: the first entry whose running sum exceeds r.
        r = tl.umulhi(bits, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
        ends = tl.cumsum(sums, 0)
        below = (ends <= r) & used
        found, taken = tl.reduce((below.to(tl.int32), tl.where(below, ends, 0)), 0, _count_and_largest)
        found = tl.minimum(found, num_blocks * CALL.emit_parts - 1)
        if CALL.residual is not None and CALL.recovered == "argmax":
            largest_ptr = (partials_ptr + num_blocks * CALL.emit_parts).to(tl.pointer_type(tl.float32))
            largest = tl.load(largest_ptr + index, mask=used, other=-1.0, cache_modifier=".cg")
            most = tl.max(largest, 0)
            if takes_best:
                found = tl.min(tl.where((largest == most) & used, index, num_blocks * CALL.emit_parts - 1), 0)
        raw = reduce.load_block(found, stop, is_bonus == 0, request, target, draft, CALL.emit_part, CALL)
        # While the part is on its way: are the rows' masses sound?
        if CALL.given_probs:
            w_mass, p_mass, q_mass = tl.reduce((w_masses, p_masses, q_masses), 0, add_three)
        else:
            w_mass = tl.sum(w_masses, 0)
        # A total of weights too large wraps around, to 0 even: the sum in floats tells.
        invalid = ((total == 0) & ((w_mass > 0) == 0)) | (target_law[0] != target_law[0])
        unnormalized = (w_mass <= 4) == 0
        if CALL.given_probs:
            unnormalized = unnormalized | (tl.abs(p_mass - 1) > 1 / 64) | (q_mass > 1 + 1 / 64)
            invalid = invalid | ((p_mass < float("inf")) == 0)
        row_fault = tl.where(invalid, 1, tl.where(unnormalized, 2, 0))
        entry, _, _, weights = weigh(raw, from_target, row, request, target, draft, CALL)
        token = found.to(tl.int64) * CALL.emit_part + tl.sum(
            (tl.cumsum(fixed(weights), 0) <= r - taken).to(tl.int32), 0
        )
        if CALL.residual is not None and CALL.recovered == "argmax":
            if takes_best:
                best = tl.min(tl.where(weights == most, entry, 2147483647), 0)
                token = tl.where(from_target, target_law[2], best).to(tl.int64)
    token = tl.where(known, target_law[2], tl.minimum(token, request[1] - 1))
    p = rows.prob_of(
        rows.load(target, stop, token, token >= 0, 0.0, CALL, TARGET),
        token,
        token >= 0,
        target,
        target_law,
        CALL,
        TARGET,
    )
    return token, row_fault, p


@triton.jit
def write(stop, ids, token, p, fault, request, target, out, most, CALL: tl.constexpr):
    """Write one request's result; `ids` are the drafted tokens of its first `WRITTEN` positions."""
    token_ids_ptr, num_accepted_ptr, num_emitted_ptr, status_ptr, logprobs_ptr, _, raw_logprobs_ptr = out
    # A fault of the whole request, found before any decision, keeps nothing.
    for base in range(0, most + 1, WRITTEN):
        place = base + tl.arange(0, WRITTEN)
        if base > 0:
            ids = decide.tokens_at(request, place, place < stop, -1)
        found = tl.where((place == stop) & (fault == 0), token, ids)
        tl.store(token_ids_ptr + place, found.to(tl.int32), mask=place <= most)
    if CALL.logprobs:
        for base in range(0, most + 1, decide.LANES):
            position = base + tl.arange(0, decide.LANES)
            accepted = position < stop
            tokens = decide.tokens_at(request, position, accepted, 0)
            law = rows.law(target, rows.load_parts(target, position, accepted, request[2], CALL, TARGET), CALL, TARGET)
            entries = rows.load(target, position, tokens, accepted, 0.0, CALL, TARGET)
            probs = rows.prob_of(entries, tokens, accepted, target, law, CALL, TARGET)
            probs = tl.where(position == stop, tl.where(fault == 0, p, float("nan")), probs)
            logs = tl.where(position <= stop, tl.log(probs), float("nan"))
            tl.store(logprobs_ptr + position, logs.to(tl.float32), mask=position <= most)
            if CALL.raw:
                emitted = accepted | (position == tl.where(fault == 0, stop, -1))
                tokens = tl.where(accepted, tokens, token)
                entries = rows.load_raw(target, position, tokens, emitted, 0.0, CALL)
                logs = rows.raw_logs(entries, target, position, emitted, request[2], CALL)
                logs = tl.where(emitted & (probs == probs), logs, float("nan"))
                tl.store(raw_logprobs_ptr + position, logs.to(tl.float32), mask=position <= most)
    tl.store(num_accepted_ptr, stop)
    tl.store(num_emitted_ptr, stop + (fault == 0).to(tl.int32))
    tl.store(status_ptr, fault.to(tl.int8))


@triton.jit
def _count_and_largest(a, b, c, d):
    """Add the first, and take the larger of the second."""
    return a + c, tl.maximum(b, d)
