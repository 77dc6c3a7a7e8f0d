"""A draw from what is listed of a filtered row.

Where little of the target's row is kept, and nothing else has a weight, one of the request's programs looks at what
`select` or `min_p` listed, and at nothing else, while the other programs leave.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import draw, elements, keys, random, rows
from acceptlib.engine.triton.lists import ABREAST
from acceptlib.engine.triton.positions import LANES
from acceptlib.engine.triton.records import list_of, record_of
from acceptlib.engine.triton.rows import DRAFT, INVALID_ROW, MASS_LIMIT, TARGET, UNNORMALIZED_ROW
from acceptlib.engine.triton.sums import add_two, fixed


class Listed(NamedTuple):
    """What is listed of a row.

    Attributes:
        raw: Entries [most_listed] that hold all that is kept of the row, after bias and mask; those of a run in order.
        number: How many there are; -1 if too many.
        suffices: Whether every row of the request has a list. Then the first program finishes the request without
            waiting for the others, which have nothing to weigh and leave.
    """

    raw: elements.Block
    number: tl.tensor
    suffices: tl.tensor


class Ahead(NamedTuple):
    """Lists of the target's first rows: lengths [LANES], -1 for an incomplete one, and first words [LANES, n]."""

    numbers: tl.tensor
    words: tl.tensor


@triton.jit
def leaves(grid, count, fault, request, CALL: tl.constexpr):
    """Return whether this program has nothing to do, wherever the request stops: see `Listed.suffices`.

    Programs other than the first leave before they look for the stop, since looking would slow down the first ones.
    These do not wait here.
    """
    found = grid.program < 0  # never
    if grid.program > 0:
        found = _suffices(_numbers(tl.arange(0, LANES), count, request, CALL), count, fault, request, CALL)
    return found


@triton.jit
def load_ahead(count, request, CALL: tl.constexpr):
    """Return what may be needed of lists, to be on its way while the stop is found."""
    position = tl.arange(0, LANES)
    place = tl.arange(0, CALL.listed_ahead)[None, :]
    words_ptr = list_of(request.target, position, CALL).words_ptr[:, None] + place
    exists = position < _num_rows(count, CALL)
    numbers = _numbers(position, count, request, CALL)
    return Ahead(numbers, tl.load(words_ptr, mask=exists[:, None], other=0, cache_modifier=".cg"))


@triton.jit
def _num_rows(count, CALL: tl.constexpr):
    """Return how many rows a request has."""
    return count + 1 if CALL.has_bonus_rows else count


@triton.jit
def _numbers(position, count, request, CALL: tl.constexpr):
    """Return the lengths of lists of the target's rows at positions, -1 for an incomplete one, 0 beyond the rows."""
    numbers_ptr = record_of(request.target, position).num_listed_ptr
    return tl.load(numbers_ptr, mask=position < _num_rows(count, CALL), other=0, cache_modifier=".cg")


@triton.jit
def _suffices(numbers, count, fault, request, CALL: tl.constexpr):
    """Return whether every row of a request has a list, given the numbers of the first LANES."""
    fewest = tl.min(numbers, 0)
    for base in range(LANES, _num_rows(count, CALL), LANES):
        numbers = _numbers(base + tl.arange(0, LANES), count, request, CALL)
        fewest = tl.minimum(fewest, tl.min(numbers, 0))
    return (fault == 0) & (fewest >= 0)


@triton.jit
def load(stop, length, count, fault, ahead, request, CALL: tl.constexpr):
    """Return what is listed of the target's row at the stop; nothing if bad counts may make it another request's."""
    lane = tl.arange(0, CALL.most_listed)
    words_ptr = list_of(request.target, stop, CALL).words_ptr + lane // CALL.listed_run
    if CALL.decided:  # rows beyond the stop may not have been read
        number = _numbers(stop, count, request, CALL)
        words = tl.load(words_ptr, cache_modifier=".cg")
        suffices = fault != fault
    else:
        chosen = tl.arange(0, LANES) == stop
        number = tl.sum(tl.where(chosen, ahead.numbers, 0), 0)
        words = spread(tl.sum(tl.where(chosen[:, None], ahead.words, 0), 0), CALL)
        if (stop >= LANES) | (number > CALL.listed_ahead):
            number = _numbers(stop, count, request, CALL)
            words = tl.load(words_ptr, cache_modifier=".cg")
        suffices = _suffices(ahead.numbers, count, fault, request, CALL)
    # Where there is no row, nothing is drawn; bad counts may make it another request's.
    number = tl.where(fault == 0, number * CALL.listed_run, -1)
    held = lane < number
    entry = words.to(tl.int32) * CALL.listed_run + lane % CALL.listed_run
    entry = tl.where(held, entry, request.vocab_size)
    if CALL.lists_runs:
        x = rows.load(request.target, stop, entry, held, float("-inf"), CALL, TARGET)
    else:
        x = tl.where(held, keys.logit_of((words >> 32).to(tl.int32)), float("-inf"))
    y = x
    if CALL.has_draft:
        y = rows.load(request.draft, stop, entry, held & (stop < length), float("-inf"), CALL, DRAFT)
    return Listed(elements.Block(entry, x, y), number, suffices)


@triton.jit
def spread(words, CALL: tl.constexpr):
    """Return the first words of a list, each at its entries' places among [most_listed]: a run's entries share one."""
    length: tl.constexpr = words.shape[0]
    if CALL.lists_runs:
        found = tl.broadcast_to(words[:, None], [length, CALL.listed_run])
    else:
        found = tl.broadcast_to(words[None, :], [CALL.most_listed // length, length])
    return tl.reshape(found, [CALL.most_listed])


@triton.jit
def before_in_runs(entry, parts, number, CALL: tl.constexpr):
    """Return the sum of the parts [most_listed] that come before each entry in the row, of `number` listed by runs."""
    num_runs: tl.constexpr = CALL.most_listed // CALL.listed_run
    first = tl.min(tl.reshape(entry, [num_runs, CALL.listed_run]), 1)
    within = tl.reshape(parts, [num_runs, CALL.listed_run])
    before = before_each(first, tl.sum(within, 1), number // CALL.listed_run)
    return tl.reshape(before[:, None] + tl.cumsum(within, 1) - within, [CALL.most_listed])


@triton.jit
def before_each(entry, parts, number):
    """Return the sum of the parts [n] that come before each entry in the row, of `number` listed one by one."""
    abreast: tl.constexpr = min(ABREAST.value, entry.shape[0])
    before = tl.zeros((entry.shape[0], abreast), tl.int64)
    for start in range(0, number, abreast):
        other = start + tl.arange(0, abreast)
        others, their_parts = tl.gather(entry, other, 0), tl.gather(parts, other, 0)
        before += tl.where(others[None, :] < entry[:, None], their_parts[None, :], 0)
    return tl.sum(before, 1)


@triton.jit
def draw_listed(kind, row, listed, bits, request, CALL: tl.constexpr):
    """Return the token at the stopping row, and the row's `Status`.

    It is the first whose running sum exceeds r. A list is in no order, so each entry or run is compared with each.
    """
    law = row.target_law
    raw, entry = listed.raw, listed.raw.entry
    from_target = kind.is_bonus
    weights, _, _ = draw.weigh(raw, from_target, row, request, CALL)
    parts = fixed(weights)
    total, mass = tl.reduce((parts, weights), 0, add_two)
    if CALL.residual is not None:
        if (total == 0) & (from_target == 0):
            # Nothing is left of the residual: draw from p.
            from_target = from_target == 0
            weights, _, _ = draw.weigh(raw, from_target, row, request, CALL)
            parts = fixed(weights)
            total, mass = tl.reduce((parts, weights), 0, add_two)
    r = random.multiply_high(bits, total)
    if CALL.lists_runs:
        before = before_in_runs(entry, parts, listed.number, CALL)
    else:
        before = before_each(entry, parts, listed.number)
    token = tl.max(tl.where((before <= r) & (r - before < parts), entry, 0), 0)
    if CALL.residual is not None and CALL.recovered == "argmax":
        best = tl.min(tl.where(weights == tl.max(weights, 0), entry, request.vocab_size), 0)
        token = tl.where(kind.takes_best, tl.where(from_target, law.argmax, best), token)
    invalid = ((total == 0) & ((mass > 0) == 0)) | (law.maximum != law.maximum)
    row_fault = tl.where(invalid, INVALID_ROW, tl.where((mass <= MASS_LIMIT) == 0, UNNORMALIZED_ROW, 0))
    token = tl.where(kind.known, law.argmax, tl.minimum(token, request.vocab_size - 1))
    return token.to(tl.int64), row_fault
