"""Rows inside the kernels: where a request's rows are, their law, and their entries as probabilities.

From logits, a row's law is its maximum, its normaliser and, where asked for, its argmax and its entropy. The maximum
and the sum of exponentials of every block of the row are found first; whoever needs the law combines them. Sums are
integers, of fours added up in one order, so neither the layout of a program nor the order of blocks changes a bit.

`CALL.logits`, `CALL.temperature` and `CALL.best` hold what is known of each model's rows when compiling, at `TARGET`
and `DRAFT`. A model is a tuple: (rows_ptr, row_stride, stride, width, factor, sums_ptr, maxima_ptr, best_ptr,
rows_here, constraints, filters), its pointers at the request's first row and `rows_here` its number of rows, with
constraints = (mask_ptr, row_stride, stride, bias_ids_ptr, bias_values_ptr, num_biases), and
filters = (top_k_ptr, top_p_ptr, min_p_ptr, cuts_ptr, cut_words, extra_ptr), the last for what is reduced of the target
alone: the sum and the maximum of a row as it is given (`CALL.raw`), and what its entropy needs (`CALL.entropy`).

A row's law is also a cut where its model is filtered: `select` finds it once a row, and stores the law as it is here,
(maximum, normaliser, argmax, cut, first_id). An entry above the cut is kept, and one that equals it from an id on.
"""

# ruff: noqa: N803, RET505, RUF005 - jit functions; constants in capitals, branches known when compiling

import triton
import triton.language as tl

from acceptlib.engine.triton.sums import NEGLIGIBLE, SUM_SCALE, add_two, sum_exp, sum_exp_and_bits

TARGET = tl.constexpr(0)
DRAFT = tl.constexpr(1)

RUN = tl.constexpr(4)
"""Entries of a block that share a word of the mask: what a thread holds next to each other."""

FEW = tl.constexpr(32)
"""Ids of a bias that are looked at together."""

LOG2_E = tl.constexpr(1.4426950408889634)
WIDTH = tl.constexpr(32)
"""Entries of a sub-block, of which filtered rows keep the largest."""

LAW_WORDS = tl.constexpr(8)
"""Words of the law of a filtered row."""

LN_2 = tl.constexpr(0.6931471805599453)


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
    parameters,  # as `verify_kernel` takes them
    cuts_ptr,  # int64 words, `cut_words` for each row
    cut_words,
    extra_ptr,  # int64 words, `CALL.extra_words` for each block of each row
    vocab_size,
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
    top_k_ptr, top_p_ptr, min_p_ptr, mask_ptr, mask_request_stride, mask_row_stride, mask_stride = parameters[:7]
    biases_ptr, values_ptr, num_biases = parameters[7:]
    if CALL.top_ks[MODEL]:
        fault = tl.where(tl.load(top_k_ptr + request) >= 0, fault, 5)
    if CALL.top_ps[MODEL]:
        top_p = tl.load(top_p_ptr + request)
        fault = tl.where((top_p > 0) & (top_p <= 1), fault, 5)
    if CALL.min_ps[MODEL]:
        min_p = tl.load(min_p_ptr + request)
        fault = tl.where((min_p >= 0) & (min_p <= 1), fault, 5)
    if CALL.biased[MODEL]:
        biases_ptr += request * num_biases
        values_ptr += request * num_biases
        for base in range(0, num_biases, FEW):
            index = base + tl.arange(0, FEW)
            largest = tl.max(tl.load(biases_ptr + index, mask=index < num_biases, other=-1), 0)
            fault = tl.where(largest < vocab_size, fault, 5)
    if CALL.masked[MODEL]:
        mask_ptr += first_row * mask_row_stride if CALL.ragged else request * mask_request_stride
    constraints = (mask_ptr, mask_row_stride, mask_stride, biases_ptr, values_ptr, num_biases)
    filters = (
        top_k_ptr + request,
        top_p_ptr + request,
        min_p_ptr + request,
        cuts_ptr + first * cut_words,
        cut_words,
        extra_ptr + first * CALL.extra_words * num_blocks,
    )
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
        constraints,
        filters,
    ), fault


@triton.jit
def load(model, position, entry, mask, other, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return entries of rows after bias and mask, float32; positions and entries broadcast."""
    x = load_raw(model, position, entry, mask, other, CALL)
    if CALL.biased[MODEL]:
        x = add_biases(x, model, entry, mask)
    if CALL.masked[MODEL]:
        mask_ptr, row_stride, stride, _, _, _ = model[9]
        if not CALL.has_bonus_rows:
            mask = mask & (position < model[8])
        inside = (tl.zeros_like(entry) + mask.to(tl.int32) != 0) & (entry < model[3])
        word_ptr = mask_ptr + position.to(tl.int64) * row_stride + (entry >> 5) * stride
        words = tl.load(word_ptr, mask=inside, other=-1)
        x = tl.where(((words >> (entry & 31).to(tl.int32)) & 1) == 0, float("-inf"), x)
    return x


@triton.jit
def load_block(
    model, position, start, SIZE: tl.constexpr, mask, exists, other, CALL: tl.constexpr, MODEL: tl.constexpr
):
    """Return SIZE entries of a row from one on, a multiple of RUN, after bias and mask, float32.

    They are `other` where `mask`, of entries, is not set; a scalar says whether any is.
    """
    entry = start + tl.arange(0, SIZE)
    x = load_raw(model, position, entry, mask, other, CALL)
    if CALL.biased[MODEL]:
        x = add_biases(x, model, entry, mask)
    if CALL.masked[MODEL]:
        mask_ptr, row_stride, stride, _, _, _ = model[9]
        first = start + RUN * tl.arange(0, SIZE // RUN)
        inside = first < tl.where(exists, model[3], 0)
        if not CALL.has_bonus_rows:
            inside = first < tl.where(exists & (position < model[8]), model[3], 0)
        word_ptr = mask_ptr + position.to(tl.int64) * row_stride + (first >> 5) * stride
        words = tl.load(word_ptr, mask=inside, other=-1) >> (first & 31)
        bits = (words[:, None] >> tl.arange(0, RUN)[None, :]) & 1
        x = tl.where(tl.reshape(bits, [SIZE]) == 0, float("-inf"), x)
    return x


@triton.jit
def add_biases(x, model, entry, mask):
    """Return loaded entries after the bias."""
    _, _, _, ids_ptr, values_ptr, num_biases = model[9]
    inside = (tl.zeros_like(entry) + mask.to(tl.int32) != 0) & (entry < model[3])
    first = entry
    last = entry
    if len(entry.shape) > 0:
        first = tl.min(entry)
        last = tl.max(entry)
    for base in range(0, num_biases, FEW):
        index = base + tl.arange(0, FEW)
        ids = tl.load(ids_ptr + index, mask=index < num_biases, other=-1)
        if tl.sum(((ids >= first) & (ids <= last)).to(tl.int32), 0) > 0:
            for i in range(base, tl.minimum(base + FEW, num_biases)):
                token = tl.load(ids_ptr + i)
                if (token >= first) & (token <= last):
                    x = tl.where(inside & (entry == token), x + tl.load(values_ptr + i), x)
    return x


@triton.jit
def load_raw(model, position, entry, mask, other, CALL: tl.constexpr):
    """Return entries of rows as they are given, float32; positions and entries broadcast."""
    rows_ptr, row_stride, stride, width, _, _, _, _, rows_here, _, _ = model
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
    _, _, _, width, factor, sums_ptr, maxima_ptr, best_ptr, _, _, _ = model
    if CALL.filtered[MODEL]:
        sub_blocks: tl.constexpr = CALL.block // WIDTH
        maxima = tl.reduce(tl.reshape(x, [sub_blocks, WIDTH]), 1, _larger)
        place = block * sub_blocks + tl.arange(0, sub_blocks)
        tl.store(sub_maxima(model, position) + place, maxima, mask=place < tl.where(mask, num_blocks * sub_blocks, 0))
        maximum = tl.reduce(maxima, 0, _larger)
    else:
        maximum = tl.reduce(x, 0, _larger)
    at = position.to(tl.int64) * num_blocks + block
    tl.store(maxima_ptr + at, maximum, mask=mask)
    # A greedy request needs the argmax and no sum; others need it only where the strategy asks for it.
    if CALL.temperature[MODEL] or CALL.best[MODEL]:
        if (factor == 0) | CALL.best[MODEL]:
            best = tl.min(tl.where(x == maximum, entry, width), 0)
            tl.store(best_ptr + at, tl.minimum(best, width - 1), mask=mask)
    if CALL.logits[MODEL]:
        if factor > 0:
            if CALL.entropy and MODEL == TARGET:
                total, bits = sum_exp_and_bits(x, maximum, factor)
                tl.store(model[10][5] + at * CALL.extra_words + 2 * CALL.raw, bits, mask=mask)
            else:
                total = sum_exp(x, maximum, factor)
            tl.store(sums_ptr + at, total, mask=mask)


@triton.jit
def law_pointers(model, position):
    """Return where the law of filtered rows is, as float32, as int32 and as words; what finds it keeps more there."""
    words_ptr = model[10][3] + position.to(tl.int64) * model[10][4]
    return words_ptr.to(tl.pointer_type(tl.float32)), words_ptr.to(tl.pointer_type(tl.int32)), words_ptr


@triton.jit
def sub_maxima(model, position):
    """Return where the maxima of a filtered row's sub-blocks are."""
    return (model[10][3] + position.to(tl.int64) * model[10][4] + LAW_WORDS).to(tl.pointer_type(tl.float32))


@triton.jit
def reduce_raw(x, entry, model, position, block, num_blocks, mask, CALL: tl.constexpr):
    """Store the maximum and the sum of exponentials of one block of the target's row as it is given."""
    if CALL.biased[TARGET] or CALL.masked[TARGET]:
        x = load_raw(model, position, entry, mask, float("-inf"), CALL)
    maximum = tl.reduce(x, 0, _larger)
    at = model[10][5] + CALL.extra_words * (position.to(tl.int64) * num_blocks + block)
    tl.store(at, sum_exp(x, maximum, LOG2_E), mask=mask)
    tl.store((at + 1).to(tl.pointer_type(tl.float32)), maximum, mask=mask)


@triton.jit
def raw_logs(x, model, position, wanted, num_blocks, CALL: tl.constexpr):
    """Return log-probabilities [n] of one loaded entry of each row under the softmax of the target's given logits.

    They are NaN where the row has none.
    """
    index = tl.arange(0, CALL.max_blocks)[None, :]
    at = model[10][5] + CALL.extra_words * (position.to(tl.int64)[:, None] * num_blocks + index)
    mask = wanted[:, None] & (index < num_blocks)
    sums = tl.load(at, mask=mask, other=0, cache_modifier=".cg")
    maxima = tl.load((at + 1).to(tl.pointer_type(tl.float32)), mask=mask, other=float("-inf"), cache_modifier=".cg")
    maximum = tl.reduce(maxima, 1, _larger)
    terms = terms_of((maxima, sums), maximum, tl.full((), LOG2_E, tl.float32))
    total = tl.maximum(tl.sum(terms, 1), 1).to(tl.float64) / SUM_SCALE
    return tl.where(maximum < float("inf"), (x - maximum).to(tl.float64) - tl.log(total), float("nan"))


@triton.jit
def load_parts(model, position, wanted, num_blocks, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what `law` makes the laws of rows at positions [n] from."""
    if CALL.filtered[MODEL]:
        numbers_ptr, ids_ptr, _ = law_pointers(model, position)
        return (
            tl.load(numbers_ptr, mask=wanted, other=0.0, cache_modifier=".cg"),
            tl.load(numbers_ptr + 1, mask=wanted, other=0.0, cache_modifier=".cg"),
            tl.load(ids_ptr + 2, mask=wanted, other=0, cache_modifier=".cg"),
            tl.load(numbers_ptr + 3, mask=wanted, other=0.0, cache_modifier=".cg"),
            tl.load(ids_ptr + 4, mask=wanted, other=0, cache_modifier=".cg"),
        )
    else:
        return load_blocks(model, position, wanted, num_blocks, CALL, MODEL)


@triton.jit
def laws(target, target_parts, draft, draft_parts, CALL: tl.constexpr):
    """Return the laws of both models' rows from `load_parts`, each number [n]; a maximum of NaN where a row has none.

    Without a draft the second is the first. Of two models that need the same, both go through each step together: it
    takes as long as one, but more registers, which programs that read rows have not.
    """
    if CALL.logits[TARGET] and CALL.logits[DRAFT] and not CALL.selects and not CALL.lazy:
        maximum, draft_maximum = tl.reduce((target_parts[0], draft_parts[0]), 1, _larger_two)
        terms = terms_of(target_parts, maximum, target[4])
        draft_terms = terms_of(draft_parts, draft_maximum, draft[4])
        total, draft_total = tl.reduce((terms, draft_terms), 1, add_two)
        target_law = law_of(target, target_parts, maximum, total, CALL, TARGET)
        return target_law, law_of(draft, draft_parts, draft_maximum, draft_total, CALL, DRAFT)
    else:
        target_law = law(target, target_parts, CALL, TARGET)
        draft_law = target_law
        if CALL.has_draft:
            draft_law = law(draft, draft_parts, CALL, DRAFT)
        return target_law, draft_law


@triton.jit
def law(model, parts, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the law of one model's rows from `load_parts`."""
    if CALL.filtered[MODEL]:
        return parts
    else:
        return combine(model, parts, CALL, MODEL)


@triton.jit
def load_blocks(model, position, wanted, num_blocks, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return what the laws of rows at positions [n] are combined from, [n, MAX_BLOCKS]: maxima, sums, best, bits."""
    _, _, _, _, factor, sums_ptr, maxima_ptr, best_ptr, _, _, _ = model
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
        size = num_blocks
        if not CALL.best[MODEL]:
            size = tl.where(factor == 0, num_blocks, 0)
        best = tl.load(best_ptr + at, mask=wanted[:, None] & (index < size), other=0, cache_modifier=".cg")
    bits = sums
    if CALL.entropy and MODEL == TARGET:
        bits_ptr = model[10][5] + at * CALL.extra_words + 2 * CALL.raw
        bits = tl.load(bits_ptr, mask=mask, other=0, cache_modifier=".cg")
    return (maxima, sums, best, bits)


@triton.jit
def combine(model, parts, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the law of rows without a filter from `load_blocks`; see `law_of`."""
    maximum = tl.reduce(parts[0], 1, _larger)
    total = tl.zeros(maximum.shape, tl.int64)
    if CALL.logits[MODEL]:
        total = tl.sum(terms_of(parts, maximum, model[4]), 1)
    return law_of(model, parts, maximum, total, CALL, MODEL)


@triton.jit
def law_of(model, parts, maximum, total, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the law of rows without a filter: maximum, 1 / sum of exponentials, argmax, entropy.

    The entropy is there where `CALL.entropy` asks for it.
    """
    maxima, sums, best, bits = parts
    total = tl.maximum(total, 1)
    inverse = tl.zeros_like(maximum)
    if CALL.logits[MODEL]:
        inverse = (inverse + SUM_SCALE) / total.to(tl.float32)
    first = tl.zeros(maximum.shape, tl.int32)
    if CALL.temperature[MODEL] or CALL.best[MODEL]:
        if (model[4] == 0) | CALL.best[MODEL]:
            first = tl.min(tl.where(maxima == maximum[:, None], best, 2147483647), 1)
    if CALL.logits[MODEL]:
        maximum = tl.where(tl.abs(maximum) < float("inf"), maximum, float("nan"))
    elif CALL.best[MODEL] and MODEL == TARGET:
        maximum = tl.where((maximum > 0) & (maximum < float("inf")), maximum, float("nan"))
    if CALL.entropy and MODEL == TARGET:
        entropy = entropy_of(maxima, sums, bits, maximum, total, model[4])
        return (maximum, inverse, first, entropy)
    else:
        return (maximum, inverse, first)


@triton.jit
def entropy_of(maxima, sums, bits, maximum, total, factor):
    """Return the entropies of rows [n] in nats, float64; NaN where a row has no law.

    H = log Z + sum_x w(x) bits(x) / Z, of exponentials w, their sum Z, and the bits that they lie below the largest.
    Those of a block lie deeper by as much as its maximum does.
    """
    deeper = tl.minimum((maximum[:, None] - maxima) * factor, NEGLIGIBLE)
    terms = (bits.to(tl.float64) + sums.to(tl.float64) * deeper) * tl.exp2(-deeper).to(tl.float64)
    mean = tl.sum(terms.to(tl.int64), 1).to(tl.float64) / total.to(tl.float64)
    entropy = tl.log(total.to(tl.float64) / SUM_SCALE) + mean * LN_2
    return tl.where(maximum == maximum, tl.where(factor == 0, 0.0, entropy), float("nan"))


@triton.jit
def terms_of(parts, maximum, factor):
    """Return the sums of exponentials of blocks times 2^44, relative to the maxima of their rows, [n, MAX_BLOCKS]."""
    relative = (parts[0] - tl.where(maximum > float("-inf"), maximum, 0.0)[:, None]) * factor
    return (parts[1].to(tl.float64) * tl.exp2(relative).to(tl.float64)).to(tl.int64)


@triton.jit
def only(found):
    """Return the law of the only row, as scalars."""
    numbers = ()
    for i in tl.static_range(len(found)):
        numbers = numbers + (tl.sum(found[i], 0),)
    return numbers


@triton.jit
def prob(x, entry, model, found, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return entries as probabilities, float32, given the law of their rows."""
    if CALL.logits[MODEL]:
        factor = model[4]
        p = tl.exp2((x - found[0]) * factor) * found[1]
        if CALL.filtered[MODEL]:
            p = tl.where((x > found[3]) | ((x == found[3]) & (entry >= found[4])), p, 0.0)
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
    if CALL.filtered[MODEL]:  # of equal largest entries the argmax is the first that top-p leaves out
        p = tl.where(model[4] == 0, 1.0, found[1])
        return tl.where(found[0] == found[0], p, float("nan")).to(tl.float64)
    else:
        return prob(found[0], found[2], model, found, CALL, MODEL).to(tl.float64)


@triton.jit
def _larger(a, b):
    """Return the larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger_two(a, b, c, d):
    """Return the larger of two pairs, each as `_larger` does."""
    return _larger(a, c), _larger(b, d)
