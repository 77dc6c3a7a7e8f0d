"""What every call promises, whatever the rule: the shape of the result, layouts, neighbours, and what is left alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from acceptlib.result import PLACEHOLDER_TOKEN_ID, VerifyResult
from acceptlib.rng import Rng
from acceptlib.sampling import SamplingParams
from acceptlib.testing.batches import COUNT, VOCABULARY, Request, broken, fixed, lay_out, mixed, same, streams, tokens
from acceptlib.testing.subject import Subject, require

GARBAGE: Final = 77
BITS: Final = 1 << 62
"""Bits that draw neither the first id of a row nor the last."""


def _results(subject: Subject) -> Iterator[tuple[str, list[Request], VerifyResult]]:
    """Verify a batch of every draft length in either layout, with draft rows and without."""
    requests = mixed(8)
    for layout in ("padded", "ragged"):
        for draft in (True, False):
            where = f"{layout}, {'with' if draft else 'without'} draft rows"
            yield where, requests, subject.verify(requests, layout, draft=draft)


def check_result_types(subject: Subject) -> None:
    """Shapes, dtypes and device of the result are the documented ones.

    Catches int64 ids and bool masks that an engine's next kernel reads as int32: an assert far away (vllm#42722).
    """
    for where, requests, result in _results(subject):
        count, most = len(requests), max(request.n for request in requests)
        wanted = {
            "output_token_ids": ((count, most + 1), torch.int32),
            "num_accepted": ((count,), torch.int32),
            "num_emitted": ((count,), torch.int32),
            "status": ((count,), torch.int8),
        }
        for name, (shape, dtype) in wanted.items():
            value = getattr(result, name)
            found = (tuple(value.shape), value.dtype, value.device.type)
            expected = (shape, dtype, subject.device.type)
            require(found == expected, f"{where}: expected {name} {expected}, got {found}")
        require(result.logprobs is None, f"{where}: logprobs were not asked for, got {result.logprobs}")


def check_accepted_tokens_are_drafted(subject: Subject) -> None:
    """The first `num_accepted` tokens are the drafted ones, in order.

    Catches rows of a ragged batch read one off, and drafted tokens written where they do not stand.
    """
    for where, requests, result in _results(subject):
        for index, request in enumerate(requests):
            stood = int(result.num_accepted[index])
            found, drafted = result.output_token_ids[index, :stood].tolist(), request.ids[:stood].tolist()
            require(found == drafted, f"{where}, request {index}: expected {drafted} to stand, got {found}")


def check_counts(subject: Subject) -> None:
    """0 <= num_accepted <= n_b, one more token is emitted, and the status of sound input is 0.

    Catches a count that includes the bonus token, and counts above the limit beside padded ids (flashinfer#879).
    """
    for where, requests, result in _results(subject):
        accepted, emitted = result.num_accepted.tolist(), result.num_emitted.tolist()
        for index, request in enumerate(requests):
            at = f"{where}, request {index}, {request.n} drafted tokens"
            require(0 <= accepted[index] <= request.n, f"{at}: num_accepted is {accepted[index]}")
            require(
                emitted[index] == accepted[index] + 1,
                f"{at}: num_emitted is {emitted[index]}, expected {accepted[index] + 1}",
            )
        require(not bool(result.status.any()), f"{where}: status of sound rows is {result.status.tolist()}")


def check_padding(subject: Subject) -> None:
    """Emitted tokens lie inside the vocabulary, and -1 follows them to the end of the row.

    Catches an id equal to V (GHSA-8wr5-jm2h-8r4f, vllm#53029), and 0 or stale ids as padding, which are tokens.
    """
    for where, requests, result in _results(subject):
        for index in range(len(requests)):
            ids, count = result.output_token_ids[index].tolist(), int(result.num_emitted[index])
            inside = all(0 <= token < VOCABULARY for token in ids[:count])
            require(inside, f"{where}, request {index}: emitted {ids[:count]}, vocabulary {VOCABULARY}")
            padded = all(token == PLACEHOLDER_TOKEN_ID for token in ids[count:])
            require(padded, f"{where}, request {index}: expected -1 after {count} tokens, got {ids}")


def check_nothing_drafted(subject: Subject) -> None:
    """A request without drafted tokens gets one token of its bonus row, alone and among others; no requests get none.

    Catches empty outputs (vllm#45060) and the division by zero drafts of a whole batch, between prompts.
    """
    alone = [replace(request, ids=request.ids[:0], p=request.p[:1], q=None) for request in mixed(4)]
    for request in alone:
        request.p[0, ::2] = 0
        request.p[0] /= request.p[0].sum()
    for layout in ("padded", "ragged"):
        result = subject.verify(alone, layout)
        for index, request in enumerate(alone):
            found = tokens(result, index)
            possible = len(found) == 1 and 0 <= found[0] < VOCABULARY and float(request.p[0, found[0]]) > 0
            require(possible, f"{layout}, request {index}: expected one token of the bonus row, got {found}")
        beside = subject.verify([*alone, *mixed(3, first_key=40)], layout, draft=False)
        for index in range(len(alone)):
            found, wanted = tokens(beside, index), tokens(result, index)
            require(found == wanted, f"{layout}, request {index} among others: expected {wanted}, got {found}")
    empty = {"draft_token_ids": torch.empty(0, 3, dtype=torch.int64), "target_probs": torch.empty(0, 4, VOCABULARY)}
    nobody = subject.call([], **empty, draft_probs=torch.empty(0, 3, VOCABULARY), rng=subject.streams([]))
    require(tuple(nobody.output_token_ids.shape) == (0, 4), f"B = 0: got {list(nobody.output_token_ids.shape)}")


def check_placeholder_ends_chain(subject: Subject) -> None:
    """The first negative id ends a request: the row there is its bonus row, and nothing behind it is read.

    Catches -1 read as an index, out of bounds or from the end of the row, in mid-chain and trailing (vllm#46533).
    """
    whole = [request for request in mixed(20) if request.n == 4]  # noqa: PLR2004 - the longest there are
    for negative in (PLACEHOLDER_TOKEN_ID, -7):
        for layout in ("padded", "ragged"):
            cut, short = [], []
            for index, request in enumerate(whole):
                end = index % 4
                held = request.copy()
                held.ids[end] = negative
                held.p[end + 1 :] = torch.nan
                cut.append(held)
                q = None if request.q is None else request.q[:end]
                short.append(replace(request, ids=request.ids[:end], p=request.p[: end + 1], q=q))
            # At u = 0 chains reach their placeholder, where the rule lets them.
            results = [
                subject.verify(requests, layout, uniforms=fixed(len(requests), max(r.n for r in requests), 0.0, BITS))
                for requests in (cut, short)
            ]
            found, wanted = ([tokens(result, index) for index in range(len(whole))] for result in results)
            require(found == wanted, f"{layout}, id {negative}: expected {wanted}, as of shorter drafts, got {found}")


def check_given_bonus_token(subject: Subject) -> None:
    """The caller's bonus token is emitted where every drafted token stands, and nowhere else.

    Catches a bonus token in place of the recovered one, and a bonus row left out of the grammar's mask because the
    verifier draws again (vllm#44297).
    """
    requests = mixed(COUNT)
    for layout in ("padded", "ragged"):
        plain = subject.verify(requests, layout)
        last = plain.output_token_ids.gather(1, plain.num_accepted[:, None].long())[:, 0]
        given = [(token + 1) % VOCABULARY for token in last.tolist()]
        result = subject.verify(requests, layout, bonus_token_ids=torch.tensor(given))
        for index, request in enumerate(requests):
            wanted = tokens(plain, index)
            if len(wanted) == request.n + 1:
                wanted[-1] = given[index]
            found = tokens(result, index)
            require(found == wanted, f"{layout}, request {index}: expected {wanted}, got {found}")


def check_forms_of_a_call(subject: Subject) -> None:
    """A call means the same in each form: counts, ids and results of either width, streams or what they come from.

    Counts may lack their leading 0, and target rows their bonus rows, where bonus tokens are given. Catches a step that
    works only in the form that its own tests use, so that an engine has to convert what it holds.
    """
    requests, keys = mixed(COUNT + 1)[1:], range(1, COUNT + 1)  # the first has drafted tokens
    bonus = torch.arange(COUNT) % VOCABULARY
    given = lay_out(requests, "ragged")
    cu = given["cu_num_draft_tokens"]
    wanted = subject.call(keys, **given, bonus_token_ids=bonus, rng=streams(keys))
    drafted = torch.ones(len(given["target_probs"]), dtype=torch.bool).index_fill(0, cu[1:] + torch.arange(COUNT), 0)
    wide = replace(wanted, output_token_ids=wanted.output_token_ids.long())
    values = (wide.output_token_ids, wide.num_accepted, wide.num_emitted, wide.status)
    forms: dict[str, dict[str, Any]] = {
        "counts of int64": {"cu_num_draft_tokens": cu.long()},
        "counts without their 0": {"cu_num_draft_tokens": cu[1:]},
        "ids of int32": {"draft_token_ids": given["draft_token_ids"].int(), "bonus_token_ids": bonus.int()},
        "no bonus rows": {"target_probs": given["target_probs"][drafted]},
        "a result of int64": {"out": VerifyResult(*map(torch.zeros_like, values))},
    }
    for form, change in forms.items():
        arguments = {**given, "bonus_token_ids": bonus, "rng": streams(keys), **change}
        same(subject.call(keys, **arguments), wide if "out" in change else wanted, what=f"{form} and the usual form")
    for seed in (7, 8):
        one, other = (subject.call(keys, **given, rng=rng) for rng in (seed, subject.place(Rng.of(seed, COUNT, "cpu"))))
        same(one, other, what=f"rng={seed} and the streams that it gives")


def check_half_precision(subject: Subject) -> None:
    """Rows in bfloat16 and float16 give what their values in float32 give, and int32 ids what int64 ids give.

    Catches arithmetic in the rows' own dtype: a draw in bfloat16 beside acceptance in float32 (transformers#47932).
    """
    # In wide rows the roundings of many entries add up until they move a draw.
    keys, vocab = (range(6), VOCABULARY) if subject.interpreted else (range(24), 997)
    for dtype in (torch.bfloat16, torch.float16):
        for layout in ("padded", "ragged"):
            arguments = lay_out(mixed(len(keys), vocab), layout)
            rows = {name: arguments[name].to(dtype) for name in ("target_probs", "draft_probs")}
            half = {**arguments, **rows, "draft_token_ids": arguments["draft_token_ids"].int()}
            full = {**arguments, **{name: value.float() for name, value in rows.items()}}
            one, other = (subject.call(keys, **given, rng=streams(keys)) for given in (half, full))
            same(one, other, what=f"{layout}, {dtype} rows with int32 ids and float32 rows with int64 ids")


def check_ragged_equals_padded(subject: Subject) -> None:
    """The ragged layout gives what the padded one gives, which holds NaN wherever no request has a row.

    Catches wrong rows for ragged batches: row `cu[b] + i` instead of `cu[b] + b + i`, right for the first request only.
    """
    requests = mixed(COUNT)
    for draft in (True, False):
        one, other = (subject.verify(requests, layout, draft=draft) for layout in ("ragged", "padded"))
        same(one, other, what="ragged and padded")


def check_permutation(subject: Subject) -> None:
    """Permuting a batch permutes its result.

    Catches randomness keyed by the batch row, and parameters read for row 0.
    """
    requests = mixed(COUNT)
    order = [(5 * index + 3) % COUNT for index in range(COUNT)]
    for layout in ("padded", "ragged"):
        one, other = (subject.verify(batch, layout) for batch in ([requests[index] for index in order], requests))
        same(one, other, to=order, what=f"{layout}, a permuted batch and the permuted result")


def check_neighbours(subject: Subject) -> None:
    """A request's tokens do not depend on its neighbours, how many they are, how long, or how broken.

    Catches a seeded request changed by unseeded neighbours (vllm#10863, #11123), and one bad row that fails or changes
    the whole batch (vllm#42722).
    """
    requests = mixed(COUNT)
    most = max(request.n for request in requests)
    for layout in ("padded", "ragged"):
        together = subject.verify(requests, layout)
        for index in range(0, COUNT, 3):
            alone, wanted = tokens(subject.verify([requests[index]], layout), 0), tokens(together, index)
            require(alone == wanted, f"{layout}, request {index}: {wanted} in the batch, {alone} alone")
        some = [request if index % 2 else broken(request) for index, request in enumerate(requests)]
        odd = list(range(1, COUNT, 2))
        same(subject.verify(some, layout), together, odd, odd, what=f"{layout}, beside rows of NaN and without")
    wide = subject.verify(requests, "ragged", max_num_draft_tokens=most + 3)
    rest = wide.output_token_ids[:, most + 1 :]
    require(
        bool((rest == PLACEHOLDER_TOKEN_ID).all()), f"max_num_draft_tokens = {most + 3}: got {rest.tolist()} behind"
    )
    narrow = replace(wide, output_token_ids=wide.output_token_ids[:, : most + 1])
    same(narrow, subject.verify(requests, "ragged"), what="a larger max_num_draft_tokens and a tight one")


def check_strides(subject: Subject) -> None:
    """Rows, ids, counts, temperatures and explicit numbers of any strides give what contiguous ones give.

    Catches kernels that compute addresses from shapes: a slice of a larger buffer is what engines pass.
    """
    keys = range(COUNT)
    explicit = _spread(subject.place({"uniforms": streams(keys).uniforms(4)}))
    for layout in ("padded", "ragged"):
        for form in ("probs", "logits"):
            arguments = lay_out(mixed(COUNT), layout, form)
            arguments["bonus_token_ids"] = torch.arange(COUNT) % VOCABULARY
            if form == "logits":
                arguments["sampling"] = SamplingParams(temperature=torch.linspace(0, 2, COUNT))
            one = subject.call(keys, **_spread(subject.place(arguments)), **explicit)
            # The streams of the explicit numbers: `inputs_unmodified` has the same form of call, which a GPU compiles.
            other = subject.call(keys, **arguments, rng=streams(keys))
            same(one, other, what=f"{layout}, {form}, strided and contiguous")


def _spread(value: Any) -> Any:
    """Return tensors, and what holds them, with the same values at twice the strides, between zeros."""
    if isinstance(value, torch.Tensor):
        return torch.stack((value, torch.zeros_like(value)), -1)[..., 0]
    if isinstance(value, dict):
        return {name: _spread(entry) for name, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{part.name: _spread(getattr(value, part.name)) for part in fields(value)})
    return value


def check_inputs_unmodified(subject: Subject) -> None:
    """The caller's tensors are never written, but for the offsets of the streams.

    Catches temperature divided into the caller's logits in place (vllm#30846), and a call that takes per-request state
    to the next step by itself.
    """
    for layout in ("padded", "ragged"):
        for form in ("probs", "logits"):
            arguments = subject.place(lay_out(mixed(COUNT), layout, form)) | subject.further(range(COUNT))
            arguments["bonus_token_ids"] = torch.arange(COUNT, device=subject.device) % VOCABULARY
            if form == "logits":
                temperature = torch.linspace(0, 2, COUNT, device=subject.device)
                arguments["sampling"] = SamplingParams(temperature=temperature)
            rng = subject.streams(range(COUNT))
            given = {**_tensors(arguments), "seeds": rng.seeds}
            before = {name: tensor.clone() for name, tensor in given.items()}
            subject.strategy.verify(**arguments, rng=rng)
            for name, tensor in given.items():
                kept = torch.equal(tensor.nan_to_num(nan=7.0), before[name].nan_to_num(nan=7.0))
                require(kept, f"{layout}, {form}: {name} was written")


def _tensors(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in arguments.items():
        held = value if isinstance(value, Mapping) else {name: value}
        found |= {key: entry for key, entry in held.items() if isinstance(entry, torch.Tensor)}
    sampling = arguments.get("sampling")
    if sampling is not None and isinstance(sampling.temperature, torch.Tensor):
        found["sampling.temperature"] = sampling.temperature
    return found


def check_out_is_overwritten(subject: Subject) -> None:
    """`out` is returned itself, its tensors stay where they are, and nothing of an earlier step is left in them.

    Catches stale ids behind the stop (p == q with u near 1 emitted memory that was never written) and counts that are
    added to.
    """
    requests = mixed(COUNT)
    for layout in ("padded", "ragged"):
        wanted = subject.verify(requests, layout)
        values = (wanted.output_token_ids, wanted.num_accepted, wanted.num_emitted, wanted.status)
        given = [torch.full_like(value, GARBAGE) for value in values]  # held, so that no other tensor takes their place
        out = VerifyResult(*given)
        for batch in (mixed(COUNT, first_key=40), requests):
            found = subject.verify(batch, layout, out=out)
            require(found is out, f"{layout}: expected the very `out` that was passed")
        now = (out.output_token_ids, out.num_accepted, out.num_emitted, out.status)
        stay = all(one.data_ptr() == other.data_ptr() for one, other in zip(given, now, strict=True))
        require(stay, f"{layout}: the tensors of `out` were replaced, which a CUDA graph would not see")
        same(out, wanted, what=f"{layout}, a reused `out` and a fresh result")


def check_totals(subject: Subject) -> None:
    """Where `out` has them, tokens that pass are counted, and each call adds to the totals.

    Catches totals that begin anew at every call: a server makes its acceptance rate of them. What passes is looked at
    in `decisions_follow_rules`.
    """
    requests = mixed(COUNT)
    for layout in ("padded", "ragged"):
        wanted = subject.verify(requests, layout)
        out = VerifyResult.empty(COUNT, wanted.output_token_ids.shape[1] - 1, subject.device, totals=True)
        assert out.num_passed is not None and out.totals is not None  # noqa: S101, PT018 - asked for
        passed = emitted = 0
        for step in range(2):
            subject.verify(requests, layout, out=out)
            passed, emitted = passed + int(out.num_passed.sum()), emitted + int(out.num_emitted.sum())
            found = out.totals.tolist()
            require(
                found == [passed, emitted], f"{layout}, call {step}: expected totals {[passed, emitted]}, got {found}"
            )
        same(replace(out, num_passed=None, totals=None), wanted, what=f"{layout}, with totals and without")


def check_poisoned_memory(subject: Subject) -> None:
    """Nothing depends on what uninitialised memory holds.

    Catches outputs and workspaces that are read before they are written: right on a fresh process, wrong in a long
    one (p == q with u near 1 emitted stale memory).
    """
    requests = mixed(COUNT)
    wanted = subject.verify(requests)
    # Workspaces that are kept from call to call hold another batch's numbers.
    subject.verify(mixed(COUNT + 3, 5 * VOCABULARY, first_key=60), "ragged")
    for byte in (0x5A, 0xFF):
        with Poisoned(byte):
            found = subject.verify(requests)
        same(found, wanted, what=f"with fresh memory full of bytes {byte:#04x} and without")


class Poisoned(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills every tensor that is allocated without values with one byte."""

    def __init__(self, byte: int) -> None:
        """Fill with `byte`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.byte = byte

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"} and found.numel():
            found.untyped_storage().fill_(self.byte)
        return found
