"""Which drafted tokens stand, inside the kernels.

Where the first rejection stops a request, or there is a window, the stop is found wherever it is needed, a few
positions at a time: finding it again takes less time than waiting for it. But in large batches whose rows are gone
through, the first rejection is found as they are read (`settle`). Where a decision depends on other positions (a carry,
the last acceptance), one program a request decides. Where it depends on the mass of residuals, the last stage, which
finds the masses, decides: see `masses`.
"""

# ruff: noqa: N803, N806, RUF005 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import call, counters, laws, random, rows, scalars
from acceptlib.engine.triton.binding import evaluate
from acceptlib.engine.triton.rows import DRAFT, TARGET
from acceptlib.result import Status

LANES = tl.constexpr(call.LANES)

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
"""What `values` begins with; then come the plan's scalars of rows, its tables and the caller's state."""

DRAFTED = tl.constexpr(QUANTITIES.index("draft_token_id"))

FAULT_BITS = tl.constexpr(int(Status.INVALID_TOKEN_ID).bit_length())
"""What `token_fault` returns fits in as many."""

FAULT_MASK = tl.constexpr((1 << FAULT_BITS.value) - 1)
"""Mask of these."""

FIRST_SCALAR = tl.constexpr(len(QUANTITIES))
"""The place of the plan's scalars among these values."""


class Stream(NamedTuple):
    """Where one request's random numbers come from: memory where they are explicit, else a seed and an offset.

    A last stage that draws by law has the `bits` of its draw from the start; elsewhere they are found where needed.
    """

    accept_ptr: tl.tensor
    accept_stride: tl.tensor
    emit_ptr: tl.tensor
    seed: tl.tensor
    offset: tl.tensor
    bits: tl.tensor


class Request(NamedTuple):
    """One request; `most` is K, and pointers are at its first position.

    There are `num_positions` float64 for each of the plan's scalars, as many words for each sum of each block of a row,
    `table_size` float64 for each table, and `num_requests` for each state.
    """

    number: tl.tensor
    vocab_size: tl.tensor
    most: tl.tensor
    ids_ptr: tl.tensor
    ids_stride: tl.tensor
    target: rows.Model
    draft: rows.Model
    stream: Stream
    bonus_ptr: tl.tensor
    scalars_ptr: tl.tensor
    num_positions: tl.tensor
    sums_ptr: tl.tensor
    tables_ptr: tl.tensor
    table_size: tl.tensor
    state_ptr: tl.tensor
    num_requests: tl.tensor
    counters: counters.Counters


class Fetched(NamedTuple):
    """What a decision needs that no stage finds: drafted tokens, their entries of both rows, and u."""

    ids: tl.tensor
    x_target: tl.tensor
    x_draft: tl.tensor
    u: tl.tensor


class Foreseen(NamedTuple):
    """A decision that no row has a say in: what `first_rejection` returns but for the laws."""

    stop: tl.tensor
    length: tl.tensor
    passed: tl.tensor


class Seen(NamedTuple):
    """What is known of positions [n]: u, whether their tokens could be accepted, the scalars, and their rows' laws.

    `fault` is the `Status` of tokens by themselves.
    """

    u: tl.tensor
    sound: tl.tensor
    fault: tl.tensor
    scalars: tl.tuple
    laws: laws.Pair


class Kept(NamedTuple):
    """The laws of both models' rows at `CALL.lanes` positions from `first` on, among which the stop is or may be.

    If `unsound` is the stop, the token there could not be accepted whatever its random number. Where
    `CALL.finds_faults`, `fault` is its `Status` by itself.
    """

    first: tl.tensor
    laws: laws.Pair
    unsound: tl.tensor
    fault: tl.tensor


@triton.jit
def tokens_at(request, position, mask, other):
    """Return drafted tokens, int64."""
    at = position.to(tl.int64) * request.ids_stride
    return tl.load(request.ids_ptr + at, mask=mask, other=other).to(tl.int64)


@triton.jit
def length_of(request, count):
    """Return how many tokens were drafted before the first placeholder."""
    return cut_short(count, 0, request, count)


@triton.jit
def cut_short(length, start, request, count):
    """Return `length`, or the position of the first placeholder from `start` on if that is less."""
    for base in range(start, count, LANES):
        position = base + tl.arange(0, LANES)
        ids = tokens_at(request, position, position < count, 0)
        length = tl.minimum(length, tl.min(tl.where(ids < 0, position, count), 0))
    return length


@triton.jit
def load_drafted(position, ids, inside, request, CALL: tl.constexpr):
    """Return the entries of drafted tokens in the target's and the draft's rows, after bias and mask."""
    x_target = tl.zeros_like(ids).to(tl.float32)
    x_draft = x_target
    if CALL.reads_target:
        x_target = rows.load(request.target, position, ids, inside, 0.0, CALL, TARGET)
    if CALL.reads_draft and CALL.has_draft:
        x_draft = rows.load(request.draft, position, ids, inside, 0.0, CALL, DRAFT)
    return x_target, x_draft


@triton.jit
def values(position, ids, inside, drafted, length, request, pair, CALL: tl.constexpr):
    """Return the scalars of positions, in their shape: `QUANTITIES` and what follows.

    Those that no rule reads are arbitrary.
    """
    target, draft = request.target, request.draft
    target_law, draft_law = pair.target, pair.draft
    zero = position.to(tl.float64) * 0.0
    p = zero
    q = zero
    p_max = zero
    q_max = zero
    is_best = position < 0  # never
    if CALL.reads_target:
        p = laws.prob_of(drafted[0], ids, inside, target, target_law, CALL, TARGET)
    if CALL.reads_draft:
        q = zero + 1.0
        if CALL.has_draft:
            q = laws.prob_of(drafted[1], ids, inside & (ids < draft.width), draft, draft_law, CALL, DRAFT)
            q = tl.where(q > 0, q, 0.0)  # NaN counts as 0
    # 1 where there is no token to judge: a division takes a detour for 0, which the other positions would wait for.
    p = tl.where(inside, p, 1.0)
    q = tl.where(inside, q, 1.0)
    if CALL.reads_target_max:
        p_max = laws.largest_prob(target, target_law, CALL, TARGET)
    if CALL.reads_draft_max:
        q_max = zero + 1.0
        if CALL.has_draft:
            q_max = laws.largest_prob(draft, draft_law, CALL, DRAFT)
            q_max = tl.where(q_max > 0, q_max, 0.0)
    if CALL.reads_argmax:
        is_best = ids == target_law.argmax
    is_last = position == length - 1
    found = (p, q, p_max, q_max, is_best, zero + position, zero + length, is_last, zero + ids)
    for i in tl.static_range(len(CALL.scalars)):
        if CALL.entropy and i == CALL.entropy_scalar:
            found = found + (target_law.entropy,)
        elif i < len(CALL.sums):
            found = found + (scalars.row_sum(i, position, length, request, CALL),)
        elif i == CALL.top_scalar:
            found = found + (scalars.top_entropy(position, length, request, target_law, CALL),)
        else:
            scalar_ptr = request.scalars_ptr + i * request.num_positions + position
            found = found + (tl.load(scalar_ptr, mask=position < length, other=0.0, cache_modifier=".cg"),)
    for i in tl.static_range(len(CALL.tables)):
        table_ptr = request.tables_ptr + i * request.table_size
        found = found + (tl.load(table_ptr + tl.minimum(position, request.table_size - 1)),)
    for i in tl.static_range(len(CALL.state)):
        state = zero + tl.load(request.state_ptr + i * request.num_requests + request.number)
        found = found + (state != 0 if CALL.state[i] else state,)
    return found


@triton.jit
def no_values(zero, CALL: tl.constexpr):
    """Return what stands for `values` before any are known, given a 0 of their shape."""
    never = zero < 0
    found = (zero, zero, zero, zero, never, zero, zero, never, zero)
    for _ in tl.static_range(len(CALL.scalars) + len(CALL.tables)):
        found = found + (zero,)
    for i in tl.static_range(len(CALL.state)):
        found = found + (never if CALL.state[i] else zero,)
    return found


@triton.jit
def fetch(position, count, request, CALL: tl.constexpr):
    """Return what `look` needs at positions [n] that no stage finds.

    Nothing has to be waited for, so it may be on its way while a stage ends.
    """
    exists = position < count
    ids = tokens_at(request, position, exists, 0)
    inside = exists & (ids >= 0) & (ids < request.vocab_size)
    x_target, x_draft = load_drafted(position, ids, inside, request, CALL)
    return Fetched(ids, x_target, x_draft, uniforms(position, exists, request, CALL))


@triton.jit
def uniforms(position, exists, request, CALL: tl.constexpr):
    """Return the random numbers that positions are decided by, float64."""
    stream = request.stream
    if CALL.explicit:
        return tl.load(stream.accept_ptr + position.to(tl.int64) * stream.accept_stride, mask=exists, other=0.0)
    else:  # noqa: RET505 - a branch on what is known when compiling
        return random.uniform(stream.seed, stream.offset, position)


@triton.jit
def fetch_first(count, request, CALL: tl.constexpr):
    """Return `fetch` of the first positions, as decisions begin with them."""
    return fetch(tl.arange(0, CALL.lanes), count, request, CALL)


@triton.jit
def foresee(count, request, CALL: tl.constexpr):
    """Return a decision that no row has a say in."""
    stop, length, passed, _ = first_rejection(count, fetch_first(count, request, CALL), request, CALL)
    return Foreseen(stop, length, passed)


@triton.jit
def after_wait(fetched, count, request, CALL: tl.constexpr):
    """Wait until the stages before have ended, and return what `fetch` or `foresee` found."""
    if CALL.foreseen:
        stop = kept_over_wait(fetched.stop.to(tl.float64), count, request, CALL)
        return Foreseen(stop.to(tl.int32), fetched.length, fetched.passed)
    else:  # noqa: RET505 - a branch on what is known when compiling
        u = kept_over_wait(fetched.u, count, request, CALL)
        return Fetched(fetched.ids, fetched.x_target, fetched.x_draft, u)


@triton.jit
def kept_over_wait(numbers, count, request, CALL: tl.constexpr):
    """Wait until the stages before have ended, and return float64 numbers that are found by then.

    Whether to wait depends on these numbers, and on random bits, factors and addresses that the rest of the stage
    needs, or the assembler would move the arithmetic that finds them behind the wait. The answer is always yes, since
    no magnitude is less than -1, but the assembler does not know that.
    """
    target, draft = request.target, request.draft
    ready = numbers.to(tl.int64, bitcast=True) ^ count
    ready ^= target.sums_ptr.to(tl.int64) ^ target.maxima_ptr.to(tl.int64)
    if CALL.draws_by_law:
        ready ^= request.stream.bits.to(tl.int64, bitcast=True)
    if CALL.has_draft:
        ready ^= draft.sums_ptr.to(tl.int64) ^ draft.maxima_ptr.to(tl.int64)
    if CALL.temperature[TARGET]:
        ready ^= rows.factor_of(target, CALL, TARGET).to(tl.int32, bitcast=True)
    if CALL.temperature[DRAFT]:
        ready ^= rows.factor_of(draft, CALL, DRAFT).to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(
        """{
        .reg .pred always;
        .reg .f32 ready;
        abs.f32 ready, $1;
        setp.geu.f32 always, ready, 0fBF800000;
        @always griddepcontrol.wait;
        mov.b64 $0, $2;
        }""",
        "=d,r,d",
        [(ready ^ (ready >> 32)).to(tl.int32), numbers],
        dtype=tl.float64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def judge(position, fetched, parts, length, request, CALL: tl.constexpr):
    """Return whether tokens at positions [n] are accepted, and what `look` returns."""
    seen = look(position, fetched, parts, length, request, CALL)
    return (seen.u < evaluate(CALL.accept, seen.scalars, tl.float64)) & seen.sound, seen


@triton.jit
def load_parts(position, length, request, CALL: tl.constexpr):
    """Return what the laws of both models' rows at positions [n] are made from, up to the row behind the last token.

    All is loaded before any of it is reduced: a reduction waits for what it reads.
    """
    target_parts = laws.load_parts(request.target, position, position <= length, CALL, TARGET)
    draft_parts = target_parts
    if CALL.has_draft:
        draft_parts = laws.load_parts(request.draft, position, position < length, CALL, DRAFT)
    return target_parts, draft_parts


@triton.jit
def look(position, fetched, parts, length, request, CALL: tl.constexpr):
    """Return `Seen` of positions [n], given what `fetch` and `load_parts` returned."""
    ids = fetched.ids
    inside = (position < length) & (ids >= 0) & (ids < request.vocab_size)
    pair = laws.both(request.target, parts[0], request.draft, parts[1], CALL)
    drafted = (fetched.x_target, fetched.x_draft)
    found = values(position, ids, inside, drafted, length, request, pair, CALL)
    fault = token_fault(ids, found[0], pair.target, request.vocab_size, CALL)
    return Seen(fetched.u, inside & (fault == 0), fault, found, pair)


@triton.jit
def token_fault(ids, p, target_law, vocab_size, CALL: tl.constexpr):
    """Return the `Status` of drafted tokens by themselves."""
    fault = tl.where(ids < vocab_size, 0, rows.INVALID_TOKEN_ID)
    if CALL.reads_target:
        fault = tl.where((fault == 0) & (p > 1 + rows.ROW_TOLERANCE), rows.UNNORMALIZED_ROW, fault)
        fault = tl.where((p >= 0) & (p < float("inf")), fault, rows.INVALID_ROW)
    if CALL.reads_argmax:
        fault = tl.where(target_law.maximum == target_law.maximum, fault, rows.INVALID_ROW)
    return fault


@triton.jit
def settle(position, count, request, CALL: tl.constexpr):
    """Say whether the drafted token at a position stands. Behind the last one a request stops in any case."""
    length = count
    if CALL.reads_length:
        length = length_of(request, count)
    here = tl.zeros((1,), tl.int32) + position
    fetched = fetch(here, length, request, CALL)
    accepted, _ = judge(here, fetched, load_parts(here, length, request, CALL), length, request, CALL)
    stands = (position < count) & (tl.sum(accepted.to(tl.int32), 0) != 0)
    counters.settle(position, stands, request, CALL)


@triton.jit
def first_rejection(count, fetched, request, CALL: tl.constexpr):
    """Return how many drafted tokens stand, the request's length, how many tokens pass on their own, and `Kept`.

    Where `CALL.keeps_laws` and no mass decides, the last holds the laws at the stop.
    """
    NUM: tl.constexpr = CALL.lanes
    KEEPS: tl.constexpr = CALL.keeps_laws and CALL.mass_scalar < 0
    length = count
    if CALL.reads_length:
        length = length_of(request, count)
    end = length
    stop = length
    passed = length * 0
    sound_length = length
    num_rows = length
    kept = ()
    if KEEPS:
        kept = Kept(length * 0, laws.no_pair(NUM, CALL), length, length * 0)
        num_rows += 1  # what is emitted behind the last token has a law too
    for base in range(0, num_rows, NUM):
        # Positions behind a rejection are left out, unless what passes is counted: some of them may.
        goes_on = stop >= base if KEEPS and not CALL.counts_passed else True
        if goes_on:
            lane = tl.arange(0, NUM)
            position = base + lane
            parts = load_parts(position, length, request, CALL)
            following = fetched
            if NUM < LANES:  # on its way meanwhile; with all LANES, so many tokens are rare
                if base + NUM < num_rows:
                    following = fetch(position + NUM, length, request, CALL)
            accepted, seen = judge(position, fetched, parts, length, request, CALL)
            # A placeholder is neither sound nor accepted.
            is_placeholder = seen.scalars[DRAFTED] < 0
            placeholder = tl.where(is_placeholder, position, length)
            unsound = tl.where(seen.sound, length, position)
            faults = length * 0
            if CALL.holds:
                firsts = (tl.where(accepted, length, position), placeholder, unsound)
                first, first_placeholder, first_unsound = tl.reduce(firsts, 0, _smaller_three)
            else:
                # As bits of one sum, for threads take long to exchange numbers; programs that hold weights lose by it.
                bits = ((accepted == 0).to(tl.int32) | (is_placeholder.to(tl.int32) << NUM)) << lane
                bits = tl.sum(bits | (seen.fault << (lane * FAULT_BITS + 2 * NUM)), 0)
                first = first_bit(bits & ((1 << NUM) - 1), base, length)
                first_placeholder = first_bit((bits >> NUM) & ((1 << NUM) - 1), base, length)
                first_unsound = tl.min(unsound, 0)
                faults = bits >> (2 * NUM)
            sound_length = tl.minimum(sound_length, first_unsound)
            stop = tl.minimum(stop, first)
            end = tl.minimum(end, first_placeholder)
            passed += tl.sum((accepted & (position < sound_length)).to(tl.int32), 0)
            if KEEPS:
                if (stop >= base) & (stop < base + NUM):
                    fault = (faults >> ((stop - base) * FAULT_BITS)) & FAULT_MASK
                    kept = Kept(length * 0 + base, seen.laws, sound_length, fault)
            if NUM == LANES:
                if base + NUM < num_rows:
                    following = fetch(position + NUM, length, request, CALL)
            fetched = following
    return stop, end, passed, kept


@triton.jit
def _smaller_three(a, b, c, d, e, f):
    """Return the smaller ones of two triples."""
    return tl.minimum(a, d), tl.minimum(b, e), tl.minimum(c, f)


@triton.jit
def first_bit(bits, base, none):
    """Return the place of the lowest bit that is set, from `base` on, or `none`."""
    return tl.where(bits != 0, base + bit_length(bits & -bits) - 1, none)


@triton.jit
def bit_length(bits):
    """Return the bit length of a number of few bits, by the exponent of a float."""
    return tl.maximum((bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def last_acceptance(count, fetched, request, CALL: tl.constexpr):
    """Return the largest accepted position, 1-based."""
    length = length_of(request, count)
    stop = length * 0
    sound_length = length
    for base in range(0, length, LANES):
        position = base + tl.arange(0, LANES)
        accepted, seen = judge(position, fetched, load_parts(position, length, request, CALL), length, request, CALL)
        unsound = (position < length) & (seen.sound == 0)
        sound_length = tl.minimum(sound_length, tl.min(tl.where(unsound, position, length), 0))
        stop = tl.maximum(stop, tl.max(tl.where(accepted & (position < sound_length), position + 1, 0), 0))
        if base + LANES < length:
            fetched = fetch(position + LANES, length, request, CALL)
    return stop


@triton.jit
def window(count, fetched, request, CALL: tl.constexpr):
    """Return how many tokens stand; a forgiven one does if all the tokens of its window are accepted.

    Where `CALL.keeps_laws` and no mass decides, `Kept` of the first positions comes after it.
    """
    NUM: tl.constexpr = CALL.lanes
    KEEPS: tl.constexpr = CALL.keeps_laws and CALL.mass_scalar < 0
    length = length_of(request, count)
    flags_ptr = request.scalars_ptr + CALL.flags_scalar * request.num_positions
    lane = tl.arange(0, NUM)
    kept = ()
    if KEEPS:
        kept = Kept(length * 0, laws.no_pair(NUM, CALL), length, length * 0)
    for base in range(0, tl.maximum(length, 1) if KEEPS else length, NUM):
        position = base + lane
        accepted, seen = judge(position, fetched, load_parts(position, length, request, CALL), length, request, CALL)
        forgiven = evaluate(CALL.forgive, seen.scalars, tl.int1) & seen.sound
        flags = tl.where(accepted, 2.0, tl.where(forgiven, 1.0, 0.0)).to(tl.float64)
        tl.store(flags_ptr + position, flags, mask=position < length)
        if KEEPS:
            unsound = tl.minimum(kept.unsound, tl.min(tl.where(seen.sound, length, position), 0))
            kept = Kept(kept.first, kept.laws, unsound, kept.fault)
            if base == 0:
                kept = Kept(kept.first, seen.laws, unsound, kept.fault)
        if base + NUM < length:
            fetched = fetch(position + NUM, length, request, CALL)
    tl.debug_barrier()
    stop = length
    width = tl.minimum(length - 1, CALL.window)
    for base in range(0, length, NUM):
        position = base + lane
        flags = tl.load(flags_ptr + position, mask=position < length, other=2.0)
        full = (width > 0) & (position + 1 + width <= length)
        for follower in range(1, width + 1):
            inside = position + follower < length
            full = full & (tl.load(flags_ptr + position + follower, mask=inside, other=0.0) == 2.0)
        stands = (flags == 2.0) | ((flags == 1.0) & full)
        stop = tl.minimum(stop, tl.min(tl.where(stands, length, position), 0))
    return stop, kept


@triton.jit
def find_stop(count, fetched, request, CALL: tl.constexpr):
    """Return how many drafted tokens stand, given every scalar of every position, and how many pass on their own.

    The second number is only found where it is asked for, or comes with the first. `Kept` comes after them where
    `window` returns it.
    """
    stop = count
    passed = count
    kept = ()
    if CALL.stop == "first_rejection" or CALL.counts_passed:
        stop, _, passed, _ = first_rejection(count, fetched, request, CALL)
    if CALL.stop == "last_acceptance":
        stop = last_acceptance(count, fetched, request, CALL)
    elif CALL.stop == "window":
        stop, kept = window(count, fetched, request, CALL)
    return stop, passed, kept
