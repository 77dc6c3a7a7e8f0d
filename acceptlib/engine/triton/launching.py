"""Launches of compiled stages, in less time than Triton's own dispatch takes."""

from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver

from acceptlib.engine.triton.call import Call
from acceptlib.engine.triton.kernel import verify_kernel

POINTERS = tuple(place for place, name in enumerate(verify_kernel.arg_names) if name.endswith("_ptr"))
"""Places of the kernel's arguments that are tensors, or None."""

DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
"""Whether compiled stages may be launched as this Triton's own launch does it, which later ones may do otherwise."""


class Key(NamedTuple):
    """What a stage is compiled for: the constants of `verify_kernel`, in their order."""

    call: Call
    stage: str
    rows: int
    first: bool
    late: bool
    overlap: bool


class Launch(NamedTuple):
    """One launch of the kernel: what it is compiled for, its grid, warps, registers at most, and first position."""

    key: Key
    grid: tuple[int, int, int]
    warps: int
    registers: int
    first_position: int


KERNELS: dict[Key, Any] = {}
"""What has been compiled, by what for: None where interpreted."""


def put_addresses(arguments: list[Any], launches: tuple[Launch, ...]) -> None:
    """Put addresses in the place of tensors, of which a launch would ask the driver whose memory they are.

    They stay as they are where something is yet to be compiled for them.
    """
    if all(KERNELS.get(stage.key) for stage in launches):
        for place in POINTERS:
            if arguments[place] is not None:
                arguments[place] = arguments[place].data_ptr()


def launch(
    key: Key,
    grid: tuple[int, int, int],
    warps: int,
    registers: int,
    arguments: tuple[Any, ...],
) -> None:
    """Launch one stage; the first time through Triton's own dispatch, which takes several times as long.

    Of `arguments`, None stands for a tensor that the call does not have. Once compiled, addresses do for tensors.
    """
    kernel = KERNELS.get(key)
    if kernel is not None:
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if not DIRECT or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler's
            kernel[grid](*arguments, *key)
        else:  # the same without what hooks would be told of the launch, which takes Python longer than the rest
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments, *key)
        return
    # A null pointer has no type to compile for, and none matters.
    KERNELS[key] = verify_kernel[grid](
        *(arguments[0] if argument is None else argument for argument in arguments),
        *key,
        num_warps=warps,
        # The weights' bits are part of the specification: a contracted a * b - c would change them.
        enable_fp_fusion=False,
        **({"launch_pdl": not key.first} if key.overlap else {}),
        **({"maxnreg": registers} if registers and torch.version.hip is None else {}),
    )
