"""Chi-square of what the torch engine emits, joint over tokens and across consecutive steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mutants import MUTANTS
from simulation import (
    FALSE_ALARM_Z,
    HONEST,
    Drafting,
    World,
    adversarial,
    chi_square_z,
    counts,
    emitted_z,
    simulate,
    world,
)

import acceptlib
from acceptlib import exact

TRIALS = 60_000
# Long enough that with K = 2 every sequence takes at least two steps.
LENGTH = 4
LOSSLESS = [name for name in acceptlib.available() if acceptlib.create(name).traits.guarantee == "lossless"]

WORLDS = {
    "random": world(1),
    "sharp": world(2, sharpness=4.0),
    "adversarial": adversarial(world(3)),
    "close": World(world(4).target_logits, world(4).target_logits + 0.3 * world(5).target_logits),
    "hot": replace(world(6), temperature=0.6),
}

CONTRACTS = {
    "sampled": HONEST,
    "sampled-colder-draft": Drafting(temperature=0.5),
    "greedy-one-hot": Drafting(greedy=True),
    "greedy-without-rows": Drafting(greedy=True, declare="none"),
    "sampled-without-rows": Drafting(declare="none"),
    "bfloat16-rows": Drafting(dtype=torch.bfloat16),
}

VIOLATIONS = {
    "raw-instead-of-processed": Drafting(temperature=0.5, declare="raw"),
    "greedy-with-softmax": Drafting(greedy=True, declare="softmax"),
}


def z_score(strategy: acceptlib.AcceptanceStrategy, where: World, **options: object) -> float:
    tokens = simulate(strategy, where, length=LENGTH, num_draft_tokens=2, trials=TRIALS, **options)  # type: ignore[arg-type]
    return chi_square_z(counts(tokens, where.vocab_size), where.joint(LENGTH))


@pytest.mark.parametrize("where", WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_over_two_steps(name: str, where: World) -> None:
    """Joint law of four tokens, which take two steps or more: shared or reused noise would show."""
    assert z_score(acceptlib.create(name), where) < FALSE_ALARM_Z


@pytest.mark.parametrize("drafting", CONTRACTS.values(), ids=CONTRACTS.keys())
@pytest.mark.parametrize("name", LOSSLESS)
def test_every_honest_draft_is_lossless(name: str, drafting: Drafting) -> None:
    """Whatever way the drafted tokens were made, as long as the declared rows are those they came from."""
    assert z_score(acceptlib.create(name), WORLDS["random"], drafting=drafting) < FALSE_ALARM_Z


@pytest.mark.parametrize("drafting", VIOLATIONS.values(), ids=VIOLATIONS.keys())
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_broken_q_contract_is_seen(name: str, drafting: Drafting) -> None:
    """transformers#47932 and #32867: rows declared that the tokens did not come from."""
    assert z_score(acceptlib.create(name), WORLDS["random"], drafting=drafting) > FALSE_ALARM_Z


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_every_mutant_fails(mutant) -> None:  # noqa: ANN001
    with mutant.patch:
        scores = [
            z_score(mutant.strategy(), where, reuse_offsets=mutant.reuse_offsets)
            for where in (WORLDS["random"], WORLDS["adversarial"])
        ]
    assert max(scores) > FALSE_ALARM_Z


@pytest.mark.parametrize("name", acceptlib.available())
def test_emitted_tokens_follow_the_exact_law(name: str) -> None:
    """The engine's frequencies of whole emitted sequences, of any length, against enumeration: lossy rules too."""
    strategy, where, length = acceptlib.create(name), world(7), 3
    generator = torch.Generator().manual_seed(11)
    q = torch.softmax(where.draft_logits[:length], -1)
    p = torch.softmax(where.target_logits[: length + 1], -1)
    ids = torch.stack([torch.multinomial(row, TRIALS, replacement=True, generator=generator) for row in q], 1)
    result = strategy.verify(
        ids,
        target_probs=p.expand(TRIALS, -1, -1),
        draft_probs=q.expand(TRIALS, -1, -1),
        rng=torch.Generator().manual_seed(12),
    )
    assert emitted_z(result.output_token_ids, exact.law(strategy, p, q), where.vocab_size) < FALSE_ALARM_Z
