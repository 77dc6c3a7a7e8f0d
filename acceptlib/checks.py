"""Checks of a `verify` call's arguments, made once for all calls that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch

from acceptlib.errors import InputError, kind_of, short_repr
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng, Uniforms
from acceptlib.sampling import FILTERS, OFF, PARAMETERS, SamplingParams
from acceptlib.tensors import FLOAT_DTYPES, ID_DTYPES, STATE_DTYPES, expect_tensor
from acceptlib.workspace import Workspace


class Arguments(NamedTuple):
    """The arguments of a `verify` call, as `AcceptanceStrategy.verify` documents them and in its order."""

    draft_token_ids: torch.Tensor
    target_logits: torch.Tensor | None = None
    target_probs: torch.Tensor | None = None
    draft_logits: torch.Tensor | None = None
    draft_probs: torch.Tensor | None = None
    cu_num_draft_tokens: torch.Tensor | None = None
    max_num_draft_tokens: int | None = None
    sampling: SamplingParams | None = None
    draft_sampling: SamplingParams | None = None
    rng: Rng | torch.Generator | int | None = None
    bonus_token_ids: torch.Tensor | None = None
    uniforms: Uniforms | None = None
    state: Mapping[str, torch.Tensor] | None = None
    logprobs: bool = False
    out: VerifyResult | None = None
    workspace: Workspace | None = None


KINDS: Final = {
    "sampling": SamplingParams,
    "draft_sampling": SamplingParams,
    "uniforms": Uniforms,
    "state": Mapping,
    "out": VerifyResult,
    "workspace": Workspace,
    "logprobs": bool,
}
"""Arguments that are not tensors, and their types."""

NO_FLOAT64: Final = {"mps"}
"""Types of devices that no engine runs on."""

MAX_FILTERED: Final = (1 << 21) - 1
"""Longest row that top-k, top-p or min-p may filter: one more weight of 1, in steps of 2^-42, could overflow int64."""


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """What checks found of a call, the same object for all calls of one signature.

    Attributes:
        num_requests: B.
        max_num_draft_tokens: K.
        runs: How an engine runs such calls, by everything else that this depends on.
    """

    num_requests: int
    max_num_draft_tokens: int
    runs: dict[Hashable, Any] = field(default_factory=dict)


MAX_CHECKED: Final = 1 << 14
"""Signatures that are remembered. Each B and K makes another one."""

_CHECKED: dict[Hashable, Checked] = {}
"""By signature."""


def check(arguments: Arguments, state_names: tuple[str, ...]) -> Checked:
    """Check the arguments of a call, and `Traits.state` as `state_names`, without waiting for the device.

    What is wrong with a call follows from its signature: shapes, dtypes, strides and devices of its tensors, and its
    other arguments. So each signature is checked once.

    Raises:
        InputError: With the expected and the actual value.
    """
    try:
        signature = _signature(arguments, state_names)
        found = _CHECKED.get(signature)
    except (AttributeError, TypeError, IndexError, RuntimeError):  # no tensors, or sparse: checks say what is wrong
        signature = found = None
    if found is None:
        found = _check(arguments, state_names)
        if signature is not None:
            if len(_CHECKED) >= MAX_CHECKED:
                _CHECKED.clear()
            _CHECKED[signature] = found
    return found


_NUMBERS: Final = attrgetter(*OFF)
_RESULTS: Final = attrgetter(*VerifyResult.__slots__)


def _signature(arguments: Arguments, state_names: tuple[str, ...]) -> Hashable:
    """Return the signature of a call; None if values in a tensor decide whether the call is good.

    In the ragged layout nothing depends on T, the number of drafted tokens, which most steps change: only by how much
    numbers of rows differ from it does.
    """
    ids, *rows, counts, most, sampling, draft_sampling, rng, bonus, uniforms, state, logprobs, out, memory = arguments
    if counts is not None and most is None:
        return None
    by_token: list[torch.Tensor | None] = [ids, *rows]
    values: list[object] = [counts, most, bonus, logprobs]
    for parameters in (sampling, draft_sampling):
        if parameters is not None:
            by_token.append(parameters.allowed_token_bitmask)
            bias = parameters.logit_bias
            values += _NUMBERS(parameters)
            values += (None, None) if bias is None else (bias.token_ids, bias.values)
    if uniforms is not None:
        (by_token if uniforms.accept.ndim == 1 else values).append(uniforms.accept)
        values.append(uniforms.emit)
    if state is not None:
        values += (*state, *state.values())
    if out is not None:
        values += _RESULTS(out)
    # Equal numbers may have different types, some of which are refused.
    types = map(type, (*by_token, *values, sampling, draft_sampling, rng, uniforms, state, out, memory))
    # Most are None, and asking whether a value is a tensor takes longer than all else here.
    described = [v if v is None else _described(v) for v in values]
    if counts is None:
        described += [v if v is None else _described(v) for v in by_token]
    else:
        num_tokens = ids.shape[0]
        described += [
            v if v is None else (v.shape[0] - num_tokens, v.shape[1:], _form(v), v.is_neg() and num_tokens)
            for v in by_token
        ]
    return *described, *types, state_names


def _described(value: Any) -> Any:
    """Return what checks and runs depend on of a value."""
    if isinstance(value, torch.Tensor):
        return value.shape, _form(value)
    if type(value) is float:  # a parameter, in range as its owner has checked, which 0 or 1 turns off
        return value == 0, value == 1
    return value


def _form(tensor: torch.Tensor) -> Hashable:
    """Return what checks and runs depend on beside the shape.

    A tensor with a negative bit is copied, and the copy has other strides: which ones, depends on the shape.
    """
    return tensor.dtype, tensor.device, tensor.stride(), tensor.is_neg()


def _check(arguments: Arguments, state_names: tuple[str, ...]) -> Checked:
    ids, counts = arguments.draft_token_ids, arguments.cu_num_draft_tokens
    target, draft = _rows(arguments)
    check_kinds(arguments)
    device = target.device
    check_device("target rows", device)
    expect_tensor("draft_token_ids", ids, None, ID_DTYPES, device)
    num_requests, most = _sizes(arguments, target, draft)
    for name, rows in (("target rows", target), ("draft rows", draft)):
        if rows is not None:
            expect_tensor(name, rows, None, FLOAT_DTYPES, device)
            if rows.shape[-1] == 0:
                msg = f"{name}: expected at least one vocabulary entry, got {list(rows.shape)}"
                raise InputError(msg)
    if arguments.bonus_token_ids is not None:
        of = "" if counts is None else ", as many as requests in cu_num_draft_tokens with its leading 0"
        expect_tensor(f"bonus_token_ids{of}", arguments.bonus_token_ids, (num_requests,), ID_DTYPES, device)
    _check_state(arguments.state or {}, state_names, num_requests, device)
    if arguments.uniforms is not None:
        _check_uniforms(arguments, arguments.uniforms, num_requests, most, device)
    if arguments.out is not None:
        _check_out(arguments.out, num_requests, most, device, logprobs=arguments.logprobs)
    check_sampling("sampling", arguments.sampling, target, num_requests)
    if draft is not None:
        check_sampling("draft_sampling", arguments.draft_sampling, draft, num_requests)
    return Checked(num_requests, most)


def check_kinds(arguments: Arguments) -> None:
    """Check the types of arguments that are not tensors.

    Raises:
        InputError: One is of another type.
    """
    for name, kind in KINDS.items():
        value = getattr(arguments, name)
        if not isinstance(value, kind) and (value is not None or kind is bool):
            got = type(value).__name__
            if not torch.compiler.is_dynamo_compiling():  # `short_repr` cannot be traced
                got = f"{short_repr(value)} ({got})"
            msg = f"{name}: expected {kind.__name__}, got {got}"
            raise InputError(msg)
    most = arguments.max_num_draft_tokens
    # A tuple: torch 2.6's compiler follows no union. Other types are refused where no graph is traced.
    if isinstance(most, (float, bool, str)):
        msg = f"max_num_draft_tokens: expected an int >= 0, got {most!r}"
        raise InputError(msg)


def _rows(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the target's and the draft's rows: each is given once, and parameters come with logits."""
    target, draft = _one_of("target", arguments.target_logits, arguments.target_probs), None
    if arguments.draft_logits is not None or arguments.draft_probs is not None:
        draft = _one_of("draft", arguments.draft_logits, arguments.draft_probs)
    if arguments.sampling is not None and arguments.target_logits is None:
        msg = "sampling acts on logits, and target_probs are processed already: pass target_logits, or leave it out"
        if arguments.draft_logits is not None and arguments.draft_sampling is None:
            msg += "; draft_sampling is for draft_logits alone"
        raise InputError(msg)
    if arguments.draft_sampling is not None and arguments.draft_logits is None:
        msg = "draft_sampling acts on draft_logits, which were not given: pass them, or leave draft_sampling out"
        raise InputError(msg)
    return target, draft


def _one_of(name: str, logits: torch.Tensor | None, probs: torch.Tensor | None) -> torch.Tensor:
    if (logits is None) == (probs is None):
        got = "neither" if logits is None else "both"
        msg = f"expected exactly one of {name}_logits and {name}_probs, got {got}"
        raise InputError(msg)
    data = logits if probs is None else probs
    if not isinstance(data, torch.Tensor) or data.is_nested:
        given = "logits" if probs is None else "probs"
        msg = f"{name}_{given}: expected a torch.Tensor, got {kind_of(data)}"
        raise InputError(msg)
    return data


def _sizes(arguments: Arguments, target: torch.Tensor, draft: torch.Tensor | None) -> tuple[int, int]:
    """Return B and K, which ids, counts and rows agree on."""
    ids, counts, bonus = arguments.draft_token_ids, arguments.cu_num_draft_tokens, arguments.bonus_token_ids
    most = arguments.max_num_draft_tokens
    if most is not None and not (isinstance(most, Integral) and 0 <= most < 1 << 31):
        msg = f"max_num_draft_tokens: expected an int >= 0 and below 2^31, got {short_repr(most)}"
        raise InputError(msg)
    if bonus is not None:
        expect_tensor("bonus_token_ids", bonus, ("B",), ID_DTYPES, target.device)
    if bonus is not None and arguments.logprobs and ids.numel() and len(bonus) and target.shape[:-1] == ids.shape:
        msg = (
            "target rows: expected bonus rows too, for logprobs=True reads them though bonus_token_ids are given, got "
            f"{list(target.shape)}: pass [B, K+1, V] or [T+B, V], or logprobs=False"
        )
        raise InputError(msg)
    # Nothing is read from bonus rows whose tokens are given.
    bonus_rows: tuple[int, ...] = (1,) if bonus is None or arguments.logprobs else (1, 0)
    if counts is None:
        return _padded(ids, target, draft, most, bonus_rows=bonus_rows)
    expect_tensor("cu_num_draft_tokens", counts, ("B+1",), ID_DTYPES, target.device)
    num_requests = count_requests(ids, target, counts, bonus)
    _ragged(ids, target, draft, num_requests, bonus_rows=bonus_rows)
    return num_requests, _longest(counts, ids.shape[0]) if most is None else int(most)  # NumPy's too


def _padded(
    ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    max_num_draft_tokens: int | None,
    *,
    bonus_rows: tuple[int, ...],
) -> tuple[int, int]:
    if ids.ndim != 2:  # noqa: PLR2004
        msg = (
            f"draft_token_ids: expected [B, K] in the padded layout, got {list(ids.shape)}. For the ragged layout, "
            "[T], pass cu_num_draft_tokens."
        )
        raise InputError(msg)
    num_requests, most = ids.shape
    if max_num_draft_tokens is not None and max_num_draft_tokens != most:
        got = short_repr(max_num_draft_tokens)
        msg = f"max_num_draft_tokens: expected {most}, the width of draft_token_ids, got {got}"
        raise InputError(msg)
    _expect_rows("target", target, [(num_requests, most + extra) for extra in bonus_rows], "[B, K+1, V]")
    if draft is not None:
        _expect_rows("draft", draft, [(num_requests, most)], "[B, K, V]")
    return num_requests, most


def _ragged(
    ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    num_requests: int,
    *,
    bonus_rows: tuple[int, ...],
) -> None:
    if ids.ndim != 1:
        msg = (
            f"draft_token_ids: expected [T] in the ragged layout (cu_num_draft_tokens was given), got {list(ids.shape)}"
        )
        raise InputError(msg)
    if num_requests < 0:
        msg = "cu_num_draft_tokens: expected shape [B+1], got [0]"
        raise InputError(msg)
    num_tokens = ids.shape[0]
    fitting = [(num_tokens + extra * num_requests,) for extra in bonus_rows]
    _expect_rows("target", target, fitting, "[T+B, V]", num_requests)
    if draft is not None:
        _expect_rows("draft", draft, [(num_tokens,)], "[T, V]")


def _longest(cu_num_draft_tokens: torch.Tensor, num_tokens: int) -> int:
    """Return K in the ragged layout, where it is not given."""
    device = cu_num_draft_tokens.device
    if device.type != "cpu":
        msg = (
            f"max_num_draft_tokens: expected an int in the ragged layout on {device}, got None. "
            "Finding it would wait for the device; pass the largest number of drafted tokens, or a bound above it."
        )
        raise InputError(msg)
    counts = torch.cat((cu_num_draft_tokens[:1], cu_num_draft_tokens.diff()))  # the first is 0, or a count
    longest: int = max([0, *counts.tolist()])
    return min(longest, num_tokens)


def count_requests(
    ids: torch.Tensor, target: torch.Tensor, cu_num_draft_tokens: torch.Tensor, bonus_token_ids: torch.Tensor | None
) -> int:
    """Return B in the ragged layout: counts lack the leading 0 if there are as many bonus tokens and the rows fit."""
    length, num_tokens = cu_num_draft_tokens.shape[0], ids.numel()
    as_many = getattr(bonus_token_ids, "shape", None) == (length,)
    return length if as_many and target.shape[:-1] in [(num_tokens,), (num_tokens + length,)] else length - 1


def _expect_rows(
    name: str, data: torch.Tensor, fitting: Sequence[tuple[int, ...]], layout: str, num_requests: int | None = None
) -> None:
    """Check that rows have one of the `fitting` leading dimensions; the error names the first.

    If `num_requests` is given, the error also says where B comes from.
    """
    if data.shape[:-1] not in fitting:
        expected = ", ".join(str(length) for length in fitting[0])
        why = ""
        if num_requests is not None:
            why = f"; B = {num_requests}, for cu_num_draft_tokens has B+1 numbers, of which the first is 0"
        msg = f"{name} rows: expected {layout} = [{expected}, V], got {list(data.shape)}{why}"
        raise InputError(msg)


def check_device(name: str, device: torch.device) -> None:
    """Check the device of rows; `name` is theirs in messages.

    Raises:
        InputError: No engine runs there.
    """
    if device.type in NO_FLOAT64:
        msg = f"{name}: expected a device that has float64, in which tokens are drawn, got {device}: use the CPU"
        raise InputError(msg)


def check_sampling(name: str, sampling: SamplingParams | None, data: torch.Tensor, num_requests: int) -> None:
    """Check sampling parameters of B requests, whose rows are `data` [..., V]; `name` is theirs in messages.

    Raises:
        InputError: A parameter does not fit the rows.
    """
    if sampling is None:
        return
    for parameter in PARAMETERS:
        value = getattr(sampling, parameter.name)
        if isinstance(value, torch.Tensor):
            expect_tensor(f"{name}.{parameter.name}", value, (num_requests,), parameter.tensor_dtypes, data.device)
    if data.shape[-1] > MAX_FILTERED:
        for filtering in FILTERS:
            value = getattr(sampling, filtering)
            if isinstance(value, torch.Tensor) or value not in {None, OFF[filtering]}:
                msg = (
                    f"{name}.{filtering}: expected rows of at most {MAX_FILTERED} entries, whose weights are summed "
                    f"in 64 bits, got V = {data.shape[-1]}; filter them before, or leave it out"
                )
                raise InputError(msg)
    if sampling.allowed_token_bitmask is not None:
        shape = (*data.shape[:-1], -(-data.shape[-1] // 32))
        mask = sampling.allowed_token_bitmask
        if getattr(mask, "dtype", None) == torch.bool:
            msg = f"{name}.allowed_token_bitmask: expected int32, a bit a token, got bool; use acceptlib.pack_bitmask"
            raise InputError(msg)
        expect_tensor(f"{name}.allowed_token_bitmask", mask, shape, (torch.int32,), data.device)
    bias = sampling.logit_bias
    if bias is not None:
        expect_tensor(f"{name}.logit_bias.token_ids", bias.token_ids, (num_requests, "n"), ID_DTYPES, data.device)
        expect_tensor(
            f"{name}.logit_bias.values", bias.values, tuple(bias.token_ids.shape), (torch.float32,), data.device
        )


def _check_state(
    state: Mapping[str, torch.Tensor], names: tuple[str, ...], num_requests: int, device: torch.device
) -> None:
    if {*state} != {*names}:
        expected, got = (", ".join(sorted(map(str, some))) or "none" for some in (names, state))
        msg = f"state: expected {expected}, as the strategy's Traits.state says, got {got}"
        if names and not state:
            msg += ". Pass the strategy's `initial_state(B, device)`, and keep it per request."
        raise InputError(msg)
    for name, value in state.items():
        expect_tensor(f"state[{name!r}]", value, (num_requests,), STATE_DTYPES, device)


def _check_uniforms(
    arguments: Arguments, uniforms: Uniforms, num_requests: int, most: int, device: torch.device
) -> None:
    if arguments.rng is not None:
        msg = "rng and uniforms both say where the randomness comes from: pass one"
        raise InputError(msg)
    flat = isinstance(uniforms.accept, torch.Tensor) and uniforms.accept.ndim == 1
    ragged = arguments.cu_num_draft_tokens is not None
    shape = tuple(arguments.draft_token_ids.shape) if flat and ragged else (num_requests, most)
    expect_tensor("uniforms.accept", uniforms.accept, shape, (torch.float64,), device)
    expect_tensor("uniforms.emit", uniforms.emit, (num_requests,), (torch.int64,), device)


def _check_out(out: VerifyResult, num_requests: int, most: int, device: torch.device, *, logprobs: bool) -> None:
    expect_tensor("out.output_token_ids", out.output_token_ids, (num_requests, most + 1), ID_DTYPES, device)
    expect_tensor("out.num_accepted", out.num_accepted, (num_requests,), (torch.int32,), device)
    expect_tensor("out.num_emitted", out.num_emitted, (num_requests,), (torch.int32,), device)
    expect_tensor("out.status", out.status, (num_requests,), (torch.int8,), device)
    for name, value in (("out.logprobs", out.logprobs), ("out.raw_logprobs", out.raw_logprobs)):
        if logprobs != (value is not None):
            wanted, got = ("a tensor [B, K+1] float32", "None") if logprobs else ("None", "a tensor")
            msg = (
                f"{name}: expected {wanted}, as logprobs={logprobs} says, got {got}: make `out` with "
                f"VerifyResult.empty(..., logprobs={logprobs})"
            )
            raise InputError(msg)
        if value is not None:
            expect_tensor(name, value, (num_requests, most + 1), (torch.float32,), device)
    if out.totals is not None:
        expect_tensor("out.totals", out.totals, (2,), (torch.int64,), device)
        if out.num_passed is None:
            msg = "out.num_passed: expected a tensor [B] int32 beside out.totals, to which it is added, got None"
            raise InputError(msg)
    if out.num_passed is not None:
        expect_tensor("out.num_passed", out.num_passed, (num_requests,), (torch.int32,), device)
    for name in VerifyResult.__slots__:
        value = getattr(out, name)
        if value is not None and not value.is_contiguous():
            msg = f"out.{name}: expected a contiguous tensor, got {list(value.shape)} of strides {list(value.stride())}"
            raise InputError(msg)
