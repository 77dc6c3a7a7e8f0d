"""The law of a row of logits: sampling parameters in torch, to the bit as `docs/sampling.md` defines them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from acceptlib.arrays import Array, as_array
from acceptlib.checks import check_sampling
from acceptlib.engine.filters import filter_rows, sum_of_weights
from acceptlib.engine.logits import constrain, readable, rows_at_a_time, scale, take
from acceptlib.engine.scratch import scratch
from acceptlib.inputs import Rows, make_rows
from acceptlib.sampling import SamplingParams


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
    bitmask = None if rows.bitmask is None else rows.bitmask.reshape(len(request), rows.bitmask.shape[-1])
    data = logits.reshape(-1, vocab_size)
    probs = torch.empty(data.shape, dtype=torch.float32, device=data.device)
    for some in pieces(data):
        process(take(rows, request[some], data[some], None if bitmask is None else bitmask[some]), probs[some])
    return probs.view(logits.shape)


def pieces(rows: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows [n, V] to process one at a time, so that little scratch memory is kept on the CPU."""
    num_rows, vocab_size = rows.shape
    step = rows_at_a_time(vocab_size) if rows.is_cpu else max(num_rows, 1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def in_range(rows: Rows, vocab_size: int) -> Array:
    """Return which requests [B] have parameters that make sense; True where none is given."""
    found: Array = True
    if rows.temperature is not None:
        temperature = as_array(rows.temperature.detach())
        found &= (temperature >= 0) & (temperature < torch.inf)
    if rows.top_k is not None:
        found &= as_array(rows.top_k) >= 0
    if rows.top_p is not None:
        top_p = as_array(rows.top_p.detach())
        found &= (top_p > 0) & (top_p <= 1)
    if rows.min_p is not None:
        min_p = as_array(rows.min_p.detach())
        found &= (min_p >= 0) & (min_p <= 1)
    if rows.bias_token_ids is not None:
        found &= (as_array(rows.bias_token_ids) < vocab_size).all(1)
    return found


def process(rows: Rows, probs: torch.Tensor) -> torch.Tensor:
    """Write the law that rows of logits are sampled from.

    Args:
        rows: Logits [n, V] with one set of parameters per row.
        probs: Where to, [n, V] float32; NaN throughout a row that has no law.

    Returns:
        `probs`.
    """
    temperature = rows.temperature
    if rows.is_filtered:
        filter_rows(rows, probs)
    elif temperature is None:
        torch.softmax(constrain(rows), -1, dtype=torch.float32, out=probs)
    else:
        scaled = scratch("logits", probs.shape, torch.float32, probs.device).copy_(constrain(rows))
        torch.softmax(scale(scaled, scaled.amax(-1, keepdim=True), temperature), -1, out=probs)
    if temperature is None:
        return probs
    greedy = (temperature == 0)[:, None]
    if readable(greedy) and not greedy.any():
        return probs
    probs.mul_(~greedy)  # NaN times 0 stays NaN, so that a greedy row without a law is still found
    return probs.scatter_add_(-1, constrain(rows).argmax(-1, keepdim=True), greedy.to(torch.float32))


def max_and_log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Return the maxima of rows [n, V], and the logarithms of their sums of exponentials relative to them.

    Both are in one tensor [2, n] float64. They are kept apart, because adding a large maximum would round the logarithm
    away. The logarithm is NaN where a row has no softmax.
    """
    terms = scratch("logits", logits.shape, torch.float32, logits.device).copy_(logits)
    top = terms.amax(1, keepdim=True)
    top.masked_fill_(top == torch.inf, torch.nan)
    return torch.stack((top[:, 0].to(torch.float64), sum_of_weights(terms.sub_(top).exp_()).log()))
