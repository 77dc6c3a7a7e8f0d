"""The memory of a call: the caller's, what is kept for calls of a thread on a stream, or a captured graph's own."""

import contextlib
import functools
import threading

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


def memory_for(inputs: Inputs, num_counters: int, num_words: int) -> Workspace:
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
        return given
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            # It belongs to the graph: no other call may find it.
            return _captured(num_counters, num_words, device)
        stream = current_stream(device)
    return _scratch(device, stream, num_counters, num_words)


def clear(counters: torch.Tensor) -> None:
    """Leave zeros where a call that failed may have counted; a captured one has run nothing.

    A device that has failed may fail again here, which must not hide why it did first.
    """
    with contextlib.suppress(RuntimeError), torch.inference_mode():  # where tensors made in it may be written too
        if not (counters.is_cuda and torch.cuda.is_current_stream_capturing()):
            counters.zero_()


class _Kept:
    """Memory for calls that run one after the other.

    Where they come to need more, what is too small is let go. No graph holds it, and whatever gets that memory next on
    the stream runs behind the calls that still use it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._have(0, 0)

    def _have(self, num_counters: int, num_words: int) -> None:
        self.workspace = Workspace.allocate(num_counters, num_words, self.device)
        self.num_counters, self.num_words = num_counters, num_words

    def grow(self, num_counters: int, num_words: int) -> None:
        """Have at least so many counters and words, rounded up to powers of two so that this happens a few times."""
        needed = [1 << (number - 1).bit_length() for number in (num_counters, num_words)]
        sizes = max(self.num_counters, needed[0]), max(self.num_words, needed[1])
        self._have(0, 0)  # so that there need not be room for both
        self._have(*sizes)


def _scratch(device: torch.device, stream: int, num_counters: int, num_words: int) -> Workspace:
    """Return memory for this thread's calls on one stream."""
    kept = _kept(device, stream, threading.get_ident())
    if num_counters > kept.num_counters or num_words > kept.num_words:
        kept.grow(num_counters, num_words)
    return kept.workspace


@functools.lru_cache
def _kept(device: torch.device, stream: int, thread: int) -> _Kept:
    """Return what is kept for a thread's calls on one stream; the first one on a GPU reserves counters for graphs."""
    del stream, thread
    if device.type == "cuda":
        with _RESERVED_LOCK:
            if device not in _RESERVED:
                _RESERVED[device] = Workspace.allocate(RESERVED_COUNTERS, 0, device).counters
    return _Kept(device)


_RESERVED: dict[torch.device, torch.Tensor] = {}
_RESERVED_LOCK = threading.Lock()


def _captured(num_counters: int, num_words: int, device: torch.device) -> Workspace:
    """Return memory for one captured call, with reserved counters while there are enough."""
    with _RESERVED_LOCK:
        counters = _RESERVED.get(device, torch.empty(0))
        if len(counters) < num_counters:
            return Workspace.allocate(num_counters, num_words, device)
        _RESERVED[device] = counters[num_counters:]
    return Workspace(counters=counters[:num_counters], words=torch.empty(num_words, dtype=torch.int64, device=device))
