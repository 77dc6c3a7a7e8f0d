"""What the drop-ins share."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

import acceptlib

create = functools.cache(acceptlib.create)
"""`acceptlib.create`, once a strategy: on a drop-in's first call, so that importing one loads no plugins."""


def as_rows(probs: torch.Tensor) -> torch.Tensor:
    """Return probabilities in a dtype that `verify` reads: float64, which it does not, as float32."""
    return probs.to(torch.float32) if probs.dtype == torch.float64 else probs


def unused_uniforms(num_requests: int, max_num_draft_tokens: int, device: torch.device) -> acceptlib.Uniforms:
    """Return numbers for a strategy that draws nothing, so that torch's default generator is left alone."""
    return acceptlib.Uniforms(
        accept=torch.zeros(num_requests, max_num_draft_tokens, dtype=torch.float64, device=device),
        emit=torch.zeros(num_requests, dtype=torch.int64, device=device),
    )


def request_streams(
    generators: Mapping[int, torch.Generator], num_requests: int, device: torch.device
) -> acceptlib.Rng:
    """Return one stream a request, at its first step, without waiting for the device.

    A request with a generator gets a seed that the generator draws, so its tokens depend on the generator's state alone
    and the next call's differ. The others' seeds come from torch's default generator.

    Args:
        generators: From the request's row in the batch to its generator, which is on `device`.
        num_requests: B.
        device: Where the streams are used.
    """
    rng = acceptlib.Rng.of(None, num_requests, device)
    for request, generator in generators.items():
        rng.seeds[request].random_(generator=generator)
    return rng
