"""Choice of the engine that runs a call, with the reason for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from acceptlib.engine import torch_engine
from acceptlib.errors import BackendError, suggest

if TYPE_CHECKING:
    import torch

    from acceptlib.engine.plan import Plan
    from acceptlib.inputs import Inputs, VerifyResult

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


def check(choice: str) -> Choice:
    """Return `choice` if it names a backend.

    Raises:
        BackendError: It does not.
    """
    if choice not in get_args(Choice):
        msg = (
            f"Unknown backend {choice!r}.{suggest(choice, get_args(Choice))} Available: {', '.join(get_args(Choice))}."
        )
        raise BackendError(msg)
    return cast("Choice", choice)


def resolve(choice: Choice, device: torch.device) -> Backend:
    """Return the engine for a call on `device`.

    Raises:
        BackendError: An explicit choice cannot run; the message says why.
    """
    unavailable = "this version has no fused Triton kernels yet; its rules run in torch on every device"
    if choice == "triton":
        msg = f"backend='triton' cannot run on {device}: {unavailable}. Use backend='auto' or 'torch'."
        raise BackendError(msg)
    reason = "backend='torch' was asked for" if choice == "torch" else unavailable
    return Backend("torch", reason, torch_engine.verify)
