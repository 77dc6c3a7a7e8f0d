"""Device memory that a caller lends to `verify`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Memory in which the fused kernels keep what passes between them; `AcceptanceStrategy.workspace` allocates it.

    Calls that share one must run one after the other. Without one, calls share what is kept for their stream, and a
    call that is captured gets memory of its graph's own.

    Attributes:
        counters: int32, zero before and after every call.
        words: int64, whose content means nothing between calls.
    """

    counters: torch.Tensor
    words: torch.Tensor

    @classmethod
    def allocate(cls, num_counters: int, num_words: int, device: torch.device | str) -> Workspace:
        """Allocate one of a given size."""
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):  # noqa: FBT003 - a compiled caller takes it by position alone
            return cls(
                counters=torch.zeros(num_counters, dtype=torch.int32, device=device),
                words=torch.empty(num_words, dtype=torch.int64, device=device),
            )
