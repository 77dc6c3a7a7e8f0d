"""What decisions know of a request's positions, inside the kernels: `look`, of what `fetch` and `load_parts` return.

Drafted tokens, their entries and random numbers need no stage, so they are on their way before the laws of rows are
there. From both come the scalars that rules read, in the order of `QUANTITIES`.
"""

# ruff: noqa: N803, RUF005 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import call, counters, laws, pairs, random, rows, scalars
from acceptlib.engine.triton.rows import DRAFT, TARGET

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


class Seen(NamedTuple):
    """What is known of positions [n]: u, whether their tokens could be accepted, the scalars, and their rows' laws.

    `fault` is the `Status` of tokens by themselves.
    """

    u: tl.tensor
    sound: tl.tensor
    fault: tl.tensor
    scalars: tl.tuple
    laws: pairs.Pair


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
    pair = pairs.both(request.target, parts[0], request.draft, parts[1], CALL)
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
