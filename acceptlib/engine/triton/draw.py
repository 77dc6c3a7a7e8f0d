"""The weights of a draw, a draw from sums of weights, and one from the target's row by its law alone.

Where the weights of a draw are the target's own probabilities, the sums that its law is combined from tell which block
the draw falls into, and that block alone is read again. After a rejected one-hot draft the drafted token alone has
another weight, and its exponential is taken out of its block's sum.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import elements, laws, random, rows
from acceptlib.engine.triton.rows import DROP, MASS_LIMIT, TARGET, UNNORMALIZED_ROW
from acceptlib.engine.triton.rules import evaluate
from acceptlib.engine.triton.sums import SUM_SCALE, WEIGHT_SCALE, add_four, add_two, fixed, sum_exp

FOUR = tl.constexpr(4)
"""Entries whose exponentials are added up before they become an integer."""

FEWEST = tl.constexpr(1 << 34)
"""Units of 2^-44 of the largest weight. If all weights together make up fewer, what was taken out of a sum may have
been nearly all of it, so units of what is left are used instead."""


@triton.jit
def weigh(raw, from_target, row, request, CALL: tl.constexpr):
    """Return the draw's weights, p and q of a loaded block, in its shape."""
    p, q, is_drafted = elements.probs(raw, row, request, CALL)
    weights = p
    if CALL.residual is not None:
        numbers = (p, q, is_drafted) + elements.as_rows(row.scalars)  # noqa: RUF005 - what Triton compiles
        weights = tl.where(from_target, p, evaluate(CALL.residual, numbers, tl.float32))
    nothing = weights <= 0  # NaN stays, for the row's mass to tell
    if not (CALL.residual is None or CALL.within_target):  # else what lies beyond the row has no p and no weight
        nothing = nothing | (raw.entry >= request.vocab_size)
    return tl.where(nothing, 0.0, weights), p, q


@triton.jit
def by_law(stop, is_bonus, row, bits, request, CALL: tl.constexpr):
    """Return the token at the stopping row, and the row's `Status`.

    Sums of blocks are integers in units of 2^-44 of a weight that no other exceeds. So are the weights within the block
    that the draw falls into: the token is the first entry whose running sum exceeds r.
    """
    target, law = request.target, row.target_law
    lane = tl.zeros((1,), tl.int32)
    parts = laws.load_blocks(target, lane + stop, lane == 0, CALL, TARGET)
    factor = rows.factor_of(target, CALL, TARGET)
    index = tl.arange(0, CALL.max_blocks)
    maxima, sums = tl.max(parts.maxima, 0), tl.sum(parts.sums, 0)  # of the only row
    relative = tl.exp2((maxima - law.maximum) * factor)
    token = tl.full((), -1, tl.int32)  # the one with another weight
    weight = law.normaliser * 0.0
    largest = law.normaliser
    fault = laws.status_of(law, CALL)
    own = index < 0  # none
    if CALL.residual is not None:
        if is_bonus == 0:
            token = tl.where(row.token < request.vocab_size, row.token, 0).to(tl.int32)
            own = index == token // CALL.block
            near = rows.entries_from(token // FOUR * FOUR, FOUR).each
            x = rows.load(target, stop, near, near < request.vocab_size, float("-inf"), CALL, TARGET)
            p = laws.prob(tl.max(tl.where(near == token, x, float("-inf")), 0), token, target, law, CALL, TARGET)
            numbers = (p, p * 0.0 + 1.0, token >= 0) + elements.as_rows(row.scalars)  # noqa: RUF005 - what Triton compiles
            weight = evaluate(CALL.residual, numbers, tl.float32)
            weight = tl.where(weight <= 0, 0.0, weight)  # NaN stays
            fault = tl.where((fault != 0) | (1 - p + weight <= MASS_LIMIT), fault, UNNORMALIZED_ROW)
            largest = tl.maximum(largest, weight)
            maximum = tl.max(tl.where(own, maxima, float("-inf")), 0)
            others = tl.where(near == token, float("-inf"), x)
            sums -= tl.where(own, sum_exp(x, maximum, factor) - sum_exp(others, maximum, factor), 0)
    terms = _in_units(sums, relative, own, weight, largest, law)
    total = tl.sum(terms, 0)
    if CALL.residual is not None:
        if (is_bonus == 0) & (total < FEWEST):
            _, x = _block(token // CALL.block, stop, token, request, CALL)
            maximum = tl.max(x, 0)
            sums = tl.where(own, sum_exp(x, maximum, factor), sums)
            relative = tl.where(own, tl.exp2((maximum - law.maximum) * factor), relative)
            largest = tl.maximum(tl.max(relative, 0) * law.normaliser, weight)
            if largest * WEIGHT_SCALE < 1:
                # Nothing is left: draw from p.
                token, weight, largest = token * 0 - 1, weight * 0.0, law.normaliser
                sums, relative = tl.sum(parts.sums, 0), tl.exp2((maxima - law.maximum) * factor)
            terms = _in_units(sums, relative, own, weight, largest, law)
            total = tl.sum(terms, 0)
    r = random.multiply_high(bits, total)
    ends = tl.cumsum(terms, 0)
    falls = (ends > r) & (ends - terms <= r)
    within, term = tl.where(falls, r - ends + terms, 0), tl.where(falls, terms, 0)
    chosen = (tl.where(falls, index, 0), within, term, tl.where(falls, relative, 0.0))
    block, within, term, highest = tl.reduce(chosen, 0, add_four)
    entry, x = _block(block, stop, token, request, CALL)
    share = within.to(tl.float64) / term.to(tl.float64)
    tl.debug_barrier()  # the block is on its way meanwhile: see `emit.open_block`
    highest *= law.normaliser
    if token // CALL.block == block:
        highest = tl.maximum(highest, weight)
    weights = tl.exp2((x - law.maximum) * factor) * (law.normaliser / highest)
    weights = _fixed(tl.where(entry == token, _ratio(weight, highest), weights))
    held = tl.sum(weights, 0)
    r = tl.minimum((share * held.to(tl.float64)).to(tl.int64), held - 1)
    found = block.to(tl.int64) * CALL.block + tl.sum((tl.cumsum(weights, 0) <= r).to(tl.int32), 0)
    return tl.where(factor == 0, law.argmax, tl.minimum(found, request.vocab_size - 1)), fault


@triton.jit
def by_sums(stop, bits, request, CALL: tl.constexpr):
    """Return the token that `emit.choose` would, for a row of probabilities whose weights are added up already."""
    lane = tl.zeros((1,), tl.int32)
    parts = laws.load_parts(request.target, lane + stop, lane == 0, CALL, TARGET)
    sums = tl.sum(parts.sums, 0)  # of the only row
    r = random.multiply_high(bits, tl.sum(sums, 0))
    ends = tl.cumsum(sums, 0)
    falls = (ends > r) & (ends - sums <= r)
    block, within = tl.where(falls, tl.arange(0, CALL.max_blocks), 0), tl.where(falls, r - ends + sums, 0)
    block, within = tl.reduce((block, within), 0, add_two)
    entries = rows.entries_from(block * CALL.block, CALL.block)
    inside = entries.each < request.vocab_size
    p = rows.load_block(request.target, stop, entries, inside, stop >= 0, 0.0, DROP, CALL, TARGET)
    ends = tl.cumsum(fixed(tl.where(p <= 0, 0.0, p)), 0)
    found = block.to(tl.int64) * CALL.block + tl.sum((ends <= within).to(tl.int32), 0)
    return tl.minimum(found, request.vocab_size - 1)


@triton.jit
def _block(block, stop, token, request, CALL: tl.constexpr):
    """Return entry numbers and logits of a block of the row at the stop, -inf for a token with another weight."""
    entries = rows.entries_from(block * CALL.block, CALL.block)
    inside = entries.each < request.vocab_size
    x = rows.load_block(request.target, stop, entries, inside, stop >= 0, float("-inf"), DROP, CALL, TARGET)
    return entries.each, tl.where(entries.each == token, float("-inf"), x)


@triton.jit
def _in_units(sums, relative, own, weight, largest, law):
    """Return the weights of blocks in units of the largest; the `own` block also has the token of another weight."""
    terms = sums.to(tl.float64) * relative.to(tl.float64)
    if largest != law.normaliser:  # which is rare, and a division takes long
        terms *= law.normaliser.to(tl.float64) / largest.to(tl.float64)
    return terms.to(tl.int64) + tl.where(own, _fixed(_ratio(weight, largest)), 0)


@triton.jit
def _ratio(weight, largest):
    """Return a weight relative to the largest: mostly it is 0, for which a division takes a detour."""
    if weight > 0:
        weight /= largest
    return weight


@triton.jit
def _fixed(weights):
    """Return weights relative to the largest times 2^44 as int64."""
    return (weights * SUM_SCALE).to(tl.int64)
