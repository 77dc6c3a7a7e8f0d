"""The gate before the clock: a result is compared with the oracle, or it is not timed.

Every request of a workload's first batch is compared with the torch engine on the same rows; some of them, and every
one that differs, with the oracle. Rules of third parties, which the oracle does not know, are evaluated by
`acceptlib.exact` in its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from acceptlib.benchmarks.workloads import Batch
from acceptlib.engine import decide
from acceptlib.errors import AcceptlibError
from acceptlib.exact import oracle
from acceptlib.exact.enumeration import acceptance, plan_of
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng
from acceptlib.strategy import AcceptanceStrategy

NUM_SAMPLES: Final = 3
"""Requests that are compared with the oracle even where both engines agree."""

ROUNDING: Final = 1e-5
"""How close to the edge of a decision another one is no mistake, because `exp` and sums may round differently."""


class MismatchError(AcceptlibError):
    """A result that is not timed, because it is wrong."""


def check(strategy: AcceptanceStrategy, batch: Batch) -> bool | None:
    """Verify a batch once and compare the result.

    Returns:
        True; None for a strategy that overrides `verify` whole, of which nothing is known but its result's form.

    Raises:
        MismatchError: The result is wrong; the message names the request.
    """
    rng = Rng(seeds=batch.rng.seeds, offsets=batch.rng.offsets.clone())
    uniforms = rng.uniforms(batch.workload.num_draft_tokens)
    arguments = batch.arguments(strategy)
    result = strategy.verify(batch.draft_token_ids, **arguments, rng=rng)
    result.raise_for_status()
    form(batch, result.output_token_ids, result.num_accepted)
    if strategy.plan is None:
        return None
    expected = strategy.with_backend("torch").verify(
        batch.draft_token_ids, **arguments, rng=replace(rng, offsets=rng.offsets - 1)
    )
    same = (result.output_token_ids == expected.output_token_ids).all(1)
    samples = torch.linspace(0, len(same) - 1, min(NUM_SAMPLES, len(same))).long().tolist()
    for request in sorted({*samples, *(~same).nonzero()[:, 0].tolist()}):
        _check_request(strategy, batch, request, result, uniforms.accept[request].tolist(), int(uniforms.emit[request]))
    return True


def form(batch: Batch, tokens: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Check what holds for any rule and any library: the drafted prefix, then one token of the vocabulary.

    Args:
        batch: The workload.
        tokens: [B, K+1] integers; what comes after the emitted tokens is not looked at.
        num_accepted: [B] integers.

    Raises:
        MismatchError: It does not hold.
    """
    stops = num_accepted.long()[:, None]
    position = torch.arange(batch.workload.num_draft_tokens, device=tokens.device)
    prefix = (tokens[:, :-1] == batch.draft_token_ids) | (position >= stops)
    counted = ((stops >= 0) & (stops < tokens.shape[1]))[:, 0]
    last = tokens.gather(1, stops.clamp(0, tokens.shape[1] - 1))[:, 0]
    right = counted & prefix.all(1) & (last >= 0) & (last < batch.workload.vocab_size)
    if not bool(right.all()):
        request = int((~right).nonzero()[0, 0])
        msg = (
            f"request {request}: expected {int(stops[request])} drafted tokens of "
            f"{batch.draft_token_ids[request].tolist()} and one of the vocabulary, got {tokens[request].tolist()}"
        )
        raise MismatchError(msg)


def _check_request(
    strategy: AcceptanceStrategy, batch: Batch, request: int, result: VerifyResult, u: list[float], bits: int
) -> None:
    x = batch.draft_token_ids[request].tolist()
    p, q = batch.probabilities(request)
    tau = int(result.num_accepted[request])
    tokens = result.output_token_ids[request, : tau + 1].tolist()
    known = strategy.name in oracle.RULES and type(strategy).__module__.startswith("acceptlib.strategies.")
    options: dict[str, Any] = strategy.options.model_dump()
    chain = oracle.build(strategy.name, x, p, q, **options) if known else _chain(strategy, x, p, q)
    expected = chain.stop([u_i < h_i for u_i, h_i in zip(u, chain.h, strict=True)])
    weights = chain.bonus if tau == len(x) else chain.recovered(tau)
    if tau == expected and oracle.draw(weights, p[tau], bits) == tokens[-1]:
        return
    # From the same probabilities, built-in strategies must give the oracle's token, to the bit.
    if (not known or batch.workload.kind != "probs") and _is_rounding(chain, u, tau, weights, p[tau], tokens[-1], bits):
        return
    msg = f"request {request}: expected {expected} accepted tokens of {x}, and the oracle's draw, got {tokens}"
    raise MismatchError(msg)


def _is_rounding(  # noqa: PLR0913, PLR0917 - one request, number by number
    chain: oracle.Chain, u: list[float], tau: int, weights: torch.Tensor, p: torch.Tensor, token: int, bits: int
) -> bool:
    """Return whether every difference lies at the edge of a decision."""
    ways = [(True, False) if abs(u_i - h_i) < ROUNDING else (u_i < h_i,) for u_i, h_i in zip(u, chain.h, strict=True)]
    if tau not in {chain.stop(accepted) for accepted in itertools.product(*ways)}:
        return False
    counts = oracle.integers(weights)
    counts = counts if sum(counts) else oracle.integers(p)
    low, high = sum(counts[:token]) / sum(counts), sum(counts[: token + 1]) / sum(counts)
    return counts[token] > 0 and low - ROUNDING <= (bits % 2**64) / 2**64 <= high + ROUNDING


def _chain(strategy: AcceptanceStrategy, x: list[int], p: torch.Tensor, q: torch.Tensor | None) -> oracle.Chain:
    """Return the chain of any strategy given by rules, from their exact evaluation."""
    plan, ids, length = plan_of(strategy), torch.tensor([x]), len(x)
    rows = p.double()[None], oracle.draft_rows(x, p, q).double()[None]
    rules = acceptance(plan, ids, *rows, strategy.initial_state(1, "cpu"))
    weights = rules.weights.expand(1, length, -1)[0]

    def stop(accepted: Sequence[bool]) -> int:
        pattern = torch.tensor([list(accepted)])
        return int(decide.stop_position(plan, pattern, rules.may_stand, torch.tensor([length])))

    def drawn(row: torch.Tensor, how: str) -> torch.Tensor:
        return oracle.one_hot(row.float()) if how == "argmax" else row.float()

    return oracle.Chain(
        rules.h[0].tolist(),
        stop,
        lambda tau: drawn(weights[tau], plan.traits.recovered),
        drawn(p[-1], plan.traits.bonus),
    )
