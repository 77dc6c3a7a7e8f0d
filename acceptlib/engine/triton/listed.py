"""A draw from what is listed of a filtered row.

Where little is kept of the target's row, and nothing else has a weight, the entries that `select` listed are all that
is looked at: by the request's last program, while the others leave.
"""

# ruff: noqa: N803 - jit functions; their constants are in capitals

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import draw, laws, reduce, rows
from acceptlib.engine.triton.records import list_of, record_of
from acceptlib.engine.triton.rows import DRAFT, INVALID_ROW, MASS_LIMIT, UNNORMALIZED_ROW
from acceptlib.engine.triton.search import ABREAST
from acceptlib.engine.triton.sums import fixed


class Listed(NamedTuple):
    """Words of entries [most_listed] that hold all that is kept of a row, and how many there are; -1 if too many."""

    words: tl.tensor
    number: tl.tensor


@triton.jit
def load(stop, fault, request, CALL: tl.constexpr):
    """Return what is listed of the target's row at the stop; nothing if bad counts may make it another request's."""
    words_ptr = list_of(request.target, stop, request.num_blocks, CALL).words_ptr + tl.arange(0, CALL.most_listed)
    number = tl.load(record_of(request.target, stop).num_listed_ptr, cache_modifier=".cg")
    return Listed(tl.load(words_ptr, cache_modifier=".cg"), tl.where(fault == 0, number, -1))


@triton.jit
def draw_listed(stop, kind, row, listed, bits, request, CALL: tl.constexpr):
    """Return the token at the stopping row, and the row's `Status`.

    It is the first whose running sum exceeds r. The list is in no order, so each entry is compared with each.
    """
    law = row.target_law
    lane = tl.arange(0, CALL.most_listed)
    held = lane < listed.number
    entry = tl.where(held, listed.words.to(tl.int32), request.vocab_size)
    x = tl.where(held, laws.logit_of((listed.words >> 32).to(tl.int32)), float("-inf"))
    y = x
    if CALL.has_draft:
        y = rows.load(request.draft, stop, entry, held & (row.token >= 0), float("-inf"), CALL, DRAFT)
    raw = reduce.Block(entry, x, y)
    from_target = kind.is_bonus
    _, _, _, weights = draw.weigh(raw, from_target, row, request, CALL)
    parts = fixed(weights)
    total = tl.sum(parts, 0)
    if CALL.residual is not None:
        if (total == 0) & (from_target == 0):
            # Nothing is left of the residual: draw from p.
            from_target = from_target == 0
            _, _, _, weights = draw.weigh(raw, from_target, row, request, CALL)
            parts = fixed(weights)
            total = tl.sum(parts, 0)
    mass = tl.sum(weights, 0)
    r = tl.umulhi(bits, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    words_ptr = list_of(request.target, stop, request.num_blocks, CALL).words_ptr
    parts_ptr = words_ptr + CALL.most_listed
    tl.store(parts_ptr + lane, parts)
    tl.debug_barrier()
    most: tl.constexpr = CALL.most_listed
    before = tl.zeros((most, ABREAST), tl.int64)
    for start in range(0, listed.number, ABREAST):
        other = start + tl.arange(0, ABREAST)
        others = tl.load(words_ptr + other).to(tl.int32)
        their_parts = tl.load(parts_ptr + other, mask=other < listed.number, other=0)
        before += tl.where(others[None, :] < entry[:, None], their_parts[None, :], 0)
    before = tl.sum(before, 1)
    token = tl.max(tl.where((before <= r) & (r - before < parts), entry, 0), 0)
    if CALL.residual is not None and CALL.recovered == "argmax":
        best = tl.min(tl.where(weights == tl.max(weights, 0), entry, request.vocab_size), 0)
        token = tl.where(kind.takes_best, tl.where(from_target, law.argmax, best), token)
    invalid = ((total == 0) & ((mass > 0) == 0)) | (law.maximum != law.maximum)
    row_fault = tl.where(invalid, INVALID_ROW, tl.where((mass <= MASS_LIMIT) == 0, UNNORMALIZED_ROW, 0))
    token = tl.where(kind.known, law.argmax, tl.minimum(token, request.vocab_size - 1))
    return token.to(tl.int64), row_fault
