"""Values at the edge: u at both ends, zeros and NaN in rows, ids outside of the vocabulary, an empty residual."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from acceptlib.engine import decide
from acceptlib.exact.enumeration import acceptance
from acceptlib.result import INVALID_COUNT, PLACEHOLDER_TOKEN_ID, Status, VerifyResult
from acceptlib.rng import Uniforms
from acceptlib.testing.batches import (
    ALMOST_ONE,
    COUNT,
    ROUNDING,
    VOCABULARY,
    Request,
    fixed,
    generator,
    lay_out,
    mask_drafted,
    mixed,
    ordinary,
    same,
    streams,
    tokens,
)
from acceptlib.testing.subject import Skipped, Subject, require

WIDE: Final = 1 << 15


def check_decisions_follow_rules(subject: Subject) -> None:
    """A drafted token is accepted iff u < h, at u = 0, at the largest u, and on either side of h.

    `num_passed` counts those, also behind the stop.

    Catches `u <= h`, which accepts h = 0 at u = 0 (sglang#35771), a u rounded to 1.0, which rejects h = 1
    (sglang#30822), and a u stuck at 0, which accepts everything (vllm-ascend#13766).
    """
    plan, length = subject.plan, 3
    requests = [ordinary(length, VOCABULARY, key) for key in range(8)]
    for key, request in enumerate(requests):
        request.p[key % length, request.ids[key % length]] = 0  # some h are exactly 0
        request.p[:] = request.p / request.p.sum(-1, keepdim=True)
    ids = torch.stack([request.ids for request in requests])
    p = torch.stack([request.p for request in requests]).double()
    q = torch.stack([request.q for request in requests if request.q is not None]).double()
    rules = acceptance(plan, ids, p, q, subject.state([request.key for request in requests]))
    random = torch.rand(rules.h.shape, generator=generator(3), dtype=torch.float64)
    candidates = {
        "u = 0": torch.zeros_like(rules.h),
        "the largest u": torch.full_like(rules.h, ALMOST_ONE),
        "u just below h": (rules.h - 2 * ROUNDING).clamp(0, ALMOST_ONE),
        "u just above h": (rules.h + 2 * ROUNDING).clamp(0, ALMOST_ONE),
        "random u": random,
    }
    count = torch.full((len(requests),), length)
    for what, u in candidates.items():
        # Where rounding could tip the balance, u is moved away; 0 and 1 are exact in either precision.
        near = ((u - rules.h).abs() < ROUNDING) & (rules.h > 0) & (rules.h < 1)
        u = torch.where(near, (u + 0.5) % 1.0, u)  # noqa: PLW2901 - the same uniforms, but for these
        uniforms = Uniforms(accept=u, emit=torch.zeros(len(requests), dtype=torch.int64))
        out = VerifyResult.empty(len(requests), length, subject.device, num_passed=True)
        found = subject.verify(requests, uniforms=uniforms, out=out).num_accepted.tolist()
        counted = None if out.num_passed is None else out.num_passed.tolist()
        passed = (u < rules.h).sum(1).tolist()
        require(counted == passed, f"{what}: expected num_passed {passed}, got {counted}")
        wanted = decide.stop_position(plan, u < rules.h, rules.may_stand, count).tolist()
        for index, request in enumerate(requests):
            where = f"{what}, request {index}{subject.having(request.key)}"
            accepted = f"expected {wanted[index]} tokens accepted by the rule, got {found[index]}"
            require(found[index] == wanted[index], f"{where}: {accepted}; h = {rules.h[index].tolist()}")


def check_impossible_draft_never_stands(subject: Subject) -> None:
    """A drafted token that the target gives no probability is not emitted, even at u = 0.

    Catches `coin <= p`, which accepts p = 0 (sglang#35771), and lossy rules that override a grammar's -inf.
    """
    plan = subject.strategy.plan  # without rules it is not known what it reads
    if plan is not None and not {"target_prob", "is_target_argmax", "p"} & plan.reads:
        msg = "the rules do not read the target's row"
        raise Skipped(msg)
    requests = [request for request in mixed(20) if request.n]
    for request in requests:
        position = request.key % request.n
        mask_drafted(request, position)
    most = max(request.n for request in requests)
    forgives = plan is not None and plan.forgive is not None
    keeps = "each of `accept` and `forgive`" if forgives else "`accept`"
    for draft in (True, False):
        result = subject.verify(requests, draft=draft, uniforms=fixed(len(requests), most, 0.0))
        for index, request in enumerate(requests):
            position = request.key % request.n
            stood = int(result.num_accepted[index])
            where = f"request {index}{subject.having(request.key)}"
            stands = f"p(x) = 0 at position {position}, but {stood} tokens stand"
            require(stood <= position, f"{where}: {stands}: {keeps} has to be 0 where `target_prob` is")


def check_drawn_token_is_possible(subject: Subject) -> None:
    """A recovered or bonus token has target probability, also where the residual is empty and at the ends of the draw.

    Catches 1e-9 added to every residual entry, which leaks onto masked tokens; a zero residual that falls back to the
    vocabulary's last id, possibly a masked one; and a division by its sum.
    """
    requests = []
    for key in range(6):
        request = ordinary(2, VOCABULARY, key)
        assert request.q is not None  # noqa: S101 - `ordinary` gives it rows
        request.p[:, torch.arange(VOCABULARY) % 3 != key % 3] = 0
        request.p[:, -1] = 0
        request.p[:] = request.p / request.p.sum(-1, keepdim=True)
        if key % 2:
            # q a little above p everywhere, within a row's tolerance: nothing is left of p - q.
            request.q[:] = request.p[:2] * 1.001
            request.ids[:] = request.p[:2].argmax(-1)
        requests.append(request)
    for bits in (0, 1, -1, 2**63 - 1, -(2**63)):
        for u in (0.0, 0.5, ALMOST_ONE):
            result = subject.verify(requests, uniforms=fixed(len(requests), 2, u, bits))
            for index, request in enumerate(requests):
                row, found = int(result.num_accepted[index]), tokens(result, index)
                possible = bool(found) and 0 <= found[-1] < VOCABULARY and float(request.p[row, found[-1]]) > 0
                require(
                    possible,
                    f"request {index}, u = {u}, bits = {bits}: emitted {found}, p = {request.p[row].tolist()}",
                )


def check_invalid_row_marks_request(subject: Subject) -> None:
    """A row without a law marks its request: what stood is kept, nothing is drawn, the rest is -1.

    Catches an id equal to V from an all-NaN row (vllm#53029), and an empty output without a word (vllm#45060).
    """
    whole = mixed(COUNT)
    kinds = {"NaN": torch.nan, "zeros": 0.0, "infinity": torch.inf}
    for kind, value in kinds.items():
        for layout in ("padded", "ragged"):
            bad = [request.copy() for request in whole]
            for request in bad[1::2]:
                request.p[_first_bad(request) :] = value
            # At u = 0 the tokens before stand, where the rule lets them.
            result = subject.verify(bad, layout, uniforms=fixed(COUNT, max(request.n for request in whole)))
            for index, request in enumerate(bad):
                status, stood = int(result.status[index]), int(result.num_accepted[index])
                at = f"{layout}, request {index} of {kind}"
                if request.key % 2 == 0:
                    require(status == Status.OK, f"{at}: its rows are sound, but its status is {status}")
                    continue
                if status == Status.OK:
                    sound = stood < _first_bad(request)
                    require(sound, f"{at}: expected a status, got 0 and {tokens(result, index)}")
                    continue
                row, drafted = result.output_token_ids[index].tolist(), request.ids[:stood].tolist()
                kept = row[:stood] == drafted and int(result.num_emitted[index]) == stood
                require(kept, f"{at}: {stood} accepted, {int(result.num_emitted[index])} emitted, of {row}")
                padded = all(token == PLACEHOLDER_TOKEN_ID for token in row[stood:])
                require(padded, f"{at}: expected -1 after {stood} tokens, got {row}")


def _first_bad(request: Request) -> int:
    """Return the first row without a law of a request with an odd key: its first, or its second by turns."""
    return request.key % 4 // 2


def check_token_outside_vocabulary(subject: Subject) -> None:
    """A drafted id of V or more marks its request there and is never emitted; its neighbours are untouched.

    Catches reads out of bounds, and a tie in the padded tail of a row that emits an id beyond V (GHSA-8wr5-jm2h-8r4f).
    """
    good = mixed(COUNT)
    bad = [request.copy() for request in good]
    marked = [index for index, request in enumerate(bad) if request.n and index % 2]
    for index in marked:
        bad[index].ids[0] = VOCABULARY + index * 1000
    rest = [index for index in range(COUNT) if index not in marked]
    for layout in ("padded", "ragged"):
        result = subject.verify(bad, layout)
        for index in marked:
            status, row = int(result.status[index]), result.output_token_ids[index].tolist()
            require(status != Status.OK, f"{layout}, request {index}: expected a status, got 0 and {row}")
            require(max(row) < VOCABULARY, f"{layout}, request {index}: emitted {row}, vocabulary {VOCABULARY}")
        same(result, subject.verify(good, layout), rest, rest, what=f"{layout}, beside an id outside and without")


def check_decreasing_counts(subject: Subject) -> None:
    """A count below 0 marks the requests on both sides of its bound, and changes no other.

    Catches bounds that are put in order, so that tokens are verified against another request's rows.
    """
    requests = mixed(COUNT)
    keys, given = range(COUNT), lay_out(requests, "ragged")
    wanted = subject.call(keys, **given, rng=streams(keys))
    cu = given["cu_num_draft_tokens"].clone()
    cu[5] = cu[4] - 1
    result = subject.call(keys, **{**given, "cu_num_draft_tokens": cu}, rng=streams(keys))
    marked = [4, 5]
    found = result.status[marked].tolist()
    require(
        found == [INVALID_COUNT] * 2, f"counts {cu.diff().tolist()}: expected status {INVALID_COUNT} twice, got {found}"
    )
    rest = [key for key in keys if key not in marked]
    same(result, wanted, rest, rest, what="beside a count below 0 and without")


def check_nan_in_draft_is_zero(subject: Subject) -> None:
    """NaN in the draft's rows is 0, at the drafted token and elsewhere.

    Catches NaN in q that makes every comparison false and the rejected token the argmax of its own residual.
    """
    poisoned, zeroed = [], []
    for request in mixed(COUNT):
        assert request.q is not None  # noqa: S101 - `mixed` gives every request draft rows
        where = torch.rand(request.q.shape, generator=generator(request.key)) < 0.3  # noqa: PLR2004 - a third
        if request.n:
            where[0, request.ids[0]] = request.key % 2 == 0
        poisoned.append(replace(request, q=request.q.masked_fill(where, torch.nan)))
        zeroed.append(replace(request, q=request.q.masked_fill(where, 0.0)))
    for layout in ("padded", "ragged"):
        one, other = (subject.verify(requests, layout) for requests in (poisoned, zeroed))
        same(one, other, what=f"{layout}, NaN and 0 in the draft's rows")


def check_larger_target_vocabulary(subject: Subject) -> None:
    """A target vocabulary larger than the draft's: q is padded with zeros, and no target mass is dropped.

    Catches min(target V, draft V), which drops the target's mass beyond the draft's vocabulary.
    """
    whole = mixed(COUNT)
    narrow, wide = [], []
    for request in whole:
        assert request.q is not None  # noqa: S101 - as above
        q = request.q[:, :-3] / request.q[:, :-3].sum(-1, keepdim=True)
        ids = request.ids.clamp(max=VOCABULARY - 4)
        # Most of the target's mass lies beyond the draft's vocabulary.
        p = torch.cat((request.p[:, :-3] * 0.1, request.p[:, -3:] + 0.5), -1)
        p = p / p.sum(-1, keepdim=True)
        narrow.append(replace(request, ids=ids, p=p, q=q))
        wide.append(replace(request, ids=ids, p=p, q=torch.nn.functional.pad(q, (0, 3))))
    for layout in ("padded", "ragged"):
        one, other = (subject.verify(requests, layout) for requests in (narrow, wide))
        same(one, other, what=f"{layout}, narrow draft rows and the same padded with zeros")


def check_wide_flat_rows(subject: Subject) -> None:
    """A row as wide as a model's, and flat, gets a token wherever its request stops.

    Catches a residual whose weights add up to more the wider a row is, like sqrt(p): a draw takes at most 4 in all, so
    that requests of a small vocabulary are served and a model's are marked.
    """
    request = ordinary(2, WIDE, 0)
    assert request.q is not None  # noqa: S101 - `ordinary` gives it rows
    request.ids[:] = torch.tensor([0, 2])
    request.p[:] = 1 / WIDE
    request.q[:] = torch.where(torch.arange(WIDE) % 2 == 0, 2 / WIDE, 0.0)
    for draft in (True, False):
        for u in (0.0, ALMOST_ONE):
            result = subject.verify([request], draft=draft, uniforms=fixed(1, 2, u, 1))
            status = int(result.status[0])
            where = f"{'with' if draft else 'without'} draft rows, u = {u}, V = {WIDE}"
            require(status == Status.OK, f"{where}: expected a token and status 0, got status {status}")
