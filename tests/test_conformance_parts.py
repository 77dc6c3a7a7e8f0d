"""Each part of a check: wrong engines and rules that this part alone would see, by what it says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import conformance_mutants  # noqa: F401 - its mutants join the list
import pytest
import torch
from engine_mutants import Bug, Call, Wrapped
from rule_mutants import MUTANTS, UNBOUNDED, take_uniforms
from state_mutants import Share, Stepped

from acceptlib import AcceptanceStrategy, Rng, SamplingParams, Traits, VerifyResult, ops, rule
from acceptlib.errors import ConformanceError
from acceptlib.ops import Value
from acceptlib.strategies.block import Block
from acceptlib.strategies.greedy import Greedy
from acceptlib.strategies.lenience import Lenience
from acceptlib.strategies.rejection import Rejection
from acceptlib.testing import check_strategy
from acceptlib.testing.batches import ordinary, same

Arguments = dict[str, Any]


def message(check: str, strategy: AcceptanceStrategy) -> str:
    """Return what a check says of a strategy that fails it."""
    (result,) = check_strategy(strategy, only=[check], raises=False)
    assert result.status == "failed"
    return result.message


def around(bug: Bug, inner: type[AcceptanceStrategy] = Rejection, traits: Traits = UNBOUNDED) -> AcceptanceStrategy:
    return Wrapped(bug, inner(), traits)


# Forms of a call

FORMS: dict[str, Callable[[Arguments], bool]] = {
    "padded": lambda given: given.get("cu_num_draft_tokens") is None,
    "ragged": lambda given: given.get("cu_num_draft_tokens") is not None,
    "without draft rows": lambda given: given.get("draft_probs") is None and given.get("draft_logits") is None,
    "probabilities": lambda given: given.get("target_probs") is not None,
    "logits": lambda given: given.get("target_logits") is not None,
}

BOTH_LAYOUTS = [
    "emits-of-bad-rows",
    "clamps-ids",
    "nan-is-certain",
    "cuts-target",
    "long-ids",
    "reversed-chain",
    "counts-the-bonus",
    "pads-with-zero",
    "only-minus-one",
    "bonus-instead-of-recovered",
    "half-is-bfloat16",
    "stale-logprobs",
    "keyed-by-batch-row",
    "one-fails-all",
    "assumes-contiguous",
    "spends-state",
    "fresh-result",
    "totals-of-one-call",
    "forgets-sampling",
    "forgets-filters",
    "other-numbers",
    "advances-by-drafts",
    "advances-what-stays",
    "asks-for-the-status",
]
IN_FORM = [
    *((name, form) for name in BOTH_LAYOUTS for form in ("padded", "ragged")),
    *(
        (name, "without draft rows")
        for name in ("long-ids", "reversed-chain", "counts-the-bonus", "pads-with-zero", "row-of-ragged")
    ),
    ("asks-for-the-status", "without draft rows"),
    *((name, form) for name in ("stale-logprobs", "spends-state") for form in ("probabilities", "logits")),
]


@pytest.mark.parametrize(("name", "form"), IN_FORM)
def test_a_bug_in_one_form_of_call_is_seen(name: str, form: str) -> None:
    """Of both layouts, of calls without draft rows, and of probabilities beside logits."""
    mutant = MUTANTS[name].make()
    assert isinstance(mutant, Wrapped)
    bug, holds = mutant.bug, FORMS[form]
    mutant.bug = lambda verify, ids, given: bug(verify, ids, given) if holds(given) else verify(ids, **given)
    message(MUTANTS[name].check, mutant)


# Wrong engines


def _with(change: Callable[[Arguments], Arguments]) -> Bug:
    """Return an engine that is given other arguments."""
    return lambda verify, ids, given: verify(ids, **{**given, **change(given)})


def _after(change: Callable[[VerifyResult, torch.Tensor, Arguments], object]) -> Bug:
    """Return an engine that does something after each call, which may return another result."""

    def bug(verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
        result = verify(ids, **given)
        found = change(result, ids, given)
        return found if isinstance(found, VerifyResult) else result

    return bug


def _refuses(holds: Callable[[torch.Tensor, Arguments], bool]) -> Bug:
    """Return an engine that takes some calls for errors."""

    def bug(verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
        if holds(ids, given):
            msg = "not in this form"
            raise TypeError(msg)
        return verify(ids, **given)

    return bug


def _of_uniforms(change: Callable[[torch.Tensor], torch.Tensor]) -> Bug:
    """Return an engine with other uniforms of acceptance."""

    def bug(verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
        uniforms = take_uniforms(ids, given)
        return verify(ids, **given, uniforms=replace(uniforms, accept=change(uniforms.accept)))

    return bug


def _of_streams(change: Callable[[Rng], tuple[torch.Tensor, torch.Tensor]]) -> Bug:
    """Return an engine that draws from other streams, and advances those that it was given."""

    def bug(verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
        rng = given.get("rng")
        if not isinstance(rng, Rng):
            return verify(ids, **given)
        seeds, offsets = change(rng)
        result = verify(ids, **{**given, "rng": Rng(seeds=seeds, offsets=offsets.clone())})
        rng.offsets.add_(int(rng.advances))
        return result

    return bug


def _of_sampling(**change: Callable[[Any], Any]) -> Bug:
    """Return an engine with other sampling parameters, where they are given."""

    def changed(given: Arguments) -> Arguments:
        sampling = given.get("sampling")
        if sampling is None:
            return {}
        values = {name: getattr(sampling, name) for name in change}
        return {
            "sampling": replace(sampling, **{n: change[n](value) for n, value in values.items() if value is not None})
        }

    return _with(changed)


def _taken_for(name: str, value: float, other: float) -> Bug:
    """Return an engine that takes one value of a sampling parameter for another."""

    def change(given: torch.Tensor) -> torch.Tensor:
        return given.masked_fill(given.isnan() if math.isnan(value) else given == value, other)

    return _of_sampling(**{name: change})


def _rows(given: Arguments, model: str) -> torch.Tensor | None:
    rows: torch.Tensor | None = given.get(f"{model}_probs")
    return rows


def _of_rows(change: Callable[[torch.Tensor], torch.Tensor], model: str = "target") -> Bug:
    """Return an engine that reads other probabilities of a model."""

    def changed(given: Arguments) -> Arguments:
        rows = _rows(given, model)
        return {} if rows is None else {f"{model}_probs": change(rows)}

    return _with(changed)


def _packed(value: Any) -> Any:
    """Return what lies in memory where a contiguous tensor of this shape would."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.as_strided(value, value.shape, torch.empty(value.shape, device="meta").stride())


def _as_long(name: str) -> Bug:
    return _after(lambda result, _, given: None if given.get("out") else replace(result, **_long(result, name)))


def _long(result: VerifyResult, name: str) -> dict[str, Any]:
    return {name: getattr(result, name).long()}


def _writes(name: str) -> Bug:
    """Return an engine that writes into an argument."""
    return _after(lambda _result, _ids, given: given[name].zero_() if given.get(name) is not None else None)


def _put(result: VerifyResult, where: torch.Tensor, token: int) -> None:
    """Put a token in the place of the last one that is emitted, for some requests."""
    last = (result.num_emitted.long() - 1).clamp(min=0)[:, None]
    ids = result.output_token_ids
    ids.scatter_(1, last, torch.where(where[:, None], token, ids.gather(1, last)))


def _num_drafted(ids: torch.Tensor, given: Arguments) -> torch.Tensor:
    cu = given.get("cu_num_draft_tokens")
    return (ids >= 0).sum(1) if cu is None else cu.diff()


def _emits_at(bits: int) -> Bug:
    """Return an engine that emits the last id of the vocabulary for certain bits of the draw."""

    def change(result: VerifyResult, _ids: torch.Tensor, given: Arguments) -> None:
        if given.get("uniforms") is not None:
            _put(result, given["uniforms"].emit == bits, 10)

    return _after(change)


def _empty_residual_is_last(result: VerifyResult, ids: torch.Tensor, given: Arguments) -> None:
    p, q = _rows(given, "target"), _rows(given, "draft")
    if p is None or q is None or ids.ndim == 1:
        return
    left = torch.cat(((p[:, :-1] - q).clamp(min=0).sum(-1), torch.ones(len(p), 1)), 1)
    _put(result, left.gather(1, result.num_accepted[:, None].long())[:, 0] == 0, 10)


def _replaced_out(result: VerifyResult, _ids: torch.Tensor, given: Arguments) -> None:
    if given.get("out") is not None:
        object.__setattr__(result, "output_token_ids", result.output_token_ids.clone())


def _shifts_alone(result: VerifyResult, ids: torch.Tensor, _given: Arguments) -> None:
    """Of a batch without any draft, another possible token is emitted."""
    if not ids.numel():
        token = result.output_token_ids
        token.copy_(torch.where(token == 9, 1, token + 2))


def _later_are_0(verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
    """From a request's third id on, a negative one is 0, in the ragged layout."""
    if FORMS["ragged"](given):
        starts = given["cu_num_draft_tokens"]
        early = torch.isin(torch.arange(len(ids)), torch.cat((starts, starts + 1)))
        ids = torch.where(early, ids, ids.clamp(min=0))
    return verify(ids, **given)


def _marks_nan(result: VerifyResult, given: Arguments) -> None:
    if given["target_probs"].isnan().any():
        result.output_token_ids.fill_(-1)
        result.num_emitted.zero_()


def _drops_what_stood(result: VerifyResult, _ids: torch.Tensor, _given: Arguments) -> None:
    result.output_token_ids.masked_fill_((result.status != 0)[:, None], -1)
    result.num_emitted.masked_fill_(result.status != 0, 0)


def _emits_while_marked(result: VerifyResult, _ids: torch.Tensor, _given: Arguments) -> None:
    result.output_token_ids[:, 0] = torch.where(result.status != 0, 999, result.output_token_ids[:, 0])


def _nan_of(where: str) -> Bug:
    """Return an engine that takes NaN at drafted tokens, or elsewhere, for 1/2."""

    def bug(verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
        q = _rows(given, "draft")
        if q is None:
            return verify(ids, **given)
        drafted = torch.nn.functional.one_hot(ids.clamp(0, q.shape[-1] - 1), q.shape[-1]).bool()
        here = drafted if where == "drafted" else ~drafted
        return verify(ids, **{**given, "draft_probs": torch.where(here & q.isnan(), 0.5, q)})

    return bug


def _marks_wide(holds: Callable[[VerifyResult, Arguments], torch.Tensor]) -> Bug:
    """Return an engine that marks requests of wide rows."""

    def change(result: VerifyResult, _ids: torch.Tensor, given: Arguments) -> None:
        if (rows := _rows(given, "target")) is not None and rows.shape[-1] > 9999:
            result.status.masked_fill_(holds(result, given), 1)

    return _after(change)


def _row_keyed_later(verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
    """From a request's second step on, its stream is keyed by the batch row."""
    return _of_streams(lambda rng: (rng.seeds + torch.arange(len(rng.seeds)) * (rng.offsets > 0) * 4096, rng.offsets))(
        verify, ids, given
    )


def _reads_last_width(kept: dict[str, int], verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
    """A workspace holds the width of the call before."""
    rows = _rows(given, "target")
    width = 0 if rows is None else rows.shape[-1]
    before, kept["width"] = kept.get("width", width), width
    return _of_streams(lambda rng: (rng.seeds + int(before > width), rng.offsets))(verify, ids, given)


def _waits_when_marking(result: VerifyResult, _ids: torch.Tensor, _given: Arguments) -> None:
    if result.status.numpy().any():
        result.status.tolist()


def _larger_draws_other(rng: Rng, given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    cu = given.get("cu_num_draft_tokens")
    more = cu is not None and given["max_num_draft_tokens"] > int(cu.diff().max())
    return rng.seeds + int(more), rng.offsets


ENGINES: dict[str, dict[str, tuple[Bug, str]]] = {
    "result_types": {
        **{f"{name} of int64": (_as_long(name), f"expected {name}") for name in ("num_accepted", "num_emitted")},
        "status of int64": (_as_long("status"), "expected status"),
        "log-probabilities unasked": (
            _after(lambda result, _, given: replace(result, logprobs=result.status.float()) if given else None),
            "were not asked for",
        ),
    },
    "counts": {
        "one less": (_after(lambda result, *_: result.num_accepted.sub_(1)), "num_accepted is -1"),
        "one more emitted": (_after(lambda result, *_: result.num_emitted.add_(1)), "num_emitted is"),
        "sound rows marked": (_after(lambda result, *_: result.status.add_(1)), "status of sound rows is"),
    },
    "nothing_drafted": {
        "an impossible token": (
            _after(lambda result, *_: result.output_token_ids.clamp_(max=0)),
            "expected one token of the bonus row",
        ),
        "an impossible token in the ragged layout": (
            _after(lambda result, _, given: result.output_token_ids.clamp_(max=0) if FORMS["ragged"](given) else None),
            "ragged, request 0: expected one token of the bonus row",
        ),
        "another one alone": (_after(_shifts_alone), "among others"),
    },
    "placeholder_ends_chain": {
        "-1 is the last id": (
            lambda verify, ids, given: verify(torch.where(ids == -1, 10, ids), **given),
            "id -1",
        ),
        "third ones are 0": (_later_are_0, "ragged"),
        "rows behind are read": (
            _after(lambda result, _, given: _marks_nan(result, given) if FORMS["ragged"](given) else None),
            "ragged, id -1",
        ),
    },
    "forms_of_a_call": {
        "counts of int64": (
            _refuses(lambda _, given: given["cu_num_draft_tokens"].dtype == torch.int64),
            "TypeError",
        ),
        "ids of int32": (_refuses(lambda ids, _: ids.dtype == torch.int32), "TypeError"),
        "no bonus rows": (_refuses(lambda ids, given: len(ids) == len(given["target_probs"])), "TypeError"),
        "a result of int64": (_refuses(lambda _, given: given.get("out") is not None), "TypeError"),
        "one seed": (
            _with(lambda given: {"rng": 7} if isinstance(given.get("rng"), int) else {}),
            "rng=8 and the streams that it gives",
        ),
    },
    "half_precision": {
        **{
            f"{dtype}": (_refuses(lambda _, given, dtype=dtype: given["target_probs"].dtype == dtype), "TypeError")  # type: ignore[misc]
            for dtype in (torch.bfloat16, torch.float16)
        },
        "draft rows": (_refuses(lambda _, given: given["draft_probs"].dtype != torch.float32), "TypeError"),
        "ids of int32": (_refuses(lambda ids, _: ids.dtype == torch.int32), "TypeError"),
    },
    "neighbours": {
        "a larger K": (
            lambda verify, ids, given: _of_streams(lambda rng: _larger_draws_other(rng, given))(verify, ids, given),
            "a larger max_num_draft_tokens",
        ),
    },
    "strides": {
        **{
            name: (_with(lambda given, name=name: {name: _packed(given.get(name))}), "strided and contiguous")  # type: ignore[misc]
            for name in ("draft_probs", "draft_logits", "target_logits", "bonus_token_ids", "cu_num_draft_tokens")
        },
        "ids": (lambda verify, ids, given: verify(_packed(ids), **given), "strided and contiguous"),
        "temperature": (_of_sampling(temperature=_packed), "strided and contiguous"),
        "uniforms": (
            _with(
                lambda given: (
                    {"uniforms": replace(given["uniforms"], accept=_packed(given["uniforms"].accept))}
                    if given.get("uniforms")
                    else {}
                )
            ),
            "strided and contiguous",
        ),
    },
    "inputs_unmodified": {
        **{
            name: (_writes(name), f"{name} was written")
            for name in ("target_probs", "draft_probs", "draft_logits", "cu_num_draft_tokens", "bonus_token_ids")
        },
        "ids": (_after(lambda _, ids, __: ids.zero_() if ids.numel() > 1 else None), "was written"),
        "seeds": (_after(lambda _, __, given: given["rng"].seeds.add_(1)), "seeds was written"),
        "temperature": (
            _after(lambda _, __, given: given["sampling"].temperature.add_(1) if given.get("sampling") else None),
            "sampling.temperature was written",
        ),
    },
    "out_is_overwritten": {
        "a copy": (_after(lambda result, *_: replace(result)), "the very `out`"),
        "other tensors": (_after(_replaced_out), "were replaced"),
    },
    "totals": {
        "other tokens": (
            lambda verify, ids, given: verify(ids, **({**given, "rng": 5} if given.get("out") else given)),
            "with totals and without",
        ),
    },
    "poisoned_memory": {
        "minus one": (
            lambda verify, ids, given: verify(
                ids, **({**given, "rng": 5} if int(torch.empty((), dtype=torch.int64)) == -1 else given)
            ),
            "0xff",
        ),
        "the call before": (partial(_reads_last_width, {}), "fresh memory"),
    },
    "decisions_follow_rules": {
        "u rounded up": (_of_uniforms(lambda u: ((u * 8192).ceil() / 8192).clamp(max=1 - 2**-53)), "u just below h"),
        "u rounded down": (_of_uniforms(lambda u: (u * 8192).floor() / 8192), "u just above h"),
    },
    "drawn_token_is_possible": {
        **{f"bits {bits}": (_emits_at(bits), f"bits = {bits}") for bits in (0, 1, -1, 2**63 - 1, -(2**63))},
        "an empty residual": (_after(_empty_residual_is_last), "emitted"),
        "a bonus token": (
            _after(lambda result, ids, given: _put(result, result.num_accepted == _num_drafted(ids, given), 10)),
            "u = 0.0",
        ),
    },
    "invalid_row_marks_request": {
        "NaN": (_of_rows(lambda rows: rows.nan_to_num(nan=1 / 11)), "of NaN"),
        "zeros": (_of_rows(lambda rows: rows.where(rows.sum(-1, keepdim=True) != 0, 1 / 11)), "of zeros"),
        "infinity": (_of_rows(lambda rows: rows.where(~rows.isinf(), 1 / 11)), "of infinity"),
        "nobody hears of it": (_after(lambda result, *_: result.status.zero_()), "expected a status"),
        "what stood is lost": (_after(_drops_what_stood), "accepted, 0 emitted"),
    },
    "token_outside_vocabulary": {"emitted while marked": (_after(_emits_while_marked), "emitted")},
    "decreasing_counts": {
        "one of two": (
            _after(lambda result, *_: result.status[5:6].zero_()),
            "twice",
        ),
    },
    "nan_in_draft_is_zero": {
        "at drafted tokens": (_nan_of("drafted"), "NaN and 0"),
        "elsewhere": (_nan_of("elsewhere"), "NaN and 0"),
    },
    "wide_flat_rows": {
        "without draft rows": (
            _marks_wide(lambda result, given: (result.status == 0) & (_rows(given, "draft") is None)),
            "without draft rows",
        ),
        "recovered": (_marks_wide(lambda result, _: result.num_accepted < 2), f"u = {1 - 2**-53}"),
    },
    "no_host_synchronisation": {"when marking": (_after(_waits_when_marking), "tolist waits")},
    "state_of_each_request": {"keyed by the row in later steps": (_row_keyed_later, "the next step was")},
    "uniforms_of_stream": {
        "offsets of 32 bits": (_of_streams(lambda rng: (rng.seeds, rng.offsets & 0xFFFFFFFF)), "its uniforms"),
    },
    "own_seed": {"four seeds": (_of_streams(lambda rng: (rng.seeds & 3, rng.offsets)), "16 seeds drew")},
    "every_bit_of_stream": {
        "offsets of 32 bits": (_of_streams(lambda rng: (rng.seeds, rng.offsets & 0xFFFFFFFF)), "offset bit"),
        "either order": (
            _of_streams(lambda rng: (rng.seeds.minimum(rng.offsets), rng.seeds.maximum(rng.offsets))),
            "`seed and offset exchanged`",
        ),
    },
    "offsets_advance": {
        "not without drafts": (
            _after(lambda _, ids, given: given["rng"].offsets.sub_((_num_drafted(ids, given) == 0).long())),
            "after 1 calls",
        ),
        "not where marked": (
            _after(lambda result, _, given: given["rng"].offsets.sub_((result.status != 0).long())),
            "after 1 calls",
        ),
        "32 bits": (_after(lambda _, __, given: given["rng"].offsets.bitwise_and_(0xFFFFFFFF)), "offsets"),
        "seeds": (_after(lambda _, __, given: given["rng"].seeds.add_(1)), "the seeds were changed"),
    },
    "steps_differ": {
        "two steps at once": (
            _after(lambda _, __, given: given["rng"].offsets.add_(1) if isinstance(given["rng"], Rng) else None),
            "two steps of a stream",
        ),
    },
    "temperature": {
        "the target's alone": (
            _with(lambda given: {} if given.get("draft_sampling") else {"draft_sampling": SamplingParams()}),
            "temperatures and logits scaled by them",
        ),
        "one 0 is everybody's": (
            _of_sampling(temperature=lambda value: value * (value != 0).all()),
            "temperature 1 beside requests of temperature 0",
        ),
        "one that makes no sense is everybody's": (
            _of_sampling(temperature=lambda value: value.where(~value.isnan().any() | (value != 1), 2.0)),
            "beside requests of none that makes sense",
        ),
        "without its sign": (_of_sampling(temperature=torch.abs), "expected status"),
        "NaN is 1": (_of_sampling(temperature=lambda value: value.nan_to_num(1.0)), "expected status"),
    },
    "filters": {
        **{
            f"{name} as a number": (
                _of_sampling(**{name: lambda value: value if isinstance(value, torch.Tensor) else None}),
                f"{name} = ",
            )
            for name in ("temperature", "top_k", "top_p", "min_p")
        },
        "the target's alone": (
            _with(lambda given: {} if given.get("draft_sampling") else {"draft_sampling": SamplingParams()}),
            "the same for both models",
        ),
        "top-k": (
            _of_sampling(top_k=lambda value: 0 * value if isinstance(value, torch.Tensor) else value),
            "parameters",
        ),
        "a strict top-p": (
            _of_sampling(top_p=lambda value: torch.where(torch.as_tensor(value) < 0.01, 1.0, value)),
            "parameters",
        ),
        "a strict min-p": (
            _of_sampling(min_p=lambda value: torch.where(torch.as_tensor(value) > 0.9, 0.0, value)),
            "parameters",
        ),
    },
    "parameters_out_of_range": {
        **{
            f"{name} {value}": (
                _taken_for(name, value, off),
                f"{name} = ",
            )
            for name, value, off in (
                ("top_k", -1, 0),
                ("top_p", 0.0, 1.0),
                ("top_p", 1.5, 1.0),
                ("top_p", torch.nan, 1.0),
                ("min_p", -0.125, 0.0),
                ("min_p", 1.125, 1.0),
                ("min_p", torch.nan, 0.0),
            )
        },
        "one is everybody's": (
            _of_sampling(top_k=lambda value: value.where((value >= 0).all() | (value < 0), 1)),
            "top_k beside some out of range",
        ),
    },
    "logprobs": {
        "other tokens": (
            lambda verify, ids, given: verify(ids, **({**given, "rng": 5} if given.get("logprobs") else given)),
            "with log-probabilities and without",
        ),
        "of half precision": (
            _after(
                lambda result, *_: (
                    replace(result, logprobs=result.logprobs.bfloat16().float())
                    if result.logprobs is not None
                    else None
                )
            ),
            "expected logprobs",
        ),
    },
}
CASES = {f"{check}: {what}": (check, *case) for check, cases in ENGINES.items() for what, case in cases.items()}


@pytest.mark.parametrize(("check", "bug", "said"), CASES.values(), ids=CASES)
def test_a_wrong_engine_is_seen_by_the_part_for_it(check: str, bug: Bug, said: str) -> None:
    inner: type[AcceptanceStrategy] = Share if check == "state_of_each_request" else Rejection
    assert said in message(check, around(bug, inner, inner.traits if inner is Share else UNBOUNDED))


WAITS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "bool": (lambda x: bool(x.any()), "_local_scalar_dense"),
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "nonzero": (torch.nonzero, "nonzero"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "allclose": (lambda x: torch.allclose(x, x), "allclose"),
    "bincount": (torch.bincount, "bincount"),
    "unique": (torch.unique, "_unique2"),
    "unique rows": (lambda x: torch.unique(x[:, None], dim=0), "unique_dim"),
    "unique runs": (torch.unique_consecutive, "unique_consecutive"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x), "repeat_interleave"),
    "a mask": (lambda x: x[x > 0], "index with a mask"),
    "a mask of bytes": (lambda x: torch.ops.aten.index(x, [(x > 0).byte()]), "index with a mask"),
    "writing by a mask": (lambda x: x.clone().index_put_((x > 0,), x[:1]), "index_put_ with a mask"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "cpu": (lambda x: x.cpu(), "cpu"),
    "to": (lambda x: x.to("cpu"), "to"),
}


@pytest.mark.parametrize(("wait", "said"), WAITS.values(), ids=WAITS)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_every_way_to_wait_is_seen(wait: Callable[[torch.Tensor], object], said: str) -> None:
    bug = _after(lambda result, *_: wait(result.num_emitted))
    assert f"{said} wait" in message("no_host_synchronisation", around(bug))


# What calls are compared by


def compared(**change: Any) -> str:
    """Return what is said of two results of three requests, of which the second and third have other values."""
    made = VerifyResult.empty(3, 2, "cpu", logprobs=True)
    one = replace(made, **{name: torch.zeros_like(getattr(made, name)) for name in PARTS})
    try:
        same(one, replace(one, **{name: put(getattr(one, name)) for name, put in change.items()}), what="these")
    except ConformanceError as error:
        return str(error)
    return ""


PARTS = ("output_token_ids", "num_accepted", "num_emitted", "status", "logprobs", "raw_logprobs")


@pytest.mark.parametrize("name", PARTS)
def test_results_that_differ_in_one_part_are_told_apart(name: str) -> None:
    def other(value: torch.Tensor) -> torch.Tensor:
        return value + torch.tensor([0, 1, 1]).view(3, *[1] * (value.ndim - 1))

    assert f"these: {name} of request 1 differs" in compared(**{name: other})
    assert f"these: {name} is [3" in compared(**{name: lambda value: torch.cat((value, value))})
    assert compared(**{name: torch.clone}) == ""
    if name.endswith("logprobs"):
        assert f"only one has {name}" in compared(**{name: lambda _: None})


def test_requests_that_are_compared_are_called_by_their_own_numbers() -> None:
    """NaN is NaN, and the second result may have them in another order."""
    one, other = (VerifyResult.empty(3, 0, "cpu", logprobs=True) for _ in range(2))
    for index, result in enumerate((one, other)):
        for name in PARTS:
            getattr(result, name).copy_(torch.tensor([7, 8, 9]).roll(index).view(getattr(result, name).shape))
        for name in PARTS[-2:]:
            getattr(result, name)[:] = torch.nan
    same(one, other, to=[1, 2, 0])
    same(one, other, [2, 0], [0, 1])
    with pytest.raises(ConformanceError, match=r"output_token_ids of request 2 differs: \[9\] and \[7\]"):
        same(one, other, [0, 2], [1, 1])


def test_a_copied_request_may_be_changed() -> None:
    request = ordinary(2, 3, 0)
    before = [tensor.clone() for tensor in (request.ids, request.p, request.q)]
    copied = request.copy()
    for tensor in (copied.ids, copied.p, copied.q):
        tensor.add_(1)
    assert all(map(torch.equal, (request.ids, request.p, request.q), before))


# Wrong rules and states


class CertainDraftsStand(Rejection):
    """Of a draft that is certain of it, every token is accepted, possible or not."""

    name = "certain-drafts-stand"
    traits = UNBOUNDED

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where(draft_prob >= 1, 1.0, h)


class OverridesFromTheSecond(Rejection):
    """From the second position on, one token in ten is accepted whatever the target says."""

    name = "overrides-from-the-second"
    traits = UNBOUNDED

    @rule
    def accept(target_prob: Value, draft_prob: Value, position: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where(position >= 1, ops.maximum(h, 0.1), h)


class RejectsTheBest(Greedy):
    """One in a hundred of the target's argmaxes is rejected, and emitted all the same."""

    name = "rejects-the-best"

    @rule
    def accept(is_target_argmax: Value) -> Value:
        return ops.where(is_target_argmax, 0.99, 0.0)


class AcceptsNearestTies(Greedy):
    """A token that is as likely as the best, but for one part in two thousand, is accepted."""

    name = "accepts-nearest-ties"

    @rule
    def accept(is_target_argmax: Value, target_prob: Value, target_max_prob: Value) -> Value:
        near = (target_prob >= target_max_prob * (1 - 2**-11)) & (target_prob < target_max_prob)
        return ops.where(is_target_argmax | near, 1.0, 0.0)


class OneIsNewOtherwise(Share, Rejection):
    """A request that is new alone has another budget."""

    name = "one-is-new-otherwise"

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"budget": torch.full((num_requests,), 2 + (num_requests == 1), device=device)}


class TakesOfALargeK(Share, Rejection):
    """A budget falls by one more where K is larger than any draft."""

    name = "takes-of-a-large-k"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        larger = result.output_token_ids.shape[1] > 6
        state["budget"].sub_(result.num_accepted + larger)


class SwapsMemory(Stepped, Rejection):
    """A step gives the tensor other memory."""

    name = "swaps-memory"
    traits = replace(UNBOUNDED, state=("steps",))

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:  # noqa: ARG002
        state["steps"].data = state["steps"] + 1.0


class WritesInto(Share, Rejection):
    """A step is taken from the result too, from one of its parts."""

    name = "writes-into"

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.num_accepted).clamp_(min=0)
        getattr(result, self.part).add_(1)


class MoreThanOneAtTheMost(Stepped, Rejection):
    """Where every token of three steps stood, accept returns more than 1."""

    name = "more-than-one-at-the-most"

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["steps"].add_(result.num_accepted)

    @rule
    def accept(target_prob: Value, draft_prob: Value, steps: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where(steps >= 12, 2.0, h)


class DividesByTheLargest(Rejection):
    """The largest draft probability, which is 0 in a row of zeros, divides without a guard."""

    name = "divides-by-the-largest"
    traits = UNBOUNDED

    @rule
    def accept(target_prob: Value, draft_max_prob: Value) -> Value:
        return ops.minimum(target_prob / draft_max_prob, 1.0)


class WeighsTooMuch(Rejection):
    """The recovered token is drawn from weights that add up to 8."""

    name = "weighs-too-much"
    traits = UNBOUNDED

    @rule
    def residual(p: Value) -> Value:
        return 8.0 * p


class WeighsALittleTooMuch(Rejection):
    """So does one by a part in a thousand more than may be."""

    name = "weighs-a-little-too-much"
    traits = UNBOUNDED

    @rule
    def residual(p: Value) -> Value:
        return 4.004 * p


class NearlyCertain(Rejection):
    """Acceptance exceeds 1 by a billionth."""

    name = "nearly-certain"
    traits = UNBOUNDED

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        return ops.minimum(ops.ratio(target_prob, draft_prob), 1 + 1e-9)


class NearlyLossless(Rejection):
    """A token is accepted a billionth too often."""

    name = "nearly-lossless"

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        return ops.minimum(ops.ratio(target_prob, draft_prob) * (1 + 1e-9), 1.0)


class FallsWithMuchMass(Block):
    """Acceptance falls where the next row's residual mass is more than 2."""

    name = "falls-with-much-mass"
    traits = replace(UNBOUNDED, stop="last_acceptance")

    @rule
    def accept(carry: Value, next_residual_mass: Value) -> Value:
        return ops.where(next_residual_mass > 2, 0.5 * carry, carry)


class CarriesInVain(Block):
    """A carry that neither the acceptance nor the residual reads."""

    name = "carries-in-vain"
    traits = replace(UNBOUNDED, stop="last_acceptance")
    accept = Rejection.accept
    residual = Rejection.residual


def _knows_of_none(u: float) -> AcceptanceStrategy:
    """Return an engine with a uniform of its own where the draft gives its token no probability."""

    def bug(verify: Call, ids: torch.Tensor, given: Arguments) -> VerifyResult:
        uniforms, q = take_uniforms(ids, given), _rows(given, "draft")
        if q is None or ids.ndim == 1:
            return verify(ids, **given, uniforms=uniforms)
        none = q.gather(2, ids[..., None])[..., 0] == 0
        return verify(ids, **given, uniforms=replace(uniforms, accept=uniforms.accept.masked_fill(none, u)))

    return around(bug, Rejection, Rejection.traits)


def _samples(form: str) -> AcceptanceStrategy:
    """Return a greedy strategy that samples in one form of call."""
    holds = FORMS[form]
    return around(
        lambda verify, ids, given: Rejection().verify(ids, **given) if holds(given) else verify(ids, **given),
        Greedy,
        Greedy.traits,
    )


class RoundsUniforms(Lenience):
    """The rules are right, and the engine compares them with uniforms of two bits where there are draft rows."""

    name = "rounds-uniforms"
    without_rows = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.plan = Lenience(**self.options.model_dump()).plan  # a strategy with a `verify` of its own has none

    def verify(self, draft_token_ids: torch.Tensor, **arguments: Any) -> VerifyResult:  # type: ignore[override]
        inner = Lenience(backend=self.backend, **self.options.model_dump())
        if FORMS["without draft rows"](arguments) is not self.without_rows:
            return inner.verify(draft_token_ids, **arguments)
        uniforms = take_uniforms(draft_token_ids, arguments)
        rounded = replace(uniforms, accept=(4 * uniforms.accept).floor() / 4)
        return inner.verify(draft_token_ids, **arguments, uniforms=rounded)


class RoundsUniformsWithoutRows(RoundsUniforms):
    """So does this one where there are none."""

    name = "rounds-uniforms-without-rows"
    without_rows = True


RULES: list[tuple[str, Callable[[], AcceptanceStrategy], str]] = [
    ("impossible_draft_never_stands", CertainDraftsStand, "p(x) = 0"),
    ("impossible_draft_never_stands", OverridesFromTheSecond, "p(x) = 0"),
    ("greedy_sequence", RejectsTheBest, f"u = {1 - 2**-53}"),
    ("greedy_sequence", AcceptsNearestTies, "rows 'nearly ties'"),
    *(
        ("greedy_sequence", partial(_samples, form), said)
        for form, said in (("padded", "padded"), ("ragged", "ragged"), ("without draft rows", "without draft rows"))
    ),
    ("acceptance_is_probability", MoreThanOneAtTheMost, "steps = 12.0"),
    ("acceptance_is_probability", DividesByTheLargest, "got nan"),
    ("acceptance_is_probability", WeighsTooMuch, "add up to at most 4"),
    ("acceptance_is_probability", WeighsALittleTooMuch, "add up to at most 4"),
    ("acceptance_is_probability", NearlyCertain, "accept in [0, 1]"),
    ("lossless_law", NearlyLossless, "expected 0; tokens"),
    ("lossless_law_one_hot", NearlyLossless, "expected 0; tokens"),
    ("acceptance_is_probability", FallsWithMuchMass, "accept falls as next_residual_mass grows"),
    ("options_are_read", CarriesInVain, "no rule but `carry` itself reads the carry"),
    ("neutral_setting", RoundsUniforms, "acceptlib.create('rejection'): output_token_ids of request"),
    ("neutral_setting", RoundsUniformsWithoutRows, "acceptlib.create('rejection'): output_token_ids of request"),
    ("zero_draft_probability", partial(_knows_of_none, 2.0), "tokens accepted, got"),
    ("zero_draft_probability", partial(_knows_of_none, -1.0), "expected every token rejected"),
    ("new_requests_are_alike", OneIsNewOtherwise, "initial_state(1)"),
    ("state_of_each_request", TakesOfALargeK, "with a larger K"),
    ("update_state", SwapsMemory, "another tensor"),
    *(
        ("state_of_each_request", partial(WritesInto, part), f"update_state wrote into result.{part}")
        for part in ("output_token_ids", "num_accepted", "num_emitted", "status")
    ),
]


@pytest.mark.parametrize(("check", "make", "said"), RULES)
def test_a_wrong_rule_is_seen_by_the_part_for_it(check: str, make: Callable[[], AcceptanceStrategy], said: str) -> None:
    assert said in message(check, make())
