"""What programs of the last stage find of a row, and how the program that finishes the request comes by it.

Mostly programs count who has arrived, and the last one reads what all stored, which has to be in memory before each of
them counts. Where `CALL.awaits`, one more program waits for the numbers themselves, in words that are 0 before and
after the call, and not 0 whatever number they hold. It is the request's last program in the grid, so those that it
waits for started before it. This holds for probabilities; for logits, of which less has to be known, see `held`.
"""

# ruff: noqa: N803, N806, RET505, RUF005 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import counters, random, rows
from acceptlib.engine.triton.sums import add_three

MASS_SIGN = tl.constexpr(2**31)
"""Sign of a float32. The masses of weights and q have none, so it marks what was written."""

LARGEST_SUM = tl.constexpr(2**63 - 1)
"""The largest sum of a part."""

LOW = tl.constexpr(2**32 - 1)
"""The lower half of a word."""


class Grid(NamedTuple):
    """This program, the programs of its request that weigh a row, and the blocks of the row that they share."""

    program: tl.tensor
    num_programs: tl.tensor
    num_blocks: tl.tensor


class Sums(NamedTuple):
    """What programs found of a row: the sum of each part, int64, and the masses of the draw's weights, p and q."""

    parts: tl.tensor
    weights: tl.tensor
    p: tl.tensor
    q: tl.tensor


@triton.jit
def entries_of(block, CALL: tl.constexpr):
    """Return the entries of a block in an order in which each warp loads those of one part, if it has one."""
    start = block * CALL.emit_block
    entries = rows.entries_from(0, CALL.emit_block)
    return rows.Entries(start + _in_order(entries.each, CALL), start + _in_order(entries.first, CALL))


@triton.jit
def _in_order(index, CALL: tl.constexpr):
    """Return which entry of a block comes at an index: warps take turns at what they load at once."""
    part = index // CALL.emit_run % CALL.emit_parts
    number = index // (CALL.emit_run * CALL.emit_parts)
    return (part * CALL.emit_rounds + number) * CALL.emit_run + index % CALL.emit_run


@triton.jit
def in_parts(numbers, CALL: tl.constexpr):
    """Return numbers, one for each four entries in the order of `entries_of`, added up to n a part: [parts, n]."""
    return tl.sum(tl.reshape(numbers, [CALL.emit_rounds, CALL.emit_parts, CALL.emit_run // 4]), 0)


@triton.jit
def row_partials(position, partials_ptr, grid, CALL: tl.constexpr):
    """Return where the partial results of one of a request's rows are."""
    return partials_ptr + position.to(tl.int64) * CALL.emit_words * grid.num_blocks


@triton.jit
def largest_in(partials_ptr, num_blocks, CALL: tl.constexpr):
    """Return where the largest weight of each part of a row is; the masses that programs found are behind these."""
    return (partials_ptr + num_blocks * CALL.emit_parts).to(tl.pointer_type(tl.float32))


@triton.jit
def store_sums(sums, part, partials_ptr, request, CALL: tl.constexpr):
    """Store the sums of some parts."""
    if CALL.awaits:
        tl.store(request.counters.awaited_ptr + part, nonzero_of(sums))
    else:
        tl.store(partials_ptr + part, sums)


@triton.jit
def store_masses(weights, p, q, grid, partials_ptr, request, CALL: tl.constexpr):
    """Store the masses that a program found of its parts."""
    program, num_programs, num_blocks = grid
    num_parts = num_blocks * CALL.emit_parts
    place = program * CALL.emit_parts + tl.arange(0, CALL.emit_parts)
    if CALL.awaits:
        words_ptr = request.counters.awaited_ptr + num_parts + place
        pairs, words = words_of(weights, p, q)
        tl.store(words_ptr, pairs)
        tl.store(words_ptr + num_parts, words)
    else:
        masses_ptr = largest_in(partials_ptr, num_blocks, CALL) + num_parts + place
        tl.store(masses_ptr, weights)
        if CALL.given_probs:
            num_masses = num_programs * CALL.emit_parts
            tl.store(masses_ptr + num_masses, p)
            tl.store(masses_ptr + 2 * num_masses, q)


@triton.jit
def nonzero_of(sums):
    """Return sums of parts, from 0 to LARGEST_SUM, as words of which none is 0."""
    return (sums << 1) | 1


@triton.jit
def sum_of(words):
    """Return the sums that words hold."""
    return (words >> 1) & LARGEST_SUM


@triton.jit
def words_of(weights, p, q):
    """Return masses as two words each, neither of which is 0: one of weights and p, and one of q."""
    return ((_bits(weights) | MASS_SIGN) << 32) | _bits(p), _bits(q) | MASS_SIGN


@triton.jit
def masses_of(pairs, words):
    """Return the masses of weights, p and q that words hold, NaN as long as nothing was written there."""
    return (
        _float32((pairs >> 32) & (MASS_SIGN - 1), pairs),
        _float32(pairs & LOW, pairs),
        _float32(words & (MASS_SIGN - 1), words),
    )


@triton.jit
def _bits(mass):
    """Return a float32 as the lower half of a word."""
    return mass.to(tl.int32, bitcast=True).to(tl.int64) & LOW


@triton.jit
def _float32(bits, words):
    """Return the float32 of the lower halves of words, NaN where `words` are 0."""
    return tl.where(words == 0, float("nan"), bits.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def finishes(grid, few, request, CALL: tl.constexpr):
    """Return whether this program is the one that finishes the request: the first, where nobody weighs a row."""
    if CALL.awaits:
        last = grid.program == grid.num_programs
    elif CALL.lists:
        last = few.suffices  # then only the first program gets here: see `listed.leaves`
        if few.suffices == 0:
            last = counters.arrive(request.counters.arrived_ptr, grid.num_programs)
    else:
        last = counters.arrive(request.counters.arrived_ptr, grid.num_programs)
    return last


@triton.jit
def load_sums(partials_ptr, grid, request, CALL: tl.constexpr):
    """Return what programs found of a row.

    Where `CALL.awaits`, it waits for the sums alone. A mass that is not there yet is NaN; `total_masses` waits for it.
    """
    _, num_programs, num_blocks = grid
    index = tl.arange(0, CALL.max_emit_blocks * CALL.emit_parts)
    num_parts = num_blocks * CALL.emit_parts
    if CALL.awaits:
        parts = sum_of(_awaited(num_parts, request, CALL))
        weights, p, q = _load_masses(request, num_parts, CALL)
    else:
        parts = tl.load(partials_ptr + index, mask=index < num_parts, other=0, cache_modifier=".cg")
        num_masses = num_programs * CALL.emit_parts
        used = index < num_masses
        masses_ptr = largest_in(partials_ptr, num_blocks, CALL) + num_parts + index
        weights = tl.load(masses_ptr, mask=used, other=0.0, cache_modifier=".cg")
        p = weights
        q = weights
        if CALL.given_probs:
            p = tl.load(masses_ptr + num_masses, mask=used, other=0.0, cache_modifier=".cg")
            q = tl.load(masses_ptr + 2 * num_masses, mask=used, other=0.0, cache_modifier=".cg")
    return Sums(parts, weights, p, q)


@triton.jit
def _awaited(num_parts, request, CALL: tl.constexpr):
    """Return the words of a row's sums, once none of them is 0, and 1 beyond them."""
    words_ptr = request.counters.awaited_ptr
    SIZE: tl.constexpr = CALL.max_emit_blocks * CALL.emit_parts
    index = tl.arange(0, SIZE)
    words = index.to(tl.int64) * 0
    # The draw's random bits are found first, while no word is there yet: how often to wait is made to depend on them.
    bits = random.bits_of(request, CALL)
    if CALL.spins:
        turns = tl.where(bits == 0, 2, 1)
        # Once or twice, which finds the same. Outside a loop it would be moved to where all warps wait for all words.
        while turns > 0:
            words = _spin(words_ptr, num_parts, SIZE)
            turns -= 1
    else:
        missing = num_parts + (bits >> 63).to(tl.int32)  # interpreted, no word is missing
        while missing > 0:
            words = tl.load(words_ptr + index, mask=index < num_parts, other=1, volatile=True)
            missing = tl.sum((words == 0).to(tl.int32), 0)
    return words


@triton.jit
def _spin(words_ptr, num_words, SIZE: tl.constexpr):
    """Return what `_awaited` does, [SIZE]: each thread waits for two of the words by itself, and meets no other warp.

    Warps may look at the same words. All meet in the total of masses, before any word is cleared.
    """
    start = tl.arange(0, SIZE // 2) * 2
    evens, odds = tl.inline_asm_elementwise(
        """{
        .reg .pred even, odd, missing;
        setp.gt.s32 even, $3, 0;
        setp.gt.s32 odd, $3, 1;
        mov.b64 $0, 1;
        mov.b64 $1, 1;
        WAIT:
        @even ld.volatile.global.b64 $0, [$2];
        @odd ld.volatile.global.b64 $1, [$2 + 8];
        setp.eq.s64 missing, $0, 0;
        setp.eq.or.s64 missing, $1, 0, missing;
        @missing bra WAIT;
        }""",
        "=&l,=&l,l,r",
        [words_ptr + start, num_words - start],
        dtype=(tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    return tl.reshape(tl.join(evens, odds), [SIZE])


@triton.jit
def in_lanes(numbers, NUM_LANES: tl.constexpr):
    """Return [n] numbers as n / NUM_LANES tensors [NUM_LANES], so that each lane has neighbours.

    The numbers cross warps once. Whatever is found from them then takes none of the waits for other warps that sums
    over all numbers take.
    """
    if numbers.shape[0] == NUM_LANES:
        return (numbers,)
    else:
        halves = tl.split(tl.reshape(numbers, [NUM_LANES, numbers.shape[0] // NUM_LANES // 2, 2]))
        evens = in_lanes(tl.reshape(halves[0], [numbers.shape[0] // 2]), NUM_LANES)
        odds = in_lanes(tl.reshape(halves[1], [numbers.shape[0] // 2]), NUM_LANES)
        found = ()
        for i in tl.static_range(len(evens)):
            found = found + (evens[i], odds[i])
        return found


@triton.jit
def total_and_ends(parts):
    """Return the sum of parts `in_lanes`, and their running sums in the same form."""
    own = parts[0]
    for i in tl.static_range(1, len(parts)):
        own += parts[i]
    end = tl.cumsum(own, 0) - own
    ends = ()
    for i in tl.static_range(len(parts)):
        end += parts[i]
        ends = ends + (end,)
    return tl.sum(own, 0), ends


@triton.jit
def part_at(ends, r, num_parts):
    """Return the first part whose running sum, `in_lanes`, exceeds r, and the sum of those before it."""
    index = tl.arange(0, ends[0].shape[0]) * len(ends)
    number, taken = index * 0, ends[0] * 0
    for i in tl.static_range(len(ends)):
        below = (ends[i] <= r) & (index + i < num_parts)
        number += below.to(tl.int32)
        taken = tl.where(below, ends[i], taken)
    return tl.minimum(tl.sum(number, 0), num_parts - 1), tl.max(taken, 0)


@triton.jit
def with_part(parts, number, part):
    """Return parts `in_lanes` with the sum of one of them replaced."""
    index = tl.arange(0, parts[0].shape[0]) * len(parts)
    found = ()
    for i in tl.static_range(len(parts)):
        found = found + (tl.where(index + i == number, part, parts[i]),)
    return found


@triton.jit
def _load_masses(request, num_parts, CALL: tl.constexpr):
    """Return the masses that are there, and NaN in the place of others."""
    index = tl.arange(0, CALL.max_emit_blocks * CALL.emit_parts)
    used = index < num_parts
    words_ptr = request.counters.awaited_ptr + num_parts + index
    # Beyond the parts there is 0.0.
    pairs = tl.load(words_ptr, mask=used, other=MASS_SIGN << 32, volatile=True)
    words = tl.load(words_ptr + num_parts, mask=used, other=MASS_SIGN, volatile=True)
    return masses_of(pairs, words)


@triton.jit
def total_masses(sums, grid, request, CALL: tl.constexpr):
    """Return the row's masses of weights, p and q.

    Where `CALL.awaits`, it waits for masses that `load_sums` did not find, and leaves every word 0.
    """
    if CALL.given_probs:
        weights, p, q = tl.reduce((sums.weights, sums.p, sums.q), 0, add_three)
    else:
        weights = tl.sum(sums.weights, 0)
        p = weights
        q = weights
    if CALL.awaits:
        num_parts = grid.num_blocks * CALL.emit_parts
        index = tl.arange(0, CALL.max_emit_blocks * CALL.emit_parts)
        words_ptr = request.counters.awaited_ptr + index
        missing = tl.where((weights == weights) & (p == p) & (q == q), 0, num_parts)
        while missing > 0:
            used = index < num_parts
            pairs = tl.load(words_ptr + num_parts, mask=used, other=1, volatile=True)
            words = tl.load(words_ptr + 2 * num_parts, mask=used, other=1, volatile=True)
            missing = tl.sum(((pairs == 0) | (words == 0)).to(tl.int32), 0)
            if missing == 0:
                weights, p, q = tl.reduce(_load_masses(request, num_parts, CALL), 0, add_three)
        # Every word has been seen, so that none is written any more.
        WORDS: tl.constexpr = CALL.awaited_words
        for i in tl.static_range(WORDS):
            tl.store(words_ptr + i * num_parts, index.to(tl.int64) * 0, mask=index < num_parts)
    return weights, p, q
