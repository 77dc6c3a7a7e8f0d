"""Strategies and calls by name that go through the Triton engine, which several test files share."""

from __future__ import annotations

import dataclasses
import math

import torch
from triton_cases import Cactus, Cascade, EntropyScaled, Relaxed

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, ops, rule
from acceptlib.engine.triton import positions
from acceptlib.ops import Value

FILTERED_SHAPE = (3, 2, 100)  # of the calls with top-k and the like
ONE_BLOCK = (3, 3, 50)  # a row of one block, for few calls: a shape of two blocks has what it has
MAX_SETTLED = (2, 31, 11)  # of the most positions of which one word says what became of each
# Calls of the longest shapes, which take the interpreter longest.
LONG = ("padded", "ragged", "by-mass", "every-length")
OFTEN = 6  # so that among requests that differ in their streams alone some are decided by what is wrong


class Cautious(AcceptanceStrategy):
    """A third party's strategy, whose residual depends on the drafted token and its position."""

    name = "cautious"
    traits = Traits(guarantee="lossy", bound="none")

    class Options(acceptlib.Options):
        """Options of `cautious`."""

        caution: float = 0.3

    @rule
    def accept(target_prob: Value, draft_prob: Value, position: Value, is_last: Value, caution: Value) -> Value:
        """Return h."""
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0) * (1.0 - caution / (position + 2.0))
        return ops.where(is_last, 0.5 * h, h)

    @rule
    def residual(p: Value, q: Value, is_drafted: Value, target_prob: Value, caution: Value) -> Value:
        """Return the weight of each entry."""
        # Where there is no probability there is a weight, which no entry beyond the row may have.
        return ops.where(is_drafted, caution * p, ops.where(p > 0, p, 1 / 256) - target_prob * q)


class Likeliest(AcceptanceStrategy):
    """A third party's strategy that reads the largest entries of both rows and recovers the residual's argmax."""

    name = "likeliest"
    traits = Traits(guarantee="lossy", bound="none", recovered="argmax", bonus="argmax")

    @rule
    def accept(target_prob: Value, draft_prob: Value, target_max_prob: Value, draft_max_prob: Value) -> Value:
        """Return h."""
        return ops.minimum(target_prob * draft_max_prob / (target_max_prob * ops.maximum(draft_prob, 1e-3)), 1.0)

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return p - q


class Forgetful(AcceptanceStrategy):
    """A third party's strategy that reads the draft's row to decide, and not to recover."""

    name = "forgetful"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(target_prob: Value, draft_prob: Value, target_entropy: Value) -> Value:
        """Return h."""
        return ops.minimum(ops.ratio(target_prob, draft_prob), 1.0) * ops.exp(-0.1 * target_entropy)


class Deferred(AcceptanceStrategy):
    """A third party's strategy, whose window waits for decisions that take a residual's mass."""

    name = "deferred"
    traits = Traits(guarantee="lossy", bound="none", stop="window", window=2)

    @rule
    def carry(carry: Value, target_prob: Value, draft_prob: Value) -> Value:
        """Return the product of ratios, which has no limit."""
        return ops.ratio(carry * target_prob, draft_prob)

    @rule
    def accept(carry: Value, next_residual_mass: Value) -> Value:
        """Return h."""
        return 0.5 * ops.minimum(carry, 1.0) + next_residual_mass

    @rule
    def forgive(target_prob: Value, carry: Value) -> Value:
        """Return whether a rejected token may stand."""
        return (target_prob > 0.001) & (carry < 0.9)

    @rule
    def residual(p: Value, q: Value, carry: Value) -> Value:
        """Return the weight of each entry."""
        return ops.minimum(carry, 1.0) * p - q


class Miser(AcceptanceStrategy):
    """A third party's strategy that draws nothing, and reads only the mass of a row that no residual changes."""

    name = "miser"
    traits = Traits(guarantee="lossy", bound="none", stop="last_acceptance", recovered="argmax", bonus="argmax")

    @rule
    def accept(next_residual_mass: Value) -> Value:
        """Return h, 0.7 where the mass is whole."""
        return 0.7 * (2.0 * next_residual_mass - 1.0)


class Late(AcceptanceStrategy):
    """A third party's strategy that stops behind the last acceptance without a mass, and draws after it."""

    name = "late"
    traits = Traits(guarantee="lossy", bound="none", stop="last_acceptance", bonus="argmax")

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        """Return h."""
        return 0.3 * ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)


class Saver(AcceptanceStrategy):
    """A third party's strategy that stops at the first rejection by masses, draws bonus tokens alone, and reads K."""

    name = "saver"
    traits = Traits(guarantee="lossy", bound="none", recovered="argmax")

    @rule
    def accept(next_residual_mass: Value, target_prob: Value, draft_prob: Value, num_draft_tokens: Value) -> Value:
        """Return h, which falls as more is drafted."""
        h = next_residual_mass * ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return h / ops.maximum(num_draft_tokens - 1.0, 1.0)


class Wary(AcceptanceStrategy):
    """A third party's strategy with a carry and no mass."""

    name = "wary"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def carry(carry: Value, target_prob: Value) -> Value:
        """Return the largest probability so far, which fades."""
        return ops.maximum(0.9 * carry, target_prob)

    @rule
    def accept(carry: Value, target_prob: Value, draft_prob: Value) -> Value:
        """Return h."""
        return carry * ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)

    @rule
    def residual(p: Value, q: Value, carry: Value) -> Value:
        """Return the weight of each entry."""
        return p - carry * q


class Wild(AcceptanceStrategy):
    """A third party's strategy that is wrong: nothing can be drawn from its residuals, each for a reason of its own."""

    name = "wild"
    traits = Traits(guarantee="lossy", bound="none")

    class Options(acceptlib.Options):
        """Options of `wild`."""

        factors: tuple[float, ...] = (math.nan, math.inf, 5.0)

    @rule
    def accept(position: Value) -> Value:
        """Return h."""
        return 0.0 * position + 0.5

    @rule
    def residual(p: Value, factors: Value) -> Value:
        """Return the weight of each entry."""
        return p * factors


def strategies() -> dict[str, AcceptanceStrategy]:
    """Return the strategies of the registry, of the plugins and of our own, by name."""
    found: dict[str, AcceptanceStrategy] = {name: acceptlib.create(name) for name in acceptlib.available()}
    found |= {"cactus": Cactus(), "cascade": Cascade(), "entropy-scaled": EntropyScaled()}
    found["relaxed"] = Relaxed(relaxed_topk=2, begin_thinking_phase_token=1, end_thinking_phase_token=2)
    own = (Cautious(), Likeliest(), Forgetful(), Deferred(), Miser(), Late(), Saver(), Wary(), Wild())
    return found | {strategy.name: strategy for strategy in own}


def calls(shape: tuple[int, int, int]) -> dict[str, dict[str, object]]:
    """Return arguments by a readable name: layouts, dtypes, strides, explicit numbers, bad values."""
    num_requests, most, vocab_size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    p = torch.softmax(torch.randn(num_requests, most + 1, vocab_size, generator=generator) * 2, -1)
    noise = torch.randn(num_requests, most, vocab_size, generator=generator) / 2
    q = torch.softmax(p[:, :most].log() + noise, -1)
    ids = (
        torch.multinomial(q.reshape(-1, vocab_size), 1, generator=generator).view(num_requests, most) if most else None
    )
    ids = torch.zeros(num_requests, 0, dtype=torch.int64) if ids is None else ids
    both = {"ids": ids, "target_probs": p, "draft_probs": q}
    rng = acceptlib.Rng(seeds=torch.arange(num_requests) - 1, offsets=torch.full((num_requests,), 2**40))
    found: dict[str, dict[str, object]] = {
        "padded": both,
        "one-hot": {"ids": ids, "target_probs": p},
        "equal": {**both, "draft_probs": p[:, :most]},
        "half": {**both, "target_probs": p.bfloat16(), "draft_probs": q.half(), "ids": ids.int()},
        "passed": {**both, "num_passed": True},
        "bonus": {**both, "bonus_token_ids": torch.arange(num_requests) * vocab_size // 2, "logprobs": True},
        "given": {**both, "bonus_token_ids": torch.arange(num_requests), "target_probs": p[:, :most].contiguous()},
        "explicit": {**both, "uniforms": rng.uniforms(most)},
        "rooted": {**both, "rng": 2**40 + 3},
        "standing": {**both, "rng": dataclasses.replace(rng, offsets=rng.offsets + 5, advances=False)},
        "strided": {
            "ids": ids.T.contiguous().T,
            "target_probs": torch.stack((p, p), -1)[..., 0],
            "draft_probs": q.transpose(0, 1).contiguous().transpose(0, 1),
        },
        "narrow-draft": {**both, "draft_probs": q[..., : vocab_size // 2 + 1].contiguous()},
        "wide-draft": {**both, "draft_probs": 0.1 * torch.cat((q, torch.full((num_requests, most, 2), 4.5)), -1)},
    }
    count = torch.arange(num_requests) % (most + 1)
    kept, rows = torch.arange(most) < count[:, None], torch.arange(most + 1) <= count[:, None]
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), count.cumsum(0)))
    ragged = {"target_probs": p[rows], "cu_num_draft_tokens": cu, "max_num_draft_tokens": most}
    found["ragged"] = {**ragged, "ids": ids[kept], "draft_probs": q[kept]}
    uniforms = acceptlib.Uniforms(accept=rng.uniforms(most).accept[kept], emit=rng.uniforms(most).emit)
    found["ragged-explicit"] = {**ragged, "ids": ids[kept], "uniforms": uniforms}
    drafted = p[:, :most][kept]
    given = {**ragged, "ids": ids[kept], "target_probs": drafted, "bonus_token_ids": torch.arange(num_requests)}
    found["ragged-given"] = {**given, "draft_probs": q[kept], "cu_num_draft_tokens": cu[1:]}
    if most:
        for name, value in {"nan": math.nan, "inf": math.inf, "three": 3.0}.items():
            bad = p.clone()
            bad[0, 0] = value
            bad[-1, -1] = value
            found[f"bad-{name}"] = {**both, "target_probs": bad}
        found |= bad_entries(ids, p, q, rng.uniforms(most).emit) | steered(ids, p, q, rng.uniforms(most).emit)
        cut = ids.clone()
        cut[0, most // 2], cut[-1, 0] = -1, vocab_size
        found["placeholders"] = {**both, "ids": cut}
        found["ragged-given-placeholders"] = {**given, "ids": torch.where(ids % 3 == 0, -1, ids)[kept]}
        logits, draft_logits = p.log() * 0.7, q.log() * 0.7
        temperature = acceptlib.SamplingParams(temperature=torch.arange(num_requests) % 3 * 0.6)
        both_logits = {"ids": ids, "target_logits": logits, "draft_logits": draft_logits}
        found["passed-bad-parameters"] = {
            **both_logits,
            "num_passed": True,
            "sampling": acceptlib.SamplingParams(top_k=torch.arange(num_requests) - 1),
        }
        found["logits"] = {**both_logits, "logprobs": True}
        found["logits-temperature"] = {**both_logits, "sampling": temperature}
        behind = cut.cummin(1).values < 0
        found |= {
            **uneven(logits, draft_logits),
            "logits-bonus": {  # after tokens that all stand in one request
                **both_logits,
                "bonus_token_ids": torch.arange(num_requests),
                "uniforms": dataclasses.replace(
                    rng.uniforms(most), accept=(torch.arange(num_requests)[:, None] * torch.full((most,), 0.5)).double()
                ),
            },
            "logits-half": {**both_logits, "target_logits": logits.half(), "draft_logits": draft_logits.bfloat16()},
            "logits-one-hot": {"ids": ids, "target_logits": logits, "sampling": temperature},
            "logits-and-probs": {"ids": ids, "target_logits": logits, "draft_probs": q},
            "probs-and-logits": {"ids": ids, "target_probs": p, "draft_logits": draft_logits},
            "logits-placeholders": {
                **both_logits,
                "ids": cut,
                "draft_logits": draft_logits.masked_fill(behind[..., None], math.nan),
                "sampling": temperature,
            },
        }
        rest = {name: value for name, value in ragged.items() if name != "target_probs"}
        found["ragged-logits"] = {
            **rest,
            "ids": ids[kept],
            "target_logits": logits[rows],
            "draft_logits": draft_logits[kept],
        }
        bad_logits = logits.clone()
        bad_logits[0, 0, 0], bad_logits[-1] = math.nan, -math.inf
        found |= outside(ids, p, q) | {
            "bad-logits": {**both_logits, "target_logits": bad_logits},
            "lawless-draft": lawless(ids, logits, draft_logits),
        }
        found["bad-counts"] = {**ragged, "ids": ids[kept], "draft_probs": q[kept], "max_num_draft_tokens": most - 1}
        wrong = {"cu_num_draft_tokens": cu[-1] - cu[:-1], "max_num_draft_tokens": most - 1}
        found["bad-ends"] = {**given, "draft_probs": q[kept], **wrong}
        if shape == ONE_BLOCK:
            found |= special(logits, draft_logits)
        if shape == FILTERED_SHAPE:
            return filtered(both_logits, rows, kept, rest)
    return {name: found[name] for name in LONG} if most >= MAX_SETTLED[1] else found


def steered(ids: torch.Tensor, p: torch.Tensor, q: torch.Tensor, emit: torch.Tensor) -> dict[str, dict[str, object]]:
    """Return calls whose numbers say how far chains get: where masses decide, and where drafts are cut short."""
    most = ids.shape[1]
    # The last tokens hardly stand, and one request does not have them.
    early = (torch.arange(most) < most * 2 // 3).expand_as(ids)
    accept = torch.where(early, 0.001, 0.999).double()
    drafted = torch.where(early | (torch.arange(len(ids)) > 0)[:, None], ids, -1)
    if most > positions.LANES.value:  # and before tokens that are looked at later, and would stand
        drafted[1:, 2] = p.shape[-1]
    alone = (torch.arange(most) == 0).expand_as(ids).double() * (1 - 2**-53)
    lengths = torch.arange(min(most, positions.LANES.value + 1) + 1)
    if most == MAX_SETTLED[1]:
        lengths = torch.cat((lengths, torch.tensor([15, 16, 30, 31])))
    each = lengths % len(ids)
    far = 100.0 * torch.arange(most + 1)[:, None]  # so that no row's law would do for another
    return {
        "every-length": {  # of which every token stands
            "ids": torch.where(torch.arange(most) < lengths[:, None], ids[each], -1),
            "target_logits": p[each].log() + far,
            "draft_logits": q[each].log() + far[:most],
            "uniforms": acceptlib.Uniforms(accept=torch.full((len(each), most), 0.001).double(), emit=emit[each]),
        },
        "many": many(),
        "by-mass": {
            "ids": drafted,
            "target_probs": p,
            "draft_probs": torch.cat((p[:, : most // 7], q[:, most // 7 :]), 1),
            "uniforms": acceptlib.Uniforms(accept=accept, emit=emit),
        },
        "forgiven": {  # the first token does not stand by itself, and those behind it do
            "ids": ids,
            "target_probs": p,
            "draft_probs": q,
            "uniforms": acceptlib.Uniforms(accept=alone, emit=emit),
        },
        "last-entry": {  # of a row that is drawn from, next to none, beside one so large that their sum is the same
            "ids": ids,
            "target_probs": ending(p),
            "draft_probs": ending(p)[:, :most],
            "uniforms": acceptlib.Uniforms(accept=torch.full_like(accept, 0.5), emit=torch.full_like(emit, -1)),
        },
        "cut-short": {  # every token before the last one would stand
            "ids": torch.where(torch.arange(most) < most - 1, ids, -1),
            "target_logits": p.log(),
            "draft_logits": p[:, :most].log(),
            "uniforms": acceptlib.Uniforms(accept=torch.full_like(accept, 0.5), emit=emit),
        },
    }


def ending(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of which the last entries of a four have a half, and next to nothing; there is nothing behind."""
    end = rows.shape[-1] // 4 * 4
    rows = rows / 2
    rows[..., end - 2], rows[..., end - 1], rows[..., end:] = 0.5, 2.0**-30, 0.0
    return rows / rows.sum(-1, keepdim=True)


def many() -> dict[str, object]:
    """Return a call of so many requests, whose rows differ so much, that each bound of a mass decides some token."""
    count, most, generator = 24, 10, torch.Generator().manual_seed(9)
    p, q = (3.0 * torch.randn(count, length, 5, generator=generator) for length in (most + 1, most))
    ids = torch.multinomial(q.softmax(-1).flatten(0, 1), 1, generator=generator).view(count, most)
    uniforms = acceptlib.Uniforms(
        accept=torch.rand(count, most, generator=generator).double(), emit=torch.arange(count) << 57
    )
    return {"ids": ids, "target_logits": p, "draft_logits": q, "uniforms": uniforms}


def outside(ids: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> dict[str, dict[str, object]]:
    """Return calls whose drafted tokens but the first are above the vocabulary: the first's decision is its own."""
    ids, p, q = ids.repeat(OFTEN, 1), p.repeat(OFTEN, 1, 1), q.repeat(OFTEN, 1, 1)
    ids[:, 1:] += p.shape[2]
    # The last entry is what such a token could be taken for.
    last, heavy = ids.clone(), 0.2 * p
    last[:, 0] = p.shape[2] - 1
    heavy[..., -1] += 0.8
    return {
        "outside": {"ids": ids, "target_probs": p, "draft_probs": q},
        "outside-one-hot": {"ids": last, "target_probs": heavy},
        "outside-logits": {"ids": last, "target_logits": heavy.log()},
    }


def uneven(logits: torch.Tensor, draft_logits: torch.Tensor) -> dict[str, dict[str, object]]:
    """Return calls whose requests have lists of some rows, and of others not: whether one program suffices shall not
    depend on where it stops, of which those that come later have another idea.
    """
    target, sure = logits.clone(), 3.0 * draft_logits  # so sure that not all tokens are accepted
    target[:, 1::2] = 0.0
    many = {
        "ids": sure.argmax(-1).repeat(8, 1),
        "target_logits": target.repeat(8, 1, 1),
        "draft_logits": sure.repeat(8, 1, 1),
    }
    # The ninth row alone has none, and no token is rejected before the eighth.
    late = logits[:, :1].repeat(1, 10, 1)
    late_draft = torch.cat((late[:, :7], sure[:, :1], sure[:, :1]), 1)
    late[:, 8] = 0.0
    behind = {"ids": late_draft.argmax(-1), "target_logits": late, "draft_logits": late_draft}
    return {
        "uneven-late": {**behind, "sampling": acceptlib.SamplingParams(min_p=0.5)},
        "uneven-min-p": {**many, "sampling": acceptlib.SamplingParams(min_p=0.5)},
        "uneven-top-k": {**many, "sampling": acceptlib.SamplingParams(top_k=3)},
    }


def lawless(ids: torch.Tensor, logits: torch.Tensor, draft_logits: torch.Tensor) -> dict[str, object]:
    """Return a call that rejects every token, and has nothing to take away: no greedy draft row has a law."""
    return {
        "ids": ids,
        "target_logits": logits.scatter(2, ids[..., None], -math.inf),
        "draft_logits": torch.full_like(draft_logits, -math.inf),
        "draft_sampling": acceptlib.SamplingParams(temperature=0.0),
    }


def special(logits: torch.Tensor, draft_logits: torch.Tensor) -> dict[str, dict[str, object]]:
    """Return calls whose requests have other numbers of drafted tokens than the shape says."""
    # The rows that the last request, whose counts make no sense, would point at are the first one's.
    first = 6 * logits.flatten(0, 1)[:7]
    # Every token of the first two is accepted: one stop follows the last of eight lanes, one lies in the next.
    same = torch.cat((logits, logits)).flatten(0, 1)[:21]
    draft = same[torch.tensor([*range(8), *range(9, 18), 19])]
    draft[-1] = draft_logits[0, 0]
    lanes: dict[str, object] = {
        "ids": draft.argmax(1),
        "target_logits": same,
        "draft_logits": draft,
        "cu_num_draft_tokens": torch.tensor([0, 8, 17, 18]),
        "max_num_draft_tokens": 9,
    }
    other = same.clone()
    other[[0, 9]] *= -1  # so that the first token of each is rejected
    # The last request begins where the first one's rows are.
    overlapping: dict[str, object] = {
        "ids": first[:3].argmax(1),
        "target_logits": first[:6],
        "draft_logits": first[:3],
        "cu_num_draft_tokens": torch.tensor([0, 3, 1, 3]),
        "max_num_draft_tokens": 3,
    }
    return {
        "bad-counts-logits": {
            "ids": first[:4].argmax(1),
            "target_logits": first,
            "draft_logits": first[:4],
            "cu_num_draft_tokens": torch.tensor([0, 3, 9, 3]),
            "max_num_draft_tokens": 6,
            "sampling": acceptlib.SamplingParams(temperature=torch.tensor([1.0, 0.0, 1000.0])),
        },
        "overlapping-counts": {
            **overlapping,
            "sampling": acceptlib.SamplingParams(temperature=torch.tensor([1.0, 1.0, 0.2])),
        },
        "overlapping-counts-filtered": {
            **overlapping,
            "sampling": acceptlib.SamplingParams(top_k=torch.tensor([9, 9, 1])),
        },
        # The second request's rows would lie far below the tensors.
        "counts-far-below": {**overlapping, "cu_num_draft_tokens": torch.tensor([0, -(2**40), 2 - 2**40, 3])},
        "counts-behind-too-many": {**overlapping, "cu_num_draft_tokens": torch.tensor([0, 4, 3, 3])},
        "lanes": {**lanes, "logprobs": True},
        # Those behind pass on their own, in the next lanes too.
        "lanes-passed": {**lanes, "target_logits": other, "num_passed": True},
        "lanes-min-p": {**lanes, "sampling": acceptlib.SamplingParams(min_p=0.01)},
        "lanes-top-k": {**lanes, "sampling": acceptlib.SamplingParams(top_k=5)},
    }


def bad_entries(
    ids: torch.Tensor, p: torch.Tensor, q: torch.Tensor, bits: torch.Tensor
) -> dict[str, dict[str, object]]:
    """Return calls with bad entries, most beside the drafted tokens, where only who reads the whole row sees them."""
    num_requests, most, vocab_size = q.shape
    beside = (ids + 1) % vocab_size
    # Each first token is rejected where h < 1, and all others are accepted where h > 0.
    first = acceptlib.Uniforms(accept=torch.zeros(num_requests, most, dtype=torch.float64), emit=bits)
    first.accept[:, 0] = 1 - 2**-53
    every = dataclasses.replace(first, accept=torch.zeros_like(first.accept))
    row, infinite, outside = p.clone(), q.clone(), ids.clone()
    row[0, 0, beside[0, 0]], row[-1, 0, beside[-1, 0]] = math.nan, -math.inf
    sure = q.clone()
    sure[:, 0] = 0
    sure[:, 0].scatter_(1, ids[:, :1], 1.0)
    for place in (1, 2):
        infinite[:, -1].scatter_(1, (ids[:, -1:] + place) % vocab_size, math.inf)
    outside[0, 0] = vocab_size
    below = p.clone()
    below[:, 0] = 0
    for place, entry in enumerate((0.5, 0.75, -0.25)):
        below[:, 0].scatter_(1, (ids[:, :1] + place) % vocab_size, entry)
    no_number = torch.where(q > q.amax(-1, keepdim=True) / 2, math.nan, q)
    return {
        "bad-draft": {"ids": ids, "target_probs": p, "draft_probs": no_number},
        "bad-draft-mass": {"ids": ids, "target_probs": p, "draft_probs": 1.5 * q, "uniforms": first},
        "bad-draft-mass-logits": {"ids": ids, "target_logits": p.log(), "draft_probs": 1.5 * q, "uniforms": first},
        "bad-entry": {"ids": ids, "target_probs": row, "draft_probs": sure, "uniforms": first},
        "bad-entry-below-0": {"ids": ids, "target_probs": below, "draft_probs": sure, "uniforms": every},
        "bad-entry-of-draft": {"ids": ids, "target_probs": p, "draft_probs": infinite, "uniforms": every},
        "undrafted": {"ids": ids, "target_probs": p, "draft_probs": q.scatter(2, ids[..., None], 0.0)},
        "bad-entry-outside": {"ids": outside, "target_probs": torch.where(p == p[0, 0], 3.0, p), "uniforms": every},
    }


def filtered(
    both: dict[str, torch.Tensor], rows: torch.Tensor, kept: torch.Tensor, ragged: dict[str, object]
) -> dict[str, dict[str, object]]:
    """Return calls with every sampling parameter; logits are rounded, so that many are equal."""
    ids, logits, draft = both["ids"], (both["target_logits"] * 2).round() / 2, (both["draft_logits"] * 2).round() / 2
    (num_requests, most), vocab_size = ids.shape, logits.shape[-1]
    generator = torch.Generator().manual_seed(vocab_size)
    words = -(-vocab_size // 32)
    masks = {
        length: torch.randint(-(2**31), 2**31 - 1, (2, num_requests, length, words), generator=generator)
        .int()
        .bitwise_or_(1)
        for length in (most, most + 1)
    }
    target_mask, draft_mask = masks[most + 1].transpose(0, 1)[:, 0], masks[most][0]
    target_mask[-1, 0] = 0
    bias = torch.stack([torch.randperm(vocab_size, generator=generator)[:3] for _ in range(num_requests)])
    bias[0, -1] = -1
    request = torch.arange(num_requests)
    several = acceptlib.SamplingParams(
        temperature=(request + 1) % 3 * 0.6,
        top_k=(request * 9 + 4).int(),
        top_p=0.9 - request * 0.2,
        min_p=request.double() * 0.03,
    )
    other = acceptlib.SamplingParams(top_p=0.8)
    of_mass = acceptlib.SamplingParams(temperature=0.9, top_p=1 - request * 0.3)
    forbidden = ((target_mask[..., None] >> torch.arange(32)) & 1).flatten(-2)[..., :vocab_size] == 0
    # Nothing is kept of the first entries, r is the lowest or the highest, one request has nothing left, and one as
    # much in several places.
    behind = logits - 20.0 * (torch.arange(vocab_size) < 40)
    behind[1, :, [70, 75, 90, 97, 99]] = 20.0
    beside = behind[:, :most].clone()
    beside[1] = beside[1].roll(-1, -1)
    outermost = acceptlib.Uniforms(accept=torch.zeros(num_requests, most, dtype=torch.float64), emit=-(request % 2))
    infinite = logits.where(~forbidden | (request[:, None, None] > 0), math.inf)  # forbidden: raw rows have no softmax
    shared = {"ids": ids, "target_logits": logits, "draft_logits": draft}
    constrained = acceptlib.SamplingParams(
        allowed_token_bitmask=target_mask, logit_bias=acceptlib.LogitBias(bias, torch.full(bias.shape, 2.5))
    )
    both_masked = {
        "sampling": dataclasses.replace(several, allowed_token_bitmask=target_mask),
        "draft_sampling": dataclasses.replace(several, allowed_token_bitmask=draft_mask, temperature=1.3),
    }
    return {
        "filtered": {**shared, "sampling": several},
        "filtered-half": {**shared, "target_logits": logits.half(), "sampling": several},
        "filtered-target": {**shared, "sampling": several, "draft_sampling": acceptlib.SamplingParams()},
        "filtered-ends": {
            "ids": torch.where(request[:, None] < 2, 0, behind[:, :most].argmax(-1)),
            "target_logits": behind,
            "draft_logits": beside,
            "sampling": acceptlib.SamplingParams(top_k=4),  # a row has as many sub-blocks, so few entries are listed
            "uniforms": outermost,
        },
        "filtered-draft": {**shared, "draft_sampling": other, "logprobs": True},
        "min-p": {**shared, "sampling": acceptlib.SamplingParams(min_p=0.1, temperature=0.8), "logprobs": True},
        "min-p-given": {
            **shared,
            "target_logits": logits[:, :most],
            "sampling": acceptlib.SamplingParams(min_p=0.02),
            "bonus_token_ids": request,
        },
        "min-p-ragged": {
            **ragged,
            "ids": ids[kept],
            "target_logits": logits[rows].half(),
            "draft_logits": draft[kept].half(),
            "sampling": acceptlib.SamplingParams(min_p=0.05, temperature=request * 0.8),
        },
        "min-p-target": {
            **shared,
            "sampling": acceptlib.SamplingParams(min_p=0.1),
            "draft_sampling": acceptlib.SamplingParams(),
        },
        "min-p-mixed": {
            **shared,
            "draft_logits": draft + 7.0,  # the same law, of other maxima than the target's
            "sampling": dataclasses.replace(
                constrained, temperature=(request + 2) % 3 * 0.6, min_p=request.flip(0) * 0.15
            ),
            "draft_sampling": acceptlib.SamplingParams(min_p=0.2 + request.double() * 0.2),
            "logprobs": True,
        },
        "min-p-and-probs": {  # which sum to too much in one request; each first token is rejected
            "ids": ids,
            "target_logits": logits,
            "draft_probs": draft.softmax(-1) * torch.where(request == 0, 1.5, 1.0)[:, None, None],
            "sampling": acceptlib.SamplingParams(min_p=0.1),
            "uniforms": dataclasses.replace(outermost, accept=1 - 2**-53 - outermost.accept),
        },
        "min-p-top-p": {**shared, "sampling": acceptlib.SamplingParams(min_p=0.05, top_p=0.8)},
        "top-p": {**shared, "sampling": of_mass, "logprobs": True},
        "top-p-ragged": {
            **ragged,
            "ids": ids[kept],
            "target_logits": logits[rows],
            "draft_logits": draft[kept],
            "sampling": dataclasses.replace(
                of_mass, allowed_token_bitmask=target_mask[rows], logit_bias=constrained.logit_bias
            ),
        },
        "constrained": {**shared, "target_logits": infinite, "sampling": constrained, "logprobs": True},
        "filtered-constrained": {**shared, **both_masked, "logprobs": True},
        "filtered-given": {
            **shared,
            "target_logits": logits[:, :most],
            "sampling": dataclasses.replace(several, allowed_token_bitmask=target_mask[:, :most]),
            "bonus_token_ids": request,
        },
        "filtered-one-hot": {"ids": ids, "target_logits": logits.half(), "sampling": several},
        "bad-parameters": {
            **shared,
            "sampling": dataclasses.replace(
                several, top_k=request - 1, top_p=torch.where(request == 1, math.nan, 0.5), logit_bias=None
            ),
        },
        "bad-draft-parameters": {**shared, "draft_sampling": acceptlib.SamplingParams(top_k=request - 1)},
        "bad-bias": {
            **shared,
            "sampling": acceptlib.SamplingParams(
                logit_bias=acceptlib.LogitBias(bias.where(request[:, None] > 0, vocab_size), torch.ones(bias.shape))
            ),
        },
        "filtered-ragged": {
            **ragged,
            "ids": ids[kept],
            "target_logits": logits[rows],
            "draft_logits": draft[kept],
            "sampling": dataclasses.replace(several, allowed_token_bitmask=target_mask[rows]),
            "logprobs": True,
        },
    }
