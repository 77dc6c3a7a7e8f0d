"""What sampling parameters do to rows before a rule sees them, and the log-probabilities that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.nn import functional

from acceptlib.result import INVALID_PARAMETER, VerifyResult
from acceptlib.sampling import LogitBias, SamplingParams, pack_bitmask
from acceptlib.testing.batches import COUNT, VOCABULARY, Request, generator, lay_out, mixed, same, streams, tokens
from acceptlib.testing.subject import Subject, require

WIDE: Final = 45
"""Entries of rows with a bitmask, which has two words then."""
MOST: Final = 0.6
"""Share of a row that a mask allows."""
KINDS: Final = ("top-k", "strict top-p", "top-p", "strict min-p", "min-p", "ban", "bias", "mask", "another mask")
"""Of filters, one for each request."""


def check_temperature(subject: Subject) -> None:
    """Temperature acts on every row of its request: as logits scaled beforehand, and 0 as one-hot rows.

    The draft's rows have a temperature of their own where one is given, and one out of range marks its request.
    Catches sampling parameters that verification leaves out (vllm#9834), applies to the batch's first request, or
    forgets on the bonus row or on the draft's rows.
    """
    requests, keys = mixed(COUNT), range(COUNT)
    scales = [(0.5, 2.0, 1.0, 4.0)[key % 4] for key in keys]  # powers of two change no digit of a logit
    own, bad = [scales[-1], *scales[:-1]], [(1.0, -0.5, torch.nan)[key % 3] for key in keys]
    cold = [float(key % 2) for key in keys]
    even, odd = list(keys)[::2], list(keys)[1::2]
    for layout in ("padded", "ragged"):
        plain = _logits(requests, [1.0] * COUNT, layout)
        sampling = SamplingParams(temperature=torch.tensor(scales))
        one = subject.call(keys, **plain, sampling=sampling, rng=streams(keys))
        other = subject.call(keys, **_logits(requests, scales, layout), rng=streams(keys))
        same(one, other, what=f"{layout}, temperatures and logits scaled by them")
        for_draft = SamplingParams(temperature=torch.tensor(own))
        one = subject.call(keys, **plain, sampling=sampling, draft_sampling=for_draft, rng=streams(keys))
        other = subject.call(keys, **_logits(requests, scales, layout, own), rng=streams(keys))
        same(one, other, what=f"{layout}, temperatures of each model and logits scaled by them")
        found = subject.call(keys, **plain, sampling=SamplingParams(temperature=torch.tensor(cold)), rng=streams(keys))
        hard = subject.verify([_one_hot(request) for request in requests], layout)
        same(found, hard, even, even, what=f"{layout}, temperature 0 and one-hot rows")
        warm = subject.call(keys, **plain, rng=streams(keys))
        same(found, warm, odd, odd, what=f"{layout}, temperature 1 beside requests of temperature 0 and without them")
        found = subject.call(keys, **plain, sampling=SamplingParams(temperature=torch.tensor(bad)), rng=streams(keys))
        good = [key for key in keys if bad[key] == 1]
        same(found, warm, good, good, what=f"{layout}, temperature 1 beside requests of none that makes sense")
        status, wanted = found.status.tolist(), [0 if key in good else INVALID_PARAMETER for key in keys]
        require(status == wanted, f"{layout}, temperatures {bad}: expected status {wanted}, got {status}")


def _logits(
    requests: Sequence[Request], scales: Sequence[float], layout: str, own: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return the arguments for logits of each request divided by its scale, or for the draft by `own` if given."""
    logits = [
        replace(request, p=request.p.log() / scale, q=None if request.q is None else request.q.log() / own_scale)
        for request, scale, own_scale in zip(requests, scales, own or scales, strict=True)
    ]
    return _given_as_logits(logits, layout)


def _given_as_logits(logits: Sequence[Request], layout: str) -> dict[str, Any]:
    """Return the arguments for requests whose rows are logits."""
    return {name.replace("_probs", "_logits"): value for name, value in lay_out(logits, layout).items()}


def _one_hot(request: Request) -> Request:
    p = functional.one_hot(request.p.argmax(-1), VOCABULARY).float()
    q = None if request.q is None else functional.one_hot(request.q.argmax(-1), VOCABULARY).float()
    return replace(request, p=p, q=q)


def check_filters(subject: Subject) -> None:
    """Top-k, top-p, min-p, bias and bitmask act on every row of their request: as on the logits beforehand.

    The draft's rows have filters of their own where they are given; each row has its own mask. One number for all
    requests acts as one for each. Catches parameters that verification leaves out (vllm#9834), so that a token stands
    or is drawn that the target may not emit, a grammar's mask that is not applied to the bonus row (vllm#44297), and a
    draft's law that is not the one its tokens were drawn under.
    """
    # All in one call, each for every ninth request, because a GPU takes seconds to compile for a form of call.
    count = len(KINDS) if subject.interpreted else 4 * len(KINDS)
    requests, keys = mixed(count, WIDE), range(count)
    key = torch.arange(count)
    of_target, of_draft = _Filters(key % len(KINDS)), _Filters((key + 1) % len(KINDS))
    flags = torch.rand(count, 1 + max(request.n for request in requests), WIDE, generator=generator(9))
    allowed = (flags < MOST) | ~of_target.masked[:, None, None]
    words = pack_bitmask(allowed)
    bitmasks = {"padded": words, "ragged": torch.cat([words[request.key, : request.n + 1] for request in requests])}
    plain = {layout: lay_out(requests, layout, "logits") for layout in bitmasks}
    for name, own in (("the same for both models", of_target), ("of each model", of_draft)):
        beforehand = []
        for request in requests:
            p = of_target.applied(request.p, request.key)
            p = p.where(allowed[request.key, : request.n + 1], -torch.inf)  # the mask is for the target alone
            q = None if request.q is None else own.applied(request.q, request.key)
            beforehand.append(replace(request, p=p, q=q))
        for layout, bitmask in bitmasks.items():
            sampling = replace(of_target.sampling, allowed_token_bitmask=bitmask)
            further = {} if own is of_target else {"draft_sampling": own.sampling}
            one = subject.call(keys, **plain[layout], sampling=sampling, **further, rng=streams(keys))
            other = subject.call(keys, **_given_as_logits(beforehand, layout), rng=streams(keys))
            same(one, other, what=f"{layout}, parameters {name} and logits processed beforehand")
    numbers: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.3}
    for name, number in numbers.items():
        dtype = torch.int64 if name == "top_k" else torch.float64
        of_all: dict[str, Any] = {name: number}
        of_each: dict[str, Any] = {name: torch.full((count,), number, dtype=dtype)}
        one, other = (
            subject.call(keys, **plain["ragged"], sampling=SamplingParams(**given), rng=streams(keys))
            for given in (of_all, of_each)
        )
        same(one, other, what=f"{name} = {number} for all and for each")


class _Filters:
    """One kind of filter for each request, and what it makes of rows."""

    def __init__(self, kind: torch.Tensor) -> None:
        """Take an index into `KINDS` for each request, [B]."""

        def of(name: str, value: float, others: float | torch.Tensor) -> torch.Tensor:
            return torch.where(kind == KINDS.index(name), value, others)

        self.top_k = of("top-k", 3, 0)
        self.top_p = of("strict top-p", 1e-6, of("top-p", 0.5, 1.0))
        self.min_p = of("strict min-p", 1.0, of("min-p", 0.3, 0.0))
        bias, token = of("ban", -torch.inf, of("bias", 1.5, 0.0)), torch.arange(len(kind))
        self.bias, self.biased = torch.stack((bias, -bias.clamp(min=-2.0)), 1), bias != 0
        self.ids = torch.stack((token % WIDE, (7 * token + 3) % WIDE), 1)
        self.masked = kind >= KINDS.index("mask")
        self.sampling = SamplingParams(
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            logit_bias=LogitBias(torch.where(self.biased[:, None], self.ids, -1), self.bias),
        )

    def applied(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Return the logits of a request's rows [n, V] of probabilities, filtered."""
        ordered, order = rows.double().sort(-1, descending=True)
        kept = (ordered.cumsum(-1) - ordered < self.top_p[index]) & (ordered >= self.min_p[index] * ordered[..., :1])
        kept &= torch.arange(WIDE) < (int(self.top_k[index]) or WIDE)
        logits = rows.log().where(torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)
        if self.biased[index]:
            logits[..., self.ids[index]] += self.bias[index]
        return logits


def check_parameters_out_of_range(subject: Subject) -> None:
    """A top-k, top-p or min-p out of range marks its request, and no other one.

    Catches a value that is quietly replaced by the nearest one that makes sense: a caller that counts on its filter has
    none. Temperatures are looked at in `temperature`.
    """
    requests, keys = mixed(COUNT), range(COUNT)
    cases = {
        "top_k": ((5, -1, 0), torch.int64),
        "top_p": ((0.5, 0.0, 1.0, 1.5, torch.nan), torch.float64),
        "min_p": ((0.25, -0.125, 0.0, 1.125, torch.nan), torch.float64),
    }
    for name, (values, dtype) in cases.items():
        given = [values[key % len(values)] for key in keys]
        good = [key for key in keys if key % len(values) in {0, 2}]
        sound = [value if key in good else values[0] for key, value in zip(keys, given, strict=True)]
        one, other = (
            subject.verify(
                requests,
                "ragged",  # as where `filters` has one parameter alone: a GPU takes seconds to compile for it
                "logits",
                sampling=SamplingParams(**{name: torch.tensor(numbers, dtype=dtype)}),  # type: ignore[arg-type]
            )
            for numbers in (given, sound)
        )
        same(one, other, good, good, what=f"{name} beside some out of range and without")
        status, wanted = one.status.tolist(), [0 if key in good else INVALID_PARAMETER for key in keys]
        require(status == wanted, f"{name} = {given}: expected status {wanted}, got {status}")


def check_logprobs(subject: Subject) -> None:
    """Log-probabilities are the target's, of accepted, recovered and bonus tokens alike, and NaN behind them.

    Those in `raw_logprobs` are from before temperature. Catches those of the draft's row, of the row before, stale ones
    behind the stop, and raw ones that are processed.
    """
    requests = mixed(5 if subject.interpreted else COUNT)  # one of every length
    logs = [request.p.log() for request in requests]
    warm = [(rows / 2).log_softmax(-1) for rows in logs]
    sampling = SamplingParams(temperature=torch.full((len(requests),), 2.0))
    cases: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {
        "probs": ({}, logs),
        "logits": ({"sampling": sampling}, warm),
    }
    for layout in ("padded", "ragged"):
        for form, (further, processed) in cases.items():
            where = f"{layout}, {form}"
            result = subject.verify(requests, layout, form, logprobs=True, **further)
            plain = subject.verify(requests, layout, form, **further)
            without = replace(result, logprobs=None, raw_logprobs=None)
            same(without, plain, what=f"{where}, with log-probabilities and without")
            for name, rows in (("logprobs", processed), ("raw_logprobs", logs)):
                _expect_logprobs(result, name, rows, where)


def _expect_logprobs(result: VerifyResult, name: str, rows: Sequence[torch.Tensor], where: str) -> None:
    """Expect log-probabilities of the emitted tokens to be entries of each request's rows [n+1, V]."""
    found = getattr(result, name)
    require(found is not None, f"{where}: expected {name}, got None")
    for index, row in enumerate(rows):
        at, emitted = f"{where}, request {index}", tokens(result, index)
        wanted = row[torch.arange(len(emitted)), emitted]
        close = torch.allclose(found[index, : len(emitted)].cpu(), wanted, rtol=1e-5, atol=1e-6)
        require(close, f"{at}: expected {name} {wanted.tolist()}, got {found[index].tolist()}")
        behind = bool(found[index, len(emitted) :].isnan().all())
        require(behind, f"{at}: expected NaN after {len(emitted)} {name}, got {found[index].tolist()}")
