"""Which tensors a call takes: their dtypes, the check of one, and one in the place of a number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import torch

from acceptlib.arrays import cached
from acceptlib.errors import InputError, kind_of

FLOAT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
ID_DTYPES: Final = (torch.int32, torch.int64)
STATE_DTYPES: Final = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)


def cached_full(length: int, value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor [length] of one number, never to be written: see `arrays.cached`."""
    key = ("full", length, value, dtype)
    found: torch.Tensor = cached(key, device, lambda: torch.full((length,), value, dtype=dtype, device=device))
    return found


def as_device(device: str | torch.device) -> torch.device:
    """Return a device, which must exist.

    Raises:
        InputError: There is none of that name.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
        msg = f"device {str(device)!r}: {str(error).splitlines()[0]}"
        raise InputError(msg) from None
    return found


@contextlib.contextmanager
def made_on_cpu() -> Iterator[None]:
    """Return a context, or a decorator, in which tensors are made on the CPU, whatever torch's default device is."""
    # Asked of a tensor: torch 2.6 cannot say once a default was set back. Its mode costs every operation some time.
    there = torch.empty(0).device.type == "cpu"
    with contextlib.nullcontext() if there else torch.device("cpu"):
        yield


def expect_tensor(
    name: str,
    value: torch.Tensor,
    shape: tuple[int | str, ...] | None,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check one tensor.

    Args:
        name: Of the argument, with which messages begin.
        value: What was given for it.
        shape: Lengths of its dimensions, a name for any length; None for any shape.
        dtypes: Those that it may have.
        device: Where it has to be.

    Raises:
        InputError: It is something else; the message says what was expected and what came.
    """
    if (
        isinstance(value, torch.Tensor)
        and not value.is_nested
        and value.layout is torch.strided
        and value.dtype in dtypes
        and value.device == device
        and (shape is None or value.shape == shape or _fits(value.shape, shape))
    ):
        return  # the rest says what is wrong
    if not isinstance(value, torch.Tensor) or value.is_nested:
        msg = f"{name}: expected a torch.Tensor, got {kind_of(value)}"
        raise InputError(msg)
    if value.layout is not torch.strided:
        msg = f"{name}: expected a dense tensor, got {str(value.layout).removeprefix('torch.')}; pass `.to_dense()`"
        raise InputError(msg)
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(value.dtype).removeprefix("torch.")
        alike = [dtype for dtype in dtypes if _kind(dtype) == _kind(value.dtype)]  # what it becomes without losing much
        doubt = "" if alike else ", unless two arguments were swapped"
        msg = f"{name}: expected dtype {expected}, got {got}; pass `.to({(alike or dtypes)[0]})`{doubt}"
        raise InputError(msg)
    if value.device != device:
        msg = f"{name}: expected device {device}, that of the rows, got {value.device}"
        raise InputError(msg)
    assert shape is not None  # noqa: S101 - for the type checker
    expected = ", ".join(map(str, shape))
    msg = f"{name}: expected shape [{expected}], got {list(value.shape)}"
    raise InputError(msg)


def _kind(dtype: torch.dtype) -> str:
    """Return what sort of number a dtype holds."""
    kinds = {"bool": dtype == torch.bool, "float": dtype.is_floating_point, "complex": dtype.is_complex}
    return next((kind for kind, holds in kinds.items() if holds), "int")


def _fits(shape: torch.Size, expected: tuple[int | str, ...]) -> bool:
    """Return whether a shape is the expected one, in which a name stands for any length."""
    return len(shape) == len(expected) and all(
        isinstance(length, str) or length == actual for length, actual in zip(expected, shape, strict=True)
    )
