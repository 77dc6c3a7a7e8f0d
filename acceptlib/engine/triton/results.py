"""One request's result: what is emitted, what of it is at fault, and where it is written."""

# ruff: noqa: N803 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import counters, laws, positions, rows
from acceptlib.engine.triton.rows import KEEP, TARGET

WRITTEN = tl.constexpr(64)
"""Positions written at a time."""


class Out(NamedTuple):
    """Where one request's result goes, and its stream's offset."""

    token_ids_ptr: tl.tensor
    logprobs_ptr: tl.tensor
    raw_logprobs_ptr: tl.tensor
    num_accepted_ptr: tl.tensor
    num_emitted_ptr: tl.tensor
    status_ptr: tl.tensor
    num_passed_ptr: tl.tensor
    totals_ptr: tl.tensor
    offset_ptr: tl.tensor


class Kind(NamedTuple):
    """What is emitted at a row.

    Attributes:
        is_bonus: Whether it is the bonus row.
        takes_best: Whether an argmax is taken.
        known: Whether that is the argmax of the target's row, which its law holds.
        weighed: Whether it is drawn by weights; where it is neither this nor known, the row's law tells what is drawn.
        idle: Whether no block has to be weighed.
    """

    is_bonus: tl.tensor
    takes_best: tl.tensor
    known: tl.tensor
    weighed: tl.tensor
    idle: tl.tensor


@triton.jit
def kind_of(stop, length, request, CALL: tl.constexpr):
    """Return what is emitted at a row."""
    is_bonus = stop == length
    takes_best = (is_bonus & (CALL.bonus == "argmax")) | ((stop < length) & (CALL.recovered == "argmax"))
    known = takes_best
    if CALL.residual is not None:
        known = takes_best & is_bonus
    weighed = known == 0
    # The argmax of a row of the target is in its law: nothing is left to reduce, unless sums are checked or waited for.
    idle = known
    if CALL.mixes_draws:
        weighed = weighed & rows.is_filtered(request.target, CALL, TARGET)
        idle = weighed == 0
    if (CALL.given_probs and CALL.draws) or CALL.awaits:
        idle = known & (stop < 0)  # never
    return Kind(is_bonus, takes_best, known, weighed, idle)


@triton.jit
def fault_of(kind, row, row_fault, fault, request, CALL: tl.constexpr):
    """Return a request's `Status`: that of the whole, else of the drafted token at the stop, else of the row."""
    if not (kind.is_bonus or CALL.finds_faults):
        own = positions.token_fault(row.token, row.scalars[0], row.target_law, request.vocab_size, CALL)
        row_fault = tl.where(own == 0, row_fault, own)
    return tl.where(fault == 0, row_fault, fault)


@triton.jit
def write(stop, ids, token, p, fault, leaves, request, out, CALL: tl.constexpr):
    """Write one request's result; `ids` are the drafted tokens of its first `WRITTEN` positions.

    The token at the stop is left to another program if this one `leaves` it.
    """
    target = request.target
    for base in range(0, request.most + 1, WRITTEN):
        place = base + tl.arange(0, WRITTEN)
        if base > 0:
            ids = positions.tokens_at(request, place, place < stop, -1)
        found = tl.where((place == stop) & (fault == 0), token, ids)
        own = place <= request.most
        if CALL.draws_held:
            own = own & (place != tl.where(leaves, stop, -1))
        tl.store(out.token_ids_ptr + place, found.to(out.token_ids_ptr.dtype.element_ty), mask=own)
    if CALL.logprobs:
        for base in range(0, request.most + 1, positions.LANES):
            position = base + tl.arange(0, positions.LANES)
            accepted = position < stop
            tokens = positions.tokens_at(request, position, accepted, 0)
            parts = laws.load_parts(target, position, accepted, CALL, TARGET)
            entries = rows.load(target, position, tokens, accepted, 0.0, CALL, TARGET)
            law = laws.one(target, parts, CALL, TARGET)
            probs = laws.prob_of(entries, tokens, accepted, target, law, CALL, TARGET)
            probs = tl.where(position == stop, tl.where(fault == 0, p, float("nan")), probs)
            logs = tl.where(position <= stop, tl.log(probs), float("nan"))
            tl.store(out.logprobs_ptr + position, logs.to(tl.float32), mask=position <= request.most)
            if CALL.raw:
                emitted = accepted | (position == tl.where(fault == 0, stop, -1))
                tokens = tl.where(accepted, tokens, token)
                entries = rows.load_raw(target, position, tokens, emitted, 0.0, KEEP, CALL)
                logs = laws.raw_logs(entries, target, position, emitted, CALL)
                logs = tl.where(emitted & (probs == probs), logs, float("nan"))
                tl.store(out.raw_logprobs_ptr + position, logs.to(tl.float32), mask=position <= request.most)
    tl.store(out.num_accepted_ptr, stop)
    tl.store(out.num_emitted_ptr, stop + (fault == 0).to(tl.int32))
    tl.store(out.status_ptr, fault.to(tl.int8))


@triton.jit
def close(stop, passed, fault, request, out, CALL: tl.constexpr):
    """Count what passed where that is asked for, advance the stream, and leave the counters as they were."""
    if CALL.counts_passed:
        if CALL.mass_scalar >= 0 or not CALL.decided:
            tl.store(out.num_passed_ptr, passed)
        elif CALL.adds_up:
            passed = tl.load(out.num_passed_ptr, cache_modifier=".cg")  # the stage that decides stored it
    if CALL.adds_up:
        tl.atomic_add(out.totals_ptr, passed.to(tl.int64), sem="relaxed")
        tl.atomic_add(out.totals_ptr + 1, (stop + (fault == 0).to(tl.int32)).to(tl.int64), sem="relaxed")
    if CALL.advances:
        # A stage that still runs may decide rows beyond the stop by the new offset: nothing hangs on them.
        tl.store(out.offset_ptr, request.stream.offset + 1)
    if CALL.counts_programs:
        tl.debug_barrier()  # every warp has read them
        if CALL.settles:
            if CALL.overlaps:
                tl.extra.cuda.gdc_wait()  # programs of rows beyond the stop may still use them
            tl.store(request.counters.awaited_ptr, 0)
        tl.store(request.counters.arrived_ptr, 0)
        tl.store(request.counters.stop_ptr, 0)
    if CALL.lazy or CALL.mass_scalar >= 0:  # else no stage counts the programs that are done with a row
        counters.clear(request.counters.rows_ptr, (request.most + 1) * counters.ROW_COUNTS)
