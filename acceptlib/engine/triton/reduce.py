"""Stages that go through whole rows, block by block, before the decision.

Programs are ordered by position, so that rows of later positions come last. Where a strategy stops at the first
rejection and there are rows enough, a row's last program decides its position, and programs of rows beyond the stop
leave: these rows are never read.
"""

# ruff: noqa: N803, N806, RET505, RUF005 - jit functions; their constants are in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import decide, rows
from acceptlib.engine.triton.binding import call
from acceptlib.engine.triton.rows import DRAFT, TARGET

ROW_SUM_SCALE = tl.constexpr(17592186044416.0)
"""2^44, as in the torch engine."""

NOWHERE = tl.constexpr(2147483647)

THREADS = tl.constexpr(256)
"""Threads of a program, at most."""


@triton.jit
def reduce_rows(position, count, block, request, target, draft, stop_ptr, arrived_ptr, CALL: tl.constexpr):
    """Find what the laws of the rows at one position need of one block; decide the position if the last to do so."""
    if needed(position, position <= count, stop_ptr, CALL):
        num_blocks = request[2]
        entry = block * CALL.block + tl.arange(0, CALL.block)
        # Both rows are on their way before either is reduced.
        x = rows.load(target, position, entry, position <= count, float("-inf"), CALL, TARGET)
        if CALL.has_draft and (CALL.logits[DRAFT] or CALL.best[DRAFT]):
            y = rows.load(draft, position, entry, position < count, float("-inf"), CALL, DRAFT)
            if not CALL.logits[DRAFT]:
                y = tl.where(y > 0, y, 0.0)  # NaN counts as 0
            rows.reduce_block(y, entry, draft, position, block, num_blocks, position < count, CALL, DRAFT)
        if CALL.logits[TARGET] or CALL.best[TARGET]:
            rows.reduce_block(x, entry, target, position, block, num_blocks, position <= count, CALL, TARGET)
        if CALL.raw:
            rows.reduce_raw(x, entry, target, position, block, num_blocks, position <= count, CALL)
        if CALL.lazy and not CALL.needs_sums:
            if arrive(arrived_ptr + position, num_blocks):
                settle(position, count, request, target, draft, stop_ptr, CALL)


@triton.jit
def sum_rows(position, count, block, request, target, draft, partials, stop_ptr, arrived_ptr, CALL: tl.constexpr):
    """Add up the strategy's row sums over one block; finish the row, and decide, if the last to do so."""
    if needed(position, position < count, stop_ptr, CALL):
        num_blocks = request[2]
        partials_ptr, size = partials
        partials_ptr += position.to(tl.int64) * num_blocks
        length = decide.length_of(request, count)
        raw = load_block(block, position, position < length, request, target, draft, CALL.block, CALL)
        row = open_row(position, length, request, target, draft, CALL)
        entry, p, q, is_drafted = elements(raw, row, target, draft, CALL)
        inside = entry < request[1]
        numbers = (p, q, is_drafted) + as_rows(row[1])
        for i in tl.static_range(len(CALL.sums)):
            terms = tl.where(inside, call(CALL.sums[i], numbers, tl.float32), 0.0)
            total = tl.sum((terms * ROW_SUM_SCALE).to(tl.int64), 0)
            tl.store(partials_ptr + i * size + block, total)
        left = tl.where(inside, p, -1.0)
        TOP_K: tl.constexpr = CALL.top_k
        for i in tl.static_range(TOP_K):
            largest = tl.max(left, 0)
            left = tl.where(entry == tl.min(tl.where(left == largest, entry, NOWHERE), 0), -1.0, left)
            bits = largest.to(tl.float64).to(tl.int64, bitcast=True)
            tl.store(partials_ptr + (len(CALL.sums) + i) * size + block, bits)
        if arrive(arrived_ptr + position, num_blocks):
            index = tl.arange(0, CALL.max_blocks)
            scalars_ptr, num_positions = request[5]
            scalars_ptr += CALL.sums_scalar * num_positions + position
            for i in tl.static_range(len(CALL.sums)):
                part = partials_ptr + i * size + index
                total = tl.sum(tl.load(part, mask=index < num_blocks, other=0, cache_modifier=".cg"), 0)
                tl.store(scalars_ptr + i * num_positions, total.to(tl.float64) / ROW_SUM_SCALE)
            if CALL.top_k:
                entropy = top_entropy(partials_ptr + len(CALL.sums) * size, size, num_blocks, CALL)
                tl.store(scalars_ptr + len(CALL.sums) * num_positions, entropy)
            if CALL.lazy:
                tl.debug_barrier()
                settle(position, count, request, target, draft, stop_ptr, CALL)


@triton.jit
def sum_residual(position, count, block, request, target, draft, partials, stop_ptr, arrived_ptr, CALL: tl.constexpr):
    """Add up the residual at one position over one block; store the mass for the position before, if the last.

    Only where that position is not decided yet, and no later one is accepted: the last acceptance is what counts.
    """
    scalars_ptr, num_positions = request[5]
    scalars_ptr += CALL.mass_scalar * num_positions + position - 1
    open_yet = (position > 0) & (position < count)
    if open_yet:
        open_yet = tl.load(scalars_ptr) == decide.WANTED
        if CALL.spares_masses:
            open_yet = open_yet & (latest(stop_ptr) < position)
    if open_yet:
        num_blocks = request[2]
        partials_ptr = partials[0] + position.to(tl.int64) * num_blocks
        length = decide.length_of(request, count)
        raw = load_block(block, position, position < length, request, target, draft, CALL.block, CALL)
        row = open_row(position, length, request, target, draft, CALL)
        entry, p, q, is_drafted = elements(raw, row, target, draft, CALL)
        weights = p
        if CALL.residual is not None:
            numbers = (p, q, is_drafted) + as_rows(row[1])
            weights = call(CALL.residual, numbers, tl.float32)
        weights = tl.where((weights > 0) & (weights < float("inf")) & (entry < request[1]), weights, 0.0)
        tl.store(partials_ptr + block, tl.sum(rows.fixed(weights), 0))
        if arrive(arrived_ptr + position, num_blocks):
            index = tl.arange(0, CALL.max_blocks)
            parts = tl.load(partials_ptr + index, mask=index < num_blocks, other=0, cache_modifier=".cg")
            tl.store(scalars_ptr, tl.sum(parts, 0).to(tl.float64) / rows.WEIGHT_SCALE)
            if CALL.spares_masses:
                tl.debug_barrier()
                before = tl.zeros((1,), tl.int32) + position - 1
                accepted, _, _ = decide.judge(before, length, request, target, draft, CALL)
                if tl.sum(accepted.to(tl.int32), 0) != 0:
                    tl.atomic_max(stop_ptr, position)


@triton.jit
def needed(position, exists, stop_ptr, CALL: tl.constexpr):
    """Return whether a row exists and is not beyond the stop."""
    if CALL.lazy:
        exists = exists & (latest(stop_ptr) + position <= decide.FAR)
    return exists


@triton.jit
def latest(counter_ptr):
    """Return what a counter that others raise holds now, alike for all warps: none may go another way than the rest."""
    seen = tl.load(counter_ptr + tl.zeros((THREADS,), tl.int32), volatile=True)
    return tl.max(seen, 0)


@triton.jit
def settle(position, count, request, target, draft, stop_ptr, CALL: tl.constexpr):
    """Lower the request's stop to this position if the drafted token is rejected."""
    length = decide.length_of(request, count)
    accepted, _, _ = decide.judge(tl.zeros((1,), tl.int32) + position, length, request, target, draft, CALL)
    if (position < count) & (tl.sum(accepted.to(tl.int32), 0) == 0):
        tl.atomic_max(stop_ptr, decide.coded(position))


@triton.jit
def arrive(counter_ptr, expected):
    """Return whether this program is the last of `expected` to arrive; what they stored before is visible to it."""
    last = expected == 1
    if expected > 1:
        tl.debug_barrier()
        last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == expected - 1
        tl.debug_barrier()
    return last


@triton.jit
def top_entropy(tops_ptr, size, num_blocks, CALL: tl.constexpr):
    """Return the entropy of the largest entries of a row, renormalised, from those of its blocks, in order."""
    TOP_K: tl.constexpr = CALL.top_k
    index = tl.arange(0, CALL.max_blocks)
    taken = index * 0
    total = tl.full((), 0.0, tl.float64)
    logs = tl.full((), 0.0, tl.float64)
    for _ in tl.static_range(TOP_K):
        mask = (index < num_blocks) & (taken < CALL.top_k)
        bits = tl.load(tops_ptr + taken * size + index, mask=mask, other=0, cache_modifier=".cg")
        heads = tl.where(mask, bits.to(tl.float64, bitcast=True), -1.0)
        largest = tl.max(heads, 0)
        taken += (index == tl.min(tl.where(heads == largest, index, NOWHERE), 0)).to(tl.int32)
        largest = tl.maximum(largest, 0.0)
        total += largest
        logs += tl.where(largest > 0, largest * tl.log(tl.where(largest > 0, largest, 1.0)), 0.0)
    return tl.log(total) - logs / total


@triton.jit
def open_row(position, length, request, target, draft, CALL: tl.constexpr):
    """Return one row for elementwise rules: its drafted token, -1 for a bonus row, its scalars, and both laws."""
    drafted = position < length
    token = decide.tokens_at(request, position, drafted, 0)
    inside = drafted & (token < request[1])
    num_blocks = request[2]
    pair = decide.load_drafted(position, token, inside, target, draft, CALL)
    target_law = rows.law_at(target, position, position >= 0, num_blocks, CALL, TARGET)
    draft_law = target_law
    if CALL.has_draft:
        draft_law = rows.law_at(draft, position, drafted, num_blocks, CALL, DRAFT)
    found = decide.values(position, token, inside, pair, length, request, target, target_law, draft, draft_law, CALL)
    return tl.where(drafted, token, -1), found, target_law, draft_law


@triton.jit
def load_block(block, position, drafted, request, target, draft, BLOCK: tl.constexpr, CALL: tl.constexpr):
    """Return entry numbers and a block of both rows as they are given, [BLOCK]; 0 beyond them and where not needed."""
    entry = block * BLOCK + tl.arange(0, BLOCK)
    inside = entry < request[1]
    # A greedy row is known without reading it.
    read = inside
    if CALL.temperature[TARGET]:
        read = inside & (tl.zeros(entry.shape, tl.float32) + target[4] > 0)
    x = rows.load(target, position, entry, read, 0.0, CALL, TARGET)
    y = x
    if CALL.has_draft:
        read = inside & (tl.zeros_like(entry) + drafted.to(tl.int32) != 0)
        if CALL.temperature[DRAFT]:
            read = read & (tl.zeros(entry.shape, tl.float32) + draft[4] > 0)
        y = rows.load(draft, position, entry, read, 0.0, CALL, DRAFT)
    return entry, x, y


@triton.jit
def elements(raw, row, target, draft, CALL: tl.constexpr):
    """Return entry numbers, p, q and is_drafted of a loaded block, [BLOCK]."""
    entry, x, y = raw
    token, _, target_law, draft_law = row
    p = rows.prob(x, entry, target, target_law, CALL, TARGET)
    if CALL.logits[TARGET]:
        p = tl.where(entry < target[3], p, 0.0)
    is_drafted = entry == token
    q = is_drafted.to(tl.float32)
    if CALL.has_draft:
        q = rows.prob(y, entry, draft, draft_law, CALL, DRAFT)
        # NaN counts as 0, as do a bonus row, which the draft has not, and entries that it has not.
        exists = (tl.zeros_like(entry) + token >= 0) & (entry < draft[3])
        q = tl.where((q > 0) & exists, q, 0.0)
    return entry, p, q, is_drafted


@triton.jit
def as_rows(scalars):
    """Return scalars as elementwise rules read them: float32, flags as they are."""
    found = ()
    for i in tl.static_range(len(scalars)):
        found = found + (_as_row(scalars[i]),)
    return found


@triton.jit
def _as_row(scalar):
    if scalar.dtype == tl.int1:
        return scalar
    else:
        return scalar.to(tl.float32)
