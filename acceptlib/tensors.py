"""Which tensors a call takes: their dtypes, and the check of one."""

from __future__ import annotations

import torch

from acceptlib.errors import InputError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ID_DTYPES = (torch.int32, torch.int64)
STATE_DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)


def expect(
    name: str,
    value: torch.Tensor,
    shape: tuple[int | None, ...] | None,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check one tensor; None in `shape` stands for any length, and None as `shape` for any shape."""
    if (
        isinstance(value, torch.Tensor)
        and value.dtype in dtypes
        and value.device == device
        and (shape is None or value.shape == shape)
    ):
        return  # the rest says what is wrong
    if not isinstance(value, torch.Tensor):
        msg = f"{name}: expected a torch.Tensor, got {type(value).__name__}"
        raise InputError(msg)
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        msg = f"{name}: expected dtype {expected}, got {str(value.dtype).removeprefix('torch.')}"
        raise InputError(msg)
    if value.device != device:
        msg = f"{name}: expected device {device}, that of the target's rows, got {value.device}"
        raise InputError(msg)
    if shape is not None:
        fits = len(shape) == value.ndim and all(
            length is None or length == actual for length, actual in zip(shape, value.shape, strict=True)
        )
        if not fits:
            expected = ", ".join("any" if length is None else str(length) for length in shape)
            msg = f"{name}: expected shape [{expected}], got {list(value.shape)}"
            raise InputError(msg)
