"""Batches described in a line, and calls on them, for the test files that compare torch's engine and the oracle."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import acceptlib
from acceptlib import PLACEHOLDER_TOKEN_ID, Rng, VerifyResult

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "rejection": ("rejection", {}),
    "greedy": ("greedy", {}),
    "block": ("block", {}),
    "typical": ("typical", {}),
    "typical-medusa": ("typical", {"posterior_threshold": 0.3, "posterior_alpha": 0.09}),
    "typical-sample": ("typical", {"recovery": "sample", "posterior_threshold": 0.2, "posterior_alpha": 1.0}),
    "fly": ("fly", {}),
    "fly-any": ("fly", {"fly_entropy_threshold": 0.0, "fly_window": 1}),
    "fly-top5": ("fly", {"fly_entropy_threshold": 1.0, "fly_entropy_top_k": 5, "fly_window": 2}),
    "fly-never": ("fly", {"fly_entropy_threshold": math.inf}),
    "lenience": ("lenience", {}),
    "lenience-0.3": ("lenience", {"lenience": 0.3}),
    "lenience-1": ("lenience", {"lenience": 1.0}),
    "mixture": ("mixture", {}),
    "mixture-0.3": ("mixture", {"weight": 0.3}),
    "mixture-0": ("mixture", {"weight": 0.0}),
    "mixture-1": ("mixture", {"weight": 1.0}),
    "target-only": ("target-only", {}),
    "target-only-0.3-0.7": ("target-only", {"threshold_single": 0.3, "threshold_acc": 0.7}),
    "tv-budget": ("tv-budget", {}),
    "tv-budget-0": ("tv-budget", {"epsilon": 0.0}),
    "tv-budget-0.3": ("tv-budget", {"epsilon": 0.3}),
    "tv-budget-1": ("tv-budget", {"epsilon": 1.0}),
    "synthetic": ("synthetic", {}),
    "synthetic-rates": ("synthetic", {"synthetic_acceptance_rates": (0.9, 0.6, 0.6, 0.1)}),
    "synthetic-length": ("synthetic", {"synthetic_acceptance_length": 4.7}),
    "synthetic-none": ("synthetic", {"synthetic_acceptance_rates": ()}),
}
"""Readable name -> strategy and options."""

DEFAULTS = [name for name, (_, options) in SETTINGS.items() if not options]
"""Every strategy once, with its default options."""

KINDS = ("realistic", "equal", "reversed", "one-hot", "disjoint", "zero-draft-prob", "equal-zeros", "peaked")
"""How the target's and the draft's rows relate; see `rows_of_kind`."""


@dataclass(frozen=True)
class Request:
    """One request before layout: ids may hold placeholders, rows are probabilities or logits of any dtype."""

    ids: list[int]
    target: torch.Tensor
    draft: torch.Tensor | None

    @property
    def chain(self) -> list[int]:
        """The drafted tokens before the first placeholder."""
        return list(itertools.takewhile(lambda token: token >= 0, self.ids))


@dataclass(frozen=True)
class Case:
    """A batch, described."""

    B: int
    K: int
    V: int
    layout: str = "padded"
    kind: str = "realistic"
    draft: bool = True
    draft_vocab: int | None = None
    dtype: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    placeholders: bool = False
    strides: str = "contiguous"
    seed: int = 0

    def __str__(self) -> str:
        """Name the case by what differs from the defaults."""
        plain = Case(self.B, self.K, self.V)
        parts = [f"B{self.B}-K{self.K}-V{self.V}-{self.layout}"]
        parts += [] if self.kind == plain.kind else [self.kind]
        parts += [] if self.draft else ["ngram"]
        parts += [] if self.draft_vocab is None else [f"draftV{self.draft_vocab}"]
        parts += [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.ids) if dtype not in NAMELESS]
        parts += ["placeholders"] if self.placeholders else []
        parts += [] if self.strides == plain.strides else [self.strides]
        return "-".join(parts)


NAMELESS = (torch.float32, torch.int64)


def random_logits(count: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Return rows from flat to sharp, one scale each, as language models have them."""
    scale = torch.tensor([0.3, 1.0, 2.0, 4.0, 8.0])[torch.randint(5, (count, 1), generator=generator)]
    return torch.randn(count, vocab, generator=generator) * scale


def rows_of_kind(kind: str, n: int, vocab: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return p [n+1, V] and q [n, V]."""
    logits = random_logits(n + 1, vocab, generator)
    p = logits.softmax(-1)
    noise = torch.randn(n, vocab, generator=generator)
    q = (logits[:n] + 0.7 * noise).softmax(-1)
    ids = torch.arange(vocab)
    if kind == "equal":
        q = p[:n].clone()
    elif kind == "reversed":
        q = p[:n].flip(-1)
    elif kind == "one-hot":
        p = torch.nn.functional.one_hot(torch.randint(vocab, (n + 1,), generator=generator), vocab).float()
        moved = torch.randint(2, (n,), generator=generator)
        q = torch.stack([row.roll(int(by)) for row, by in zip(p, moved, strict=False)]) if n else p[:0]
    elif kind == "disjoint" and vocab > 1:
        p = p * (ids % 2 == 0)
        p = p / p.sum(-1, keepdim=True)
        q = q * (ids % 2 == 1)
        q = q / q.sum(-1, keepdim=True)
    elif kind == "peaked":
        p = (12 * torch.nn.functional.one_hot(p.argmax(-1), vocab) + logits.clamp(-1, 1)).softmax(-1)
        q = (p[:n].log() + 0.2 * noise).softmax(-1)
    return p, q


def make_request(case: Case, n: int, generator: torch.Generator) -> Request:
    """Return a request of n drafted tokens drawn from its own rows."""
    p, q = rows_of_kind(case.kind, n, case.V, generator)
    if case.draft_vocab is not None:
        extra = torch.rand(n, max(case.draft_vocab - case.V, 0), generator=generator) * 0.02
        q = torch.cat((q[:, : case.draft_vocab], extra), 1)
        q = q / q.sum(-1, keepdim=True)
    source = q[:, : case.V] if case.draft else p[:n]
    ids = torch.multinomial(source, 1, generator=generator)[:, 0].tolist() if n else []
    if case.kind == "zero-draft-prob" and case.V > 2:
        # The drafted token has q = 0; every other time p = 0 as well.
        for i, token in enumerate(ids):
            q[i, token] = 0
            if i % 2:
                p[i, token] = 0
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    if case.kind == "equal-zeros" and case.V > 1:
        # p == q, and every third drafted token lies outside their support.
        for i, token in enumerate(ids):
            p[i, token] *= (i + n) % 3 != 0
        p = p / p.sum(-1, keepdim=True)
        q = p[:n].clone()
    if case.placeholders and n and torch.rand((), generator=generator) < 0.7:
        at = int(torch.randint(n, (), generator=generator))
        ids[at] = (-1, -7)[at % 2]
    return Request(ids, p.to(case.dtype), q.to(case.dtype) if case.draft else None)


def make_requests(case: Case) -> list[Request]:
    """Return B requests; the first drafts K tokens, the second (if any) none, the others 0 to K."""
    generator = torch.Generator().manual_seed(case.seed + 1000 * case.V + case.K)
    lengths = [case.K, 0, *torch.randint(case.K + 1, (case.B,), generator=generator).tolist()][: case.B]
    return [make_request(case, n, generator) for n in lengths]


def logit_requests(case: Case, *, masked: bool) -> list[Request]:
    """Return requests of logits, drafts drawn from them; `masked` ones have -inf entries in both rows."""
    generator = torch.Generator().manual_seed(case.seed)
    requests = []
    for n in [case.K, 0, *torch.randint(case.K + 1, (case.B,), generator=generator).tolist()][: case.B]:
        target = random_logits(n + 1, case.V, generator) + 5 * torch.randn(n + 1, 1, generator=generator)
        draft = target[:n] + 0.5 * torch.randn(n, case.V, generator=generator)
        if masked:
            target[:, ::3] = -math.inf
            draft[:, ::5] = -math.inf
        source = draft if case.draft else target[:n]
        ids = torch.multinomial(source.softmax(-1), 1, generator=generator)[:, 0].tolist() if n else []
        requests.append(Request(ids, target.to(case.dtype), draft.to(case.dtype) if case.draft else None))
    return requests


def rng_of(num_requests: int, seed: int = 0) -> Rng:
    """Return fresh streams with random seeds and offsets."""
    generator = torch.Generator().manual_seed(seed)
    return Rng(
        seeds=torch.randint(-(2**62), 2**62, (num_requests,), generator=generator),
        offsets=torch.randint(2**40, (num_requests,), generator=generator),
    )


def blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory that must not be read: NaN, or ids far outside the vocabulary."""
    return torch.full(shape, math.nan if dtype.is_floating_point else 10**6, dtype=dtype)


def lay_out(
    requests: list[Request], layout: str, *, most: int | None = None, ids: torch.dtype = torch.int64
) -> dict[str, Any]:
    """Return ids, target, draft and cu_num_draft_tokens; what belongs to no request is poisoned.

    Args:
        requests: The batch.
        layout: `padded` or `ragged`.
        most: Columns of the padded layout, or `max_num_draft_tokens` of the ragged one.
        ids: Dtype of the ids.
    """
    lengths = [len(request.ids) for request in requests]
    most = max(lengths, default=0) if most is None else most
    vocab, dtype = requests[0].target.shape[1], requests[0].target.dtype
    tensors: dict[str, Any] = {"draft": None}
    drafts = [request.draft for request in requests if request.draft is not None]
    if layout == "ragged":
        tensors["ids"] = torch.tensor([token for request in requests for token in request.ids], dtype=ids)
        tensors["target"] = torch.cat([request.target for request in requests])
        if drafts:
            tensors["draft"] = torch.cat(drafts)
        tensors["cu_num_draft_tokens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=ids)
        tensors["max_num_draft_tokens"] = most
        return tensors
    tensors["ids"] = blank((len(requests), most), ids)
    tensors["target"] = blank((len(requests), most + 1, vocab), dtype)
    if drafts:
        tensors["draft"] = blank((len(requests), most, drafts[0].shape[1]), drafts[0].dtype)
    for b, (request, n) in enumerate(zip(requests, lengths, strict=True)):
        tensors["ids"][b, :n] = torch.tensor(request.ids, dtype=ids)
        tensors["ids"][b, n : n + 1] = PLACEHOLDER_TOKEN_ID
        tensors["target"][b, : n + 1] = request.target
        if request.draft is not None:
            tensors["draft"][b, :n] = request.draft
    return tensors


def sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as every second row and an inner slice of a wider, poisoned tensor."""
    shape = tensor.shape
    wide = blank((2 * shape[0], *shape[1:-1], shape[-1] + 3), tensor.dtype)[::2, ..., 1 : 1 + shape[-1]]
    if tensor.ndim == 1:
        wide = blank((2 * shape[0] + 1,), tensor.dtype)[1::2]
    return wide.copy_(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the memory order of the first two dimensions swapped."""
    return tensor if tensor.ndim == 1 else tensor.transpose(0, 1).contiguous().transpose(0, 1)


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "sliced": sliced,
    "transposed": transposed,
}


def call(
    setting: str, tensors: dict[str, Any], *, form: str = "probs", strides: str = "contiguous", **arguments: Any
) -> VerifyResult:
    """Run the torch engine on laid-out tensors."""
    name, options = SETTINGS[setting]
    view = STRIDES[strides]
    strategy = acceptlib.create(name, backend="torch", **options)
    rows: dict[str, Any] = {f"target_{form}": view(tensors["target"])}
    if tensors["draft"] is not None:
        rows[f"draft_{form}"] = view(tensors["draft"])
    rows |= {key: value for key, value in tensors.items() if key not in {"ids", "target", "draft"}}
    return strategy.verify(view(tensors["ids"]), **rows, **arguments)


def same(left: VerifyResult, right: VerifyResult) -> None:
    """Assert that two results are equal bit for bit; columns beyond the narrower one hold nothing but padding."""
    columns = min(left.output_token_ids.shape[1], right.output_token_ids.shape[1])
    for result in (left, right):
        assert (result.output_token_ids[:, columns:] == PLACEHOLDER_TOKEN_ID).all()
    assert torch.equal(left.output_token_ids[:, :columns], right.output_token_ids[:, :columns])
    assert torch.equal(left.num_accepted, right.num_accepted)
    assert torch.equal(left.num_emitted, right.num_emitted)
    assert torch.equal(left.status, right.status)
