"""The memory of a call: the caller's, what is kept for calls of a thread on a stream, or a captured graph's own."""

from __future__ import annotations

import contextlib
import threading
from typing import TypeAlias

import torch

from acceptlib.arrays import current_stream
from acceptlib.errors import InputError
from acceptlib.inputs import Inputs
from acceptlib.workspace import Workspace

RESERVED_COUNTERS = 1 << 22
"""Counters of a GPU for captured calls, all zero, enough for 455 calls of 256 requests and 7 drafted tokens. Fresh ones
would be zeroed in every replay of a graph, by one more kernel."""

ALIGNMENT = 8
"""Bytes of a counter that is waited for."""

Place: TypeAlias = tuple[torch.device, int, int]
"""A device, a stream and a thread, whose calls run one after the other."""

MAX_KEPT = 128
"""Places that memory is kept for; the one that has had no call for longest is let go."""

_KEPT: dict[Place, Lent] = {}
"""What no call has at the time, by place."""

_RESERVED: dict[torch.device, torch.Tensor] = {}
_RESERVED_LOCK = threading.Lock()


class Lent:
    """Memory of one call, as a context: the workspace within it.

    What is kept for calls is out of their reach meanwhile. So a call within this one, of a signal's handler between two
    launches, gets memory of its own, and one that fails leaves its counts to nobody.
    """

    __slots__ = ("place", "sizes", "workspace")

    def __init__(self, workspace: Workspace, place: Place | None = None) -> None:
        """Hold memory, which is kept for a place when a call has ended well if one is given."""
        self.workspace, self.place = workspace, place
        self.sizes = (workspace.counters.numel(), workspace.words.numel())

    def __enter__(self) -> Workspace:
        """Return the workspace."""
        return self.workspace

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Keep what is kept; leave no counts of a call that failed in a caller's workspace."""
        if self.place is None:
            if failure is not None:
                clear(self.workspace.counters)
        elif failure is None:
            _KEPT[self.place] = self
            while len(_KEPT) > MAX_KEPT:
                _KEPT.pop([*_KEPT][0], None)  # noqa: RUF015 - other threads must not change it between two steps


def memory_for(inputs: Inputs, num_counters: int, num_words: int) -> Lent:
    """Return the caller's workspace if there is one, else memory for calls that run one after the other."""
    given, device, stream = inputs.workspace, inputs.device, 0
    if given is not None:
        found = (given.counters.numel(), given.words.numel(), given.words.device)
        if found[0] < num_counters or found[1] < num_words or found[2] != device:
            msg = (
                f"workspace: expected at least {num_counters} counters and {num_words} words on {device}, got "
                f"{found[0]} and {found[1]} on {found[2]}. Allocate it with the strategy's own `workspace`, for as "
                "many requests, drafted tokens and vocabulary entries as any call has. A ragged call may have no more "
                "ids than requests times drafted tokens, if its rows are filtered."
            )
            raise InputError(msg)
        if given.counters.data_ptr() % ALIGNMENT:
            msg = (
                f"workspace.counters: expected to begin at a multiple of {ALIGNMENT} bytes, for kernels read some of "
                f"them as int64, got an address that leaves {given.counters.data_ptr() % ALIGNMENT}. A part of a "
                "larger tensor begins at an even element."
            )
            raise InputError(msg)
        return Lent(given)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            # It belongs to the graph: no other call may find it.
            return Lent(_captured(num_counters, num_words, device))
        stream = current_stream(device)
    return _taken((device, stream, threading.get_ident()), num_counters, num_words)


def clear(counters: torch.Tensor) -> None:
    """Leave zeros where a call that failed may have counted; a captured one has run nothing.

    A device that has failed may fail again here, which must not hide why it did first.
    """
    with contextlib.suppress(RuntimeError), torch.inference_mode():  # where tensors made in it may be written too
        if not (counters.is_cuda and torch.cuda.is_current_stream_capturing()):
            counters.zero_()


def _taken(place: Place, num_counters: int, num_words: int) -> Lent:
    """Return what was kept for a place, which is kept no longer, or larger memory.

    What is too small is let go. No graph holds it, and whatever gets that memory next on the stream runs behind the
    calls that still use it.
    """
    kept = _KEPT.pop(place, None)
    sizes = (0, 0) if kept is None else kept.sizes
    if kept is not None and sizes[0] >= num_counters and sizes[1] >= num_words:
        return kept
    del kept  # so that there need not be room for both
    # Powers of two, so that this happens a few times.
    sizes = (max(sizes[0], 1 << (num_counters - 1).bit_length()), max(sizes[1], 1 << (num_words - 1).bit_length()))
    device = place[0]
    if device.type == "cuda":
        _reserve(device)
    return Lent(Workspace.allocate(*sizes, device), place)


def _reserve(device: torch.device) -> None:
    """Have counters for graphs, before one is captured."""
    if device not in _RESERVED:
        # Without a lock, which a handler of a signal would wait for; the first ones stay, for graphs may hold some.
        _RESERVED.setdefault(device, Workspace.allocate(RESERVED_COUNTERS, 0, device).counters)


def _captured(num_counters: int, num_words: int, device: torch.device) -> Workspace:
    """Return memory for one captured call, with reserved counters while there are enough."""
    with _RESERVED_LOCK:
        counters = _RESERVED.get(device)
        if counters is not None and len(counters) >= num_counters:
            _RESERVED[device] = counters[num_counters:]
    if counters is None or len(counters) < num_counters:
        return Workspace.allocate(num_counters, num_words, device)
    return Workspace(counters=counters[:num_counters], words=torch.empty(num_words, dtype=torch.int64, device=device))
