"""Validated inputs of a `verify` call, in the ragged or the padded layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from acceptlib.checks import Arguments, Checked, check
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng, Root, Uniforms, resolve
from acceptlib.sampling import PARAMETERS, SamplingParams
from acceptlib.tensors import cached_full
from acceptlib.workspace import Workspace


class Rows(NamedTuple):
    """Rows of one model as the caller gave them, with the sampling parameters that make their law.

    A parameter is None where it is off for every request. Entries of a tensor may be off too, or out of range: no
    tensor's values were read. All but `data` and `bitmask` are contiguous.

    Attributes:
        data: [T+B, V] or [B, K+1, V] for the target, [T, V] or [B, K, V] for the draft; any strides.
        is_logits: Whether `data` holds logits, to be processed, rather than probabilities.
        temperature: [B] float32; 0 is greedy.
        top_k: [B] int32 or int64; 0 and from V on it is off.
        max_top_k: A number that no entry of `top_k` exceeds, or None if that is not known without waiting.
        top_p: [B] float32 or float64; 1 is off.
        min_p: [B] float32 or float64; 0 is off.
        bitmask: [..., ceil(V/32)] int32 with the leading dimensions of `data`, any strides.
        bias_token_ids: [B, n] int32 or int64; negative ids are padding; see `LogitBias`.
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
        checked: What checks found about the arguments that all fields but `rng` and `workspace` come from.
        draft_token_ids: [T] or [B, K].
        target: The target's rows.
        draft: The draft's rows, or None for one-hot drafts.
        cu_num_draft_tokens: [B+1] or, without the leading 0, [B] for the ragged layout, None for the padded one.
        rng: Streams to consume one step of; None when `uniforms` is given.
        uniforms: Explicit random numbers.
        bonus_token_ids: [B] or None.
        state: What rules read of each request by name, [B]; empty for most strategies.
        logprobs: Whether to return log-probabilities.
        out: Result to write in place, or None.
        workspace: The caller's memory for the fused kernels, or None.
    """

    checked: Checked
    draft_token_ids: torch.Tensor
    target: Rows
    draft: Rows | None
    cu_num_draft_tokens: torch.Tensor | None
    rng: Rng | Root | None
    uniforms: Uniforms | None
    bonus_token_ids: torch.Tensor | None
    state: Mapping[str, torch.Tensor]
    logprobs: bool
    out: VerifyResult | None
    workspace: Workspace | None

    @property
    def num_requests(self) -> int:
        """B."""
        return self.checked.num_requests

    @property
    def max_num_draft_tokens(self) -> int:
        """K."""
        return self.checked.max_num_draft_tokens

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


def prepare(arguments: Arguments, state_names: tuple[str, ...]) -> Inputs:
    """Validate the arguments of `verify`, and `Traits.state` as `state_names`, without waiting for the device.

    Raises:
        InputError: With the expected and the actual value.
    """
    checked = check(arguments, state_names)
    target = make_rows(arguments.target_logits, arguments.target_probs, arguments.sampling, checked.num_requests)
    counts, bonus = arguments.cu_num_draft_tokens, arguments.bonus_token_ids
    uniforms, state = arguments.uniforms, arguments.state
    if uniforms is not None:
        accept, emit = _plain(uniforms.accept), uniforms.emit.contiguous()
        if accept is not uniforms.accept or emit is not uniforms.emit:
            uniforms = replace(uniforms, accept=accept, emit=emit)
    return Inputs(
        checked=checked,
        draft_token_ids=arguments.draft_token_ids,
        target=target,
        draft=_draft_rows(arguments, target, checked.num_requests),
        # A few numbers per request, made contiguous so that kernels need not take any stride.
        cu_num_draft_tokens=None if counts is None else counts.contiguous(),
        uniforms=uniforms,
        bonus_token_ids=None if bonus is None else bonus.contiguous(),
        state={name: _plain(value).contiguous() for name, value in state.items()} if state else {},
        logprobs=arguments.logprobs,
        out=arguments.out,
        workspace=arguments.workspace,
        # Last, so that a call that is refused consumes nothing.
        rng=resolve(arguments.rng, checked.num_requests, target.data.device) if uniforms is None else None,
    )


def _draft_rows(arguments: Arguments, target: Rows, num_requests: int) -> Rows | None:
    """Return the draft's rows: with parameters of their own, or all of the target's but its bitmask."""
    logits, probs = arguments.draft_logits, arguments.draft_probs
    if logits is None and probs is None:
        return None
    if arguments.draft_sampling is not None:
        return make_rows(logits, probs, arguments.draft_sampling, num_requests)
    if logits is not None and target.is_logits and logits.shape[-1] == target.data.shape[-1]:
        return target._replace(data=_plain(logits), bitmask=None)  # the same tensors of numbers serve both
    return make_rows(logits, probs, arguments.sampling, num_requests, masked=False)


def _plain(data: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values: torch may keep a negation as a flag instead."""
    if torch.compiler.is_dynamo_compiling() or not data.is_neg():  # no graph can ask
        return data
    return data.resolve_neg()


def make_rows(
    logits: torch.Tensor | None,
    probs: torch.Tensor | None,
    sampling: SamplingParams | None,
    num_requests: int,
    *,
    masked: bool = True,
) -> Rows:
    """Return rows [..., V] of B requests with the sampling parameters, already checked, that act on them.

    Args:
        logits: The rows, or None.
        probs: The rows if they are probabilities, on which parameters do not act.
        sampling: The parameters.
        num_requests: B.
        masked: Whether the bitmask applies to these rows.
    """
    if logits is None:
        assert probs is not None  # noqa: S101 - for the type checker
        return Rows(_plain(probs), is_logits=False)
    logits = _plain(logits)
    if sampling is None:
        return Rows(logits, is_logits=True)
    found: dict[str, Any] = {}
    for parameter in PARAMETERS:
        name = parameter.name
        value = getattr(sampling, name)
        if value is None:
            continue
        if isinstance(value, torch.Tensor):
            value = _plain(value)
            found[name] = (value.to(torch.float32) if value.dtype in parameter.narrowed else value).contiguous()
        elif value != parameter.off and not (name == "top_k" and value >= logits.shape[-1]):
            found[name] = cached_full(num_requests, value, parameter.number_dtype, logits.device)
            if name == "top_k":
                found["max_top_k"] = value
    if masked and sampling.allowed_token_bitmask is not None:
        found["bitmask"] = _plain(sampling.allowed_token_bitmask)
    bias = sampling.logit_bias
    if bias is not None:
        values = _plain(bias.values).contiguous()
        found |= {"bias_token_ids": bias.token_ids.contiguous(), "bias_values": values}
    return Rows(logits, is_logits=True, **found)
