"""A toy world for statistics: Markov models, many independent sequences at once, exact joint laws, chi-square."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.nn import functional

from acceptlib import exact
from acceptlib.engine.draw import draw
from acceptlib.rng import Rng
from acceptlib.testing.subject import Subject

FALSE_ALARM_Z: Final = 6.0
"""One-sided normal quantile of about 1e-9."""

MIN_EXPECTED: Final = 10.0
"""Cells expected less often are merged."""


@dataclass(frozen=True)
class World:
    """Target and draft whose next row depends on the last token alone.

    Attributes:
        target_logits: [V+1, V]; row V is the start.
        draft_logits: [V+1, V].
    """

    target_logits: torch.Tensor
    draft_logits: torch.Tensor

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target_logits.shape[1]

    def target(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """Return the target's row after `prefix`, [V] float64."""
        return torch.softmax(self.target_logits[prefix[-1] if prefix else -1].double(), -1)

    def joint(self, length: int) -> torch.Tensor:
        """Return the target's law of the first tokens, [V] * length."""
        return exact.complete({(): 1.0}, self.target, length)


def world(seed: int) -> World:
    """Return a world of four tokens and random rows, whose residuals are supported on several tokens."""
    rows = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(seed)) * 1.5
    return World(rows[0], rows[1])


def adversarial(base: World) -> World:
    """Return the world whose draft prefers what the target avoids."""
    return replace(base, draft_logits=-base.target_logits)


@dataclass(frozen=True)
class Drafting:
    """How drafted tokens are made and what is declared about them.

    Attributes:
        temperature: Drafted under this temperature.
        greedy: Drafted tokens are the draft's argmax.
        declare: `rows` passes the rows they were drawn from, `raw` the rows at temperature 1, `softmax` the rows
            although the tokens are their argmax, `none` no rows at all.
        dtype: Of the rows that tokens are drawn from, and of those passed.
    """

    temperature: float = 1.0
    greedy: bool = False
    declare: str = "rows"
    dtype: torch.dtype = torch.float32


def simulate(  # noqa: PLR0913 - each is named
    subject: Subject,
    where: World,
    *,
    length: int,
    num_draft_tokens: int,
    trials: int,
    drafting: Drafting,
    form: str = "probs",
) -> torch.Tensor:
    """Generate with speculative decoding until every sequence has `length` tokens; return them, [trials, length].

    Args:
        subject: Strategy and device.
        where: The models.
        length: Tokens a sequence.
        num_draft_tokens: K of every step.
        trials: Sequences, all of them in one batch.
        drafting: How drafted tokens are made, from the request's own stream as `Rng.draft_bits` gives it.
        form: What rows are given as: `probs` or `logits`.
    """
    vocab_size, device = where.vocab_size, subject.device
    seeds = torch.arange(trials, device=device) * 7919
    rng = Rng(seeds=seeds, offsets=torch.zeros_like(seeds))
    further = subject.further_of_new(trials)
    q_rows = torch.softmax(where.draft_logits / drafting.temperature, -1).to(drafting.dtype)
    one_hot = functional.one_hot(where.draft_logits.argmax(-1), vocab_size).float()
    drawn_from = (one_hot if drafting.greedy else q_rows).to(device)
    declared = {
        "rows": drawn_from.to(drafting.dtype),
        "raw": torch.softmax(where.draft_logits, -1).to(device),
        "softmax": q_rows.to(device),
        "none": None,
    }[drafting.declare]
    target = torch.softmax(where.target_logits, -1).to(device)
    if form == "logits":
        target, declared = target.log(), None if declared is None else declared.log()
    last = torch.full((trials,), vocab_size, device=device)
    tokens = torch.full((trials, length + num_draft_tokens + 1), -1, device=device)
    done = torch.zeros(trials, dtype=torch.int64, device=device)
    while int(done.min()) < length:
        contexts = [last]
        for position in range(num_draft_tokens):
            contexts.append(draw(drawn_from[contexts[-1]].float(), rng.draft_bits(position)))
        context = torch.stack(contexts, 1)
        rows: dict[str, Any] = {f"target_{form}": target[context]}
        if declared is not None:
            rows[f"draft_{form}"] = declared[context[:, :-1]]
        result = subject.strategy.verify(context[:, 1:], **rows, rng=rng, **further)
        result.raise_for_status()
        if "state" in further:
            subject.strategy.update_state(further["state"], result)
        emitted = result.output_token_ids.long()
        column = done[:, None] + torch.arange(num_draft_tokens + 1, device=device)
        fits = (emitted >= 0) & (column < tokens.shape[1])
        row = torch.arange(trials, device=device)[:, None].expand_as(column)
        tokens[row[fits], column[fits]] = emitted[fits]
        done += result.num_emitted
        last = emitted.gather(1, result.num_accepted[:, None].long())[:, 0]
        done.clamp_(max=length + num_draft_tokens)
    return tokens[:, :length].cpu()


def counts(sequences: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return how often each sequence [n, L] occurred, [V] * L."""
    length = sequences.shape[1]
    weights = vocab_size ** torch.arange(length - 1, -1, -1)
    return torch.bincount((sequences * weights).sum(1), minlength=vocab_size**length).view((vocab_size,) * length)


def chi_square_z(observed: torch.Tensor, law: torch.Tensor) -> float:
    """Return how many standard deviations chi-square lies above its mean under `law` (Wilson and Hilferty 1931).

    Cells expected fewer than ten times are merged, and left out if the merged cell is too. Infinite where something
    impossible was observed.
    """
    observed, law = observed.flatten().double(), law.flatten().double()
    if bool((observed[law <= 0] > 0).any()):
        return math.inf
    expected = law * observed.sum()
    small = expected < MIN_EXPECTED
    cells = torch.cat((observed[~small], observed[small].sum()[None]))
    means = torch.cat((expected[~small], expected[small].sum()[None]))
    kept = means >= MIN_EXPECTED
    statistic = float(((cells - means) ** 2 / means)[kept].sum())
    freedom = int(kept.sum()) - 1
    if freedom < 1:
        return 0.0
    spread = 2 / (9 * freedom)
    root: float = (statistic / freedom) ** (1 / 3)
    return (root - (1 - spread)) / math.sqrt(spread)
