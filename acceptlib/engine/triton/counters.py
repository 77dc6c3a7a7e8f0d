"""Counters of a request that its programs share: which of them is last, and where its chain stops."""

# ruff: noqa: N803 - jit functions; constants in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import decide

THREADS = tl.constexpr(256)
"""Threads of a program, at most."""

CLEARED = tl.constexpr(64)
"""Words that are cleared at a time."""

DECIDED_BY = tl.constexpr(0)
SUMMED_BY = tl.constexpr(1)
WEIGHED_BY = tl.constexpr(2)
REDUCED_BY = tl.constexpr(3)
"""What is counted of a row: programs that are done with what decides it, its sums, its weights, or, for each of the two
models, its law."""


@triton.jit
def needed(position, exists, request, CALL: tl.constexpr, FOUND: tl.constexpr):
    """Return whether a row exists and is not beyond the stop, which is FOUND by the stages before, or being found.

    While it is, what the nearest cache holds of it will do. That may be some microseconds old, so that a row is read in
    vain. But most programs beyond a stop learn so without a trip through what others read.
    """
    if CALL.lazy:
        if position > 0:  # the first is never beyond it
            stop_ptr = request.counters.stop_ptr
            exists = exists & ((latest(stop_ptr) if FOUND else recent(stop_ptr)) + position <= decide.FAR)
    return exists


@triton.jit
def latest(counter_ptr):
    """Return what a counter that others raise holds now, the same to all warps, so that they take the same branch."""
    return tl.max(tl.load(counter_ptr + tl.zeros((THREADS,), tl.int32), volatile=True), 0)


@triton.jit
def recent(counter_ptr):
    """Return what it held not long ago, likewise."""
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
    tl.debug_barrier()  # its own warps' too
    if expected > 1:
        last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == expected - 1
        tl.debug_barrier()
    return last


@triton.jit
def settle(position, count, request, CALL: tl.constexpr):
    """Lower the request's stop to this position if the drafted token is rejected."""
    length = count
    if CALL.reads_length:
        length = decide.length_of(request, count)
    here = tl.zeros((1,), tl.int32) + position
    fetched = decide.fetch(here, length, request, CALL)
    accepted, _ = decide.judge(here, fetched, length, request, CALL)
    if (position < count) & (tl.sum(accepted.to(tl.int32), 0) == 0):
        tl.atomic_max(request.counters.stop_ptr, decide.coded(position))
