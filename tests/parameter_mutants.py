"""Wrong engines in what they make of sampling parameters.

Imported for the list in `rule_mutants`, which they join.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from engine_mutants import Call, engine

from acceptlib import LogitBias, SamplingParams, VerifyResult


@engine("temperature")
def forgets_sampling(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Sampling parameters are left to the caller."""
    return verify(ids, **{**arguments, "sampling": None})


@engine("temperature")
def temperature_of_row_zero(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The first request's temperature is everybody's."""
    sampling = arguments.get("sampling")
    if sampling is not None and isinstance(sampling.temperature, torch.Tensor):
        first = sampling.temperature[:1].expand_as(sampling.temperature)
        arguments = {**arguments, "sampling": replace(sampling, temperature=first)}
    return verify(ids, **arguments)


@engine("temperature")
def one_temperature(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The draft's rows get the target's temperature, whatever they were sampled under."""
    return verify(ids, **{**arguments, "draft_sampling": None})


@engine("temperature")
def positive_temperature(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """A temperature below 0 is taken without its sign, and NaN for 1."""
    sampling = arguments.get("sampling")
    if sampling is not None and isinstance(sampling.temperature, torch.Tensor):
        temperature = sampling.temperature.abs().nan_to_num(1.0)
        arguments = {**arguments, "sampling": replace(sampling, temperature=temperature)}
    return verify(ids, **arguments)


def _replaced(arguments: dict[str, Any], **change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return arguments with some sampling parameters, where they are given, changed."""
    sampling = arguments.get("sampling")
    if sampling is None:
        return arguments
    given = {name: getattr(sampling, name) for name in change}
    changed = {name: change[name](value) for name, value in given.items() if value is not None}
    return {**arguments, "sampling": replace(sampling, **changed)}


@engine("filters")
def tensors_alone(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Parameters that are numbers are left out."""

    def tensor(value: Any) -> Any:
        return value if isinstance(value, torch.Tensor) else None

    return verify(ids, **_replaced(arguments, temperature=tensor, top_k=tensor, top_p=tensor, min_p=tensor))


@engine("filters")
def strict_filters_alone(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """A top-p of more than 0.4 and a min-p of less than 0.4 are taken for none."""

    def top_p(value: Any) -> Any:
        return torch.where(torch.as_tensor(value) > 0.4, 1.0, value)

    def min_p(value: Any) -> Any:
        return torch.where(torch.as_tensor(value) < 0.4, 0.0, value)

    return verify(ids, **_replaced(arguments, top_p=top_p, min_p=min_p))


@engine("filters")
def bias_that_bans_alone(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """A bias that is finite is left out."""

    def banning(bias: Any) -> Any:
        return replace(bias, values=bias.values.where(bias.values.isinf(), 0.0))

    return verify(ids, **_replaced(arguments, logit_bias=banning))


@engine("filters")
def forgets_filters(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Temperature is applied, and what else there is in sampling parameters is left to the caller."""
    sampling = arguments.get("sampling")
    if sampling is not None:
        arguments = {**arguments, "sampling": SamplingParams(temperature=sampling.temperature)}
    return verify(ids, **arguments)


@engine("filters")
def unmasked_bonus(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The grammar's mask is not laid on the bonus row."""
    sampling = arguments.get("sampling")
    if sampling is not None and sampling.allowed_token_bitmask is not None:
        mask, cu = sampling.allowed_token_bitmask.clone(), arguments.get("cu_num_draft_tokens")
        row = torch.arange(len(ids) if cu is None else len(cu) - 1)
        mask[(row, (ids >= 0).sum(1)) if cu is None else cu[1:] + row] = -1
        arguments = {**arguments, "sampling": replace(sampling, allowed_token_bitmask=mask)}
    return verify(ids, **arguments)


@engine("filters")
def one_mask_for_all(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The grammar's mask of a request's first row is laid on all of its rows."""

    def first(mask: torch.Tensor) -> torch.Tensor:
        return mask[:, :1].expand_as(mask).contiguous() if mask.ndim == 3 else mask

    return verify(ids, **_replaced(arguments, allowed_token_bitmask=first))


@engine("filters")
def mask_of_32(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Of a mask, the first word alone is read."""

    def word(mask: torch.Tensor) -> torch.Tensor:
        return torch.cat((mask[..., :1], torch.full_like(mask[..., 1:], -1)), -1)

    return verify(ids, **_replaced(arguments, allowed_token_bitmask=word))


@engine("filters")
def first_bias_alone(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Of several biases of a request, the first alone is added."""

    def first(bias: LogitBias) -> LogitBias:
        return LogitBias(bias.token_ids[:, :1].contiguous(), bias.values[:, :1].contiguous())

    return verify(ids, **_replaced(arguments, logit_bias=first))


@engine("filters")
def unfiltered_draft(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Of the draft's own parameters, the temperature alone is applied."""
    own = arguments.get("draft_sampling")
    if own is not None:
        arguments = {**arguments, "draft_sampling": SamplingParams(temperature=own.temperature)}
    return verify(ids, **arguments)


@engine("parameters_out_of_range")
def clamps_parameters(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """A parameter out of range is taken for the nearest one that makes sense, and NaN for none."""

    def within(low: float, high: float, off: float) -> Callable[[Any], Any]:
        return lambda value: value.nan_to_num(off).clamp(low, high) if isinstance(value, torch.Tensor) else value

    def top_k(value: Any) -> Any:
        return value.clamp(min=0) if isinstance(value, torch.Tensor) else value

    return verify(ids, **_replaced(arguments, top_k=top_k, top_p=within(1e-9, 1.0, 1.0), min_p=within(0.0, 1.0, 0.0)))
