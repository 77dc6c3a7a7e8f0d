"""Device memory that a caller lends to `verify`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from acceptlib.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workspace:
    """Memory for data that passes between the fused kernels; `AcceptanceStrategy.workspace` allocates it.

    Calls that share a workspace must run one after the other. Without one, calls share memory that is kept for their
    thread and stream, and a captured call gets memory that belongs to its graph.

    Attributes:
        counters: [n] int32, contiguous, at a multiple of 8 bytes, zero before and after every call.
        words: [m] int64, contiguous, on the same device; the content means nothing between calls.

    Raises:
        InputError: A tensor has another dtype or shape, or is on another device.
    """

    counters: torch.Tensor
    words: torch.Tensor

    def __post_init__(self) -> None:
        """Check what kernels would write to without looking."""
        for name, tensor, dtype in (("counters", self.counters, torch.int32), ("words", self.words, torch.int64)):
            fits = isinstance(tensor, torch.Tensor) and tensor.ndim == 1 and tensor.is_contiguous()
            if not fits or tensor.dtype != dtype or tensor.device != self.counters.device:
                expected = f"a contiguous {str(dtype).removeprefix('torch.')} tensor [n] on one device"
                got = type(tensor).__name__
                if isinstance(tensor, torch.Tensor):
                    got = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} of strides "
                    got += f"{list(tensor.stride())} on {tensor.device}"
                msg = f"workspace.{name}: expected {expected}, got {got}. The strategy's own `workspace` allocates one."
                raise InputError(msg)

    @classmethod
    def allocate(cls, num_counters: int, num_words: int, device: torch.device | str) -> Workspace:
        """Allocate a workspace of a given size."""
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):  # noqa: FBT003 - a compiled caller takes it by position alone
            return cls(
                counters=torch.zeros(num_counters, dtype=torch.int32, device=device),
                words=torch.empty(num_words, dtype=torch.int64, device=device),
            )
