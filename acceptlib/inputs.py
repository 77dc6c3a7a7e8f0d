"""Validated inputs of a `verify` call, in the ragged or the padded layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Final, NamedTuple

import torch

from acceptlib.errors import InputError, shortened
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng, Root, Uniforms, resolve
from acceptlib.sampling import LogitBias, SamplingParams
from acceptlib.tensors import FLOAT_DTYPES, ID_DTYPES, STATE_DTYPES, expect, filled
from acceptlib.workspace import Workspace


class Rows(NamedTuple):
    """Rows of one model as the caller gave them, with the sampling parameters that make their law.

    A parameter is None where it is off for every request. Entries of a tensor may be off too, or out of range: no
    tensor was looked into. All but `data` and `bitmask` are contiguous.

    Attributes:
        data: [T+B, V] or [B, K+1, V] for the target, [T, V] or [B, K, V] for the draft; any strides.
        is_logits: Whether `data` holds logits, to be processed, rather than probabilities.
        temperature: [B] float32; 0 is greedy.
        top_k: [B] int32 or int64; 0 and from V on it is off.
        max_top_k: A number that no entry of `top_k` exceeds, or None if that is not known without waiting.
        top_p: [B] float32 or float64; 1 is off.
        min_p: [B] float32 or float64; 0 is off.
        bitmask: [..., ceil(V/32)] int32 with the leading dimensions of `data`, any strides.
        bias_token_ids: [B, n] int32 or int64; negative ids and those from V on bias nothing.
        bias_values: [B, n] float32.
    """

    data: torch.Tensor
    is_logits: bool
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    max_top_k: int | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    bitmask: torch.Tensor | None = None
    bias_token_ids: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether there is a bias or a mask."""
        return self.bitmask is not None or self.bias_token_ids is not None

    @property
    def is_filtered(self) -> bool:
        """Whether there is a top-k, top-p or min-p."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @property
    def is_plain(self) -> bool:
        """Whether no parameter is given."""
        return self.temperature is None and not self.is_constrained and not self.is_filtered


class Inputs(NamedTuple):
    """One validated `verify` call.

    Attributes:
        draft_token_ids: [T] or [B, K].
        target: The target's rows.
        draft: The draft's rows, or None for one-hot drafts.
        cu_num_draft_tokens: [B+1] or, without the leading 0, [B] for the ragged layout, None for the padded one.
        num_requests: B.
        max_num_draft_tokens: K.
        rng: Streams to consume one step of; None when `uniforms` is given.
        uniforms: Explicit random numbers.
        bonus_token_ids: [B] or None.
        state: What rules read of each request by name, [B]; empty for most strategies.
        logprobs: Whether to return log-probabilities.
        out: Result to write in place, or None.
        workspace: The caller's memory for the fused kernels, or None.
    """

    draft_token_ids: torch.Tensor
    target: Rows
    draft: Rows | None
    cu_num_draft_tokens: torch.Tensor | None
    num_requests: int
    max_num_draft_tokens: int
    rng: Rng | Root | None
    uniforms: Uniforms | None
    bonus_token_ids: torch.Tensor | None
    state: Mapping[str, torch.Tensor]
    logprobs: bool
    out: VerifyResult | None
    workspace: Workspace | None

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the call."""
        return self.target.data.device

    @property
    def vocab_size(self) -> int:
        """V, the target's vocabulary size."""
        return self.target.data.shape[-1]

    @property
    def counts_passed(self) -> bool:
        """Whether drafted tokens that pass on their own are counted, positions past the stop too."""
        return self.out is not None and self.out.num_passed is not None

    @property
    def has_bonus_rows(self) -> bool:
        """Whether the target's rows include each request's bonus row."""
        if self.cu_num_draft_tokens is None:
            return self.target.data.shape[1] > self.max_num_draft_tokens
        return self.target.data.shape[0] > self.draft_token_ids.shape[0]


KINDS: Final = (
    ("sampling", SamplingParams),
    ("draft_sampling", SamplingParams),
    ("uniforms", Uniforms),
    ("state", Mapping),
    ("out", VerifyResult),
    ("workspace", Workspace),
    ("logprobs", bool),
)
"""Arguments of `verify` that are no tensors, and what they are."""

NUMBER_DTYPES: Final = (*FLOAT_DTYPES, torch.float64)
HALVES: Final = (torch.float16, torch.bfloat16)

PARAMETERS: Final = (
    ("temperature", (1,), NUMBER_DTYPES, (*HALVES, torch.float64)),
    ("top_k", (0,), ID_DTYPES, ()),
    ("top_p", (1,), NUMBER_DTYPES, HALVES),
    ("min_p", (0,), NUMBER_DTYPES, HALVES),
)
"""Sampling parameters: the numbers that turn each off, the dtypes of its tensor, and those read as float32."""


def prepare(  # noqa: C901, PLR0912, PLR0913 - one check after another, on the arguments of `AcceptanceStrategy.verify`, which documents them
    draft_token_ids: torch.Tensor,
    *,
    target_logits: torch.Tensor | None,
    target_probs: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    cu_num_draft_tokens: torch.Tensor | None,
    max_num_draft_tokens: int | None,
    sampling: SamplingParams | None,
    draft_sampling: SamplingParams | None,
    rng: Rng | torch.Generator | int | None,
    bonus_token_ids: torch.Tensor | None,
    uniforms: Uniforms | None,
    state: Mapping[str, torch.Tensor] | None,
    state_names: tuple[str, ...],
    logprobs: bool,
    out: VerifyResult | None,
    workspace: Workspace | None,
) -> Inputs:
    """Validate the arguments of `verify`, and `Traits.state` as `state_names`, without waiting for the device.

    Raises:
        InputError: With the expected and the actual value.
    """
    target_data, target_is_logits = _one_of("target", target_logits, target_probs)
    draft_data, draft_is_logits = None, False
    if draft_logits is not None or draft_probs is not None:
        draft_data, draft_is_logits = _one_of("draft", draft_logits, draft_probs)
    if sampling is not None and not target_is_logits:
        msg = "sampling acts on logits, and target_probs are processed already: pass target_logits, or leave it out"
        raise InputError(msg)
    if draft_sampling is not None and not draft_is_logits:
        msg = "draft_sampling acts on draft_logits, which were not given: pass them, or leave draft_sampling out"
        raise InputError(msg)

    given = (sampling, draft_sampling, uniforms, state, out, workspace, logprobs)
    for value, (name, kind) in zip(given, KINDS, strict=True):
        if value is not None and not isinstance(value, kind):
            msg = f"{name}: expected {kind.__name__}, got {shortened(value)} ({type(value).__name__})"
            raise InputError(msg)

    device = target_data.device
    expect("draft_token_ids", draft_token_ids, None, ID_DTYPES, device)
    # Nothing is read from bonus rows whose tokens are given.
    bonus_rows: tuple[int, ...] = (1,) if bonus_token_ids is None or logprobs else (1, 0)
    if cu_num_draft_tokens is None:
        num_requests, most = _padded(
            draft_token_ids, target_data, draft_data, max_num_draft_tokens, bonus_rows=bonus_rows
        )
    else:
        expect("cu_num_draft_tokens", cu_num_draft_tokens, (None,), ID_DTYPES, device)
        num_requests = count_requests(draft_token_ids, target_data, cu_num_draft_tokens, bonus_token_ids)
        _ragged(draft_token_ids, target_data, draft_data, num_requests, bonus_rows=bonus_rows)
        most = _longest(cu_num_draft_tokens, draft_token_ids.shape[0], max_num_draft_tokens)
    for name, rows in (("target", target_data), ("draft", draft_data)):
        if rows is not None and rows.shape[-1] == 0:
            msg = f"{name} rows: expected at least one vocabulary entry, got {list(rows.shape)}"
            raise InputError(msg)
    expect("target rows", target_data, None, FLOAT_DTYPES, device)
    if draft_data is not None:
        expect("draft rows", draft_data, None, FLOAT_DTYPES, device)
    if bonus_token_ids is not None:
        of = "" if cu_num_draft_tokens is None else ", as many as requests in cu_num_draft_tokens with its leading 0"
        expect(f"bonus_token_ids{of}", bonus_token_ids, (num_requests,), ID_DTYPES, device)
    state = {} if state is None else state
    _check_state(state, state_names, num_requests, device)
    if uniforms is not None:
        if rng is not None:
            msg = "rng and uniforms both say where the randomness comes from: pass one"
            raise InputError(msg)
        flat = isinstance(uniforms.accept, torch.Tensor) and uniforms.accept.ndim == 1
        shape = tuple(draft_token_ids.shape) if flat and cu_num_draft_tokens is not None else (num_requests, most)
        expect("uniforms.accept", uniforms.accept, shape, (torch.float64,), device)
        expect("uniforms.emit", uniforms.emit, (num_requests,), (torch.int64,), device)
    if out is not None:
        _check_out(out, num_requests, most, device, logprobs=logprobs)

    target, draft = make_rows("sampling", sampling, target_data, num_requests, is_logits=target_is_logits), None
    if draft_data is not None:
        draft = _draft_rows(target, draft_data, sampling, draft_sampling, num_requests, is_logits=draft_is_logits)
    return Inputs(
        draft_token_ids=draft_token_ids,
        target=target,
        draft=draft,
        # A few numbers a request: kernels need not take these of any stride.
        cu_num_draft_tokens=None if cu_num_draft_tokens is None else cu_num_draft_tokens.contiguous(),
        num_requests=num_requests,
        max_num_draft_tokens=most,
        rng=resolve(rng, num_requests, device) if uniforms is None else None,  # last: an error consumes nothing
        uniforms=uniforms
        if uniforms is None or uniforms.emit.is_contiguous()
        else replace(uniforms, emit=uniforms.emit.contiguous()),
        bonus_token_ids=None if bonus_token_ids is None else bonus_token_ids.contiguous(),
        state={name: value.contiguous() for name, value in state.items()},
        logprobs=logprobs,
        out=out,
        workspace=workspace,
    )


def _one_of(name: str, logits: torch.Tensor | None, probs: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    if (logits is None) == (probs is None):
        got = "neither" if logits is None else "both"
        msg = f"expected exactly one of {name}_logits and {name}_probs, got {got}"
        raise InputError(msg)
    data = logits if probs is None else probs
    if not isinstance(data, torch.Tensor):
        given = "logits" if probs is None else "probs"
        msg = f"{name}_{given}: expected a torch.Tensor, got {type(data).__name__}"
        raise InputError(msg)
    if data.layout is not torch.strided:
        msg = f"{name} rows: expected a dense tensor, got {str(data.layout).removeprefix('torch.')}; pass `.to_dense()`"
        raise InputError(msg)
    return data, probs is None


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
        got = shortened(max_num_draft_tokens)
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


def _longest(cu_num_draft_tokens: torch.Tensor, num_tokens: int, max_num_draft_tokens: int | None) -> int:
    """Return K in the ragged layout."""
    if max_num_draft_tokens is None:
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
    if not isinstance(max_num_draft_tokens, Integral) or max_num_draft_tokens < 0:
        msg = f"max_num_draft_tokens: expected an int >= 0, got {shortened(max_num_draft_tokens)}"
        raise InputError(msg)
    return int(max_num_draft_tokens)  # NumPy's too


def count_requests(
    ids: torch.Tensor, target: torch.Tensor, cu_num_draft_tokens: torch.Tensor, bonus_token_ids: torch.Tensor | None
) -> int:
    """Return B in the ragged layout: counts have no leading 0 where there are as many bonus tokens and fitting rows."""
    length, num_tokens = cu_num_draft_tokens.shape[0], ids.numel()
    as_many = getattr(bonus_token_ids, "shape", None) == (length,)
    return length if as_many and target.shape[:-1] in [(num_tokens,), (num_tokens + length,)] else length - 1


def _expect_rows(
    name: str, data: torch.Tensor, fitting: Sequence[tuple[int, ...]], layout: str, num_requests: int | None = None
) -> None:
    """Check that rows have one of the `fitting` leading dimensions, of which the first is named in the error.

    So is where B comes from, if it is given.
    """
    if data.shape[:-1] not in fitting:
        expected = ", ".join(str(length) for length in fitting[0])
        why = ""
        if num_requests is not None:
            why = f"; B = {num_requests}, for cu_num_draft_tokens has B+1 numbers, of which the first is 0"
        msg = f"{name} rows: expected {layout} = [{expected}, V], got {list(data.shape)}{why}"
        raise InputError(msg)


def make_rows(
    name: str,
    sampling: SamplingParams | None,
    data: torch.Tensor,
    num_requests: int,
    *,
    is_logits: bool,
    masked: bool = True,
) -> Rows:
    """Return rows [..., V] of B requests with their sampling parameters, those that act on them.

    Args:
        name: Of the argument that holds the parameters, for messages.
        sampling: The parameters.
        data: The rows.
        num_requests: B.
        is_logits: Whether they are logits; parameters do nothing to probabilities.
        masked: Whether the bitmask is of these rows.

    Raises:
        InputError: A parameter does not fit the rows.
    """
    if sampling is None or not is_logits:
        return Rows(data, is_logits)
    found: dict[str, Any] = {}
    vocab_size = data.shape[-1]
    for parameter, off, dtypes, converted in PARAMETERS:
        value = getattr(sampling, parameter)
        if isinstance(value, torch.Tensor):
            expect(f"{name}.{parameter}", value, (num_requests,), dtypes, data.device)
            found[parameter] = (value.to(torch.float32) if value.dtype in converted else value).contiguous()
        elif value is not None and value not in off and not (parameter == "top_k" and value >= vocab_size):
            dtype = {"temperature": torch.float32, "top_k": torch.int64}.get(parameter, torch.float64)
            found[parameter] = filled(num_requests, value, dtype, data.device)
            if parameter == "top_k":
                found["max_top_k"] = value
    mask, bias = sampling.allowed_token_bitmask if masked else None, sampling.logit_bias
    if mask is not None:
        shape = (*data.shape[:-1], -(-vocab_size // 32))
        expect(f"{name}.allowed_token_bitmask", mask, shape, (torch.int32,), data.device)
        found["bitmask"] = mask
    if bias is not None:
        if not isinstance(bias, LogitBias):
            msg = f"{name}.logit_bias: expected LogitBias, got {shortened(bias)} ({type(bias).__name__})"
            raise InputError(msg)
        expect(f"{name}.logit_bias.token_ids", bias.token_ids, (num_requests, None), ID_DTYPES, data.device)
        expect(f"{name}.logit_bias.values", bias.values, tuple(bias.token_ids.shape), (torch.float32,), data.device)
        found |= {"bias_token_ids": bias.token_ids.contiguous(), "bias_values": bias.values.contiguous()}
    return Rows(data, is_logits, **found)


def _draft_rows(
    target: Rows,
    data: torch.Tensor,
    sampling: SamplingParams | None,
    draft_sampling: SamplingParams | None,
    num_requests: int,
    *,
    is_logits: bool,
) -> Rows:
    """Return the draft's rows: with parameters of their own, or all of the target's but its bitmask."""
    if draft_sampling is not None:
        return make_rows("draft_sampling", draft_sampling, data, num_requests, is_logits=is_logits)
    if is_logits == target.is_logits and data.shape[-1] == target.data.shape[-1]:
        return target._replace(data=data, bitmask=None)  # looked at already
    return make_rows("sampling", sampling, data, num_requests, is_logits=is_logits, masked=False)


def _check_state(
    state: Mapping[str, torch.Tensor], names: tuple[str, ...], num_requests: int, device: torch.device
) -> None:
    if {*state} != {*names}:
        expected, got = (", ".join(sorted(map(str, some))) or "none" for some in (names, state))
        msg = f"state: expected {expected}, as the strategy's Traits.state says, got {got}"
        raise InputError(msg)
    for name, value in state.items():
        expect(f"state[{name!r}]", value, (num_requests,), STATE_DTYPES, device)


def _check_out(out: VerifyResult, num_requests: int, most: int, device: torch.device, *, logprobs: bool) -> None:
    expect("out.output_token_ids", out.output_token_ids, (num_requests, most + 1), ID_DTYPES, device)
    expect("out.num_accepted", out.num_accepted, (num_requests,), (torch.int32,), device)
    expect("out.num_emitted", out.num_emitted, (num_requests,), (torch.int32,), device)
    expect("out.status", out.status, (num_requests,), (torch.int8,), device)
    for name, value in (("out.logprobs", out.logprobs), ("out.raw_logprobs", out.raw_logprobs)):
        if logprobs != (value is not None):
            msg = f"{name}: expected {'a tensor' if logprobs else 'None'}, as logprobs={logprobs} says"
            raise InputError(msg)
        if value is not None:
            expect(name, value, (num_requests, most + 1), (torch.float32,), device)
    if out.totals is not None:
        expect("out.totals", out.totals, (2,), (torch.int64,), device)
        if out.num_passed is None:
            msg = "out.num_passed: expected a tensor [B] int32 beside out.totals, to which it is added, got None"
            raise InputError(msg)
    if out.num_passed is not None:
        expect("out.num_passed", out.num_passed, (num_requests,), (torch.int32,), device)
    for name in VerifyResult.__slots__:
        value = getattr(out, name)
        if value is not None and not value.is_contiguous():
            msg = f"out.{name}: expected a contiguous tensor, got {list(value.shape)} of strides {list(value.stride())}"
            raise InputError(msg)
