"""A toy world for statistical tests: Markov models, many independent sequences at once, exact joint laws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

import acceptlib
from acceptlib.engine.draw import draw

FALSE_ALARM_Z = 6.0  # one-sided normal quantile of about 1e-9
LEAST_EXPECTED = 10.0


@dataclass(frozen=True)
class World:
    """Target and draft whose next row depends on the last token alone.

    Attributes:
        target_logits: [V+1, V]; row V is the start.
        draft_logits: [V+1, V].
        temperature: Of both, as sampling parameters.
    """

    target_logits: torch.Tensor
    draft_logits: torch.Tensor
    temperature: float = 1.0

    @property
    def vocab_size(self) -> int:
        return self.target_logits.shape[1]

    def target(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.softmax(self.target_logits[prefix[-1] if prefix else -1].double() / self.temperature, -1)

    def draft(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.softmax(self.draft_logits[prefix[-1] if prefix else -1].double() / self.temperature, -1)

    def joint(self, length: int) -> torch.Tensor:
        """Return the target's law of the first tokens, [V] * length."""
        law = torch.zeros((self.vocab_size,) * length, dtype=torch.float64)
        for sequence in itertools.product(range(self.vocab_size), repeat=length):
            law[sequence] = math.prod(float(self.target(sequence[:i])[sequence[i]]) for i in range(length))
        return law


def world(seed: int, vocab_size: int = 4, sharpness: float = 1.5) -> World:
    """Return a world of random rows whose residuals are supported on several tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, vocab_size + 1, vocab_size, generator=generator) * sharpness
    return World(rows[0], rows[1])


def adversarial(base: World) -> World:
    """Return the world whose draft prefers what the target avoids."""
    return replace(base, draft_logits=-base.target_logits)


@dataclass(frozen=True)
class Drafting:
    """How drafted tokens are made and what is declared about them.

    Attributes:
        temperature: Drafted under this temperature; None for the world's.
        greedy: Drafted tokens are the draft's argmax.
        declare: `rows` passes the rows they were drawn from, `raw` the rows at temperature 1, `softmax` the rows
            although the tokens are their argmax, `none` no rows at all.
        dtype: Of the rows that tokens are drawn from.
        declared_dtype: Of the rows passed.
    """

    temperature: float | None = None
    greedy: bool = False
    declare: str = "rows"
    dtype: torch.dtype = torch.float32
    declared_dtype: torch.dtype | None = None


HONEST = Drafting()


def simulate(
    strategy: acceptlib.AcceptanceStrategy,
    where: World,
    *,
    length: int,
    num_draft_tokens: int,
    trials: int,
    drafting: Drafting = HONEST,
    reuse_offsets: bool = False,
    seed: int = 0,
) -> torch.Tensor:
    """Generate with speculative decoding until every sequence has `length` tokens; return them, [trials, length]."""
    vocab_size = where.vocab_size
    rng = acceptlib.Rng(
        seeds=torch.arange(trials) * 7919 + seed * 1_000_003, offsets=torch.zeros(trials, dtype=torch.int64)
    )
    temperature = where.temperature if drafting.temperature is None else drafting.temperature
    q_rows = torch.softmax(where.draft_logits / temperature, -1).to(drafting.dtype)
    one_hot = torch.nn.functional.one_hot(where.draft_logits.argmax(-1), vocab_size).float()
    drawn_from = one_hot if drafting.greedy else q_rows
    declared = {
        "rows": drawn_from.to(drafting.declared_dtype or drafting.dtype),
        "raw": torch.softmax(where.draft_logits, -1),
        "softmax": q_rows,
        "none": None,
    }[drafting.declare]
    target_probs = torch.softmax(where.target_logits / where.temperature, -1)
    last = torch.full((trials,), vocab_size)
    tokens = torch.full((trials, length + num_draft_tokens + 1), -1)
    done = torch.zeros(trials, dtype=torch.int64)
    while int(done.min()) < length:
        contexts = [last]
        for position in range(num_draft_tokens):
            contexts.append(draw(drawn_from[contexts[-1]].float(), rng.draft_bits(position)))
        context = torch.stack(contexts, 1)
        before = rng.offsets.clone()
        result = strategy.verify(
            context[:, 1:],
            target_probs=target_probs[context],
            draft_probs=None if declared is None else declared[context[:, :-1]],
            rng=rng,
        )
        result.raise_for_status()
        if reuse_offsets:
            rng.offsets.copy_(before)
        emitted = result.output_token_ids.long()
        column = done[:, None] + torch.arange(num_draft_tokens + 1)
        fits = (emitted >= 0) & (column < tokens.shape[1])
        row = torch.arange(trials)[:, None].expand_as(column)
        tokens[row[fits], column[fits]] = emitted[fits]
        done += result.num_emitted
        last = emitted.gather(1, result.num_accepted[:, None].long())[:, 0]
        done.clamp_(max=length + num_draft_tokens)
    return tokens[:, :length]


def counts(sequences: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return how often each sequence [n, L] occurred, [V] * L."""
    length = sequences.shape[1]
    weights = vocab_size ** torch.arange(length - 1, -1, -1)
    return torch.bincount((sequences * weights).sum(1), minlength=vocab_size**length).view((vocab_size,) * length)


def chi_square_z(observed: torch.Tensor, law: torch.Tensor) -> float:
    """Return how many standard deviations chi-square lies above its mean under `law` (Wilson and Hilferty 1931).

    Cells expected fewer than ten times are merged. Infinite where something impossible was observed.
    """
    observed, law = observed.flatten().double(), law.flatten().double()
    if bool((observed[law <= 0] > 0).any()):
        return math.inf
    expected = law * observed.sum()
    small = expected < LEAST_EXPECTED
    cells = torch.cat((observed[~small], observed[small].sum()[None]))
    means = torch.cat((expected[~small], expected[small].sum()[None]))
    kept = means >= LEAST_EXPECTED
    statistic = float(((cells - means) ** 2 / means)[kept].sum())
    freedom = int(kept.sum()) - 1
    if freedom < 1:
        return 0.0
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def emitted_z(output_token_ids: torch.Tensor, law: Mapping[tuple[int, ...], float], vocab_size: int) -> float:
    """Return `chi_square_z` of whole emitted sequences [n, K+1], padded with -1, under their law."""
    # Placeholders are one more token, so that sequences of every length share one table.
    tokens = torch.where(output_token_ids < 0, vocab_size, output_token_ids.long())
    length = tokens.shape[1]
    table = torch.zeros((vocab_size + 1,) * length, dtype=torch.float64)
    for sequence, probability in law.items():
        table[(*sequence, *[vocab_size] * (length - len(sequence)))] = probability
    return chi_square_z(counts(tokens, vocab_size + 1), table)
