"""Rows, masks and parameters that several test files about sampling parameters share."""

from __future__ import annotations

from typing import Any

import support
import torch

from acceptlib import SamplingParams

VOCAB = 200


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return standard normal numbers."""
    return torch.randn(*shape, generator=support.generator(seed))


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """Return bools [..., V] as xgrammar packs them: bit v % 32 of word v // 32."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (padded.to(torch.int64) << torch.arange(32)).sum(-1)
    return words.to(torch.int32)


def params(temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def named(values: tuple[float, int, float, float]) -> dict[str, Any]:
    return dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
