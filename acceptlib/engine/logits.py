"""Logits as they are sampled from: with bias, mask and temperature, in torch."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from acceptlib.engine.scratch import SCRATCH_BYTES, scratch
from acceptlib.inputs import Rows
from acceptlib.sampling import OFF

MIN_ROW: Final = 4096
"""Entries that a shorter row counts as, because its histogram takes memory too."""

PER_REQUEST: Final = (*OFF, "bias_token_ids", "bias_values")
"""Fields of `Rows` that have one entry per request."""

MASKED: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int32)
MASKED_AND: Final = -MASKED
MASKED_OR: Final = (1 - MASKED) * np.float32(-np.inf).view(np.int32)
"""For each byte of a bitmask, what turns its eight float32 logits into -inf or leaves them as they are."""


def rows_at_a_time(vocab_size: int) -> int:
    """Return how many rows to process at a time, so that they stay in a CPU's cache."""
    return max(1, SCRATCH_BYTES // (4 * max(vocab_size, MIN_ROW)))


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
        if readable(logits):
            _mask(logits, rows.bitmask)
        else:
            bit = torch.arange(32, dtype=torch.int32, device=logits.device)
            forbidden = ((rows.bitmask[..., None] >> bit) & 1) == 0
            logits.masked_fill_(forbidden.flatten(-2)[:, :vocab_size], -torch.inf)
    return logits


def _mask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set logits [n, V] float32 that a bitmask forbids to -inf, in place: as integers, which takes no branches."""
    vocab_size = logits.shape[1]
    eights = np.ascontiguousarray(bitmask.numpy()).astype("<i4", copy=False).view(np.uint8)
    table = scratch("mask", (*eights.shape, 8), torch.int32, logits.device)
    bits, masks = logits.view(torch.int32), table.flatten(1)[:, :vocab_size]
    MASKED_AND.take(eights, 0, out=table.numpy(), mode="clip")  # without a check, which would take a copy
    bits.bitwise_and_(masks)
    MASKED_OR.take(eights, 0, out=table.numpy(), mode="clip")
    bits.bitwise_or_(masks)


def scale(values: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Return `values` [n, c] less the rows' maxima [n, 1], over the temperature, in place."""
    values.sub_(top)
    if temperature is not None:
        # Only after the maximum is subtracted: dividing by a low temperature before would lose digits or overflow.
        values.div_(temperature.masked_fill(temperature == 0, 1)[:, None])
    return values


def readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be read: without waiting for a device, and not while a graph is traced."""
    return tensor.is_cpu and not torch.compiler.is_dynamo_compiling() and get_proxy_mode() is None
