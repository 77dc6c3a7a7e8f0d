"""What a strategy promises, proven on the exact law of its rules: no sampling, no tolerance beyond rounding."""

from __future__ import annotations

import itertools
import reprlib
from collections import defaultdict
from collections.abc import Mapping
from numbers import Real
from typing import Final

import torch

from acceptlib import exact, registry
from acceptlib.engine import decide
from acceptlib.engine.constants import MASS_LIMIT, ROW_SUM_LIMIT
from acceptlib.engine.plan import Plan, evaluate
from acceptlib.errors import AcceptlibError, ConformanceError, OptionError, short_repr
from acceptlib.exact.enumeration import acceptance, row_scalars
from acceptlib.rng import Uniforms
from acceptlib.testing.batches import ALMOST_ONE, ROUNDING, fixed, generator, mask_drafted, mixed, same
from acceptlib.testing.subject import Skipped, Subject, require

EXACT: Final = 1e-12
"""How far rounding in float64 may move an equality."""

VOCABULARY: Final = 4
LONGEST: Final = 3
LONG: Final = 8
"""Drafted tokens of the longest requests, whose rows have two entries: a rule may depend on the position."""
WIDE: Final = 64
"""Entries of rows that are nearly flat: a rule may depend on an entropy, or on a token's id."""
LARGE: Final = 1 << 17
"""Entries of rows as wide as a model's."""
CERTAIN: Final[dict[tuple[int, ...], float]] = {(): 1.0}


def model(seed: int, sharpness: float = 1.5, vocab_size: int = VOCABULARY) -> exact.Model:
    """Return a model whose row depends on the whole prefix."""
    rows: dict[tuple[int, ...], torch.Tensor] = {}

    def row(prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in rows:
            # A number that no other prefix has.
            number = sum((token + 1) * (vocab_size + 1) ** index for index, token in enumerate(prefix))
            noise = torch.randn(vocab_size, generator=generator(1009 * seed + number), dtype=torch.float64)
            rows[prefix] = torch.softmax(noise * sharpness, -1)
        return rows[prefix]

    return row


def zeroed(base: exact.Model, keep: int) -> exact.Model:
    """Return the model with only its `keep` likeliest tokens, as top-k leaves it."""

    def row(prefix: tuple[int, ...]) -> torch.Tensor:
        probs = base(prefix)
        kept = torch.where(probs >= probs.sort().values[-keep], probs, 0.0)
        return kept / kept.sum()

    return row


def of_two(base: exact.Model) -> exact.Model:
    """Return the model of the first two tokens alone."""

    def row(prefix: tuple[int, ...]) -> torch.Tensor:
        probs = base(prefix)[:2]
        return probs / probs.sum()

    return row


def rational(*weights: int) -> exact.Model:
    """Return a model whose row is small integers over their sum, and changes with the prefix's length."""

    def row(prefix: tuple[int, ...]) -> torch.Tensor:
        counts = torch.tensor([*weights[:-1], weights[-1] + len(prefix)], dtype=torch.float64)
        return counts / counts.sum()

    return row


PAIRS: Final[dict[str, tuple[exact.Model, exact.Model]]] = {
    "random": (model(1), model(2)),
    "sharp": (model(3, 6.0), model(4, 6.0)),
    "one-hot target": (zeroed(model(5), 1), model(6)),
    "disjoint supports": (rational(3, 7, 0, 0), rational(0, 0, 9, 1)),
    "zeros": (zeroed(model(7), 2), zeroed(model(8), 3)),
    "equal": (model(9), model(9)),
    "rational": (rational(1, 2, 3, 2), rational(3, 1, 1, 3)),
}
"""Target and draft by name. `disjoint supports` meet in the last entry once there is a prefix."""

OF_TWO: Final = (of_two(model(10)), of_two(model(11)))

NEXT_TO_NONE: Final = 1e-30
"""A probability that is 0 for all that a decision tells."""

FLAT: Final = (
    ("of two entries", OF_TWO, LONG),
    ("of three entries", (model(14, 0.7, 3), model(15, 0.7, 3)), 6),
    ("of twelve entries", (model(16, 0.7, 12), model(17, 0.7, 12)), 2),
    ("wide and flat", (model(12, 0.5, WIDE), model(13, 0.5, WIDE)), 1),
)
"""For what depends on the position, on a token's id or on an entropy: the more tokens, the fewer entries."""

DRAFTED: Final = (*((name, pair, LONGEST) for name, pair in PAIRS.items()), *FLAT)
"""All of these by name, with how many tokens are drafted at most."""

LATER: Final = (*((name, pair, 2) for name, pair in PAIRS.items()), ("of two entries", OF_TWO, 6), *FLAT[1:3])
"""What a law is checked on in states later than a new request's: less, since there are three of them."""


def check_acceptance_is_probability(subject: Subject) -> None:
    """The rule returns a probability for every row, which does not fall as the next row's residual mass grows.

    It does so in every state that steps lead to. Catches a row sum that is NaN where the target's row has a 0, or where
    a row is as wide as a model's and its terms too large, for which no comparison holds, an unguarded division, which
    gives NaN at 0 / 0 and an infinity at p / 0, in a residual too, a ratio that was not cut at 1, a budget that goes
    below 0, and a rule whose masses cannot be left out: an engine finds them only where they can still change the
    decision.
    """
    plan, keys = subject.plan, subject.distinct
    for name, (target, draft), length in (*((name, pair, 2) for name, pair in PAIRS.items()), *FLAT):
        drafts = torch.tensor(sorted(_drafts(len(target(())), length)))
        ids, each = drafts.repeat(len(keys), 1), len(drafts)
        state = subject.state([key for key in keys for _ in range(each)])
        p = torch.stack([target((0,) * position) for position in range(length + 1)])
        q = torch.stack([draft((0,) * position) for position in range(length)])
        _expect_finite_sums(plan, name, ids, p, q, state)
        for rows in (q, p[:-1], torch.zeros_like(q)):
            rows = rows.expand(len(ids), -1, -1)  # noqa: PLW2901 - for every sequence
            found = acceptance(plan, ids, p.expand(len(ids), -1, -1), rows, state)
            sums = found.weights.sum(-1).expand(found.h.shape)
            for what, numbers, sound in (
                ("accept in [0, 1]", found.h, (found.h >= 0) & (found.h <= 1 + EXACT)),  # NaN compares as false
                (
                    f"weights of the draw that add up to at most {MASS_LIMIT:g}",
                    sums,
                    (sums <= MASS_LIMIT) | (found.h >= 1),
                ),
            ):
                for index, position in (~sound).nonzero()[:1].tolist():
                    where = f"rows {name!r}{subject.having(keys[index // each])}, position {position} of drafted tokens"
                    msg = f"{where} {ids[index].tolist()}: expected {what}, got {float(numbers[index, position])}"
                    raise ConformanceError(msg)
    wide = torch.softmax(torch.tensor([0.0, 3.0])[:, None] * torch.randn(LARGE, generator=generator(6)), -1).double()
    for name, row in zip(("flat", "ordinary"), wide, strict=True):
        ids, q = torch.zeros(1, 1, dtype=torch.int64), row.roll(1)[None]
        _expect_finite_sums(plan, f"{name}, V = {LARGE}", ids, row.expand(2, -1), q, subject.state(keys[:1]))
    if "next_residual_mass" in plan.accept.names:
        _expect_no_fall(plan, subject.state([keys[index % len(keys)] for index in range(64)]))


def _expect_finite_sums(
    plan: Plan, name: str, ids: torch.Tensor, p: torch.Tensor, q: torch.Tensor, state: Mapping[str, torch.Tensor]
) -> None:
    """Expect the row sums to be numbers: a comparison with NaN is false, so a rule would decide without a word."""
    values = decide.positional(plan, torch.full((len(ids),), ids.shape[1]), ids.shape[1], state)
    shape = len(ids), -1, -1
    scalars = row_scalars(plan, ids, p[:-1].expand(shape), q.expand(shape), values)
    for row_sum in plan.used_row_sums:
        for index, position in (~scalars[row_sum].isfinite()).nonzero()[:1].tolist():
            found, row = float(scalars[row_sum][index, position]), reprlib.repr(p[position].tolist())
            msg = (
                f"rows {name!r}: expected row sum {row_sum!r} to be finite, got {found} for p = {row}: `ops.log(0)` is "
                "-inf, and 0 times it NaN, where `ops.log2(p, 1e-5)` is finite; and terms whose magnitudes sum to "
                f"{ROW_SUM_LIMIT:g} or more are NaN, so that they have to fall as a vocabulary grows, as p does"
            )
            raise ConformanceError(msg)


def _drafts(size: int, length: int) -> set[tuple[int, ...]]:
    """Return all drafts where they are few, and otherwise those of `_fixed_drafts` that begin with each token."""
    if size**length <= VOCABULARY**2:
        return {*itertools.product(range(size), repeat=length)}
    return _fixed_drafts(size, length, size)


def _expect_no_fall(plan: Plan, state: Mapping[str, torch.Tensor]) -> None:
    """Expect h not to fall as the next row's residual mass grows from 0 to 4, in states [64], all else being random."""
    random = generator(5)
    values: dict[str, torch.Tensor] = {}
    for name in sorted({*plan.accept.names} - {*plan.constants, "next_residual_mass"}):
        drawn = torch.rand(64, 1, generator=random, dtype=torch.float64)
        values[name] = drawn < 1 / 2 if name.startswith("is_") else drawn
    for name in plan.traits.state:
        values[name] = state[name][:, None] if state[name].dtype == torch.bool else state[name][:, None].double()
    mass = torch.linspace(0, 4, 65, dtype=torch.float64)
    constants = {name: value[0] if isinstance(value, tuple) else value for name, value in plan.constants.items()}
    h = torch.as_tensor(evaluate(plan.accept, {**values, "next_residual_mass": mass}, constants)).expand(64, 65)
    for row, step in (~(h.diff(dim=1) >= -EXACT)).nonzero()[:1].tolist():
        given = ", ".join(f"{name} = {value[row].item()}" for name, value in values.items()) or "anything"
        found = f"{float(h[row, step])} at {float(mass[step])} and {float(h[row, step + 1])} at {float(mass[step + 1])}"
        msg = (
            f"accept falls as next_residual_mass grows: it is {found}, with {given}; it must not fall, for the mass is "
            "found only where it can still change the decision"
        )
        raise ConformanceError(msg)


def check_lossless_law(subject: Subject) -> None:
    """Lossless: what a step emits, continued by the target or by a second step, has the target's joint law.

    This holds in a new request's state and in later ones. Catches a rule that is exact in the first step alone, and
    wrong block rules, invisible in the first token alone: the token rule's residual with block acceptance (TV 0.007),
    the row's own mass instead of the next one's (0.15), stopping at the first failure (0.31); and recovering from p
    (vllm#9834 is the same from unprocessed p).
    """
    for name, (target, draft), most in DRAFTED:
        for length in range(most + 1):
            emitted = subject.law(target, draft, num_draft_tokens=length)
            _expect_law(emitted, target, length + 1, f"rows {name!r}, {length} drafted tokens")
        if name in {"random", "zeros"}:
            _expect_law(_two_steps(subject, target, draft), target, 4, f"rows {name!r}, two steps")
    for key in subject.moments[1:]:
        for name, (target, draft), length in LATER:
            emitted = subject.law(target, draft, num_draft_tokens=length, key=key)
            where = f"rows {name!r}, {length} drafted tokens{subject.having(key)}"
            _expect_law(emitted, target, length + 1, where)


def _two_steps(subject: Subject, target: exact.Model, draft: exact.Model) -> dict[tuple[int, ...], float]:
    both: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for first, chance in subject.law(target, draft, num_draft_tokens=2).items():
        second = subject.law(
            lambda prefix, first=first: target((*first, *prefix)),  # type: ignore[misc]
            lambda prefix, first=first: draft((*first, *prefix)),  # type: ignore[misc]
            num_draft_tokens=2,
        )
        for then, next_chance in second.items():
            both[(*first, *then)[:4]] += chance * next_chance
    return both


def check_lossless_law_one_hot(subject: Subject) -> None:
    """Lossless without draft rows: a fixed draft, as n-gram lookup makes it, leaves the target's joint law.

    Catches one-hot drafts that get a rule of their own, such as accepting the argmax alone: a sampled draft taken for
    a greedy one, or a greedy one for a sample (transformers#32867).
    """
    for name, (target, _) in PAIRS.items():
        for ids in itertools.product(range(VOCABULARY), repeat=2):
            emitted = subject.law(target, num_draft_tokens=2, draft_token_ids=ids)
            _expect_law(emitted, target, 3, f"rows {name!r}, drafted tokens {ids}")
    for key in subject.moments:
        for name, (target, _), length in LATER if key else FLAT:
            for ids in _fixed_drafts(len(target(())), length):
                emitted = subject.law(target, num_draft_tokens=length, draft_token_ids=ids, key=key)
                where = f"rows {name!r}, drafted tokens {ids}{subject.having(key)}"
                _expect_law(emitted, target, length + 1, where)


def _fixed_drafts(size: int, length: int, num_firsts: int = 4) -> set[tuple[int, ...]]:
    """Return drafts that begin with each of some tokens, and then repeat it or take all tokens in turn."""
    firsts = range(0, size, max(size // num_firsts, 1))
    return {tuple((first + step * place) % size for place in range(length)) for first in firsts for step in (0, 1)}


def _expect_law(emitted: dict[tuple[int, ...], float], target: exact.Model, length: int, where: str) -> None:
    total = sum(emitted.values())
    require(abs(total - 1) <= EXACT, f"{where}: the law sums to {total!r}, expected 1")
    found, wanted = (exact.complete(start, target, length) for start in (emitted, CERTAIN))
    gaps = (found - wanted).abs()
    if not float(gaps.max()) <= EXACT:
        worst = tuple(int(place) for place in torch.unravel_index(gaps.argmax(), gaps.shape))
        msg = (
            f"{where}: the joint law of {length} tokens is at distance TV = {float(gaps.sum() / 2):.3g}, expected 0; "
            f"tokens {list(worst)} have a probability of {float(found[worst]):.6g}, expected {float(wanted[worst]):.6g}"
        )
        raise ConformanceError(msg)


def check_zero_draft_probability(subject: Subject) -> None:
    """Lossless: a token of zero draft probability is accepted as one of next to none, if the target gives it any.

    Catches `r <= p / q`, which accepts p = 0 at r = 0, and a division guarded by giving up on the token. Such tokens
    come from a draft that was sampled in other precision than its rows (transformers#47932). A rule that does not read
    q, like a sample of the target that has to match, accepts with probability p.
    """
    plan = subject.plan
    requests = [request for request in mixed(20) if request.n == 1]
    for request in requests:
        assert request.q is not None  # noqa: S101 - `mixed` gives every request draft rows
        request.q[0, request.ids[0]] = 0
        request.q[0] /= request.q[0].sum()
    ids = torch.stack([request.ids for request in requests])
    p = torch.stack([request.p for request in requests]).double()
    q = torch.stack([request.q for request in requests if request.q is not None]).double()
    state = subject.state([request.key for request in requests])
    # A rule that exceeds 1 is told so by another check.
    h = acceptance(plan, ids, p, q, state).h.clamp(max=1)
    near = acceptance(plan, ids, p, q.scatter(2, ids[..., None], NEXT_TO_NONE), state).h.clamp(max=1)
    for index in (~((h - near).abs() <= EXACT)).nonzero()[:1, 0].tolist():
        where = f"q(x) = 0 and p(x) = {float(p[index, 0, ids[index, 0]]):.3g}{subject.having(requests[index].key)}"
        wanted, found = float(near[index, 0]), float(h[index, 0])
        msg = f"{where}: expected accept to be {wanted:.6g}, as at q(x) = {NEXT_TO_NONE}, got {found:.6g}"
        raise ConformanceError(msg)
    below = torch.where(h < 1, (h - ROUNDING).clamp(min=0), ALMOST_ONE)
    uniforms = Uniforms(accept=below, emit=torch.zeros(len(requests), dtype=torch.int64))
    stood = subject.verify(requests, uniforms=uniforms).num_accepted.cpu()
    expected = (below < h)[:, 0].int()
    require(
        torch.equal(stood, expected), f"q(x) = 0: expected {expected.tolist()} tokens accepted, got {stood.tolist()}"
    )
    for request in requests:
        mask_drafted(request, 0)
    stood = subject.verify(requests, uniforms=fixed(len(requests), 1, 0.0)).num_accepted
    require(bool((stood == 0).all()), f"q(x) = 0 and p(x) = 0: expected every token rejected, got {stood.tolist()}")


def check_declared_bound(subject: Subject) -> None:
    """Lossy: the exact law of an emitted token keeps the declared bound, with draft rows and without.

    This holds in a new request's state and in later ones and, if nothing is carried, at each position where all tokens
    before it stand. Catches a residual that does not match the acceptance: the law then exceeds the distance that the
    paper states, as it does for lenience with a residual scaled the wrong way round.
    """
    traits = subject.traits
    if traits.bound in {"", "none"}:
        msg = "the strategy declares no bound"
        raise Skipped(msg)
    memoryless = traits.stop == "first_rejection" and subject.plan.carry is None
    for key in subject.moments:
        for name, (target, draft) in PAIRS.items():
            for case, (rows, emitted) in _first_tokens(subject, target, draft, key).items():
                out = exact.complete(emitted, target, 1)
                _expect_bound(subject, target(()), rows, out, f"rows {name!r}, {case}{subject.having(key)}")
        for name, (target, draft), length in (LATER if key else DRAFTED) * memoryless:
            size = len(target(()))
            one_hot = torch.eye(size, dtype=torch.float64)
            drafts: list[tuple[int, ...] | None] = [None, *_fixed_drafts(size, length)]
            for ids in drafts:
                given = draft if ids is None else None
                emitted = subject.law(target, given, num_draft_tokens=length, draft_token_ids=ids, key=key)
                for stands, out in _following(emitted, length, size).items():
                    q = draft(stands) if ids is None else one_hot[ids[len(stands)]]
                    drafted = "" if ids is None else f", drafted tokens {ids}"
                    where = f"rows {name!r}, after {stands}{drafted}{subject.having(key)}"
                    _expect_bound(subject, target(stands), q, out, where)
    excludes = any(
        _excess(subject, target(()), draft(()), out) > EXACT
        for target, draft in PAIRS.values()
        for out in torch.eye(VOCABULARY, dtype=torch.float64)
    )
    require(excludes, f"bound_excess is at most 0 for every law that was tried: {traits.bound} excludes nothing")


def _first_tokens(
    subject: Subject, target: exact.Model, draft: exact.Model, key: int
) -> dict[str, tuple[torch.Tensor, dict[tuple[int, ...], float]]]:
    """Return for each case the draft's first row, one-hot where there are none, and the law of what a step emits."""
    q = draft(())
    cases = {"drafted from q": (q, subject.law(target, draft, num_draft_tokens=1, key=key))}
    cases["drafted from q, two tokens"] = (q, subject.law(target, draft, num_draft_tokens=2, key=key))
    for token, one_hot in enumerate(torch.eye(VOCABULARY, dtype=torch.float64)):
        fixed_draft = subject.law(target, num_draft_tokens=1, draft_token_ids=(token,), key=key)
        cases[f"drafted {token} without rows"] = (one_hot, fixed_draft)
    return cases


def _following(
    emitted: dict[tuple[int, ...], float], length: int, vocab_size: int
) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the law of the token at each later drafted position, by the tokens before it, given that these stand."""
    found: defaultdict[tuple[int, ...], torch.Tensor]
    found = defaultdict(lambda: torch.zeros(vocab_size, dtype=torch.float64))
    for sequence, chance in emitted.items():
        for position in range(1, min(len(sequence), length)):
            found[sequence[:position]][sequence[position]] += chance
    return {stands: out / out.sum() for stands, out in found.items() if float(out.sum()) > 0}


def _expect_bound(subject: Subject, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor, where: str) -> None:
    excess = _excess(subject, p, q, out)
    if not excess <= EXACT:
        rows = ", ".join(
            f"{name} = {reprlib.repr([round(number, 6) for number in row.tolist()])}"
            for name, row in (("p", p), ("q", q), ("out", out))
        )
        msg = f"{where}: {subject.traits.bound} is exceeded by {excess:.3g} for {rows}"
        raise ConformanceError(msg)


def _excess(subject: Subject, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:
    excess: object = subject.strategy.bound_excess(p, q, out)
    if isinstance(excess, torch.Tensor) and excess.numel() == 1:
        excess = excess.item()
    if excess is None:
        msg = "bound_excess returns None"
        raise Skipped(msg)
    if not isinstance(excess, Real):
        msg = f"expected bound_excess to return a number, got {short_repr(excess)}"
        raise ConformanceError(msg)
    return float(excess)


def check_neutral_setting(subject: Subject) -> None:
    """Lossy: under its neutral setting the strategy equals the one that it names, bit for bit.

    So does its exact law, where there are rules. Catches an option that is silently ignored, and a neutral value that
    is neutral in the limit only: a table that compares rules at "the same" setting then compares something else.
    """
    traits, strategy = subject.traits, subject.strategy
    if not traits.neutral:
        msg = "the strategy declares no neutral setting"
        raise Skipped(msg)
    try:
        other = registry.find(traits.neutral_equals).strategy
    except AcceptlibError as error:
        msg = f"Traits.neutral_equals: {error}"
        raise ConformanceError(msg) from error
    expected = f"expected neutral_equals to name a lossless or greedy strategy, and {traits.neutral_equals!r} is lossy"
    require(other.traits.guarantee != "lossy", expected)
    options = {**strategy.options.model_dump(), **traits.neutral}
    try:
        neutral = subject.with_strategy(type(strategy)(backend=strategy.backend, **options))
    except OptionError as error:
        msg = f"Traits.neutral: {error}"
        raise ConformanceError(msg) from error
    lossless = subject.with_strategy(other(backend=strategy.backend))
    for vocab in (3, 11, 40):
        requests = mixed(12, vocab, first_key=vocab)
        for draft in (True, False):
            what = f"{neutral.strategy!r} and {lossless.strategy!r}"
            same(neutral.verify(requests, draft=draft), lossless.verify(requests, draft=draft), what=what)
    for one in (neutral, lossless):  # the rest is about rules
        one.require_rules()
    for key in neutral.moments:
        for name, (target, drafts), length in LATER if key else DRAFTED:
            found, wanted = (one.law(target, drafts, num_draft_tokens=length, key=key) for one in (neutral, lossless))
            sequences = found.keys() | wanted.keys()
            gap = max(abs(found.get(sequence, 0.0) - wanted.get(sequence, 0.0)) for sequence in sequences)
            where = f"{what}: rows {name!r}{neutral.having(key)}"
            require(gap <= EXACT, f"{where}: expected one law, and they differ by {gap:.3g}")
