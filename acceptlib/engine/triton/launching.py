"""Launches of compiled stages, in less time than Triton's own dispatch takes."""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from triton import knobs

from acceptlib.arrays import current_stream
from acceptlib.engine.triton.call import Call
from acceptlib.engine.triton.kernel import verify_kernel

DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
"""Whether this Triton launches stages by the private call below; newer versions are launched by the public one."""


class Key(NamedTuple):
    """The constants of `verify_kernel` that a stage is compiled for, in their order."""

    call: Call
    stage: str
    rows: int
    first: bool
    late: bool
    overlap: bool


class Launch(NamedTuple):
    """One launch of the kernel: its constants, its grid, warps, registers at most, and first position.

    `kernel` is its key in `KERNELS`: the constants, warps and registers in one tuple, made once for all calls.
    """

    key: Key
    grid: tuple[int, int, int]
    warps: int
    registers: int
    first_position: int
    kernel: tuple[Any, ...]


MAX_KERNELS = 4096
"""Kernels that are remembered. Others, and those of calls that are forgotten, Triton finds again, or compiles."""

KERNELS: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by what they are compiled for: None where interpreted."""


def launch_of(key: Key, grid: tuple[int, int, int], warps: int, registers: int, first_position: int) -> Launch:
    """Return a launch."""
    return Launch(key, grid, warps, registers, first_position, (*key, warps, registers))


def launch(launches: tuple[Launch, ...], tensors: tuple[torch.Tensor | None, ...], numbers: tuple[int, ...]) -> None:
    """Launch a call's stages on the current stream.

    Args:
        launches: The stages, in order.
        tensors: The kernel's arguments that are tensors, None for one that the call does not have.
        numbers: Those that are numbers, but for the first position.
    """
    kernels = [KERNELS.get(stage.kernel) for stage in launches]
    if not all(kernels):
        for stage in launches:
            dispatch(stage, tensors, numbers)
        return
    # Given a tensor, a launch would ask the driver whose memory it is.
    arguments = (*[None if tensor is None else tensor.data_ptr() for tensor in tensors], *numbers)
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if not DIRECT or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler's
        for (key, grid, _, _, first_position, _), kernel in zip(launches, kernels, strict=True):
            kernel[grid](*arguments, first_position, *key)
        return
    # The same, without gathering what hooks are told of a launch, which takes Python longer than the rest.
    stream = current_stream(tensors[0].device)
    for (key, grid, _, _, first_position, _), kernel in zip(launches, kernels, strict=True):
        kernel.run(
            *grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments, first_position, *key
        )


def dispatch(stage: Launch, tensors: tuple[torch.Tensor | None, ...], numbers: tuple[int, ...]) -> None:
    """Launch one stage through Triton's own dispatch, which compiles it, and takes several times as long."""
    key, grid, warps, registers, first_position, kernel = stage
    if len(KERNELS) >= MAX_KERNELS:
        KERNELS.clear()
    with np.errstate(all="ignore"):  # interpreted, NumPy would warn of what a GPU does without a word
        KERNELS[kernel] = verify_kernel[grid](
            # A null pointer has no type to compile for, so any tensor stands in.
            *(tensors[0] if tensor is None else tensor for tensor in tensors),
            *numbers,
            first_position,
            *key,
            num_warps=warps,
            # The weights' bits are part of the specification: a contracted a * b - c would change them.
            enable_fp_fusion=False,
            **({"launch_pdl": not key.first} if key.overlap else {}),
            **({"maxnreg": registers} if registers and torch.version.hip is None else {}),
        )
