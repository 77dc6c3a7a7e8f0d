"""Laws of rows inside the kernels, and entries as probabilities.

From logits, a row's law is its maximum, its normaliser and, where asked for, its argmax and its entropy. The maximum
and the sum of exponentials of every block of the row are found first; whoever needs the law combines them. Sums are
integers, of fours added up in one order, so neither the layout of a program nor the order of blocks changes a bit.

Where its model is filtered, a row's law has a cut too: `select` or `min_p` finds the law once a row, and stores it.
"""

# ruff: noqa: N803, N806, RET505 - jit functions; constants in capitals, branches known when compiling

import math
from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import ops
from acceptlib.engine.triton.keys import key_or_nan, larger, logit_of
from acceptlib.engine.triton.records import WIDTH, in_runs, record_of, sub_maxima
from acceptlib.engine.triton.rows import (
    INVALID_ROW,
    KEEP,
    LARGEST_INT32,
    LOG2_E,
    MASS_LIMIT,
    ROW_TOLERANCE,
    TARGET,
    UNNORMALIZED_ROW,
    entries_from,
    factor_of,
    floor_of,
    load_block,
    load_raw,
)
from acceptlib.engine.triton.sums import (
    NEGLIGIBLE,
    SUM_SCALE,
    fixed,
    fours,
    in_thirds,
    sum_exp,
    sum_exp_and_bits,
)

LN_2 = tl.constexpr(math.log(2.0))


BEYOND = tl.constexpr(2 * MASS_LIMIT.value)
"""Stands for the mass of a row that no draw takes."""

REDUCE_THREADS = tl.constexpr(128)
"""Threads of a program that reduces rows, of a small batch at least."""


class Parts(NamedTuple):
    """What laws of rows are combined from, [n, MAX_BLOCKS]; `bits` is for the entropy, or has masses."""

    maxima: tl.tensor
    sums: tl.tensor
    best: tl.tensor
    bits: tl.tensor


class Law(NamedTuple):
    """The law of a row: its maximum, NaN where it has none; normaliser (`Call.normalises`, `mass_in`); and argmax.

    With `Call.argmax_at_stop` it has the number of the argmax's block, and only a greedy request's law the argmax.
    """

    maximum: tl.tensor
    normaliser: tl.tensor
    argmax: tl.tensor


class EntropyLaw(NamedTuple):
    """The same with the entropy in nats, float64."""

    maximum: tl.tensor
    normaliser: tl.tensor
    argmax: tl.tensor
    entropy: tl.tensor


class CutLaw(NamedTuple):
    """The law of a filtered row: entries above the cut are kept, and equal ones from the id `first_kept` on."""

    maximum: tl.tensor
    normaliser: tl.tensor
    argmax: tl.tensor
    cut: tl.tensor
    first_kept: tl.tensor


@triton.jit
def store_block(x, entry, model, position, block, mask, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Store what the law of one row needs of a block x, [BLOCK] float32, which is `elements.nothing` beyond the row."""
    if CALL.filtered[MODEL]:
        sub_blocks: tl.constexpr = CALL.block // WIDTH
        maxima = tl.reduce(tl.reduce(in_runs(x, model, CALL), 2, larger), 0, larger)
        place = block * sub_blocks + tl.arange(0, sub_blocks)
        tl.store(
            sub_maxima(model, position) + place, maxima, mask=place < tl.where(mask, model.num_blocks * sub_blocks, 0)
        )
        maximum = tl.reduce(maxima, 0, larger)
    elif CALL.loops:
        maximum = tl.reduce(x, 0, larger)
    else:
        maximum = largest_of_block(x)
    at = position.to(tl.int64) * model.num_blocks + block
    tl.store(model.maxima_ptr + at, maximum, mask=mask)
    if CALL.loops:
        store_best(x, maximum, entry, at, model, mask, CALL, MODEL)
    if CALL.normalises[MODEL]:
        factor = factor_of(model, CALL, MODEL)
        # A greedy request needs no sum, but in all but large batches the branch takes longer. It stays where a strategy
        # asks for argmaxes: its requests may all be greedy.
        wanted = (factor > 0) | (not (CALL.lazy or CALL.best[MODEL]))
        if CALL.filtered[MODEL] and CALL.min_p_alone:  # what is kept is added up later
            wanted = wanted & (floor_of(model) == 0)
        if wanted:
            if CALL.entropy and MODEL == TARGET:
                total, bits = sum_exp_and_bits(x, maximum, factor, CALL.loops)
                tl.store(model.extra_ptr + at * CALL.extra_words + 2 * CALL.raw, bits, mask=mask)
            else:
                total = sum_exp(x, maximum, factor)
            tl.store(model.sums_ptr + at, total, mask=mask)
    if CALL.sums_weights and MODEL == TARGET:
        store_masses(x, at, model, mask, CALL)
    if not CALL.loops:  # after what takes longest; elsewhere registers would have to hold the block until then
        store_best(x, maximum, entry, at, model, mask, CALL, MODEL)


@triton.jit
def store_masses(p, at, model, mask, CALL: tl.constexpr):
    """Store the sum of one block of a row of probabilities, and of its weights, the latter as an integer too."""
    weights = tl.where(p <= 0, 0.0, p)  # NaN stays
    masses = tl.split(tl.sum(tl.join(fours(p), fours(weights)), 0))
    tl.store(model.extra_ptr + at * CALL.extra_words, packed(masses[0], masses[1]), mask=mask)
    tl.store(model.sums_ptr + at, tl.sum(fixed(weights), 0), mask=mask)


@triton.jit
def largest_of_block(x):
    """Return the largest of a block, NaN if one is, sooner than a plain reduction, whose threads compare one by one.

    Neighbours are compared side by side first, and what threads find is compared as integers, as in `largest_of`.
    """
    pairs = tl.reduce(tl.reshape(x, [x.shape[0] // 2, 2]), 1, larger)
    quads = tl.reduce(tl.reshape(pairs, [x.shape[0] // 4, 2]), 1, larger)
    threads: tl.constexpr = min(x.shape[0] // 4, REDUCE_THREADS.value)
    each = tl.reduce(tl.reshape(quads, [x.shape[0] // 4 // threads, threads]), 0, larger)
    return logit_of(tl.max(key_or_nan(each), 0))


@triton.jit
def store_best(x, maximum, entry, at, model, mask, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Store which entry of one block is its first largest: for a greedy request, or where the strategy asks for it."""
    if CALL.temperature[MODEL] or CALL.argmaxes[MODEL]:
        if (factor_of(model, CALL, MODEL) == 0) | CALL.argmaxes[MODEL]:
            best = tl.min(tl.where(x == maximum, entry, model.width), 0)
            tl.store(model.best_ptr + at, tl.minimum(best, model.width - 1), mask=mask)


@triton.jit
def argmax_at(position, wanted, law, request, CALL: tl.constexpr):
    """Return the argmax of the target's row at a position, given its law, if it is `wanted`."""
    target = request.target
    argmax = law.argmax
    if CALL.argmax_at_stop:
        if wanted & (law.maximum == law.maximum) & (factor_of(target, CALL, TARGET) != 0):
            entries = entries_from(argmax * CALL.block, CALL.block)
            inside = entries.each < target.width
            x = load_block(target, position, entries, inside, position >= 0, 0.0, KEEP, CALL, TARGET)
            argmax = tl.min(tl.where((x == law.maximum) & inside, entries.each, target.width - 1), 0)
    return argmax


@triton.jit
def reduce_raw(x, entry, model, position, block, mask, CALL: tl.constexpr):
    """Store the maximum and the sum of exponentials of one block of the target's row as it is given."""
    if CALL.biased[TARGET] or CALL.masked[TARGET]:
        x = load_raw(model, position, entry, mask, float("-inf"), KEEP, CALL)
    maximum = tl.reduce(x, 0, larger)
    at = model.extra_ptr + CALL.extra_words * (position.to(tl.int64) * model.num_blocks + block)
    tl.store(at, sum_exp(x, maximum, LOG2_E), mask=mask)
    tl.store((at + 1).to(tl.pointer_type(tl.float32)), maximum, mask=mask)


@triton.jit
def raw_logs(x, model, position, wanted, CALL: tl.constexpr):
    """Return log-probabilities [n] of one loaded entry of each row under the softmax of the target's given logits.

    They are NaN where the row has none.
    """
    index = tl.arange(0, CALL.max_blocks)[None, :]
    at = model.extra_ptr + CALL.extra_words * (position.to(tl.int64)[:, None] * model.num_blocks + index)
    mask = wanted[:, None] & (index < model.num_blocks)
    sums = tl.load(at, mask=mask, other=0, cache_modifier=".cg")
    maxima = tl.load((at + 1).to(tl.pointer_type(tl.float32)), mask=mask, other=float("-inf"), cache_modifier=".cg")
    maximum = largest_of(maxima)
    terms = rescaled(maxima, sums, maximum, tl.full((), LOG2_E, tl.float32))
    total = tl.maximum(tl.sum(terms, 1), 1).to(tl.float64) * (1 / SUM_SCALE)
    return tl.where(maximum < float("inf"), (x - maximum).to(tl.float64) - tl.log(total), float("nan"))


@triton.jit
def load_parts(model, position, wanted, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what the laws of rows at positions [n] are made from."""
    if CALL.filtered[MODEL]:
        record = record_of(model, position)
        return CutLaw(
            maximum=tl.load(record.maximum_ptr, mask=wanted, other=0.0, cache_modifier=".cg"),
            normaliser=tl.load(record.normaliser_ptr, mask=wanted, other=0.0, cache_modifier=".cg"),
            argmax=tl.load(record.argmax_ptr, mask=wanted, other=0, cache_modifier=".cg"),
            cut=tl.load(record.cut_ptr, mask=wanted, other=0.0, cache_modifier=".cg"),
            first_kept=tl.load(record.first_kept_ptr, mask=wanted, other=0, cache_modifier=".cg"),
        )
    else:
        return load_blocks(model, position, wanted, CALL, MODEL)


@triton.jit
def one(model, parts, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the law of one model's rows from `load_parts`."""
    if CALL.filtered[MODEL]:
        return parts
    else:
        maximum, total = combine(model, parts, CALL, MODEL)
        return law_of(model, parts, maximum, total, CALL, MODEL)


@triton.jit
def load_blocks(model, position, wanted, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what the laws of rows at positions [n] are combined from.

    It stays in the nearest cache for whoever needs it again, unless it may be stored while the program runs.
    """
    CACHE: tl.constexpr = ".cg" if CALL.lazy else ""
    index = tl.arange(0, CALL.max_blocks)[None, :]
    at = position.to(tl.int64)[:, None] * model.num_blocks + index
    mask = wanted[:, None] & (index < model.num_blocks)
    maxima = tl.zeros(at.shape, tl.float32)
    sums = tl.zeros(at.shape, tl.int64)
    best = tl.zeros(at.shape, tl.int32)
    if CALL.logits[MODEL] or CALL.best[MODEL]:
        maxima = tl.load(model.maxima_ptr + at, mask=mask, other=float("-inf"), cache_modifier=CACHE)
    if CALL.normalises[MODEL] or (CALL.sums_weights and MODEL == TARGET):
        sums = tl.load(model.sums_ptr + at, mask=mask, other=0, cache_modifier=CACHE)
    if CALL.temperature[MODEL] or CALL.argmaxes[MODEL]:
        size = model.num_blocks
        if not CALL.argmaxes[MODEL]:
            size = tl.where(model.temperature > 0, 0, model.num_blocks)
        best = tl.load(model.best_ptr + at, mask=wanted[:, None] & (index < size), other=0, cache_modifier=CACHE)
    bits = sums
    if CALL.sums_weights and MODEL == TARGET:
        bits = tl.load(model.extra_ptr + at * CALL.extra_words, mask=mask, other=0, cache_modifier=CACHE)
    if CALL.entropy and MODEL == TARGET:
        bits_ptr = model.extra_ptr + at * CALL.extra_words + 2 * CALL.raw
        bits = tl.load(bits_ptr, mask=mask, other=0, cache_modifier=CACHE)
    return Parts(maxima, sums, best, bits)


@triton.jit
def combine(model, parts, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the maxima of rows and the sums of their exponentials from `load_blocks`, for `law_of`."""
    maximum = tl.zeros((parts.maxima.shape[0],), tl.float32)
    total = tl.zeros(maximum.shape, tl.int64)
    if CALL.logits[MODEL] or CALL.best[MODEL]:
        maximum = largest_of(parts.maxima)
    if CALL.normalises[MODEL]:
        terms = rescaled(parts.maxima, parts.sums, maximum, factor_of(model, CALL, MODEL))
        total = in_thirds(terms) if CALL.thirds else tl.sum(terms, 1)
    return maximum, total


@triton.jit
def law_of(model, parts, maximum, total, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the law of rows without a filter, given their maxima and the sums of their exponentials."""
    total = tl.maximum(total, 1)
    normaliser = tl.zeros_like(maximum)
    if CALL.normalises[MODEL]:
        normaliser = (normaliser + SUM_SCALE) / total.to(tl.float32)
    argmax = tl.zeros(maximum.shape, tl.int32)
    best = parts.best
    if CALL.argmax_at_stop and MODEL == TARGET:
        block = tl.zeros(best.shape, tl.int32) + tl.arange(0, CALL.max_blocks)[None, :]
        best = tl.where(factor_of(model, CALL, MODEL) == 0, best, block)
    if CALL.temperature[MODEL] or CALL.best[MODEL]:
        if (factor_of(model, CALL, MODEL) == 0) | CALL.best[MODEL]:
            argmax = tl.min(tl.where(parts.maxima == maximum[:, None], best, LARGEST_INT32), 1)
    if CALL.logits[MODEL]:
        maximum = tl.where(tl.abs(maximum) < float("inf"), maximum, float("nan"))
    elif CALL.best[MODEL] and MODEL == TARGET:
        maximum = tl.where((maximum > 0) & (maximum < float("inf")), maximum, float("nan"))
        if CALL.sums_weights:
            normaliser = mass_in(parts)
    if CALL.entropy and MODEL == TARGET:
        entropy = entropy_of(parts, maximum, normaliser, total, factor_of(model, CALL, MODEL))
        return EntropyLaw(maximum, normaliser, argmax, entropy)
    else:
        return Law(maximum, normaliser, argmax)


@triton.jit
def entropy_of(parts, maximum, normaliser, total, factor):
    """Return the entropies of rows [n] in nats, float64, to some 2^-22; NaN where a row has no law.

    H = ln 2 * (log2 Z + sum_x w(x) bits(x) / Z), of exponentials w, their sum Z, and the bits that they lie below the
    largest. Those of a block lie deeper by as much as its maximum does.
    """
    deeper = tl.minimum((maximum[:, None] - parts.maxima) * factor, NEGLIGIBLE)
    terms = (parts.bits.to(tl.float64) + parts.sums.to(tl.float64) * deeper) * tl.exp2(-deeper).to(tl.float64)
    bits = tl.sum(terms.to(tl.int64), 1).to(tl.float64) * (1 / SUM_SCALE)
    mean = bits * inverse_of(total.to(tl.float64) * (1 / SUM_SCALE), normaliser)
    entropy = (log2_from_one(total.to(tl.float32) * (1 / SUM_SCALE)) + mean) * LN_2
    return tl.where(maximum == maximum, tl.where(factor == 0, 0.0, entropy), float("nan"))


@triton.jit
def inverse_of(x, rough):
    """Return 1 / x in float64, given it in float32: one step of Newton's, as a division takes several times as long."""
    inverse = rough.to(tl.float64)
    return inverse * (2 - inverse * x)


@triton.jit
def log2_from_one(x):
    """Return the logarithm of float32 numbers, from 1 on, to base 2, float64: to 2^-22, but soon."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # from 1 to 2
    return ((bits >> 23) - 127).to(tl.float64) + tl.maximum(ops.log2(fraction, least=1.0), 0.0).to(tl.float64)


@triton.jit
def mass_in(parts):
    """Return the masses of rows of probabilities, which their laws have in the place of a normaliser.

    A mass is `BEYOND` where weights sum to more than a draw takes, which negative entries may conceal.
    """
    masses = unpacked(parts.bits, tl.float32)
    mass, weights = tl.split(tl.sum(tl.join(masses[0], masses[1]), 1))
    return tl.where((tl.abs(mass) < float("inf")) & (weights > MASS_LIMIT), BEYOND, mass)


@triton.jit
def rescaled(maxima, sums, maximum, factor):
    """Return the sums of exponentials of blocks times 2^44, relative to the maxima of their rows, [n, MAX_BLOCKS]."""
    relative = (maxima - tl.where(maximum > float("-inf"), maximum, 0.0)[:, None]) * factor
    return (sums.to(tl.float64) * tl.exp2(relative).to(tl.float64)).to(tl.int64)


@triton.jit
def status_of(law, CALL: tl.constexpr):
    """Return the `Status` of a row of the target, as far as its law tells."""
    fault = tl.where(law.maximum == law.maximum, 0, INVALID_ROW)
    if CALL.sums_weights:
        mass = law.normaliser
        fault = tl.where((fault == 0) & (tl.abs(mass - 1) > ROW_TOLERANCE), UNNORMALIZED_ROW, fault)
        fault = tl.where(tl.abs(mass) < float("inf"), fault, INVALID_ROW)
    return fault


@triton.jit
def packed(high, low):
    """Return two numbers of 32 bits as an int64."""
    high_bits, low_bits = high.to(tl.int32, bitcast=True), low.to(tl.int32, bitcast=True)
    return (high_bits.to(tl.int64) << 32) | (low_bits.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def unpacked(word, TYPE: tl.constexpr):
    """Return the two numbers of 32 bits that `packed` made words of."""
    return (word >> 32).to(tl.int32).to(TYPE, bitcast=True), word.to(tl.int32).to(TYPE, bitcast=True)


@triton.jit
def prob(x, entry, model, law, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return entries as probabilities, float32, given the law of their rows."""
    if CALL.logits[MODEL]:
        factor = factor_of(model, CALL, MODEL)
        weight = tl.exp2((x - law.maximum) * factor)
        p = weight * law.normaliser
        if CALL.filtered[MODEL]:
            p = tl.where((x > law.cut) | ((x == law.cut) & (entry >= law.first_kept)), p, 0.0)
        if CALL.temperature[MODEL]:
            zero = law.maximum - law.maximum  # NaN where the row has no law, as elsewhere
            if factor == 0:
                p = tl.where(entry == law.argmax, zero + 1, zero)
        return p
    else:
        return x


@triton.jit
def prob_of(x, entry, mask, model, law, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the probability of one loaded entry of each row, float64; NaN where its row has no law."""
    p = prob(x, entry, model, law, CALL, MODEL).to(tl.float64)
    if CALL.logits[MODEL]:
        p = tl.where(law.maximum == law.maximum, p, float("nan"))
    return tl.where(mask, p, 0.0)


@triton.jit
def largest_prob(model, law, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the largest entry of rows, float64, given their law."""
    if CALL.filtered[MODEL]:  # among equal largest entries, top-p leaves out the argmax first
        p = tl.where(factor_of(model, CALL, MODEL) == 0, 1.0, law.normaliser)
        return tl.where(law.maximum == law.maximum, p, float("nan")).to(tl.float64)
    else:
        return prob(law.maximum, law.argmax, model, law, CALL, MODEL).to(tl.float64)


@triton.jit
def largest_of(maxima):
    """Return the largest of each row [n, MAX_BLOCKS], NaN if one is, as integers: one instruction of a warp."""
    return logit_of(tl.max(key_or_nan(maxima), 1))
