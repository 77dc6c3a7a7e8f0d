"""The last stage: one draw a request at its stopping row, and the result.

Every program reduces some blocks of the row's weights, each to one integer for every part of it. A request's last
program to arrive scans these sums, searches one part, and writes the result.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import decide, random, reduce, rows
from acceptlib.engine.triton.binding import call
from acceptlib.engine.triton.rows import TARGET

WRITTEN = tl.constexpr(64)
"""Positions written at a time."""


@triton.jit
def emit(
    program,
    num_programs,
    num_blocks,
    count,
    fault,
    request,
    target,
    draft,
    partials_ptr,  # the request's: [num_parts] int64, [num_parts] and [3, num_programs] float32
    counters,
    out,
    offsets_ptr,
    emit_ptr,
    bonus_ptr,
    most,  # K
    CALL: tl.constexpr,
):
    """Reduce some blocks of one request's stopping row, and finish the request if the last to do so."""
    stop_ptr, arrived_ptr, rows_arrived_ptr, num_rows_arrived = counters
    if CALL.decided:
        code = tl.load(stop_ptr, cache_modifier=".cg")
        length = decide.length_of(request, count)
        stop = tl.minimum(tl.where(code == 0, length, decide.coded(code)), length)
        passed = length
    else:
        stop, length, passed = decide.first_rejection(count, request, target, draft, CALL)
    is_bonus = stop == length
    lane = tl.arange(0, WRITTEN)
    # The first block is on its way before the row's law is known, and each next one before this one is weighed.
    raw = reduce.load_block(program, stop, stop < length, request, target, draft, CALL.emit_block, CALL)
    row = reduce.open_row(stop, length, request, target, draft, CALL)
    takes_best = (is_bonus & (CALL.bonus == "argmax")) | ((stop < length) & (CALL.recovered == "argmax"))
    known = takes_best
    if CALL.residual is not None:
        known = takes_best & is_bonus
    # The argmax of a row of the target is in its law: nothing is left to reduce, but to check sums.
    idle = known
    if CALL.given_probs and CALL.draws:
        idle = known & (stop < 0)
    num_parts = num_blocks * CALL.emit_parts
    largest_ptr = (partials_ptr + num_parts).to(tl.pointer_type(tl.float32))
    masses_ptr = largest_ptr + num_parts
    partials = (partials_ptr, largest_ptr, masses_ptr)
    w_mass = tl.arange(0, CALL.emit_parts) * 0.0
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
        tl.store(masses_ptr + program, tl.sum(w_mass, 0))
        if CALL.given_probs:
            tl.store(masses_ptr + num_programs + program, tl.sum(p_mass, 0))
            tl.store(masses_ptr + 2 * num_programs + program, tl.sum(q_mass, 0))
    if reduce.arrive(arrived_ptr, num_programs):
        # On its way while the token is found.
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
            num_blocks,
            num_programs,
            emit_ptr,
            CALL,
        )
        if CALL.has_bonus:
            # In the ragged layout a placeholder that ended the chain before its count has its own row.
            if stop == (count if CALL.ragged else length):
                token = tl.load(bonus_ptr).to(tl.int64)
                row_fault = tl.where((token >= 0) & (token < request[1]), 0, 3)
        if not is_bonus:
            # A fault of the whole request comes first, then one of the drafted token at the stop, then the row's.
            own = decide.token_fault(row[0], row[1][0], row[2], request[1], CALL)
            row_fault = tl.where(own == 0, row_fault, own)
        fault = tl.where(fault == 0, row_fault, fault)
        write(stop, ids, token, p, fault, request, target, out, most, CALL)
        if CALL.counts_passed:
            if CALL.decided:
                _, _, passed = decide.first_rejection(count, request, target, draft, CALL)
            tl.store(out[5], passed)
        if not CALL.explicit:
            tl.store(offsets_ptr, request[4][3] + 1)
        tl.store(arrived_ptr, 0)
        tl.store(stop_ptr, 0)
        if CALL.counts_rows:
            for base in range(0, num_rows_arrived, 64):
                index = base + tl.arange(0, 64)
                tl.store(rows_arrived_ptr + index, 0, mask=index < num_rows_arrived)


@triton.jit
def reduce_block(block, raw, from_target, row, request, target, draft, partials, CALL: tl.constexpr):
    """Store what the draw needs of a loaded block; return the sums of the draw's weights, p and q, [PARTS]."""
    partials_ptr, largest_ptr, _ = partials
    _, p, q, weights = weigh(raw, from_target, row, request, target, draft, CALL)
    at = block * CALL.emit_parts + tl.arange(0, CALL.emit_parts)
    shape: tl.constexpr = (CALL.emit_parts, CALL.emit_part)
    if CALL.recovered == "argmax":
        tl.store(largest_ptr + at, tl.max(tl.reshape(weights, shape), 1))
    terms = (tl.reshape(rows.fixed(weights), shape), tl.reshape(weights, shape))
    if CALL.given_probs:
        total, w_mass, p_mass, q_mass = tl.reduce(
            (terms[0], terms[1], tl.reshape(p, shape), tl.reshape(q, shape)), 1, _add_four
        )
    else:
        total, w_mass = tl.reduce(terms, 1, _add_two)
        p_mass = w_mass
        q_mass = w_mass
    tl.store(partials_ptr + at, total)
    return w_mass, p_mass, q_mass


@triton.jit
def weigh(raw, from_target, row, request, target, draft, CALL: tl.constexpr):
    """Return entry numbers, p, q and the draw's weights of a loaded block, [BLOCK]."""
    entry, p, q, is_drafted = reduce.elements(raw, row, target, draft, CALL)
    weights = p
    if CALL.residual is not None:
        numbers = (p, q, is_drafted) + reduce.as_rows(row[1])  # noqa: RUF005 - what Triton compiles
        weights = tl.where(from_target, p, call(CALL.residual, numbers, tl.float32))
    return entry, p, q, tl.where((weights > 0) & (entry < request[1]), weights, 0.0)


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
    num_programs,
    emit_ptr,
    CALL: tl.constexpr,
):
    """Return the token at the stopping row, the row's `Status`, and the token's probability."""
    target_law = row[2]
    token = tl.full((), 0, tl.int64) + target_law[2]
    row_fault = tl.where(target_law[0] == target_law[0], 0, 1)
    if not idle:
        partials_ptr, largest_ptr, masses_ptr = partials
        index = tl.arange(0, CALL.max_emit_blocks * CALL.emit_parts)
        used = index < num_blocks * CALL.emit_parts
        sums = tl.load(partials_ptr + index, mask=used, other=0, cache_modifier=".cg")
        total = tl.sum(sums, 0)
        from_target = is_bonus
        if CALL.residual is not None:
            if (total == 0) & (is_bonus == 0):
                # Nothing is left of the residual: draw from p, whose partial sums nobody has taken yet.
                from_target = is_bonus == 0
                for number in range(num_blocks * CALL.emit_parts):
                    raw = reduce.load_block(number, stop, is_bonus == 0, request, target, draft, CALL.emit_part, CALL)
                    _, _, _, weights = weigh(raw, from_target, row, request, target, draft, CALL)
                    sums = tl.where(index == number, tl.sum(rows.fixed(weights), 0), sums)
                total = tl.sum(sums, 0)
        place = tl.arange(0, CALL.max_emit_blocks)
        arrived = place < num_programs
        w_masses = tl.load(masses_ptr + place, mask=arrived, other=0.0, cache_modifier=".cg")
        if CALL.given_probs:
            p_masses = tl.load(masses_ptr + num_programs + place, mask=arrived, other=0.0, cache_modifier=".cg")
            q_masses = tl.load(masses_ptr + 2 * num_programs + place, mask=arrived, other=0.0, cache_modifier=".cg")
            w_mass, p_mass, q_mass = tl.reduce((w_masses, p_masses, q_masses), 0, _add_three)
        else:
            w_mass = tl.sum(w_masses, 0)
        # A total of weights too large wraps around, to 0 even: the sum in floats tells.
        invalid = ((total == 0) & ((w_mass > 0) == 0)) | (target_law[0] != target_law[0])
        unnormalized = w_mass > 4
        if CALL.given_probs:
            unnormalized = unnormalized | (tl.abs(p_mass - 1) > 1 / 64) | (q_mass > 1 + 1 / 64)
            invalid = invalid | ((p_mass < float("inf")) == 0)
        row_fault = tl.where(invalid, 1, tl.where(unnormalized, 2, 0))

        # Draw: the first entry whose running sum exceeds r.
        if CALL.explicit:
            bits = tl.load(emit_ptr).to(tl.uint64, bitcast=True)
        else:
            bits = random.bits(request[4][2], request[4][3])
        r = tl.umulhi(bits, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
        ends = tl.cumsum(sums, 0)
        below = (ends <= r) & used
        found, taken = tl.reduce((below.to(tl.int32), tl.where(below, ends, 0)), 0, _count_and_largest)
        found = tl.minimum(found, num_blocks * CALL.emit_parts - 1)
        if CALL.residual is not None and CALL.recovered == "argmax":
            largest = tl.load(largest_ptr + index, mask=used, other=-1.0, cache_modifier=".cg")
            most = tl.max(largest, 0)
            if takes_best:
                found = tl.min(tl.where((largest == most) & used, index, num_blocks * CALL.emit_parts - 1), 0)
        raw = reduce.load_block(found, stop, is_bonus == 0, request, target, draft, CALL.emit_part, CALL)
        entry, _, _, weights = weigh(raw, from_target, row, request, target, draft, CALL)
        token = found.to(tl.int64) * CALL.emit_part + tl.sum(
            (tl.cumsum(rows.fixed(weights), 0) <= r - taken).to(tl.int32), 0
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
def _add_two(a, b, c, d):
    """Add two pairs."""
    return a + c, b + d


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    """Add two quadruples."""
    return a + e, b + f, c + g, d + h


@triton.jit
def _add_three(a, b, c, d, e, f):
    """Add two triples."""
    return a + d, b + e, c + f


@triton.jit
def _count_and_largest(a, b, c, d):
    """Add the first, and take the larger of the second."""
    return a + c, tl.maximum(b, d)
