"""Batches and comparisons that several test files share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import acceptlib
from acceptlib import PLACEHOLDER_TOKEN_ID, Rng, Uniforms, VerifyResult

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "block": ("block", {}),
    "fly": ("fly", {}),
    "greedy": ("greedy", {}),
    "lenience": ("lenience", {}),
    "mixture": ("mixture", {}),
    "rejection": ("rejection", {}),
    "synthetic": ("synthetic", {"synthetic_acceptance_rates": (1.0,) * 8}),
    "typical": ("typical", {}),
    "typical-sample": ("typical", {"recovery": "sample"}),
}
"""Readable name -> strategy and options. Every one of them accepts the tokens of `standing`."""

FAITHFUL = [name for name in SETTINGS if name not in {"mixture", "synthetic"}]
"""Settings under which a drafted token of zero target probability never stands."""

settings = pytest.mark.parametrize("setting", SETTINGS)
layouts = pytest.mark.parametrize("layout", ["padded", "ragged"])
forms = pytest.mark.parametrize("form", ["probs", "logits"])

ALMOST_ONE = 1 - 2**-53
"""The largest u there is."""


@dataclass(frozen=True)
class Request:
    """One request before layout: drafted ids [n], target's rows [n+1, V], draft's rows [n, V]."""

    ids: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor | None

    @property
    def n(self) -> int:
        return len(self.ids)

    def copy(self) -> Request:
        """Return a request whose tensors may be changed."""
        return Request(self.ids.clone(), self.p.clone(), None if self.q is None else self.q.clone())


def create(setting: str) -> acceptlib.AcceptanceStrategy:
    """Return the strategy of a setting."""
    name, options = SETTINGS[setting]
    return acceptlib.create(name, **options)


def generator(seed: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


def standing(n: int, vocab: int, seed: int) -> Request:
    """Return a request whose drafted tokens all stand, whatever the uniforms.

    They are the target's argmax, and the draft is the target at temperature 2, which gives them less.
    """
    logits = 2 * torch.randn(n + 1, vocab, generator=generator(seed))
    return Request(logits[:n].argmax(-1), logits.softmax(-1), (logits[:n] / 2).softmax(-1))


def ordinary(n: int, vocab: int, seed: int) -> Request:
    """Return a request whose drafted tokens were drawn from its own draft rows."""
    source = generator(seed)
    logits = 2 * torch.randn(n + 1, vocab, generator=source)
    q = (logits[:n] + torch.randn(n, vocab, generator=source)).softmax(-1)
    ids = torch.multinomial(q, 1, generator=source)[:, 0] if n else torch.empty(0, dtype=torch.int64)
    return Request(ids, logits.softmax(-1), q)


def mask_drafted(request: Request, position: int) -> None:
    """Take all target probability from the drafted token at `position`."""
    row = request.p[position]
    row[request.ids[position]] = 0
    row /= row.sum()


def lay_out(
    requests: list[Request], layout: str = "ragged", form: str = "probs", *, draft: bool = True
) -> dict[str, Any]:
    """Return the arguments of `verify`. Padding holds placeholders and NaN rows."""
    most = max((request.n for request in requests), default=0)
    q = [request.q for request in requests if draft and request.q is not None]
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


def streams(seeds: list[int] | range) -> Rng:
    """Return streams at step 0."""
    return Rng(seeds=torch.tensor(list(seeds), dtype=torch.int64), offsets=torch.zeros(len(seeds), dtype=torch.int64))


def fixed(num_requests: int, most: int, accept: float = 0.0, bits: int = 0) -> Uniforms:
    """Return equal random numbers for all requests."""
    return Uniforms(
        accept=torch.full((num_requests, most), accept, dtype=torch.float64),
        emit=torch.full((num_requests,), bits, dtype=torch.int64),
    )


def verify(
    setting: str, requests: list[Request], layout: str = "ragged", form: str = "probs", **arguments: Any
) -> VerifyResult:
    """Verify requests; request b has seed b unless `rng` or `uniforms` is given."""
    if not {"rng", "uniforms"} & {*arguments}:
        arguments["rng"] = streams(range(len(requests)))
    return create(setting).verify(**{**lay_out(requests, layout, form), **arguments})


def tokens(result: VerifyResult, index: int) -> list[int]:
    """Return the emitted tokens of one request; what follows them must be padding."""
    row = result.output_token_ids[index].tolist()
    count = int(result.num_emitted[index])
    assert row[count:] == [PLACEHOLDER_TOKEN_ID] * (len(row) - count)
    return row[:count]


def same(left: VerifyResult, right: VerifyResult, rows: list[int] | None = None, to: list[int] | None = None) -> None:
    """Assert that some rows of one result are, bit for bit, some of another: all of both, unless given."""
    for name in ("output_token_ids", "num_accepted", "num_emitted", "status", "logprobs", "raw_logprobs"):
        a, b = getattr(left, name), getattr(right, name)
        assert (a is None) == (b is None), name
        if a is None:
            continue
        a = a if rows is None else a[rows]
        b = b if to is None else b[to]
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)), (name, a, b)
        assert torch.equal(a.isnan(), b.isnan()), (name, a, b)


def check_sound(result: VerifyResult, vocab: int) -> None:
    """Assert what holds of every result: ids inside the vocabulary, counts that fit, padding behind."""
    ids = result.output_token_ids
    emitted = torch.arange(ids.shape[1]) < result.num_emitted[:, None]
    assert bool((ids[emitted] >= 0).all())
    assert bool((ids[emitted] < vocab).all())
    assert bool((ids[~emitted] == PLACEHOLDER_TOKEN_ID).all())
    assert torch.equal(result.num_emitted, result.num_accepted + (result.status == 0).to(torch.int32))
    assert bool(((result.num_accepted >= 0) & (result.num_accepted < ids.shape[1])).all())
