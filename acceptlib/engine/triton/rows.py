"""Rows inside the kernels: where a request's rows are, their law, and their entries as probabilities.

From logits, a row's law is its maximum, its normaliser and, where asked for, its argmax. The maximum and the sum of
exponentials of every block of the row are found first; whoever needs the law combines them. All sums are integers, so
neither the layout of a program nor the order of blocks changes a bit of the law.

`CALL.logits`, `CALL.temperature` and `CALL.best` hold what is known of each model's rows when compiling, at `TARGET`
and `DRAFT`. A model is a tuple: (rows_ptr, row_stride, stride, width, factor, sums_ptr, maxima_ptr, best_ptr,
rows_here), its pointers at the request's first row and the last its number of rows.
"""

# ruff: noqa: N803, RET505 - jit functions; their constants are in capitals, their branches known when compiling

import triton
import triton.language as tl

TARGET = tl.constexpr(0)
DRAFT = tl.constexpr(1)

LOG2_E = tl.constexpr(1.4426950408889634)
SUM_SCALE = tl.constexpr(17592186044416.0)
"""2^44, of exponentials relative to their block's maximum: a row of 2^18 sums to less than 2^63."""

WEIGHT_SCALE = tl.constexpr(1152921504606846976.0)
"""2^60, of weights in a draw."""


@triton.jit
def locate(request, cu_ptr, num_tokens, max_num_draft_tokens, CALL: tl.constexpr):
    """Return the request's first drafted position among all, n_b before placeholders, and its `Status`."""
    if CALL.ragged:
        start = tl.load(cu_ptr + request).to(tl.int64)
        end = tl.load(cu_ptr + request + 1).to(tl.int64)
        sane = (start >= 0) & (end >= start) & (end <= num_tokens) & (end - start <= max_num_draft_tokens)
        sane = sane & (tl.load(cu_ptr) == 0)
        return tl.where(sane, start, 0), tl.where(sane, end - start, 0).to(tl.int32), tl.where(sane, 0, 4)
    else:
        return request * max_num_draft_tokens, max_num_draft_tokens, tl.full((), 0, tl.int32)


@triton.jit
def open_model(
    rows_ptr,
    request_stride,
    row_stride,
    stride,
    width,
    temperature_ptr,
    partials_ptr,  # int64 words, 2 for each block of each row
    num_rows,
    request,
    first,
    first_row,
    rows_here,
    num_blocks,
    CALL: tl.constexpr,
    MODEL: tl.constexpr,
):
    """Return a request's rows of one model, and their `Status`.

    `first` and `first_row` are the numbers of the request's first row among partial results and among rows: they
    differ where bonus rows are left out.
    """
    start = first_row * row_stride if CALL.ragged else request * request_stride
    if CALL.aligned:
        start = tl.multiple_of(start, 16)  # loads are wide only where offsets are known to be
    rows_ptr += start
    factor = tl.full((), LOG2_E, tl.float32)
    fault = tl.full((), 0, tl.int32)
    if CALL.temperature[MODEL]:
        temperature = tl.load(temperature_ptr + request)
        fault = tl.where((temperature >= 0) & (temperature < float("inf")), 0, 5)
        # An infinite factor would make a NaN of the maximum's own distance from itself.
        factor = tl.where(temperature > 0, tl.minimum(tl.div_rn(factor, temperature), 1e30), 0.0)
    maxima_ptr = (partials_ptr + num_rows * num_blocks).to(tl.pointer_type(tl.float32))
    best_ptr = (maxima_ptr + num_rows * num_blocks).to(tl.pointer_type(tl.int32))
    at = first * num_blocks
    return (
        rows_ptr,
        row_stride,
        stride,
        width,
        factor,
        partials_ptr + at,
        maxima_ptr + at,
        best_ptr + at,
        rows_here,
    ), fault


@triton.jit
def load(model, position, entry, mask, other, CALL: tl.constexpr):
    """Return entries of rows, float32; positions and entries broadcast."""
    rows_ptr, row_stride, stride, width, _, _, _, _, rows_here = model
    row = position.to(tl.int64) * row_stride
    if CALL.aligned and len(position.shape) == 0:
        row = tl.multiple_of(row, 16)
    if not CALL.has_bonus_rows:
        mask = mask & (position < rows_here)
    mask = (tl.zeros_like(entry) + mask.to(tl.int32) != 0) & (entry < width)
    return tl.load(rows_ptr + row + entry.to(tl.int64) * stride, mask=mask, other=other).to(tl.float32)


@triton.jit
def reduce_block(x, entry, model, position, block, num_blocks, mask, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Store what the law of one row needs of one block, [BLOCK] float32, -inf beyond the row."""
    _, _, _, width, factor, sums_ptr, maxima_ptr, best_ptr, _ = model
    maximum = tl.reduce(x, 0, _larger)
    at = position.to(tl.int64) * num_blocks + block
    tl.store(maxima_ptr + at, maximum, mask=mask)
    # A greedy request needs the argmax and no sum; others need it only where the strategy asks for it.
    if CALL.logits[MODEL]:
        if factor > 0:
            relative = (x - tl.where(maximum > float("-inf"), maximum, 0.0)) * factor
            tl.store(sums_ptr + at, tl.sum((tl.exp2(relative) * SUM_SCALE).to(tl.int64), 0), mask=mask)
    if CALL.temperature[MODEL] or CALL.best[MODEL]:
        if (factor == 0) | CALL.best[MODEL]:
            best = tl.min(tl.where(x == maximum, entry, width), 0)
            tl.store(best_ptr + at, tl.minimum(best, width - 1), mask=mask)


@triton.jit
def load_parts(model, position, wanted, num_blocks, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what the laws of rows at positions [n] are combined from, [n, MAX_BLOCKS]: maxima, sums, argmaxes."""
    _, _, _, _, _, sums_ptr, maxima_ptr, best_ptr, _ = model
    index = tl.arange(0, CALL.max_blocks)[None, :]
    at = position.to(tl.int64)[:, None] * num_blocks + index
    mask = wanted[:, None] & (index < num_blocks)
    maxima = tl.zeros(at.shape, tl.float32)
    sums = tl.zeros(at.shape, tl.int64)
    best = tl.zeros(at.shape, tl.int32)
    if CALL.logits[MODEL] or CALL.best[MODEL]:
        maxima = tl.load(maxima_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    if CALL.logits[MODEL]:
        sums = tl.load(sums_ptr + at, mask=mask, other=0, cache_modifier=".cg")
    if CALL.temperature[MODEL] or CALL.best[MODEL]:
        best = tl.load(best_ptr + at, mask=mask, other=0, cache_modifier=".cg")
    return (maxima, sums, best)


@triton.jit
def law(model, parts, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the law of rows from `load_parts`: maximum, 1 / sum of exponentials, argmax; each [n].

    The maximum of a row without a law is NaN.
    """
    factor = model[4]
    maxima, sums, best = parts
    maximum = tl.reduce(maxima, 1, _larger)
    inverse = tl.zeros_like(maximum)
    if CALL.logits[MODEL]:
        relative = (maxima - tl.where(maximum > float("-inf"), maximum, 0.0)[:, None]) * factor
        terms = sums.to(tl.float64) * tl.exp2(relative).to(tl.float64)
        total = tl.maximum(tl.sum(terms.to(tl.int64), 1), 1)
        inverse = (17592186044416.0 / total.to(tl.float64)).to(tl.float32)
    first = tl.min(tl.where(maxima == maximum[:, None], best, 2147483647), 1)
    if CALL.logits[MODEL]:
        maximum = tl.where(tl.abs(maximum) < float("inf"), maximum, float("nan"))
    elif CALL.best[MODEL] and MODEL == TARGET:
        maximum = tl.where((maximum > 0) & (maximum < float("inf")), maximum, float("nan"))
    return (maximum, inverse, first)


@triton.jit
def law_at(model, position, wanted, num_blocks, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the law of the row at one position, as scalars."""
    one = tl.zeros((1,), tl.int32)
    wanted = one + wanted.to(tl.int32) != 0
    found = law(model, load_parts(model, one + position, wanted, num_blocks, CALL, MODEL), CALL, MODEL)
    return (tl.sum(found[0], 0), tl.sum(found[1], 0), tl.sum(found[2], 0))


@triton.jit
def prob(x, entry, model, found, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return entries as probabilities, float32, given the law of their rows."""
    if CALL.logits[MODEL]:
        factor = model[4]
        p = tl.exp2((x - found[0]) * factor) * found[1]
        if CALL.temperature[MODEL]:
            p = tl.where(factor == 0, (entry == found[2]).to(tl.float32), p)
        return p
    else:
        return x


@triton.jit
def prob_of(x, entry, mask, model, found, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the probability of one loaded entry of each row, float64; NaN where its row has no law."""
    p = prob(x, entry, model, found, CALL, MODEL).to(tl.float64)
    if CALL.logits[MODEL]:
        p = tl.where(found[0] == found[0], p, float("nan"))
    return tl.where(mask, p, 0.0)


@triton.jit
def largest_prob(model, found, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the largest entry of rows, float64, given their law."""
    return prob(found[0], found[2], model, found, CALL, MODEL).to(tl.float64)


@triton.jit
def fixed(weights):
    """Return weights times 2^60 as int64."""
    return (weights * WEIGHT_SCALE).to(tl.int64)


@triton.jit
def _larger(a, b):
    """Return the larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
