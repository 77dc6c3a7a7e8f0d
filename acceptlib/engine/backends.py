"""Choice of the engine that runs a call. If the rows are on a GPU and it is not the fused one, a log says why."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final, Literal, NoReturn, TypeAlias, cast, get_args

import torch

from acceptlib.engine import torch_engine
from acceptlib.errors import BackendError, one_line, short_repr, suggest
from acceptlib.workspace import Workspace

if TYPE_CHECKING:
    from acceptlib.engine.plan import Plan
    from acceptlib.inputs import Inputs
    from acceptlib.result import VerifyResult

Choice: TypeAlias = Literal["auto", "torch", "triton"]

MIN_TRITON: Final = (3, 6)
"""The first version that the fused kernels run with."""

MAX_REASONS: Final = 64
"""Reasons that are remembered, so that each is logged once."""

LOGGER: Final = logging.getLogger("acceptlib")


@dataclass(frozen=True, slots=True)
class Backend:
    """A resolved engine.

    Attributes:
        name: `torch` or `triton`.
        verify: The engine.
    """

    name: str
    verify: Callable[[Plan, Inputs], VerifyResult]


_TORCH: Final = Backend("torch", torch_engine.verify)


@functools.cache
def _triton() -> Backend:
    return Backend("triton", _engine().verify)


def check(choice: str) -> Choice:
    """Return `choice` if it names a backend.

    Raises:
        BackendError: It does not.
    """
    known = get_args(Choice)
    if choice not in known:
        msg = f"Unknown backend {short_repr(choice)}.{suggest(choice, known)} Available: {', '.join(known)}."
        raise BackendError(msg)
    return cast("Choice", choice)


def resolve(choice: Choice, inputs: Inputs) -> Backend:
    """Return the engine for a call.

    Raises:
        BackendError: An explicit choice cannot run it; the message says why.
    """
    if choice == "torch":
        return _TORCH
    unavailable = triton_unavailable(inputs)
    if unavailable is None:
        return _triton()
    if choice == "triton":
        _refuse(inputs.device, unavailable)
    if inputs.device.type == "cuda":
        _say(unavailable)
    return _TORCH


@functools.lru_cache(maxsize=MAX_REASONS)
def _say(reason: str) -> None:
    LOGGER.warning("The torch engine runs a call whose rows are on a GPU: %s.", reason)


def workspace(
    choice: Choice, plan: Plan, num_requests: int, max_num_draft_tokens: int, vocab_size: int, device: torch.device
) -> Workspace:
    """Return memory for calls up to a size: see `AcceptanceStrategy.workspace`."""
    if choice == "torch" or _missing(device) is not None:
        return Workspace.allocate(0, 0, device)
    memory: Workspace = _engine().workspace(plan, num_requests, max_num_draft_tokens, vocab_size, device)
    return memory


def triton_unavailable(inputs: Inputs) -> str | None:
    """Return why the Triton engine cannot run a call, or None if it can."""
    return _missing(inputs.device) or _engine().unsupported(inputs)


def require(choice: Choice, device: torch.device) -> None:
    """Check that an explicit choice can run on a device.

    Raises:
        BackendError: It cannot; the message says why.
    """
    unavailable = _missing(device) if choice == "triton" else None
    if unavailable is not None:
        _refuse(device, unavailable)


def bind_rules(plan: Plan) -> None:
    """Turn a plan's rules into functions for the fused kernels, as a call on a GPU first does; nothing without Triton.

    Raises:
        StrategyDefinitionError: One cannot become such a function.
    """
    if _fault_of_triton() is None:
        from acceptlib.engine.triton.plans import bound  # noqa: PLC0415 - a CPU install has no triton

        bound(plan, torch.device("cpu"))


def _refuse(device: torch.device, unavailable: str) -> NoReturn:
    msg = f"backend='triton' cannot run on {device}: {unavailable}. Use backend='auto' or 'torch'."
    raise BackendError(msg)


def _missing(device: torch.device) -> str | None:
    """Return why the Triton engine can run no call at all on a device, or None."""
    # The interpreter, for tests, runs kernels on the CPU.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton runs on GPUs, and the rows are not on one"
    return _fault_of_triton()


@functools.cache
def _engine() -> ModuleType:
    from acceptlib.engine.triton import engine  # noqa: PLC0415 - a CPU install has no triton

    return engine


@functools.cache
def _fault_of_triton() -> str | None:
    """Return what is wrong with the installed Triton, or None: a torch that is not new brings one that is too old."""
    try:
        found = importlib.import_module("triton").__version__
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return "the package triton is not installed (pip install 'acceptlib[triton]')"
        return f"the package triton cannot be imported ({one_line(error)})"
    if tuple(map(int, found.split(".")[:2])) < MIN_TRITON:
        least = ".".join(map(str, MIN_TRITON))
        return f"the kernels need triton {least} or later, and {found} is installed, as torch requires it: update torch"
    return None
