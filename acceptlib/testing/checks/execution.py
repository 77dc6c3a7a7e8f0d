"""How a call runs: the same on every backend, without waiting for the device, inside a CUDA graph."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from acceptlib import engine
from acceptlib.engine import backends
from acceptlib.errors import BackendError, ConformanceError
from acceptlib.result import VerifyResult
from acceptlib.testing.batches import broken, lay_out, mixed, same
from acceptlib.testing.subject import Skipped, Subject, require

WAITING: Final = frozenset(
    {
        "_local_scalar_dense",
        "allclose",
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operations by the names under which a dispatch mode sees them: `.item()` and `if` are the first."""

READING: Final = frozenset({"tolist", "cpu"})
"""Ways to the host that wait for a GPU, but run no operation on the CPU, where they are looked for by name.

`numpy` is left out, because the torch engine itself takes that way on the CPU.
"""

ENGINE: Final = f"{engine.__name__}."
"""Modules that run on the CPU as they do, where a GPU has kernels."""

COUNT: Final = 5


def check_backends_agree(subject: Subject) -> None:
    """The torch and the Triton engine emit the same tokens from the same probabilities and streams.

    Catches kernels whose tokens depend on tiles, grids or contracted multiplications: sums in another order. Where no
    kernel can run, it catches rules that cannot become one.
    """
    torch_engine, triton_engine = subject.on_backend("torch"), subject.on_backend("triton")
    for vocab in (11, 150) if subject.device.type == "cpu" else (11, 150, 40_000):
        for count, layout, draft in ((5, "padded", True), (3, "ragged", True), (3, "ragged", False)):
            requests = mixed(count, vocab, first_key=vocab % 64)
            requests[0] = broken(requests[0])
            try:
                found = triton_engine.verify(requests, layout, draft=draft)
            except BackendError as error:
                on_cpu = subject.device.type == "cpu" and not triton_engine.interpreted
                if subject.strategy.plan is not None and subject.strategy.backend != "torch":
                    backends.bind_rules(subject.strategy.plan)
                msg = f"Triton needs a GPU, or TRITON_INTERPRET=1, and the device is {subject.device}"
                raise Skipped(msg if on_cpu else str(error)) from None
            wanted = torch_engine.verify(requests, layout, draft=draft)
            same(found, wanted, what=f"{layout}, V = {vocab}, triton and torch")


def check_no_host_synchronisation(subject: Subject) -> None:
    """Nothing waits for the device: no `.item()`, no shape that depends on values.

    Catches host synchronisation in the hot path, which costs an engine a pipeline bubble per step. On the CPU, the
    check looks for operations that would wait on a device, and for ways to the host like `.tolist()` that the strategy
    takes. The engine itself goes through NumPy there, so only a GPU shows what it does itself.
    """
    requests = mixed(COUNT)
    requests[2] = broken(requests[2])  # marking a request must not wait either
    for layout in ("padded", "ragged"):
        for draft in (True, False):
            arguments = {**subject.place(lay_out(requests, layout, draft=draft)), **subject.further(range(COUNT))}
            subject.strategy.verify(**arguments, rng=subject.streams(range(COUNT)))  # the first call may compile
            rng = subject.streams(range(COUNT))
            with waiting_is_an_error(subject.device):
                subject.strategy.verify(**arguments, rng=rng)


@contextlib.contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """Return a context in which waiting for the device is an error; on the CPU, so is a way to the host."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(_cuda_synchronisation_is_an_error())
        else:
            stack.enter_context(NoWaiting())  # type: ignore[no-untyped-call]
            stack.enter_context(NoReading())
        yield


@contextlib.contextmanager
def _cuda_synchronisation_is_an_error() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises on operations whose result the host must wait for, and on indexing with a mask, which hides one."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        name = func.overloadpacket.__name__
        if name in WAITING or (name == "repeat_interleave" and func._overloadname == "Tensor"):  # noqa: SLF001
            msg = f"{name} waits for the device"
            raise ConformanceError(msg)
        if name in {"index", "index_put", "index_put_", "_index_put_impl_"} and any(
            index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1]
        ):
            msg = f"{name} with a mask waits for the device"
            raise ConformanceError(msg)
        return func(*args, **(kwargs or {}))


class NoReading(TorchFunctionMode):
    """Raises on ways to the host that run no operation if a tensor is there already, unless the engine takes them."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        name = getattr(func, "__name__", "")
        given = (*args[1:], *(kwargs or {}).values())
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - a mode is not told who calls
        if caller.startswith(ENGINE):
            return func(*args, **(kwargs or {}))
        if name in READING or (name == "to" and any(isinstance(value, str) and value == "cpu" for value in given)):
            msg = f"{name} waits for the device"
            raise ConformanceError(msg)
        return func(*args, **(kwargs or {}))


def check_graph_capture(subject: Subject) -> None:
    """A call is captured in a CUDA graph, and replays go on with the streams and read new rows.

    Catches what an engine's decoding loop runs into: allocation or synchronisation while capturing, offsets that a
    replay does not advance, and inputs that were copied when captured.
    """
    if subject.device.type != "cuda":
        msg = f"CUDA graphs need a GPU, and the device is {subject.device}"
        raise Skipped(msg)
    keys = range(COUNT)
    steps = [mixed(COUNT, first_key=16 * step) for step in range(3)]
    for layout in ("padded", "ragged"):
        arguments = subject.place(lay_out(steps[0], layout))
        further = subject.further(keys)
        out = VerifyResult.empty(COUNT, 4, subject.device)
        side = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(subject.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                subject.strategy.verify(**arguments, **further, rng=subject.streams(keys), out=out)
        torch.cuda.current_stream(subject.device).wait_stream(side)
        rng, eager = subject.streams(keys), subject.streams(keys)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            subject.strategy.verify(**arguments, **further, rng=rng, out=out)
        for step, requests in enumerate(steps):
            fresh = subject.place(lay_out(requests, layout))
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    value.copy_(fresh[name])
            graph.replay()
            wanted = subject.call(keys, **fresh, rng=eager)
            same(out, wanted, what=f"{layout}, replay {step} and an eager call")
            advanced = torch.equal(rng.offsets, eager.offsets)
            require(advanced, f"{layout}: replay {step} left the offsets at {rng.offsets.tolist()}")
