"""The q contract: drafted tokens must come from the very rows that are declared for them.

Lossless rules are lossless under that condition only, and no rule can notice that it is broken. The check is a bet on a
list of other laws g, each a function of the declared row q. If the drafted tokens came from q, the product of
g(x) / q(x) over them has expectation 1, however rows depend on earlier tokens. So the mean of these products
exceeds 1 / FALSE_ALARM_RATE with probability at most FALSE_ALARM_RATE (Markov's inequality; an e-value, see Grünwald
et al., arXiv 1906.07801), for any number of tokens and without an approximation. If tokens came from one of the other
laws instead, or near it, its product grows exponentially with their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch

from acceptlib.engine.process import law
from acceptlib.errors import ConformanceError, InputError
from acceptlib.sampling import SamplingParams
from acceptlib.tensors import FLOAT_DTYPES, expect_tensor

FALSE_ALARM_RATE: Final = 1e-9
"""Probability, at most, with which honest drafts fail the check."""

POWERS: Final = (0.5, 0.7, 0.85, 1.2, 1.5, 2.0, 4.0)
KEPT: Final = (2, 5, 20, 50)
SHARES: Final = (0.8, 0.9, 0.95)
SURE: Final = 0.999
"""Weight of a law that excludes entries, when mixed with q: one exception must not lose the whole bet."""

CELLS: Final = 16
"""Cells of a row whose frequencies are learned: by rank, doubling in size, and by id, equal in size."""

CHUNK_ENTRIES: Final = 1 << 22


@torch.no_grad()
def check_draft_contract(
    draft_token_ids: torch.Tensor,
    *,
    draft_probs: torch.Tensor | None = None,
    draft_logits: torch.Tensor | None = None,
    sampling: SamplingParams | None = None,
) -> None:
    """Check that drafted tokens came from the rows that `verify` is told they came from.

    Catches rows declared before temperature or filters and tokens drawn after them (transformers#47932), greedy tokens
    declared with softmax rows (transformers#32867), tokens drawn in bfloat16 where that shows, sampled tokens declared
    as one-hot, and whatever else changes frequencies by rank or by id. Hundreds of tokens show most of it; rows rounded
    to bfloat16 change frequencies by less than a hundredth, and tens of millions would be needed.

    Args:
        draft_token_ids: Integers, in the shape of the rows' leading dimensions. Negative ids are passed over. With no
            rows each draft is declared one-hot, and the ids are [R, ...]: R times the same drafting, which must agree.
        draft_probs: [..., V], as passed to `verify`.
        draft_logits: [B, V] or [B, n, V], as passed to `verify`.
        sampling: Parameters of the draft's rows, where `draft_logits` are given.

    Raises:
        ConformanceError: The tokens did not come from these rows. Honest ones fail with a probability of at most
            `FALSE_ALARM_RATE`.
        InputError: The arguments do not fit together, or there is no token to test.
    """
    _check_arguments(draft_token_ids, draft_probs, draft_logits, sampling)
    if not (draft_token_ids >= 0).any():
        msg = "draft_token_ids: expected at least one id >= 0, since tokens are what is tested, got none"
        raise InputError(msg)
    rows = law(draft_logits, sampling) if draft_logits is not None else draft_probs
    if rows is None:
        if draft_token_ids.ndim == 0:
            msg = "draft_token_ids: expected [R, ...], R times the same drafting, got one token"
            raise InputError(msg)
        _check_repeats(draft_token_ids)
        return
    if rows.ndim == 0 or rows.shape[-1] == 0:
        msg = f"draft_probs: expected [..., V] with V >= 1, got {list(rows.shape)}"
        raise InputError(msg)
    if rows.shape[:-1] != draft_token_ids.shape:
        msg = f"draft_token_ids: expected {list(rows.shape[:-1])}, a token a row, got {list(draft_token_ids.shape)}"
        raise InputError(msg)
    ids, rows = draft_token_ids.reshape(-1), rows.reshape(-1, rows.shape[-1])
    ids, rows = ids[ids >= 0].to(torch.int64), rows[ids >= 0]
    bets = _Bets(rows.shape[1])
    step = max(1, CHUNK_ENTRIES // rows.shape[1])
    for start in range(0, len(ids), step):
        some = slice(start, start + step)
        bets.place(rows[some].to("cpu", torch.float64), ids[some].cpu())
    bets.settle()


def _check_arguments(
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    sampling: SamplingParams | None,
) -> None:
    for name, tensor in (
        ("draft_token_ids", draft_token_ids),
        ("draft_probs", draft_probs),
        ("draft_logits", draft_logits),
    ):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "draft_token_ids"):
            msg = f"{name}: expected a torch.Tensor, got {type(tensor).__name__}"
            raise InputError(msg)
    if draft_token_ids.is_floating_point() or draft_token_ids.dtype == torch.bool:
        msg = f"draft_token_ids: expected integers, got {draft_token_ids.dtype}"
        raise InputError(msg)
    if draft_logits is not None:
        expect_tensor("draft_logits", draft_logits, None, FLOAT_DTYPES, draft_logits.device)
        if draft_logits.ndim not in {2, 3} or draft_logits.shape[-1] == 0:
            msg = f"draft_logits: expected [B, V] or [B, n, V] with V >= 1, got {list(draft_logits.shape)}"
            raise InputError(msg)
    if not isinstance(sampling, SamplingParams | None):
        msg = f"sampling: expected an acceptlib.SamplingParams, got {type(sampling).__name__}"
        raise InputError(msg)
    if draft_probs is not None and draft_logits is not None:
        msg = "expected at most one of draft_probs and draft_logits, got both"
        raise InputError(msg)
    if sampling is not None and draft_logits is None:
        msg = "sampling acts on draft_logits, which were not given"
        raise InputError(msg)


def _check_repeats(draft_token_ids: torch.Tensor) -> None:
    if len(draft_token_ids) == 1:
        msg = f"draft_token_ids: expected at least 2 repeats of the same drafting, got {len(draft_token_ids)}"
        raise InputError(msg)
    differs = (draft_token_ids != draft_token_ids[:1]).any(0).reshape(-1)
    if differs.any():
        msg = (
            f"drafts without rows are declared one-hot, but {int(differs.sum())} of {len(differs)} positions differ "
            "between repeats of the same drafting: the tokens are sampled. Pass the rows that they are drawn from."
        )
        raise ConformanceError(msg)


class _Bets:
    """The logarithms of the products, by what each bets on."""

    def __init__(self, vocab_size: int) -> None:
        self.gains: dict[str, float] = {}
        self.num_tokens = 0
        self.seen = torch.zeros(2, CELLS, dtype=torch.float64)  # by rank, by id: how often a cell was drawn
        self.expected = torch.zeros(2, CELLS, dtype=torch.float64)
        self.cell_of_rank = torch.arange(1, vocab_size + 1).log2().to(torch.int64).clamp(max=CELLS - 1)
        self.cell_of_id = torch.arange(vocab_size) * CELLS // vocab_size

    def place(self, q: torch.Tensor, x: torch.Tensor) -> None:
        """Bet on tokens [n] of rows [n, V] float64, given what earlier tokens have shown."""
        if bool((q < 0).any()):
            msg = f"draft_probs: expected probabilities, got {float(q.min())}: pass logits as draft_logits"
            raise InputError(msg)
        if not bool(q.isfinite().all()):
            number = self.num_tokens + int((~q.isfinite().all(1)).nonzero()[0, 0])
            msg = f"the row of the token drafted as number {number}: expected probabilities, got NaN or infinity"
            raise InputError(msg)
        q = q / q.sum(1, keepdim=True)
        inside = x < q.shape[1]
        q_x = q.gather(1, x.where(inside, 0)[:, None])[:, 0] * inside
        impossible = ~(q_x > 0)
        if impossible.any():
            place = int(impossible.nonzero()[0, 0])
            msg = (
                f"token {int(x[place])}, drafted as number {self.num_tokens + place}, has no probability in its "
                "declared row: it came from another one. Declare the rows that tokens are drawn from."
            )
            raise ConformanceError(msg)
        self.num_tokens += len(x)
        for name, g_x in self._laws(q, x):
            self.gains[name] = self.gains.get(name, 0.0) + float((g_x / q_x).log().sum())

    def _laws(self, q: torch.Tensor, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is bet on, and g(x) [n]."""
        at = x[:, None]
        for power in POWERS:
            tempered = q**power
            yield _temperature(power), (tempered / tempered.sum(1, keepdim=True)).gather(1, at)[:, 0]
        ranked, order = q.sort(dim=1, descending=True, stable=True)
        rank = order.argsort(1).gather(1, at)[:, 0]
        mass = ranked.cumsum(1)
        q_x = q.gather(1, at)[:, 0]
        yield "greedy tokens, declared with softmax rows", (1 - SURE) * q_x + SURE * (rank == 0).to(torch.float64)
        for count in KEPT:
            kept = mass[:, min(count, q.shape[1]) - 1]
            yield f"tokens drawn after top-k {count}", q_x * (1 - SURE + SURE * ((rank < count) / kept))
        for share in SHARES:
            last = (mass < share).sum(1)
            kept = mass.gather(1, last[:, None])[:, 0]
            yield f"tokens drawn after top-p {share}", q_x * (1 - SURE + SURE * ((rank <= last) / kept))
        rounded = q.to(torch.bfloat16).to(torch.float64)
        yield "a draw from bfloat16 rows", (rounded / rounded.sum(1, keepdim=True)).gather(1, at)[:, 0]
        edges = q.cumsum(1).to(torch.bfloat16).to(torch.float64)
        cells = edges.diff(dim=1, prepend=torch.zeros_like(edges[:, :1])) / edges[:, -1:]
        yield "an inverse CDF in bfloat16", (1 - SURE) * q_x + SURE * cells.gather(1, at)[:, 0]
        yield "frequencies off by rank", q_x * self._learned(0, ranked, self.cell_of_rank, self.cell_of_rank[rank])
        yield "frequencies off by id", q_x * self._learned(1, q, self.cell_of_id, self.cell_of_id[x])

    def _learned(self, which: int, q: torch.Tensor, cells: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Return g(x) / q(x) [n], where g scales q's cells by how often the tokens before each one fell into them."""
        mass = torch.zeros(len(q), CELLS, dtype=torch.float64).index_add_(1, cells, q)
        hits = torch.nn.functional.one_hot(drawn, CELLS).to(torch.float64)
        seen, expected = self.seen[which] + hits.cumsum(0) - hits, self.expected[which] + mass.cumsum(0) - mass
        scale = (seen + 1) / (expected + 1)
        self.seen[which] += hits.sum(0)
        self.expected[which] += mass.sum(0)
        return scale.gather(1, drawn[:, None])[:, 0] / (scale * mass).sum(1)

    def settle(self) -> None:
        """Raise if the bets won more than honest tokens let them."""
        gains = torch.tensor(list(self.gains.values()), dtype=torch.float64)
        evidence = float(gains.logsumexp(0)) - math.log(len(gains))
        if evidence <= -math.log(FALSE_ALARM_RATE):
            return
        best = max(self.gains, key=lambda name: self.gains[name])
        rate = math.log10(FALSE_ALARM_RATE)
        msg = (
            f"{self.num_tokens} drafted tokens did not come from their declared rows: the odds are "
            f"1e{evidence / math.log(10):.0f} to 1, and honest ones reach 1e{-rate:.0f} with a probability of at most "
            f"1e{rate:.0f}. What fits them best: {best}. Declare the rows that tokens "
            "are drawn from."
        )
        raise ConformanceError(msg)


def _temperature(power: float) -> str:
    side = "lower" if power > 1 else "higher"
    return f"tokens drawn at a {side} temperature than their rows declare, by a factor of about {1 / power:.2g}"
