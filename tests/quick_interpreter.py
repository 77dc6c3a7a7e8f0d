"""Triton's interpreter without what it does again and again: the same results in a fraction of the time.

For each device function that a kernel calls it patches the language anew, which the launch has done; where a reduction
has a function of its own it calls that for every entry, which takes tensors as well; it computes sums, differences and
products of integers twice, for an assertion that it leaves out; and it makes a table of all dtypes to look one up, and
numbers of its own for the shape of every tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Have kernels of this process interpreted so."""
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter._get_np_dtype = _numpy_dtype
    tl.tensor.__init__ = _make_tensor
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


_patched: set[int] = set()


def _call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    """Run a device function; the modules of the language that functions of its module name are patched once."""
    names = id(function.fn.__globals__)
    if names not in _patched:
        _patched.add(names)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def _reduce(operation: interpreter.ReduceOps, tensors: tuple[Any, ...]) -> list[Any]:
    """Combine the halves of an axis, a power of two long, until one entry is left."""
    tensors, axis = operation.unravel(tensors, operation.axis)
    dtypes = [tensor.dtype for tensor in tensors]
    arrays = [tensor.handle.data for tensor in tensors]
    while (length := arrays[0].shape[axis]) > 1:
        halves = [half for part in zip(*(np.split(a, 2, axis) for a in arrays), strict=True) for half in part]
        found = operation.combine_fn.fn(*map(operation.to_tensor, halves, dtypes * 2))
        arrays = [tensor.handle.data for tensor in (found if isinstance(found, tuple) else (found,))]
        assert arrays[0].shape[axis] == length // 2
    if not operation.keep_dims:
        arrays = [array.squeeze(axis) for array in arrays]
    return [operation.to_tensor(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


_numpy_dtypes: dict[str, np.dtype[Any]] = {}
_look_up = interpreter._get_np_dtype


def _numpy_dtype(kind: tl.dtype) -> np.dtype[Any]:
    """Return what entries of a type are kept as."""
    if kind.name not in _numpy_dtypes:  # types of pointers have no hash
        _numpy_dtypes[kind.name] = _look_up(kind)
    return _numpy_dtypes[kind.name]


def _make_tensor(tensor: tl.tensor, handle: object, kind: tl.dtype) -> None:
    """Make a tensor of a type."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = _sizes_of(tuple(kind.shape) if kind.is_block() else ())


@functools.cache
def _sizes_of(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    """Return a shape and its number of entries, as tensors have them."""
    return tl.tuple([tl.constexpr(length) for length in shape]), tl.constexpr(math.prod(shape))
