"""Strategies measured on the same prompts, drafts' seeds and lengths: a comparison as data."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from acceptlib import exact, registry
from acceptlib.cli import models
from acceptlib.engine.process import law
from acceptlib.errors import one_line
from acceptlib.exact.enumeration import plan_of
from acceptlib.metrics import AcceptanceMetrics
from acceptlib.sampling import SamplingParams

if TYPE_CHECKING:
    from acceptlib.demo.pair import ModelPair
    from acceptlib.integrations.transformers import Step
    from acceptlib.strategy import AcceptanceStrategy

LONGEST_EXACT: Final = 16
"""Drafts beyond this length get no exact figures: those take 2^K acceptance patterns a step."""

SEEDS_PER_RUN: Final = 1_000_003
"""Distance between the seeds of two runs, so that no prompt of one shares a stream with the next run's."""

WARM_UP_TOKENS: Final = 8

SUSPICIOUS: Final = 4.0
"""Standard errors between measured and expected tau from which something is wrong, and not chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every row of a comparison has in common."""

    prompts: Sequence[str]
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of both models."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True, slots=True)
class Case:
    """One strategy to measure; `make` may fail, as third parties' code may."""

    name: str
    guarantee: str
    make: Callable[[], AcceptanceStrategy]


@dataclass(slots=True, kw_only=True)
class Row:
    """One strategy at one draft length. Figures that do not exist are None.

    Attributes:
        strategy: Its name, with the options of its config where others have that name too.
        num_draft_tokens: K.
        guarantee: What it promises.
        mean_acceptance_length: Tau, emitted tokens a step.
        standard_error: Standard error of tau. Steps of one sequence depend on each other, so it is the ratio
            estimator's over prompts: each prompt is one cluster.
        expected_acceptance_length: Tau's expectation over the same drafted tokens and rows, from the exact law.
        deviation: Measured less expected tau in standard errors of their difference.
        draft_acceptance_rate: Accepted share of drafted tokens.
        tv: Mean total variation between the strategy's law of a visited row and the target's; see
            `acceptlib.exact.step_figures`.
        kl: Mean KL(out || target) of the same laws in nats.
        looks_ahead: Whether later rows have a say, so that `tv` and `kl` are of truncated rows.
        tokens_per_second: Emitted tokens over the time that drafting, the target and verification took.
        verify_microseconds: Median time of one `verify` call.
        acceptance_by_position: Share of the steps in which each drafted position stood.
        num_steps: Steps behind the figures: those that drafted K tokens.
        num_prompts: Number of prompts.
        max_new_tokens: Most tokens generated after each prompt.
        temperature, top_k, top_p, min_p: Sampling parameters of both models.
        seed: Seed of the run.
        options: The strategy's options.
        error: Why there are no figures.
    """

    strategy: str
    num_draft_tokens: int
    guarantee: str
    mean_acceptance_length: float | None = None
    standard_error: float | None = None
    expected_acceptance_length: float | None = None
    deviation: float | None = None
    draft_acceptance_rate: float | None = None
    tv: float | None = None
    kl: float | None = None
    looks_ahead: bool = False
    tokens_per_second: float | None = None
    verify_microseconds: float | None = None
    acceptance_by_position: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_prompts: int = 0
    max_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the row as a mapping."""
        return asdict(self)


@dataclass(slots=True)
class _Tally:
    """What the steps of one row add up to."""

    metrics: AcceptanceMetrics = field(default_factory=AcceptanceMetrics)
    per_prompt: list[tuple[int, int]] = field(default_factory=list)  # steps, emitted tokens
    expected: float = 0.0
    squared_difference: float = 0.0
    tv: float = 0.0
    kl: float = 0.0
    visited: int = 0
    seconds: float = 0.0
    tokens: int = 0
    verify_seconds: list[float] = field(default_factory=list)


def warm_up(pair: ModelPair, num_draft_tokens: int, settings: Settings) -> None:
    """Generate a few tokens, so that no row pays for first calls."""
    strategy = registry.create("rejection")
    ids = models.encode(pair, settings.prompts[0])
    for _ in models.steps(
        pair, strategy, ids, num_draft_tokens=num_draft_tokens,
        max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens), sampling=settings.sampling, seed=settings.seed,
    ):  # fmt: skip
        pass


def measure(pair: ModelPair, case: Case, num_draft_tokens: int, settings: Settings, advance: Callable[[], None]) -> Row:
    """Return the row of one strategy at one draft length.

    A strategy that raises gets a row that says so: it must not cost the others theirs.

    Args:
        pair: The models.
        case: The strategy.
        num_draft_tokens: K.
        settings: The rest. Prompt i has the same seed in every row, so rows are paired.
        advance: Called after each prompt.
    """
    row = Row(
        strategy=case.name,
        num_draft_tokens=num_draft_tokens,
        guarantee=case.guarantee,
        num_prompts=len(settings.prompts),
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        seed=settings.seed,
    )
    tally = _Tally()
    try:
        strategy = case.make()
        row.options = strategy.options.model_dump(mode="json")
        row.guarantee = strategy.resolve_traits().guarantee
        has_law = strategy.plan is not None and num_draft_tokens <= LONGEST_EXACT
        row.looks_ahead = has_law and plan_of(strategy).looks_ahead
        for index, prompt in enumerate(settings.prompts):
            steps = models.steps(
                pair,
                strategy,
                models.encode(pair, prompt),
                num_draft_tokens=num_draft_tokens,
                max_new_tokens=settings.max_new_tokens,
                sampling=settings.sampling,
                seed=settings.seed * SEEDS_PER_RUN + index,
            )
            _add_prompt(tally, steps, num_draft_tokens, settings.sampling, strategy if has_law else None)
            advance()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a third party's rule may raise anything; the row says so
        row.error = one_line(error)
        return row
    _fill(row, tally, has_law=has_law)
    return row


def _add_prompt(
    tally: _Tally,
    steps: Iterator[Step],
    num_draft_tokens: int,
    sampling: SamplingParams,
    strategy: AcceptanceStrategy | None,
) -> None:
    before = (tally.metrics.num_steps, tally.metrics.num_emitted_tokens)
    while True:
        start = time.perf_counter()
        step = next(steps, None)
        tally.seconds += time.perf_counter() - start  # exact figures are no part of it
        if step is None:
            break
        tally.tokens += len(step.token_ids)
        # The last step of a sequence may draft less, for want of room: another K, another tau.
        if step.num_draft_tokens != num_draft_tokens:
            continue
        tally.verify_seconds.append(step.verify_seconds)
        tally.metrics.update(step.result, torch.tensor([num_draft_tokens]))
        if strategy is not None:
            _add_exact(tally, step, sampling, strategy)
    tally.per_prompt.append((tally.metrics.num_steps - before[0], tally.metrics.num_emitted_tokens - before[1]))


def _add_exact(tally: _Tally, step: Step, sampling: SamplingParams, strategy: AcceptanceStrategy) -> None:
    emitted = int(step.result.num_emitted)
    figures = exact.step_figures(
        strategy,
        step.draft_token_ids.cpu(),
        law(step.target_logits.cpu()[None], sampling)[0],
        step.draft_probs.cpu(),
        emitted,
        {name: value.cpu() for name, value in step.state.items()},
    )
    tally.expected += figures.expected_tokens
    tally.squared_difference += (emitted - figures.expected_tokens) ** 2
    # A step's figures are means over the rows that it visits, or of its first token alone.
    num_rows = 1 if plan_of(strategy).looks_ahead else emitted
    tally.tv += figures.tv * num_rows
    tally.kl += figures.kl * num_rows
    tally.visited += num_rows


def _fill(row: Row, tally: _Tally, *, has_law: bool) -> None:
    metrics = tally.metrics
    row.num_steps = metrics.num_steps
    if not metrics.num_steps:
        row.error = f"no step drafted {row.num_draft_tokens} tokens; raise --max-new-tokens"
        return
    tau = row.mean_acceptance_length = metrics.mean_acceptance_length
    row.standard_error = clustered_error(tally.per_prompt)
    row.draft_acceptance_rate = metrics.draft_acceptance_rate
    row.acceptance_by_position = metrics.acceptance_by_position
    row.tokens_per_second = tally.tokens / tally.seconds
    row.verify_microseconds = statistics.median(tally.verify_seconds) * 1e6
    if has_law:
        row.expected_acceptance_length = tally.expected / metrics.num_steps
        row.tv = max(tally.tv / tally.visited, 0.0)
        row.kl = max(tally.kl / tally.visited, 0.0)
        # Given its rows and its draft, a step's surprise has mean 0 whatever came before: surprises of different steps
        # are uncorrelated, and their squares add up to the variance of the sum.
        error = math.sqrt(tally.squared_difference) / metrics.num_steps
        difference = tau - row.expected_acceptance_length
        row.deviation = difference / error if error > 1e-9 else 0.0  # noqa: PLR2004 - nothing is random


def clustered_error(per_prompt: Sequence[tuple[int, int]]) -> float | None:
    """Return the standard error of sum(emitted) / sum(steps), taking prompts, not steps, as independent."""
    clusters = len(per_prompt)
    if clusters < 2:  # noqa: PLR2004 - no variance from one prompt
        return None
    num_steps = sum(steps for steps, _ in per_prompt)
    ratio = sum(emitted for _, emitted in per_prompt) / num_steps
    squares = sum((emitted - ratio * steps) ** 2 for steps, emitted in per_prompt)
    return math.sqrt(squares * clusters / (clusters - 1)) / num_steps
