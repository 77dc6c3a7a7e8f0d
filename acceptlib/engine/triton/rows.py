"""Rows inside the kernels: where a request's rows are, and their entries after bias and mask.

What is known of both models' rows when compiling is in pairs of `CALL`, at `TARGET` and `DRAFT`.
"""

# ruff: noqa: N803, RET505, RUF005 - jit functions; constants in capitals, branches known when compiling

import math
from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib import result
from acceptlib.engine import constants

TARGET = tl.constexpr(0)
DRAFT = tl.constexpr(1)
BOTH = tl.constexpr(2)
"""Both models' rows, where it is said whose."""

KEEP = tl.constexpr("")
"""What is read stays in the cache as long as there is room."""

DROP = tl.constexpr("evict_first")
"""What is read makes room first: no other stage reads it, and code and partial results of the next call stay."""

MASK_RUN = tl.constexpr(4)
"""Entries of a block that share a word of the mask: what a thread holds next to each other."""

FEW = tl.constexpr(32)
"""Ids of a bias that are looked at together."""

LARGEST_INT32 = tl.constexpr(2**31 - 1)

BOUNDS = tl.constexpr(512)
"""Bounds of requests that are looked at together."""

INVALID_ROW = tl.constexpr(result.INVALID_ROW)
UNNORMALIZED_ROW = tl.constexpr(result.UNNORMALIZED_ROW)
INVALID_TOKEN_ID = tl.constexpr(result.INVALID_TOKEN_ID)
INVALID_COUNT = tl.constexpr(result.INVALID_COUNT)
INVALID_PARAMETER = tl.constexpr(result.INVALID_PARAMETER)
"""What a `Status` may be beside OK, which is 0."""

ROW_TOLERANCE = tl.constexpr(constants.ROW_TOLERANCE)
MASS_LIMIT = tl.constexpr(constants.MASS_LIMIT)

LOG2_E = tl.constexpr(math.log2(math.e))


class Given(NamedTuple):
    """One model's rows and sampling parameters as the kernel takes them, for all requests."""

    rows_ptr: tl.tensor
    request_stride: tl.tensor
    row_stride: tl.tensor
    stride: tl.tensor
    width: tl.tensor
    temperature_ptr: tl.tensor
    top_k_ptr: tl.tensor
    top_p_ptr: tl.tensor
    min_p_ptr: tl.tensor
    mask_ptr: tl.tensor
    mask_request_stride: tl.tensor
    mask_row_stride: tl.tensor
    mask_stride: tl.tensor
    bias_ids_ptr: tl.tensor
    bias_values_ptr: tl.tensor
    num_biases: tl.tensor


class Model(NamedTuple):
    """One model's rows of one request, of `num_blocks` blocks each: pointers are at its first row.

    Sampling parameters are loaded but not looked at, so that loads that do not need them are on their way first.
    `sums_ptr`, `maxima_ptr` and `best_ptr` are the sum of exponentials (or what `min_p` has in its place), the maximum
    and the argmax of each block of each row, `cuts_ptr` the laws of filtered rows, `cut_words` each. `extra_ptr` is
    what is reduced of the target alone: the sum and the maximum of a block as it is given (`CALL.raw`), and what its
    entropy needs (`CALL.entropy`), or the sums of its entries and of its weights (`CALL.sums_weights`), of which
    `sums_ptr` has the latter as an integer.
    """

    rows_ptr: tl.tensor
    row_stride: tl.tensor
    stride: tl.tensor
    width: tl.tensor
    num_rows: tl.tensor
    num_blocks: tl.tensor
    temperature: tl.tensor
    top_k: tl.tensor
    top_p: tl.tensor
    min_p: tl.tensor
    mask_ptr: tl.tensor
    mask_row_stride: tl.tensor
    mask_stride: tl.tensor
    bias_ids_ptr: tl.tensor
    bias_values_ptr: tl.tensor
    num_biases: tl.tensor
    sums_ptr: tl.tensor
    maxima_ptr: tl.tensor
    best_ptr: tl.tensor
    cuts_ptr: tl.tensor
    cut_words: tl.tensor
    extra_ptr: tl.tensor


class Entries(NamedTuple):
    """Numbers of entries [n], MASK_RUN of them next to each other, and the first of each such run."""

    each: tl.tensor
    first: tl.tensor


@triton.jit
def locate(request, cu_ptr, num_tokens, max_num_draft_tokens, CHECKS: tl.constexpr, CALL: tl.constexpr):
    """Return the request's first drafted position among all, n_b before placeholders, and its `Status`.

    The rows that these point at exist, whatever the counts are. Without `CHECKS`, a request behind bad counts may come
    back as sound, with rows that are also another request's: it may read them, but write only where no other request
    does.
    """
    if CALL.ragged:
        before = request if CALL.ends else request + 1  # bounds up to its start
        start = tl.load(cu_ptr + before - 1, mask=before > 0, other=0).to(tl.int64)
        end = tl.load(cu_ptr + before).to(tl.int64)
        sane = (start >= 0) & (end >= start) & (end <= num_tokens) & (end - start <= max_num_draft_tokens)
        if CHECKS:
            largest = tl.full((), 0, tl.int64)
            for base in range(0, before, BOUNDS):
                index = base + tl.arange(0, BOUNDS)
                bounds = tl.load(cu_ptr + index, mask=index < before, other=0)
                largest = tl.maximum(largest, tl.max(bounds, 0).to(tl.int64))
            sane = sane & (start == largest)
            if not CALL.ends:
                sane = sane & (tl.load(cu_ptr) == 0)
        return tl.where(sane, start, 0), tl.where(sane, end - start, 0).to(tl.int32), tl.where(sane, 0, INVALID_COUNT)
    else:
        return request * max_num_draft_tokens, max_num_draft_tokens, tl.full((), 0, tl.int32)


@triton.jit
def open_model(
    given,
    request,
    slot,
    first_row,
    num_rows,
    num_kept_rows,
    num_blocks,
    blocks_ptr,
    cuts_ptr,
    cut_words,
    extra_ptr,
    CALL: tl.constexpr,
    MODEL: tl.constexpr,
):
    """Return a request's rows of one model.

    Args:
        given: All requests' rows.
        request: Its number.
        slot: Where what is found of its first row is kept, among rows.
        first_row: The number of that row among those given.
        num_rows: How many rows it has.
        num_kept_rows: Rows of all requests that something may be kept of.
        num_blocks: Blocks of a row.
        blocks_ptr: Two words for each block of each row.
        cuts_ptr: `cut_words` for each of the request's rows.
        cut_words: See `Layout`.
        extra_ptr: `CALL.extra_words` for each block of each row.
        CALL: The call.
        MODEL: Which of the two models.
    """
    start = first_row * given.row_stride if CALL.ragged else request * given.request_stride
    if CALL.aligned:
        start = tl.multiple_of(start, 16)  # loads are wide only where offsets are known to be multiples
    temperature = tl.full((), 1.0, tl.float32)
    if CALL.temperature[MODEL]:
        temperature = tl.load(given.temperature_ptr + request)
    top_k = tl.full((), 0, tl.int32)
    if CALL.top_ks[MODEL]:
        top_k = tl.load(given.top_k_ptr + request)
    top_p = tl.full((), 1.0, tl.float32)
    if CALL.top_ps[MODEL]:
        top_p = tl.load(given.top_p_ptr + request)
    min_p = tl.full((), 0.0, tl.float32)
    if CALL.min_ps[MODEL]:
        min_p = tl.load(given.min_p_ptr + request)
    mask_ptr = given.mask_ptr
    if CALL.masked[MODEL]:
        mask_ptr += first_row * given.mask_row_stride if CALL.ragged else request * given.mask_request_stride
    maxima_ptr = (blocks_ptr + num_kept_rows * num_blocks).to(tl.pointer_type(tl.float32))
    best_ptr = (maxima_ptr + num_kept_rows * num_blocks).to(tl.pointer_type(tl.int32))
    at = slot * num_blocks
    return Model(
        rows_ptr=given.rows_ptr + start,
        row_stride=given.row_stride,
        stride=given.stride,
        width=given.width,
        num_rows=num_rows,
        num_blocks=num_blocks,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        mask_ptr=mask_ptr,
        mask_row_stride=given.mask_row_stride,
        mask_stride=given.mask_stride,
        bias_ids_ptr=given.bias_ids_ptr + request * given.num_biases,
        bias_values_ptr=given.bias_values_ptr + request * given.num_biases,
        num_biases=given.num_biases,
        sums_ptr=blocks_ptr + at,
        maxima_ptr=maxima_ptr + at,
        best_ptr=best_ptr + at,
        cuts_ptr=cuts_ptr,
        cut_words=cut_words,
        extra_ptr=extra_ptr + slot * CALL.extra_words * num_blocks,
    )


class Share(NamedTuple):
    """What one of the programs that share both models' rows goes through.

    Attributes:
        model: The model whose row it is.
        first: The program's number among those of that row.
        exists: Whether there is such a row.
        of_draft: Whether it is the draft's.
    """

    model: Model
    first: tl.tensor
    exists: tl.tensor
    of_draft: tl.tensor


@triton.jit
def share_of(program, step, position, count, request):
    """Return a program's share of both models' rows at a position, of which the target's has the first `step` programs.

    With `CALL.alike`, code that goes on with it is there once, not for each model.
    """
    of_draft = program >= step
    fields = ()
    for i in tl.static_range(len(request.target)):
        fields = fields + (tl.where(of_draft, request.draft[i], request.target[i]),)
    exists = position < tl.where(of_draft, count, count + 1)
    return Share(Model(*fields), tl.where(of_draft, program - step, program), exists, of_draft)


@triton.jit
def fault_of(model, vocab_size, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the `Status` that a model's sampling parameters give a request."""
    fault = tl.full((), 0, tl.int32)
    if CALL.temperature[MODEL]:
        fault = tl.where((model.temperature >= 0) & (model.temperature < float("inf")), 0, INVALID_PARAMETER)
    if CALL.top_ks[MODEL]:
        fault = tl.where(model.top_k >= 0, fault, INVALID_PARAMETER)
    if CALL.top_ps[MODEL]:
        fault = tl.where((model.top_p > 0) & (model.top_p <= 1), fault, INVALID_PARAMETER)
    if CALL.min_ps[MODEL]:
        fault = tl.where((model.min_p >= 0) & (model.min_p <= 1), fault, INVALID_PARAMETER)
    if CALL.biased[MODEL]:
        for base in range(0, model.num_biases, FEW):
            index = base + tl.arange(0, FEW)
            largest = tl.max(tl.load(model.bias_ids_ptr + index, mask=index < model.num_biases, other=-1), 0)
            fault = tl.where(largest < vocab_size, fault, INVALID_PARAMETER)
    return fault


@triton.jit
def factor_of(model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return log2(e) / temperature, which turns logits into binary digits; 0 if greedy."""
    factor = tl.full((), LOG2_E, tl.float32)
    if CALL.temperature[MODEL]:
        # An infinite factor would turn the maximum's distance from itself into NaN.
        divided = tl.minimum(tl.div_rn(factor, model.temperature), 1e30)
        factor = tl.where(model.temperature > 0, divided, 0.0)
    return factor


@triton.jit
def floor_of(model):
    """Return the least weight, beside the largest entry's 1, that min-p keeps: float32; 0 if it is off."""
    number = model.min_p
    rounded = tl.where((number > 0) & (number <= 1), number, 0.0).to(tl.float32)
    following = (rounded.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where((rounded.to(tl.float64) < number.to(tl.float64)) & (rounded < 1), following, rounded)


@triton.jit
def is_filtered(model, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return whether top-k, top-p or min-p may leave out entries of a request's rows."""
    found = model.width < 0  # never
    if CALL.top_ks[MODEL]:
        found = found | ((model.top_k > 0) & (model.top_k < model.width))
    if CALL.top_ps[MODEL]:
        found = found | ((model.top_p > 0) & (model.top_p < 1))
    if CALL.min_ps[MODEL]:
        found = found | (floor_of(model) > 0)
    return found


@triton.jit
def load(model, position, entry, mask, other, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return entries of rows after bias and mask, float32; positions and entries broadcast."""
    x = load_raw(model, position, entry, mask, other, KEEP, CALL)
    if CALL.biased[MODEL]:
        x = add_biases(x, model, entry, mask)
    if CALL.masked[MODEL]:
        if not CALL.has_bonus_rows:
            mask = mask & (position < model.num_rows)
        inside = (tl.zeros_like(entry) + mask.to(tl.int32) != 0) & (entry < model.width)
        word_ptr = model.mask_ptr + position.to(tl.int64) * model.mask_row_stride + (entry >> 5) * model.mask_stride
        words = tl.load(word_ptr, mask=inside, other=-1)
        x = tl.where(((words >> (entry & 31).to(tl.int32)) & 1) == 0, float("-inf"), x)
    return x


@triton.jit
def entries_from(start, SIZE: tl.constexpr):
    """Return SIZE entries from `start` on, which is a multiple of MASK_RUN."""
    return Entries(start + tl.arange(0, SIZE), start + MASK_RUN * tl.arange(0, SIZE // MASK_RUN))


@triton.jit
def load_block(
    model, position, entries, mask, exists, other, POLICY: tl.constexpr, CALL: tl.constexpr, MODEL: tl.constexpr
):
    """Return entries of a row after bias and mask, float32; POLICY is KEEP or DROP.

    `mask` [n] says which entries are read; the rest are `other`. `exists`, a scalar, is false where none is.
    """
    x = load_raw(model, position, entries.each, mask, other, POLICY, CALL)
    return after_bias_and_mask(x, model, position, entries, mask, exists, CALL, MODEL)


@triton.jit
def after_bias_and_mask(x, model, position, entries, mask, exists, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return entries of a row, loaded by `load_raw`, after bias and mask; the arguments are those of `load_block`."""
    if CALL.biased[MODEL]:
        x = add_biases(x, model, entries.each, mask)
    if CALL.masked[MODEL]:
        first = entries.first
        inside = first < tl.where(exists, model.width, 0)
        if not CALL.has_bonus_rows:
            inside = first < tl.where(exists & (position < model.num_rows), model.width, 0)
        word_ptr = model.mask_ptr + position.to(tl.int64) * model.mask_row_stride + (first >> 5) * model.mask_stride
        words = tl.load(word_ptr, mask=inside, other=-1) >> (first & 31)
        bits = (words[:, None] >> tl.arange(0, MASK_RUN)[None, :]) & 1
        x = tl.where(tl.reshape(bits, x.shape) == 0, float("-inf"), x)
    return x


@triton.jit
def add_biases(x, model, entry, mask):
    """Return loaded entries after the bias."""
    inside = (tl.zeros_like(entry) + mask.to(tl.int32) != 0) & (entry < model.width)
    first = entry
    last = entry
    if len(entry.shape) > 0:
        first = tl.min(entry)
        last = tl.max(entry)
    for base in range(0, model.num_biases, FEW):
        index = base + tl.arange(0, FEW)
        ids = tl.load(model.bias_ids_ptr + index, mask=index < model.num_biases, other=-1)
        if tl.sum(((ids >= first) & (ids <= last)).to(tl.int32), 0) > 0:
            for i in range(base, tl.minimum(base + FEW, model.num_biases)):
                token = tl.load(model.bias_ids_ptr + i)
                if (token >= first) & (token <= last):
                    x = tl.where(inside & (entry == token), x + tl.load(model.bias_values_ptr + i), x)
    return x


@triton.jit
def load_raw(model, position, entry, mask, other, POLICY: tl.constexpr, CALL: tl.constexpr):
    """Return entries of rows as they are given, float32; positions and entries broadcast."""
    row = position.to(tl.int64) * model.row_stride
    if CALL.aligned and len(position.shape) == 0:
        row = tl.multiple_of(row, 16)
    if not CALL.has_bonus_rows:
        mask = mask & (position < model.num_rows)
    mask = (tl.zeros_like(entry) + mask.to(tl.int32) != 0) & (entry < model.width)
    entries_ptr = model.rows_ptr + row + entry.to(tl.int64) * model.stride
    x = tl.load(entries_ptr, mask=mask, other=other, eviction_policy=POLICY)
    if x.dtype == tl.bfloat16:  # the upper half of a float32; a conversion takes half as many instructions again
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)
