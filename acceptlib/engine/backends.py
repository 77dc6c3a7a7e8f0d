"""Choice of the engine that runs a call, with the reason for it."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from acceptlib.engine import torch_engine
from acceptlib.errors import BackendError, shortened, suggest
from acceptlib.workspace import Workspace

if TYPE_CHECKING:
    import torch

    from acceptlib.engine.plan import Plan
    from acceptlib.inputs import Inputs
    from acceptlib.result import VerifyResult

Choice: TypeAlias = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class Backend:
    """A resolved engine.

    Attributes:
        name: `torch` or `triton`.
        reason: Why this one runs the call.
        verify: The engine.
    """

    name: str
    reason: str
    verify: Callable[[Plan, Inputs], VerifyResult]


@functools.cache
def _torch(reason: str) -> Backend:
    return Backend("torch", reason, torch_engine.verify)


@functools.cache
def _triton() -> Backend:
    return Backend("triton", "the rows are on a GPU and the fused kernels support the call", _engine().verify)


def check(choice: str) -> Choice:
    """Return `choice` if it names a backend.

    Raises:
        BackendError: It does not.
    """
    known = get_args(Choice)
    if choice not in known:
        msg = f"Unknown backend {shortened(choice)}.{suggest(choice, known)} Available: {', '.join(known)}."
        raise BackendError(msg)
    return cast("Choice", choice)


def resolve(choice: Choice, plan: Plan, inputs: Inputs) -> Backend:
    """Return the engine for a call.

    Raises:
        BackendError: An explicit choice cannot run it; the message says why.
    """
    if choice == "torch":
        return _torch("backend='torch' was asked for")
    unavailable = _triton_unavailable(plan, inputs)
    if unavailable is None:
        return _triton()
    if choice == "triton":
        msg = f"backend='triton' cannot run on {inputs.device}: {unavailable}. Use backend='auto' or 'torch'."
        raise BackendError(msg)
    return _torch(unavailable)


def workspace(
    choice: Choice, plan: Plan, num_requests: int, max_num_draft_tokens: int, vocab_size: int, device: torch.device
) -> Workspace:
    """Return memory for calls up to a size: see `AcceptanceStrategy.workspace`."""
    if choice == "torch" or _missing(device) is not None:
        return Workspace.allocate(0, 0, device)
    memory: Workspace = _engine().workspace(plan, num_requests, max_num_draft_tokens, vocab_size, device)
    return memory


def _triton_unavailable(plan: Plan, inputs: Inputs) -> str | None:
    """Return why the Triton engine cannot run a call, or None if it can."""
    return _missing(inputs.device) or _engine().unsupported(plan, inputs)


def _missing(device: torch.device) -> str | None:
    """Return what the Triton engine misses to run any call on a device, or None if nothing."""
    # The interpreter, for tests, runs kernels on the CPU.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton runs on GPUs, and the rows are not on one"
    if not _has_triton():
        return "the package triton is not installed (pip install acceptlib[triton])"
    return None


@functools.cache
def _engine() -> ModuleType:
    from acceptlib.engine.triton import engine  # noqa: PLC0415 - a CPU install has no triton

    return engine


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
