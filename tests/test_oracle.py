"""The torch engine against the oracle: the same uniforms must give the same tokens, request by request."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import acceptlib
from acceptlib import PLACEHOLDER_TOKEN_ID, Rng, SamplingParams, VerifyResult
from acceptlib.engine import torch_engine
from acceptlib.exact import oracle

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


# Building batches


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


def expected_rows(setting: str, requests: list[Request], uniforms: acceptlib.Uniforms, columns: int) -> list[list[int]]:
    """Return the oracle's padded output rows, one request at a time."""
    name, options = SETTINGS[setting]
    rows = []
    for b, request in enumerate(requests):
        x = request.chain
        p = request.target[: len(x) + 1].float()
        q = None if request.draft is None else request.draft[: len(x)].float()
        u = uniforms.accept[b, : len(x)].tolist()
        tokens, accepted = oracle.verify(name, x, p, q, u, int(uniforms.emit[b]), **options)
        assert len(tokens) == accepted + 1
        rows.append(tokens + [PLACEHOLDER_TOKEN_ID] * (columns - len(tokens)))
    return rows


def check_case(setting: str, case: Case) -> None:
    """Assert exact equality with the oracle, that inputs are left alone, and that streams move on by one."""
    requests = make_requests(case)
    tensors = lay_out(requests, case.layout, ids=case.ids)
    before = {key: value.clone() for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    rng = rng_of(case.B, case.seed)
    offsets = rng.offsets.clone()
    uniforms = rng.uniforms(case.K)
    result = call(setting, tensors, uniforms=uniforms, strides=case.strides)

    columns = result.output_token_ids.shape[1]
    assert columns == max(len(request.ids) for request in requests) + 1
    assert result.output_token_ids.dtype == torch.int32
    assert result.status.tolist() == [0] * case.B
    assert result.output_token_ids.tolist() == expected_rows(setting, requests, uniforms, columns)
    emitted = (result.output_token_ids != PLACEHOLDER_TOKEN_ID).sum(1)
    assert result.num_emitted.tolist() == emitted.tolist()
    assert result.num_accepted.tolist() == (emitted - 1).tolist()

    same(result, call(setting, tensors, rng=rng, strides=case.strides))
    assert torch.equal(rng.offsets, offsets + 1)
    for key, value in before.items():
        torch.testing.assert_close(tensors[key], value, rtol=0, atol=0, equal_nan=True)


# Exact equality from probabilities

RELATIONS = [Case(6, 4, 29, kind=kind, draft=draft, seed=2) for kind in KINDS for draft in (True, False)]

SHAPES = [
    Case(5, 4, 101, "ragged"),
    Case(5, 4, 101, "padded"),
    Case(4, 9, 101, "ragged", ids=torch.int32),
    Case(4, 9, 101, "padded", ids=torch.int32, strides="sliced"),
    Case(2, 33, 101, "ragged", kind="peaked"),
    Case(3, 0, 101, "padded"),
    Case(3, 0, 101, "ragged"),
    Case(3, 1, 101, "ragged", seed=1),
    Case(1, 1, 1, "padded"),
    Case(3, 3, 1, "ragged", draft=False),
    Case(7, 3, 2, "padded"),
    Case(7, 3, 2, "ragged", draft=False),
    Case(7, 5, 3, "ragged"),
    Case(7, 5, 3, "padded", kind="reversed"),
    Case(3, 2, 2048, "ragged"),
    Case(3, 2, 2048, "padded", draft=False),
    Case(3, 3, 4097, "padded", strides="transposed"),
    Case(3, 3, 4097, "ragged", dtype=torch.bfloat16, strides="sliced"),
    Case(6, 4, 101, "padded", dtype=torch.bfloat16),
    Case(6, 4, 101, "padded", dtype=torch.float16, draft=False),
    Case(6, 4, 101, "ragged", dtype=torch.float16, ids=torch.int32),
    Case(6, 4, 101, "padded", kind="equal", dtype=torch.bfloat16),
    Case(8, 6, 101, "padded", placeholders=True),
    Case(8, 6, 101, "ragged", placeholders=True),
    Case(8, 6, 17, "ragged", placeholders=True, draft=False, ids=torch.int32, strides="sliced"),
    Case(8, 6, 101, "padded", placeholders=True, strides="transposed"),
    Case(5, 4, 101, "ragged", draft_vocab=90),
    Case(5, 4, 101, "padded", draft_vocab=1, strides="sliced"),
    Case(5, 4, 101, "padded", draft_vocab=120),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_shapes_and_layouts(setting: str, case: Case) -> None:
    """Layouts, dtypes, strides and sizes: catches rows taken from the wrong place and any unspecified rounding."""
    check_case(setting, case)


@pytest.mark.parametrize("case", RELATIONS, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_relations_of_rows(setting: str, case: Case) -> None:
    """Degenerate p and q: catches a zero residual, q = 0 at the drafted token, ties, and leaks onto masked tokens."""
    check_case(setting, case)


@pytest.mark.parametrize("setting", SETTINGS)
def test_many_requests(setting: str) -> None:
    """A batch wide enough that every position is a stop many times: catches rare branches of the decision."""
    check_case(setting, Case(150, 5, 7, "ragged", seed=5))


@given(data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_random_shapes(data: st.DataObject) -> None:
    """Any combination of the above, drawn by hypothesis, which shrinks what fails."""
    setting = data.draw(st.sampled_from(list(SETTINGS)))
    vocab = data.draw(st.integers(1, 40))
    case = Case(
        B=data.draw(st.integers(1, 5)),
        K=data.draw(st.integers(0, 6)),
        V=vocab,
        layout=data.draw(st.sampled_from(["padded", "ragged"])),
        kind=data.draw(st.sampled_from(KINDS)),
        draft=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        ids=data.draw(st.sampled_from([torch.int32, torch.int64])),
        placeholders=data.draw(st.booleans()),
        strides=data.draw(st.sampled_from(list(STRIDES))),
        seed=data.draw(st.integers(0, 2**16)),
    )
    check_case(setting, case)


@pytest.mark.parametrize("setting", SETTINGS)
def test_extreme_uniforms(setting: str) -> None:
    """u at 0 and 1 - 2^-53, bits all 0 and all 1: catches h = 0 accepted, h = 1 rejected, an id past the last."""
    for kind, draft in itertools.product(KINDS, (True, False)):
        case = Case(4, 3, 11, kind=kind, draft=draft, seed=9)
        requests = make_requests(case)
        tensors = lay_out(requests, "padded")
        for u, bits in itertools.product((0.0, 1 - 2**-53), (0, -1, 2**63 - 1, -(2**63))):
            uniforms = acceptlib.Uniforms(
                accept=torch.full((4, 3), u, dtype=torch.float64), emit=torch.full((4,), bits, dtype=torch.int64)
            )
            result = call(setting, tensors, uniforms=uniforms)
            assert result.output_token_ids.tolist() == expected_rows(setting, requests, uniforms, 4)


@pytest.mark.parametrize("vocab", [2, 3, 101, 4097])
@pytest.mark.parametrize("setting", ["rejection", "block", "lenience", "typical-sample"])
def test_edges_of_the_draw(setting: str, vocab: int) -> None:
    """The last bits before and the first bits after the end of intervals: catches any inexact step of the draw."""
    generator = torch.Generator().manual_seed(vocab)
    name, options = SETTINGS[setting]
    # Token 0 is drafted, and certain to be rejected. The rows have entries from 2^-2 to below 2^-60.
    p = torch.cat((torch.zeros(2, 1), torch.randn(2, vocab - 1, generator=generator).mul(7).softmax(-1)), 1)
    q = torch.cat((torch.full((1, 1), 0.5), torch.randn(1, vocab - 1, generator=generator).softmax(-1) / 2), 1)
    q[:, 1 + vocab // 2 :] = 0
    for drafted in ([0], []):
        n = len(drafted)
        chain = oracle.build(name, drafted, p[: n + 1], q[:n], **options)
        counts = oracle.integers(chain.recovered(0) if n else chain.bonus)
        ends = list(itertools.accumulate(counts))[:-1]
        ends = [*ends[:: max(1, len(ends) // 40)], *ends[2047:2048]]
        ends = [end for end in ends if 0 < end < sum(counts)]
        first = [-(-(end << 64) // sum(counts)) for end in ends]
        bits = [value - 2**64 if value >= 2**63 else value for edge in first for value in (edge - 1, edge)] + [0, -1]
        requests = [Request(drafted, p[: n + 1], q[:n])] * len(bits)
        uniforms = acceptlib.Uniforms(
            accept=torch.full((len(bits), n), 0.5, dtype=torch.float64), emit=torch.tensor(bits, dtype=torch.int64)
        )
        expected = expected_rows(setting, requests, uniforms, n + 1)
        assert all(below != above for below, above in zip(expected[:-2:2], expected[1:-2:2], strict=True))
        assert call(setting, lay_out(requests, "padded"), uniforms=uniforms).output_token_ids.tolist() == expected


def test_typical_threshold_is_strict() -> None:
    """p(x) equal to the threshold is rejected, and just above it accepted: catches `>=` for `>`."""
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.25, 0.5, 0.125, 0.125]])
    above = torch.nextafter(p[0, :1], torch.ones(1))
    uniforms = acceptlib.Uniforms(accept=torch.zeros(2, 1, dtype=torch.float64), emit=torch.tensor([-1, -1]))
    target = torch.stack((p, torch.stack((torch.cat((above, p[0, 1:])), p[1]))))
    strategy = acceptlib.create("typical", posterior_threshold=0.25, posterior_alpha=9.0)
    result = strategy.verify(torch.zeros(2, 1, dtype=torch.int64), target_probs=target, uniforms=uniforms)
    assert result.num_accepted.tolist() == [0, 1]
    for b, accepted in enumerate((0, 1)):
        options = {"posterior_threshold": 0.25, "posterior_alpha": 9.0}
        assert oracle.verify("typical", [0], target[b], None, [0.0], -1, **options)[1] == accepted


@pytest.mark.parametrize("setting", SETTINGS)
def test_nan_in_draft_counts_as_zero(setting: str) -> None:
    """NaN where q was 0, at the drafted token and elsewhere: catches a NaN that re-emits the rejected token."""
    requests = []
    for request in make_requests(Case(12, 3, 11, kind="zero-draft-prob", seed=3)):
        assert request.draft is not None
        requests.append(replace(request, draft=torch.where(request.draft == 0, math.nan, request.draft)))
    uniforms = rng_of(12).uniforms(3)
    result = call(setting, lay_out(requests, "ragged"), uniforms=uniforms)
    assert result.status.tolist() == [0] * 12
    assert result.output_token_ids.tolist() == expected_rows(setting, requests, uniforms, 4)


@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_given_bonus_tokens(setting: str, layout: str) -> None:
    """`bonus_token_ids` stands where every drafted token does, and nowhere else: catches it emitted on rejection.

    In the ragged layout it is the token after the count, and not that of a placeholder before.
    """
    requests = make_requests(Case(9, 3, 13, placeholders=True, seed=4))
    tensors = lay_out(requests, layout)
    uniforms = rng_of(9).uniforms(3)
    bonus = torch.arange(9) % 13
    expected = expected_rows(setting, requests, uniforms, 4)
    for b, (row, request) in enumerate(zip(expected, requests, strict=True)):
        accepted = sum(token != PLACEHOLDER_TOKEN_ID for token in row) - 1
        if accepted == len(request.chain if layout == "padded" else request.ids):
            row[accepted] = int(bonus[b])
    assert call(setting, tensors, uniforms=uniforms, bonus_token_ids=bonus).output_token_ids.tolist() == expected


def test_counts_without_the_leading_zero() -> None:
    """Counts that are as many as the bonus tokens begin with the first request's end, K found or given."""
    first, *rest = sorted(make_requests(Case(7, 4, 13, "ragged", seed=2)), key=lambda request: -len(request.ids))
    requests = [first, *(request for request in rest if len(request.ids) < len(first.ids))]
    assert len(requests) > 3
    tensors = lay_out(requests, "ragged") | {"cu_num_draft_tokens": None, "max_num_draft_tokens": None}
    ends = torch.tensor([*itertools.accumulate(len(request.ids) for request in requests)])
    bonus = torch.arange(len(requests)) % 13
    for most in (None, 5):
        results = [
            call(
                "rejection",
                {**tensors, "cu_num_draft_tokens": counts, "max_num_draft_tokens": most},
                rng=rng_of(len(requests)),
                bonus_token_ids=bonus,
            )
            for counts in (ends, torch.cat((torch.tensor([0]), ends)))
        ]
        same(*results)


def test_ragged_uniforms() -> None:
    """Accept uniforms of the ragged shape [T] mean the same as [B, K]: catches a position counted per batch."""
    requests = make_requests(Case(6, 4, 17, seed=6))
    uniforms = rng_of(6).uniforms(4)
    flat = torch.cat([uniforms.accept[b, : len(request.ids)] for b, request in enumerate(requests)])
    tensors = lay_out(requests, "ragged")
    left = call("rejection", tensors, uniforms=uniforms)
    same(left, call("rejection", tensors, uniforms=acceptlib.Uniforms(accept=flat, emit=uniforms.emit)))


# Equality from logits, up to the rounding of exp and of its sum

ROUNDING = 1e-5
"""How close u must be to h, or r to the end of a token's interval, for another decision to be rounding."""


def plausible_stops(chain: oracle.Chain, u: list[float]) -> set[int]:
    """Return what tau may be when each |u - h| < ROUNDING may go either way."""
    ways = [(True, False) if abs(u_i - h_i) < ROUNDING else (u_i < h_i,) for u_i, h_i in zip(u, chain.h, strict=True)]
    return {chain.stop(accepted) for accepted in itertools.product(*ways)}


def interval_holds(weights: torch.Tensor, p: torch.Tensor, token: int, bits: int) -> bool:
    """Return whether r / total is within ROUNDING of the token's interval of the CDF."""
    counts = oracle.integers(weights)
    if sum(counts) == 0:
        counts = oracle.integers(p)
    low, high = sum(counts[:token]) / sum(counts), sum(counts[: token + 1]) / sum(counts)
    return counts[token] > 0 and low - ROUNDING <= (bits % 2**64) / 2**64 <= high + ROUNDING


def count_mismatches(
    setting: str, requests: list[Request], rows: list[Request], uniforms: acceptlib.Uniforms, result: VerifyResult
) -> int:
    """Return how many requests differ from the oracle on `rows`; fail where rounding does not explain it."""
    name, options = SETTINGS[setting]
    assert result.status.tolist() == [0] * len(requests)
    mismatches = 0
    for b, (request, row) in enumerate(zip(requests, rows, strict=True)):
        x, u, bits = request.chain, uniforms.accept[b, : len(request.chain)].tolist(), int(uniforms.emit[b])
        tau = int(result.num_accepted[b])
        tokens = result.output_token_ids[b, : tau + 1].tolist()
        assert tokens[:-1] == x[:tau]
        chain = oracle.build(name, x, row.target[: len(x) + 1], row.draft, **options)
        if (tokens, tau) == oracle.verify(name, x, row.target[: len(x) + 1], row.draft, u, bits, **options):
            continue
        mismatches += 1
        assert tau in plausible_stops(chain, u)
        weights = chain.bonus if tau == len(x) else chain.recovered(tau)
        assert interval_holds(weights, row.target[tau], tokens[-1], bits)
    return mismatches


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


def processed(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the float32 probabilities of logits, worked out in float64."""
    if temperature == 0:
        rows = [oracle.one_hot(row) for row in logits.float()]
        return torch.stack(rows) if rows else logits.float()
    return (logits.double() / temperature).softmax(-1).float()


LOGIT_CASES = [
    Case(24, 4, 101, "padded"),
    Case(24, 4, 101, "ragged", draft=False, dtype=torch.bfloat16),
    Case(12, 3, 4097, "ragged", strides="sliced"),
    Case(12, 3, 2048, "padded", dtype=torch.float16, strides="transposed"),
]


@pytest.mark.parametrize("temperature", ["plain", "temperatures"])
@pytest.mark.parametrize("case", LOGIT_CASES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_logits(setting: str, case: Case, temperature: str) -> None:
    """From logits, with and without temperatures: a difference must be rounding, and at most one request has one."""
    requests = logit_requests(case, masked=temperature == "temperatures")
    values = [1.0] * case.B if temperature == "plain" else [(0.7, 1.0, 0.0, 1.9)[b % 4] for b in range(case.B)]
    sampling = None if temperature == "plain" else SamplingParams(temperature=torch.tensor(values))
    rows = [
        Request(
            request.ids, processed(request.target, t), None if request.draft is None else processed(request.draft, t)
        )
        for request, t in zip(requests, values, strict=True)
    ]
    uniforms = rng_of(case.B, case.seed).uniforms(case.K)
    tensors = lay_out(requests, case.layout)
    before = tensors["target"].clone()
    result = call(setting, tensors, form="logits", strides=case.strides, uniforms=uniforms, sampling=sampling)
    assert count_mismatches(setting, requests, rows, uniforms, result) <= 1
    torch.testing.assert_close(tensors["target"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("setting", DEFAULTS)
def test_logits_beside_probabilities(setting: str) -> None:
    """Target logits with draft probabilities, and the other way round: catches one flag for both models."""
    case = Case(16, 4, 101, "padded", seed=8)
    requests = logit_requests(case, masked=False)
    rows = [Request(r.ids, processed(r.target, 1), processed(r.draft, 1)) for r in requests if r.draft is not None]
    uniforms = rng_of(case.B).uniforms(case.K)
    logits, probs = lay_out(requests, "padded"), lay_out(rows, "padded")
    strategy = acceptlib.create(setting)
    for target, draft in (("logits", "probs"), ("probs", "logits")):
        forms = {"logits": logits, "probs": probs}
        given_rows = {f"target_{target}": forms[target]["target"], f"draft_{draft}": forms[draft]["draft"]}
        result = strategy.verify(logits["ids"], uniforms=uniforms, **given_rows)
        assert count_mismatches(setting, requests, rows, uniforms, result) <= 1


@pytest.mark.parametrize("temperature", [0.5, 0.02, 2e-38])
def test_low_temperatures(temperature: float) -> None:
    """Logits near 30 over a low temperature: catches a quotient that overflows, or rounds too early."""
    generator = torch.Generator().manual_seed(0)
    target = 30 + 3 * temperature * torch.randn(50, 1, 101, generator=generator)
    target = target if temperature > 1e-6 else target + torch.randn(50, 1, 101, generator=generator)
    result = acceptlib.create("rejection").verify(
        torch.zeros(50, 0, dtype=torch.int64),
        target_logits=target,
        sampling=SamplingParams(temperature=torch.full((50,), temperature)),
        rng=rng_of(50),
        logprobs=True,
    )
    assert result.status.tolist() == [0] * 50
    assert result.logprobs is not None
    law = (target.double() / torch.tensor(temperature).double()).log_softmax(-1)
    wanted = law[:, 0].gather(1, result.output_token_ids.long())
    torch.testing.assert_close(result.logprobs.double(), wanted, rtol=0, atol=ROUNDING)


def test_tied_logits() -> None:
    """bfloat16 logits with many ties: catches an argmax that does not take the lowest id."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(-2, 3, (40, 4, 101), generator=generator).bfloat16()
    ids = target[:, :3].float().argmax(-1)
    ids[::3, 1] = 100 - target[::3, 1].flip(-1).float().argmax(-1)
    requests = [Request(ids[b].tolist(), target[b], None) for b in range(40)]
    rows = [Request(request.ids, processed(request.target, 1), None) for request in requests]
    uniforms = rng_of(40).uniforms(3)
    result = call("greedy", lay_out(requests, "padded"), form="logits", uniforms=uniforms)
    assert count_mismatches("greedy", requests, rows, uniforms, result) == 0
    assert 0 < (result.num_accepted < 3).sum() < 40


# Invariance, bit for bit


def batch(form: str, *, B: int = 9, K: int = 5, V: int = 101, draft: bool = True) -> list[Request]:  # noqa: N803
    """Return requests of probabilities or logits."""
    case = Case(B, K, V, draft=draft, seed=13)
    return make_requests(case) if form == "probs" else logit_requests(case, masked=False)


def check_invariance(setting: str, form: str, requests: list[Request]) -> None:
    """Assert that order, layout, padding, strides and neighbours leave every request's result alone."""
    count, most = len(requests), max(len(request.ids) for request in requests)
    rng = rng_of(count)

    def run(order: list[int], layout: str, *, columns: int | None = None, strides: str = "contiguous") -> VerifyResult:
        tensors = lay_out([requests[b] for b in order], layout, most=columns)
        fresh = Rng(seeds=rng.seeds[order], offsets=rng.offsets[order])
        return call(setting, tensors, form=form, strides=strides, rng=fresh)

    plain = list(range(count))
    result = run(plain, "padded")
    assert result.status.tolist() == [0] * count
    same(result, run(plain, "ragged"))
    for columns in (most + 1, most + 7):
        same(result, run(plain, "padded", columns=columns))
        same(result, run(plain, "ragged", columns=columns))
    for layout, strides in itertools.product(("padded", "ragged"), ("sliced", "transposed")):
        same(result, run(plain, layout, strides=strides))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    for layout in ("padded", "ragged"):
        same(_rows(result, order), run(order, layout))
    for b in (0, 1, count - 1):
        for layout in ("padded", "ragged"):
            same(_rows(result, [b]), run([b], layout))


def _rows(result: VerifyResult, rows: list[int]) -> VerifyResult:
    """Return some requests of a result."""
    return VerifyResult(
        result.output_token_ids[rows], result.num_accepted[rows], result.num_emitted[rows], result.status[rows]
    )


@pytest.mark.parametrize("draft", [True, False], ids=["draft", "ngram"])
@pytest.mark.parametrize("form", ["probs", "logits"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_invariance(setting: str, form: str, draft: bool) -> None:  # noqa: FBT001
    """A request's result is its own: catches keying by batch row, reads across requests, and padding that matters."""
    check_invariance(setting, form, batch(form, draft=draft))


@pytest.mark.parametrize("form", ["probs", "logits"])
@pytest.mark.parametrize("setting", DEFAULTS)
def test_invariance_large_vocabulary(setting: str, form: str) -> None:
    """The same where the rows of the batch exceed one chunk: catches a sum whose order depends on the batch."""
    requests = batch(form, B=34, K=5, V=40_000)
    rows = sum(len(request.ids) + 1 for request in requests)
    assert rows * 4 * 40_000 > torch_engine.SCRATCH_BYTES
    count = len(requests)
    rng = rng_of(count)
    result = call(setting, lay_out(requests, "padded"), form=form, rng=Rng(seeds=rng.seeds, offsets=rng.offsets + 0))
    assert result.status.tolist() == [0] * count
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    fresh = Rng(seeds=rng.seeds[order], offsets=rng.offsets[order])
    same(_rows(result, order), call(setting, lay_out([requests[b] for b in order], "ragged"), form=form, rng=fresh))
    for b in (0, 1, count - 1):
        fresh = Rng(seeds=rng.seeds[b : b + 1], offsets=rng.offsets[b : b + 1].clone())
        alone = call(setting, lay_out([requests[b]], "ragged"), form=form, strides="sliced", rng=fresh)
        same(_rows(result, [b]), alone)


@pytest.mark.parametrize("form", ["probs", "logits"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_chunks_change_nothing(setting: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, three rows or all rows in a chunk: catches a chunk's edge that loses, repeats or rounds a row."""
    requests = batch(form)
    uniforms = rng_of(len(requests)).uniforms(5)
    temperature = torch.linspace(0.0, 1.6, len(requests))
    sampling = SamplingParams(temperature=temperature) if form == "logits" else None
    for layout in ("padded", "ragged"):
        tensors = lay_out(requests, layout)
        whole = call(setting, tensors, form=form, uniforms=uniforms, sampling=sampling)
        for rows in (1, 3):
            monkeypatch.setattr(torch_engine, "SCRATCH_BYTES", rows * 4 * 101)
            same(whole, call(setting, tensors, form=form, uniforms=uniforms, sampling=sampling))
            monkeypatch.undo()


@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "plain"])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("setting", DEFAULTS)
def test_out_is_overwritten(setting: str, layout: str, logprobs: bool) -> None:  # noqa: FBT001
    """A result prefilled with garbage is returned and wholly rewritten: catches stale tokens past the stop."""
    requests = make_requests(Case(7, 4, 23, placeholders=True, seed=7))
    tensors = lay_out(requests, layout)
    uniforms = rng_of(7).uniforms(4)
    expected = call(setting, tensors, uniforms=uniforms, logprobs=logprobs)
    out = VerifyResult.empty(7, 4, torch.device("cpu"), logprobs=logprobs)
    for tensor in (out.output_token_ids, out.num_accepted, out.num_emitted, out.status):
        tensor.fill_(77)
    if out.logprobs is not None:
        out.logprobs.fill_(77.0)
    assert call(setting, tensors, uniforms=uniforms, logprobs=logprobs, out=out) is out
    same(out, expected)
    if logprobs:
        assert out.logprobs is not None
        assert expected.logprobs is not None
        torch.testing.assert_close(out.logprobs, expected.logprobs, rtol=0, atol=0, equal_nan=True)
        for b, request in enumerate(requests):
            tokens = out.output_token_ids[b, : int(out.num_emitted[b])].tolist()
            wanted = [math.log(request.target[i, token].item()) for i, token in enumerate(tokens)]
            assert out.logprobs[b, : len(tokens)].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert out.logprobs[b, len(tokens) :].isnan().all()


# The oracle itself


def test_oracle_knows_every_builtin() -> None:
    """A built-in without a reference would go unchecked."""
    strategies = {acceptlib.create(name).name for name in acceptlib.available()}
    assert {name for name, _ in SETTINGS.values()} == set(oracle.RULES)
    assert set(oracle.RULES) <= strategies


@pytest.mark.parametrize(
    ("weights", "bits", "token"),
    [
        ([0.0, 0.5, 0.5], 0, 1),
        ([0.0, 0.5, 0.5], 2**63 - 1, 1),
        ([0.0, 0.5, 0.5], 2**63, 2),
        ([0.0, 0.5, 0.5], -(2**63), 2),
        ([0.5, 0.5, 0.0], -1, 1),
        ([2**-60, 0.0, 2**-61], -1, 0),
        ([0.0, 2**-61, 0.0], 0, 0),
        ([0.0, 0.0, 0.0], -1, 2),
    ],
)
def test_oracle_draw(weights: list[float], bits: int, token: int) -> None:
    """The draw by hand: edges of intervals, truncation below 2^-60, and the fall-back to p."""
    p = torch.tensor([0.25, 0.25, 0.5])
    assert oracle.draw(torch.tensor(weights), p, bits) == token


def test_oracle_expected_tokens_of_the_block_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), K = 2: 10/9 accepted with token rejection, 11/9 with block."""
    p = torch.tensor([[1 / 3, 2 / 3]] * 3)
    q = torch.tensor([[2 / 3, 1 / 3]] * 2)
    for name, accepted in (("rejection", 10 / 9), ("block", 11 / 9)):
        mean = sum(
            q[0, x_1].item() * q[1, x_2].item() * oracle.expected_tokens(name, [x_1, x_2], p, q)
            for x_1, x_2 in itertools.product(range(2), repeat=2)
        )
        assert mean == pytest.approx(accepted + 1, abs=1e-6)


def test_oracle_expected_tokens_is_the_mean() -> None:
    """The expectation against the mean of `verify` over a grid of uniforms: catches h and 1 - h swapped."""
    request = make_request(Case(1, 2, 5), 2, torch.Generator().manual_seed(3))
    grid = [(i + 0.5) / 40 for i in range(40)]
    for name, options in SETTINGS.values():
        counts = [
            len(oracle.verify(name, request.ids, request.target, request.draft, u, 0, **options)[0])
            for u in itertools.product(grid, repeat=2)
        ]
        expected = oracle.expected_tokens(name, request.ids, request.target, request.draft, **options)
        # Each of two thresholds is off by half a cell at most, and moves at most two tokens.
        assert abs(sum(counts) / len(counts) - expected) <= 2 * 2 * 0.5 / 40


def law(name: str, p: torch.Tensor, q: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Return the law of the first n+1 tokens, those after the emitted ones drawn from the target."""
    n, vocab = len(q), p.shape[1]
    joint: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(vocab), repeat=n + 1), 0.0)
    for x in itertools.product(range(vocab), repeat=n):
        chain = oracle.build(name, x, p, q)
        drafted = math.prod(q[i, x_i].item() for i, x_i in enumerate(x))
        for accepted in itertools.product((True, False), repeat=n):
            ways = math.prod(h_i if a_i else 1 - h_i for a_i, h_i in zip(accepted, chain.h, strict=True))
            tau = chain.stop(accepted)
            weights = chain.bonus if tau == n else chain.recovered(tau)
            if drafted * ways == 0:
                continue
            for tokens in itertools.product(range(vocab), repeat=n + 1):
                if tokens[:tau] == x[:tau]:
                    tail = math.prod(p[i, tokens[i]].item() for i in range(tau + 1, n + 1))
                    drawn = (weights[tokens[tau]] / weights.sum()).item()
                    joint[tokens] += drafted * ways * drawn * tail
    return joint


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_oracle_is_lossless(name: str, n: int) -> None:
    """The joint law by enumeration is the target's, up to float32 rows: catches an error shared with the engine."""
    generator = torch.Generator().manual_seed(n)
    p = torch.randn(n + 1, 3, generator=generator).mul(1.5).softmax(-1)
    q = torch.randn(n, 3, generator=generator).mul(1.5).softmax(-1)
    for tokens, probability in law(name, p, q).items():
        assert probability == pytest.approx(math.prod(p[i, t].item() for i, t in enumerate(tokens)), abs=2e-6)


def test_oracle_neutral_settings() -> None:
    """Lossy rules at their neutral setting are `rejection`, as block is for one token: catches a wrong residual."""
    source = rng_of(40, 3).uniforms(3)
    requests = make_requests(Case(40, 3, 9, seed=21))
    for b, request in enumerate(requests):
        u, bits = source.accept[b, : len(request.ids)].tolist(), int(source.emit[b])
        arguments = (request.ids, request.target, request.draft, u, bits)
        expected = oracle.verify("rejection", *arguments)
        assert oracle.verify("lenience", *arguments, lenience=1.0) == expected
        assert oracle.verify("mixture", *arguments, weight=1.0) == expected
        assert oracle.verify("fly", *arguments, fly_entropy_threshold=math.inf) == expected
        if len(request.ids) <= 1:
            assert oracle.verify("block", *arguments) == expected


def test_oracle_one_hot_block_is_rejection() -> None:
    """For one-hot drafts block accepts as much as token rejection: catches Z taken from the wrong row."""
    request = make_request(Case(1, 4, 6, draft=False), 4, torch.Generator().manual_seed(2))
    arguments = (request.ids, request.target, None)
    assert oracle.expected_tokens("block", *arguments) == pytest.approx(
        oracle.expected_tokens("rejection", *arguments), abs=1e-6
    )
    h = [request.target[i, x_i].item() for i, x_i in enumerate(request.ids)]
    products = itertools.accumulate(h, lambda product, h_i: product * h_i)
    assert oracle.expected_tokens("rejection", *arguments) == pytest.approx(1 + sum(products), abs=1e-12)


def test_oracle_fly_window() -> None:
    """By hand, n = 4 and W = 2: a rejection is forgiven with both followers accepted, and not within 2 of the end."""
    p = torch.full((5, 4), 0.25)
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0]] * 4)
    x = [0, 0, 0, 0]
    yes, no = 0.0, 0.9
    for u, accepted in (
        ([yes, no, yes, yes], 4),
        ([no, yes, yes, no], 3),
        ([no, yes, no, yes], 0),
        ([yes, yes, no, yes], 2),
        ([yes, yes, yes, no], 3),
        ([no, no, yes, yes], 0),
    ):
        assert oracle.verify("fly", x, p, q, u, 0, fly_window=2)[1] == accepted
    assert oracle.verify("fly", [0], p[:2], q[:1], [no], 0, fly_entropy_threshold=0.0)[1] == 0
