"""Counters of a request that its programs share: which of them is last, and where its chain stops."""

# ruff: noqa: N803 - jit functions; constants in capitals

from typing import NamedTuple

import triton
import triton.language as tl

FAR = tl.constexpr(1 << 30)
"""Where the first rejection stops a request, a stop at position i is kept as FAR - i: 0 means none, and the earliest
stop is the largest number. Where a mass decides, the last accepted position is kept instead, as it is."""

MAX_SETTLED = tl.constexpr(32)
"""Positions of a request, at most, for a word of 64 bits to say what became of each."""

THREADS = tl.constexpr(256)
"""Threads of a program, at most."""

CLEARED = tl.constexpr(64)
"""Words that are cleared at a time."""

DECIDED_BY = tl.constexpr(0)
WEIGHED_BY = tl.constexpr(1)
REDUCED_BY = tl.constexpr(2)
"""What is counted of a row: programs that are done with what decides it, with its weights, or, at `REDUCED_BY` plus the
model's number, with its law."""

ROW_COUNTS = tl.constexpr(REDUCED_BY.value + 2)
"""Counters of a row."""


class Counters(NamedTuple):
    """One request's counters, which are 0 between calls.

    Attributes:
        arrived_ptr: Programs of the last stage that are done.
        stop_ptr: Where it stops; see FAR.
        rows_ptr: Programs that are done with a row, [ROW_COUNTS, K+1].
        awaited_ptr: Words of 64 bits that are waited for. Where `CALL.settles`, one: its low half has the positions
            that are accepted, its high half those that are not. Where `CALL.holds`, sums of programs and a mark, which
            are in the workspace and cleared by `reduce`; elsewhere sums and masses of parts (`CALL.awaited_words`).
    """

    arrived_ptr: tl.tensor
    stop_ptr: tl.tensor
    rows_ptr: tl.tensor
    awaited_ptr: tl.tensor


@triton.jit
def coded(position):
    """Convert a position to the number that a stop is kept as, or back."""
    return position * -1 + FAR


@triton.jit
def needed(position, exists, request, CALL: tl.constexpr, LATEST: tl.constexpr):
    """Return whether a row exists and is not beyond the stop, as far as that is known.

    Unless the LATEST stop is asked for, the copy in the nearest cache will do. It may be some microseconds old, and
    then a row is read in vain, but none that is needed is left out: the stop only moves to earlier positions. And most
    programs beyond the stop learn of it without a trip to memory behind what others read.
    """
    if CALL.lazy:
        if position > 0:  # the first is never beyond it
            stop_ptr = request.counters.stop_ptr
            exists = exists & ((latest(stop_ptr) if LATEST else recent(stop_ptr)) + position <= FAR)
    return exists


@triton.jit
def latest(counter_ptr):
    """Return what a counter that others raise holds now, the same to all warps, so that they take the same branch."""
    return tl.max(tl.load(counter_ptr + tl.zeros((THREADS,), tl.int32), volatile=True), 0)


@triton.jit
def recent(counter_ptr):
    """Return what such a counter held not long ago, likewise the same to all warps."""
    return tl.max(tl.load(counter_ptr + tl.zeros((THREADS,), tl.int32), cache_modifier=".ca"), 0)


@triton.jit
def of_row(position, kind, request):
    """Return a counter of one row: `kind` is one of the above."""
    return request.counters.rows_ptr + (request.most + 1) * kind + position


@triton.jit
def clear(words_ptr, number):
    """Leave 0 in some words."""
    for base in range(0, number, CLEARED):
        index = base + tl.arange(0, CLEARED)
        tl.store(words_ptr + index, 0, mask=index < number)


@triton.jit
def arrive(counter_ptr, expected):
    """Return whether this program is the last of `expected` to arrive; what they stored before is visible to it."""
    last = expected == 1
    tl.debug_barrier()  # what its own warps stored too
    if expected > 1:
        last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == expected - 1
        tl.debug_barrier()
    return last


@triton.jit
def settle(position, stands, request, CALL: tl.constexpr):
    """Say what became of a position: it `stands`, or the request stops there at the latest."""
    if CALL.settles:
        if request.most < MAX_SETTLED:
            bit = tl.where(stands, 1, 1 << 32).to(tl.int64) << position
            tl.atomic_or(request.counters.awaited_ptr, bit, sem="release")  # what it was decided by is visible too
    if stands == 0:
        tl.atomic_max(request.counters.stop_ptr, coded(position), sem="relaxed")


@triton.jit
def known_stop(exists, request, OVERLAP: tl.constexpr):
    """Return where a request stops, as the stage that goes through its rows has settled it; anything if none `exists`.

    If that stage may still run (OVERLAP), wait until all of the request's positions up to the stop are settled. By then
    all programs of that stage have started, for a launch may only overlap one whose programs all have.
    """
    stop = request.most
    if request.most < MAX_SETTLED:
        if OVERLAP:
            accepted = _settled(request.counters.awaited_ptr, exists)
        else:
            accepted = tl.load(request.counters.awaited_ptr, cache_modifier=".cg").to(tl.int32)
        position = tl.arange(0, MAX_SETTLED)
        stop = tl.min(tl.where((accepted >> position) & 1 == 0, position, MAX_SETTLED), 0)
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        stop = load_stop(stop, request)
    return stop


@triton.jit
def load_stop(none, request):
    """Return where a request stops, as an earlier stage has stored it, or `none` if it has stored nothing."""
    code = tl.load(request.counters.stop_ptr, cache_modifier=".cg")
    return tl.where(code == 0, none, coded(code))


@triton.jit
def _settled(settled_ptr, waits):
    """Return the positions that are accepted, once the first one that is not is known, if this `waits`."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred missing;
        .reg .b32 rejected, first, others;
        .reg .b64 word;
        WAIT:
        ld.acquire.gpu.global.b64 word, [$1];
        mov.b64 {$0, rejected}, word;
        add.u32 first, $0, 1;
        not.b32 others, $0;
        and.b32 first, first, others;
        and.b32 first, first, rejected;
        setp.eq.u32 missing, first, 0;
        setp.ne.and.s32 missing, $2, 0, missing;
        @missing bra WAIT;
        }""",
        "=&r,l,r",
        [settled_ptr, waits.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
