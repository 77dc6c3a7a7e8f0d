"""Requests as data, both layouts of them, and comparison of results bit for bit.

Everything is drawn on the CPU from fixed seeds, so that every device verifies the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from acceptlib.errors import ConformanceError
from acceptlib.result import PLACEHOLDER_TOKEN_ID, VerifyResult
from acceptlib.rng import Rng, Uniforms

VOCABULARY: Final = 11
COUNT: Final = 12

ALMOST_ONE: Final = 1 - 2**-53
"""The largest u there is."""

ROUNDING: Final = 1e-5
"""Least distance of a uniform from h at which rows in float32 decide as rows in float64 do."""


@dataclass(frozen=True)
class Request:
    """One request before layout.

    Attributes:
        ids: [n] drafted tokens.
        p: [n+1, V] the target's rows, probabilities.
        q: [n, V'] the draft's rows, or None for a one-hot draft.
        key: Who it is: the seed of its stream, and its place in per-request arguments.
    """

    ids: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor | None
    key: int = 0

    @property
    def n(self) -> int:
        """Number of drafted tokens."""
        return len(self.ids)

    def copy(self) -> Request:
        """Return a request whose tensors may be changed."""
        return replace(self, ids=self.ids.clone(), p=self.p.clone(), q=None if self.q is None else self.q.clone())


def generator(seed: int) -> torch.Generator:
    """Return a seeded generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def ordinary(n: int, vocab: int, seed: int) -> Request:
    """Return a request whose drafted tokens were drawn from its own draft rows."""
    source = generator(seed)
    logits = 2 * torch.randn(n + 1, vocab, generator=source)
    q = (logits[:n] + torch.randn(n, vocab, generator=source)).softmax(-1)
    ids = torch.multinomial(q, 1, generator=source)[:, 0] if n else torch.empty(0, dtype=torch.int64)
    return Request(ids, logits.softmax(-1), q, seed)


def mixed(count: int, vocab: int = VOCABULARY, first_key: int = 0) -> list[Request]:
    """Return ordinary requests of 0 to 4 drafted tokens."""
    return [ordinary((3 * index) % 5, vocab, first_key + index) for index in range(count)]


def mask_drafted(request: Request, position: int) -> None:
    """Take all target probability from the drafted token at `position`."""
    row = request.p[position]
    row[request.ids[position]] = 0
    row /= row.sum()


def broken(request: Request) -> Request:
    """Return a request whose target's rows are NaN."""
    return replace(request, p=torch.full_like(request.p, torch.nan))


def lay_out(
    requests: Sequence[Request], layout: str = "ragged", form: str = "probs", *, draft: bool = True
) -> dict[str, Any]:
    """Return the arguments of `verify` for at least one request. Padding holds placeholders and NaN rows.

    Args:
        requests: The batch.
        layout: `ragged` or `padded`.
        form: `probs` or `logits`.
        draft: Whether to pass the draft's rows, where there are any.
    """
    most = max(request.n for request in requests)
    q = [request.q for request in requests if draft and request.q is not None]
    arguments: dict[str, Any]
    if layout == "ragged":
        counts = torch.tensor([0, *(request.n for request in requests)], dtype=torch.int32)
        arguments = {
            "draft_token_ids": torch.cat([request.ids for request in requests]),
            "target": torch.cat([request.p for request in requests]),
            "draft": torch.cat(q) if q else None,
            "cu_num_draft_tokens": counts.cumsum(0, dtype=torch.int32),
            "max_num_draft_tokens": most,
        }
    else:
        arguments = {
            "draft_token_ids": torch.stack([_pad(r.ids, most, PLACEHOLDER_TOKEN_ID) for r in requests]),
            "target": torch.stack([_pad(request.p, most + 1, torch.nan) for request in requests]),
            "draft": torch.stack([_pad(rows, most, torch.nan) for rows in q]) if q else None,
        }
    for model in ("target", "draft"):
        rows = arguments.pop(model)
        if rows is not None:
            arguments[f"{model}_{form}"] = rows.log() if form == "logits" else rows
    return arguments


def _pad(rows: torch.Tensor, length: int, value: float) -> torch.Tensor:
    return torch.cat([rows, rows.new_full((length - len(rows), *rows.shape[1:]), value)])


def streams(seeds: Iterable[int]) -> Rng:
    """Return streams at step 0."""
    keys = torch.tensor(list(seeds), dtype=torch.int64)
    return Rng(seeds=keys, offsets=torch.zeros_like(keys))


def fixed(num_requests: int, most: int, accept: float = 0.0, bits: int = 0) -> Uniforms:
    """Return equal random numbers for all requests."""
    return Uniforms(
        accept=torch.full((num_requests, most), accept, dtype=torch.float64),
        emit=torch.full((num_requests,), bits, dtype=torch.int64),
    )


def tokens(result: VerifyResult, index: int) -> list[int]:
    """Return the emitted tokens of one request."""
    ids: list[int] = result.output_token_ids[index, : int(result.num_emitted[index])].tolist()
    return ids


def same(
    left: VerifyResult,
    right: VerifyResult,
    rows: Sequence[int] | None = None,
    to: Sequence[int] | None = None,
    *,
    what: str = "two results",
) -> None:
    """Compare two results bit for bit.

    Args:
        left: The one.
        right: The other.
        rows: Requests of the first; all of them if left out.
        to: Requests of the second, likewise.
        what: What should be the same, for the message.

    Raises:
        ConformanceError: They differ.
    """
    for name in ("output_token_ids", "num_accepted", "num_emitted", "status", "logprobs", "raw_logprobs"):
        one, other = getattr(left, name), getattr(right, name)
        if one is None and other is None:
            continue
        if one is None or other is None:
            msg = f"{what}: only one has {name}"
            raise ConformanceError(msg)
        one, other = one.cpu(), other.cpu()
        one = one if rows is None else one[list(rows)]
        other = other if to is None else other[list(to)]
        if one.shape != other.shape:
            msg = f"{what}: {name} is {list(one.shape)} of the one and {list(other.shape)} of the other"
            raise ConformanceError(msg)
        equal = (one == other) | (one.isnan() & other.isnan())
        for index in (~equal).nonzero()[:1, 0].tolist():
            request = index if rows is None else rows[index]
            msg = f"{what}: {name} of request {request} differs: {one[index].tolist()} and {other[index].tolist()}"
            raise ConformanceError(msg)
