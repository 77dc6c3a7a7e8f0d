"""top-k, top-p and min-p of rows of logits, in torch.

Where values may not be looked at, nothing is sorted. top-k finds its cut with `topk` where k is small and known without
waiting for a device. In other cases top-k, and top-p in all, find it by the digits of the logits: a histogram of
integer mass over the leading eleven bits picks a bucket, the next eleven and the last ten pick the logit. On the CPU,
NumPy orders some entries, as a rule a few: the largest ones if k or the vocabulary is small, and those of top-p's one
bucket of weights. What min-p alone keeps is looked for in the blocks with the largest maxima.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from acceptlib.arrays import Array
from acceptlib.checks import MAX_FILTERED
from acceptlib.engine.constants import MASS_SCALE
from acceptlib.engine.logits import constrain, readable, rows_at_a_time, scale, take
from acceptlib.engine.scratch import scratch, to_fixed
from acceptlib.inputs import Rows

DIGITS: Final = ((21, 11), (10, 11), (0, 10))
"""Shift and number of bits of a key's digits, the leading ones first."""

MAX_CANDIDATES: Final = 1024
"""Largest k, or vocabulary, for which a row is cut to its candidates."""

SIGN: Final = -(1 << 31)

BLOCK: Final = 64
"""Entries of a block: a search for the largest entries looks at the maxima of blocks first."""

MIN_BLOCKS: Final = 256
"""Blocks of a row from which on it pays to look for what min-p keeps by their maxima."""

FEW: Final = 8
"""An eighth of the blocks of a row is few enough to be looked at by itself."""

BUCKET_BITS: Final = 20
"""Bits of a weight that do not tell its bucket: an eighth of an octave is in one."""

ID_BITS: Final = MAX_FILTERED.bit_length()
LAST_ID: Final = MAX_FILTERED
"""No id of a row that may be filtered is larger; as bits, all ones."""

MARGIN: Final = 1e-3
"""More than rounding makes of the logarithm of a weight that is about `min_p`."""


def filter_rows(rows: Rows, probs: torch.Tensor) -> None:
    """Write the law [n, V] of rows with top-k, top-p or min-p."""
    num_rows, vocab_size = probs.shape
    step = rows_at_a_time(vocab_size)
    if not readable(probs):
        for start in range(0, num_rows, step):
            _write(rows, probs, slice(start, start + step), _filter_all)
        return
    left = torch.from_numpy(np.flatnonzero(~_filter_candidates(rows, probs)))
    for start in range(0, len(left), step):
        some = left[start : start + step]
        if rows.min_p is not None and vocab_size >= MIN_BLOCKS * BLOCK:
            some = some[~_write(rows, probs, _place(some), _filter_min_p)]
        if len(some):
            _write(rows, probs, _place(some), _filter_all)


def _place(some: torch.Tensor) -> torch.Tensor | slice:
    """Return row numbers, or a slice if they are a run: it gives views of rows, which need not be copied."""
    first, last = int(some[0]), int(some[-1])
    return slice(first, last + 1) if last - first + 1 == len(some) else some


def _write(
    rows: Rows,
    probs: torch.Tensor,
    place: torch.Tensor | slice,
    find: Callable[[Rows, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Write the law of some rows as far as `find` writes it, and return what that returns."""
    given = take(rows, place, rows.data[place], None if rows.bitmask is None else rows.bitmask[place])
    if isinstance(place, slice):
        return find(given, probs[place])
    law = scratch("filtered", given.data.shape, torch.float32, probs.device)
    found = find(given, law)
    probs.index_copy_(0, place, law)
    return found


@np.errstate(all="ignore")
def _filter_candidates(rows: Rows, probs: torch.Tensor) -> Array:
    """Write the law of rows whose few largest entries suffice; return [n] bool, which rows these are.

    On the CPU only, where NumPy is quicker on few entries. Every operation gives the same bits as torch's.
    """
    num_rows, vocab_size = probs.shape
    is_small, top_k = vocab_size <= MAX_CANDIDATES, None
    few: Array = np.full(num_rows, is_small)
    if rows.top_k is not None:
        top_k = rows.top_k.numpy().astype(np.int64)
        if not is_small:
            few = (top_k >= 1) & (top_k <= MAX_CANDIDATES)
    if not few.any():
        return few
    logits = constrain(rows)
    if is_small:
        values, ids = _largest(logits, vocab_size)
    else:
        values, ids, all_equal = _largest_and_equal(logits, top_k, few)
        few &= all_equal
    top = values[:, :1]
    few &= np.isfinite(top[:, 0])
    kth = None if top_k is None else _kth(values, top_k)
    if rows.top_p is not None:
        values, ids = _by_id(values, ids)
    weights = values - top
    if rows.temperature is not None:
        temperature = rows.temperature.detach().numpy()[:, None]
        weights /= temperature + (temperature == 0)
    torch.from_numpy(weights).exp_()  # in place; torch's own: NumPy's differs in the last bit
    if top_k is not None:
        weights *= (values >= kth) | (top_k <= 0)[:, None]
    if rows.top_p is not None:
        mass = (weights * np.float32(MASS_SCALE)).astype(np.int64)
        target = _mass_to_keep(torch.from_numpy(mass.sum(1)), rows.top_p).numpy()
        weights *= (mass.cumsum(1) - mass < target[:, None]) | (rows.top_p >= 1).numpy()[:, None]
    probs.zero_().scatter_(1, torch.from_numpy(ids), _normalize(torch.from_numpy(weights), rows.min_p))
    return few


def _largest_and_equal(logits: torch.Tensor, top_k: Array, some: Array) -> tuple[Array, Array, Array]:
    """Return the largest entries of rows [n, V], the k-th and its equals among them where `some` and not too many.

    Returns:
        Values and ids [n, c], the largest first; and [n] bool, which of these rows have all equals of their k-th.
    """
    count = int((top_k * some).max()) + 1  # one more than is kept shows whether others equal the k-th
    values, ids = _largest(logits, count)
    kth = _kth(values, top_k)
    tied = some & ((values[:, -1:] == kth) & (kth > -np.inf))[:, 0]
    if tied.any():
        num_kept = int((logits >= torch.from_numpy(kth)).sum(1)[torch.from_numpy(tied)].max())
        if num_kept < MAX_CANDIDATES:
            values, ids = _largest(logits, num_kept + 1)
    return values, ids, (values[:, -1:] < kth)[:, 0] | ~tied


def _kth(values: Array, top_k: Array) -> Array:
    """Return the k-th of values [n, c] in order, [n, 1]; the first or last one where there is none."""
    return values[np.arange(len(values)), np.minimum(np.maximum(top_k - 1, 0), values.shape[1] - 1)][:, None]


def _by_id(values: Array, ids: Array) -> tuple[Array, Array]:
    """Return entries [n, c] in the order that top-p keeps them in: of equal logits the highest id first."""
    order = np.lexsort((-ids, -values))
    row = np.arange(len(ids))[:, None]
    return values[row, order], ids[row, order]


def _largest(logits: torch.Tensor, count: int) -> tuple[Array, Array]:
    """Return `topk(count)` of rows [n, V] in float32, several times quicker where V is large or numbers have 16 bits.

    The `count` largest entries are in the `count` blocks with the largest maxima, or past the last whole block.
    """
    if logits.shape[1] // BLOCK < 2 * count:
        values, ids = logits.to(torch.float32).topk(count)
    else:
        values, ids = _entries(logits, _maxima(logits).topk(count, sorted=False).indices)
        values, place = values.topk(count)
        ids = ids.gather(1, place)
    return values.numpy(), ids.numpy()


def _maxima(logits: torch.Tensor) -> torch.Tensor:
    """Return the maxima [n, V // 64] of the whole blocks of rows, as float32."""
    num_rows, vocab_size = logits.shape
    whole = vocab_size // BLOCK * BLOCK
    return logits[:, :whole].reshape(num_rows, -1, BLOCK).amax(2).to(torch.float32)


def _entries(logits: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 logits and ids [n, c] of the entries of blocks, and of those past the last whole block."""
    num_rows, vocab_size = logits.shape
    whole = vocab_size // BLOCK * BLOCK
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    if whole < vocab_size:
        ids = torch.cat((ids, torch.arange(whole, vocab_size).expand(num_rows, -1)), 1)
    return logits.gather(1, ids).to(torch.float32), ids


@np.errstate(all="ignore")
def _filter_min_p(rows: Rows, law: torch.Tensor) -> torch.Tensor:
    """Write the law [n, V] of rows with min-p alone that have all it keeps in few blocks; return [n] bool, which.

    On the CPU only, and where min-p is given.
    """
    assert rows.min_p is not None  # noqa: S101 - for the type checker
    min_p = rows.min_p.detach().numpy().astype(np.float64)
    found = (min_p >= np.finfo(np.float32).tiny) & (min_p <= 1)
    if rows.top_k is not None:
        found &= rows.top_k.numpy() <= 0
    if rows.top_p is not None:
        found &= rows.top_p.detach().numpy() >= 1
    if not found.any():
        return torch.from_numpy(found)
    logits = constrain(rows)
    maxima = _maxima(logits)
    top = logits.amax(1, keepdim=True).to(torch.float32)
    largest = top[:, 0].numpy()
    # The weight is a rounded number, so its logarithm may differ.
    reach = np.log(min_p) - MARGIN
    if rows.temperature is not None:
        temperature = rows.temperature.detach().numpy()
        reach *= temperature + (temperature == 0)
    least = (largest + reach).astype(np.float32)
    num_kept = (maxima.numpy() >= least[:, None]).sum(1)
    found &= np.isfinite(largest) & np.isfinite(least) & (num_kept <= maxima.shape[1] // FEW)
    if found.any():
        values, ids = _entries(logits, maxima.topk(int((num_kept * found).max()), sorted=False).indices)
        weights = scale(values, top, rows.temperature).exp_()
        law.zero_().scatter_(1, ids, _normalize(weights, rows.min_p))
    return torch.from_numpy(found)


def _filter_all(rows: Rows, law: torch.Tensor) -> torch.Tensor:
    """Write the law [n, V] of any rows with top-k, top-p or min-p, and return it."""
    logits = constrain(rows)
    top = law.copy_(logits).amax(1, keepdim=True)
    top.masked_fill_(~top.isfinite(), torch.nan)  # so that all of the row is NaN
    scale(law, top, rows.temperature).exp_()
    if rows.top_k is not None:
        top_k = rows.top_k.to(torch.int64).clamp(1, logits.shape[1])
        if rows.max_top_k is None or rows.max_top_k > MAX_CANDIDATES:
            last, _ = _cut(_key(logits), torch.ones_like(logits, dtype=torch.int64), top_k)
        else:
            last = logits.topk(rows.max_top_k).values.gather(1, (top_k - 1).clamp(max=rows.max_top_k - 1)[:, None])
        law.mul_((logits >= last) | (rows.top_k <= 0)[:, None])
    if rows.top_p is not None:
        mass = to_fixed(law, MASS_SCALE)
        target = _mass_to_keep(mass.sum(1), rows.top_p)
        if readable(law):
            _keep_mass(law, logits, mass, target, rows.top_p >= 1)
        else:
            last, rest = _cut(_key(logits), mass, target)
            at_cut = logits == last
            each = mass.where(at_cut, 0).amax(1, keepdim=True).clamp_(min=1)
            wanted = (rest + each - 1).div_(each, rounding_mode="floor")
            from_the_end = at_cut.flip(1).cumsum(1).flip(1)
            kept = ((logits >= last) & ((from_the_end <= wanted) | ~at_cut)) | (rows.top_p >= 1)[:, None]
            law.mul_(kept)
    return _normalize(law, rows.min_p)


def _keep_mass(
    law: torch.Tensor, logits: torch.Tensor, mass: torch.Tensor, target: torch.Tensor, everything: torch.Tensor
) -> None:
    """Set weights [n, V] to 0 that top-p does not keep, in place, on the CPU.

    Weights fall into buckets by their leading bits. Those of larger buckets than the one that reaches the target are
    kept, and those of this one are put in order. A larger logit must have no smaller weight, which holds for torch's
    exponential.

    Args:
        law: Weights [n, V] float32 from 0 to 1.
        logits: [n, V], by which equal weights are ordered.
        mass: [n, V] int64, of the weights.
        target: [n] int64, from 1 to the row's sum.
        everything: [n] bool, rows that all is kept of.
    """
    num_rows, vocab_size = law.shape
    digit = scratch("digit", law.shape, torch.int64, law.device).copy_(law.view(torch.int32) >> BUCKET_BITS)
    num_buckets = 1 << (31 - BUCKET_BITS)
    sums = torch.zeros(num_rows, num_buckets, dtype=torch.int64)
    sums = sums.scatter_add_(1, digit.bitwise_and_(num_buckets - 1), mass)
    above = sums.flip(1).cumsum(1).flip(1) - sums
    bucket = (above >= target[:, None]).sum(1).clamp_(max=num_buckets - 1).to(torch.int32)
    low, high = ((number << BUCKET_BITS).view(torch.float32)[:, None] for number in (bucket, bucket + 1))
    low.masked_fill_(everything[:, None], 0)
    high.masked_fill_(everything[:, None], 0)
    kept = law >= low
    row, ids = np.divmod(np.flatnonzero((kept & (law < high)).numpy()), vocab_size)
    law.mul_(kept)
    # One number of row, logit and id for each entry, for NumPy sorts plain numbers many times as fast as by three keys.
    order = ~_key(logits[torch.from_numpy(row), torch.from_numpy(ids)]).numpy().view(np.uint32)
    entries = (row << (32 + ID_BITS)) | (order.astype(np.int64) << ID_BITS) | (LAST_ID - ids)
    entries.sort()
    row, ids = entries >> (32 + ID_BITS), LAST_ID - (entries & LAST_ID)
    each = mass.numpy()[row, ids]
    before = each.cumsum() - each
    before -= before[np.searchsorted(row, row)]
    before += above.gather(1, bucket.to(torch.int64)[:, None])[:, 0].numpy()[row]
    dropped = before >= target.numpy()[row]
    law.numpy()[row[dropped], ids[dropped]] = 0


def _mass_to_keep(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the integer mass [n] that top-p keeps."""
    return (top_p.to(torch.float64) * total.to(torch.float64)).to(torch.int64).clamp_(min=1).minimum(total)


def _normalize(weights: torch.Tensor, min_p: torch.Tensor | None) -> torch.Tensor:
    """Return weights after min-p, divided by their sum, in place; the largest weight given is 1."""
    if min_p is not None:
        least = min_p.to(torch.float32)  # the smallest float32 that is not below
        least = least.nextafter(torch.full_like(least, torch.inf)).where(least < min_p, least)
        weights.mul_(weights >= least[:, None])
    return weights.div_(sum_of_weights(weights).to(torch.float32)[:, None])


def sum_of_weights(weights: torch.Tensor) -> torch.Tensor:
    """Return the sums [n] float64 of rows of weights up to 1: the same for every order of summation."""
    return to_fixed(weights, MASS_SCALE).sum(1).to(torch.float64) / MASS_SCALE


def _cut(key: torch.Tensor, mass: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find where a running sum over a row, from the largest logit down, reaches a target.

    Args:
        key: [n, V] int32, of the logits.
        mass: [n, V] int64, >= 0.
        target: [n] int64, from 1 to the row's sum.

    Returns:
        The logit [n, 1] float32 there, and the target less the mass of all larger logits, [n, 1] int64.
    """
    cut, rest = torch.zeros_like(key[:, :1]), target[:, None]
    for shift, bits in DIGITS:
        last = (1 << bits) - 1
        digit = scratch("digit", key.shape, torch.int64, key.device).copy_((key >> shift) & last)
        # Only entries with the digits chosen so far. At first there are none, and a shift by all bits is undefined.
        counted = mass if shift + bits > 31 else mass.where((key ^ cut) >> (shift + bits) == 0, 0)  # noqa: PLR2004
        sums = torch.zeros(len(key), last + 1, dtype=torch.int64, device=key.device)
        sums = sums.scatter_add_(1, digit, counted).flip(1)
        ends = sums.cumsum(1)
        place = (ends < rest).sum(1, keepdim=True).clamp_(max=last)
        rest = rest - (ends - sums).gather(1, place)
        cut = cut | ((last - place) << shift).to(torch.int32)
    return (cut ^ ((~cut >> 31) | SIGN)).view(torch.float32), rest


def _key(logits: torch.Tensor) -> torch.Tensor:
    """Return int32 in scratch memory that order like logits, of any shape, when read as unsigned; -0 is 0."""
    bits = scratch("key", logits.shape, torch.float32, logits.device).copy_(logits).add_(0.0).view(torch.int32)
    return bits.bitwise_xor_((bits >> 31).bitwise_or_(SIGN))
