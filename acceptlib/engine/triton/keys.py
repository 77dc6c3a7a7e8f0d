"""Integers that order like logits, so that a cut is found by comparing and halving them; and words of key and entry."""

import triton
import triton.language as tl

from acceptlib.engine.triton.rows import LARGEST_INT32

LOWEST = tl.constexpr(-2139095041)
"""The key of minus infinity."""

NAN_KEY = LARGEST_INT32
"""Above the key of any logit; `logit_of` makes a NaN of it."""

NOTHING = tl.constexpr(LOWEST.value << 32)
"""A word of an entry that weighs nothing, before those of all others."""

BEHIND_ALL = tl.constexpr(0x7FFFFFFF << 32)
"""A word of a key and an entry's number behind those of all entries."""


@triton.jit
def key_of(x):
    """Return int32 that order like logits; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & LARGEST_INT32)


@triton.jit
def logit_of(key):
    """Return the logit of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & LARGEST_INT32)).to(tl.float32, bitcast=True)


@triton.jit
def key_or_nan(x):
    """Return the keys of logits, with the key of a NaN above all others."""
    return tl.where(x == x, key_of(x), NAN_KEY)


@triton.jit
def larger(a, b):
    """Return the larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def word_of(key, entry):
    """Return int64 that order like logits, and equal ones like their ids, of which the highest are kept."""
    return (key.to(tl.int64) << 32) | entry
