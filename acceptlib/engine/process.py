"""The law of a row of logits: sampling parameters in torch, to the bit as `docs/sampling.md` defines them.

Nothing sorts a vocabulary. top-k finds its cut with `topk` where k is small and known without waiting for a device. In
other cases top-k, and top-p in all, find it by the digits of the logits: a histogram of integer mass over the leading
eleven bits picks a bucket, the next eleven and the last ten pick the logit. On the CPU, if k or the vocabulary is
small, NumPy does all this on the few largest entries instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from acceptlib.arrays import Words, as_words
from acceptlib.checks import check_sampling
from acceptlib.engine.constants import MASS_SCALE
from acceptlib.engine.scratch import scratch, to_fixed
from acceptlib.inputs import Rows, make_rows
from acceptlib.sampling import OFF, SamplingParams

DIGITS: Final = ((21, 11), (10, 11), (0, 10))
"""Shift and number of bits of a key's digits, the leading ones first."""

MOST_CANDIDATES: Final = 1024
"""Largest k, or vocabulary, for which a row is cut to its candidates."""

SIGN: Final = -(1 << 31)

BLOCK: Final = 64
"""Entries of a block: a search for the largest entries looks at the maxima of blocks first."""

CHUNK_BYTES: Final = 2 << 20
"""Size of float32 rows that are gone through at a time."""

LEAST_ROW: Final = 4096
"""Entries that a shorter row counts as, because its histogram takes memory too."""

PER_REQUEST: Final = (*OFF, "bias_token_ids", "bias_values")
"""Fields of `Rows` that have one entry per request."""


@torch.no_grad()
def law(logits: torch.Tensor, sampling: SamplingParams | None) -> torch.Tensor:
    """Return the law that tokens are drawn from under sampling parameters.

    Args:
        logits: [B, V] or [B, n, V], n rows a request.
        sampling: Parameters of B requests; a bitmask is [B, ceil(V/32)] or [B, n, ceil(V/32)].

    Returns:
        Probabilities in the shape of `logits`, float32, without a gradient; NaN throughout a row that has no law.

    Raises:
        InputError: The parameters do not fit the logits.
    """
    num_requests, vocab_size = logits.shape[0], logits.shape[-1]
    check_sampling("sampling", sampling, logits, num_requests)
    rows = make_rows(logits, None, sampling, num_requests)
    request = torch.arange(num_requests, device=logits.device)
    request = request.repeat_interleave(logits.shape[:-1].numel() // max(num_requests, 1))
    bitmask = None if rows.bitmask is None else rows.bitmask.reshape(len(request), -1)
    data = logits.reshape(-1, vocab_size)
    probs = torch.empty(data.shape, dtype=torch.float32, device=data.device)
    for some in pieces(data):
        process(take(rows, request[some], data[some], None if bitmask is None else bitmask[some]), probs[some])
    return probs.view(logits.shape)


def pieces(rows: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows [n, V] to process one at a time, so that little scratch memory is kept on the CPU."""
    num_rows, vocab_size = rows.shape
    step = _step(vocab_size) if rows.is_cpu else max(num_rows, 1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def _step(vocab_size: int) -> int:
    return max(1, CHUNK_BYTES // (4 * max(vocab_size, LEAST_ROW)))


def take(rows: Rows, request: torch.Tensor | slice, data: torch.Tensor, bitmask: torch.Tensor | None) -> Rows:
    """Return rows [n, V] as `process` takes them, with one set of parameters per row.

    Args:
        rows: A model's rows, with one set of parameters per request.
        request: [n] int64, the request of each row; or a slice of requests.
        data: [n, V].
        bitmask: [n, ceil(V/32)] or None.
    """
    found = {name: value[request] for name in PER_REQUEST if (value := getattr(rows, name)) is not None}
    return rows._replace(data=data, bitmask=bitmask, **found)


def in_range(rows: Rows, vocab_size: int) -> Words:
    """Return which requests [B] have parameters that make sense; True where none is given."""
    found: Words = True
    if rows.temperature is not None:
        temperature = as_words(rows.temperature.detach())
        found &= (temperature >= 0) & (temperature < torch.inf)
    if rows.top_k is not None:
        found &= as_words(rows.top_k) >= 0
    if rows.top_p is not None:
        top_p = as_words(rows.top_p.detach())
        found &= (top_p > 0) & (top_p <= 1)
    if rows.min_p is not None:
        min_p = as_words(rows.min_p.detach())
        found &= (min_p >= 0) & (min_p <= 1)
    if rows.bias_token_ids is not None:
        found &= (as_words(rows.bias_token_ids) < vocab_size).all(1)
    return found


def process(rows: Rows, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the law that rows of logits are sampled from.

    Args:
        rows: Logits [n, V] with one set of parameters per row.
        out: Where to put the result, [n, V] float32; a new tensor if None.

    Returns:
        [n, V] float32 probabilities; NaN throughout a row that has no law.
    """
    shape, device = rows.data.shape, rows.data.device
    probs = torch.empty(shape, dtype=torch.float32, device=device) if out is None else out
    temperature = rows.temperature
    if rows.is_filtered:
        _filter(rows, probs)
    elif temperature is None:
        torch.softmax(constrain(rows), -1, dtype=torch.float32, out=probs)
    else:
        scaled = scratch("logits", shape, torch.float32, device).copy_(constrain(rows))
        torch.softmax(_scale(scaled, scaled.amax(-1, keepdim=True), temperature), -1, out=probs)
    if temperature is None:
        return probs
    greedy = (temperature == 0)[:, None]
    if _readable(greedy) and not greedy.any():
        return probs
    probs.mul_(~greedy)  # NaN times 0 stays NaN, so that a greedy row without a law is still found
    return probs.scatter_add_(-1, constrain(rows).argmax(-1, keepdim=True), greedy.to(torch.float32))


def constrain(rows: Rows) -> torch.Tensor:
    """Return logits [n, V] with bias and mask: float32 in scratch memory, or the caller's where there are none."""
    if not rows.is_constrained:
        return rows.data
    vocab_size = rows.data.shape[-1]
    logits = scratch("constrained", rows.data.shape, torch.float32, rows.data.device).copy_(rows.data)
    if rows.bias_token_ids is not None and rows.bias_values is not None:
        ids = rows.bias_token_ids.to(torch.int64)
        inside = (ids >= 0) & (ids < vocab_size)
        logits.scatter_add_(1, ids.clamp(0, vocab_size - 1), rows.bias_values.where(inside, 0.0))
    if rows.bitmask is not None:
        bit = torch.arange(32, dtype=torch.int32, device=logits.device)
        forbidden = ((rows.bitmask[..., None] >> bit) & 1) == 0
        logits.masked_fill_(forbidden.flatten(-2)[:, :vocab_size], -torch.inf)
    return logits


def max_and_log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Return the maxima of rows [n, V], and the logarithms of their sums of exponentials relative to them.

    Both are in one tensor [2, n] float64. They are kept apart, because adding a large maximum would round the logarithm
    away. The logarithm is NaN where a row has no softmax.
    """
    terms = scratch("logits", logits.shape, torch.float32, logits.device).copy_(logits)
    top = terms.amax(1, keepdim=True)
    top.masked_fill_(top == torch.inf, torch.nan)
    return torch.stack((top[:, 0].to(torch.float64), _sum(terms.sub_(top).exp_()).log()))


def _scale(values: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Return `values` [n, c] less the rows' maxima [n, 1], over the temperature, in place."""
    values.sub_(top)
    if temperature is not None:
        # Only after the maximum is subtracted: dividing by a low temperature before would lose digits or overflow.
        values.div_(temperature.masked_fill(temperature == 0, 1)[:, None])
    return values


def _filter(rows: Rows, probs: torch.Tensor) -> None:
    """Write the law of rows with top-k, top-p or min-p."""
    num_rows, vocab_size = probs.shape
    if _readable(probs):
        with np.errstate(all="ignore"):
            left = torch.from_numpy(np.flatnonzero(~_filter_candidates(rows, probs)))
    else:
        left = torch.arange(num_rows, device=probs.device)
    step = _step(vocab_size)
    for start in range(0, len(left), step):
        some = left[start : start + step]
        bitmask = None if rows.bitmask is None else rows.bitmask[some]
        probs.index_copy_(0, some, _filter_all(take(rows, some, rows.data[some], bitmask)))


def _filter_candidates(rows: Rows, probs: torch.Tensor) -> Words:
    """Write the law of rows whose few largest entries suffice; return [n] bool, which rows these are.

    On the CPU only, where NumPy is quicker on few entries. Every operation gives the same bits as torch's.
    """
    num_rows, vocab_size = probs.shape
    few, count, top_k = np.full(num_rows, vocab_size <= MOST_CANDIDATES), vocab_size, None
    if rows.top_k is not None:
        top_k = rows.top_k.numpy().astype(np.int64)
        if vocab_size > MOST_CANDIDATES:
            few = (top_k >= 1) & (top_k <= MOST_CANDIDATES)
            # One more than is kept: it shows whether others equal the k-th.
            count = int((top_k * few).max(initial=0)) + 1
    if not few.any():
        return few
    largest, where = _largest(constrain(rows), count)
    values, ids = largest.to(torch.float32).numpy(), where.numpy()
    row, top = np.arange(num_rows)[:, None], values[:, :1]
    few &= np.isfinite(top[:, 0])
    if rows.top_p is not None:  # of equal logits the highest id first
        order = np.lexsort((-ids, -values))
        values, ids = values[row, order], ids[row, order]
    weights = values - top
    if rows.temperature is not None:
        temperature = rows.temperature.detach().numpy()[:, None]
        weights /= temperature + (temperature == 0)
    torch.from_numpy(weights).exp_()  # in place; torch's own: NumPy's differs in the last bit
    if top_k is not None:
        last = values[row, np.minimum(np.maximum(top_k - 1, 0), count - 1)[:, None]]
        weights *= (values >= last) | (top_k <= 0)[:, None]
        if count < vocab_size:
            few &= ((values[:, -1:] < last) | (last == -np.inf))[:, 0]  # else more may equal the k-th
    if rows.top_p is not None:
        mass = (weights * np.float32(MASS_SCALE)).astype(np.int64)
        target = _mass_to_keep(torch.from_numpy(mass.sum(1)), rows.top_p).numpy()
        weights *= (mass.cumsum(1) - mass < target[:, None]) | (rows.top_p >= 1).numpy()[:, None]
    probs.zero_().scatter_(1, torch.from_numpy(ids), _normalize(torch.from_numpy(weights), rows.min_p))
    return few


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `topk(count)` of rows [n, V], several times quicker where V is large.

    The `count` largest entries are in the `count` blocks with the largest maxima, or past the last whole block.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = vocab_size // BLOCK
    if num_blocks < 2 * count:
        return logits.topk(count)
    whole = num_blocks * BLOCK
    maxima = logits[:, :whole].reshape(num_rows, num_blocks, BLOCK).amax(2)
    blocks = maxima.topk(count, sorted=False).indices
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    if whole < vocab_size:
        rest = torch.arange(whole, vocab_size, device=logits.device).expand(num_rows, -1)
        ids = torch.cat((ids, rest), 1)
    values, place = logits.gather(1, ids).topk(count)
    return values, ids.gather(1, place)


def _filter_all(rows: Rows) -> torch.Tensor:
    """Return the law [n, V] of rows with top-k, top-p or min-p, in scratch memory."""
    logits = constrain(rows)
    shape, device = logits.shape, logits.device
    weights = scratch("filtered", shape, torch.float32, device).copy_(logits)
    top = weights.amax(1, keepdim=True)
    top.masked_fill_(~top.isfinite(), torch.nan)  # so that all of the row is NaN
    _scale(weights, top, rows.temperature).exp_()
    if rows.top_k is None and rows.top_p is None:
        return _normalize(weights, rows.min_p)
    logits = scratch("logits", shape, torch.float32, device).copy_(logits)
    key = _key(logits)
    if rows.top_k is not None:
        top_k = rows.top_k.to(torch.int64).clamp(1, shape[1])
        if rows.max_top_k is None or rows.max_top_k > MOST_CANDIDATES:
            last, _ = _cut(key, torch.ones_like(key, dtype=torch.int64), top_k)
        else:
            last = logits.topk(rows.max_top_k).values.gather(1, (top_k - 1).clamp(max=rows.max_top_k - 1)[:, None])
        weights.mul_((logits >= last) | (rows.top_k <= 0)[:, None])
    if rows.top_p is not None:
        mass = to_fixed(weights, MASS_SCALE)
        last, rest = _cut(key, mass, _mass_to_keep(mass.sum(1), rows.top_p))
        at_cut = logits == last
        count = at_cut.sum(1, keepdim=True)
        each = mass.where(at_cut, 0).amax(1, keepdim=True).clamp_(min=1)
        wanted = (rest + each - 1).div_(each, rounding_mode="floor")
        kept = (logits >= last) | (rows.top_p >= 1)[:, None]
        if not _readable(wanted) or (wanted < count).any():
            from_the_end = at_cut.flip(1).cumsum(1).flip(1)
            kept &= (from_the_end <= wanted) | ~at_cut | (rows.top_p >= 1)[:, None]
        weights.mul_(kept)
    return _normalize(weights, rows.min_p)


def _mass_to_keep(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the integer mass [n] that top-p keeps."""
    return (top_p.to(torch.float64) * total.to(torch.float64)).to(torch.int64).clamp_(min=1).minimum(total)


def _normalize(weights: torch.Tensor, min_p: torch.Tensor | None) -> torch.Tensor:
    """Return weights after min-p, divided by their sum, in place; the largest weight given is 1."""
    if min_p is not None:
        least = min_p.to(torch.float32)  # the smallest float32 that is not below
        least = least.nextafter(torch.full_like(least, torch.inf)).where(least < min_p, least)
        weights.mul_(weights >= least[:, None])
    return weights.div_(_sum(weights).to(torch.float32)[:, None])


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """Return the sums [n] float64 of rows of weights up to 1: the same for every order of summation."""
    return to_fixed(weights, MASS_SCALE).sum(1).to(torch.float64) / MASS_SCALE


def _readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be read: without waiting for a device, and not while a graph is traced."""
    return tensor.is_cpu and not torch.compiler.is_dynamo_compiling()


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
    """Return int32 [n, V] in scratch memory that order like the logits when read as unsigned; -0 is 0."""
    bits = scratch("key", logits.shape, torch.float32, logits.device).copy_(logits).add_(0.0).view(torch.int32)
    return bits.bitwise_xor_((bits >> 31).bitwise_or_(SIGN))
