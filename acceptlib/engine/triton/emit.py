"""The last stage: one draw a request at its stopping row, and the result.

Every program reduces some blocks of the row's weights to one integer each. A request's last program to arrive scans
these partial sums, searches one block, and writes the result.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import decide, random, reduce, rows
from acceptlib.engine.triton.binding import call
from acceptlib.engine.triton.rows import TARGET


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
    partials_ptr,  # the request's: [num_blocks] int64, [4, num_blocks] float32
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
    # The first block is on its way before the row's law is known, and each next one before this one is weighed.
    raw = reduce.load_block(program, stop, stop < length, request, target, draft, CALL.emit_block, CALL)
    row = reduce.open_row(stop, length, request, target, draft, CALL)
    takes_best = (is_bonus & (CALL.bonus == "argmax")) | ((stop < length) & (CALL.recovered == "argmax"))
    known = takes_best
    if CALL.residual is not None:
        known = takes_best & is_bonus
    masses_ptr = (partials_ptr + num_blocks).to(tl.pointer_type(tl.float32))
    largest_ptr = masses_ptr + 3 * num_blocks
    # The argmax of a row of the target is in its law: nothing is left to reduce.
    for block in range(program, tl.where(known, 0, num_blocks), num_programs):
        following = reduce.load_block(
            block + num_programs, stop, stop < length, request, target, draft, CALL.emit_block, CALL
        )
        _, p, q, weights = weigh(raw, is_bonus, row, request, target, draft, CALL)
        raw = following
        if CALL.recovered == "argmax":
            tl.store(largest_ptr + block, tl.max(weights, 0))
        if CALL.given_probs:
            total, w_mass, p_mass, q_mass = tl.reduce((rows.fixed(weights), weights, p, q), 0, _add_four)
            tl.store(masses_ptr + num_blocks + block, p_mass)
            tl.store(masses_ptr + 2 * num_blocks + block, q_mass)
        else:
            total, w_mass = tl.reduce((rows.fixed(weights), weights), 0, _add_two)
        tl.store(partials_ptr + block, total)
        tl.store(masses_ptr + block, w_mass)
    if reduce.arrive(arrived_ptr, num_programs):
        token, row_fault, p = choose(
            stop, is_bonus, takes_best, known, row, request, target, draft, partials_ptr, num_blocks, emit_ptr, CALL
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
        write(stop, token, p, fault, request, target, out, most, CALL)
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
def mass(masses_ptr, num_blocks, CALL: tl.constexpr):
    """Return a sum over the row from those of its blocks."""
    index = tl.arange(0, CALL.max_emit_blocks)
    return tl.sum(tl.load(masses_ptr + index, mask=index < num_blocks, other=0.0, cache_modifier=".cg"), 0)


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
    row,
    request,
    target,
    draft,
    partials_ptr,
    num_blocks,
    emit_ptr,
    CALL: tl.constexpr,
):
    """Return the token at the stopping row, the row's `Status`, and the token's probability."""
    target_law = row[2]
    token = tl.full((), 0, tl.int64) + target_law[2]
    row_fault = tl.where(target_law[0] == target_law[0], 0, 1)
    if not known:
        masses_ptr = (partials_ptr + num_blocks).to(tl.pointer_type(tl.float32))
        index = tl.arange(0, CALL.max_emit_blocks)
        used = index < num_blocks
        sums = tl.load(partials_ptr + index, mask=used, other=0, cache_modifier=".cg")
        total = tl.sum(sums, 0)
        from_target = is_bonus
        if CALL.residual is not None:
            if (total == 0) & (is_bonus == 0):
                # Nothing is left of the residual: draw from p, whose partial sums nobody has taken yet.
                from_target = is_bonus == 0
                for b in range(num_blocks):
                    raw = reduce.load_block(b, stop, is_bonus == 0, request, target, draft, CALL.emit_block, CALL)
                    _, _, _, weights = weigh(raw, from_target, row, request, target, draft, CALL)
                    sums = tl.where(index == b, tl.sum(rows.fixed(weights), 0), sums)
                total = tl.sum(sums, 0)
        w_mass = mass(masses_ptr, num_blocks, CALL)
        # A total of weights too large wraps around, to 0 even: the sum in floats tells.
        invalid = ((total == 0) & ((w_mass > 0) == 0)) | (target_law[0] != target_law[0])
        unnormalized = w_mass > 4
        if CALL.given_probs:
            p_mass = mass(masses_ptr + num_blocks, num_blocks, CALL)
            q_mass = mass(masses_ptr + 2 * num_blocks, num_blocks, CALL)
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
        found = tl.minimum(tl.sum(((ends <= r) & used).to(tl.int32), 0), num_blocks - 1)
        rest = r - tl.sum(tl.where(index < found, sums, 0), 0)
        if CALL.residual is not None and CALL.recovered == "argmax":
            largest = tl.load(masses_ptr + 3 * num_blocks + index, mask=used, other=-1.0, cache_modifier=".cg")
            most = tl.max(largest, 0)
            if takes_best:
                found = tl.min(tl.where(largest == most, index, num_blocks - 1), 0)
        raw = reduce.load_block(found, stop, is_bonus == 0, request, target, draft, CALL.emit_block, CALL)
        entry, _, _, weights = weigh(raw, from_target, row, request, target, draft, CALL)
        token = found.to(tl.int64) * CALL.emit_block + tl.sum(
            (tl.cumsum(rows.fixed(weights), 0) <= rest).to(tl.int32), 0
        )
        if CALL.residual is not None and CALL.recovered == "argmax":
            if takes_best:
                best = tl.min(tl.where(weights == most, entry, 2147483647), 0)
                token = tl.where(from_target, target_law[2], best).to(tl.int64)
    token = tl.minimum(token, request[1] - 1)
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
def write(stop, token, p, fault, request, target, out, most, CALL: tl.constexpr):
    """Write one request's result."""
    token_ids_ptr, num_accepted_ptr, num_emitted_ptr, status_ptr, logprobs_ptr, _, raw_logprobs_ptr = out
    # A fault of the whole request, found before any decision, keeps nothing.
    lane = tl.arange(0, 64)
    for base in range(0, most + 1, 64):
        position = base + lane
        ids = decide.tokens_at(request, position, position < stop, -1)
        ids = tl.where((position == stop) & (fault == 0), token, ids)
        tl.store(token_ids_ptr + position, ids.to(tl.int32), mask=position <= most)
    if CALL.logprobs:
        for base in range(0, most + 1, decide.LANES):
            position = base + tl.arange(0, decide.LANES)
            accepted = position < stop
            ids = decide.tokens_at(request, position, accepted, 0)
            law = rows.law(target, rows.load_parts(target, position, accepted, request[2], CALL, TARGET), CALL, TARGET)
            entries = rows.load(target, position, ids, accepted, 0.0, CALL, TARGET)
            probs = rows.prob_of(entries, ids, accepted, target, law, CALL, TARGET)
            probs = tl.where(position == stop, tl.where(fault == 0, p, float("nan")), probs)
            logs = tl.where(position <= stop, tl.log(probs), float("nan"))
            tl.store(logprobs_ptr + position, logs.to(tl.float32), mask=position <= most)
            if CALL.raw:
                emitted = accepted | (position == tl.where(fault == 0, stop, -1))
                ids = tl.where(accepted, ids, token)
                entries = rows.load_raw(target, position, ids, emitted, 0.0, CALL)
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
