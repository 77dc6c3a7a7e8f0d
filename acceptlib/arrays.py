"""NumPy views of tensors on the CPU, for arithmetic on a few numbers.

An operation on a handful of numbers takes NumPy a third of what it takes torch. Code that uses only what both share
runs on `Words` and serves every device; both wrap int64 alike.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Words: TypeAlias = Any
"""A tensor, or a NumPy array of a tensor on the CPU."""


def as_words(tensor: torch.Tensor) -> Words:
    """Return an array that shares the memory of a tensor on the CPU, or another device's tensor as it is."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def as_tensor(words: Words) -> torch.Tensor:
    """Return what `as_words` was made of, or a tensor of a new array."""
    return words if isinstance(words, torch.Tensor) else torch.from_numpy(words)
