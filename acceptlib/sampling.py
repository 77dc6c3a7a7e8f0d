"""Sampling parameters that verification applies to logits, per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from acceptlib.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a row of logits becomes the law that tokens are drawn from.

    Attributes:
        temperature: Divides the logits: one number, or [B] floating point, one a request. 0 makes the row one-hot at
            its argmax (lowest id among ties). None is 1. A negative or NaN entry of a tensor marks its request in
            `VerifyResult.status`; as a number it is an error here.
    """

    temperature: float | torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check numbers; tensors are checked by `verify`, which knows B."""
        if self.temperature is None or isinstance(self.temperature, torch.Tensor):
            return
        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature < float("inf"):
            msg = f"temperature: expected a finite number >= 0 (0 is greedy) or a tensor [B], got {self.temperature!r}"
            raise InputError(msg)
