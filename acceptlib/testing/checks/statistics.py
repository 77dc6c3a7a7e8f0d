"""What only many trials can show: noise that is shared, reused or of the wrong law."""

from __future__ import annotations

from typing import Final

import torch

from acceptlib.rng import Rng
from acceptlib.testing.simulation import (
    FALSE_ALARM_Z,
    Drafting,
    World,
    adversarial,
    chi_square_z,
    counts,
    simulate,
    world,
)
from acceptlib.testing.subject import Skipped, Subject, require

BATCH: Final = 60_000
"""Requests of one call; a grid holds 65535."""

WORLDS: Final[dict[str, World]] = {
    "random": world(1),
    "adversarial": adversarial(world(3)),
    "close": World(world(4).target_logits, world(4).target_logits + 0.3 * world(5).target_logits),
}
"""Residuals on several tokens: with one, shared noise cannot be seen. `adversarial`: the draft prefers what the target
avoids, and most tokens are recovered; `close`: most are accepted."""

DRAFTINGS: Final[dict[str, Drafting]] = {
    "sampled": Drafting(),
    "greedy without rows": Drafting(greedy=True, declare="none"),
}


def _check_speed(subject: Subject) -> None:
    if subject.interpreted:
        msg = "TRITON_INTERPRET=1 runs one request at a time; backends_agree compares its tokens with torch's"
        raise Skipped(msg)


def check_emitted_law(subject: Subject) -> None:
    """Frequencies of emitted sequences, jointly and position by position, are those of the exact law of the rules.

    Catches one number used for acceptance and for the draw (vllm-ascend#16370), draws that the rows' order or the
    batch's size changes, and an engine that does not run the rule that was proven.
    """
    subject.require_rules()
    _check_speed(subject)
    length = 3
    for name, where in WORLDS.items():
        vocab_size = where.vocab_size
        p = torch.softmax(where.target_logits[: length + 1], -1)
        q = torch.softmax(where.draft_logits[:length], -1)
        source = torch.Generator().manual_seed(11)
        found = []
        for batch in range(2):
            ids = torch.stack([torch.multinomial(row, BATCH, replacement=True, generator=source) for row in q], 1)
            rng = Rng(seeds=torch.arange(BATCH) * 7919 + batch, offsets=torch.full((BATCH,), batch))
            result = subject.strategy.verify(
                **subject.place(
                    {
                        "draft_token_ids": ids,
                        "target_probs": p.expand(BATCH, -1, -1),
                        "draft_probs": q.expand(BATCH, -1, -1),
                        "rng": rng,
                    }
                ),
                **subject.further([0] * BATCH),
            )
            result.raise_for_status()
            found.append(result.output_token_ids.cpu().long())
        # Placeholders are one more token, so that sequences of every length share one table.
        emitted = torch.cat(found)
        emitted = torch.where(emitted < 0, vocab_size, emitted)
        law = torch.zeros((vocab_size + 1,) * (length + 1), dtype=torch.float64)
        for sequence, probability in subject.law(p, q).items():
            law[(*sequence, *[vocab_size] * (length + 1 - len(sequence)))] = probability
        _expect_law(emitted, law, f"rows {name!r}, whole sequences")
        for position in range(length + 1):
            others = [axis for axis in range(length + 1) if axis != position]
            marginal = law.sum(others)[:vocab_size]
            reached = emitted[:, position : position + 1]
            reached = reached[reached[:, 0] < vocab_size]
            if len(reached):
                _expect_law(reached, marginal / marginal.sum(), f"rows {name!r}, token {position} where it is reached")


def check_lossless_over_two_steps(subject: Subject) -> None:
    """Lossless: four tokens or five, of one step or several, have the target's joint law, whatever was drafted.

    Catches noise shared with the draft (vllm#47386, #54282), uniforms past the stop that the next step uses again (TV
    0.019 for block, seen in no single step), and every rule that `lossless_law` cannot look into.
    """
    _check_speed(subject)
    cases = [(name, how, 2, "probs") for name in WORLDS for how in DRAFTINGS]
    # Of four drafted tokens, all stand often enough to see the bonus token where models are close.
    cases += [("close", "sampled", 4, "probs"), ("random", "greedy without rows", 2, "logits")]
    for name, how, most, form in cases:
        where, drafting = WORLDS[name], DRAFTINGS[how]
        length = max(most + 1, 4)  # the bonus token too
        emitted = simulate(
            subject, where, length=length, num_draft_tokens=most, trials=BATCH, drafting=drafting, form=form
        )
        _expect_law(emitted, where.joint(length), f"rows {name!r} as {form}, {most} drafted tokens {how}")


def _expect_law(sequences: torch.Tensor, law: torch.Tensor, where: str) -> None:
    z = chi_square_z(counts(sequences, law.shape[0]), law)
    require(
        z < FALSE_ALARM_Z, f"{where}: chi-square of {len(sequences)} trials is {z:.1f} standard deviations too large"
    )
