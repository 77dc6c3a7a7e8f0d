"""NumPy views of tensors on the CPU, for arithmetic on a few numbers.

An operation on a handful of numbers takes NumPy a fifth of what it takes torch. Code that uses only what both share
runs on `Array` and serves every device; both wrap int64 alike.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import torch

Array: TypeAlias = Any
"""A NumPy array in place of a tensor on the CPU, or another device's tensor."""

MAX_CACHED: Final = 1024
"""Most things that `cached` holds."""

MAX_BYTES: Final = 32 << 20
"""Most bytes that `cached` holds, not counting the newest, which may be larger: a grid has some bytes per position."""

FEW_THREADS: Final = 4
"""Most torch threads beside which NumPy's single one is faster at log2, if it has wide instructions for it."""


def as_array(tensor: torch.Tensor) -> Array:
    """Return NumPy's array that shares the memory of a tensor on the CPU, or another device's tensor as it is."""
    return tensor.numpy() if tensor.is_cpu else tensor


def as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor that shares an array's memory; the inverse of `as_array`."""
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)


def library(array: Array) -> ModuleType:
    """Return the module, NumPy or torch, whose functions take an array."""
    return torch if isinstance(array, torch.Tensor) else np


def device_of(array: Array) -> torch.device | None:
    """Return the device of a tensor, None of NumPy's array."""
    return array.device if isinstance(array, torch.Tensor) else None


def float64(array: Array) -> Array:
    """Return an array of any dtype as float64."""
    return array.to(torch.float64) if isinstance(array, torch.Tensor) else array.astype(np.float64)


def full(shape: tuple[int, ...], value: float, like: Array) -> Array:
    """Return a new array filled with a number, float64 and of the same kind as `like`."""
    if isinstance(like, torch.Tensor):
        return torch.full(shape, value, dtype=torch.float64, device=like.device)
    return np.full(shape, value)


def arange(length: int, like: Array) -> Array:
    """Return 0..length-1, int64, of the same kind as `like`. It is shared: never write to it."""
    device = device_of(like)
    return cached(
        ("arange", length), device, lambda: torch.arange(length, device=device) if device else np.arange(length)
    )


def cached(key: Hashable, device: torch.device | None, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, made once for each key and never to be written, which saves time.

    On a GPU it is kept for each stream, so that no stream reads what another has yet to write. A CUDA graph and a
    compiled function make their own.

    Args:
        key: What is made.
        device: Of the tensors; None for arrays.
        make: Returns an array or a tensor, or several.
    """
    if torch.compiler.is_dynamo_compiling():
        return make()
    stream = None
    if device is not None and device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = current_stream(device)
    place = (key, device, stream)
    found = _CACHE.found.get(place)
    if found is None:
        # A tensor made in inference mode could not be used outside of it.
        with torch.inference_mode(False):  # noqa: FBT003 - a compiled caller takes it by position alone
            found = make()
        parts = found if isinstance(found, tuple) else (found,)
        if type(parts[0]) in {torch.Tensor, np.ndarray}:  # and not a fake one
            _CACHE.add(place, found, sum(int(part.nbytes) for part in parts))
    return found


class _Cache:
    """What `cached` holds, for all threads, and its size."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Any] = {}
        self.num_bytes = 0
        self.lock = threading.RLock()  # which a signal's handler may have already

    def add(self, place: Hashable, found: Any, num_bytes: int) -> None:
        """Hold one more, and let go of all others where they are too many."""
        with self.lock:
            if len(self.found) >= MAX_CACHED or self.num_bytes > MAX_BYTES:
                self.found.clear()
                self.num_bytes = 0
            if place not in self.found:  # another thread may have made it too
                self.num_bytes += num_bytes
            self.found[place] = found


_CACHE: Final = _Cache()


def current_stream(device: torch.device) -> int:
    """Return the handle of a GPU's current stream, without the object that torch makes for it.

    Making one takes the host microseconds. Triton and torch's own compiler ask for the handle too.
    """
    return torch._C._cuda_getCurrentRawStream(device.index)  # noqa: SLF001 - as they do


def all_so_far(condition: Array) -> Array:
    """Return where a condition [n, K] holds at an entry and at all entries before it in its row."""
    if isinstance(condition, torch.Tensor):
        return condition.cumprod(1) > 0
    return np.logical_and.accumulate(condition, 1)


def maybe_any(condition: Array) -> bool:
    """Return whether some entry is true; True where finding out would wait for the device."""
    return isinstance(condition, torch.Tensor) or bool(np.count_nonzero(condition))


def log2(numbers: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """Return base-2 logarithms, with `in_place` in the memory of the numbers; NumPy's, 2 ulps off, if quicker."""
    plain = numbers.is_cpu and numbers.dtype == torch.float32 and not numbers.requires_grad
    if plain and torch.get_num_threads() <= FEW_THREADS and _has_wide_logarithms():
        found = numbers if in_place else torch.empty_like(numbers)
        with np.errstate(all="ignore"):
            np.log2(numbers.numpy(), out=found.numpy())
        return found
    return numbers.log2_() if in_place else torch.log2(numbers)


@functools.cache
def _has_wide_logarithms() -> bool:
    """Return whether this processor has instructions that NumPy takes several logarithms at a time with."""
    try:
        from numpy.lib import introspect  # noqa: PLC0415 - NumPy has it from 2.1 on
    except ImportError:
        return False
    found = introspect.opt_func_info(func_name="^log2$", signature="float32")
    return not found["log2"]["ff"]["current"].startswith("baseline")
