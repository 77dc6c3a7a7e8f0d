"""Laws of both models' rows inside the kernels, where both are needed: found in the same steps, or picked as one."""

# ruff: noqa: N803, RET505, RUF005 - jit functions; constants in capitals, branches known when compiling

from typing import NamedTuple

import triton
import triton.language as tl

from acceptlib.engine.triton import laws
from acceptlib.engine.triton.laws import CutLaw, EntropyLaw, Law
from acceptlib.engine.triton.rows import DRAFT, TARGET, factor_of
from acceptlib.engine.triton.sums import add_three, add_two


class Pair(NamedTuple):
    """The laws of the target's rows and of the draft's; without a draft the second is the first."""

    target: Law
    draft: Law


@triton.jit
def both(target, target_parts, draft, draft_parts, CALL: tl.constexpr):
    """Return the laws of both models' rows, each number [n], from `laws.load_parts`.

    A row that has none has a maximum of NaN. Where both models need the same, their sums go through each step together.
    That takes as long as one model's, but more registers, which programs that read rows do not have. Sums in thirds
    have no such steps.
    """
    if CALL.logits[TARGET] and CALL.logits[DRAFT] and not (CALL.filters or CALL.lazy or CALL.thirds):
        maximum, draft_maximum = laws.largest_of(target_parts.maxima), laws.largest_of(draft_parts.maxima)
        terms = laws.rescaled(target_parts.maxima, target_parts.sums, maximum, factor_of(target, CALL, TARGET))
        draft_terms = laws.rescaled(draft_parts.maxima, draft_parts.sums, draft_maximum, factor_of(draft, CALL, DRAFT))
        total, draft_total = tl.reduce((terms, draft_terms), 1, add_two)
        target_law = laws.law_of(target, target_parts, maximum, total, CALL, TARGET)
        return Pair(target_law, laws.law_of(draft, draft_parts, draft_maximum, draft_total, CALL, DRAFT))
    else:
        target_law = laws.one(target, target_parts, CALL, TARGET)
        draft_law = target_law
        if CALL.has_draft:
            draft_law = laws.one(draft, draft_parts, CALL, DRAFT)
        return Pair(target_law, draft_law)


@triton.jit
def pair_at(pair, chosen, CALL: tl.constexpr):
    """Return the laws of both models' rows at the chosen one of several positions, as scalars.

    What every kind of law has is added up in one go, two numbers in 64 bits each: what takes long is warps waiting for
    each other.
    """
    target, draft = pair
    if CALL.has_argmax and not (CALL.has_draft or CALL.sums_weights or CALL.normalises[TARGET]):
        word = tl.sum(_packed_at(target.maximum, target.argmax, chosen), 0)  # there is nothing else
        maximum, _ = laws.unpacked(word, tl.float32)
        law = Law(maximum, maximum * 0.0, word.to(tl.int32))
        return Pair(law, law)
    else:
        words = (_packed_at(target.maximum, target.normaliser, chosen),)
        if CALL.has_draft:
            words = words + (_packed_at(draft.maximum, draft.normaliser, chosen),)
        if CALL.has_argmax:
            words = words + (_packed_at(target.argmax, draft.argmax, chosen),)
        if len(words) == 1:
            words = (tl.sum(words[0], 0),)
        elif len(words) == 2:
            words = tl.reduce(words, 0, add_two)
        else:
            words = tl.reduce(words, 0, add_three)
        argmax, draft_argmax = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        if CALL.has_argmax:
            argmax, draft_argmax = laws.unpacked(words[len(words) - 1], tl.int32)
        target_law = _law_at(words[0], argmax, target, chosen, CALL, TARGET)
        draft_law = target_law
        if CALL.has_draft:
            draft_law = _law_at(words[1], draft_argmax, draft, chosen, CALL, DRAFT)
        return Pair(target_law, draft_law)


@triton.jit
def _packed_at(high, low, chosen):
    """Return two numbers of 32 bits as an int64 for the chosen one of several rows, and 0 for the others."""
    return tl.where(chosen, laws.packed(high, low), 0)


@triton.jit
def _law_at(word, argmax, law, chosen, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the chosen one of several laws, given the word of its maximum and normaliser, and its argmax."""
    maximum, normaliser = laws.unpacked(word, tl.float32)
    if CALL.filtered[MODEL]:
        cut, first_kept = tl.where(chosen, law.cut, 0.0), tl.where(chosen, law.first_kept, 0)
        return CutLaw(maximum, normaliser, argmax, tl.sum(cut, 0), tl.sum(first_kept, 0))
    elif CALL.entropy and MODEL == TARGET:
        return EntropyLaw(maximum, normaliser, argmax, tl.sum(tl.where(chosen, law.entropy, 0.0), 0))
    else:
        return Law(maximum, normaliser, argmax)


@triton.jit
def joined(first, later, CALL: tl.constexpr):
    """Return the laws of both models' rows at positions, given those at the first half of them and at the later one."""
    target = _joined(first.target, later.target, CALL, TARGET)
    draft = target
    if CALL.has_draft:
        draft = _joined(first.draft, later.draft, CALL, DRAFT)
    return Pair(target, draft)


@triton.jit
def _joined(first, later, CALL: tl.constexpr, MODEL: tl.constexpr):
    """Return the laws of one model's rows."""
    maximum = end_to_end(first.maximum, later.maximum)
    normaliser = end_to_end(first.normaliser, later.normaliser)
    argmax = end_to_end(first.argmax, later.argmax)
    if CALL.filtered[MODEL]:
        first_kept = end_to_end(first.first_kept, later.first_kept)
        return CutLaw(maximum, normaliser, argmax, end_to_end(first.cut, later.cut), first_kept)
    elif CALL.entropy and MODEL == TARGET:
        return EntropyLaw(maximum, normaliser, argmax, end_to_end(first.entropy, later.entropy))
    else:
        return Law(maximum, normaliser, argmax)


@triton.jit
def end_to_end(first, later):
    """Return the numbers of two tensors [n] as one [2n]."""
    return tl.reshape(tl.trans(tl.join(first, later)), [2 * first.shape[0]])


@triton.jit
def no_pair(NUM: tl.constexpr, CALL: tl.constexpr):
    """Return what stands for the laws of rows at NUM positions before any is known, of rows without a filter."""
    zero, token = tl.zeros((NUM,), tl.float32), tl.zeros((NUM,), tl.int32)
    draft_law = Law(zero, zero, token)
    target_law = EntropyLaw(zero, zero, token, tl.zeros((NUM,), tl.float64)) if CALL.entropy else draft_law
    return Pair(target_law, draft_law if CALL.has_draft else target_law)
