"""Verification from probabilities in one launch: two rows of V a request.

The grid is (programs, requests). Every program repeats the request's decision, which reads K pairs p(x), q(x), and
reduces its vocabulary blocks of the stopping row's weights to one integer each. The last program of a request to arrive
scans these partial sums, searches one block, and writes the result. Sums are integers, so block size and grid change no
token.
"""

# ruff: noqa: N803, RUF005 - kernels; their constants are in capitals

import triton
import triton.language as tl
from triton.language.random import philox

from acceptlib.engine.triton.binding import call

LANES = tl.constexpr(64)
"""Positions decided at a time."""

# What changes from call to call must not compile the kernel anew.
VARYING = [
    *(f"{rows}_{kind}_stride" for rows in ("target", "draft") for kind in ("request", "row")),
    "ids_request_stride",
    "ids_stride",
    "accept_request_stride",
    "accept_stride",
    "table_size",
    "num_tokens",
    "max_num_draft_tokens",
    "num_blocks",
]


@triton.jit(do_not_specialize=VARYING)
def verify_probs_kernel(
    token_ids_ptr,  # [B, K+1] int32
    num_accepted_ptr,  # [B] int32
    num_emitted_ptr,  # [B] int32
    status_ptr,  # [B] int8
    num_passed_ptr,  # [B] int32
    sums_ptr,  # [B, num_blocks] int64, scratch
    masses_ptr,  # [B, 3, num_blocks] float32, scratch
    arrived_ptr,  # [B] int32, zero before and after
    target_ptr,  # [B, K+1, V] or [T+B, V]; [B, K, V] or [T, V] without bonus rows
    target_request_stride,
    target_row_stride,
    target_stride,
    draft_ptr,  # [B, K, V'] or [T, V']
    draft_request_stride,
    draft_row_stride,
    draft_stride,
    ids_ptr,  # [B, K] or [T]
    ids_request_stride,
    ids_stride,
    cu_ptr,  # [B+1]
    accept_ptr,  # [B, K] or [T] float64
    accept_request_stride,
    accept_stride,
    emit_ptr,  # [B] int64
    seeds_ptr,  # [B] int64
    offsets_ptr,  # [B] int64, advanced by 1
    bonus_ptr,  # [B]
    tables_ptr,  # [len(tables), TABLE_SIZE] float64
    table_size,
    num_tokens,  # T
    max_num_draft_tokens,  # K
    vocab_size,  # V
    draft_vocab_size,  # V'
    num_blocks,
    ACCEPT: tl.constexpr,
    ACCEPT_INDEX: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RESIDUAL_INDEX: tl.constexpr,
    NUM_TABLES: tl.constexpr,
    READS_TARGET: tl.constexpr,
    SCALARS: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_BONUS: tl.constexpr,
    HAS_BONUS_ROWS: tl.constexpr,
    COUNTS: tl.constexpr,
    EXPLICIT: tl.constexpr,
    FLAT_UNIFORMS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Reduce some blocks of one request, and finish the request if the last to do so; see the module."""
    request = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)

    # Where the request's rows are.
    count = max_num_draft_tokens
    fault = 0
    if RAGGED:
        start = tl.load(cu_ptr + request).to(tl.int64)
        end = tl.load(cu_ptr + request + 1).to(tl.int64)
        sane = (start >= 0) & (end >= start) & (end <= num_tokens) & (end - start <= max_num_draft_tokens)
        sane = sane & (tl.load(cu_ptr) == 0)
        fault = tl.where(sane, 0, 4)
        start = tl.where(sane, start, 0)
        count = tl.where(sane, end - start, 0).to(tl.int32)
        target_start = tl.where(sane, start + (request if HAS_BONUS_ROWS else 0), 0) * target_row_stride
        draft_start = start * draft_row_stride
        ids_ptr += start * ids_stride
        if FLAT_UNIFORMS:
            accept_ptr += start * accept_stride
    else:
        target_start = request * target_request_stride
        draft_start = request * draft_request_stride
        ids_ptr += request * ids_request_stride
    if EXPLICIT and not FLAT_UNIFORMS:
        accept_ptr += request * accept_request_stride
    seed = tl.full((), 0, tl.int64)
    offset = tl.full((), 0, tl.int64)
    if not EXPLICIT:
        seed = tl.load(seeds_ptr + request)
        offset = tl.load(offsets_ptr + request)

    # Decide, LANES positions at a time.
    lane = tl.arange(0, LANES)
    length = count
    stop = count
    passed = count * 0
    for base in range(0, count, LANES):
        position = base + lane
        ids = tl.load(ids_ptr + position.to(tl.int64) * ids_stride, mask=position < count, other=-1).to(tl.int64)
        length = tl.minimum(length, tl.min(tl.where(ids < 0, position, count), 0))
        drafted = (position < length) & (ids >= 0)
        inside = drafted & (ids < vocab_size)
        p = tl.load(
            target_ptr + target_start + position.to(tl.int64) * target_row_stride + ids * target_stride,
            mask=inside,
            other=0.0,
        ).to(tl.float64)
        if HAS_DRAFT:
            q = tl.load(
                draft_ptr + draft_start + position.to(tl.int64) * draft_row_stride + ids * draft_stride,
                mask=inside & (ids < draft_vocab_size),
                other=0.0,
            ).to(tl.float64)
            q = tl.where(q == q, q, 0.0)  # NaN counts as 0
        else:
            q = tl.full((LANES,), 1.0, tl.float64)
        if EXPLICIT:
            u = tl.load(accept_ptr + position.to(tl.int64) * accept_stride, mask=drafted, other=0.0)
        else:
            u = _uniform(seed, offset, position)
        values = _values(p, q, position, length, tables_ptr, table_size, NUM_TABLES)
        h = call(ACCEPT, ACCEPT_INDEX, values, tl.float64)
        sound = inside
        if READS_TARGET:
            sound = sound & (p >= 0) & (p <= 1 + 1 / 64)
        passes = drafted & (u < h) & sound
        passed += tl.sum(passes.to(tl.int32), 0)
        rejected = drafted & (passes == 0)
        stop = tl.minimum(stop, tl.min(tl.where(rejected, position, count), 0))
    stop = tl.minimum(stop, length)
    is_bonus = stop == length

    row = stop
    if not HAS_BONUS_ROWS:
        # Nothing is needed from the row of a given bonus token: stay within the rows.
        row = tl.minimum(stop, tl.maximum(count - 1, 0))
        target_start = tl.where(count > 0, target_start, 0)
    target_row = target_start + row.to(tl.int64) * target_row_stride
    draft_row = draft_start + tl.where(is_bonus, 0, stop).to(tl.int64) * draft_row_stride
    if ALIGNED:
        target_row = tl.multiple_of(target_row, 16)
        draft_row = tl.multiple_of(draft_row, 16)
    target_row_ptr = target_ptr + target_row
    draft_row_ptr = draft_ptr + draft_row
    token = tl.load(ids_ptr + stop.to(tl.int64) * ids_stride, mask=stop < length, other=0).to(tl.int64)
    p_stop = tl.full((), 0.0, tl.float64)
    q_stop = tl.full((), 1.0, tl.float64)
    if SCALARS:
        readable = (stop < length) & (token < vocab_size)
        p_stop = tl.load(target_row_ptr + token * target_stride, mask=readable, other=0.0).to(tl.float64)
        if HAS_DRAFT:
            readable = (stop < length) & (token < draft_vocab_size)
            q_stop = tl.load(draft_row_ptr + token * draft_stride, mask=readable, other=0.0).to(tl.float64)
            q_stop = tl.where(q_stop == q_stop, q_stop, 0.0)
    scalars = _values(p_stop, q_stop, stop, length, tables_ptr, table_size, NUM_TABLES)

    # Reduce this program's blocks of the stopping row.
    sums_ptr += request * num_blocks
    masses_ptr += request * 3 * num_blocks
    for block in range(program, num_blocks, num_programs):
        p, q, weights = _weights(
            block,
            target_row_ptr,
            target_stride,
            draft_row_ptr,
            draft_stride,
            token,
            is_bonus,
            scalars,
            vocab_size,
            draft_vocab_size,
            RESIDUAL,
            RESIDUAL_INDEX,
            HAS_DRAFT,
            BLOCK,
        )
        total, p_mass, q_mass, mass = tl.reduce((_fixed(weights), p, q, weights), 0, _add)
        tl.store(sums_ptr + block, total)
        tl.store(masses_ptr + block, p_mass)
        tl.store(masses_ptr + num_blocks + block, q_mass)
        tl.store(masses_ptr + 2 * num_blocks + block, mass)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + request, 1, sem="acq_rel") == num_programs - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + request, 0)
        index = tl.arange(0, MAX_BLOCKS)
        used = index < num_blocks
        sums = tl.load(sums_ptr + index, mask=used, other=0, cache_modifier=".cg")
        total = tl.sum(sums, 0)
        if (total == 0) & (stop < length):
            # Nothing is left of p - q: draw from p, whose partial sums nobody has taken yet.
            is_bonus = stop < length
            for b in range(num_blocks):
                p, q, weights = _weights(
                    b,
                    target_row_ptr,
                    target_stride,
                    draft_row_ptr,
                    draft_stride,
                    token,
                    is_bonus,
                    scalars,
                    vocab_size,
                    draft_vocab_size,
                    RESIDUAL,
                    RESIDUAL_INDEX,
                    HAS_DRAFT,
                    BLOCK,
                )
                sums = tl.where(index == b, tl.sum(_fixed(weights), 0), sums)
            total = tl.sum(sums, 0)
        p_mass = tl.sum(tl.load(masses_ptr + index, mask=used, other=0.0, cache_modifier=".cg"), 0)
        q_mass = tl.sum(tl.load(masses_ptr + num_blocks + index, mask=used, other=0.0, cache_modifier=".cg"), 0)
        mass = tl.sum(tl.load(masses_ptr + 2 * num_blocks + index, mask=used, other=0.0, cache_modifier=".cg"), 0)
        unnormalized = (tl.abs(p_mass - 1) > 1 / 64) | (q_mass > 1 + 1 / 64) | (mass > 4)
        row_fault = tl.where(unnormalized, 2, 0)
        row_fault = tl.where((total > 0) & (p_mass < float("inf")), row_fault, 1)

        # Draw: the first entry whose running sum exceeds r.
        if EXPLICIT:
            bits = tl.load(emit_ptr + request).to(tl.uint64, bitcast=True)
        else:
            bits = _bits(seed, offset)
            tl.store(offsets_ptr + request, offset + 1)
        r = tl.umulhi(bits, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
        ends = tl.cumsum(sums, 0)
        found = tl.minimum(tl.sum(((ends <= r) & used).to(tl.int32), 0), num_blocks - 1)
        before = tl.sum(tl.where(index < found, sums, 0), 0)
        p, q, weights = _weights(
            found,
            target_row_ptr,
            target_stride,
            draft_row_ptr,
            draft_stride,
            token,
            is_bonus,
            scalars,
            vocab_size,
            draft_vocab_size,
            RESIDUAL,
            RESIDUAL_INDEX,
            HAS_DRAFT,
            BLOCK,
        )
        running = tl.cumsum(_fixed(weights), 0)
        emitted = found.to(tl.int64) * BLOCK + tl.sum((running <= r - before).to(tl.int32), 0)
        emitted = tl.minimum(emitted, vocab_size - 1)
        if HAS_BONUS:
            # In the ragged layout a placeholder that ended the chain early has its own row.
            if stop == (count if RAGGED else length):
                emitted = tl.load(bonus_ptr + request).to(tl.int64)
                row_fault = tl.where((emitted >= 0) & (emitted < vocab_size), 0, 3)
        # A fault of the whole request comes first, then one of the drafted token at the stop, then the row's.
        known = token < vocab_size
        token_fault = tl.where(known, 0, 3)
        if READS_TARGET:
            readable = (stop < length) & known
            p_stop = tl.load(target_row_ptr + token * target_stride, mask=readable, other=0.0).to(tl.float64)
            token_fault = tl.where((token_fault == 0) & (p_stop > 1 + 1 / 64), 2, token_fault)
            token_fault = tl.where(((p_stop >= 0) & (p_stop < float("inf"))) == 0, 1, token_fault)
        fault = tl.where(fault == 0, tl.where(token_fault == 0, row_fault, token_fault), fault)

        token_ids_ptr += request * (max_num_draft_tokens + 1)
        for base in range(0, max_num_draft_tokens + 1, LANES):
            position = base + lane
            ids = tl.load(ids_ptr + position.to(tl.int64) * ids_stride, mask=position < stop, other=-1).to(tl.int32)
            ids = tl.where((position == stop) & (fault == 0), emitted.to(tl.int32), ids)
            tl.store(token_ids_ptr + position, ids, mask=position <= max_num_draft_tokens)
        tl.store(num_accepted_ptr + request, stop)
        tl.store(num_emitted_ptr + request, stop + (fault == 0).to(tl.int32))
        tl.store(status_ptr + request, fault.to(tl.int8))
        if COUNTS:
            tl.store(num_passed_ptr + request, passed)


@triton.jit
def _values(p, q, position, length, tables_ptr, table_size, NUM_TABLES: tl.constexpr):
    """Return the scalars of positions, float64, in the order of `VALUES`."""
    values = (p, q, position.to(tl.float64), (length + 0 * position).to(tl.float64), position == length - 1)
    for table in tl.static_range(NUM_TABLES):
        at = table * table_size + tl.minimum(position, table_size - 1)
        values = values + (tl.load(tables_ptr + at),)
    return values


@triton.jit
def _weights(
    block,
    target_row_ptr,
    target_stride,
    draft_row_ptr,
    draft_stride,
    token,
    is_bonus,
    scalars,
    vocab_size,
    draft_vocab_size,
    RESIDUAL: tl.constexpr,
    RESIDUAL_INDEX: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a block of p, q and the draw's weights, [BLOCK] float32."""
    entry = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    p = tl.load(target_row_ptr + entry * target_stride, mask=entry < vocab_size, other=0.0).to(tl.float32)
    is_drafted = entry == tl.where(is_bonus, -1, token)
    if HAS_DRAFT:
        # Separate masks instead of one smaller limit: loads are wide where a limit is known to be a multiple of 16.
        readable = (entry < draft_vocab_size) & (entry < vocab_size) & (tl.zeros_like(entry) + is_bonus == 0)
        q = tl.load(draft_row_ptr + entry * draft_stride, mask=readable, other=0.0).to(tl.float32)
        q = tl.where(q == q, q, 0.0)
    else:
        q = is_drafted.to(tl.float32)
    if RESIDUAL is None:
        weights = p
    else:
        values = (p, q, is_drafted)
        for i in tl.static_range(len(scalars)):
            values = values + (_as_row(scalars[i]),)
        weights = tl.where(is_bonus, p, call(RESIDUAL, RESIDUAL_INDEX, values, tl.float32))
    weights = tl.where((weights > 0) & (entry < vocab_size), weights, 0.0)
    return p, q, weights


@triton.jit
def _as_row(scalar):
    """Return a scalar as rules of rows read it: float32, or a flag as it is."""
    if scalar.dtype == tl.int1:
        return scalar
    else:  # noqa: RET505 - a branch on what is known when compiling
        return scalar.to(tl.float32)


@triton.jit
def _fixed(weights):
    """Return weights times 2^60 as int64."""
    return (weights * 1152921504606846976.0).to(tl.int64)


@triton.jit
def _add(a, b, c, d, e, f, g, h):
    """Add two quadruples."""
    return a + e, b + f, c + g, d + h


@triton.jit
def _uniform(seed, offset, position):
    """Return u for accepting positions, float64 in [0, 1); the stream of `acceptlib.rng`."""
    zero = (position * 0).to(tl.uint32)
    low, high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    first, second, _, _ = philox(seed, position.to(tl.uint32), zero, zero + low, zero + high)
    return ((first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _bits(seed, offset):
    """Return the 64 random bits of the request's draw."""
    zero = tl.full((), 0, tl.uint32)
    purpose = tl.full((), 1, tl.uint32)
    low, high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    first, second, _, _ = philox(seed, zero, purpose, low, high)
    return (first.to(tl.uint64) << 32) | second.to(tl.uint64)


VALUES = ("target_prob", "draft_prob", "position", "num_draft_tokens", "is_last")
"""What `_values` returns, before the strategy's tables."""
