"""A draw from what is listed of a filtered row.

Where little is kept of the target's row, and nothing else has a weight, the sub-blocks that `select` listed are all
that is read: by the request's last program, while the others leave.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import draw, laws, reduce, rows
from acceptlib.engine.triton.laws import WIDTH
from acceptlib.engine.triton.rows import DRAFT, INVALID_ROW, MASS_LIMIT, TARGET, UNNORMALIZED_ROW
from acceptlib.engine.triton.search import list_of
from acceptlib.engine.triton.select import WEIGHED
from acceptlib.engine.triton.sums import add_two, fixed


class Listed(NamedTuple):
    """Sub-blocks that hold all that is kept of a row [most_listed], and how many they are, -1 if there are more."""

    sub_blocks: tl.tensor
    number: tl.tensor


@triton.jit
def load(stop, fault, request, CALL: tl.constexpr):
    """Return what is listed of the target's row at the stop; nothing if bad counts may make it another request's."""
    list_ptr = list_of(request.target, stop, request.num_blocks, CALL).sub_blocks_ptr + tl.arange(0, CALL.most_listed)
    number = tl.load(laws.record_of(request.target, stop).num_listed_ptr, cache_modifier=".cg")
    return Listed(tl.load(list_ptr, cache_modifier=".cg"), tl.where(fault == 0, number, -1))


@triton.jit
def draw_listed(stop, kind, row, listed, bits, request, CALL: tl.constexpr):
    """Return the token at the stopping row, and the row's `Status`.

    It is the first whose running sum exceeds r. The list is in no order: a bisection finds the sub-block.
    """
    law = row.target_law
    lane = tl.arange(0, CALL.most_listed)
    from_target = kind.is_bonus
    total, mass, best = _weigh_list(stop, from_target, row, listed.number, request, CALL)
    if CALL.residual is not None:
        if (total == 0) & (from_target == 0):
            # Nothing is left of the residual: draw from p.
            from_target = from_target == 0
            total, mass, _ = _weigh_list(stop, from_target, row, listed.number, request, CALL)
            best = law.argmax
    tl.debug_barrier()
    r = tl.umulhi(bits, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    sums_ptr = list_of(request.target, stop, request.num_blocks, CALL).words_ptr
    sums = tl.load(sums_ptr + lane, mask=lane < listed.number, other=0)
    found = tl.full((), 0, tl.int32)
    taken = tl.full((), 0, tl.int64)
    end = request.num_blocks * (CALL.block // WIDTH)
    while end - found > 1:
        middle = (found + end) // 2
        before = tl.sum(tl.where(listed.sub_blocks < middle, sums, 0), 0)
        if before <= r:
            found = middle
            taken = before
        else:
            end = middle
    _, weights = _weigh_sub_blocks(stop, from_target, row, found + tl.zeros((1,), tl.int32), request, CALL)
    ends = tl.cumsum(tl.sum(fixed(weights), 0), 0)
    token = found * WIDTH + tl.sum((ends <= r - taken).to(tl.int32), 0)
    if CALL.residual is not None and CALL.recovered == "argmax":
        token = tl.where(kind.takes_best, best, token)
    invalid = ((total == 0) & ((mass > 0) == 0)) | (law.maximum != law.maximum)
    row_fault = tl.where(invalid, INVALID_ROW, tl.where((mass <= MASS_LIMIT) == 0, UNNORMALIZED_ROW, 0))
    token = tl.where(kind.known, law.argmax, tl.minimum(token, request.vocab_size - 1))
    return token.to(tl.int64), row_fault


@triton.jit
def _weigh_list(stop, from_target, row, number, request, CALL: tl.constexpr):
    """Store the sums of listed sub-blocks; return that of all, as an integer and in floats, and the heaviest entry."""
    total = tl.full((), 0, tl.int64)
    mass = tl.full((), 0.0, tl.float32)
    most = mass - 1
    best = number * 0
    list_here = list_of(request.target, stop, request.num_blocks, CALL)
    for start in range(0, number, WEIGHED):
        place = start + tl.arange(0, WEIGHED)
        sub_block = tl.load(list_here.sub_blocks_ptr + place, mask=place < number, other=-1, cache_modifier=".cg")
        entry, weights = _weigh_sub_blocks(stop, from_target, row, sub_block, request, CALL)
        sums = tl.sum(fixed(weights), 1)
        tl.store(list_here.words_ptr + place, sums)
        held, float_held = tl.reduce((sums, tl.sum(weights, 1)), 0, add_two)
        total += held
        mass += float_held
        if CALL.residual is not None and CALL.recovered == "argmax":
            largest = tl.max(tl.max(weights, 1), 0)
            first = tl.min(tl.min(tl.where((weights == largest) & (entry >= 0), entry, request.vocab_size), 1), 0)
            best = tl.where(largest > most, first, tl.where(largest == most, tl.minimum(best, first), best))
            most = tl.maximum(most, largest)
    return total, mass, best


@triton.jit
def _weigh_sub_blocks(stop, from_target, row, sub_block, request, CALL: tl.constexpr):
    """Return the entries of sub-blocks [n, WIDTH], and their weights."""
    entry = sub_block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = rows.load(request.target, stop, entry, entry >= 0, float("-inf"), CALL, TARGET)
    y = x
    if CALL.has_draft:
        y = rows.load(request.draft, stop, entry, (entry >= 0) & (row.token >= 0), float("-inf"), CALL, DRAFT)
    _, _, _, weights = draw.weigh(reduce.Block(entry, x, y), from_target, row, request, CALL)
    return entry, weights
