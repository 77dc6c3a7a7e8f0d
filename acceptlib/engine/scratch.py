"""Memory that the torch engine reuses from call to call.

Rows are half a megabyte and more, and on the CPU fresh memory of that size costs more in page faults than the
arithmetic done in it. Other devices have caching allocators.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch.nn import functional

SCRATCH_BYTES: Final = 2 << 20
"""Size of one chunk of float32 rows on the CPU: a few of them fit into a core's cache."""


class _Buffers(threading.local):
    """Buffers of one thread, by name and dtype."""

    def __init__(self) -> None:
        self.flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.latest: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.users = 0


_BUFFERS: Final = _Buffers()


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Return a context of one call; a signal's handler or a caller's mode that verifies within it gets other memory."""
    _BUFFERS.users += 1
    try:
        yield
    finally:
        _BUFFERS.users -= 1


def scratch(name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor, whose memory the next one of the same name and dtype takes.

    Nothing that leaves the engine may share it.
    """
    if device.type != "cpu" or _BUFFERS.users > 1:
        return torch.empty(shape, dtype=dtype, device=device)
    latest = _BUFFERS.latest.get((name, dtype))
    if latest is not None and latest.shape == shape:
        return latest
    size = math.prod(shape)
    # A tensor made in inference mode could not be written outside of it.
    with torch.inference_mode(False):  # noqa: FBT003 - a compiled caller takes it by position alone
        flat = _BUFFERS.flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=dtype, device=device)  # whatever the default is
        latest = flat[:size].view(shape)
    if type(flat) is torch.Tensor:  # and not a fake one
        _BUFFERS.flat[name, dtype], _BUFFERS.latest[name, dtype] = flat, latest
    return latest


def to_fixed(values: torch.Tensor, scale: float, multiple: int = 1, *, in_place: bool = False) -> torch.Tensor:
    """Return `values` [n, V] float32 times `scale` as int64, truncated, in scratch memory.

    Rows are padded with zeros until their length is a multiple of `multiple`. With `in_place`, `values` themselves are
    scaled, which leaves more of the cache to what follows.
    """
    rows, length = values.shape
    scaled = values if in_place else scratch("scaled", values.shape, torch.float32, values.device)
    torch.mul(values, scale, out=scaled)
    fixed = scratch("fixed", (rows, -(-length // multiple) * multiple), torch.int64, values.device)
    if fixed.shape[1] == length:
        return fixed.copy_(scaled)
    fixed[:, length:] = 0
    fixed[:, :length] = scaled
    return fixed


def fours(terms: torch.Tensor) -> torch.Tensor:
    """Return sums of four neighbours of rows [n, V], (a + b) + (c + d), zeros behind the last, in scratch memory."""
    if missing := -terms.shape[1] % 4:
        terms = functional.pad(terms, (0, missing))
    for name in ("pairs", "fours"):
        out = scratch(name, (len(terms), terms.shape[1] // 2), torch.float32, terms.device)
        terms = torch.add(terms[:, ::2], terms[:, 1::2], out=out)
    return terms


def owns_memory(found: torch.Tensor, given: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a rule's result is a tensor of its own: none of the given rows, nor one number for all entries."""
    if found._is_view() or not found.is_contiguous():  # noqa: SLF001 - it has no public name
        return False
    return all(found.data_ptr() != rows.data_ptr() for rows in given.values())
