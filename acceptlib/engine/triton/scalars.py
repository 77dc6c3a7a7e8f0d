"""Scalars that rules read of whole rows, beside laws: row sums, and the entropy of a row's largest entries.

Each block of a row leaves its part in the workspace, and whoever needs a scalar combines the parts.
"""

# ruff: noqa: N803, N806, RET505, RUF005 - jit functions; constants in capitals, branches known when compiling

import triton
import triton.language as tl

from acceptlib.engine.triton import laws
from acceptlib.engine.triton.keys import LOWEST, key_of, logit_of
from acceptlib.engine.triton.laws import LN_2, REDUCE_THREADS, inverse_of, log2_from_one
from acceptlib.engine.triton.rows import LARGEST_INT32, TARGET, factor_of, is_filtered
from acceptlib.engine.triton.sums import (
    MAGNITUDE_LIMIT,
    ROW_SUM_LIMIT,
    SUM_SCALE,
    fours,
    in_magnitude_steps,
    sum_exp_and_bits,
)

MAX_IN_LISTS = tl.constexpr(4)
"""Largest entries, at most, for each thread to find its own first: longer lists take too many comparisons."""


@triton.jit
def store_sum(NUM: tl.constexpr, terms, position, block, mask, request, CALL: tl.constexpr):
    """Store one block's part of one of a row's sums, of terms [BLOCK] float32, and the sum of their magnitudes."""
    at = position.to(tl.int64) * request.target.num_blocks + block
    tl.store(_parts(NUM, request) + at, tl.sum((fours(terms) * SUM_SCALE).to(tl.int64), 0), mask=mask)
    # NaN counts as beyond the limit. There the sum does not count, for it may have wrapped.
    magnitudes = fours(tl.abs(terms))
    magnitudes = tl.where(magnitudes < ROW_SUM_LIMIT, magnitudes, ROW_SUM_LIMIT)
    magnitude = tl.sum(in_magnitude_steps(magnitudes), 0).to(tl.int64)
    tl.store(_parts(len(CALL.sums) + CALL.top_k + NUM, request) + at, magnitude, mask=mask)


@triton.jit
def row_sum(NUM: tl.constexpr, position, length, request, CALL: tl.constexpr):
    """Return one of the sums of rows at positions [n], or of one row, float64; 0 from `length` on."""
    at, mask = _blocks_at(position, length, request, CALL)
    parts = tl.load(_parts(NUM, request) + at, mask=mask, other=0, cache_modifier=".cg")
    magnitudes_ptr = _parts(len(CALL.sums) + CALL.top_k + NUM, request) + at
    magnitudes = tl.load(magnitudes_ptr, mask=mask, other=0, cache_modifier=".cg")
    total = tl.sum(parts, 1).to(tl.float64) * (1 / SUM_SCALE)
    total = tl.where(tl.sum(magnitudes, 1) < MAGNITUDE_LIMIT, total, float("nan"))
    if CALL.entropy_scalar == NUM:
        total = total * LN_2
        if CALL.filtered[TARGET]:
            if not is_filtered(request.target, CALL, TARGET):
                total = _entropy_with_law(position, length, parts, request, CALL)
    return _in_shape_of(position, total)


@triton.jit
def store_entropy(NUM: tl.constexpr, terms, x, position, block, mask, request, CALL: tl.constexpr):
    """Store one block's part of the entropy of a row of logits x, which is the sum NUM of `terms` if it is filtered.

    Without a filter it is found as in a call without filters, so that no request depends on others.
    """
    target = request.target
    if is_filtered(target, CALL, TARGET):
        store_sum(NUM, terms, position, block, mask, request, CALL)
    else:
        at = position.to(tl.int64) * target.num_blocks + block
        maximum = tl.load(target.maxima_ptr + at, mask=mask, other=0.0)
        _, bits = sum_exp_and_bits(x, maximum, factor_of(target, CALL, TARGET), CALL.loops)
        tl.store(_parts(NUM, request) + at, bits, mask=mask)


@triton.jit
def _entropy_with_law(position, length, bits, request, CALL: tl.constexpr):
    """Return the entropies of rows without a filter, given what `store_entropy` left of their blocks."""
    target = request.target
    lane = _as_lanes(position)
    blocks = laws.load_blocks(target, lane, lane < length, CALL, TARGET)
    maximum, total = laws.combine(target, blocks, CALL, TARGET)
    law = laws.law_of(target, blocks, maximum, total, CALL, TARGET)
    parts = laws.Parts(blocks.maxima, blocks.sums, blocks.best, bits)
    return laws.entropy_of(parts, law.maximum, law.normaliser, tl.maximum(total, 1), factor_of(target, CALL, TARGET))


@triton.jit
def store_tops(x, position, block, mask, request, CALL: tl.constexpr):
    """Store the largest entries [BLOCK] of one block of a target's row, in order: logits if these have no filter."""
    at = position.to(tl.int64) * request.target.num_blocks + block
    TOP_K: tl.constexpr = CALL.top_k
    lists = (x,)
    if TOP_K <= MAX_IN_LISTS:
        lists = _merged(lists, min(x.shape[0] // 4, REDUCE_THREADS), x.shape[0] // 4, TOP_K)
    lane = tl.arange(0, lists[0].shape[0])
    for i in tl.static_range(TOP_K):
        largest = tl.max(lists[0], 0)
        word = largest.to(tl.float64).to(tl.int64, bitcast=True)
        tl.store(_parts(len(CALL.sums) + i, request) + at, word, mask=mask)
        taken = lane == tl.min(tl.where(lists[0] == largest, lane, LARGEST_INT32), 0)
        left = ()
        for j in tl.static_range(len(lists)):
            left = left + (tl.where(taken, lists[j + 1] if j + 1 < len(lists) else float("-inf"), lists[j]),)
        lists = left


@triton.jit
def top_entropy(position, length, request, law, CALL: tl.constexpr):
    """Return the entropies [n], or of one row, of the largest entries of the target's rows, renormalised: float64."""
    TOP_K: tl.constexpr = CALL.top_k
    LISTS: tl.constexpr = TOP_K if TOP_K <= MAX_IN_LISTS else 1  # ranks that are held at a time: all, or one
    factor = factor_of(request.target, CALL, TARGET)
    as_logits = is_filtered(request.target, CALL, TARGET) == 0
    at, inside = _blocks_at(position, length, request, CALL)
    index = tl.arange(0, CALL.max_blocks)[None, :]
    taken = inside.to(tl.int64) * 0
    keys = ()
    for i in tl.static_range(LISTS):  # on their way together
        keys = keys + (_top_keys(i, at, inside, request, CALL),)
    total = tl.sum(taken, 1).to(tl.float64)
    logs = total
    for i in tl.static_range(TOP_K):
        largest = tl.max(keys[0], 1)
        here = index == tl.min(tl.where(keys[0] == largest[:, None], index, LARGEST_INT32), 1)[:, None]
        left = ()
        if LISTS == TOP_K:
            for j in tl.static_range(LISTS):
                left = left + (tl.where(here, keys[j + 1] if j + 1 < LISTS else LOWEST, keys[j]),)
        elif i + 1 < TOP_K:
            taken += here.to(tl.int64)
            left = (_top_keys(taken, at, inside & (taken < TOP_K), request, CALL),)
        keys = left
        if CALL.tops:
            weight, log = _exponential(largest, law, factor)
        else:
            weight = tl.maximum(logit_of(largest), 0.0).to(tl.float64)
            log = tl.log(tl.where(weight > 0, weight, 1.0))
            if CALL.filtered[TARGET]:
                if as_logits:
                    weight, log = _exponential(largest, law, factor)
        total += weight
        logs += tl.where(weight > 0, weight * log, 0.0)
    if CALL.tops:
        entropy = _entropy_of(total, logs, law, factor)
    else:
        entropy = tl.log(total) - logs / total
        if CALL.filtered[TARGET]:
            if as_logits:
                entropy = _entropy_of(total, logs, law, factor)
    return _in_shape_of(position, entropy)


@triton.jit
def _exponential(key, law, factor):
    """Return the weights of logits, relative to the largest, and their logarithms, which are at hand."""
    relative = (logit_of(key) - law.maximum) * factor
    return tl.exp2(relative).to(tl.float64), relative.to(tl.float64) * LN_2


@triton.jit
def _entropy_of(total, logs, law, factor):
    """Return entropies, given the sum of such weights, and of weights times their logarithms."""
    rough = total.to(tl.float32)
    entropy = log2_from_one(rough) * LN_2 - logs * inverse_of(total, 1 / rough)
    return tl.where(factor == 0, 0.0 * law.maximum, entropy)  # NaN where the row has no law


@triton.jit
def _top_keys(rank, at, mask, request, CALL: tl.constexpr):
    """Return the keys of blocks' largest entries of a rank, or of a rank for each block; LOWEST where there is none."""
    ranks_ptr = _parts(len(CALL.sums), request) + at + rank * request.num_positions * request.target.num_blocks
    found = tl.load(ranks_ptr, mask=mask, other=0, cache_modifier=".cg").to(tl.float64, bitcast=True)
    return tl.where(mask, key_of(found.to(tl.float32)), LOWEST)


@triton.jit
def _parts(NUM: tl.constexpr, request):
    """Return where blocks' parts are: of the sums, of the largest entries from the first on, or of magnitudes."""
    return request.sums_ptr + NUM * request.num_positions * request.target.num_blocks


@triton.jit
def _blocks_at(position, length, request, CALL: tl.constexpr):
    """Return where the blocks of rows at positions [n], or of one row, are among those of a kind, and which exist."""
    lane = _as_lanes(position)
    index = tl.arange(0, CALL.max_blocks)[None, :]
    exists = (lane < length)[:, None] & (index < request.target.num_blocks)
    return lane.to(tl.int64)[:, None] * request.target.num_blocks + index, exists


@triton.jit
def _as_lanes(position):
    """Return positions [n], or the only one [1]."""
    if len(position.shape) == 0:
        return tl.zeros((1,), tl.int32) + position
    else:
        return position


@triton.jit
def _in_shape_of(position, found):
    """Return what was found of rows at positions [n], or the only number of one row."""
    return tl.sum(found, 0) if len(position.shape) == 0 else found


@triton.jit
def _merged(lists, NUM: tl.constexpr, QUARTER: tl.constexpr, TOP_K: tl.constexpr):
    """Return NUM lists, each of the largest numbers of some of `lists`, in order; a tensor has the i-th numbers of all.

    Merging stays within threads: first of neighbours, until QUARTER lists are left, for a thread holds four numbers
    next to each other, then of lists that are half of all apart.
    """
    if lists[0].shape[0] == NUM:
        return lists
    else:
        some, others = (), ()
        for i in tl.static_range(len(lists)):
            if lists[i].shape[0] > QUARTER:
                pairs = tl.reshape(lists[i], [lists[i].shape[0] // 2, 2])
            else:
                pairs = tl.trans(tl.reshape(lists[i], [2, lists[i].shape[0] // 2]))
            first, second = tl.split(pairs)
            some = some + (first,)
            others = others + (second,)
        found = ()
        for i in tl.static_range(min(2 * len(lists), TOP_K)):
            found = found + (_largest_but(i, some, others),)
        return _merged(found, NUM, QUARTER, TOP_K)


@triton.jit
def _largest_but(NUM: tl.constexpr, some, others):
    """Return the number of rank NUM, from 0, in two ordered lists together; each number is a tensor."""
    found = tl.full(some[0].shape, float("-inf"), some[0].dtype)
    if len(some) > NUM:
        found = tl.maximum(some[NUM], others[NUM])
    for i in tl.static_range(NUM):
        if i < len(some) and NUM - 1 - i < len(others):
            found = tl.maximum(found, tl.minimum(some[i], others[NUM - 1 - i]))
    return found
